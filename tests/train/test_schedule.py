"""The learning rate at the points a user would check."""

import itertools

import pytest

from phalanx.core.job import OptimizerConfig
from phalanx.train.schedule import learning_rate


def test_cosine_warms_up_peaks_and_ends_near_its_floor():
    c = OptimizerConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    rates = [learning_rate(c, s, 100) for s in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.55)
    assert 0.1 < rates[-1] < 0.102


def test_wsd_is_flat_then_falls_linearly():
    c = OptimizerConfig(lr=1.0, schedule="wsd", warmup_steps=10, decay_steps=20, min_lr_ratio=0.0)
    rates = [learning_rate(c, s, 100) for s in range(100)]
    assert set(rates[10:80]) == {1.0}
    falls = [a - b for a, b in itertools.pairwise(rates[79:])]
    assert max(falls) - min(falls) < 1e-12
    assert 0 < rates[-1] == pytest.approx(1 / 21)


def test_no_warm_up_starts_at_the_peak():
    assert learning_rate(OptimizerConfig(lr=1.0, warmup_steps=0), 0, 100) == 1.0


def test_the_default_warm_up_is_a_tenth_of_the_run():
    rates = [learning_rate(OptimizerConfig(lr=1.0), s, 200) for s in range(200)]
    assert rates[18] < 1.0 and rates[19] == 1.0
