"""Edge cases of the planner that a sceptical user tries."""

from __future__ import annotations

import csv
import json
from importlib import resources

import pytest
from typer.testing import CliRunner

from phalanx.cli.commands import app
from phalanx.core.errors import UserError
from phalanx.plan.lab.validate import validate

LLAMA = ["plan", "--model", "llama3-8b", "--gpus", "64", "--hardware", "h100"]


def run(*args: str):
    return CliRunner().invoke(app, [*args])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--failures", "1e9"], "makes no progress"),
        (["--precision", "nvfp4"], "no such precision"),
        (["--schedules", "dualpipe"], "this engine has no dualpipe"),
        (["--pin", "schedule=zb-h2"], "this engine has no zb-h2"),
        (["--pin", "tp=8", "--pin", "tp=4"], "given twice"),
    ],
)
def test_what_cannot_be_is_said(args, said):
    error = run(*LLAMA, *args).exception
    assert isinstance(error, UserError) and said in str(error)


def test_a_plan_for_programs_stays_json_with_a_dry_run():
    done = run("plan", "--model", "tiny", "--gpus", "2", "--hardware", "h100", "--seq", "256", "--dry-run", "--json")
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)
    assert "dry run of rank" in done.stderr


def test_the_arithmetic_keeps_its_formulas():
    rows = json.loads(run("plan", "arithmetic", "--json").stdout)
    assert all(isinstance(row["formula"], str) for row in rows)


def test_the_lines_for_a_job_file_say_the_precision():
    assert 'precision = "bf16"' in run(*LLAMA, "--explain").stdout
    assert 'precision = "fp8"' in run(*LLAMA, "--explain", "--precision", "fp8").stdout
    other = run(*LLAMA, "--explain", "--schedules", "dualpipe", "--pin", "pp=8", "--software", "nemo").stdout
    assert "dualpipe" in other and "in a job file" not in other, "the engine has none"


def test_pins_that_are_given_apart_count_together():
    """Or the first of two --pin is silently dropped."""
    apart, together = (
        run(*LLAMA, *args).stdout for args in (["--pin", "tp=8", "--pin", "pp=2"], ["--pin", "tp=8,pp=2"])
    )
    assert "tp 8 x" in apart and "pp 2" in apart and apart.splitlines()[1:8] == together.splitlines()[1:8]


def test_a_job_files_tokens_are_those_of_the_batch_that_is_asked_for(tmp_path):
    job = tmp_path / "job.toml"
    job.write_text('[model]\npreset = "llama3-8b"\n[train]\nsteps = 1000\nglobal_batch = 64\nseq_len = 4096\n')
    args = ["plan", "--model", str(job), "--gpus", "64", "--hardware", "h100", "--json"]
    tokens = [json.loads(run(*args, *more).stdout)["plan"]["bill"]["tokens"] for more in ([], ["--global-batch", "32"])]
    assert tokens == [1000 * 64 * 4096, 1000 * 32 * 4096]


def test_runs_that_went_out_of_memory_are_counted_and_no_number_is_made_up(tmp_path):
    text = resources.files("phalanx.plan.lab").joinpath("published_runs.csv").read_text(encoding="utf-8")
    first = next(csv.DictReader(text.splitlines()))
    row = first | dict.fromkeys(("tflops_per_gpu", "mfu", "tokens_per_s_per_gpu", "step_time_s"), "")
    row["out_of_memory"] = "yes"
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, first.keys())
        writer.writeheader()
        writer.writerow(row)
    said = json.loads(json.dumps(validate(path).to_json(), allow_nan=False))
    assert said["out_of_memory"]["rows"] == 1 and said["median_abs_error"] is None
    assert run("plan", "validate", str(path), "--rows").exit_code == 0
