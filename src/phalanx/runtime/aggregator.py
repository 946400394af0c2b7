"""The aggregator: a process between about a hundred agents and the controller. Heartbeats end here: the aggregator
keeps which nodes are alive, and how far they are, as soft state, and passes on only edges. It passes on what agents
post, and acknowledges it once the controller has; commands go the other way. It renews a lease from the controller by
pings. With every beat it passes on what is left of that lease, once the controller has acknowledged the node.

The controller's cost per step does not grow with the fleet: the controller says when the next ping is due, and only one
aggregator tells it which steps are done.

The aggregator may be killed at any time. Agents connect again, to it or to another, and repeat what was not
acknowledged. The controller says which nodes it expects there, so a node that died meanwhile is noticed. A message that
arrives twice, by two routes, has the same agent and number, and `control.liveness.Roster`, the controller's end of
this, takes it once.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from phalanx.control.liveness import DEAD, GONE, SEEN, SUSPECT, Edge, Liveness
from phalanx.control.messages import EVERYONE
from phalanx.gate.hub import Hub, Item
from phalanx.observe import fold_form
from phalanx.observe.fold import block_of
from phalanx.runtime import inventory
from phalanx.runtime.gathering import FIRST_S, Gatherer, limit_s
from phalanx.runtime.reports import Folder
from phalanx.runtime.secret import NAME, Identity, Secret
from phalanx.runtime.spawner import SLOTS
from phalanx.runtime.transport import Link, Loop, Server, Session, in_parts, key_of
from phalanx.runtime.wire import Message, Schemas, WireError, check

if TYPE_CHECKING:
    from phalanx.observe.near import NearTables  # it needs numpy, and few aggregators need it

BEAT_S = 5.0
TICK_S = 0.1
PING_S = 1.0  # between the pings that renew the lease, unless the controller says otherwise
STALL_S = 1.0  # between two ticks: beyond that, this process stood still, not the nodes
JOINS_S = 0.5  # for which joins are gathered at most: nodes take seconds to start, so they can wait
RETRY_S = 0.1  # after a report could not be posted
#: Reports that are not held back to be gathered: failures, but not the rounds of a start.
URGENT = (SUSPECT, DEAD, GONE, "NodeDead", "ServiceDied", "WorkerDied", "LinkLost", "DeviceWarning")
#: Events that all replicas, or all nodes of one, report at once, and the fields that hold columns.
MERGED = {
    **dict.fromkeys(("Formed", "Parted"), ("replicas", "worlds")),
    **dict.fromkeys(("Built", "Parked"), ("nodes", "incarnations", "workers")),
}

#: From an agent: beats are told, the first of them at once, and events posted. `visit` is its link's. `said`: for the
#: run's record. From one that would join (its incarnation is 0): which code it runs, and what it has.
REPORTS: Schemas = {
    "beat": {"visit": int, "sent_ns": int, "generation": int, "step": int, "counter": int, "step_ns": int},
    "event": {"event": dict},
    "said": {"upto": int, "items": list},
    "join": {"life": str, "version": str, "about": dict},
    "store": {"items": list},  # of `gate.hub`, told both ways
}
_NUMBERED = {"life": str, "n": int, "node": str}  # by its process
_WORKER = {**_NUMBERED, "rank": int, "worker": int, "service": str}
#: What a node says for the record, beside folds (`observe.fold_form`).
SAID: Schemas = {
    "started": {**_WORKER, "pid": int},
    "exit": {**_WORKER, "signal": (str, type(None)), "code": (int, type(None))},
    "hang": {**_WORKER, "reason": str, "progress": dict, "final": bool},
    "message": {**_WORKER, "body": dict},
    "log": {**_NUMBERED, "file": str, "text": str},
    "booted": {**_NUMBERED, "incarnation": int},
    "released": {**_NUMBERED},
    "left": {**_NUMBERED, "reason": str},
}
#: To an agent. `lease`: how long it may train after it sent the beat that this answers.
COMMANDS: Schemas = {
    "command": {"command": dict},
    "lease": {"ns": int, "sent_ns": int},
    "recorded": {"upto": int},
    "store": {"items": list},
}
#: To a node that wants to join. `final`: it need not ask again.
WELCOME: Schemas = {"serve": {"incarnation": int, "spec": dict}, "refused": {"reason": str, "final": bool}}
#: To the controller: reports are posted; pings (the furthest step here), joins and what groups meet by are told.
PASSED: Schemas = {
    "joins": {"items": list},
    "store": {"items": list},
    "reports": {"items": list},
    "ping": {"sent_ns": int, "generation": int, "step": int},
}
ITEMS: Schemas = {
    "edge": {"node": str, "incarnation": int, "visit": int, "edge": str},
    "event": {"node": str, "incarnation": int, "number": int, "event": dict},
    "many": {"said": list, "event": dict},  # what replicas said alike; by whom: node, incarnation and number
}
#: From the controller. `commands`: for many nodes. `expect`: the nodes that should be here, name -> incarnation, and
#: how much longer than usual they may be silent. `lease`: counted from when the ping that it answers was sent, with
#: when the next ping is due and whether to report finished steps. `spec`: what agents are to serve, where the record is
#: kept, and the number of ranks. `admitted`: answers to joins.
ORDERS: Schemas = {
    "commands": {"items": list},
    "expect": {"nodes": dict, "grace_ns": int},
    "lease": {"ns": int, "sent_ns": int, "again_ns": int, "speaks": bool},
    "spec": {"spec": dict, "recorder": list, "ranks": int},
    "admitted": {"items": list},
    "store": {"items": list},
}
#: `nodes`: ["*"] means all that are here. `own`: what some of them are told in addition.
_ORDER: Schemas = {"command": {"nodes": list, "command": dict, "own": dict}}

Report = tuple[Message, Session | None]  # who waits for an answer


class Sending:
    """Sends the items of a hub downwards: one message per receiver and turn of the loop, if one can hold them."""

    def __init__(self, loop: Loop, session_of: Callable[[str], Session | None]):
        self._loop, self._session_of = loop, session_of
        self._items: dict[str, list[Item]] = {}

    def add(self, name: str, item: Item) -> None:
        if not self._items:
            self._loop.after(0.0, self._send)
        self._items.setdefault(name, []).append(item)

    def _send(self) -> None:
        items, self._items = self._items, {}
        for name, said in items.items():
            if session := self._session_of(name):
                in_parts(partial(tell_store, session), said)


class Aggregator:
    """The aggregator. `controllers` lists addresses, one of which answers."""

    def __init__(
        self,
        loop: Loop,
        secret: Secret,
        me: Identity,
        controllers: list[tuple[str, int]],
        host: str = "127.0.0.1",
        port: int = 0,
        seed: int = 0,
        beat_s: float = BEAT_S,
        recorder: tuple[str, int] | None = None,  # a relay before the one that the controller names
        near: NearTables | None = None,  # where it keeps the step times of its ranks
        newest: Callable[[str], int | None] = lambda what: None,  # of meetings, as `gate.hub` asks
    ):
        self._recorder, self._near = recorder, near
        self.liveness = Liveness(round(beat_s * 1e9))
        self.beats: dict[str, Message] = {}  # the last beat of each node
        self._beat_s = beat_s
        self._lease_ns = 0  # until when the controller is known to listen
        self._ping_s, self._speaks = PING_S, True
        self._loop, self._closed = loop, False
        # Reports, and the agents who wait for an answer; nodes that would join; what is for the controller's hub.
        self._reports = Gatherer[Report](loop, self._limit_s, self._send_reports)
        self._joins = Gatherer[Message](loop, lambda: JOINS_S, self._send_joins)
        self._above = Gatherer[Item](loop, self._limit_s, self._send_above)
        self._coming: set[str] = set()  # nodes that were admitted and have not spoken yet
        self._asker = ""  # the node whose item the hub is handling
        self._steps = (0, -1)  # generation, step: the latest reported here
        # Number to the controller; the report, of which an agent is told when it is heard, or which was seen here.
        self._passed: deque[tuple[int, Report]] = deque()
        self._ticked_ns, self._stalled_ns = time.monotonic_ns(), 0
        self._spec: Message = {}  # what an agent is told to serve; its `version` is that of the code
        self._secret, self._me = secret, me
        self.folder = Folder(loop)
        self._below = Sending(loop, lambda name: self.server.sessions.get(name))
        self.hub = Hub(self._below.add, self._raise, newest)
        self.server = Server(
            loop, secret, me, REPORTS, self._reported, on_close=self._ended, host=host, port=port, roles=("agent",)
        )
        self.link = Link(
            loop,
            secret,
            me,
            controllers,
            ORDERS,
            self._ordered,
            on_open=self._found,
            on_ack=self._acked,
            seed=seed,
            retry_s=beat_s,  # a controller that is back must hear of the nodes before it takes them for dead
        )
        loop.after(TICK_S, self._tick)
        loop.after(0.0, self._ping)

    def close(self) -> None:
        self._closed = True
        self.server.close()
        self.link.close()
        if self.folder.upstream:
            self.folder.upstream.close()
        if self._near:
            self._near.close()

    def _limit_s(self) -> float:
        return limit_s(len(self.server.sessions) + len(self._coming))

    def _now_ns(self) -> int:
        """Read a clock that stops while this process stands still: beats may have arrived unread in that time."""
        return time.monotonic_ns() - self._stalled_ns

    def _reported(self, agent: Session, number: int, body: Message) -> None:
        node, incarnation = agent.peer.name, agent.peer.incarnation
        if (body["type"] == "join") != (incarnation == 0):
            raise WireError(f"{body['type']} from incarnation {incarnation}")
        if body["type"] == "join":
            self._join(agent, body)
        elif body["type"] == "said":
            upto = body["upto"]
            for item in body["items"]:
                check_said(item, node)
                if self._near and item["type"] == "step":
                    self._near.take(item)
            self.folder.take(node, body["items"], lambda: agent.tell({"type": "recorded", "upto": upto}))
        elif body["type"] == "beat":
            self.beats[node] = body
            self._coming.discard(node)
            self._post(self.liveness.beat(node, incarnation, body["visit"], self._now_ns()))
            self._lease(node)
        elif body["type"] == "store":
            self._asker = node
            for item in body["items"]:
                self.hub.take(node, item)
        else:
            about = {"node": node, "incarnation": incarnation, "number": number, "event": body["event"]}
            self._gather({"type": "event", **about}, agent)

    # -- joining

    def _join(self, agent: Session, body: Message) -> None:
        if not self._spec:
            return  # it asks again
        if not NAME.fullmatch(agent.peer.name):
            reason = f"its name {agent.peer.name!r} is none: give it one of letters, digits, '.', '_' and '-' by --name"
            agent.tell({"type": "refused", "reason": reason, "final": True})
            return
        ours, theirs = self._spec["version"], body["version"]
        if ours != theirs:
            reason = f"it runs phalanx {theirs}, and the controller runs {ours}: install the same code on both"
            agent.tell({"type": "refused", "reason": reason, "final": True})
            return
        inventory.check_about(body["about"])
        item = {"node": agent.peer.name, **{key: body[key] for key in ("life", "about")}}
        self._joins.add(object(), item)  # a node that asks again does not begin a round

    def _send_joins(self, items: list[Message]) -> None:
        in_parts(lambda part: self.link.tell({"type": "joins", "items": part}), items)

    def _admitted(self, items: list[Message]) -> None:
        for item in items:
            agent = self.server.sessions.get(key_of(Identity("agent", str(item.pop("node")), 0)))
            if agent and item.get("type") == "serve":
                self._coming.add(agent.peer.name)
                agent.tell({**item, "spec": self._spec})
            elif agent:
                agent.tell(item)

    def _learn(self, spec: Message, recorder: list[Any], ranks: int) -> None:
        self._spec, self.folder.block = spec, block_of(ranks)
        self._beat_s = float(spec.get("beat_s", self._beat_s))
        self.liveness.beat_ns = round(self._beat_s * 1e9)
        if (recorder or self._recorder) and not self.folder.upstream:
            at = [self._recorder or (str(recorder[0]), int(recorder[1]))]
            refuse = lambda session, number, body: None  # noqa: E731  (it says nothing)
            self.folder.upstream = Link(
                self._loop, self._secret, self._me, at, {}, refuse, on_ack=self.folder.acked, retry_s=PING_S
            )

    # -- liveness

    def _found(self, controller: Session) -> None:
        """Report all nodes again: the controller may have taken them for lost."""
        self._passed = deque(passed for passed in self._passed if passed[1][1])
        self._post(self.liveness.all(self._lease_ns))
        self._speaks = True
        self._say_ping()
        self.hub.resync()

    def _raise(self, item: Item) -> None:
        """Gather items for the controller: all ranks of a gang meet at once. A call is urgent: a rank waits for it."""
        self._above.add(self._asker, item, urgent=item[0] == "call")

    def _send_above(self, items: list[Item]) -> None:
        in_parts(partial(tell_store, self.link), items)

    def _ping(self) -> None:
        if not self._closed:
            self._loop.after(self._ping_s, self._ping)
            self._say_ping()

    def _say_ping(self) -> None:
        generation, step = max(((beat["generation"], beat["step"]) for beat in self.beats.values()), default=(0, 0))
        self.link.tell({"type": "ping", "sent_ns": time.monotonic_ns(), "generation": generation, "step": step})

    def _ended(self, agent: Session) -> None:
        """Handle a lost connection. A live agent is back before its next beat is due."""
        if not agent.peer.incarnation:
            self.server.forget(key_of(agent.peer))
            return
        self.hub.lose(agent.peer.name)
        seen = self.liveness.nodes.get(agent.peer.name)
        if seen and not self._closed:
            found = (agent.peer.name, agent.peer.incarnation, seen.visit)
            # In two steps: if this process stood still, it reads in between what arrived meanwhile.
            self._loop.after(self._beat_s, lambda: self._loop.after(2 * FIRST_S, partial(self._missed, *found)))

    def _missed(self, node: str, incarnation: int, visit: int) -> None:
        seen, session = self.liveness.nodes.get(node), self.server.sessions.get(node)
        if self._closed or (session and session.conn) or seen is None:
            return
        if (seen.incarnation, seen.visit) == (incarnation, visit):
            del self.liveness.nodes[node]
            self._post([Edge(node, incarnation, visit, GONE)])

    def _acked(self, number: int) -> None:
        while self._passed and self._passed[0][0] <= number:
            _, (item, agent) = self._passed.popleft()
            if agent:
                agent.ack(item["number"])
            elif node := self.liveness.confirm(item):
                self._lease(node)

    def _lease(self, node: str) -> None:
        """Answer the last beat of a node."""
        agent, left_ns = self.server.sessions.get(node), self.liveness.lease(node, self._lease_ns) - time.monotonic_ns()
        if agent and left_ns > 0:
            agent.tell({"type": "lease", "ns": left_ns, "sent_ns": self.beats[node]["sent_ns"]})

    def _ordered(self, controller: Session, number: int, body: Message) -> None:
        if body["type"] == "expect":
            for node, incarnation in body["nodes"].items():
                if not isinstance(incarnation, int):
                    raise WireError(f"expect.nodes[{node!r}] = {incarnation!r}: expected an incarnation")
                known = self.liveness.nodes.get(node)
                if known is None or known.incarnation < incarnation:
                    self.liveness.expect(node, incarnation, self._now_ns() + body["grace_ns"])
            return
        if body["type"] == "store":
            for item in body["items"]:
                self.hub.hear(item)
            return
        if body["type"] == "lease":
            self._lease_ns = max(self._lease_ns, body["sent_ns"] + body["ns"])
            self._ping_s, self._speaks = body["again_ns"] / 1e9, body["speaks"]
            return
        if body["type"] == "spec":
            self._learn(body["spec"], body["recorder"], body["ranks"])
            return
        if body["type"] == "admitted":
            self._admitted(body["items"])
            return
        for item in body["items"]:
            order, sessions = check(item, _ORDER), self.server.sessions
            for node in [*sessions] if tuple(order["nodes"]) == EVERYONE else order["nodes"]:
                if node in sessions and sessions[node].peer.incarnation:  # the others have moved, or have yet to join
                    command = {**order["command"], **order["own"].get(node, {})}
                    sessions[node].post({"type": "command", "command": command})

    def _post(self, edges: Iterable[Edge]) -> None:
        for e in edges:
            self._gather(e.to_item())
            if e.edge in (DEAD, GONE):
                self.beats.pop(e.node, None)
                self.server.forget(e.node)

    def _gather(self, item: Message, agent: Session | None = None) -> None:
        kind = item["event"].get("kind") if item["type"] == "event" else item["edge"]
        if agent and kind == "StepsDone" and self._is_known(item["event"]):
            self._reports.flush()  # send earlier reports first
            self._passed.append((self.link.outbox.last, (item, agent)))
            self._acked(self.link.outbox.acked)
            return
        self._reports.add(item["node"], (item, agent), urgent=kind in URGENT)

    def _is_known(self, event: Message) -> bool:
        """Return whether finished steps need not be passed on. All nodes report them, and the controller needs them
        once; only the first of a generation comes from every aggregator."""
        generation, step = event.get("generation"), event.get("step")
        if not isinstance(generation, int) or not isinstance(step, int):
            return False  # the controller refuses it
        known = (generation, step) <= self._steps or (generation == self._steps[0] and not self._speaks)
        self._steps = max((generation, step), self._steps)
        return known

    def _send_reports(self, bundle: list[Report]) -> None:
        try:
            self._post_reports(merged([item for item, _ in bundle]))
        except OverflowError:  # the controller has not acknowledged for very long
            self._give_back(bundle)
            return
        number = self.link.outbox.last
        self._passed += [(number, report) for report in bundle if report[1] or report[0]["edge"] == SEEN]

    def _post_reports(self, items: list[Message]) -> None:
        in_parts(lambda part: self.link.post({"type": "reports", "items": part}), items)

    def _give_back(self, bundle: list[Report]) -> None:
        """Make agents connect again and repeat everything that was not acknowledged. Keep only the last edge of each
        node."""
        for name in {agent.peer.name for _, agent in bundle if agent}:
            self.server.forget(name)
        edges = {item["node"]: (item, agent) for item, agent in bundle if agent is None}
        self._reports.put_back([*edges.values()], RETRY_S)

    def _tick(self) -> None:
        if self._closed:
            return
        now = time.monotonic_ns()
        if now - self._ticked_ns > STALL_S * 1e9:
            self._stalled_ns += now - self._ticked_ns
        self._ticked_ns = now
        self._post(self.liveness.tick(self._now_ns()))
        self._loop.after(TICK_S, self._tick)


def tell_store(end: Session | Link, items: list[Item]) -> None:
    end.tell({"type": "store", "items": items}, must=True)


def check_said(item: Any, node: str) -> None:
    """Raise WireError if an item for the record names another node or has no known form."""
    if not isinstance(item, dict) or item.get("node", node) != node:
        raise WireError(f"{node} speaks for another node")
    if "ranks" in item:
        try:
            fold_form.check(item, SLOTS)
        except ValueError as error:
            raise WireError(f"{node} says for the record: {error}") from None
    else:
        check(item, SAID)


def merged(items: list[Message]) -> list[Message]:
    """Merge equal reports into one: when a gang parts or forms, all replicas report it, and when a world is built or
    broken, all its nodes do. Each agent's numbers stay in order, or the controller would take the lower ones for
    repetitions."""
    out, alike = list[Message](), dict[str, int]()
    last: dict[str, int] = {}  # node -> the index of its last report in `out`
    for item in items:
        event = item.get("event", {})
        names = MERGED.get(str(event.get("kind")), ())
        if not names or not _has_columns(item, names):
            last[item["node"]] = len(out)
            out.append(item)
            continue
        said = [item["node"], item["incarnation"], item["number"]]
        key = json.dumps({name: value for name, value in event.items() if name not in names})
        at = alike.get(key, -1)
        if last.get(item["node"], 0) <= at:
            many = out[at]
            many["said"].append(said)
            for name in names:
                many["event"][name] += event[name]
        else:
            at = alike[key] = len(out)
            columns = {name: [*event[name]] for name in names}
            out.append({"type": "many", "said": [said], "event": {**event, **columns}})
        last[item["node"]] = at
    return out


def _has_columns(item: Message, names: tuple[str, ...]) -> bool:
    """Return whether a report can be merged. The controller refuses one that cannot, and must not refuse others too."""
    event = item["event"]
    columns: list[Any] = [event.get(name) for name in names]
    if not all(isinstance(column, list) for column in columns) or len({*map(len, columns)}) != 1:
        return False
    if "nodes" in names:  # it speaks for itself
        *told, workers = columns
        flat = isinstance(workers[0], list) and {*map(type, workers[0])} <= {int} if workers else False
        return flat and told == [[item["node"]], [item["incarnation"]]]
    return all({*map(type, column)} == {int} for column in columns)
