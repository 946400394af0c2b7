"""Where the time of a gang goes, and how far its training has come. Between two events everything is linear, so a
second of training costs nothing to simulate. All shares are of the whole gang: a second in which a tenth of it trains
is a tenth productive. What is counted adds up to the time that has passed, to the nanosecond."""

from __future__ import annotations

from dataclasses import dataclass, field

PARTS = ("productive", "checkpoint", "lost", "detect", "restart", "straggler", "degraded", "waiting")


@dataclass
class Progress:
    step_ns: int  # at full strength, without checkpoints
    replicas: int
    micro_batches: int  # of a rank: shares of a batch are whole ones
    pass_ns: int  # one micro-batch through a replica
    overhead: float = 0.0  # of the training time, for checkpoints
    state: str = "waiting"  # "training", "finishing" (a pass, without those that broke), or one of the PARTS
    active: int = 0  # replicas that train
    slow: float = 1.0  # steps take so much longer
    work_ns: int = 0  # steps that are done, as time at full strength; the step under way in part
    now_ns: int = 0
    until_ns: int = 0  # finishing: when the pass ends. training: before that, work is redone
    spent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    @property
    def step(self) -> int:
        return self.work_ns // self.step_ns

    @property
    def speed(self) -> float:
        """Work per time while training. A rank has whole micro-batches: with one replica less some have one more."""
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
        if self.state == "finishing":  # no step ends without those that broke
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
        """Stand still, for the reason that the part of the waterfall names."""
        self.state = part

    def train(self, active: int, redo_ns: int = 0) -> None:
        self.state, self.active, self.until_ns = "training", active, self.now_ns + redo_ns

    def break_off(self, broken: int) -> None:
        """Some replicas break in the middle of a step. What they had of it is lost; the others finish their pass, as
        far as there are others."""
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
        """How much of their pass those that finish it have."""
        return max(0.0, 1 - (self.until_ns - self.now_ns) / self.step_ns)

    def lose(self, work_ns: int) -> None:
        self.work_ns -= work_ns
        self.discount(work_ns)

    def discount(self, work_ns: int) -> None:
        """Count work as lost, and leave the number of the step as it is."""
        work_ns = min(work_ns, self.spent["productive"])
        self.spent["productive"] -= work_ns
        self.spent["lost"] += work_ns

    def back_to(self, step: int) -> None:
        """Abandon later steps."""
        self.lose(self.work_ns - step * self.step_ns)

    def boundary_ns(self, from_ns: int) -> int:
        """When the step that is under way at that time ends, if nothing happens."""
        rate = self.speed / self.slow * (1 - self.overhead)
        start_ns = max(self.now_ns, self.until_ns)
        if rate <= 0:
            return from_ns
        work = self.work_ns + max(0, from_ns - start_ns) * rate
        rest = self.step_ns - work % self.step_ns
        return max(from_ns, start_ns) + int(rest / rate) + 1
