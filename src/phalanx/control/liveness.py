"""Who is alive, and who speaks for whom. An aggregator keeps a `Liveness` of its nodes and reports edges. The
controller keeps a `Roster`, which records the aggregator that reaches each node, and a `Liveness` of its own for the
nodes whose aggregator is gone."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.control.policy import MISSED_BEATS

SLACK = 2  # a node is dead after this many times its longest gap, if that is longer than three beats
SEEN, SUSPECT, CLEAR, DEAD = "seen", "suspect", "clear", "dead"
GONE = "gone"  # its connection ended, and it did not come back at once
NO_LIMIT_NS = 1 << 62

Item = dict[str, Any]


@dataclass(slots=True)
class Seen:
    incarnation: int
    visit: int
    last_ns: int
    gap_ns: int  # the longest gap between its beats; it decays slowly
    suspect: bool = False
    lease_ns: int = 0  # its lease may last until then at most


@dataclass(frozen=True, slots=True)
class Edge:
    node: str
    incarnation: int
    visit: int  # the number of its connection, of all that it ever made
    edge: str

    def to_item(self) -> Item:
        return {"type": "edge", **{name: getattr(self, name) for name in self.__slots__}}


class Liveness:
    """Find nodes that are silent for too long: three beats, or longer where gaps are longer. A beat costs O(1): a
    node's deadline is looked at only when it has passed, and put off if there were beats since."""

    def __init__(self, beat_ns: int):
        self.beat_ns = beat_ns
        self.nodes: dict[str, Seen] = {}
        self._deadlines: list[tuple[int, str, int]] = []  # a heap: when to look, at whom

    def beat(self, node: str, incarnation: int, visit: int, now_ns: int) -> Iterator[Edge]:
        seen = self.nodes.get(node)
        if seen is None or seen.incarnation != incarnation:
            seen = self.expect(node, incarnation, now_ns)
        gap = max(0, now_ns - seen.last_ns)  # it may have been given time beyond now
        seen.gap_ns = max(gap, seen.gap_ns - (seen.gap_ns - gap) // 16)
        seen.last_ns = now_ns
        if seen.visit != visit:
            seen.visit, seen.suspect, seen.lease_ns = visit, False, 0
            yield Edge(node, incarnation, visit, SEEN)
        elif seen.suspect:
            seen.suspect = False
            yield Edge(node, incarnation, visit, CLEAR)

    def expect(self, node: str, incarnation: int, now_ns: int) -> Seen:
        """Expect a node to be there: its silence begins now."""
        seen = self.nodes[node] = Seen(incarnation, 0, now_ns, self.beat_ns)
        heapq.heappush(self._deadlines, (self._due(seen), node, incarnation))
        return seen

    def forget(self, node: str) -> None:
        self.nodes.pop(node, None)

    def all(self, lease_ns: int) -> list[Edge]:
        """Return an edge for each node that was heard of, as if it were seen for the first time. They are for a
        controller that has not heard from this aggregator for a while, and whose last lease to it ended at
        `lease_ns`."""
        heard = [(name, seen) for name, seen in self.nodes.items() if seen.visit]
        for _, seen in heard:
            seen.lease_ns = min(seen.lease_ns, lease_ns)
        return [Edge(name, s.incarnation, s.visit, SEEN) for name, s in heard]

    def confirm(self, item: Item) -> str:
        """Note that the controller has acknowledged an edge. Return the node if that entitles it to leases: had it been
        given up before, it would have been told so by now."""
        seen = self.nodes.get(item["node"])
        if item["edge"] != SEEN or not seen or (seen.incarnation, seen.visit) != (item["incarnation"], item["visit"]):
            return ""
        seen.lease_ns = NO_LIMIT_NS
        return str(item["node"])

    def lease(self, node: str, lease_ns: int) -> int:
        """Return until when a node may train, if the controller listens here until `lease_ns`. A node that is back
        after a silence may have been given up, so it gets no lease until the controller has heard that it is back."""
        return min(lease_ns, self.nodes[node].lease_ns)

    def tick(self, now_ns: int) -> Iterator[Edge]:
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, node, incarnation = heapq.heappop(self._deadlines)
            seen = self.nodes.get(node)
            if seen is None or seen.incarnation != incarnation:
                continue
            if self._due(seen) <= now_ns:
                edge = DEAD if seen.suspect else SUSPECT
                yield Edge(node, incarnation, seen.visit, edge)
                if edge == DEAD:
                    del self.nodes[node]
                    continue
                seen.suspect = True
            heapq.heappush(self._deadlines, (self._due(seen), node, incarnation))

    def _due(self, seen: Seen) -> int:
        limit = max(MISSED_BEATS * self.beat_ns, SLACK * seen.gap_ns)
        return seen.last_ns + (limit if seen.suspect else limit // 2)


def event_of(item: Item) -> Item | None:
    """Convert an item to an event for the gang; None: it only reports where a node is. A connection that ended proves
    nothing: the node may be alive behind a broken network."""
    if item["type"] != "edge":
        return dict(item["event"])
    kind = {SUSPECT: "NodeSuspect", CLEAR: "NodeClear", DEAD: "NodeDead", GONE: "NodeDead"}.get(item["edge"])
    event = {"kind": kind, "node": item["node"], "incarnation": item["incarnation"]}
    return (event | {"proof": ""} if kind == "NodeDead" else event) if kind else None


class Roster:
    """Which aggregator speaks for a node, and which of an agent's messages were heard. All of it can be rebuilt from
    what `take` let through."""

    def __init__(self, state: dict[str, Any] | None = None):
        self._nodes: dict[str, list[Any]] = dict(state or {})  # name -> incarnation, visit, aggregator, number
        self.aggregators = {known[2] for known in self._nodes.values()} - {""}  # that nodes speak to, or did

    def take(self, aggregator: str, body: Item) -> bool:
        """Return whether an item is news: an edge from the aggregator that a node speaks to, or an event not heard
        before."""
        if body["type"] == "many":
            if not all(isinstance(one, list) and [*map(type, one)] == [str, int, int] for one in body["said"]):
                raise ValueError(f"many.said = {str(body['said'])[:200]}: expected names, incarnations and numbers")
            return any([self._hear(*one) for one in body["said"]])  # noqa: C419 (each is heard)
        if body["type"] == "event":
            return self._hear(body["node"], body["incarnation"], body["number"])
        known = self._known(body["node"], body["incarnation"])
        if known is None:
            return False
        if body["edge"] == SEEN:
            if body["visit"] < known[1] or (body["visit"] == known[1] and known[2]):
                return False
            known[1:3] = body["visit"], aggregator
            self.aggregators.add(aggregator)
        elif known[2] != aggregator:
            return False  # it is silent there, and speaks elsewhere
        elif body["edge"] in (DEAD, GONE):
            known[2] = ""
        return True

    def _known(self, node: str, incarnation: int) -> list[Any] | None:
        """Return what is known of a node's incarnation; None: a later incarnation is known."""
        known = self._nodes.get(node)
        if known is None or incarnation > known[0]:
            known = self._nodes[node] = [incarnation, 0, "", 0]
        return known if incarnation == known[0] else None

    def _hear(self, node: str, incarnation: int, number: int) -> bool:
        known = self._known(node, incarnation)
        if known is None or number <= known[3]:
            return False
        known[3] = number
        return True

    def homes(self, nodes: Iterable[str]) -> dict[str, list[str]]:
        """Group nodes by the aggregator that reaches them. Nodes that none reaches are left out."""
        homes: dict[str, list[str]] = {}
        known = self._nodes
        for node in nodes:
            home = known[node][2] if node in known else ""
            if home in homes:
                homes[home].append(node)
            else:
                homes[home] = [node]
        homes.pop("", None)
        return homes

    def home(self, node: str) -> str:
        return self._nodes[node][2] if node in self._nodes else ""

    def expected(self, aggregator: str) -> dict[str, int]:
        """Return the nodes that speak to an aggregator, with their incarnations."""
        return {node: known[0] for node, known in self._nodes.items() if known[2] == aggregator}

    def to_dict(self) -> dict[str, Any]:
        return self._nodes


class Orphans:
    """Nodes whose aggregator is gone. They soon speak to another one, or are dead."""

    def __init__(self, roster: Roster, beat_ns: int):
        self._roster, self._liveness = roster, Liveness(beat_ns)
        self._of: dict[str, str] = {}  # node -> the aggregator that it had

    def lose(self, aggregator: str, now_ns: int) -> None:
        for node, incarnation in self._roster.expected(aggregator).items():
            self._of[node] = aggregator
            self._liveness.expect(node, incarnation, now_ns)

    def find(self, aggregator: str) -> None:
        """Drop the nodes of an aggregator that is back: it looks after them itself."""
        for node in [node for node, lost in self._of.items() if lost == aggregator]:
            del self._of[node]
            self._liveness.forget(node)

    def tick(self, now_ns: int) -> list[tuple[str, Item]]:
        """Return what the lost aggregators would have reported by now."""
        for node in [node for node, lost in self._of.items() if self._roster.home(node) != lost]:
            del self._of[node]
            self._liveness.forget(node)
        return [(self._of[edge.node], edge.to_item()) for edge in self._liveness.tick(now_ns) if edge.node in self._of]
