"""The messages of the control plane: the events that it hears and the commands that it sends.

A worker's number is never reused, so a late message about a worker that is gone is recognised. A node has a name and an
incarnation, which grows each time the node comes back. `step` counts the updates that a state has seen. A replica's
world and the gang's generation have numbers of their own, which only grow. Every command may arrive twice, or late: its
world, generation, worker or incarnation tells the receiver whether it still counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from phalanx.control import codec
from phalanx.core.errors import MOST_INT

M = TypeVar("M", bound="Message")
EVERYONE = ("*",)  # all nodes that are present


class Message:
    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **codec.encode(self)}

    @classmethod
    def from_dict(cls: type[M], body: Any) -> M:
        """Decode an event (on Event) or a command (on Command). ValueError names the field and its value."""
        base: Any = cls
        kinds = _kinds(base)
        kind: Any = kinds.get(body["kind"]) if isinstance(body, dict) and isinstance(body.get("kind"), str) else None
        if kind is None:
            raise ValueError(f"{cls.__name__} = {str(body)[:200]!r}: expected a kind of {', '.join(sorted(kinds))}")
        rest = dict(body)
        del rest["kind"]
        found: M = codec.decode(kind, rest, kind.__name__)
        for name, least in _least(kind):
            if rest[name] < least:
                raise ValueError(f"{kind.__name__}.{name} = {rest[name]}: expected no negative number")
            if rest[name] >= MOST_INT:
                raise ValueError(f"{kind.__name__}.{name} = {str(rest[name])[:30]}: expected less than {MOST_INT}")
        return found


@cache
def _kinds(base: Any) -> dict[str, Any]:
    return {name: kind for name, kind in KINDS.items() if issubclass(kind, base)}


@cache
def _least(kind: Any) -> list[tuple[str, int]]:
    """List the integer fields of a message with the least value that each may have."""
    named = [name for name, hint in codec.hints(kind).items() if hint is int]
    return [(name, -1 if name in ("step", "prepared", "rung", "rank") else 0) for name in named]


# -- events


class Event(Message):
    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """How a process ended, or why it could not continue."""

    kind: str = ""  # of its exception
    text: str = ""
    signal: str = ""
    code: int = 0
    hang: str = ""  # where it stood still
    phase: str = ""  # of its step
    step: int = -1
    tail: str = ""  # the end of its log

    @property
    def brief(self) -> str:
        if self.hang:
            return f"hangs: it {self.hang}"
        if self.kind:
            return f"raised {self.kind}: {self.text[:300]}"
        return self.text[:300] or (f"was killed by {self.signal}" if self.signal else f"exited with code {self.code}")


@dataclass(frozen=True, slots=True)
class NodeJoined(Event):
    """An agent announces itself: as a new incarnation, or because its addresses have changed. Repeated until
    Welcome."""

    node: str
    incarnation: int
    domain: str = ""  # of failure; its levels, from the top, are parted by dots
    address: str = ""  # where its workers can be reached; their ports come with WorkersUp
    memory: str = ""  # where its snapshots are served


@dataclass(frozen=True, slots=True)
class NodeSuspect(Event):
    """The node has been silent for longer than usual."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class NodeClear(Event):
    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class NodeDead(Event):
    """The node was declared dead. `proof`: how it is known that every process of this incarnation has ended. Without
    one there is only silence, and the node may still be training."""

    node: str
    incarnation: int
    proof: str = ""


@dataclass(frozen=True, slots=True)
class WorkersUp(Event):
    """Workers run, hold no state, and wait for a Build."""

    node: str
    incarnation: int
    workers: tuple[int, ...]
    ports: tuple[int, ...]  # where each gives its state to others

    def __post_init__(self) -> None:
        if len(self.ports) != len(self.workers):
            raise ValueError(f"WorkersUp.ports = {self.ports}: expected one for each of {self.workers}")


@dataclass(frozen=True, slots=True)
class WorkerDied(Event):
    node: str
    incarnation: int
    worker: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class ServiceDied(Event):
    """A store, data service or keeper of the node has died. Its agent restarts it."""

    node: str
    incarnation: int
    service: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class Built(Event):
    """Workers have joined the world of their replica and have an engine: it can take part. Equal reports of several
    nodes are merged into one."""

    nodes: tuple[str, ...]
    incarnations: tuple[int, ...]  # of those
    workers: tuple[tuple[int, ...], ...]  # on each of those
    world: int

    def __post_init__(self) -> None:
        _check_columns(self, "nodes", "incarnations", "workers")


