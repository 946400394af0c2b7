"""What the control plane hears (events) and what it says (commands).

A worker has a number that is never used again, so a late message about one that is gone is recognised. A node has a
name and an incarnation, which grows each time the node comes back. `step` counts the updates that a state has seen.
Every command may arrive twice, or late: its generation, worker or incarnation tells the receiver whether it still
counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import ne
from typing import Any, TypeVar, get_origin

from phalanx.control import codec

M = TypeVar("M", bound="Message")


@dataclass(frozen=True, slots=True)
class Message:
    def to_dict(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **codec.encode(self)}

    @classmethod
    def from_dict(cls: type[M], body: Any) -> M:
        """An event for Event, a command for Command. ValueError names the field and its value."""
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
        return found


@cache
def _kinds(base: Any) -> dict[str, Any]:
    return {name: kind for name, kind in KINDS.items() if issubclass(kind, base)}


@cache
def _least(kind: Any) -> list[tuple[str, int]]:
    """What its numbers must be."""
    named = [name for name, hint in codec.hints(kind).items() if hint is int]
    return [(name, -1 if name in ("step", "prepared", "rung", "rank") else 0) for name in named]


# -- events


@dataclass(frozen=True, slots=True)
class Event(Message):
    pass


@dataclass(frozen=True, slots=True)
class Failure:
    """How a process ended, or why it could not go on."""

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
    """An agent is there: for the first time, again, or after its connection was lost. Repeated until Welcome."""

    node: str
    incarnation: int
    domain: str = ""  # of failure
    address: str = ""  # of its rendezvous store
    memory: str = ""  # where its snapshots are served


@dataclass(frozen=True, slots=True)
class NodeSuspect(Event):
    """It is silent for longer than usual."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class NodeClear(Event):
    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class NodeDead(Event):
    """`proof`: how it is known that every process of this incarnation has ended. Without one there is only silence, and
    the node may still be training."""

    node: str
    incarnation: int
    proof: str = ""


@dataclass(frozen=True, slots=True)
class WorkersUp(Event):
    """They run, hold no state, and wait for a Form."""

    node: str
    incarnation: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WorkerDied(Event):
    node: str
    incarnation: int
    worker: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class ServiceDied(Event):
    """A store, data service or keeper of the node. Its agent starts it again."""

    node: str
    incarnation: int
    service: str
    failure: Failure


@dataclass(frozen=True, slots=True)
class Parked(Event):
    """They have left the groups of `generation` and of all before it, for good."""

    node: str
    incarnation: int
    generation: int
    workers: tuple[int, ...]
    step: int  # of the state that they hold; -1: none
    prepared: int  # the step that they have voted yes for and hold the gradients of, or `step`
    made: int  # the generation in which that was
    why: Failure | None = None  # the error that made them leave; None: they were told to, or are done

    def __post_init__(self) -> None:
        if self.prepared - self.step not in (0, 1):
            raise ValueError(f"Parked.prepared = {self.prepared}: expected step, {self.step}, or the one after it")


@dataclass(frozen=True, slots=True)
class Ready(Event):
    """Groups are formed, the state is there, and this is its digest."""

    node: str
    incarnation: int
    generation: int
    step: int
    digests: dict[int, str]  # by worker


@dataclass(frozen=True, slots=True)
class Many(Event):
    """The same report from many nodes, as if each had sent it, in this order. When a gang re-forms all nodes report,
    and columns are read, kept and folded much faster than as many messages."""

    nodes: tuple[str, ...]
    incarnations: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in self.columns():
            if len(getattr(self, name)) != len(self.nodes):
                raise ValueError(f"{type(self).__name__}.{name}: expected {len(self.nodes)}, one of each node")
        if self.nodes:
            next(self.parts())  # what all have in common

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """The fields that have a value for each node."""
        return tuple(name for name, hint in codec.hints(cls).items() if get_origin(hint) is tuple)

    def parts(self) -> Iterator[Event]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ManyParked(Many):
    workers: tuple[tuple[int, ...], ...]
    generation: int
    step: int
    prepared: int
    made: int
    why: Failure | None

    @staticmethod
    def of(events: Sequence[Parked]) -> ManyParked:
        """Merge reports that differ in nodes and workers only."""
        nodes, incarnations, workers = zip(*((e.node, e.incarnation, e.workers) for e in events), strict=True)
        one = events[0]
        return ManyParked(nodes, incarnations, workers, one.generation, one.step, one.prepared, one.made, one.why)

    def parts(self) -> Iterator[Parked]:
        g, step, prepared, made, why = self.generation, self.step, self.prepared, self.made, self.why
        for node, incarnation, workers in zip(self.nodes, self.incarnations, self.workers, strict=True):
            yield Parked(node, incarnation, g, workers, step, prepared, made, why)


