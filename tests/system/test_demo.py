"""What `phalanx demo`, and so `make demo`, shows to a newcomer is true."""

from __future__ import annotations

import subprocess

import pytest

from tests.system.command import PHALANX, TINY, sets


@pytest.mark.slow
def test_a_killed_worker_costs_time_and_no_bit(tmp_path):
    own = {"layout.replica": 2, "layout.tp": 1, "train.global_batch": 4, "train.steps": 60}
    job = {**TINY, **own, "train.reduction": "exact", "recovery.on": "true"}
    done = subprocess.run([PHALANX, "demo", *sets(job)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout
    assert "watch it on http://127.0.0.1:" in said and "KILLED ON PURPOSE: the worker of rank 1" in said
    assert "was killed by SIGKILL" in said and "GPU-seconds lost" in said
    assert "bits: the same as without the kill (60 of 60 steps, and the weights)" in said and "page: http://" in said
    assert (
        len(list((tmp_path / "runs").glob("*-killed-*"))) == len(list((tmp_path / "runs").glob("*-undisturbed-*"))) == 1
    )
