"""Every plan runs: the engine's rules accept what `phalanx plan` prints, for every preset, number of chips and pin.
Where there is no plan, it says why. A plan that the engine refuses is worse than none."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.cli.plan_ask import Options, ask
from phalanx.cli.plan_dry import planned_job
from phalanx.core import compat
from phalanx.core.errors import UserError
from phalanx.core.layout import CHUNKS, SPLIT_BACKWARD
from phalanx.plan.cost.candidates import PRECISIONS, RECOMPUTE
from phalanx.plan.search import runnable
from phalanx.plan.search.runnable import RUN_PRECISIONS
from phalanx.spec import PRESETS
from phalanx.spec.fields import TrainSection

PHALANX = Path(sys.executable).with_name("phalanx")
DECODERS = [name for name, preset in PRESETS.items() if preset.get("family", "dense") in ("dense", "moe")]
PINS = {
    "tp": st.sampled_from([1, 2, 4, 8]), "pp": st.sampled_from([1, 2, 3, 4, 8, 16]), "cp": st.sampled_from([1, 2, 4]),
    "ep": st.sampled_from([1, 2, 4, 8]), "zero": st.integers(0, 3), "micro_batch": st.sampled_from([1, 2, 4, 8]),
    "recompute": st.sampled_from(RECOMPUTE), "vpp": st.sampled_from([1, 2, 3]),
    "schedule": st.sampled_from(list(CHUNKS)), "dp": st.sampled_from([1, 2, 8, 64]),
    "precision": st.sampled_from(PRECISIONS),
}  # fmt: skip
questions = st.fixed_dictionaries({
    "model": st.sampled_from(DECODERS),
    "gpus": st.one_of(st.integers(1, 4096), st.sampled_from([24, 96, 384]), st.integers(0, 12).map(lambda e: 2**e)),
    "hardware": st.sampled_from(["h100", "b200", "gb200"]),
    "seq": st.sampled_from([None, 2048, 8192, 32768]),
    "global_batch": st.sampled_from([None, 512, 480, 2048]),
    "pins": st.dictionaries(st.sampled_from(sorted(PINS)), st.just(0), max_size=3),
    "data": st.data(),
})  # fmt: skip


def check(model: str, gpus: int, hardware: str, seq: int | None, batch: int | None, pins: dict) -> bool:
    """Return whether there is a plan, after checking that the engine accepts it and that it keeps every pin."""
    text = ",".join(f"{name}={value}" for name, value in pins.items())
    try:
        plan = ask(Options(model, gpus, hardware, seq=seq, global_batch=batch, pin=text)).plan
    except UserError as error:
        assert error.field and error.remedy, error
        return False
    job = planned_job(plan, model)
    compat.check(job)
    assert job.layout.world_size == plan.used <= gpus and job.micro_per_rank == plan.micro_batches
    compiled = plan.layout["schedule"] not in SPLIT_BACKWARD
    assert job.train.compile == ("inductor" if compiled else "none") and job.train.recompute == plan.layout["recompute"]
    assert plan.memory_high_bytes <= plan.capacity_bytes
    kept = plan.layout | {"dp": plan.layout["replica"] * plan.layout["shard"]}
    assert {name: kept[name] for name in pins} == pins
    if batch:
        assert plan.global_batch == batch
    elif gpus & (gpus - 1) == 0 and not {"dp", "pp"} & set(pins):
        assert plan.global_batch & (plan.global_batch - 1) == 0, "a power of two"
    return True


@settings(max_examples=40, deadline=None)
@given(questions)
def test_what_is_printed_the_engine_takes(question):
    draw = question.pop("data")
    pins = {name: draw.draw(PINS[name], label=name) for name in question.pop("pins")}
    check(question["model"], question["gpus"], question["hardware"], question["seq"], question["global_batch"], pins)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(questions)
def test_what_is_printed_the_engine_takes_at_length(question):
    draw = question.pop("data")
    pins = {name: draw.draw(PINS[name], label=name) for name in question.pop("pins")}
    check(question["model"], question["gpus"], question["hardware"], question["seq"], question["global_batch"], pins)


@pytest.mark.parametrize("gpus", [24, 96, 384])
@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b"])
def test_numbers_of_chips_that_a_batch_does_not_divide_over_have_an_answer(model, gpus):
    """24, 96 and 384 chips with a batch of 512 give three stages, or spare chips."""
    if model == "llama3-70b" and gpus == 24:
        pytest.skip("too large")
    assert check(model, gpus, "h100", 8192, 512, {})


def test_tied_embeddings_are_planned_as_the_engine_takes_them(monkeypatch):
    """Plans have no pipeline as long as the engine refuses one, and use one as soon as it does not."""
    tied = [name for name in DECODERS if PRESETS[name].get("tied")]
    assert tied
    plan = ask(Options("gpt3-175b", 1024, "h100")).plan
    assert plan.layout["pp"] == 1 or runnable.takes_tied_pipelines()
    rules = tuple(rule for rule in compat.RULES if rule.name != "tied-pp")
    monkeypatch.setattr(compat, "RULES", rules)
    runnable.takes_tied_pipelines.cache_clear()
    try:
        assert runnable.takes_tied_pipelines() and ask(Options("gpt3-175b", 1024, "h100")).plan.layout["pp"] > 1
    finally:
        runnable.takes_tied_pipelines.cache_clear()


def test_a_schedule_that_is_given_is_not_dropped():
    """It asks for a pipeline. If there is none, the answer is an error rather than a layout without the schedule."""
    assert ask(Options("llama3-8b", 16, "h100", pin="schedule=1f1b")).plan.layout["pp"] > 1
    with pytest.raises(UserError):
        ask(Options("llama3-8b", 16, "h100", pin="schedule=1f1b,pp=1"))


def test_fp8_with_a_schedule_that_splits_the_backward_is_not_planned():
    """The engine refuses the two together, so a search over both takes one of them."""
    pins = {"schedule": "zbv"}
    assert check("llama3-8b", 16, "h100", 2048, None, pins)
    with pytest.raises(UserError, match="do not run in fp8"):
        ask(Options("llama3-8b", 16, "h100", seq=2048, precision="fp8", pin="schedule=zbv"))
    both = ask(
        Options("llama3-8b", 16, "h100", seq=2048, precision="bf16,fp8", schedules="all", pin="pp=2")
    ).plan.layout
    assert both["precision"] == "bf16" or both["schedule"] not in SPLIT_BACKWARD


@pytest.mark.parametrize("pin", ["precision=mxfp8", "precision=nvfp4", "schedule=dualpipe"])
def test_what_only_other_engines_have_is_planned_for_them(pin):
    with pytest.raises(UserError, match="this engine has no") as error:
        ask(Options("llama3-8b", 64, "gb200", pin=pin))
    assert "--software" in (error.value.remedy or "")
    assert ask(Options("llama3-8b", 64, "gb200", pin=pin, software="nemo")).plan.layout[pin.split("=")[0]] in pin
    assert set(RUN_PRECISIONS) == {*get_args(TrainSection.model_fields["precision"].annotation)} & {*PRECISIONS}


def test_a_precision_that_the_chip_lacks_is_refused_as_a_pin_too():
    with pytest.raises(UserError, match="precision"):
        ask(Options("llama3-8b", 16, "h100", pin="precision=nvfp4"))


def test_batches_that_nobody_gave_are_powers_of_two():
    for gpus in (8, 96, 1000, 4096):
        answer = ask(Options("llama3-8b", gpus, "h100"))
        wanted, batch = answer.request.ask.batch, answer.plan.global_batch
        assert wanted & (wanted - 1) == 0 and abs(batch / wanted - 1) <= 0.125
        assert batch == wanted or gpus == 1000, "96 chips are three stages; 1,000 divide over no power of two"


@pytest.mark.slow
@pytest.mark.parametrize(
    "question",
    [("tiny", 8, ""), ("llama3-8b", 16, "pp=2"), ("llama3-8b", 96, ""), ("tiny-moe", 8, ""), ("mixtral-8x7b", 64, "")],
)
def test_a_printed_plan_runs_dry(question):
    from phalanx.train.dryrun import dry_run

    model, gpus, pins = question
    job = planned_job(ask(Options(model, gpus, "h100", seq=2048, pin=pins)).plan, model)
    report = dry_run(replace(job, train=replace(job.train, compile="none")), job.layout.world_size // 2, 2)
    assert not report.differences


@pytest.mark.slow
def test_the_printed_lines_are_a_job_that_runs_dry(tmp_path):
    """`plan --explain` prints sections of a job file that `train --dry-run` accepts unchanged."""
    command = [
        PHALANX,
        "plan",
        "--model",
        "llama3-8b",
        "--gpus",
        "64",
        "--hardware",
        "h100",
        "--seq",
        "2048",
        "--explain",
    ]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    printed = re.search(r"in a job file\n(.*?)\n\n[\d,]+ layouts", text, re.S)
    assert printed
    job = tmp_path / "job.toml"
    job.write_text('[model]\npreset = "llama3-8b"\n' + "\n".join(line.strip() for line in printed[1].splitlines()))
    done = subprocess.run(
        [PHALANX, "train", job, "--dry-run"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "call by call and byte by byte" in done.stdout and not (tmp_path / "runs").exists()
