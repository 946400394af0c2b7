"""A real Ray cluster of four nodes on this machine: `make test-ray`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.submitted import JOB, PHALANX, Training, run_here, until

pytestmark = pytest.mark.ray
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'phalanx[ray]'")
    from ray.cluster_utils import Cluster

    # Ray starts its workers and their children with niceness 15: on a busy machine they would never come up.
    os.environ |= {"OMP_NUM_THREADS": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "RAY_worker_niceness": "0"}
    head = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": 0, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.workers = {}
    try:
        for number in range(4):
            add(cluster, "ab"[number // 2])
        yield cluster
    finally:
        cluster.shutdown()


def add(cluster, rack: str):
    node = cluster.add_node(**NODE, labels={"rack": rack})
    cluster.wait_for_nodes()
    cluster.workers[node.all_processes["raylet"][0].process.pid] = node
    return node


def below(pid: int) -> int:
    """Return the raylet that is an ancestor of a process."""
    while pid > 1:
        if "raylet" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode():
            return pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    raise AssertionError("no raylet is above it")


def joined(run: Training, name: str) -> list[dict]:
    return [e for e in run.events("node") if e["node"] == name and e["what"] == "joined"]


def test_a_removed_node_is_replaced_by_the_spare_and_ray_finds_another(cluster, tmp_path):
    options = ["--on", "ray", "--engine", f"address={cluster.address}", "--engine", "topology=rack"]
    values = {"train.steps": 400, "recovery.beat_s": 1.0}
    env = dict(os.environ)
    run = Training(tmp_path, "big", *options, env=env, **values, **{"layout.replica": 3, "recovery.spares": 1})
    run.until(lambda: run.steps() > 5 and len(run.ready_nodes()) == 4)
    before = run.at_work()
    racks = [joined(run, before[rank])[0]["topology"] for rank in range(3)]
    assert before == {0: "ray-0", 1: "ray-1", 2: "ray-2"} and racks == sorted(racks) and set(racks) == {"a", "b"}
    lost = below(joined(run, "ray-1")[0]["pid"])
    cluster.remove_node(cluster.workers.pop(lost), allow_graceful=False)
    run.until(lambda: run.at_work()[1] == "ray-spare-0" and run.is_whole())
    assert run.process.poll() is None
    add(cluster, "a")
    run.until(lambda: len(joined(run, "ray-1")) == 2)
    assert run.end() == 0, run.told()
    clean = run_here(tmp_path, "clean", env, **values)
    assert run.summary()["status"] == "done" and len(run.records) == 1
    assert run.summary()["digests"][0] == clean.summary()["digests"][0]
    assert run.ledger() == clean.ledger() and len(run.ledger()) == 400


def test_ray_job_submit(cluster, tmp_path):
    values = JOB | {"name": "job", "layout.replica": 2, "train.steps": 20, "run.dir": f"{tmp_path}/runs"}
    values |= {"checkpoint.dir": f"{tmp_path}/checkpoints"}
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    url = f"http://{cluster.head_node.webui_url or cluster.webui_url}"
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", url, "--"]
    done = subprocess.run(
        [*submit, *PHALANX, "train", *sets, "--on", "ray"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.search(r"step\s+20/20", done.stdout), done.stdout[-3000:]


def test_a_stopped_run_gives_its_nodes_back(cluster, tmp_path):
    options = ["--on", "ray", "--engine", f"address={cluster.address}"]
    values = {"train.steps": 1_000_000, "layout.replica": 2, "recovery.grace_s": 20}
    run = Training(tmp_path, "stopped", *options, env=dict(os.environ), **values)
    run.until(lambda: run.steps() > 3)
    pids = [e["pid"] for e in run.events("node") if e["what"] == "joined"]
    asked = subprocess.run([*PHALANX, "stop", str(run.records[-1])], cwd=tmp_path, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    assert run.end() == 130 and run.summary()["status"] == "stopped"
    assert run.summary()["durable"] == run.steps(), "what was done was saved"
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    import ray

    ray.init(address=cluster.address, log_to_driver=False)
    try:
        until(lambda: ray.available_resources().get("CPU") == ray.cluster_resources().get("CPU"))
    finally:
        ray.shutdown()


def test_too_few_nodes_end_in_a_reason(cluster, tmp_path):
    """Ask for five nodes of two cores where there are four."""
    code = "import phalanx.engines.ray as r, sys; r.READY_S = 5.0; from phalanx.cli.main import run; run()"
    values = JOB | {"name": "many", "layout.replica": 5, "checkpoint.dir": f"{tmp_path}/checkpoints"}
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    options = ["--on", "ray", "--engine", f"address={cluster.address}"]
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *sets, *options], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1 and "Ray did not find 5 nodes" in done.stderr, done.stderr
