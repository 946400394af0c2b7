"""`phalanx trace` on a run of real processes: the ranks record the steps, and their trace shows what they did."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time

import pytest

from phalanx.observe.phases import PHASES
from tests.system.command import TINY, sets

pytestmark = pytest.mark.slow
JOB = {**TINY, "layout.tp": 1, "layout.replica": 2, "recovery.on": "true", "train.global_batch": 4}


def test_steps_of_a_running_job_are_traced_on_its_ranks(tmp_path):
    phalanx = [sys.executable, "-m", "phalanx.cli.main"]
    job = subprocess.Popen([*phalanx, "train", *sets(JOB)], cwd=tmp_path, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 300
        while not any(file.stat().st_size for file in tmp_path.glob("runs/*/metrics.jsonl")):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
        past = subprocess.run(
            [*phalanx, "trace", "last", "--steps", "0:2"], cwd=tmp_path, capture_output=True, text=True
        )
        assert past.returncode == 2 and "the run is at step" in past.stderr and "--steps" in past.stderr
        rows = next(tmp_path.glob("runs/*/metrics.jsonl")).read_text().splitlines()
        first = json.loads(rows[-1])["step"] + 400
        command = [*phalanx, "trace", "last", "--steps", f"{first}:{first + 2}", "--ranks", "0,1", "--json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["ranks"] == [0, 1] and not told["failed"]
        assert any(row["name"].startswith("gloo:") and row["calls"] >= 4 for row in told["collectives"])
        with gzip.open(tmp_path / told["file"], "rt") as file:
            events = json.load(file)["traceEvents"]
        for rank in (0, 1):
            named = {
                e["name"] for e in events if e.get("args", {}).get("rank") == rank and e.get("cat") == "user_annotation"
            }
            assert {f"step {first}", f"step {first + 1}"} <= named and f"step {first + 2}" not in named
            assert set(PHASES) - {"gaps", "checkpoint"} <= named
    finally:
        job.terminate()
        job.wait()
