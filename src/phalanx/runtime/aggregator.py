"""The aggregator: a process between some hundred agents and the controller. Heartbeats end here: it keeps who is alive
and where it stands as soft state, and passes on edges and, now and then, a summary. What agents post it passes on as
it is, and acknowledges when the controller has; commands go the other way.

When a gang re-forms all nodes report at once. Such reports wait until those before them are acknowledged, and travel
as one: a controller that has much to do gets fewer and larger bundles, and failures overtake them.

It may be killed at any time. Agents connect again, to it or to another, and send again what was not acknowledged. The
controller says whom it expects there, so that a node that died meanwhile is missed. What came twice, by two ways, has
the same number of the same agent, and `Roster`, the controller's end of this, takes it once.
"""

from __future__ import annotations

import argparse
import heapq
import json
import ssl
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, compress
from pathlib import Path
from typing import Any

from phalanx.control import fanout
from phalanx.control.messages import Event, ManyParked, ManyReady, Parked, Ready
from phalanx.runtime.secret import Identity, Secret, load_secret
from phalanx.runtime.transport import Link, Loop, Server, Session
from phalanx.runtime.wire import Message, Schemas, WireError, check

BEAT_S = 5.0
MISSED = 3  # beats, before a node is dead; half of that, and it is suspect
SLACK = 2  # times the longest of its gaps, where that is longer
TICK_S = 0.25
STALL_S = 1.0  # between two ticks: beyond that it was not the nodes that were silent
SUMMARY_S = 5.0
BUNDLE_S = 0.002  # in which reports are gathered
BULK_S = 0.05  # in which those that all nodes make are, as long as more come
BUNDLE = 500  # reports
BULK = ("Parked", "Ready")  # what all nodes report at once
NAMED = 8  # nodes in a summary

GONE_S = 1.0  # after which an agent whose connection was ended, and that lives, is back

SEEN, SUSPECT, CLEAR, DEAD = "seen", "suspect", "clear", "dead"
GONE = "gone"  # its host has ended the connection, as hosts do for processes that end, and it did not come back

#: From an agent: beats are told, the first of them at once, and events posted. `visit` is its link's.
REPORTS: Schemas = {
    "beat": {"visit": int, "generation": int, "step": int, "counter": int, "step_ns": int},
    "event": {"event": dict},
}
#: To an agent.
COMMANDS: Schemas = {"command": {"command": dict}}
#: To the controller: reports are posted, summaries told.
PASSED: Schemas = {
    "reports": {"items": list},
    "summary": {"nodes": int, "suspect": int, "steps": list, "behind": list, "step_ns": list, "slowest": str},
}
ITEMS: Schemas = {
    "edge": {"node": str, "incarnation": int, "visit": int, "edge": str, "silent_ns": int},
    "event": {"node": str, "incarnation": int, "number": int, "event": dict},
    "many": {"numbers": list, "event": dict},  # a control.messages.Many, and its agents' numbers
}
#: From the controller: commands for many nodes, with what is different for `each`, or a Form as control.fanout shares
#: it; whom it expects there, name -> incarnation.
ORDERS: Schemas = {"commands": {"items": list}, "expect": {"nodes": dict}}
_ORDER: Schemas = {
    "command": {"nodes": list, "command": dict, "each": dict},
    "form": {"nodes": list, "places": list, "workers": list, "sources": dict, "command": dict},
}


@dataclass(slots=True)
class Seen:
    incarnation: int
    visit: int
    last_ns: int
    gap_ns: int  # the longest between its beats; it is forgotten slowly
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Edge:
    node: str
    incarnation: int
    visit: int  # which of its connections, of all that it ever made
    edge: str
    silent_ns: int


