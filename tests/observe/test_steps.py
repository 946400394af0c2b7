"""StepTable: one row per step, in any order of reports and with any folding on the way."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.observe.fold import MOST_TIMES, SLOWEST, block_of, fold_of, folded, in_blocks
from phalanx.observe.steps import PATIENCE_S
from phalanx.observe.steps import StepTable as Folded


class StepTable(Folded):
    """A StepTable that takes reports one by one."""

    def add(self, rank, message):
        rows = super().add(fold_of(rank, message))
        assert len(rows) < 2
        return rows[0] if rows else None


def report(step=0, time_s=1.0, loss_sums=(), tokens=0, grad_norm=0.5, lr=1e-3, generation=0):
    whole = {"loss_sums": list(loss_sums), "tokens": tokens, "data_digest": "e"} if tokens else None
    return {
        "type": "step", "step": step, "time_s": time_s, "grad_norm": grad_norm, "lr": lr, "whole": whole,
        "generation": generation,
        "data_wait_s": time_s / 8, "data_ready": int(2 * time_s) + 1, "served": {"a": 4} if tokens else {},
        "phases": {"forward": time_s, "reduce": 3 - time_s, "optimizer": time_s / 4},
    }  # fmt: skip


def test_a_row_comes_when_the_last_rank_has_reported():
    table = StepTable(world_size=4, tokens_per_step=800, flops_per_token=50, peak_flops=1e5)
    assert table.add(0, report(loss_sums=[100.0, 200.0, 300.0], tokens=400, time_s=1.0)) is None
    assert table.add(3, report(time_s=2.0)) is None
    assert table.add(0, report(step=1)) is None  # a rank may be a step ahead
    assert table.add(2, report(loss_sums=[100.0, 200.0, 300.0], tokens=400, time_s=0.5)) is None
    assert table.add(1, report(time_s=1.5)) == {
        "step": 0, "loss": 1.5, "grad_norm": 0.5, "lr": 1e-3, "target_tokens": 400,
        "time_s": 2.0, "time_min_s": 0.5, "time_median_s": pytest.approx(1.0, rel=0.005),
        "slowest_rank": 3, "slowest": [[2.5, 3], [1.875, 1], [1.25, 0], [0.625, 2]],
        "tokens_per_s": 400.0, "mfu": 0.2,
        "data_wait_s": 0.25, "data_ready": 2, "data_digest": "e", "generation": 0, "record": "", "served": {"a": 8},
        "rank_times": [1, {"0": 1.25, "1": 1.875, "2": 0.625, "3": 2.5}],
        "phases": {"forward": 2.0, "reduce": 1.0, "optimizer": 0.5}, "readings": {}, "held": {},
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
    table.settle(0, 4, world_size=3)
    for rank in (1, 2):  # rank 0 died
        table.add(rank, report(step=4, loss_sums=[3.0], tokens=2 if rank == 2 else 0))
        table.add(rank, report(step=5))
    (row,) = table.settle(1, 5, world_size=2)
    assert (row["step"], row["loss"]) == (4, 1.5) and not table._open, "step 5 is redone"
    assert table.add(1, report(step=4, generation=1)) is None and not table._open, "it is settled"
    table.add(1, report(step=5, generation=1))
    assert table.add(2, report(step=5, loss_sums=[1.0], tokens=1, generation=1))["loss"] == 1.0


def test_reports_may_come_before_the_word_that_their_generation_has_begun():
    """Ranks and controller use different paths."""
    table = StepTable(world_size=3, tokens_per_step=1)
    table.add(0, report(step=5))  # of the step that broke
    for step in (5, 6):
        for rank in (1, 2):
            assert table.add(rank, report(step=step, loss_sums=[3.0], tokens=2, generation=1)) is None
    table.add(1, report(step=7, generation=1))
    assert table.settle(1, 5, world_size=2) == []
    assert [(row["step"], row["loss"]) for row in table.complete()] == [(5, 1.5), (6, 1.5)]
    assert table.add(2, report(step=7, loss_sums=[1.0], tokens=1, generation=1))["step"] == 7


def test_a_step_that_all_say_again_has_one_row():
    """Their connections were lost before they heard that it was recorded."""
    table = StepTable(2, 1)
    table.settle(1, 0, 2)
    for _ in range(2):
        rows = [table.add(rank, report(step=0, generation=1)) for rank in (0, 1)]
    assert rows == [None, None]
    assert not table._open


@pytest.mark.parametrize("sums", [[math.inf, -math.inf], [math.nan, 1.0], [1.7e308, 1.7e308]])
def test_a_loss_that_has_left_the_numbers_still_gives_a_row(sums):
    row = StepTable(1, 1).add(0, report(loss_sums=sums, tokens=2))
    assert row is not None and not math.isfinite(row["loss"])


def test_a_step_without_targets_has_no_loss():
    row = StepTable(1, 10).add(0, report(time_s=0.0))
    assert math.isnan(row["loss"]) and math.isnan(row["tokens_per_s"]) and row["mfu"] is None


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


def test_reports_that_are_late_by_a_generation_are_not_lost():
    """They take another path than the news that the next one has begun."""
    table = StepTable(world_size=2, tokens_per_step=1)
    table.settle(1, 3, world_size=2)
    assert table.settle(2, 5, world_size=1) == [], "steps 3 and 4 counted, and nobody has reported them yet"
    assert table.add(0, report(step=5, generation=2, loss_sums=[5.0], tokens=1)) is None, "rows come in order"
    assert table.add(1, report(step=3, generation=1)) is None, "this one does not know the loss"
    assert table.add(0, report(step=3, generation=1, loss_sums=[3.0], tokens=1))["loss"] == 3.0
    rows = Folded.add(table, fold_of(0, report(step=4, generation=1, loss_sums=[4.0], tokens=1)))
    assert [row["loss"] for row in rows] == [4.0, 5.0]
    assert table.finish() == []


def test_a_step_that_nobody_is_left_to_report_has_a_row_that_says_so():
    now = [0.0]
    table = StepTable(world_size=2, tokens_per_step=1, clock=lambda: now[0])
    table.settle(1, 0, world_size=2)
    table.settle(2, 1, world_size=1)
    rows = []
    for step in range(1, 100):
        now[0] += PATIENCE_S / 98
        assert not rows or step == 99, "however many steps there are meanwhile, it is waited for"
        rows += Folded.add(table, fold_of(0, report(step=step, generation=2, loss_sums=[1.0], tokens=1)))
    assert [row["step"] for row in rows] == [*range(100)]
    assert math.isnan(rows[0]["loss"]) and rows[0]["record"] == "" and rows[1]["loss"] == 1.0


@given(st.randoms(use_true_random=False))
def test_the_row_does_not_depend_on_how_reports_were_folded_on_the_way(rng):
    said = [
        fold_of(
            r,
            report(time_s=1 + r / 8, loss_sums=[3.0], tokens=2 * (r % 4 == 0)),
            {"host_cpu": r // 4 / 4, "of another release": 1.0} if r < 8 else None,
        )
        for r in range(12)
    ]
    at_once = Folded(12, 1, 1, 1).add(folded(said)[0])
    read = {"mean": 0.125, "min": 0.0, "min_rank": 0, "max": 0.25, "max_rank": 4}
    assert at_once[0]["readings"] == {"host_cpu": read}
    rng.shuffle(said)
    nodes = [folded(said[i : i + 3]) for i in range(0, 12, 3)]
    racks = [folded([fold for node in nodes[i : i + 2] for fold in node]) for i in (0, 2)]
    racks.insert(rng.randrange(3), nodes[0])  # a node repeated it through another aggregator
    table, rows = Folded(12, 1, 1, 1), []
    for rack in racks:
        for each in rack:
            rows += table.add(each)
    assert rows == at_once


def test_a_slow_rank_is_told_from_those_that_wait_for_it():
    """All ranks end a step together, so the time of the whole step identifies none of them."""
    said = [report(step=3, time_s=1.0) for _ in range(8)]
    for rank, each in enumerate(said):
        slow = rank == 5
        each["phases"] = {"data": 0.1, "forward": 0.5 if slow else 0.2, "reduce": 0.1 if slow else 0.4, "vote": 0.05}
    (fold,) = folded([fold_of(rank, each) for rank, each in enumerate(said)])
    assert fold["slowest"][0] == [pytest.approx(0.6), 5] and len(fold["slowest"]) == SLOWEST
    assert fold["phases"] == {"data": 0.1, "forward": 0.5, "reduce": 0.1, "vote": 0.05}, "longest work, shortest wait"


def test_of_many_ranks_blocks_are_kept_and_the_slowest_is_named():
    ranks = 4 * MOST_TIMES + 3
    folds = [fold_of(rank, report(step=1, time_s=1.0)) for rank in range(ranks)]
    folds[777] = fold_of(777, report(step=1, time_s=1.5))
    halves = [folded(folds[: ranks // 3])[0], folded(folds[ranks // 3 :])[0]]
    (fold,) = folded(halves)
    block, times = fold["times"]
    assert block == block_of(ranks) and len(times) == -(-ranks // block) <= MOST_TIMES
    assert times[str(777 // block)] == max(times.values()) > times["0"] and fold["slowest"][0][1] == 777


def test_the_record_loses_nothing_when_finer_times_than_it_keeps_are_not_sent():
    ranks = 4 * MOST_TIMES + 3
    folds = [fold_of(rank, report(step=1, time_s=1.0 + rank % 97 / 100)) for rank in range(ranks)]
    parts = [folded(folds[first : first + 50]) for first in range(0, ranks, 50)]
    block = block_of(ranks)
    coarse = [in_blocks(fold, block) for (fold,) in parts]
    assert folded(coarse) == folded(fold for (fold,) in parts)
    assert sum(len(fold["times"][1]) for fold in coarse) < ranks / 2
    assert in_blocks(coarse[0], 1) == coarse[0] and in_blocks({"type": "exit"}, block) == {"type": "exit"}


def test_the_least_even_mixture_of_all_stages_is_told():
    table = StepTable(world_size=3, tokens_per_step=1)
    even, uneven = ({"load": load, "layer": f"layers.{load}.moe", "idle": 0} for load in (1.5, 3.0))
    table.add(0, {**report(tokens=1), "experts": even})
    table.add(1, {**report(), "experts": {}})
    row = table.add(2, {**report(), "experts": uneven})
    assert (row["expert_load"], row["expert_layer"], row["expert_idle"]) == (3.0, "layers.3.0.moe", 0)


def test_only_what_all_ranks_hold_is_safe():
    said = [report(step=9) | {"held": held} for held in ({"memory": 8, "buddy": 8}, {"memory": 8, "buddy": 4})]
    (fold,) = folded([fold_of(rank, each) for rank, each in enumerate(said)])
    assert fold["held"] == {"memory": 8, "buddy": 4}
    new = fold_of(2, report(step=9) | {"held": {}})  # it has just joined
    assert folded([fold, new])[0]["held"] == {}


def test_what_was_recorded_elsewhere_is_not_waited_for():
    """A controller that takes over hears only from some ranks; the others have reported to its predecessor."""
    table = StepTable(world_size=2, tokens_per_step=8)
    table.settle(3, 7, 2)
    assert table.add(1, report(step=9, generation=3)) is None  # the other rank's report was recorded before
    assert table.add(0, report(step=10, generation=3)) is None and set(table.unrecorded) == {(3, 9), (3, 10)}
    assert table.add(1, report(step=10, generation=3, tokens=4, loss_sums=[2.0]))["step"] == 10
    assert not table.unrecorded
