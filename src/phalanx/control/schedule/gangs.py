"""What the scheduler knows of a gang and of a tenant."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.control.schedule.asks import Ask, Rules, S, Tenant
from phalanx.control.schedule.cells import Spot

WAITING, CLAIMING, RUNNING, LEAVING, ENDED = "waiting", "claiming", "running", "leaving", "ended"
STEP_BITS = 3  # a level is 2**3 times more service than the one below
NOTES = 8  # of the latest decisions that are kept


@dataclass(slots=True)
class Target:
    """Where a gang goes that moves. The GPUs are held for it until it comes."""

    replicas: dict[int, list[Spot]]
    spares: list[int]
    spots: list[Spot]  # all of them


@dataclass(slots=True)
class Visit:
    """A gang runs in places that are held for others. `since_ns`, `served`, `ran_ns`: as they were when it came."""

    holders: list[str]
    nodes: set[int]  # on which it has what is lent
    since_ns: int
    served: int
    ran_ns: int
    lost: bool = False  # it had no time to save


@dataclass(slots=True)
class Gang:
    """`claiming`: its places are chosen, and it has those that are free; the others are `owed` by gangs that leave."""

    ask: Ask
    number: int  # in the order of submission
    submitted_ns: int
    state: str = WAITING
    since_ns: int = 0  # of the state; while it runs, of the last change of its size
    began_ns: int = 0  # its last start
    replicas: dict[int, list[Spot]] = field(default_factory=dict)
    shrinking: dict[int, list[Spot]] = field(default_factory=dict)  # replicas that it was told to give up
    spares: list[int] = field(default_factory=list)
    owed: dict[int, int] = field(default_factory=dict)  # node -> GPUs
    gpus: int = 0  # that it has, or is owed
    idle_ns: int = 0  # while it waits: since when it has nothing; `since_ns` is before it was a guest
    served: int = 0  # GPU-ns, up to `since_ns`
    ran_ns: int = 0  # up to `since_ns`
    level: int = 0  # how much it has had, as of the last look at it; 0 for newcomers
    safe_ns: int = 0  # until then no gang of its own priority takes its place
    late: bool = False  # it was overdue when it claimed its places
    blockers: list[str] = field(default_factory=list)  # while it claims: gangs that it waits for, not told to leave yet
    guests: dict[str, None] = field(default_factory=dict)  # while it claims: gangs that it lends places to
    visit: Visit | None = None  # it is a guest
    stops: int = 0
    moves: int = 0  # how often it has moved for others
    target: Target | None = None  # while it leaves: where it goes
    again: bool = False  # while it leaves: it comes back
    slots: list[tuple[int, int]] = field(default_factory=list)  # when it may run, if it follows a curve
    notes: list[tuple[int, str]] = field(default_factory=list)

    @property
    def job(self) -> str:
        return self.ask.job

    def spots(self) -> list[Spot]:
        """All that it has, spares too."""
        held = [spot for group in (self.replicas, self.shrinking) for replica in group.values() for spot in replica]
        return held + [(node, self.ask.gpus) for node in self.spares]

    def served_at(self, now_ns: int) -> int:
        return self.served + (self.gpus * (now_ns - self.since_ns) if self.state == RUNNING else 0)

    def ran_at(self, now_ns: int) -> int:
        return self.ran_ns + (now_ns - self.since_ns if self.state == RUNNING else 0)

    def weigh(self, now_ns: int, rules: Rules) -> None:
        """Update its level."""
        units = self.served_at(now_ns) // (rules.first_level * S)
        self.level = -(-units.bit_length() // STEP_BITS)

    def overdue(self, now_ns: int, rules: Rules) -> bool:
        return self.state == WAITING and now_ns - self.since_ns >= rules.patience_ns

    def note(self, now_ns: int, text: str) -> None:
        self.notes.append((now_ns, text))
        del self.notes[:-NOTES]


@dataclass(slots=True)
class Account:
    """A tenant: what it uses, and what it has used."""

    tenant: Tenant
    used: int = 0  # GPUs
    past: int = 0  # GPU-s, fading
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
        """Whether so many more are within its quota."""
        return self.used + gpus <= self.tenant.quota