@dataclass(frozen=True, slots=True)
class Parked(Event):
    """Workers have left `world` and all worlds before it, for good. Equal reports of several nodes are merged into
    one."""

    nodes: tuple[str, ...]
    incarnations: tuple[int, ...]  # of those
    workers: tuple[tuple[int, ...], ...]  # on each of those
    world: int
    step: int  # of the state that they hold; -1: none
    prepared: int  # the step that they have voted yes for and hold the gradients of, or `step`
    made: int  # the generation in which that was
    why: Failure | None = None  # the error that made them leave; None: they were told to

    def __post_init__(self) -> None:
        _check_columns(self, "nodes", "incarnations", "workers")
        if self.prepared - self.step not in (0, 1):
            raise ValueError(f"Parked.prepared = {self.prepared}: expected step, {self.step}, or the one after it")


@dataclass(frozen=True, slots=True)
class Formed(Event):
    """All ranks of these replicas are in the groups of `generation`, with the same state as their peers. The first rank
    of a replica speaks for it."""

    replicas: tuple[int, ...]
    worlds: tuple[int, ...]  # of those
    generation: int

    def __post_init__(self) -> None:
        _check_columns(self, "replicas", "worlds")


@dataclass(frozen=True, slots=True)
class Parted(Event):
    """All ranks of these replicas have left the groups of `generation`, and of all earlier ones, for good. Their worlds
    stand, and all ranks of a replica hold the same state."""

    replicas: tuple[int, ...]
    worlds: tuple[int, ...]  # of those
    generation: int
    step: int
    prepared: int
    made: int
    kept: bool = False  # they keep the gradients of their share of the step under way

    def __post_init__(self) -> None:
        _check_columns(self, "replicas", "worlds")
        if self.prepared - self.step not in (0, 1):
            raise ValueError(f"Parted.prepared = {self.prepared}: expected step, {self.step}, or the one after it")


def _check_columns(event: Event, first: str, *others: str) -> None:
    named = getattr(event, first)
    for name in others:
        if len(found := getattr(event, name)) != len(named):
            raise ValueError(f"{type(event).__name__}.{name} = {found}: expected one for each of {named}")


@dataclass(frozen=True, slots=True)
class Missing(Event):
    """A rank cannot enter `generation`: the source named by Form does not have the state, cannot be read, or holds
    damaged data; or (`groups`) the rank's groups cannot be formed."""

    node: str
    incarnation: int
    generation: int
    worker: int
    reason: str = ""
    damaged: bool = False
    groups: bool = False


@dataclass(frozen=True, slots=True)
class Standing(Event):
    """The answer to Probe: how far each worker has come, as a counter that grows while it does anything."""

    node: str
    incarnation: int
    counters: dict[int, int]


@dataclass(frozen=True, slots=True)
class Held(Event):
    """The answer to Ask: snapshots in a node's memory, its own ranks' and those that it keeps for others."""

    node: str
    incarnation: int
    generation: int
    copies: tuple[tuple[int, int, int], ...]  # rank, step, the generation in which it was made


@dataclass(frozen=True, slots=True)
class StepsDone(Event):
    """Sent now and then: `step` was committed in this generation."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class Written(Event):
    """A keeper has written the files of some ranks of a checkpoint."""

    node: str
    incarnation: int
    checkpoint: str
    step: int
    generation: int
    ranks: int  # how many files the whole checkpoint has
    files: dict[int, tuple[int, str]]  # rank -> size in bytes, hash
    seal: str  # what all ranks must report alike about the step, as JSON: ledger, cursor, updates
    drain_ns: int


@dataclass(frozen=True, slots=True)
class Unwritten(Event):
    """A keeper could not write a rank's file (`rank` -1: could not commit the checkpoint)."""

    node: str
    incarnation: int
    checkpoint: str  # "": unknown, as there is no snapshot
    step: int
    generation: int
    rank: int
    reason: str
    gone: bool = False  # no snapshot is left from which it could be written