class Liveness:
    """Who is silent for too long: three beats, or longer where gaps are longer. Pure, and O(1) per beat: a node's
    deadline is looked at when it has passed, and put off if there were beats since."""

    def __init__(self, beat_ns: int):
        self.beat_ns = beat_ns
        self.nodes: dict[str, Seen] = {}
        self._deadlines: list[tuple[int, str, int]] = []  # a heap: when to look, at whom

    def beat(self, node: str, incarnation: int, visit: int, now_ns: int) -> Iterator[Edge]:
        seen = self.nodes.get(node)
        if seen is None or seen.incarnation != incarnation:
            seen = self.expect(node, incarnation, now_ns)
        gap = now_ns - seen.last_ns
        seen.gap_ns = max(gap, seen.gap_ns - (seen.gap_ns - gap) // 16)
        seen.last_ns = now_ns
        if seen.visit != visit:
            seen.visit, seen.suspect = visit, False
            yield Edge(node, incarnation, visit, SEEN, gap)
        elif seen.suspect:
            seen.suspect = False
            yield Edge(node, incarnation, visit, CLEAR, gap)

    def expect(self, node: str, incarnation: int, now_ns: int) -> Seen:
        """It should be there; its silence begins now."""
        seen = self.nodes[node] = Seen(incarnation, 0, now_ns, self.beat_ns)
        heapq.heappush(self._deadlines, (self._due(seen), node, incarnation))
        return seen

    def tick(self, now_ns: int) -> Iterator[Edge]:
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            _, node, incarnation = heapq.heappop(self._deadlines)
            seen = self.nodes.get(node)
            if seen is None or seen.incarnation != incarnation:
                continue
            if self._due(seen) <= now_ns:
                edge = DEAD if seen.suspect else SUSPECT
                yield Edge(node, incarnation, seen.visit, edge, now_ns - seen.last_ns)
                if edge == DEAD:
                    del self.nodes[node]
                    continue
                seen.suspect = True
            heapq.heappush(self._deadlines, (self._due(seen), node, incarnation))

    def _due(self, seen: Seen) -> int:
        limit = max(MISSED * self.beat_ns, SLACK * seen.gap_ns)
        return seen.last_ns + (limit if seen.suspect else limit // 2)


class Aggregator:
    """`controllers`: addresses, one of which answers."""

    def __init__(
        self,
        loop: Loop,
        secret: Secret,
        me: Identity,
        controllers: list[tuple[str, int]],
        host: str = "127.0.0.1",
        port: int = 0,
        tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None,  # as a server, as a client
        seed: int = 0,
        beat_s: float = BEAT_S,
    ):
        self.liveness = Liveness(round(beat_s * 1e9))
        self.beats: dict[str, Message] = {}  # the last of each node
        self._loop, self._closed = loop, False
        self._bundle: list[tuple[Message, Session | None]] = []  # reports, and the agents who wait for an answer
        self._bulk: list[dict[str, tuple[Message, Session | None]]] = []  # that can wait: a node's first, second …
        self._bulk_sent = 0  # the last such bundle that was not acknowledged
        self._bulk_since = 0.0  # when the first of them came
        self._steps = (0, -1)  # generation, step: the last that was passed on
        self._passed: deque[tuple[int, Session, int]] = deque()  # number to the controller, agent, its number
        self._ticked_ns, self._stalled_ns = time.monotonic_ns(), 0
        ours, theirs = tls or (None, None)
        self.server = Server(
            loop, secret, me, REPORTS, self._reported, on_close=self._ended, host=host, port=port, tls=ours
        )
        self.link = Link(
            loop, secret, me, controllers, ORDERS, self._ordered, on_ack=self._acked, tls=theirs, seed=seed
        )
        loop.after(TICK_S, self._tick)
        loop.after(SUMMARY_S, self._summarise)

    def close(self) -> None:
        self._closed = True
        self.server.close()
        self.link.close()

    def _now_ns(self) -> int:
        """Of a clock that stood still when this process did: beats may have come meanwhile, unread."""
        return time.monotonic_ns() - self._stalled_ns

    def _reported(self, agent: Session, number: int, body: Message) -> None:
        node, incarnation = agent.peer.name, agent.peer.incarnation
        if body["type"] == "beat":
            self.beats[node] = body
            self._post(self.liveness.beat(node, incarnation, body["visit"], self._now_ns()))
        else:
            about = {"node": node, "incarnation": incarnation, "number": number, "event": body["event"]}
            self._gather({"type": "event", **about}, agent)

    def _ended(self, agent: Session) -> None:
        seen = self.liveness.nodes.get(agent.peer.name)
        if seen and not self._closed:
            found = (agent.peer.name, agent.peer.incarnation, seen.visit)
            # In two steps: if this process stood still, what came meanwhile is read in between.
            self._loop.after(GONE_S, lambda: self._loop.after(2 * BUNDLE_S, partial(self._missed, *found)))

    def _missed(self, node: str, incarnation: int, visit: int) -> None:
        seen, session = self.liveness.nodes.get(node), self.server.sessions.get(node)
        if self._closed or (session and session.conn) or seen is None:
            return
        if (seen.incarnation, seen.visit) == (incarnation, visit):
            del self.liveness.nodes[node]
            self._post([Edge(node, incarnation, visit, GONE, self._now_ns() - seen.last_ns)])

    def _acked(self, number: int) -> None:
        while self._passed and self._passed[0][0] <= number:
            _, agent, theirs = self._passed.popleft()
            agent.ack(theirs)
        if self._bulk_sent and number >= self._bulk_sent:
            self._bulk_sent = 0
            self._send_idle(0)

    def _ordered(self, controller: Session, number: int, body: Message) -> None:
        if body["type"] == "expect":
            for node, incarnation in body["nodes"].items():
                if not isinstance(incarnation, int):
                    raise WireError(f"expect.nodes[{node!r}] = {incarnation!r}: expected an incarnation")
                known = self.liveness.nodes.get(node)
                if known is None or known.incarnation < incarnation:
                    self.liveness.expect(node, incarnation, self._now_ns())
            return
        for item in body["items"]:
            for node, command in _told(check(item, _ORDER)):
                if node in self.server.sessions:  # others have moved
                    self.server.sessions[node].post({"type": "command", "command": command})

    def _post(self, edges: Iterable[Edge]) -> None:
        for e in edges:
            self._gather({"type": "edge", **asdict(e)})
            if e.edge in (DEAD, GONE):
                self.beats.pop(e.node, None)
                self.server.forget(e.node)

    def _gather(self, item: Message, agent: Session | None = None) -> None:
        kind = item["event"].get("kind") if item["type"] == "event" else ""
        if kind in BULK:
            self._gather_bulk(item, agent)
            return
        if agent and kind == "StepsDone" and self._is_known(item["event"]):
            self._send_bulk()  # what it said before
            self._passed.append((self.link.outbox.last, agent, item["number"]))
            self._acked(self.link.outbox.acked)
            return
        if not self._bundle:
            self._loop.after(BUNDLE_S, self._send)
        if agent:
            self._bundle += [layer.pop(item["node"]) for layer in self._bulk if item["node"] in layer]  # not overtaken
        self._bundle.append((item, agent))
        if len(self._bundle) >= BUNDLE:
            self._send()

    def _is_known(self, event: Message) -> bool:
        """All nodes say which steps are done: it is passed on once."""
        generation, step = event.get("generation"), event.get("step")
        if not isinstance(generation, int) or not isinstance(step, int):
            return False  # the controller refuses it
        known, self._steps = (generation, step) <= self._steps, max((generation, step), self._steps)
        return known

    def _gather_bulk(self, item: Message, agent: Session | None) -> None:
        if not self._num_bulk():
            self._bulk_since = time.monotonic()
            self._loop.after(BUNDLE_S, partial(self._send_idle, 0))
        depth = 1 + max((i for i, layer in enumerate(self._bulk) if item["node"] in layer), default=-1)
        if depth == len(self._bulk):
            self._bulk.append({})
        self._bulk[depth][item["node"]] = (item, agent)
        if self._num_bulk() >= BUNDLE:
            self._send_bulk()

    def _num_bulk(self) -> int:
        return sum(map(len, self._bulk))

    def _send(self) -> None:
        bundle, self._bundle = self._bundle, []
        if bundle:
            self._pass([item for item, _ in bundle], bundle)

    def _send_idle(self, seen: int) -> None:
        """When no more come, or have come for long enough."""
        if self._num_bulk() > seen and time.monotonic() < self._bulk_since + BULK_S:
            self._loop.after(BUNDLE_S, partial(self._send_idle, self._num_bulk()))
        elif not self._bulk_sent:
            self._send_bulk()

    def _send_bulk(self) -> None:
        self._send()  # what an agent said before
        layers, self._bulk = [[*layer.values()] for layer in self._bulk], []
        if any(layers):
            items = [item for layer in layers for item in self._merged([item for item, _ in layer])]
            self._bulk_sent = self._pass(items, [*chain.from_iterable(layers)])

    def _pass(self, items: list[Message], bundle: list[tuple[Message, Session | None]]) -> int:
        number = self.link.post({"type": "reports", "items": items})
        self._passed += [(number, agent, item["number"]) for item, agent in bundle if agent]
        return number

    def _merged(self, items: list[Message]) -> list[Message]:
        """One of all that are alike; what is no event, or somebody else's, is left to the controller to refuse."""
        alike: dict[tuple[int, ...], list[tuple[Message, Parked | Ready]]] = {}
        others = []
        for item in items:
            try:
                event = Event.from_dict(item["event"])
            except ValueError:
                others.append(item)
                continue
            assert isinstance(event, (Parked, Ready))
            if (event.node, event.incarnation) != (item["node"], item["incarnation"]):
                others.append(item)
                continue
            common = (event.prepared, event.made) if isinstance(event, Parked) else ()
            alike.setdefault((event.generation, event.step, *common), []).append((item, event))
        return others + [self._many(group) if len(group) > 1 else group[0][0] for group in alike.values()]

    def _many(self, group: list[tuple[Message, Parked | Ready]]) -> Message:
        parked = [event for _, event in group if isinstance(event, Parked)]
        ready = [event for _, event in group if isinstance(event, Ready)]
        event = ManyParked.of(parked) if parked else ManyReady.of(ready)
        return {"type": "many", "numbers": [item["number"] for item, _ in group], "event": event.to_dict()}

    def _tick(self) -> None:
        if self._closed:
            return
        now = time.monotonic_ns()
        if now - self._ticked_ns > STALL_S * 1e9:
            self._stalled_ns += now - self._ticked_ns
        self._ticked_ns = now
        self._post(self.liveness.tick(self._now_ns()))
        self._loop.after(TICK_S, self._tick)

    def _summarise(self) -> None:
        if self._closed:
            return
        self._loop.after(SUMMARY_S, self._summarise)
        if self.beats:
            self.link.tell(summary(self.beats, sum(seen.suspect for seen in self.liveness.nodes.values())))


def summary(beats: dict[str, Message], suspect: int) -> Message:
    """Steps are [generation, step], of the last and the first node; times the median and the longest."""
    at = {node: [beat["generation"], beat["step"]] for node, beat in beats.items()}
    last, first = min(at.values()), max(at.values())
    behind = sorted(node for node, step in at.items() if step == last) if last < first else []
    times = {node: beat["step_ns"] for node, beat in beats.items()}
    slowest = max(times, key=times.__getitem__)
    return {
        "type": "summary",
        "nodes": len(beats),
        "suspect": suspect,
        "steps": [last, first],
        "behind": behind[:NAMED],
        "step_ns": [statistics.median_low(times.values()), times[slowest]],
        "slowest": slowest,
    }


def _told(order: Message) -> Iterator[tuple[str, Message]]:
    if order["type"] == "command":
        return ((node, {**order["command"], **order["each"].get(node, {})}) for node in order["nodes"])
    try:
        return iter([*fanout.parts(order)])
    except (KeyError, TypeError, ValueError):
        raise WireError(f"form = {str(order)[:200]!r}: expected what control.fanout makes") from None


def event_of(item: Message) -> Message | None:
    """What an item tells a gang, as an event; None: no more than where a node is."""
    if item["type"] != "edge":
        return dict(item["event"])
    kind = {SUSPECT: "NodeSuspect", CLEAR: "NodeClear", DEAD: "NodeDead", GONE: "NodeDead"}.get(item["edge"])
    event = {"kind": kind, "node": item["node"], "incarnation": item["incarnation"]}
    proof = "its host ended the connection, and it did not come back" if item["edge"] == GONE else ""
    return (event | {"proof": proof} if kind == "NodeDead" else event) if kind else None


class Roster:
    """The controller's end: which aggregator speaks for a node, and what of an agent has been heard. All of it can be
    folded again from what `take` let through."""

    def __init__(self, state: dict[str, Any] | None = None):
        self._nodes: dict[str, list[Any]] = dict(state or {})  # name -> incarnation, visit, aggregator, number

    def take(self, aggregator: str, body: Message) -> bool:
        """Whether it is news: an edge from the aggregator that a node speaks to, or an event not heard before. Of many,
        only those that are news are left in it."""
        if body["type"] == "many":
            return self._take_many(body)
        if body["type"] == "event":
            return self._hear(body["node"], body["incarnation"], body["number"])
        known = self._known(body["node"], body["incarnation"])
        if known is None:
            return False
        if body["edge"] == SEEN:
            if body["visit"] <= known[1]:
                return False
            known[1:3] = body["visit"], aggregator
        elif known[2] != aggregator:
            return False  # it is silent there, and speaks elsewhere
        elif body["edge"] in (DEAD, GONE):
            known[2] = ""
        return True

    def _known(self, node: str, incarnation: int) -> list[Any] | None:
        """None: a later incarnation is."""
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

    def _take_many(self, body: Message) -> bool:
        event, numbers = body["event"], body["numbers"]
        columns = {name: column for name, column in event.items() if isinstance(column, list)}
        said = [columns.get(name, []) for name in ("nodes", "incarnations")] + [numbers]
        if any(len(column) != len(numbers) for column in (*columns.values(), *said)):
            raise WireError(f"many.event = {str(event)[:200]!r}: expected columns of {len(numbers)}")
        if any({*map(type, column)} - {kind} for column, kind in zip(said, (str, int, int), strict=True)):
            raise WireError(f"many.event = {str(event)[:200]!r}: expected names, incarnations and numbers")
        news = [*map(self._hear, *said)]
        if not all(news):
            event.update({name: [*compress(column, news)] for name, column in columns.items()})
            body["numbers"] = [*compress(numbers, news)]
        return any(news)

    def homes(self, nodes: Iterable[str]) -> dict[str, list[str]]:
        """By the aggregator that reaches them; those that none does are left out."""
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

    def expected(self, aggregator: str) -> dict[str, int]:
        return {node: known[0] for node, known in self._nodes.items() if known[2] == aggregator}

    def to_dict(self) -> dict[str, Any]:
        return self._nodes


def main() -> None:
    """Prints its address, as JSON, and serves until it is killed."""
    parser = argparse.ArgumentParser(prog="python -m phalanx.runtime.aggregator")
    parser.add_argument("--secret", type=Path, required=True, help="the file with the cluster's secret")
    parser.add_argument("--name", required=True, help="the same through all restarts")
    parser.add_argument("--controller", nargs="+", required=True, metavar="HOST:PORT")
    parser.add_argument("--host", default="127.0.0.1", help="where it listens")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--beat-s", type=float, default=BEAT_S, help="between two heartbeats of an agent")
    args = parser.parse_args()
    controllers = [(host, int(port)) for host, _, port in (a.rpartition(":") for a in args.controller)]
    loop, me = Loop(), Identity("aggregator", args.name, time.time_ns())
    secret = load_secret(args.secret, create=False)
    seed = me.incarnation
    served = Aggregator(loop, secret, me, controllers, args.host, args.port, seed=seed, beat_s=args.beat_s)
    print(json.dumps(served.server.address), flush=True)
    while True:
        loop.turn()


if __name__ == "__main__":
    main()
