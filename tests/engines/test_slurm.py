"""A real Slurm with 16 virtual nodes: `make test-slurm`."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from phalanx.engines.slurm import seconds
from tests.engines.submitted import PHALANX, Training, run_here, until
from tests.engines.virtual_slurm import VirtualSlurm, processes, why_not

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(why_not()), reason=why_not())]
NODES = 16


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    os.environ["OMP_NUM_THREADS"] = "1"  # 16 nodes share the cores of this machine
    with VirtualSlurm(tmp_path_factory.mktemp("slurm"), NODES) as slurm:
        yield slurm


def job_of(run: Training) -> str:
    found = until(lambda: re.search(r"submitted: slurm job (\d+)", run.log.read_text()))
    return found[1]


def left_of(slurm: VirtualSlurm, job: str) -> dict[int, str]:
    return processes(SLURM_JOB_ID=job)


def test_a_job_loses_a_node_with_everything_on_it_and_ends_with_the_right_bits(slurm, tmp_path):
    """15 nodes train, and the 16th is the spare. One is lost; the spare takes its place, and the job step continues."""
    values = {"train.steps": 300, "train.global_batch": 15, "recovery.beat_s": 2.0, "run.hang_timeout_s": 120}
    run = Training(
        tmp_path, "big", "--on", "slurm", env=slurm.env, **values, **{"layout.replica": 15, "recovery.spares": 1}
    )
    job = job_of(run)
    run.until(lambda: run.steps() > 5 and len(run.ready_nodes()) == NODES)
    before = run.at_work()
    order = [before[rank] for rank in range(15)]
    leaves = {e["node"]: e["topology"] for e in run.events("node") if e["what"] == "joined"}
    assert leaves["n1"] == "spine.leaf1" and leaves["n16"] == "spine.leaf8"
    seen = [leaves[name] for name in order]
    assert seen == sorted(seen), "ranks that are neighbours are below one switch"
    lost = order[7]
    assert lost != "n1", "where the controller is"
    slurm.fail(lost)
    run.until(lambda: run.at_work()[7] != lost and run.is_whole())
    assert run.at_work() == before | {7: "n16"} or run.at_work()[7] in set(leaves) - set(order)
    until(lambda: "down" in slurm.run("sinfo", "-h", "-n", lost, "-o", "%T"))
    assert slurm.state(job) == "RUNNING"
    assert run.end() == 0, run.told()
    until(lambda: slurm.state(job) == "COMPLETED")
    clean = run_here(tmp_path, "clean", slurm.env, **values)
    assert run.summary()["status"] == "done" and len(run.records) == 1
    assert run.summary()["digests"][0] == clean.summary()["digests"][0]
    assert run.ledger() == clean.ledger() and len(run.ledger()) == 300
    assert not left_of(slurm, job)
    slurm.boot(lost)
    slurm.run("scontrol", "update", f"nodename={lost}", "state=resume", check=False)
    until(lambda: slurm.run("sinfo", "-h", "-o", "%T") == "idle")


def test_before_its_time_limit_a_job_saves_queues_itself_and_resumes(slurm, tmp_path):
    values = {"train.steps": 1_000_000, "recovery.grace_s": 10}
    run = Training(tmp_path, "long", "--on", "slurm", "--engine", "time=60", "--detach", env=slurm.env, **values)
    assert run.end() == 0
    job = job_of(run)
    until(lambda: run.steps() > 3)  # however long it takes to start
    used_s = seconds(slurm.run("squeue", "-h", "-j", job, "-o", "%M"))
    slurm.limit(job, int(used_s / 60) + 3)
    until(lambda: slurm.restarts(job))
    slurm.limit(job, 60)
    until(lambda: len(run.records) == 2 and run.steps() > 3)
    first = run.summary(0)
    assert first["status"] == "stopped" and "before the engine's time limit" in first["reason"]
    done = run.steps(0)
    assert first["durable"] == done, "what was done was saved"
    (resumed,) = run.events("resume")
    assert resumed["step"] == done and min(run.ledger()) == done
    assert run.read("ledger.jsonl")[0]["previous"] == run.read("ledger.jsonl", 0)[-1]["hash"], "one chain of steps"
    # The record is kept by a process of another host, as on a real cluster, so the engine must be asked.
    head = run.records[-1] / "head.json"
    head.write_text(json.dumps(json.loads(head.read_text()) | {"host": "elsewhere"}))
    stopped = subprocess.run(
        [*PHALANX, "stop", str(run.records[-1])], env=slurm.env, cwd=tmp_path, capture_output=True, text=True
    )
    assert stopped.returncode == 0, stopped.stderr
    attached = subprocess.run(
        [*PHALANX, "attach", str(run.records[-1])], env=slurm.env, cwd=tmp_path, capture_output=True, text=True
    )
    assert attached.returncode == 130 and "stopped after step" in attached.stderr, attached.stdout + attached.stderr
    assert run.summary()["durable"] == done + run.steps()
    until(lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"))
    assert len(run.records) == 2 and not left_of(slurm, job), "who stops a run does not want it again"


def test_inside_an_existing_allocation(slurm, tmp_path):
    """The allocation has three nodes, and the job needs two."""
    salloc = ["salloc", "--nodes=3", "--ntasks-per-node=1", "--no-kill", "--quiet"]
    values = {"train.steps": 20}
    run = Training(tmp_path, "inside", "--on", "slurm", env=slurm.env, before=salloc, **values)
    assert run.end() == 0, run.told()
    assert run.summary()["status"] == "done" and len(set(run.at_work().values())) == 2
    clean = run_here(tmp_path, "inside-clean", slurm.env, **values)
    assert run.ledger() == clean.ledger()
    until(lambda: slurm.run("squeue", "-h") == "")


def test_scancel_leaves_nothing(slurm, tmp_path):
    run = Training(tmp_path, "cancelled", "--on", "slurm", env=slurm.env, **{"train.steps": 1_000_000})
    job = job_of(run)
    run.until(lambda: run.steps() > 3)
    assert len(left_of(slurm, job)) > 6
    slurm.run("scancel", job)
    until(lambda: not left_of(slurm, job))
    until(lambda: slurm.state(job) == "CANCELLED")
    assert run.end() != 0
    assert run.summary()["status"] == "stopped", run.told()


def test_a_job_that_has_lost_its_controller_queues_itself_and_resumes(slurm, tmp_path):
    """The node of the batch script fails. Slurm keeps the job for its other nodes; an agent requeues it."""
    values = {"train.steps": 1_000_000, "checkpoint.every_steps": 10, "recovery.grace_s": 5}
    run = Training(tmp_path, "headless", "--on", "slurm", "--detach", env=slurm.env, **values)
    assert run.end() == 0
    job = job_of(run)
    until(lambda: len(run.events("checkpoint")) > 1 if run.records else False)
    host = slurm.run("squeue", "-h", "-j", job, "-o", "%B")
    slurm.fail(host)
    until(lambda: len(run.records) == 2 and run.steps() > 3)
    (resumed,) = run.events("resume")
    assert resumed["step"] >= 10 and host not in run.at_work().values()
    assert slurm.restarts(job) == 1, "it was queued once"
    slurm.run("scancel", job)
    until(lambda: not left_of(slurm, job))
    slurm.boot(host)
    slurm.run("scontrol", "update", f"nodename={host}", "state=resume", check=False)
    until(lambda: slurm.run("sinfo", "-h", "-o", "%T") == "idle")


def test_the_controller_has_a_component_of_its_own_in_a_heterogeneous_job(slurm, tmp_path):
    options = ["--on", "slurm", "--engine", "head.cpus-per-task=1"]
    run = Training(tmp_path, "mixed", *options, env=slurm.env, **{"train.steps": 20})
    job = job_of(run)
    assert run.end() == 0, run.told()
    about = slurm.run("scontrol", "show", "job", job)
    head = re.search(r"BatchHost=(\w+)", about)[1]
    assert "HetJobOffset=1" in about and head not in run.at_work().values()
    assert len(set(run.at_work().values())) == 2 and run.summary()["status"] == "done"


def test_a_heterogeneous_job_that_loses_its_controller_resumes(slurm, tmp_path):
    """Slurm restarts the controller's component on another node, and leaves the agents of the first one alone."""
    values = {"train.steps": 1_000_000, "checkpoint.every_steps": 10, "recovery.grace_s": 5}
    options = ["--on", "slurm", "--engine", "head.cpus-per-task=1", "--detach"]
    run = Training(tmp_path, "beheaded", *options, env=slurm.env, **values)
    assert run.end() == 0
    job = job_of(run)
    until(lambda: len(run.events("checkpoint")) > 1 if run.records else False)
    host = re.search(r"BatchHost=(\w+)", slurm.run("scontrol", "show", "job", job))[1]
    agents = {e["pid"] for e in run.events("node") if e["what"] == "joined"}
    slurm.fail(host)
    until(lambda: len(run.records) == 2 and run.steps() > 3)
    (resumed,) = run.events("resume")
    assert resumed["step"] >= 10 and len(agents) >= 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in agents), "they would hold the devices"
    slurm.run("scancel", job)
    until(lambda: not processes(SLURM_JOB_NAME="beheaded"))
    slurm.boot(host)
    slurm.run("scontrol", "update", f"nodename={host}", "state=resume", check=False)
    until(lambda: slurm.run("sinfo", "-h", "-o", "%T") == "idle")


def test_each_task_of_a_job_array_is_a_run_of_its_own(slurm, tmp_path):
    values = {"train.steps": 20, "layout.replica": 1, "checkpoint.dir": f"{tmp_path}/array-%a", "seed": "%a"}
    submit = Training(tmp_path, "task-%a", "--on", "slurm", "--engine", "array=1-2", env=slurm.env, **values)
    assert submit.end() == 0, submit.log.read_text()
    until(lambda: slurm.run("squeue", "-h") == "")
    runs = []
    for number in (1, 2):
        submit.name = f"task-{number}"
        assert submit.summary()["status"] == "done"
        runs.append(submit.ledger())
    assert runs[0] != runs[1] and len(runs[0]) == 20
