"""Timed: when the phases of one step began and ended on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phalanx.observe.phases import Phases
from phalanx.observe.progress import Phase
from phalanx.parallel.device import Moment
from phalanx.train.engine import Pass


@dataclass(frozen=True, slots=True)
class Timed:
    step: int
    data_s: float  # waited for samples
    passes: list[Pass]
    marks: tuple[Moment, Moment, Moment, Moment, Moment]  # began, passed, reduced, updating, updated
    saved_s: float  # waited for a snapshot, or took one

    def phases(self, between: Callable[[Moment, Moment], float]) -> Phases:
        """Return the seconds by phase (see `observe.phases`). The device must have finished the step."""
        began, passed, reduced, updating, updated = self.marks
        spent = {Phase.forward: 0.0, Phase.backward: 0.0}
        for each in self.passes:
            spent[each.phase] += between(each.begin, each.end)
        forward, backward = spent.values()
        return {
            "data": self.data_s,
            "forward": forward,
            "backward": backward,
            "gaps": max(0.0, between(began, passed) - forward - backward),
            "reduce": between(passed, reduced),
            "vote": max(0.0, between(reduced, updating) - self.saved_s),
            "optimizer": between(updating, updated),
            "checkpoint": self.saved_s,
        }
