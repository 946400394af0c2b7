"""A launched job: its end, and whom a failure is blamed on."""

from __future__ import annotations

import dataclasses
import threading
import time

import pytest

from phalanx.core.errors import RunFailed
from phalanx.core.job import Job, RunConfig, TrainConfig
from phalanx.core.layout import Layout
from phalanx.runtime.gang import MEMORY_REMEDY, Failure
from phalanx.runtime.launch import HangLimit, launch
from tests.runtime.conftest import WORKERS, wait_gone

KILLED_REMEDY = f"if memory ran out, as the kernel's log would say: {MEMORY_REMEDY}"


def job(name: str, ranks: int = 3, steps: int = 5, hang_timeout_s: float = 0.0) -> Job:
    return Job(
        name=name,
        layout=Layout(replica=ranks),
        train=TrainConfig(steps=steps),
        run=RunConfig(hang_timeout_s=hang_timeout_s),
    )


def run(a_job: Job, tmp_path, events=None, stop=lambda: False):
    return launch(
        a_job,
        worker_entry=f"{WORKERS}:rank",
        store_entry=f"{WORKERS}:store",
        preload=[WORKERS],
        run_dir=tmp_path,
        on_event=(events if events is not None else []).append,
        stop=stop,
    )


def test_a_job_runs_to_its_end(tmp_path):
    events = []
    summary = run(job("fine"), tmp_path, events)
    assert summary["done"] == [{"type": "done", "rank": r} for r in range(3)]
    assert summary["world_size"] == 3 and 0 < summary["start_s"] <= summary["wall_s"]
    assert summary["hang_timeout_s"] == 10.0, "derived from steps of 10 ms"
    kinds = [e["type"] for e in events]
    assert kinds.count("started") == 3 and kinds.count("ready") == 1 and kinds.count("exit") == 3
    steps = [(e["rank"], e["body"]["step"]) for e in events if e["type"] == "message" and e["body"]["type"] == "step"]
    assert sorted(steps) == [(r, s) for r in range(3) for s in range(5)]
    assert {p.name for p in (tmp_path / "logs").iterdir()} == {
        "node.log", "store.log", "rank-00000.log", "rank-00001.log", "rank-00002.log",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name, said, remedy",
    [
        (
            "kill@1",
            "rank 1 was killed by SIGKILL in forward of step 2; if nobody did that, the kernel's",
            KILLED_REMEDY,
        ),
        ("memory@2", "rank 2 failed in forward of step 2 with RuntimeError: DefaultCPUAllocator", MEMORY_REMEDY),
        ("value@0", "rank 0 failed in forward of step 2 with ValueError: the true cause", ""),
        ("slow-value@1", "rank 1 failed in forward of step 2 with ValueError: the true cause", ""),
        ("exit@1", "rank 1 ended in forward of step 2 before it was done", ""),
    ],
)
def test_the_first_cause_is_named_not_its_echo(tmp_path, name, said, remedy):
    events = []
    with pytest.raises(RunFailed) as failed:
        run(job(name), tmp_path, events)
    assert said in failed.value.reason
    assert failed.value.rank == int(name[-1])
    assert "about to misbehave" in failed.value.log_tail
    assert failed.value.remedy == remedy
    assert any(e["type"] == "message" and e["body"].get("step") == 1 for e in events), "what came before was lost"


def test_a_hang_is_named_with_its_stack(tmp_path):
    events = []
    with pytest.raises(RunFailed) as failed:
        run(job("sleep@1", hang_timeout_s=0.3), tmp_path, events)
    assert [e["rank"] for e in events if e["type"] == "hang"] == [1]
    assert "rank 1 hangs in forward of step 2: it stands still in busy_doing_something_else" in failed.value.reason
    assert "in rank" in failed.value.log_tail
    assert "run.hang_timeout_s" in failed.value.remedy


def test_a_stopped_rank_is_a_hang(tmp_path):
    with pytest.raises(RunFailed, match="rank 2 hangs in forward of step 2: it is stopped") as failed:
        run(job("stop@2", hang_timeout_s=0.3), tmp_path)
    assert "SIGCONT" in failed.value.remedy


def test_a_store_that_fails_is_named(tmp_path):
    with pytest.raises(
        RunFailed, match=r"(?s)the store failed while starting with AttributeError.*Traceback"
    ) as failed:
        launch(
            job("fine"), worker_entry=f"{WORKERS}:rank", store_entry=f"{WORKERS}:no_such", preload=[WORKERS],
            run_dir=tmp_path, on_event=print, stop=lambda: False,
        )  # fmt: skip
    assert failed.value.rank is None


def test_a_failed_preload_is_named(tmp_path):
    with pytest.raises(RunFailed, match="No module named 'not_there'"):
        launch(
            job("fine"), worker_entry=f"{WORKERS}:rank", store_entry=f"{WORKERS}:store", preload=["not_there"],
            run_dir=tmp_path, on_event=print, stop=lambda: False,
        )  # fmt: skip


def test_stop_ends_everything_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("PHALANX_TOKEN", token := f"stop-{time.time_ns()}")
    stopped = threading.Event()
    timer = threading.Timer(1.0, stopped.set)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(job("fine", steps=100_000), tmp_path, stop=stopped.is_set)
    assert wait_gone(token, timeout=0.0) == {}


def test_the_hang_limit_is_derived_from_the_slowest_ranks(tmp_path):
    limit = HangLimit(world_size=2)
    assert limit.limit_s == 300.0
    assert not limit.add(0, 1.0)
    assert limit.add(0, 3.0) and limit.limit_s == 60.0  # 20 x the slower of the two
    assert not limit.add(1, 3.1) and not limit.add(1, 0.1)  # less than a tenth of a change
    for step in range(2, 60):
        limit.add(step, 0.1), limit.add(step, 0.2)
    assert limit.limit_s == 10.0
    fixed = HangLimit(world_size=1, fixed_s=4.0)
    assert not fixed.add(0, 100.0) and fixed.limit_s == 4.0


def failure(**facts) -> Failure:
    return dataclasses.replace(Failure(0), **facts)


def test_which_end_is_nearest_to_the_cause():
    killed = failure(signal="SIGKILL")
    own = failure(kind="ZeroDivisionError", text="division by zero")
    exit_code = failure(code=3)
    echoes = [
        failure(kind="RuntimeError", text="[gloo/x.cc:1] Connection closed by peer [1.2.3.4]:5"),
        failure(kind="ConnectionResetError", text="[Errno 104] Connection reset by peer"),
        failure(kind="BrokenPipeError", text="[Errno 32] Broken pipe"),
        failure(kind="RuntimeError", text="Timed out waiting 1800000ms for recv operation to complete"),
        failure(kind="DistBackendError", text="NCCL error in ..."),
        failure(signal="SIGABRT"),
    ]
    for echo in echoes:
        assert killed.severity() < own.severity() == exit_code.severity() < echo.severity(), echo
    assert failure(kind="OutOfMemoryError", text="CUDA out of memory").remedy() == MEMORY_REMEDY
    assert failure(kind="MemoryError").remedy() == MEMORY_REMEDY
    assert own.remedy() == ""
