"""The pace of a node's ranks: how long they may stand still before they count as hung, and what a checkpoint costs
them. Steps end together on all ranks, so the times that one node sees hold for the whole gang."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median_low

from phalanx.control.messages import Cost
from phalanx.control.policy import BEATS_NS, S

KEPT_STEPS = 50
START_NS = 300 * S  # before the first step is known: compiling may come first
LEAST_NS = 10 * S
STEPS_TO_HANG = 20
BEATS_TO_HANG = 74  # a beat is 1/375 of the MTBF; one failure in 25 is a hang, and hangs may cost 1/125 of the time
LEAST_BEYOND_NS = 30 * S  # beyond a usual step, where the beat alone would allow less


def hang_limit_ns(step_ns: int, beat_ns: int) -> int:
    """Return how long a rank may stand still: many steps, but in a large fleet, where beats are short, no longer than
    the time that hangs may cost it. (125,000 nodes, steps of 31 s: 61 s instead of 628; 2,048 nodes, steps of 6.4 s:
    128 s.)"""
    most_ns = max(step_ns + LEAST_BEYOND_NS, BEATS_TO_HANG * beat_ns)
    return max(LEAST_NS, min(STEPS_TO_HANG * step_ns, most_ns))


@dataclass
class Pace:
    """The latest step times, the hang limit, and the costs of checkpoints. `fixed_ns`: a limit set by the job; 0: it
    follows from the steps, and from how often nodes beat."""

    fixed_ns: int = 0
    beat_ns: int = BEATS_NS[1]
    limit_ns: int = START_NS
    times: dict[int, int] = field(default_factory=dict)  # step -> the time of its slowest rank, for the latest steps
    stalls: dict[int, int] = field(default_factory=dict)  # step of a snapshot -> the longest stall
    drains: dict[int, int] = field(default_factory=dict)  # checkpoints that were committed here and not yet costed

    def __post_init__(self) -> None:
        self.limit_ns = self.fixed_ns or self.limit_ns

    def step(self, step: int, time_ns: int, snapshot: tuple[int, int] | None = None) -> bool:
        """Record one rank's step. `snapshot`: the step of a snapshot, and how long training stood still for it. Return
        whether the hang limit has changed by more than a tenth."""
        self.times[step] = max(time_ns, self.times.get(step, 0))
        if snapshot:
            self.stalls[snapshot[0]] = max(snapshot[1], self.stalls.get(snapshot[0], 0))
        while len(self.times) > KEPT_STEPS:
            del self.times[next(iter(self.times))]
        while len(self.stalls) > KEPT_STEPS:
            del self.stalls[next(iter(self.stalls))]
        limit_ns = self.fixed_ns or hang_limit_ns(median_low(self.times.values()), self.beat_ns)
        if 10 * abs(limit_ns - self.limit_ns) <= self.limit_ns:
            return False
        self.limit_ns = limit_ns
        return True

    def committed(self, step: int, drain_ns: int) -> None:
        """Record a committed checkpoint. Its cost is known some steps later."""
        self.drains[step] = drain_ns

    def costs(self) -> list[Cost]:
        """Return the costs of checkpoints, each two steps later, when every rank has reported its stall."""
        latest = max(self.times, default=0)
        found = [step for step in self.drains if step + 1 < latest]
        return [self._cost(step, self.drains.pop(step)) for step in found]

    def _cost(self, step: int, drain_ns: int) -> Cost:
        usual, stall = median_low(self.times.values()), self.stalls.get(step, 0)
        total, left = 0, drain_ns + stall
        for later in sorted(s for s in self.times if s >= step):
            total += max(0, self.times[later] - usual)
            left -= self.times[later]
            if left <= 0:
                break
        # Other steps are longer than usual too, so the slowdown counts up to the drain's duration only.
        return Cost(step, usual, stall, min(max(0, total - stall), drain_ns), drain_ns)
