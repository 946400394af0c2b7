"""The scheduler's vocabulary: requests from users, events from the cluster, and commands in return. All are plain
values that travel as JSON through the journal. Times are whole nanoseconds, power is whole watts."""

from __future__ import annotations

from dataclasses import dataclass, field

S = 10**9
HOUR = 3600 * S


@dataclass(frozen=True, slots=True)
class Ask:
    """A gang. A replica is the unit of elasticity: `nodes` nodes with `gpus` GPUs each, and one more node with `rest`
    GPUs where the size does not divide evenly. The user wants `replicas`, and the gang can run with `least`."""

    job: str
    tenant: str = ""
    priority: int = 0
    replicas: int = 1
    least: int = 0  # 0: all of them
    nodes: int = 1  # per replica
    gpus: int = 1  # on each of its nodes
    rest: int = 0
    spares: int = 0  # warm nodes held near the gang
    level: str = ""  # every replica inside one domain of this level; "": preferred, not required
    spread: str = ""  # no two replicas in one domain of this level, where possible
    limit_ns: int = 0  # the gang is stopped after this; 0: not known
    preemptible: bool = True
    deadline_ns: int = 0  # it must have run for `needs_ns` by then; 0: start as soon as possible
    needs_ns: int = 0
    pausable: bool = False  # may run in pieces, with a checkpoint between them

    @property
    def fewest(self) -> int:
        return self.least or self.replicas

    @property
    def replica_gpus(self) -> int:
        return self.nodes * self.gpus + self.rest

    @property
    def needs_gpus(self) -> int:
        """Return how many GPUs it needs to run at all, spares included."""
        return self.fewest * self.replica_gpus + self.spares * self.gpus

    @property
    def shape(self) -> tuple[int, int, int, int, int, int, str, str]:
        """Return the key that decides where it fits: gangs with the same shape fit in the same places."""
        return (self.replicas, self.fewest, self.nodes, self.gpus, self.rest, self.spares, self.level, self.spread)


@dataclass(frozen=True, slots=True)
class Tenant:
    """`quota`: GPUs of its own; `most`: its limit including what it borrows, 0: no limit; `weight`: its fair share."""

    name: str
    quota: int = 0
    most: int = 0
    weight: int = 1


# -- events


class Event:
    """Something that happened, which the scheduler reacts to."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Submit(Event):
    ask: Ask


@dataclass(frozen=True, slots=True)
class Cancel(Event):
    job: str


@dataclass(frozen=True, slots=True)
class Ended(Event):
    """A gang has ended by itself."""

    job: str
    ok: bool = True


@dataclass(frozen=True, slots=True)
class Stopped(Event):
    """A gang has ended on request; its state is saved."""

    job: str


@dataclass(frozen=True, slots=True)
class Shrunk(Event):
    """A gang now trains with fewer replicas, and has left the nodes of the others."""

    job: str


@dataclass(frozen=True, slots=True)
class NodeUp(Event):
    node: str


BY_HAND = "said by hand"  # why a node is down: an operator declared it down, and only an operator can undo that


@dataclass(frozen=True, slots=True)
class NodeDown(Event):
    node: str
    why: str = "no sign of life"


@dataclass(frozen=True, slots=True)
class Drain(Event):
    node: str
    off: bool = False


@dataclass(frozen=True, slots=True)
class Maintain(Event):
    """Keep nodes free from `begin_ns` to `end_ns`."""

    nodes: tuple[str, ...]
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Cap(Event):
    """Limit the power of the site to `watts` from now on; 0: no limit."""

    watts: int


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """The timer that the scheduler set has fired."""


# -- commands


class Command:
    """Something that the scheduler wants to be done."""

    __slots__ = ()


Seat = tuple[str, int]  # a node, and how many of its GPUs are used


@dataclass(frozen=True, slots=True)
class Start(Command):
    """Start a gang. `seats` of a replica are in rank order, so that neighbours are close. `spares`: nodes that stand
    by."""

    job: str
    replicas: tuple[tuple[Seat, ...], ...]
    spares: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Stop(Command):
    """Save and end within the grace period; `again`: it will be restarted later."""

    job: str
    grace_ns: int
    again: bool
    why: str


@dataclass(frozen=True, slots=True)
class Shrink(Command):
    """Continue without these replicas."""

    job: str
    replicas: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Grow(Command):
    """Add these replicas, under these numbers."""

    job: str
    replicas: dict[int, tuple[Seat, ...]]
    why: str


@dataclass(frozen=True, slots=True)
class Replace(Command):
    """Let another node take over from a node of a running gang."""

    job: str
    old: str
    new: str
    why: str


@dataclass(frozen=True, slots=True)
class SetTimer(Command):
    at_ns: int


@dataclass(slots=True)
class Rules:
    """The scheduler's limits and how long it waits."""

    grace_ns: int = 60 * S  # time to save before a gang is killed
    restart_ns: int = 120 * S  # the cost of a stop and a later start
    min_run_ns: int = 600 * S  # a gang that started this recently is left alone
    patience_ns: int = 6 * HOUR  # a gang that has waited for longer is overdue
    turn_ns: int = HOUR  # an overdue gang is left alone for this long after it starts
    look_ns: int = 300 * S  # between two scheduling passes while gangs wait
    burn_ns: int = 300 * S  # a node that comes back is watched for this long before it is used
    first_level: int = (
        3600  # GPU-seconds after which a gang may have to yield to newer ones; each level is 8 times more
    )
    moves: int = 4  # gangs that may move at once to free one contiguous place for another; 0: none ever does
    move_share: int = 20  # a gang spends at most 1/20 of its time on moves
    watts_per_gpu: int = 0
    ramp_watts: int = 0  # power that may be switched on in one scheduling pass; 0: no limit
    rack_level: str = ""
    rack_watts: int = 0  # per domain of `rack_level`; 0: no limit
    half_life_ns: int = 24 * HOUR  # half-life of a tenant's past usage in its fair share
    hour_prices: list[int] = field(default_factory=list)  # prices of electricity or carbon, by the hour from time 0
