"""Real runs that continue: after their files were moved away, with another batch and layout, beside another run."""

from __future__ import annotations

import json
import os

import pytest

from tests.checkpoint.faults import PATIENCE_S, Again, resumed_from
from tests.system.command import TINY, Command, phalanx, sets

JOB = TINY | {"train.steps": 8, "checkpoint.every_steps": 4, "layout.tp": 1, "layout.shard": 2, "train.global_batch": 4}
JOB |= {"train.micro_batch": 1, "run.threads": 1}


def served(command) -> list[tuple[int, int]]:
    """Return the samples of every step, from the ledger."""
    return [tuple(json.loads(line)["samples"]) for line in (command.runs[0] / "ledger.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    directory = tmp_path_factory.mktemp("first") / "run"
    command = Command(directory, *sets(JOB))
    assert command.end(PATIENCE_S).code == 0
    return directory, served(command)


def test_another_batch_and_layout_continue_where_the_data_was(first, tmp_path):
    """A change of anything that decides the order is refused by its name."""
    directory, before = first
    assert before[-1] == (28, 32)
    more = {"train.steps": 12, "train.global_batch": 8, "layout.shard": 1, "layout.replica": 2}
    command = Again(directory, "--resume", "auto", *sets(JOB | more))
    ended = command.end(PATIENCE_S)
    ended.check_clean()
    assert ended.code == 0, ended.err
    assert resumed_from(command) == 8 and served(command) == [(32, 40), (40, 48), (48, 56), (56, 64)]
    assert [row["cursor"] for row in ended.rows] == [40, 48, 56, 64]
    where = phalanx(directory, "data", "where", "--step", "9", command.runs[0])
    assert "these are the bytes that the ranks trained on" in where.stdout, where.stderr
    again = Again(directory, "--resume", "auto", *sets(JOB | {"train.steps": 20, "seed": 7}))
    ended = again.end(PATIENCE_S)
    assert ended.code == 2 and "seed = 7" in ended.err and again.runs == []


def test_files_that_were_away_cost_no_checkpoint(first, tmp_path):
    directory, _ = first
    checkpoints = sorted(directory.glob("runs/*/checkpoints/step-*"))
    for number, path in enumerate(checkpoints):
        os.rename(path / "rank-000000.bin", tmp_path / str(number))
    command = Again(directory, "--resume", "auto", *sets(JOB | {"train.steps": 16}))
    ended = command.end(PATIENCE_S)
    assert ended.code == 2 and "no good checkpoint is left" in ended.err and "--resume new" in ended.err
    assert not command.events("checkpoint_quarantined") and command.events("checkpoint_unreadable")
    for number, path in enumerate(checkpoints):
        os.rename(tmp_path / str(number), path / "rank-000000.bin")
    command = Again(directory, "--resume", "auto", *sets(JOB | {"train.steps": 16}))
    assert command.end(PATIENCE_S).code == 0 and resumed_from(command) == max(
        int(path.name.split("-")[1]) for path in checkpoints
    )


def test_two_runs_do_not_share_a_place(tmp_path):
    place = {"checkpoint.dir": tmp_path / "shared"}
    one = Command(tmp_path / "one", *sets(JOB | place | {"train.steps": 100_000}))
    one.wait_until(lambda: one.events("checkpoint"), PATIENCE_S)
    two = Command(tmp_path / "two", *sets(JOB | place), "--resume", "new").end(PATIENCE_S)
    two.check_clean()
    assert two.code == 2 and "writes its checkpoints there" in two.err, two.err
    one.signal(2)
    assert one.end(PATIENCE_S).code == 130
    kept = {path.name for path in (tmp_path / "shared").glob("step-*")}
    three = Command(tmp_path / "three", *sets(JOB | place), "--resume", "new").end(PATIENCE_S)
    assert three.code == 0, three.err
    assert kept <= {path.name for path in (tmp_path / "shared").glob("step-*")}, "those of the first are all there"
