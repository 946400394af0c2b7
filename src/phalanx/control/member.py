"""A worker's half of the protocol: which commands it obeys, and what it can say of its state. Restoring, groups and
gradients are the caller's; this says when.

    new -> restoring -> ready -> running -> parked -> restoring ...
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.control.messages import Source


@dataclass(slots=True)
class Member:
    worker: int
    steps: int  # of the whole run
    phase: str = "new"
    generation: int = 0  # the last that it heard of
    step: int = -1  # of the state that it holds; -1: none
    prepared: int = -1  # the step that it has voted yes for, or `step`
    made: int = 0  # the generation in which that was
    pause: bool = False

    def form(self, generation: int, step: int, source: Source | None) -> bool:
        """Whether to restore and report. Not if the generation is over, or restored already."""
        if generation <= self.generation:
            return False
        self.generation, self.phase, self.pause = generation, "restoring", False
        if source is not None:
            self.step = self.prepared = -1
        return True

    def may_serve(self, generation: int) -> bool:
        """Whether it may settle for a generation without forming it, for others to take its state. Not for one that it
        is in or was: that word is late, and what it has prepared since may count."""
        return generation > self.generation

    def settle(self, step: int) -> bool:
        """Go on from `step` with what it holds. True after the prepared step was taken: its gradients are to be applied
        now. ValueError: it does not hold that step."""
        if step < 0 or step not in (self.step, self.prepared):
            raise ValueError(f"it holds step {self.step}, and has prepared {self.prepared}")
        apply = step > self.step
        self.step = self.prepared = step
        return apply

    def restored(self, step: int) -> None:
        """The state is there and verified, and the groups are formed."""
        assert self.phase == "restoring", self
        self.phase, self.step, self.prepared, self.made = "ready", step, step, self.generation

    def start(self, generation: int) -> bool:
        """Whether to begin with a step now."""
        if generation != self.generation or self.phase != "ready":
            return False
        self.phase = "running" if self.step < self.steps else "parked"
        return self.phase == "running"

    def vote(self) -> bool:
        """The reduced gradients of the next step are there. Returns whether its vote asks for a pause."""
        assert self.phase == "running" and self.prepared == self.step, self
        self.prepared, self.made = self.step + 1, self.generation
        return self.pause

    def commit(self, pause: bool) -> bool:
        """All have voted yes and the gradients were applied; `pause`: one of the votes asked for it. Returns whether to
        go on with the next step."""
        assert self.phase == "running" and self.prepared == self.step + 1, self
        self.step = self.prepared
        if pause or self.step >= self.steps:
            self.phase = "parked"
        return self.phase == "running"

    def ask_pause(self, generation: int) -> None:
        if generation == self.generation:
            self.pause = True

    def halt(self, generation: int) -> bool:
        """Leave the groups: nothing of this generation is obeyed from now on. Never in the middle of an update. False:
        the command is older than what it does."""
        if generation < self.generation:
            return False
        self.generation, self.phase = generation, "parked"
        return True
