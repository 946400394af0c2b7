"""The phases of a step add up to it, and what was not forward, backward or a save is named."""

from __future__ import annotations

import pytest

from phalanx.observe.phases import PHASES, as_planned, work_s
from phalanx.observe.progress import Phase
from phalanx.parallel.device import Device
from phalanx.train.engine import Pass
from phalanx.train.timed import Timed


def test_every_moment_of_a_step_is_in_one_phase():
    passes = [Pass(Phase.forward, 1.0, 1.5), Pass(Phase.backward, 1.75, 2.75), Pass(Phase.forward, 2.75, 3.25)]
    timed = Timed(7, 0.25, passes, (1.0, 3.5, 4.0, 5.0, 5.25), saved_s=0.75)
    phases = timed.phases(Device.seconds_between)
    assert list(phases) == list(PHASES)
    assert phases == {
        "data": 0.25, "forward": 1.0, "backward": 1.0, "gaps": 0.5, "reduce": 0.5, "vote": 0.25, "optimizer": 0.25,
        "checkpoint": 0.75,
    }  # fmt: skip
    assert sum(phases.values()) == pytest.approx(0.25 + 4.25)
    assert work_s(phases) == pytest.approx(0.25 + 2.0 + 0.25 + 0.75), "waiting for others is nobody's work"
    planned = as_planned(phases)
    assert planned["passes"] == 2.5 and planned["between"] == 0.25 and sum(planned.values()) == sum(phases.values())