@dataclass(frozen=True, slots=True)
class ManyReady(Many):
    workers: tuple[tuple[int, ...], ...]
    digests: tuple[tuple[str, ...], ...]  # of those
    generation: int
    step: int

    def __post_init__(self) -> None:
        if any(map(ne, map(len, self.workers), map(len, self.digests))):
            raise ValueError("ManyReady.digests: expected one of each worker")
        Many.__post_init__(self)

    @staticmethod
    def of(events: Sequence[Ready]) -> ManyReady:
        """Merge reports that differ in nodes, workers and digests only."""
        nodes, incarnations = zip(*((e.node, e.incarnation) for e in events), strict=True)
        workers, digests = tuple(tuple(e.digests) for e in events), tuple(tuple(e.digests.values()) for e in events)
        return ManyReady(nodes, incarnations, workers, digests, events[0].generation, events[0].step)

    def parts(self) -> Iterator[Ready]:
        rows = zip(self.nodes, self.incarnations, self.workers, self.digests, strict=True)
        for node, incarnation, workers, digests in rows:
            yield Ready(node, incarnation, self.generation, self.step, dict(zip(workers, digests, strict=True)))


@dataclass(frozen=True, slots=True)
class Missing(Event):
    """The source that Form named does not have the state, cannot be read, or what it has is damaged."""

    node: str
    incarnation: int
    generation: int
    worker: int
    reason: str = ""
    damaged: bool = False


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
    ranks: int  # files that the checkpoint has
    files: dict[int, tuple[int, str]]  # rank -> size in bytes, hash
    seal: str  # what all ranks say alike of the step, as JSON: ledger, cursor, updates
    drain_ns: int


@dataclass(frozen=True, slots=True)
class Unwritten(Event):
    """A keeper could not write a rank's file (`rank` -1: could not commit the checkpoint)."""

    node: str
    incarnation: int
    checkpoint: str  # "": there is no snapshot that could tell
    step: int
    generation: int
    rank: int
    reason: str
    gone: bool = False  # there is no snapshot any more from which it could be written


@dataclass(frozen=True, slots=True)
class Durable(Event):
    """A checkpoint has its manifest."""

    step: int
    generation: int


@dataclass(frozen=True, slots=True)
class Cost(Event):
    """What a checkpoint cost the training, measured on the node that committed it."""

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
class Drain(Event):
    """Use the node no more; `off`: use it again."""

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
class TimerFired(Event):
    timer: str


# -- commands


@dataclass(frozen=True, slots=True)
class Command(Message):
    @property
    def to(self) -> tuple[str, ...]:
        """The nodes that it is sent to; none: it is for the controller itself."""
        nodes: tuple[str, ...] = getattr(self, "nodes", ())
        return nodes or ((self.node,) if hasattr(self, "node") else ())


@dataclass(frozen=True, slots=True)
class Welcome(Command):
    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Fence(Command):
    """It was declared dead: it ends its workers and comes back with a greater incarnation. Its snapshots stay."""

    node: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Launch(Command):
    """Answered by WorkersUp or WorkerDied. An older worker of the same rank on this node is ended first."""

    node: str
    incarnation: int
    workers: dict[int, int]  # rank -> worker


@dataclass(frozen=True, slots=True)
class Kill(Command):
    """Answered by WorkerDied, also for a worker that never was."""

    node: str
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release(Command):
    """A drained node has nothing left to do."""

    node: str


