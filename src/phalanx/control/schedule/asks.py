"""What a user asks of the scheduler, what happens to the cluster, and what the scheduler says: plain values that travel
as JSON through the journal. Times are whole nanoseconds, power is whole watts."""

from __future__ import annotations

from dataclasses import dataclass, field

S = 10**9
HOUR = 3600 * S


@dataclass(frozen=True, slots=True)
class Ask:
    """A gang. A replica is the unit of elasticity: `nodes` nodes with `gpus` GPUs each, and one more node with `rest`
    of them where the size does not divide. `replicas` are wanted, `least` are enough to run."""

    job: str
    tenant: str = ""
    priority: int = 0
    replicas: int = 1
    least: int = 0  # 0: all of them
    nodes: int = 1  # of a replica
    gpus: int = 1  # on each of its nodes
    rest: int = 0
    spares: int = 0  # warm nodes held near the gang
    level: str = ""  # every replica inside one domain of this level; "": preferred, not required
    spread: str = ""  # no two replicas in one domain of this level, where possible
    limit_ns: int = 0  # after which it is stopped; 0: not known
    preemptible: bool = True
    deadline_ns: int = 0  # by which it must have run `needs_ns`; 0: start as soon as possible
    needs_ns: int = 0
    pausable: bool = False  # may run in pieces, a checkpoint apart

    @property
    def fewest(self) -> int:
        return self.least or self.replicas

    @property
    def replica_gpus(self) -> int:
        return self.nodes * self.gpus + self.rest

    @property
    def needs_gpus(self) -> int:
        """To run at all, with its spares."""
        return self.fewest * self.replica_gpus + self.spares * self.gpus

    @property
    def shape(self) -> tuple[int, int, int, int, int, int, str, str]:
        """Two gangs of one shape fit in the same places."""
        return (self.replicas, self.fewest, self.nodes, self.gpus, self.rest, self.spares, self.level, self.spread)


@dataclass(frozen=True, slots=True)
class Tenant:
    """`quota`: GPUs that are its own; `most`: with what it borrows, 0: all that are idle; `weight`: its fair share."""

    name: str
    quota: int = 0
    most: int = 0
    weight: int = 1


# -- events


class Event:
    """Something that the scheduler hears."""

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
    """A gang has ended because it was told to; its state is saved."""

    job: str


@dataclass(frozen=True, slots=True)
class Shrunk(Event):
    """A gang trains with fewer replicas now, and has left the nodes of the others."""

    job: str


@dataclass(frozen=True, slots=True)
class NodeUp(Event):
    node: str


BY_HAND = "said by hand"  # why a node is down: an operator wants it so, until the operator says otherwise


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
    """Nodes are needed from `begin_ns` to `end_ns`: nothing runs on them then."""

    nodes: tuple[str, ...]
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Cap(Event):
    """Watts that the site may draw from now on; 0: no limit."""

    watts: int


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """The timer that was asked for."""


# -- commands


class Command:
    """Something that the scheduler wants done."""

    __slots__ = ()


Seat = tuple[str, int]  # a node, and how many of its GPUs


@dataclass(frozen=True, slots=True)
class Start(Command):
    """`seats`: replica by replica, neighbours in rank order. `spares`: nodes that stand by."""

    job: str
    replicas: tuple[tuple[Seat, ...], ...]
    spares: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Stop(Command):
    """Save and end within the grace; `again`: it will be started again."""

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
    """Take these replicas in, at their numbers."""

    job: str
    replicas: dict[int, tuple[Seat, ...]]
    why: str


@dataclass(frozen=True, slots=True)
class Replace(Command):
    """A node of a running gang is taken over by another."""

    job: str
    old: str
    new: str
    why: str


@dataclass(frozen=True, slots=True)
class SetTimer(Command):
    at_ns: int


@dataclass(slots=True)
class Rules:
    """What the scheduler may do, and how patient it is."""

    grace_ns: int = 60 * S  # to save, before a gang is killed
    restart_ns: int = 120 * S  # what a stop and a later start cost a gang
    min_run_ns: int = 600 * S  # a gang that has just started is left alone
    patience_ns: int = 6 * HOUR  # a gang that waited for longer is overdue
    turn_ns: int = HOUR  # an overdue gang that starts is left alone for so long
    look_ns: int = 300 * S  # between two looks while gangs wait
    burn_ns: int = 300 * S  # a node that comes back is watched for so long before it is used
    first_level: int = (
        3600  # GPU-seconds after which a gang may have to yield to newer ones; each level is 8 times more
    )
    moves: int = 4  # gangs that move at once, so that another one has its GPUs in one piece; 0: none ever does
    move_share: int = 20  # a gang spends at most 1/20 of its time on moves
    watts_per_gpu: int = 0
    ramp_watts: int = 0  # that may be switched on at one look; 0: no limit
    rack_level: str = ""
    rack_watts: int = 0  # per domain of `rack_level`; 0: no limit
    half_life_ns: int = 24 * HOUR  # of a tenant's past usage, for its fair share
    hour_prices: list[int] = field(default_factory=list)  # of electricity or carbon, by the hour from time 0