@dataclass(frozen=True, slots=True)
class Durable(Event):
    """A checkpoint has its manifest."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Cost(Event):
    """The cost of a checkpoint to training, measured on the node that committed it."""

    step: int
    step_ns: int  # a usual step
    stall_ns: int
    slowdown_ns: int
    drain_ns: int


@dataclass(frozen=True, slots=True)
class DeviceWarning(Event):
    node: str
    incarnation: int
    sign: str  # a key of Policy.warnings
    count: int


@dataclass(frozen=True, slots=True)
class LinkLost(Event):
    """A network link of the node is gone. Its ranks leave the groups that use it, and form the next ones on a link that
    is left."""

    node: str
    incarnation: int
    link: str


@dataclass(frozen=True, slots=True)
class LinkBack(Event):
    node: str
    incarnation: int
    link: str


@dataclass(frozen=True, slots=True)
class Drain(Event):
    """Stop using the node; `off`: use it again."""

    node: str
    off: bool = False


@dataclass(frozen=True, slots=True)
class Scale(Event):
    replicas: int


@dataclass(frozen=True, slots=True)
class Stop(Event):
    """Save, and leave within `grace_ns`."""

    grace_ns: int


@dataclass(frozen=True, slots=True)
class Trace(Event):
    """Have some ranks record a trace of the steps from `first` up to, but not including, `last`."""

    first: int
    last: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TimerFired(Event):
    timer: str


# -- commands


class Command(Message):
    __slots__ = ()

    @property
    def to(self) -> tuple[str, ...]:
        """Return the nodes that the command is sent to; none: it is for the controller itself."""
        nodes: tuple[str, ...] = getattr(self, "nodes", ())
        return nodes or ((self.node,) if hasattr(self, "node") else ())


@dataclass(frozen=True, slots=True)
class Welcome(Command):
    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Fence(Command):
    """Tell a node that it was declared dead: it ends its workers and comes back with a greater incarnation. Its
    snapshots stay."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Launch(Command):
    """Start workers. Answered by WorkersUp or WorkerDied. An older worker of the same rank on this node is ended
    first."""

    node: str
    incarnation: int
    workers: dict[int, int]  # rank -> worker


@dataclass(frozen=True, slots=True)
class Kill(Command):
    """End workers. Answered by WorkerDied, even for a worker that never existed."""

    node: str
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release(Command):
    """Tell a drained node that it has nothing left to do."""

    node: str


@dataclass(slots=True, unsafe_hash=True)  # not frozen, for speed: large replicas take hundreds
class Build(Command):
    """Build the world of a replica, which is its groups and its engine; no other replica can disturb it. Answered by
    Built, or by Parked with the reason."""

    node: str
    replica: int
    world: int
    crew: dict[int, int]  # of the node: rank -> worker


@dataclass(slots=True, unsafe_hash=True)  # not frozen, for speed: large replicas take hundreds
class Halt(Command):
    """Leave the world now, even in the middle of a step. Answered by Parked; a worker that does not leave is ended by
    its agent, which answers WorkerDied."""

    node: str
    world: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part(Command):
    """Leave the groups of the generation, or do not enter them, once the current pass has ended. Answered by Parted."""

    generation: int
    worlds: tuple[int, ...]  # that are in it
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pause(Command):
    """Leave the groups of the generation after the step whose votes carry this. Answered by Parted."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(slots=True, unsafe_hash=True)  # not frozen, in a third of the time: large replicas take thousands
class Source:
    """Where a rank's state comes from, if the rank does not hold it already."""

    kind: str  # live: a worker | memory: a rank's snapshot in a node's memory | durable: a checkpoint | start
    node: str = ""
    number: int = 0  # of the worker, or of the rank
    made: int = 0  # its generation; there may be an abandoned state of the same step
    address: str = ""  # of that worker or memory


@dataclass(slots=True, unsafe_hash=True)
class Gift:
    """The state of one replica for another that lacks it, in columns: each rank takes the state of its counterpart. A
    large replica has thousands of ranks, and only their nodes need to know."""

    givers: tuple[str, ...]  # nodes
    workers: tuple[int, ...]
    ports: tuple[int, ...]
    addresses: dict[str, str]  # of those nodes
    takers: tuple[str, ...]  # nodes

    def source(self, at: int) -> Source:
        """Return the source for the rank at index `at` of the replica."""
        node = self.givers[at]
        return Source("live", node, self.workers[at], 0, f"{self.addresses[node]}:{self.ports[at]}")


