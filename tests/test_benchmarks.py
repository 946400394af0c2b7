"""Every benchmark still works: each file of benchmarks/ runs in its smoke mode, in a process of its own."""

import json
import multiprocessing
import os
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
PARTS = {"__init__", "common", "plain_fsdp2"}  # parts of benchmarks, like *_cases.py
FILES = {p.stem: p for p in sorted(FOLDER.glob("*.py")) if p.stem not in PARTS and not p.stem.endswith("_cases")}
# These run whole jobs, in which each node imports torch, or thousands of histories: more work than all others together.
SLOW = {
    "bubble",
    "checkpoint_corruption",
    "checkpoint_device",
    "checkpoint_restore",
    "checkpoint_stall",
    "collectives",
    "compression",
    "containment",
    "data_scale",
    "data_throughput",
    "durability",
    "exact",
    "fanin",
    "first_step",
    "gpu_exact",
    "gpu_experts",
    "gpu_fp8",
    "hf_parity",
    "observe_overhead",
    "offload",
    "parity",
    "plan_truth",
    "recovery",
    "recovery_nodes",
    "slurm_start",
    "staleness",
    "twin_anchors",
    "twin_truth",
    "wire",
}
FORKED = multiprocessing.get_context("forkserver")  # from a process that has imported torch, which takes seconds
FORKED.set_forkserver_preload(["tests.parity", "torch.distributed.checkpoint"])


def run(file: Path, directory: Path) -> None:
    """Become `python file --smoke`."""
    os.chdir(directory)
    for fd, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), fd)
    sys.argv, sys.path[0] = [str(file), "--smoke"], str(file.parent)
    runpy.run_path(str(file), run_name="__main__")


def smoke(file: Path, directory: Path) -> tuple[int | None, str, str]:
    process = FORKED.Process(target=run, args=(file, directory))
    process.start()
    process.join(900)
    code = process.exitcode
    process.kill()
    return code, (directory / "out").read_text(), (directory / "err").read_text()


SCENARIOS = {name: partial(smoke, file) for name, file in FILES.items()}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in FILES])
def test_the_benchmark_runs(outcomes, name):
    code, out, err = outcomes(name)
    assert code == 0, err[-4000:]
    said = json.loads(out.splitlines()[-1])
    assert said["name"] == name and said["smoke"] is True
    assert said["ok"] is False  # it judged nothing, and must not look like a result
