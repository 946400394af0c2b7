"""StepTable: one row per step, whatever the order in which ranks report."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.steps import StepTable


def report(step=0, time_s=1.0, loss_sums=(), tokens=0, grad_norm=0.5, lr=1e-3, generation=0):
    whole = {"loss_sums": list(loss_sums), "tokens": tokens, "data_digest": "e"} if tokens else None
    return {
        "type": "step", "step": step, "time_s": time_s, "grad_norm": grad_norm, "lr": lr, "whole": whole,
        "generation": generation,
        "data_wait_s": time_s / 8, "data_ready": int(2 * time_s) + 1, "served": {"a": 4} if tokens else {},
        "phases": {"passes": time_s, "reduce": 3 - time_s, "optimizer": time_s / 4},
    }  # fmt: skip


def test_a_row_comes_when_the_last_rank_has_reported():
    table = StepTable(world_size=4, tokens_per_step=800, flops_per_token=50, peak_flops=1e5)
    assert table.add(0, report(loss_sums=[100.0, 200.0, 300.0], tokens=400, time_s=1.0)) is None
    assert table.add(3, report(time_s=2.0)) is None
    assert table.add(0, report(step=1)) is None  # a rank may be a step ahead
    assert table.add(2, report(loss_sums=[100.0, 200.0, 300.0], tokens=400, time_s=0.5)) is None
    assert table.add(1, report(time_s=1.5)) == {
        "step": 0, "loss": 1.5, "grad_norm": 0.5, "lr": 1e-3, "target_tokens": 400,
        "time_s": 2.0, "time_min_s": 0.5, "time_median_s": 1.25, "slowest_rank": 3,
        "tokens_per_s": 400.0, "mfu": 0.2,
        "data_wait_s": 0.25, "data_ready": 2, "data_digest": "e", "generation": 0, "record": "", "served": {"a": 8},
        "rank_times": {0: 1.0, 1: 1.5, 2: 0.5, 3: 2.0},
        "phases": {"passes": 2.0, "reduce": 1.0, "optimizer": 0.5},
    }  # fmt: skip
    assert list(table._open) == [(0, 1)], "a finished step is still in memory"
    assert table.events == []


@given(st.lists(st.floats(-1e300, 1e300), min_size=4, max_size=12), st.randoms(use_true_random=False))
def test_the_loss_does_not_depend_on_the_order(sums, rng):
    shuffled = list(sums)
    rng.shuffle(shuffled)
    rows = [StepTable(1, 1).add(0, report(loss_sums=x, tokens=3)) for x in (sums, shuffled)]
    assert rows[0]["loss"].hex() == rows[1]["loss"].hex()


def test_when_ranks_are_gone_the_others_have_reported_what_counted():
    table = StepTable(world_size=3, tokens_per_step=1)
    for rank in (1, 2):  # rank 0 died
        table.add(rank, report(step=4, loss_sums=[3.0], tokens=2 if rank == 2 else 0))
        table.add(rank, report(step=5))
    (row,) = table.settle(1, 5, world_size=2)
    assert (row["step"], row["loss"]) == (4, 1.5) and not table._open, "step 5 is redone"
    assert table.add(1, report(step=4, generation=1)) is None and not table._open, "it is settled"
    table.add(1, report(step=5, generation=1))
    assert table.add(2, report(step=5, loss_sums=[1.0], tokens=1, generation=1))["loss"] == 1.0


def test_reports_may_come_before_the_word_that_their_generation_has_begun():
    """Ranks and controller speak by different ways."""
    table = StepTable(world_size=3, tokens_per_step=1)
    table.add(0, report(step=5))  # of the step that broke
    for step in (5, 6):
        for rank in (1, 2):
            assert table.add(rank, report(step=step, loss_sums=[3.0], tokens=2, generation=1)) is None
    table.add(1, report(step=7, generation=1))
    assert table.settle(1, 5, world_size=2) == []
    assert [(row["step"], row["loss"]) for row in table.complete()] == [(5, 1.5), (6, 1.5)]
    assert table.add(2, report(step=7, loss_sums=[1.0], tokens=1, generation=1))["step"] == 7


@pytest.mark.parametrize("sums", [[math.inf, -math.inf], [math.nan, 1.0], [1.7e308, 1.7e308]])
def test_a_loss_that_has_left_the_numbers_still_gives_a_row(sums):
    row = StepTable(1, 1).add(0, report(loss_sums=sums, tokens=2))
    assert row is not None and not math.isfinite(row["loss"])


def test_a_step_without_targets_has_no_loss():
    row = StepTable(1, 10).add(0, report(time_s=0.0))
    assert math.isnan(row["loss"]) and row["tokens_per_s"] == 0.0 and row["mfu"] is None


def test_a_norm_that_differs_in_its_last_bit_is_flagged():
    table = StepTable(world_size=4, tokens_per_step=1)
    for rank in range(4):
        table.add(rank, report(step=9, grad_norm=math.nextafter(0.5, 1) if rank == 2 else 0.5))
    (event,) = table.events
    assert (event["type"], event["step"], event["ranks"]) == ("grad_norm differs", 9, [2])
    same_nan = StepTable(world_size=2, tokens_per_step=1)
    for rank in range(2):
        same_nan.add(rank, report(grad_norm=math.nan))
    assert same_nan.events == [], "all ranks agree that it is not a number"
