"""Accuracy bars on the project's own copy of the published runs, with every row's source left out of the fit. They fail
if a change makes the model worse, or if fitted.toml was not rewritten after a change."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.hardware.catalogue import load_packaged
from phalanx.plan.cost.intervals import interval
from phalanx.plan.cost.numbers import fitted, numbers, values
from phalanx.plan.cost.profiles import default_profile
from phalanx.plan.lab import fit as fitting
from phalanx.plan.lab.columns import RunTable
from phalanx.plan.lab.reading import packaged, read_runs
from phalanx.plan.lab.runs import COLUMNS
from phalanx.plan.lab.validate import LeftOut, validate


@pytest.fixture(scope="module")
def result():
    return validate()


@pytest.fixture(scope="module")
def runs():
    return read_runs(packaged(), load_packaged())[0]


def test_every_row_is_read_and_left_out(result):
    assert len(result.rows) == 505 and not result.bad and all(row.fitted for row in result.rows)


def test_the_bars_of_sources_left_out(result):
    dense, experts = result.by_stratum["dense bf16, complete"], result.by_stratum["MoE"]
    assert dense.rows >= 180 and dense.median_abs_error <= 0.07 and dense.p95_abs_error <= 0.25
    assert experts.rows >= 140 and experts.median_abs_error <= 0.12 and experts.p95_abs_error <= 0.40
    assert len(numbers()) <= 60


@pytest.mark.parametrize("stratum", ["fp8", "dense bf16, incomplete", "TPU", "MoE"])
def test_the_other_kinds(result, stratum):
    score = result.by_stratum[stratum]
    assert score.median_abs_error <= 0.12 and score.rank_correlation > 0.95


def test_intervals_cover_what_they_say(result):
    assert 0.85 <= result.total.coverage <= 0.95
    assert 0.85 <= LeftOut.read().publisher_coverage() <= 0.95
    for stratum in ("dense bf16, complete", "fp8", "MoE"):
        assert 0.85 <= result.by_stratum[stratum].coverage <= 0.97


def test_weak_scaling_is_nearly_flat_where_reality_is(result):
    """Llama 3.1 70B bf16 on 64 to 2,048 H100: the published step is the same within 0.2 %."""
    steps = [
        row.predicted_s
        for row in result.rows
        if row.model == "Llama-3.1-70B" and row.stratum == "dense bf16, complete" and "dgxc" in row.source
    ]
    assert len(steps) == 4 and max(steps) / min(steps) < 1.07


def test_no_run_that_ran_is_called_impossible(result):
    assert [row.row for row in result.rows if not row.possible] == []


def test_the_numbers_are_where_a_fit_of_this_model_stops(runs):
    """A fit that starts from the shipped numbers gains nothing worth a step."""
    table = RunTable.of(runs)
    left = table.log_step(values()) - table.published
    logs = np.log([values()[name] for name in fitting.NAMES])
    here = fitting.huber(left).sum() + 0.5 * (fitting.RIDGE * (logs - fitting.PRIOR) ** 2).sum()
    assert here == pytest.approx(fitting.fit(table).loss, abs=1.0)


def test_stored_predictions_are_not_stale(runs):
    """`left_out.csv` was written by this code and these numbers; otherwise everything is refitted."""
    from phalanx.plan.lab.validate import STALE, _stored

    assert np.abs(_stored()[:, 0] - RunTable.of(runs).log_step(values())).max() < STALE


def test_a_left_out_source_has_no_part_in_its_prediction(runs, monkeypatch):
    """Changing a source's figures does not change the predictions of it, so nothing leaks."""
    monkeypatch.setattr(fitting, "ROUNDS", 2)
    few = [run for run in runs if run.engine in ("torchtitan", "megascale", "megatron-2023", "deepspeed")]
    groups = np.array([run.source for run in few])
    spoiled = [replace(run, step_s=2 * run.step_s) if run.source == groups[0] else run for run in few]
    honest, other = (fitting.left_out(RunTable.of(some), groups) for some in (few, spoiled))
    mine = groups == groups[0]
    assert honest[mine] == pytest.approx(other[mine], abs=1e-12) and np.abs(honest - other)[~mine].max() > 1e-4


@pytest.mark.slow
def test_the_stored_left_out_predictions_are_those_of_a_fit(runs):
    afresh = LeftOut.read(refit=True)
    assert afresh.logs == pytest.approx(LeftOut.read().logs, abs=2e-3)


def test_intervals_widen_with_lack_of_evidence():
    """Software without published runs widens them, and a chip without any widens them further."""
    catalogue = load_packaged()
    for kind in ("dense", "fp8"):
        seen, unseen, no_chip = interval(kind, True), interval(kind, False), interval(kind, False, chip_known=False)
        widths = [high - low for low, high in (seen, unseen, no_chip)]
        assert widths[0] < widths[1] < widths[2]
    known, own, strange = (
        default_profile(catalogue.chip(chip), engine)
        for chip, engine in (("h100", "nemo"), ("h100", "phalanx"), ("mi300x", "phalanx"))
    )
    spans = [high - low for low, high in (p.interval(False, "bf16") for p in (known, own, strange))]
    assert spans[0] < spans[1] < spans[2]
    assert "published runs of nemo" in known.evidence and "no published run of phalanx" in own.evidence
    assert "no published run on mi300x" in strange.evidence


def test_rows_that_the_fit_has_not_seen_are_predicted_by_the_shipped_numbers(tmp_path):
    with packaged().open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        row = next(reader)
        names = reader.fieldnames
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names or [])
        writer.writeheader()
        writer.writerows([row, row | {"num_gpus": "192", "dp": "96"}])
    old, new = validate(path).rows
    assert old.fitted and old.predicted_s != old.shipped_s
    assert not new.fitted and new.predicted_s == new.shipped_s and new.known


def test_a_node_that_no_fit_has_seen(tmp_path):
    """vTrain's runs of small GPTs on one node of A100 (every sixth of 1,440). None of them is in the fit, and their
    recomputation is not stated."""
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
                "precision": "fp16", "step_time_s": float(row["step_ms"]) / 1e3, "notes": "no sequence parallelism",
            })  # fmt: skip
    score = validate(path).total
    assert score.rows == 240 and score.median_abs_error < 0.12 and score.rank_correlation > 0.95


def test_the_evidence_is_counted(runs):
    assert sum(fitted()["seen"].values()) == len(runs)


def test_the_pages_are_those_that_the_code_writes():
    from phalanx.plan.lab.docs import planner_page, wrong_page
    from phalanx.plan.lab.teams import teams_page

    docs = Path(__file__).parents[2] / "docs"
    for name, text in (("planner", planner_page()), ("how-wrong", wrong_page()), ("plans-and-teams", teams_page())):
        assert (docs / f"{name}.md").read_text(encoding="utf-8") == text, "run `python -m phalanx.plan.lab.docs`"


def test_plans_stand_beside_the_layouts_of_twelve_teams():
    """By prediction, the plan is no slower than the team's layout wherever the model says that the latter fits; each
    difference has a reason."""
    from phalanx.plan.lab.teams import compared

    found = compared()
    assert len(found) == 12 and all(c.why and c.source for c in found)
    assert all(c.gain >= -1e-9 for c in found if c.published_fits)
    assert sum(c.published_fits for c in found) >= 9
