"""A step that is left out changes nothing, and the optimizer does not count it. When this fails, one bad batch ends a
run of weeks, or leaves Adam with a wrong bias correction."""

import math

import pytest

from phalanx.core.job import TrainConfig
from phalanx.train.skips import LEAST, WINDOW, in_a_row, remembered, suspects, why_skip
from tests.cases import make_job


@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (1.0, math.inf), (math.inf, math.nan)])
def test_what_is_not_finite_is_skipped(loss, norm):
    assert "the loss is" in why_skip(TrainConfig(), [], loss, norm)


def test_a_spike_is_skipped_if_it_is_asked_for_and_enough_is_known():
    usual = [2.0 + 0.1 * (i % 3) for i in range(LEAST)]
    assert why_skip(TrainConfig(spike=6), usual, 5.0, 1.0).startswith("the loss 5 is")
    assert not why_skip(TrainConfig(spike=6), usual, 2.3, 1.0)
    assert not why_skip(TrainConfig(), usual, 5.0, 1.0)
    assert not why_skip(TrainConfig(spike=6), usual[:-1], 5.0, 1.0)


def test_skipped_steps_are_counted_in_a_row_and_do_not_make_the_next_spike_usual():
    train, recent = TrainConfig(spike=6), []
    for _ in range(LEAST):
        recent = remembered(train, recent, 2.0, False)
    for _ in range(3):
        recent = remembered(train, recent, 50.0, True)
    assert in_a_row(recent) == 3 and why_skip(train, recent, 50.0, 1.0)
    recent = remembered(train, recent, 2.0, False)
    assert in_a_row(recent) == 0
    for _ in range(2 * WINDOW):
        recent = remembered(train, recent, 2.0, False)
    assert len(recent) == WINDOW
    assert remembered(TrainConfig(), [None], 2.0, False) == []  # nothing to carry where nothing is compared


def test_the_suspects_are_the_micro_batches_that_are_not_finite_or_the_worst():
    assert suspects([1.0, 2.0, math.nan, 1.0], 1) == [2]
    assert suspects([1.0, 2.0, math.nan, 1.0, 1.0, 1.0], 2) == [1]
    assert suspects([1.0, 5.0, 2.0], 1) == [1]


@pytest.mark.parametrize(
    "options",
    [dict(), dict(precision="bf16"), dict(reduction="exact"), dict(precision="fp32", optimizer=dict(offload="cpu"))],
    ids=["fp64", "bf16", "exact", "offloaded"],
)
def test_a_skipped_step_leaves_the_bits_of_a_run_that_never_had_it(pool, options):
    (answer,) = pool.run("tests.train.skip_cases:skip_one", make_job((1, 1, 1), **options))
    assert answer["digest"] == answer["without"] and answer["updates"] == 2 and answer["step"] == 3


def test_what_compression_owes_is_not_poisoned_by_a_skipped_step(pool):
    job = make_job((2, 1, 1), precision="fp32", compress="int8")
    assert all(answer["finite"] for answer in pool.run("tests.train.skip_cases:poison", job))
