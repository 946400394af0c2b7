"""How a controller folds entries of the journal into the state of the gang and of the roster. The same code makes the
state in operation, after a restart, and in the simulation."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

from phalanx.control import codec, messages
from phalanx.control.gang import Gang
from phalanx.control.liveness import SEEN, Item, Roster, event_of
from phalanx.control.messages import Command, Event
from phalanx.control.policy import Policy
from phalanx.core.errors import UserError
from phalanx.core.layout import Layout

FROM_USERS = (messages.Drain, messages.Scale, messages.Stop, messages.Trace)
MOST_TRACED = (16, 100)  # ranks, steps
FROM_REPLICAS = (messages.Formed, messages.Parted)
FROM_NODES = (messages.Built, messages.Parked)  # their equal reports are merged
FROM_AGENTS = (
    messages.NodeJoined, messages.WorkersUp, messages.WorkerDied, messages.ServiceDied, messages.Built,
    messages.Parked, messages.Formed, messages.Parted, messages.Missing, messages.Standing, messages.Held,
    messages.StepsDone, messages.Written, messages.Unwritten, messages.Durable, messages.Cost, messages.DeviceWarning,
    messages.LinkLost, messages.LinkBack,
)  # fmt: skip
PASSING = ("DeviceWarning", "LinkLost", "LinkBack", "Cost", "ServiceDied", "StepsDone")  # nobody waits for these


def form() -> str:
    """Describe the form of entries and states. If it differs, another release wrote them, and this one may read them
    wrongly or not at all."""
    return codec.describe(Plan, Gang, *(kind for kind in messages.KINDS.values() if issubclass(kind, Event)))


class Poison(Exception):
    """The state machine raised on an entry. Its state can no longer be trusted; fold again without that entry."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters that a gang begins with."""

    layout: Layout
    steps: int
    start: int  # the step that the run begins from
    generation: int  # in which that was made
    policy: Policy
    homes: tuple[str, ...] = ()  # nodes, in the order of the places that they are to fill


