"""`phalanx plan` from a shell: the plan on a screen, for programs and as a page; mistakes without a traceback."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from typer.testing import CliRunner

from phalanx.core.errors import UserError
from tests import forked

SMALL = ("--model", "llama3-8b", "--gpus", "64", "--hardware", "h100")
COLUMNS = (
    "source,model,params_b,layers,hidden,heads,kv_heads,ffn,vocab,seq_len,gpu,num_gpus,tp,pp,vpp,cp,ep,dp,zero_stage,"
    "micro_batch,global_batch,precision,recompute,tflops_per_gpu,mfu,tokens_per_s_per_gpu,step_time_s,notes"
)


@pytest.fixture
def phalanx(tmp_path):
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HOME": str(tmp_path), "PYTHONIOENCODING": "utf-8"}
        return forked.phalanx("plan", *args, env=env, cwd=tmp_path)

    return run


def test_a_plan_on_a_screen(phalanx):
    done = phalanx(*SMALL, "--tokens", "1T", "--compare", "tp=8,pp=2", "--compare", "tp=3", "--explain")
    assert done.returncode == 0, done.stderr
    out = done.stdout
    for part in ("layout", "= 64 chips", "memory of the fullest chip", "optimizer", "matmul", "MTBF", "goodput",
                 "1 T tokens", "MWh", "t CO2", "P95", "what binds", "what would help", "why the next best lost",
                 "compared", "tp=8,pp=2 ->", "tp=3 -> tp = 3: no layout",
                 "12 B (fp32 master", "sqrt(2 C M)", "[layout]", "layouts,"):  # fmt: skip
        assert part in out, part
    assert "assumed: a batch" in out and "assumed: 1" not in out


def test_a_plan_for_programs_and_as_a_page(phalanx, tmp_path):
    done = phalanx(*SMALL, "--global-batch", "512", "--json", "--html", "plan.html")
    made = json.loads(done.stdout)
    plan = made["plan"]
    assert plan["global_batch"] == 512 and plan["used"] == 64 and plan["margin"] > 0
    assert sum(plan["seconds"].values()) == pytest.approx(plan["step_s"])
    assert {"plan", "runner_up", "pareto", "binds", "changes", "considered", "costed", "assumed"} <= set(made)
    assert all(change["gain"] > 0 for change in made["changes"])
    assert (tmp_path / "plan.html").read_text(encoding="utf-8").count("<svg") >= 3
    again = json.loads(phalanx(*SMALL, "--global-batch", "512", "--json").stdout)
    assert again["plan"]["hash"] == plan["hash"]


def test_the_model_of_a_job_file(phalanx, tmp_path):
    (tmp_path / "job.toml").write_text(
        'name = "mine"\n[model]\npreset = "llama3-1b"\n[train]\nsteps = 1000\nseq_len = 4096\nglobal_batch = 256\n'
    )
    plan = json.loads(phalanx("--model", "job.toml", "--gpus", "8", "--hardware", "a100", "--json").stdout)["plan"]
    assert plan["model"] == "mine" and plan["seq"] == 4096 and plan["global_batch"] == 256
    assert plan["bill"]["tokens"] == 1000 * 256 * 4096


def test_every_hardware_of_the_catalogue_plans(catalogue_nodes, phalanx_in_process):
    for node, chips in catalogue_nodes:
        made = phalanx_in_process(node, chips)
        assert 0 < made.plan.mfu["causal"] < 1, node


@pytest.fixture
def catalogue_nodes():
    from phalanx.hardware.catalogue import load_packaged

    nodes = load_packaged().nodes
    return [(name, node.chips * 4) for name, node in nodes.items() if node.chip.memory_bytes > 14e9][::3]


@pytest.fixture
def phalanx_in_process(monkeypatch, tmp_path):
    from phalanx.cli.plan_ask import Options, ask

    monkeypatch.setenv("HOME", str(tmp_path))
    return lambda node, chips: ask(Options("llama3-1b", chips, node, seq=2048))


@pytest.mark.parametrize(
    "args, said",
    [
        (("--model", "llama3-405b", "--gpus", "64", "--hardware", "h100"), "do not fit"),
        (("--model", "lama3-8b", "--gpus", "64", "--hardware", "h100"), "did you mean llama3-8b"),
        (("--model", "1t", "--gpus", "64", "--hardware", "h100"), "did you mean dense-1t"),
        (("--model", "llama3-8b", "--gpus", "64", "--hardware", "h1000"), "did you mean h100"),
        (("--model", "llama3-8b", "--gpus", "63", "--hardware", "h100"), "ask for 56 or 64"),
        (("--model", "llama3-8b", "--gpus", "0", "--hardware", "h100"), "at least one"),
        (("--model", "llama3-8b", "--gpus", "8"), "--hardware"),
        (("--gpus", "8", "--hardware", "h100"), "--model"),
        ((*SMALL, "--tokens", "many"), "15T"),
        ((*SMALL, "--objective", "fast"), "no such objective"),
        ((*SMALL, "--precision", "fp7"), "some of bf16"),
        ((*SMALL, "--schedules", "2f2b"), "some of gpipe"),
        ((*SMALL, "--margin", "1.5"), "no share"),
        ((*SMALL, "--seq", "-1"), "seq = -1: not a sensible number"),
        ((*SMALL, "--seq", "0"), "seq = 0: not a sensible number"),
        ((*SMALL, "--days", "0"), "days = 0.0: not a sensible number"),
        ((*SMALL, "--pin", "tq=8"), "pin = 'tq=8': no such axis"),
        ((*SMALL, "--compare", "tq=8"), "compare = 'tq=8': no such axis"),
        ((*SMALL, "--software", "nobody"), "one of phalanx"),
        ((*SMALL, "--pin", "tp=3"), "it can be 1, 2, 4, 8"),
        ((*SMALL, "--objective", "cost", "--tokens", "15T", "--days", "3"), "no layout is that fast"),
        ((*SMALL, "--pin", "tp=64,pp=64"), "4,096 ranks"),
        ((*SMALL, "--html", "/nowhere/at/all.html"), "cannot be written"),
        (("--model", "llama3-8b", "--gpus", "8", "--hardware", "a100", "--precision", "fp8"), "no such precision"),
        (("--model", "none.toml", "--gpus", "8", "--hardware", "h100"), "cannot be read"),
        (("validate", "none.csv"), "cannot be read"),
        ((*SMALL, "--calibration", "none.json"), "cannot be read"),
    ],
)
def test_mistakes_are_named_with_a_remedy(args, said, tmp_path, monkeypatch):
    from phalanx.cli.commands import app

    monkeypatch.setenv("HOME", str(tmp_path))
    done = CliRunner().invoke(app, ["plan", *args])
    assert isinstance(done.exception, UserError) and said in str(done.exception), done
    assert done.exception.remedy and done.stdout == ""


def test_a_mistake_is_answered_in_two_lines(phalanx):
    done = phalanx("--model", "llama3-405b", "--gpus", "8", "--hardware", "h100")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert "do not fit" in done.stderr and "remedy: " in done.stderr and done.stderr.count("\n") == 2


def test_without_anything_it_says_what_it_can(phalanx):
    done = phalanx()
    assert done.returncode == 0 and "--model" in done.stdout and "arithmetic" in done.stdout


def test_arithmetic(phalanx):
    out = phalanx("arithmetic").stdout
    assert "99,968 GPUs" in out and "(p-1) / (m+p-1)" in out
    assert any(line.get("days") for line in json.loads(phalanx("arithmetic", "--json").stdout))


def test_validate(phalanx, tmp_path):
    row = "here,Llama-3-8B,8,32,4096,32,8,14336,128256,8192,H100-80GB-SXM,64,1,1,1,1,1,64,3,1,128,bf16,none,400,,,,"
    (tmp_path / "runs.csv").write_text(f"{COLUMNS}\n{row}\n{row.replace('H100-80GB-SXM', 'abacus')}\n")
    made = json.loads(phalanx("validate", "runs.csv", "--json").stdout)
    assert made["rows"] == 1 and {"median_abs_error", "p95_abs_error", "by_source"} <= set(made)
    text = phalanx("validate", "runs.csv", "--rows").stdout
    assert "Llama-3-8B" in text and "line 3:" in text
