"""Account for a gang's time and its training progress. Between two events everything is linear, so simulating a second
of training costs nothing. All shares refer to the whole gang: a second in which a tenth of it trains is a tenth
productive. The parts add up to the elapsed time, to the nanosecond."""

from __future__ import annotations

from dataclasses import dataclass, field

PARTS = ("productive", "checkpoint", "lost", "detect", "restart", "straggler", "degraded", "waiting")


@dataclass
class Progress:
    step_ns: int  # at full strength, without checkpoints
    replicas: int
    micro_batches: int  # per rank; a rank's share of a batch is a whole number of them
    pass_ns: int  # one micro-batch through a replica
    overhead: float = 0.0  # share of training time that checkpoints cost
    state: str = "waiting"  # "training", "finishing" (the pass, without broken replicas), or one of the PARTS
    active: int = 0  # replicas that train
    slow: float = 1.0  # factor by which steps take longer
    work_ns: int = 0  # work done, as time at full strength, including part of the current step
    now_ns: int = 0
    until_ns: int = 0  # finishing: when the pass ends; training: until then, work is redone
    spent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    @property
    def step(self) -> int:
        return self.work_ns // self.step_ns

    @property
    def speed(self) -> float:
        """Return work per time while training. Micro-batches are not divided: without one replica, some ranks have one
        more."""
        if not self.active:
            return 0.0
        most = -(-self.micro_batches * self.replicas // self.active)
        return self.micro_batches / most

    def advance(self, now_ns: int) -> None:
        if self.state in ("training", "finishing") and self.now_ns < self.until_ns < now_ns:
            until_ns = self.until_ns
            self._spend(until_ns - self.now_ns)
            self.now_ns = until_ns
            if self.state == "finishing":
                self.state = "detect"
        self._spend(now_ns - self.now_ns)
        self.now_ns = now_ns

    def _spend(self, time_ns: int) -> None:
        spent = self.spent
        if self.state == "training" and self.now_ns < self.until_ns:
            spent["lost"] += time_ns
            return
        if self.state not in ("training", "finishing"):
            spent[self.state] += time_ns
            return
        speed = self.speed if self.state == "training" else self.active / self.replicas
        useful = int(time_ns * speed)
        if self.state == "finishing":  # no step can end without the broken replicas
            useful = min(useful, int((self.step_ns - 1 - self.work_ns % self.step_ns) * self.slow))
        straight = int(useful / self.slow)
        checkpoint = int(straight * self.overhead)
        spent["degraded"] += time_ns - useful
        spent["straggler"] += useful - straight
        spent["checkpoint"] += checkpoint
        spent["productive"] += straight - checkpoint
        self.work_ns += straight - checkpoint

    # -- what happens to it

    def stop(self, part: str) -> None:
        """Stand still; `part` of the waterfall is the reason."""
        self.state = part

    def train(self, active: int, redo_ns: int = 0) -> None:
        self.state, self.active, self.until_ns = "training", active, self.now_ns + redo_ns

    def break_off(self, broken: int) -> None:
        """Break some replicas in the middle of a step. Their work on it is lost; any other replicas finish their
        pass."""
        if self.state not in ("training", "finishing"):
            return
        was, left = self.active, self.active - broken
        had = self.work_ns % self.step_ns if self.state == "training" else int(self.step_ns * self._done())
        if left <= 0:
            self.lose(self.work_ns % self.step_ns)
            self.state, self.active = "detect", 0
            return
        self.lose(min(had * broken // was, self.work_ns % self.step_ns))
        if self.state == "training":
            rest_ns = self.step_ns - had
            self.until_ns = max(self.now_ns, self.until_ns) + int(rest_ns * self.slow / max(self.speed, 1e-9))
        self.state, self.active = "finishing", left

    def _done(self) -> float:
        """Return how much of the pass the replicas that finish it have done."""
        return max(0.0, 1 - (self.until_ns - self.now_ns) / self.step_ns)

    def lose(self, work_ns: int) -> None:
        self.work_ns -= work_ns
        self.discount(work_ns)

    def discount(self, work_ns: int) -> None:
        """Count work as lost without changing the step number."""
        work_ns = min(work_ns, self.spent["productive"])
        self.spent["productive"] -= work_ns
        self.spent["lost"] += work_ns

    def back_to(self, step: int) -> None:
        """Discard later steps."""
        self.lose(self.work_ns - step * self.step_ns)

    def boundary_ns(self, from_ns: int) -> int:
        """Return when the step under way at that time will end, if nothing else happens."""
        rate = self.speed / self.slow * (1 - self.overhead)
        start_ns = max(self.now_ns, self.until_ns)
        if rate <= 0:
            return from_ns
        work = self.work_ns + max(0, from_ns - start_ns) * rate
        rest = self.step_ns - work % self.step_ns
        return max(from_ns, start_ns) + int(rest / rate) + 1
