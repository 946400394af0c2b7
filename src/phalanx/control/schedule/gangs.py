"""The scheduler's records of gangs and tenants."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.control.schedule.asks import Ask, Rules, S, Tenant
from phalanx.control.schedule.cells import Spot

WAITING, CLAIMING, RUNNING, LEAVING, ENDED = "waiting", "claiming", "running", "leaving", "ended"
STEP_BITS = 3  # each level is 2**3 times the service of the one below
NOTES = 8  # how many of the latest decisions are kept


@dataclass(slots=True)
class Target:
    """The destination of a gang that moves. The GPUs are held for it until it arrives."""

    replicas: dict[int, list[Spot]]
    spares: list[int]
    spots: list[Spot]  # all of them


@dataclass(slots=True)
class Visit:
    """A gang's stay as a guest in places held for others. `since_ns`, `served`, `ran_ns`: their values when it came."""

    holders: list[str]
    nodes: set[int]  # where it uses lent GPUs
    since_ns: int
    served: int
    ran_ns: int
    lost: bool = False  # it had no time to save


@dataclass(slots=True)
class Gang:
    """A submitted job. While `claiming`, its places are chosen; it has the free ones, and is `owed` the others by gangs
    that are leaving."""

    ask: Ask
    number: int  # in the order of submission
    submitted_ns: int
    state: str = WAITING
    since_ns: int = 0  # when the state began; while it runs, when its size last changed
    began_ns: int = 0  # its last start
    replicas: dict[int, list[Spot]] = field(default_factory=dict)
    shrinking: dict[int, list[Spot]] = field(default_factory=dict)  # replicas that it is giving up
    spares: list[int] = field(default_factory=list)
    owed: dict[int, int] = field(default_factory=dict)  # node -> GPUs
    gpus: int = 0  # GPUs that it has or is owed
    idle_ns: int = 0  # while it waits: since when it holds nothing; `since_ns` is before its visit as a guest
    served: int = 0  # GPU-ns, up to `since_ns`
    ran_ns: int = 0  # up to `since_ns`
    level: int = 0  # service received so far, when last weighed; 0 for newcomers
    safe_ns: int = 0  # until then no gang of the same priority may displace it
    late: bool = False  # it was already overdue when it claimed its places
    blockers: list[str] = field(default_factory=list)  # while it claims: gangs that it waits for, not yet stopped
    guests: dict[str, None] = field(default_factory=dict)  # while it claims: gangs to which it lends places
    visit: Visit | None = None  # set while it is a guest
    stops: int = 0
    moves: int = 0  # how often it has moved to make room for others
    target: Target | None = None  # while it leaves: its destination
    again: bool = False  # while it leaves: it will be restarted
    slots: list[tuple[int, int]] = field(default_factory=list)  # when it may run, if it follows a curve
    notes: list[tuple[int, str]] = field(default_factory=list)

    @property
    def job(self) -> str:
        return self.ask.job

    def spots(self) -> list[Spot]:
        """Return all that it holds, spares included."""
        held = [spot for group in (self.replicas, self.shrinking) for replica in group.values() for spot in replica]
        return held + [(node, self.ask.gpus) for node in self.spares]

    def served_at(self, now_ns: int) -> int:
        return self.served + (self.gpus * (now_ns - self.since_ns) if self.state == RUNNING else 0)

    def ran_at(self, now_ns: int) -> int:
        return self.ran_ns + (now_ns - self.since_ns if self.state == RUNNING else 0)

    def weigh(self, now_ns: int, rules: Rules) -> None:
        """Update its level from the service that it has received."""
        units = self.served_at(now_ns) // (rules.first_level * S)
        self.level = -(-units.bit_length() // STEP_BITS)

    def overdue(self, now_ns: int, rules: Rules) -> bool:
        return self.state == WAITING and now_ns - self.since_ns >= rules.patience_ns

    def note(self, now_ns: int, text: str) -> None:
        self.notes.append((now_ns, text))
        del self.notes[:-NOTES]


@dataclass(slots=True)
class Account:
    """A tenant's present and past usage."""

    tenant: Tenant
    used: int = 0  # GPUs
    past: int = 0  # GPU-s, with exponential decay
    at_ns: int = 0

    def change(self, now_ns: int, gpus: int, half_life_ns: int) -> None:
        self.fade(now_ns, half_life_ns)
        self.used += gpus
        assert self.used >= 0, self.tenant.name

    def fade(self, now_ns: int, half_life_ns: int) -> None:
        elapsed = now_ns - self.at_ns
        self.past >>= min(elapsed // half_life_ns, 200)
        self.past -= self.past * (elapsed % half_life_ns) // (2 * half_life_ns)
        self.past += self.used * elapsed // S
        self.at_ns = now_ns

    @property
    def share(self) -> int:
        return self.past // max(1, self.tenant.weight)

    def allows(self, gpus: int) -> bool:
        return not self.tenant.most or self.used + gpus <= self.tenant.most

    def owns(self, gpus: int) -> bool:
        """Return True if `gpus` more GPUs are within its quota."""
        return self.used + gpus <= self.tenant.quota