@dataclass
class State:
    gang: Gang
    plan: Any  # as JSON
    roster: Roster = field(default_factory=Roster)
    time_ns: int = 0  # of the last entry
    aside: int = 0  # entries that were set aside
    refused: str = ""  # the last event that an agent should not have sent

    @staticmethod
    def of(plan: Plan) -> State:
        gang = Gang.of(plan.layout, plan.steps, plan.policy, plan.start, plan.generation, plan.homes)
        return State(gang, codec.encode(plan))

    def take(self, kind: str, body: Item, time_ns: int) -> tuple[Item, list[Command]]:
        """Apply an entry. Return the news in it, and the commands that follow. Nothing else changes the state."""
        self.time_ns = max(self.time_ns, time_ns)
        if kind == "plan":
            self.check(body["plan"])
            return body, []
        if kind == "aside":
            self._set_aside(body.get("body", {}), time_ns)
            return body, []
        if kind == "event":
            return body, self._apply(time_ns, Event.from_dict(body["event"]))
        news, out = [], list[Command]()
        for item in body["items"]:
            try:
                taken = self.roster.take(body["from"], item)
                event = self._event(item) if taken else None
            except ValueError as error:
                self.refused = f"{item.get('node', body['from'])}: {error}"
                continue
            if taken:
                news.append(item)
            if event:
                out += self._apply(time_ns, event)
        return {**body, "items": news}, out

    def _set_aside(self, said: Item, time_ns: int) -> None:
        """Set aside an entry that the gang raised on. The state of the nodes that it is about is unknown, so they start
        anew; a timer fires a little later. The entry need not be sent again."""
        self.aside += 1
        for item in said.get("items", ()):
            with contextlib.suppress(ValueError):
                self.roster.take(said["from"], item)
        for fence in fences(said):
            self.gang.disown(time_ns, fence.node, fence.incarnation)
        if timer := said.get("event", {}).get("timer"):
            self.gang.put_off(time_ns, timer)

    def _apply(self, time_ns: int, event: Event) -> list[Command]:
        try:
            return self.gang.apply(time_ns, event)
        except Exception as error:
            raise Poison(f"{type(event).__name__}: {error!r}") from error

    def _event(self, item: Item) -> Event | None:
        if item["type"] == "edge" and item["edge"] == SEEN:
            gang, name = self.gang, item["node"]
            node = gang.members.nodes.get(name)
            if node is None or not (node.dead or name in gang.staff.suspects or gang.phase == "ended"):
                return None
            # A node that was given up is fenced; one that has not heard of the run's end hears of it.
            return messages.NodeClear(name, item["incarnation"])
        found = event_of(item)
        event = Event.from_dict(found) if found else None
        if item["type"] == "event":
            _check_agent(item, event)
        elif item["type"] == "many" and isinstance(event, FROM_NODES):
            speakers = {(name, incarnation) for name, incarnation, _ in item["said"]}
            if not speakers.issuperset(zip(event.nodes, event.incarnations, strict=True)):
                raise ValueError(f"{type(event).__name__}.nodes has one that has not said it")
        elif item["type"] == "many" and not isinstance(event, FROM_REPLICAS):
            raise ValueError(f"{type(event).__name__} is nothing that many say alike")
        if isinstance(event, FROM_REPLICAS):
            self._check_replicas(item, event)
        return event

    def _check_replicas(self, item: Item, event: messages.Formed | messages.Parted) -> None:
        """Check that a node speaks only for replicas that have ranks on it. (A report about an earlier world is no
        news.)"""
        speakers = {said[0] for said in item["said"]} if item["type"] == "many" else {item["node"]}
        replicas = self.gang.worlds.replicas
        for number, world in zip(event.replicas, event.worlds, strict=True):
            found = replicas.get(number)
            if found and found.world == world and speakers.isdisjoint(found.nodes):
                raise ValueError(f"{type(event).__name__}.replicas has {number}, which is on other nodes")

    def check(self, plan: Any) -> None:
        if plan != self.plan:
            raise UserError("gang.json is not what the journal began with", remedy="begin in a new folder")

    def check_user(self, event: Event) -> None:
        """Raise ValueError if no user may ask for this event."""
        if isinstance(event, messages.NodeDead) and event.proof:
            return
        if not isinstance(event, FROM_USERS):
            raise ValueError(
                f"{type(event).__name__} is nothing that can be asked for; Drain, Scale, Stop and Trace are"
            )
        if isinstance(event, messages.Drain):
            node = self.gang.members.nodes.get(event.node)
            if node is None or (node.dead and not event.off):
                raise ValueError(f"Drain.node = {event.node!r}: there is no such node, or it is dead")
        if isinstance(event, messages.Scale):
            least, most = self.gang.policy.min_replicas, self.gang.changes.most
            if not least <= event.replicas <= most:
                raise ValueError(f"Scale.replicas = {event.replicas}: expected {least} to {most}")

        if isinstance(event, messages.Trace):
            ranks, steps = MOST_TRACED
            if not event.first < event.last <= event.first + steps:
                raise ValueError(f"Trace.last = {event.last}: expected {event.first + 1} to {event.first + steps}")
            world = self.gang.members.replica_size * self.gang.changes.most
            if not 0 < len(event.ranks) <= ranks or not all(0 <= rank < world for rank in event.ranks):
                raise ValueError(f"Trace.ranks = {list(event.ranks)[:20]}: expected 1 to {ranks} below {world}")

    def to_bytes(self) -> bytes:
        parts = {"plan": self.plan, "roster": self.roster.to_dict(), "time_ns": self.time_ns, "aside": self.aside}
        return json.dumps({**parts, "gang": self.gang.to_bytes().decode()}).encode()

    @staticmethod
    def from_bytes(data: bytes) -> State:
        said = json.loads(data)
        gang, roster = Gang.from_bytes(said["gang"].encode()), Roster(said["roster"])
        return State(gang, said["plan"], roster, said["time_ns"], said["aside"])


def fences(said: Item) -> list[messages.Fence]:
    """List the nodes that start anew when an entry is set aside, since somebody may be waiting for what they
    reported."""
    about = [said.get("event", {})]
    for item in said.get("items", ()):
        if item.get("event", {}).get("kind") in PASSING:
            continue
        names = item["said"] if item["type"] == "many" else [(item["node"], item["incarnation"])]
        about += [{"node": node, "incarnation": incarnation} for node, incarnation, *_ in names]
    return [messages.Fence(one["node"], one["incarnation"]) for one in about if "incarnation" in one]


def _check_agent(item: Item, event: Event | None) -> None:
    """Check that an agent speaks only for itself."""
    if not isinstance(event, FROM_AGENTS):
        raise ValueError(f"{type(event).__name__} is no event of an agent")
    told = [getattr(event, "node", item["node"]), getattr(event, "incarnation", item["incarnation"])]
    if isinstance(event, FROM_NODES):
        told = [*event.nodes, *event.incarnations]
    if told != [item["node"], item["incarnation"]]:
        raise ValueError(f"{type(event).__name__} is about another node")
