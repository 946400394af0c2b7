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


def h200(tmp_path, count=1):
    for i in range(count):
        folder = tmp_path / "gpus" / f"0000:{i}"
        folder.mkdir(parents=True)
        (folder / "information").write_text("Model: NVIDIA H200\n")


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_the_planner_chooses_for_so_many_ranks(ranks):
    sets = [*SETS, f"layout.ranks={ranks}", "train.global_batch=24"]
    resolved, forecast = planned.resolve(None, sets)
    assert resolved.job.layout.world_size == ranks
    assert forecast and forecast.plan.used == ranks and forecast.plan.step_s > 0
    first, second = forecast.why
    assert resolved.job.layout.describe() in first and "guess" in second


def test_a_mapping_is_planned_like_a_file():
    """`phalanx.train` takes one, with or without a layout."""
    job = {"model": {"preset": "tiny"}, "layout": {"ranks": 4}, "train": {"global_batch": 24}}
    resolved, forecast = planned.resolve(job)
    assert forecast and resolved.job.layout.world_size == 4 and resolved.job.train.global_batch == 24
    assert planned.resolve({"layout": {"shard": 2}})[1] is None


def test_a_layout_that_is_given_stays_as_it_is():
    resolved, forecast = planned.resolve(None, ["layout.tp=2", "layout.replica=1", "recovery.spares=0"])
    assert forecast is None and resolved.job.layout.tp == 2
    resolved, forecast = planned.resolve(None, SETS)
    assert forecast is None and resolved.job.layout.world_size == 1, "there is nothing to choose"


def test_what_the_job_gives_of_the_training_is_kept():
    sets = [*SETS, "layout.ranks=2", "train.micro_batch=4", "train.recompute=full"]
    resolved, _ = planned.resolve(None, sets)
    assert (resolved.job.train.micro_batch, resolved.job.train.recompute) == (4, "full")


@pytest.mark.parametrize("layout", [["layout.tp=2", "layout.replica=1", "recovery.spares=0"], SETS])
def test_accelerators_compute_in_bf16_unless_the_job_says_otherwise(tmp_path, layout):
    assert planned.resolve(None, layout)[0].job.train.precision == "fp32", "a CPU"
    h200(tmp_path)
    assert planned.resolve(None, layout)[0].job.train.precision == "bf16"
    assert planned.resolve(None, [*layout, "train.precision=fp32"])[0].job.train.precision == "fp32"
    assert planned.resolve(None, [*layout, "run.device=cpu"])[0].job.train.precision == "fp32"


def test_what_cannot_be_is_refused():
    with pytest.raises(UserError, match="remedy"):
        planned.resolve(None, [*SETS, "layout.ranks=7", "train.global_batch=4"])


def test_accelerators_are_found_by_name(tmp_path):
    h200(tmp_path, 2)
    resolved, forecast = planned.resolve(None, [*SETS, "train.precision=bf16"])
    assert resolved.job.layout.world_size == 2
    assert forecast and "h200" in forecast.plan.hardware
    for file in (tmp_path / "gpus").glob("*/information"):
        file.write_text("Model: Voodoo 2\n")
    _, forecast = planned.resolve(None, [*SETS, "train.precision=bf16"])
    assert "unknown accelerator" in forecast.why[1]


def test_in_the_end_both_figures_are_told(tmp_path):
    h200(tmp_path)
    _, forecast = planned.resolve(None, [*SETS, "train.precision=bf16"])
    step = forecast.plan.step_s
    told = forecast.compared({"median_step_s": 1.5 * step, "tokens_per_s": 1000.0, "peak_memory_bytes": 2e9})
    assert "measured (+50%)" in told and "1,000 measured" in told and "2.00 measured" in told
    held = forecast.record({"median_step_s": step}).predicted_bytes
    assert held == forecast.plan.memory_bytes - forecast.plan.memory["context"] - forecast.plan.memory["buffers"]
    assert forecast.compared({"steps": 0}) == ""


def test_moments_that_are_small_or_elsewhere_take_less(tmp_path):
    """4 bytes of a parameter each, less what the allocator adds."""
    h200(tmp_path)
    held = []
    for more in ("optimizer.state=full", "optimizer.state=bf16", "optimizer.offload=cpu"):
        _, forecast = planned.resolve({"train": {"precision": "bf16"}}, ["layout.shard=1", more])
        held.append(forecast.plan.memory["optimizer"] / forecast.plan.params)
    assert held == pytest.approx([10.0, 6.0, 2.0], rel=1e-2)


def measured(forecast, times, **phases):
    return {"steps": 50, "median_step_s": times * forecast.plan.step_s, "tokens_per_s": 1.0, "phases": phases}


def test_a_finished_run_corrects_the_next_plan(tmp_path):
    """Predicted and measured go into a file beside the calibration, and the next forecast for such chips uses it;
    without compounding what earlier runs corrected."""
    h200(tmp_path)
    sets = [*SETS, "train.precision=bf16"]
    _, first = planned.resolve(None, sets)
    assert first
    slow = measured(first, 1.5, data=0.4 * first.plan.step_s)
    assert "in data" in first.compared(slow) and not planned.feedback().exists(), "saying is not learning"
    assert first.learn({"steps": 0}) == {}
    assert first.learn(slow | {"steps": 3})["measured_s"] == slow["median_step_s"] and not planned.feedback().exists()
    for _ in range(3):
        first.learn(slow)
        _, later = planned.resolve(None, sets)
        assert later and 1.1 < later.plan.step_s / first.plan.step_s < 1.5
    later.learn(slow)
    assert planned.resolve(None, sets)[1].plan.pace > 1.3 and "runs here" in later.plan.evidence


def test_a_layout_that_is_given_is_predicted_where_there_is_something_to_go_by(tmp_path):
    """Every run feeds back, not only those that the planner chose; and it is the layout and the code of the job."""
    h200(tmp_path, 2)
    job, found = {"train": {"precision": "bf16", "global_batch": 8}, "layout": {"replica": 1}}, {}
    for more in (("layout.shard=2", "layout.zero=3"), ("layout.tp=2",), ("layout.tp=2", "train.compile=none")):
        resolved, forecast = planned.resolve(job, more)
        assert forecast and len(forecast.why) == 1 and "expected" in forecast.why[0]
        at, layout = forecast.plan.layout, resolved.job.layout
        assert (at["tp"], at["shard"], at["zero"]) == (layout.tp, layout.shard, layout.zero)
        found[more] = forecast.plan.step_s
    assert len(set(found.values())) == 3, "the layout and the compiler count"
    forecast.learn(measured(forecast, 1.2))
    assert planned.resolve(job, ["layout.tp=2"])[1].plan.pace > 1.05


def test_a_layout_over_several_nodes_is_predicted_as_one(tmp_path):
    h200(tmp_path, 8)
    job = {"train": {"precision": "bf16", "global_batch": 32}, "layout": {"shard": 16}}
    _, forecast = planned.resolve(job)
    assert forecast and forecast.plan.chips == 16 and forecast.plan.used == 16


def test_what_may_not_fit_is_said(tmp_path):
    h200(tmp_path)
    train = {"precision": "bf16", "seq_len": 8192, "micro_batch": 4, "global_batch": 4}
    _, forecast = planned.resolve({"model": {"preset": "llama3-8b"}, "train": train, "layout": {"shard": 1}})
    assert forecast and "may not fit" in forecast.why[0]
