"""`phalanx train` continues when its processes die, with the same bits, and follows orders while it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess

import pytest

from phalanx.chaos.faults import FAULTS, ON_THE_NETWORK
from phalanx.chaos.hosts import why_not
from tests import warm
from tests.system.command import PHALANX, TINY, Command, phalanx, sets, train

JOB = TINY | {
    "layout.replica": 2,
    "layout.tp": 1,
    "layout.ranks_per_node": 1,
    "recovery.on": "true",
    "recovery.spares": 1,
    "recovery.restart_s": 1.0,
    "train.reduction": "exact",
    "train.global_batch": 4,
    "run.hang_timeout_s": 2.0,
}
STEPS_EACH = 80  # from one fault to the next
KINDS = [kind for kind in FAULTS if kind not in ON_THE_NETWORK or not why_not()]
# A process, a machine and the controller die, and a process stands still.
FEW = ["worker", "node", "controller", "hang"]


@pytest.fixture(scope="module", params=[FEW, pytest.param(KINDS, marks=pytest.mark.slow)], ids=["few", "all"])
def chaos(request, tmp_path_factory):
    """Run with one fault of each kind."""
    directory, kinds = tmp_path_factory.mktemp("chaos"), request.param
    steps = STEPS_EACH * (len(kinds) + 1)
    values = JOB | {"train.steps": steps, "checkpoint.memory_every_steps": 5, "recovery.beat_s": 0.5}
    values |= {"recovery.wait_s": 60}  # or the others would be done before a node is back
    args = ["--seed", "3", "--faults", str(len(kinds)), "--kinds", ",".join(kinds), *sets(values)]
    command = [PHALANX, "chaos", "run", *args]
    env = {**os.environ, **warm.start()}
    done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=400)
    return directory, done, kinds, steps


def test_after_one_fault_of_each_kind_weights_and_ledger_are_those_of_the_clean_run(chaos):
    _, done, kinds, steps = chaos
    assert done.returncode == 0, done.stdout + done.stderr
    told = f"after {len(kinds)} faults the weights and all {steps} steps of the ledger are bit-identical"
    assert told in done.stdout, done.stdout
    table = done.stdout.partition("detect")[2]
    assert all(f"\n{kind} " in table for kind in kinds), done.stdout


def test_survivors_keep_their_processes_and_every_sample_is_trained_once(chaos):
    directory, done, _, steps = chaos
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = directory.glob("runs/quickstart-chaos-*/events.jsonl")
    said = [json.loads(line) for line in run.read_text().splitlines()]
    workers = {}  # by rank, in the order in which they came
    for event in said:
        if event["type"] == "started" and event["rank"] >= 0:
            workers.setdefault(event["rank"], []).append(event["worker"])
    assert all(numbers == sorted(set(numbers)) for numbers in workers.values()), "two for one rank"
    # A worker that kept its state did not start anew. (Controller and agents report by different ways.)
    kept = {e["generation"] for e in said if e["type"] == "entered" and e["source"] == "kept"}
    branches = {e["generation"] for e in said if e["type"] == "control form" and e["branch"]}
    begun = {e["generation"] for e in said if e["type"] == "control started"}
    assert begun - branches - {1} <= kept
    generations = [e["generation"] for e in said if e["type"] == "control form"]
    assert generations == sorted(set(generations))
    ledger = [json.loads(line) for line in (run.parent / "ledger.jsonl").read_text().splitlines()]
    last = {row["step"]: row["samples"] for row in ledger}
    assert [last[step] for step in range(steps)] == [[4 * step, 4 * step + 4] for step in range(steps)]


@pytest.mark.slow
def test_nodes_are_drained_and_added_and_replicas_scaled(tmp_path):
    command = Command(tmp_path, *sets(JOB | {"train.steps": 100_000}))
    command.wait_until(command.rows)
    (run,) = command.runs
    listed = phalanx(tmp_path, "nodes", "ls", run).stdout
    assert "running, generation 1" in listed and "node-0" in listed
    first = json.loads((run / "events.jsonl").read_text().splitlines()[0])
    assert first["node"] == "controller"

    def forms():
        return [e for e in command.events("control form") if e["generation"] > 1]

    command.wait_until(lambda: "node-2 " in phalanx(tmp_path, "nodes", "ls", run).stdout)
    assert phalanx(tmp_path, "nodes", "drain", run, "node-0").returncode == 0
    command.wait_until(lambda: len(forms()) >= 1)
    assert "node-2" in forms()[0]["reason"] and forms()[0]["replicas"] == [0, 1]
    assert phalanx(tmp_path, "scale", run, "--replicas", 1).returncode == 0
    command.wait_until(lambda: any(len(f["replicas"]) == 1 for f in forms()))
    assert phalanx(tmp_path, "scale", run, "--replicas", 2).returncode == 0
    command.wait_until(lambda: len(forms()[-1]["replicas"]) == 2)
    assert phalanx(tmp_path, "nodes", "add", run).returncode == 0
    command.wait_until(lambda: "node-3 " in phalanx(tmp_path, "nodes", "ls", run).stdout)
    refused = phalanx(tmp_path, "nodes", "drain", run, "node-9")
    assert refused.returncode == 2 and "node-9" in refused.stderr
    refused = phalanx(tmp_path, "scale", run, "--replicas", 7)
    assert refused.returncode == 2 and "expected 1 to 2" in refused.stderr
    command.signal(signal.SIGINT)
    ended = command.end()
    assert ended.code == 130
    ended.check_clean()


def test_sigterm_saves_and_leaves(tmp_path):
    command = Command(tmp_path, *sets(JOB | {"train.steps": 100_000, "checkpoint.every_steps": 90_000}))
    command.wait_until(lambda: len(command.rows()) > 5)
    command.signal(signal.SIGTERM)
    ended = command.end()
    assert ended.code == 130
    ended.check_clean()
    (saved,) = command.events("checkpoint")
    values = JOB | {"train.steps": saved["step"] + 3}
    again = train(tmp_path / "again", *sets(values), "--resume", ended.runs[0])
    assert again.code == 0, again.err
    assert [row["step"] for row in again.rows] == [saved["step"] + i for i in range(3)]


def test_an_error_of_the_program_ends_the_run(tmp_path):
    """A retry would not help."""
    values = JOB | {"optimizer.lr": 1e30, "optimizer.clip": 0, "train.steps": 100}
    ended = train(tmp_path, *sets(values))
    assert ended.code == 1 and "FloatingPointError" in ended.err
    ended.check_clean()


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    command = Command(tmp_path, *sets(JOB))
    command.wait_until(command.rows)
    (run,) = command.runs
    assert (run / "control" / "secret").stat().st_mode & 0o777 == 0o600
    command.signal(signal.SIGKILL)
    ended = command.end()
    assert ended.left == {} and ended.shared == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks_per_node", "spares"), [("worker", 2, 0), ("node", 1, 1)], ids=["own memory", "its buddy's"]
)
def test_with_one_replica_all_go_back_to_the_snapshot_in_memory(tmp_path, kind, ranks_per_node, spares):
    """No other copy of the rank's state is left, so the steps since then become a branch of the ledger."""
    values = JOB | {"layout.replica": 1, "layout.tp": 2, "layout.ranks_per_node": ranks_per_node}
    values |= {"recovery.spares": spares, "train.steps": 120}
    values |= {"checkpoint.memory_every_steps": 7}
    args = [PHALANX, "chaos", "run", "--faults", "2", "--kinds", kind, *sets(values)]
    done = subprocess.run(args, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "after 2 faults the weights and all 120 steps of the ledger are bit-identical" in done.stdout
    (events,) = tmp_path.glob("runs/quickstart-chaos-*/events.jsonl")
    said = [json.loads(line) for line in events.read_text().splitlines()]
    sources = {e["source"] for e in said if e["type"] == "entered" and e["generation"] > 1}
    assert "memory" in sources and sources <= {"memory", "kept"}, "from the durable checkpoint it would be slower"
    forms = [e for e in said if e["type"] == "control form" and e["generation"] > 1]
    assert all(f["branch"] == (f["step"] < f["last"]) and f["last"] - f["step"] < 8 for f in forms)
