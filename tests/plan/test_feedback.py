"""Finished runs correct the next plan by their error, less if there are few of them. The memory interval always
contains the peaks that were measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from phalanx.core.errors import UserError
from phalanx.hardware import load
from phalanx.plan.cost.candidates import Candidates
from phalanx.plan.cost.evaluate import evaluate
from phalanx.plan.cost.feedback import Record, append, by_phase, learned, records
from phalanx.plan.cost.profiles import default_profile
from phalanx.plan.cost.sizes import ModelShape

PROFILE = default_profile(load().chip("h100"))
SHAPE = ModelShape.of(32, 4096, 32, 14336, 128256, 8192, kv_heads=8)


def run(times: float, peak: float = 0.0, **measured: float) -> Record:
    return Record("h100", 8, "llama3-8b", 2.0, 2.0 * times, {"passes": 1.2, "reduce": 0.3}, measured, 40e9, 40e9 * peak)


def test_what_is_written_is_read(tmp_path):
    file = tmp_path / "deep" / "feedback.jsonl"
    assert records(file) == []
    for record in (run(1.1, 1.05, data=0.2), run(0.9)):
        append(record, file)
    assert records(file) == [run(1.1, 1.05, data=0.2), run(0.9)]


def test_a_machine_that_is_slower_is_planned_slower(tmp_path):
    """After three runs at 1.3 times the prediction, the next one is most of the way there, with a narrower interval."""
    file = tmp_path / "feedback.jsonl"
    spans, paces = [], []
    for _ in range(3):
        append(run(1.3), file)
        profile = learned(PROFILE, "h100", file)
        low, high = profile.interval(False, "bf16")
        spans.append(high - low)
        paces.append(profile.pace)
    before = PROFILE.interval(False, "bf16")
    assert 1 < paces[0] < paces[1] < paces[2] < 1.3 and paces[2] > 1.2
    assert before[1] - before[0] > spans[0] > spans[1] > spans[2] > 0.1
    cluster, layout = load().cluster("h100", 8), Candidates.of(shard=8, zero=3)
    slow, plain = (evaluate(SHAPE, cluster, layout, 64, p).step_s[0] for p in (profile, PROFILE))
    assert slow == pytest.approx(paces[2] * plain)
    assert "3 runs here" in profile.evidence


def test_other_chips_say_nothing(tmp_path):
    file = tmp_path / "feedback.jsonl"
    append(replace(run(2.0), chip="a100-80"), file)
    assert learned(PROFILE, "h100", file) is PROFILE


def test_every_peak_that_was_seen_lies_inside_the_interval(tmp_path):
    file = tmp_path / "feedback.jsonl"
    for peak in (1.02, 1.10, 0.97):
        append(run(1.0, peak), file)
    low, high = learned(PROFILE, "h100", file).memory_interval
    assert low < math.log(0.97) and high > math.log(1.10)


def test_small_jobs_say_nothing_of_memory(tmp_path):
    """Otherwise the memory that every process holds would count as the model's, and a large model that does not fit
    would be called fitting."""
    file = tmp_path / "feedback.jsonl"
    append(replace(run(1.0, 0.3), predicted_bytes=2e9, measured_bytes=0.6e9), file)
    assert learned(PROFILE, "h100", file).memory_interval == PROFILE.memory_interval


def test_one_run_is_no_measure_of_scatter(tmp_path):
    """If little was known before, one run leaves the interval wide."""
    file = tmp_path / "feedback.jsonl"
    append(run(2.0), file)
    low, high = learned(replace(PROFILE, error=(-1.0, 1.0)), "h100", file).interval(False, "bf16")
    assert 0.5 < high - low < 2.0


def test_the_phase_that_is_slower_is_named():
    assert run(1.3, data=0.5, reduce=0.35).slowest_phase() == ("data", 0.5)
    assert run(1.3, reduce=0.32).slowest_phase() is None, "too little to name"
    assert run(1.3).slowest_phase() is None, "nothing was measured by phase"


def test_terms_of_a_plan_add_up_by_phase():
    costs = evaluate(SHAPE, load().cluster("h100", 8), Candidates.of(shard=8, zero=1), 64, PROFILE)
    seconds = {name: float(s[0]) for name, s in costs.seconds.items()}
    phases = by_phase(seconds)
    assert set(phases) == {"passes", "reduce", "optimizer", "between"}
    assert sum(phases.values()) == pytest.approx(float(costs.step_s[0]))
    assert phases["reduce"] == seconds["dp"] and phases["passes"] > seconds["matmul"] + seconds["attention"]


@pytest.mark.parametrize("line", ["{", "[]", '{"format": "other"}', '{"format": "phalanx-feedback-2", "chip": "x"}'])
def test_a_bad_line_is_named(tmp_path, line):
    file = tmp_path / "feedback.jsonl"
    append(run(1.0), file)
    file.write_text(file.read_text() + line + "\n")
    with pytest.raises(UserError, match="feedback") as error:
        records(file)
    assert ":2" in str(error.value.value) and "delete" in error.value.remedy
