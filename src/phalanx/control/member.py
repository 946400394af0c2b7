"""A worker's half of the protocol: which commands it obeys, and what it says of itself. Worlds, gradients and the
agreements inside a replica are the caller's; this says when.

    new -> building -> built -> entering -> running -> built ...      its replica stays whole
           any of them -> parked -> building ...                      its world is broken, or is not wanted any more
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from phalanx.control.messages import Source


def in_common(step: int, prepared: int, made: int, last_made: int) -> tuple[int, int, int]:
    """Return what all ranks of a replica hold, from the least that any of them says, and the last generation in which
    one was made: nothing, if some have taken a state to enter with and others have not. Then each has to be asked."""
    return (step, prepared, made) if made == last_made else (-1, -1, 0)


@dataclass(slots=True)
class Member:
    worker: int
    steps: int  # of the whole run
    speaks: bool = False  # for its replica
    phase: str = "new"
    world: int = 0  # the last that it heard of
    generation: int = 0  # the last that it heard of
    parted: int = -1  # the last that it has left, with its replica whole
    step: int = -1  # of the state that it holds; -1: none
    prepared: int = -1  # the step that it has voted yes for, or `step`
    made: int = 0  # the generation in which that was
    agreed: tuple[int, int, int] = (-1, -1, 0)  # the same, of its whole replica, when it parted
    kept: bool = False  # the gradients of what was dealt to its replica of the next step
    pause: bool = False
    lacks: dict[str, Any] | None = None  # why it could not enter the generation
    why: dict[str, Any] | None = None  # the error that made it leave its world: kind, text, phase and step

    # -- the world

    def build(self, world: int) -> bool:
        """Whether to form the groups of the replica and make an engine. Not twice, and not for one that is over."""
        if world <= self.world:
            return False
        self.world, self.phase, self.why = world, "building", None
        return True

    def built(self) -> None:
        assert self.phase == "building", self
        self.phase, self.parted, self.kept = "built", -1, False

    def halt(self, world: int, why: dict[str, Any] | None = None) -> bool:
        """Leave the world: nothing of it is obeyed from now on. Never in the middle of an update. False: the command is
        older than what it does. `why`: the error that makes it leave."""
        if world < self.world:
            return False
        if world > self.world or self.phase != "parked":
            self.why = why
        self.world, self.phase, self.kept = world, "parked", False
        return True

    # -- the generation

    def form(self, generation: int, world: int, source: Source | None) -> bool:
        """Whether to enter the generation. Not one that is over, and not from another world than it is meant for."""
        if generation <= self.generation or self.phase != "built" or world != self.world:
            return False
        self.generation, self.phase, self.pause, self.lacks = generation, "entering", False, None
        if source is not None:
            self.step = self.prepared = -1
        return True

    def may_serve(self, generation: int) -> bool:
        """Whether it may settle for a generation that it is not in, for others to take its state. Not for one that it
        is in or was: that message is late, and what it has prepared since may count."""
        return generation > self.generation and self.phase != "running"

    def settle(self, step: int) -> bool:
        """Go on from `step` with what it holds. True after the prepared step was taken: its gradients are to be applied
        now. ValueError: it does not hold that step."""
        if step < 0 or step not in (self.step, self.prepared):
            raise ValueError(f"it holds step {self.step}, and has prepared {self.prepared}")
        apply = step > self.step
        self.step = self.prepared = step
        return apply

    def lack(self, reason: str, damaged: bool = False, groups: bool = False) -> None:
        """It cannot enter: the state cannot be had from the source that was named, or the groups cannot be formed."""
        self.lacks = {"reason": reason or "it is not there", "damaged": damaged, "groups": groups}

    def restored(self, step: int) -> None:
        """The state that it was to enter with is there; it counts like the steps of this generation."""
        self.step, self.prepared, self.made = step, step, self.generation

    def formed(self, step: int) -> bool:
        """The state is there, and so are the groups. Returns whether there is anything left to train."""
        assert self.phase == "entering", self
        self.phase, self.step, self.prepared, self.made = "running", step, step, self.generation
        if step >= self.steps:
            self.part(self.generation)
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
            self.part(self.generation)
        return self.phase == "running"

    def ask_pause(self, generation: int) -> None:
        if generation == self.generation:
            self.pause = True

    def part(self, generation: int, agreed: tuple[int, int, int] | None = None, kept: bool = False) -> bool:
        """Leave the groups of the generation, or do not enter it, with all ranks of its replica. False: it is not in a
        world, or the command is old. `agreed`: the least step, prepared and made of the replica's ranks; None: all have
        its own."""
        if generation < self.generation or self.phase not in ("built", "entering", "running"):
            return False
        if generation > self.parted:
            self.generation = self.parted = generation
            self.phase, self.kept = "built", kept
            self.agreed = agreed or (self.step, self.prepared, self.made)
        return True

    # -- what it says

    def standing(self) -> dict[str, Any] | None:
        """What it reports of itself, now or again; None: nothing."""
        held = {"step": self.step, "prepared": self.prepared, "made": self.made}
        if self.phase == "parked":
            return {"type": "parked", "world": self.world, **held, "why": self.why}
        if self.phase == "entering" and self.lacks:
            return {"type": "missing", "generation": self.generation, **self.lacks}
        about = {"world": self.world, "generation": self.generation}
        if self.phase == "built" and self.parted < 0:
            return {"type": "built", "world": self.world}
        if self.phase == "built" and self.speaks:
            step, prepared, made = self.agreed
            about["generation"] = self.parted
            return {"type": "parted", **about, "step": step, "prepared": prepared, "made": made, "kept": self.kept}
        if self.phase == "running" and self.speaks:
            return {"type": "formed", **about}
        return None
