"""Bubbles of all schedules."""

import numpy as np
import pytest

from phalanx.plan.cost.bubbles import bubble_s, stage_layers
from phalanx.plan.cost.candidates import SCHEDULES


def bubble(name: str, pp: int, m: int, vpp: int = 1, f: float = 1.0, d: float = 1.0, w: float = 1.0) -> float:
    columns = (np.array([SCHEDULES.index(name)]), *(np.array([float(x)]) for x in (pp, vpp, m, f, d, w)))
    return float(bubble_s(*columns)[0])


def test_1f1b_is_the_requirements_share():
    """(p-1)/(m+p-1) of the step."""
    idle, busy = bubble("1f1b", 16, 512), 512 * 3.0
    assert idle / (idle + busy) == pytest.approx(15 / (512 + 15))
    assert bubble("gpipe", 16, 512) == idle


def test_interleaving_divides_it_and_a_ragged_last_round_adds():
    assert bubble("interleaved", 8, 64, vpp=4) == pytest.approx(bubble("1f1b", 8, 64) / 4)
    assert bubble("interleaved", 8, 65, vpp=4) > bubble("interleaved", 8, 64, vpp=4)


def test_zero_bubble_schedules():
    """arXiv:2401.10241: (p-1)(F+B-W), (p-1)(F+B-2W); ZB-V has none when the three are equal."""
    assert bubble("zb-h1", 8, 64, f=1, d=1.2, w=0.8) == pytest.approx(7 * 1.4)
    assert bubble("zb-h2", 8, 64, f=1, d=1.2, w=0.8) == pytest.approx(7 * 0.6)
    assert bubble("zbv", 8, 64, vpp=2) == 0
    assert bubble("zb-h2", 8, 64, w=3) == 0  # never less than none


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_pipeline_no_bubble(name):
    assert bubble(name, 1, 8) == 0


def test_the_last_stage_carries_the_head():
    layers, head = stage_layers(np.array([80.0]), np.array([4.0]), np.array([5.0]), np.array([1.2]))
    assert layers[0] == 20 and head[0] == 1
    # 126 layers on 8 ranks: 16 on most, and one fewer on the ranks that have embedding and head.
    layers, head = stage_layers(np.array([126.0]), np.array([8.0]), np.array([8.0]), np.array([0.8]))
    assert layers[0] == 16 and head[0] == 0
