"""Runs that once never ended, with real processes: each ends, done or with the reason and an exit status."""

from __future__ import annotations

import json
import resource

import pytest

from tests.system.command import TINY, Command, sets, train

JOB = TINY | {
    "recovery.on": "true",
    "train.steps": 60,
    "layout.tp": 1,
    "layout.replica": 2,
    "layout.ranks_per_node": 2,
    "train.global_batch": 4,
}
LAST_ONLY = JOB | {"checkpoint.every_steps": 100_000}


def keepers(command):
    return [e["pid"] for e in command.events("started") if e["service"] == "keeper"]


def no_file_may_grow(command, limit=0):
    for pid in keepers(command):
        _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit if limit >= 0 else hard, hard))


def test_a_last_checkpoint_that_fails_once_is_written_again(tmp_path):
    command = Command(tmp_path, *sets(LAST_ONLY))
    command.wait_until(command.rows)
    no_file_may_grow(command)
    command.wait_until(lambda: command.events("checkpoint_failed"), 120)
    no_file_may_grow(command, -1)
    ended = command.end(120)
    assert ended.code == 0, ended.err
    ended.check_clean()
    (saved,) = command.events("checkpoint")
    assert saved["step"] == 60 and (ended.runs[0] / "checkpoints" / saved["checkpoint"] / "manifest.json").exists()


def test_a_last_checkpoint_that_fails_for_good_is_a_failure(tmp_path):
    """All steps are done, but the last state is not durable: the exit status must show that."""
    command = Command(tmp_path, *sets(LAST_ONLY))
    command.wait_until(command.rows)
    no_file_may_grow(command)
    ended = command.end(240)
    assert ended.code == 1 and "step 60 was trained, but its checkpoint could not be written" in ended.err
    assert "File too large" in ended.err and ended.summary["status"] == "failed"
    assert len(ended.rows) == 60
    assert ended.summary["durable"] == 0 and "; nothing of it is saved" in ended.err


@pytest.mark.parametrize("recovery", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_resume_from_a_damaged_checkpoint_takes_the_newest_good_one(tmp_path, recovery):
    values = JOB | {"train.steps": 20, "checkpoint.every_steps": 10, "recovery.on": recovery}
    first = train(tmp_path, *sets(values))
    assert first.code == 0, first.err
    newest = max((first.runs[0] / "checkpoints").glob("step-*"))
    file = newest / "rank-000000.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)
    again = train(tmp_path / "again", *sets(values | {"train.steps": 30}), "--resume", first.runs[0])
    assert again.code == 0, again.err
    assert [row["step"] for row in again.rows] == list(range(10, 30))
    said = [json.loads(line) for line in (again.runs[0] / "events.jsonl").read_text().splitlines()]
    (aside,) = [e for e in said if e["type"] == "checkpoint_quarantined"]
    assert aside["checkpoint"] == newest.name
    assert sum(e["type"] == "control form" for e in said) == 2, "one attempt with each checkpoint"


def test_groups_that_cannot_form_end_the_run_with_the_ranks_own_error(tmp_path):
    ended = Command(tmp_path, *sets(JOB), env={"GLOO_SOCKET_IFNAME": "eth-not-there"}).end(120)
    assert ended.code == 1 and "eth-not-there" in ended.err and "rank " in ended.err, ended.err
    ended.check_clean()
    assert "(5 times, and no step in between)" in ended.err, ended.err
    assert ended.summary["status"] == "failed"
