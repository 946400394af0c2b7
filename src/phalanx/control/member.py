"""A worker's half of the protocol: which commands it obeys, and what it says of its state. Restoring, groups and
gradients are the caller's; this says when.

    new -> restoring -> ready -> running -> parked -> restoring ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    lacks: str = ""  # why it did not get its state for this generation
    damaged: bool = False  # because what it found is damaged
    why: dict[str, Any] | None = None  # the error that made it leave its groups: kind, text, phase and step
    digest: str = ""  # of its state, when it was ready

    def form(self, generation: int, step: int, source: Source | None) -> bool:
        """Whether to restore and report. Not if the generation is over, or restored already."""
        if generation <= self.generation:
            return False
        self.generation, self.phase, self.pause = generation, "restoring", False
        self.lacks, self.damaged, self.why, self.digest = "", False, None, ""
        if source is not None:
            self.step = self.prepared = -1
        return True

    def may_serve(self, generation: int) -> bool:
        """Whether it may settle for a generation without forming it, for others to take its state. Not for one that it
        is in or was: that message is late, and what it has prepared since may count."""
        return generation > self.generation

    def settle(self, step: int) -> bool:
        """Go on from `step` with what it holds. True after the prepared step was taken: its gradients are to be applied
        now. ValueError: it does not hold that step."""
        if step < 0 or step not in (self.step, self.prepared):
            raise ValueError(f"it holds step {self.step}, and has prepared {self.prepared}")
        apply = step > self.step
        self.step = self.prepared = step
        return apply

    def lack(self, reason: str, damaged: bool = False) -> None:
        """The state cannot be had from the source that was named."""
        self.lacks, self.damaged = reason or "it is not there", damaged

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

    def halt(self, generation: int, why: dict[str, Any] | None = None) -> bool:
        """Leave the groups: nothing of this generation is obeyed from now on. Never in the middle of an update. False:
        the command is older than what it does. `why`: the error that makes it leave."""
        if generation < self.generation:
            return False
        if generation > self.generation or self.phase != "parked":
            self.why = why
        self.generation, self.phase = generation, "parked"
        return True

    def standing(self, digest: str = "") -> dict[str, Any] | None:
        """What it reports of itself, now or again; None: nothing yet."""
        self.digest = digest or self.digest
        if self.phase == "restoring" and self.lacks:
            about = {"reason": self.lacks, "damaged": self.damaged}
            return {"type": "missing", "generation": self.generation, **about}
        if self.phase == "parked":
            held = {"step": self.step, "prepared": self.prepared, "made": self.made, "why": self.why}
            return {"type": "parked", "generation": self.generation, **held}
        if self.phase == "ready":
            return {"type": "ready", "generation": self.generation, "step": self.step, "digest": self.digest}
        return None