@dataclass(frozen=True, slots=True)
class Form(Command):
    """Start a new generation: these replicas train together. Ranks without a source keep their state. If that is at
    `step` - 1, they first apply `step`, which they have prepared; they drop a prepared step after `step`. Answered by
    Formed, or Missing."""

    generation: int
    step: int  # to continue from
    replicas: tuple[int, ...]
    worlds: tuple[int, ...]  # of those
    every: Source | None  # one source for all ranks; None: see `sources`
    sources: dict[int, Source]  # by rank
    takers: dict[int, str]  # the nodes of those ranks
    kept: tuple[int, ...]  # replicas that keep the gradients of their share of the next step
    buddies: dict[str, str]  # node -> the address to which it copies its snapshots
    branch: bool  # all steps after `step` are abandoned; the ledger keeps them as a branch
    last: int  # the last step known to be committed: `step` + 1 to `last` are abandoned
    rung: int  # of the ladder; -1: nothing had failed
    reason: str
    nodes: tuple[str, ...]
    joins: bool = False  # some take the state of others, so all compare theirs; all nodes are told, unlike `sources`
    gifts: dict[int, Gift] = field(default_factory=dict)  # by replica that joins; nodes are told theirs as `sources`

    def own(self) -> dict[str, dict[str, Any]]:
        """Return, by node, what only that node is told: the sources of its ranks, the sources that it provides, and its
        buddy. The rest of the command is the same for all nodes."""
        own: dict[str, dict[str, Any]] = {}
        takers = self.takers | {rank: gift.takers[at] for rank, gift, at in self._given()}
        for rank, source in self.by_rank().items():
            for node in {takers[rank], source.node} - {""}:
                own.setdefault(node, {}).setdefault("sources", {})[str(rank)] = codec.encode(source)
        for node, address in self.buddies.items():
            own.setdefault(node, {})["buddies"] = {node: address}
        return own

    def by_rank(self) -> dict[int, Source]:
        """Return the sources of all ranks that have one of their own."""
        return self.sources | {rank: gift.source(at) for rank, gift, at in self._given()}

    def source_of(self, rank: int) -> Source | None:
        """Return where a rank takes its state from; None: it keeps what it has."""
        size = len(next(iter(self.gifts.values())).workers) if self.gifts else 1
        if gift := self.gifts.get(rank // size):
            return gift.source(rank % size)
        return self.every or self.sources.get(rank)

    def _given(self) -> Iterator[tuple[int, Gift, int]]:
        for replica, gift in self.gifts.items():
            first = replica * len(gift.workers)
            yield from ((first + at, gift, at) for at in range(len(gift.workers)))


@dataclass(frozen=True, slots=True)
class Probe(Command):
    """Ask how far workers have come. Answered by Standing."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ask(Command):
    """Ask which snapshots nodes hold in memory. Answered by Held."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Save(Command):
    """Take a snapshot of the state at `step` (workers that have prepared it apply it) and write it. Answered by
    Written or Unwritten."""

    generation: int
    step: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Write(Command):
    """Write the snapshots of `step` that are in memory, made in `generation`. Answered by Written or Unwritten, even
    for files that are there already."""

    step: int
    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit(Command):
    """Write the manifest of a checkpoint, as all its files are written. Answered by Durable or Unwritten. A long list
    of files is split into several commands."""

    node: str
    checkpoint: str
    step: int
    generation: int
    ranks: int
    first: int  # the rank of the first of these files
    files: tuple[tuple[int, str], ...]  # by rank
    seal: str


@dataclass(frozen=True, slots=True)
class Interval(Command):
    """Set how many steps lie between checkpoints, and between snapshots in memory, from the next checkpoint on."""

    version: int
    steps: int
    memory_steps: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Profile(Command):
    """Carry out a Trace."""

    first: int
    last: int
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leave(Command):
    """The run is over."""

    reason: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetTimer(Command):
    """Ask for TimerFired at that time. A later one of the same name replaces it."""

    timer: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class Note(Command):
    """A message for people: what was decided, or why nothing is done. Rung 6: nothing can be done."""

    rung: int
    text: str


@dataclass(frozen=True, slots=True)
class Report(Command):
    """An entry for the run's record."""

    about: str
    body: str  # JSON


@dataclass(frozen=True, slots=True)
class Started(Command):
    """Tell the run that all replicas of the generation are in its groups."""

    generation: int


@dataclass(frozen=True, slots=True)
class Ended(Command):
    """Tell the run how it ended. `rank` and `failure`: who is to blame, if a rank is."""

    ok: bool
    reason: str
    step: int
    durable: int  # the last step that has a checkpoint
    cause: str  # "": done or stopped | start: what the run was to begin from is damaged | failed
    rank: int
    failure: Failure


KINDS = {kind.__name__: kind for kind in [*globals().values()] if isinstance(kind, type) and issubclass(kind, Message)}
for _kind in (Message, Event, Command):
    del KINDS[_kind.__name__]
