"""A job that gives no layout gets one, and is told why and what to expect."""

from __future__ import annotations

import pytest

from phalanx.core.errors import UserError
from phalanx.run import planned

SETS = ["layout=auto", "recovery.spares=0"]


@pytest.fixture(autouse=True)
def nothing_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(planned, "calibration", lambda: tmp_path / "calibration.json")
    monkeypatch.setattr(planned, "GPUS", tmp_path / "gpus")


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_the_planner_chooses_for_so_many_ranks(ranks):
    sets = [*SETS, f"layout.ranks={ranks}", "train.global_batch=24"]
    resolved, forecast = planned.resolve(None, sets)
    assert resolved.job.layout.world_size == ranks
    assert forecast and forecast.plan.used == ranks and forecast.plan.step_s > 0
    first, second = forecast.why
    assert resolved.job.layout.describe() in first and "guess" in second


def test_a_layout_that_is_given_stays_as_it_is():
    resolved, forecast = planned.resolve(None, ["layout.tp=2", "layout.replica=1", "recovery.spares=0"])
    assert forecast is None and resolved.job.layout.tp == 2
    resolved, forecast = planned.resolve(None, SETS)
    assert forecast is None and resolved.job.layout.world_size == 1, "there is nothing to choose"


def test_what_the_job_gives_of_the_training_is_kept():
    sets = [*SETS, "layout.ranks=2", "train.micro_batch=4", "train.recompute=full"]
    resolved, _ = planned.resolve(None, sets)
    assert (resolved.job.train.micro_batch, resolved.job.train.recompute) == (4, "full")


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="remedy"):
        planned.resolve(None, [*SETS, "layout.ranks=7", "train.global_batch=4"])


def test_accelerators_are_found_by_name(tmp_path):
    for i in range(2):
        folder = tmp_path / "gpus" / f"0000:{i}"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 16\n")
    resolved, forecast = planned.resolve(None, [*SETS, "train.precision=bf16"])
    assert resolved.job.layout.world_size == 2
    assert forecast and "h200" in forecast.plan.hardware
    for file in (tmp_path / "gpus").glob("*/information"):
        file.write_text("Model: Voodoo 2\n")
    _, forecast = planned.resolve(None, [*SETS, "train.precision=bf16"])
    assert "unknown accelerator" in forecast.why[1]


def test_in_the_end_both_figures_are_told():
    _, forecast = planned.resolve(None, [*SETS, "layout.ranks=2"])
    step = forecast.plan.step_s
    told = forecast.compared({"median_step_s": 1.5 * step, "tokens_per_s": 1000.0, "peak_memory_bytes": 2e9})
    assert "measured (+50%)" in told and "1,000 measured" in told and "2.00 measured" in told
    assert forecast.compared({"steps": 0}) == ""
