"""The bars on the project's own copy of the published runs. They fail when a change makes the model worse, or when
profiles.toml was not written again after one."""

import csv
from pathlib import Path

import numpy as np
import pytest

from phalanx.hardware import load
from phalanx.plan import fit as fitting
from phalanx.plan.docs import FAR, cause_of, planner_page
from phalanx.plan.profiles import BOUNDS, default_profile, fitted
from phalanx.plan.reading import read_runs
from phalanx.plan.runs import COLUMNS
from phalanx.plan.table import RunTable
from phalanx.plan.validate import validate

ROOT = Path(__file__).parents[2]
RUNS = ROOT / "src" / "phalanx" / "plan" / "published_runs.csv"


@pytest.fixture(scope="module")
def result():
    return validate(RUNS)


def test_every_row_is_read(result):
    assert len(result.rows) == 505 and not result.bad


def test_dense_bf16_with_complete_plans(result):
    score = result.by_stratum["dense bf16, complete"]
    assert score.rows >= 180
    assert score.median_abs_error <= 0.05 and score.p95_abs_error <= 0.20
    assert score.left_out_median <= 0.10 and score.left_out_p95 <= 0.20


@pytest.mark.parametrize(
    ("stratum", "left_out"), [("fp8", 0.12), ("MoE", 0.12), ("dense bf16, incomplete", 0.12), ("TPU", 0.18)]
)
def test_the_other_kinds(result, stratum, left_out):
    score = result.by_stratum[stratum]
    assert score.median_abs_error <= 0.12 and score.left_out_median <= left_out
    assert score.rank_correlation > 0.95


def test_intervals_cover_what_they_say(result):
    assert 0.85 <= result.total.coverage <= 0.95


def test_weak_scaling_is_flat_where_reality_is(result):
    """Llama 3.1 70B bf16 on 64 to 2,048 H100: the published step is the same within 0.2 %."""
    runs = [
        r
        for r in result.rows
        if r.model == "Llama-3.1-70B" and r.stratum == "dense bf16, complete" and "dgxc" in r.source
    ]
    steps = [r.predicted_s for r in runs]
    assert len(runs) == 4 and max(steps) / min(steps) < 1.02


def test_no_run_that_ran_is_called_impossible(result):
    assert [row.row for row in result.rows if not row.fits] == []


def test_each_miss_has_a_cause(result):
    assert [row.row for row in result.rows if abs(row.error) > FAR and cause_of(row) is None] == []


def test_the_page_is_the_one_that_the_code_writes():
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    assert page == planner_page(), "run `python -m phalanx.plan.docs`"


def test_profiles_are_those_of_this_model():
    """The numbers in profiles.toml are where a fit of today's model would stop: a step from them gains nothing much."""
    runs, _ = read_runs(RUNS, load())
    keep = [run for run in runs if run.framework == "llm-foundry"]
    table = RunTable.of(keep)
    own = np.array([fitted().efficiency(fitting._keys(run)) for run in keep])
    here = np.abs(table.log_step(own) - table.published).mean()
    for factor in np.exp(0.1 * np.vstack([np.eye(3), -np.eye(3)])):
        assert np.abs(table.log_step(own * factor) - table.published).mean() > here


def test_at_most_three_numbers_a_cluster():
    clusters = fitted().factors["cluster"]
    assert len(clusters) > 40 and all(len(row) == 3 for row in clusters.values())


def test_defaults_are_sane_for_clusters_nobody_measured():
    for chip in ("h100", "b200", "mi300x", "no-such-chip"):
        for experts in (False, True):
            profile = default_profile(chip, experts=experts)
            logs = np.log([profile.matmul, profile.other, profile.network])
            assert (logs >= BOUNDS[0]).all() and (logs <= BOUNDS[1]).all() and profile.low < 0 < profile.high


def test_a_cluster_is_fitted_to_its_own_runs(tmp_path):
    """vTrain's runs of small GPTs on one node of A100 (every sixth of 1,440): no worse than its own 8.4 %."""
    with (Path(__file__).parent / "data" / "vtrain_a100_single_node.csv").open() as file:
        rows = list(csv.DictReader(file))[::6]
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        for row in rows:
            writer.writerow({
                "source": "vTrain, Megatron-LM SC21 settings", "model": "GPT", "layers": row["layers"],
                "hidden": row["hidden"], "heads": row["heads"], "ffn": 4 * int(row["hidden"]), "vocab": 51200,
                "seq_len": row["seq"], "gpu": "A100-80GB", "num_gpus": row["gpus"], "tp": row["tp"], "pp": row["pp"],
                "vpp": 1, "zero_stage": 0, "micro_batch": row["micro_batch"], "global_batch": row["global_batch"],
                "precision": "fp16", "recompute": "full", "step_time_s": float(row["step_ms"]) / 1e3,
                "notes": "no sequence parallelism",
            })  # fmt: skip
    runs, bad = read_runs(path, load())
    assert len(runs) == 240 and not bad
    table = RunTable.of(runs)
    got = fitting.fit(table)
    error = np.expm1(table.log_step(got.efficiency(runs)) - table.published)
    assert np.abs(error).mean() < 0.084 and np.median(np.abs(error)) < 0.07