@dataclass(frozen=True, slots=True)
class Halt(Command):
    """Leave the groups now, in the middle of a step. Answered by Parked; a worker that does not leave is ended by its
    agent, which answers WorkerDied."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pause(Command):
    """Leave the groups after the step whose votes carry this. Answered by Parked."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """Where a rank's state comes from, if it has not got it already."""

    kind: str  # live: a worker | memory: a rank's snapshot in a node's memory | durable: a checkpoint | start
    node: str = ""
    number: int = 0  # of the worker, or of the rank
    made: int = 0  # in which generation; there may be an abandoned one of the same step
    address: str = ""  # of that memory


@dataclass(frozen=True, slots=True)
class Form(Command):
    """A new generation. Workers without a source keep their state; if that is at `step` - 1 they first apply `step`,
    which they have prepared; a step after `step` that they have prepared they drop. Answered by Ready, or Missing."""

    generation: int
    step: int  # to go on from
    replicas: tuple[int, ...]
    crew: dict[int, int]  # rank -> worker
    places: dict[int, str]  # -> node
    ranks_per_place: int
    store: str  # the address where they meet
    sources: dict[int, Source]  # by rank
    buddies: dict[str, str]  # node -> the address to which it copies its snapshots
    branch: bool  # all steps after `step` are abandoned; the ledger keeps them as a branch
    last: int  # that is known to have been committed: `step` + 1 to `last` are abandoned
    rung: int  # of the ladder; -1: nothing had failed
    reason: str
    nodes: tuple[str, ...]

    def parts(self) -> dict[str, Form]:
        """Cut it into what each of `nodes` needs: its own workers, and the ranks that it is a source for."""
        crews: dict[str, dict[int, int]] = {node: {} for node in self.nodes}
        sources: dict[str, dict[int, Source]] = {node: {} for node in self.nodes}
        for rank, worker in self.crew.items():
            node = self.places[rank // self.ranks_per_place]
            if node in crews:
                crews[node][rank] = worker
        for rank, source in self.sources.items():
            for node in (self.places[rank // self.ranks_per_place], source.node):
                if node in sources:
                    sources[node][rank] = source
        seats = {node: place for place, node in self.places.items()}
        return {
            node: replace(
                self,
                crew=crews[node],
                places={seats[node]: node} if node in seats else {},
                sources=sources[node],
                buddies={node: self.buddies[node]} if node in self.buddies else {},
                nodes=(node,),
            )
            for node in self.nodes
        }


@dataclass(frozen=True, slots=True)
class Start(Command):
    """All are ready. Repeated until a step of this generation is done."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Probe(Command):
    """Answered by Standing."""

    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ask(Command):
    """Answered by Held."""

    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Save(Command):
    """Take a snapshot of the parked state at `step` (workers that have prepared it apply it) and write it. Answered by
    Written or Unwritten."""

    generation: int
    step: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Write(Command):
    """Write the snapshots of `step` that are in memory, made in `generation`. Answered by Written or Unwritten, also
    for files that are there already."""

    step: int
    generation: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Commit(Command):
    """All files of a checkpoint are written: write its manifest. Answered by Durable, or Unwritten."""

    node: str
    checkpoint: str
    step: int
    generation: int
    files: tuple[tuple[int, str], ...]  # by rank
    seal: str


@dataclass(frozen=True, slots=True)
class Interval(Command):
    """How many steps lie between checkpoints, and between snapshots in memory, from the next checkpoint on."""

    version: int
    steps: int
    memory_steps: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leave(Command):
    """The run is over."""

    reason: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetTimer(Command):
    """TimerFired at that time; a later one of the same name replaces it."""

    timer: str
    at_ns: int


@dataclass(frozen=True, slots=True)
class Note(Command):
    """For people: what was decided, or why nothing is. Rung 6: nothing can be done."""

    rung: int
    text: str


@dataclass(frozen=True, slots=True)
class Report(Command):
    """For the run's record."""

    about: str
    body: str  # JSON


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
for _kind in (Message, Event, Many, Command):
    del KINDS[_kind.__name__]
