"""Checkpoints of real runs under bad conditions: damaged files, a disk that is full, slow or not writable, memory that
changes by itself. Each is found, named and recorded; the newest good checkpoint is used; training continues."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.checkpoint.faults import PATIENCE_S, Again, committed, fill_disk, flip, resumed_from, slow_disk, small_disk
from tests.system.command import TINY, Command, sets

STEPS = 12
JOB = TINY | {
    "layout.shard": 2,
    "layout.tp": 1,
    "train.micro_batch": 1,
    "train.steps": STEPS,
    "optimizer.lr": 0.01,
    "checkpoint.every_steps": 4,
}


# -- damage on the disk


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run with checkpoints of steps 4 and 8, and the digests that it had after 12."""
    directory = tmp_path_factory.mktemp("trained") / "run"
    ended = Command(directory, *sets(JOB)).end(PATIENCE_S)
    assert ended.code == 0 and committed(directory) == [4, 8, 12], ended.err
    shutil.rmtree(checkpoints(directory)[0])
    return directory, ended.summary["digests"]


def checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints, the newest first."""
    return sorted(directory.glob("runs/*/checkpoints/step-*"), reverse=True)


def swap_ranks(newest: Path, other: Path) -> None:
    a, b = newest / "rank-000000.bin", newest / "rank-000001.bin"
    a.rename(newest / "x")
    b.rename(a)
    (newest / "x").rename(b)


# What is done to the newest checkpoint; the file that the message names, and what it says.
DAMAGE = {
    "flipped": (
        lambda new, old: flip(new / "rank-000001.bin", 99),
        "rank-000001.bin: chunk 0, bytes 0 to",
        "instead of",
    ),
    "of another rank": (swap_ranks, "rank-00000", "instead of"),
    "of another step": (
        lambda new, old: shutil.copy(old / "rank-000000.bin", new / "rank-000000.bin"),
        "rank-000000.bin: its tail has the blake3",
        "instead of",
    ),
    "missing": (lambda new, old: (new / "rank-000000.bin").unlink(), "rank-000000.bin: is missing", ""),
    "torn manifest": (
        lambda new, old: os.truncate(new / "manifest.json", 500),
        "manifest.json: is torn or damaged",
        "blake3",
    ),
}
FAST = ("flipped",)


@pytest.mark.parametrize(
    "kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow) for kind in DAMAGE]
)
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_is_used(trained, tmp_path, kind):
    """A rank may find the damage while it loads, or the launcher before that."""
    directory, whole = trained
    shutil.copytree(directory, tmp_path / "run")
    newest, other = checkpoints(tmp_path / "run")[:2]
    damage, named, expected = DAMAGE[kind]
    damage(newest, other)
    command = Again(tmp_path / "run", "--resume", "auto", *sets(JOB))
    ended = command.end(PATIENCE_S)
    ended.check_clean()
    assert ended.code == 0, ended.err
    missing = kind == "missing"  # a missing file may come back
    event = command.events("checkpoint_unreadable" if missing else "checkpoint_quarantined")[-1]
    assert event["checkpoint"] == newest.name
    assert f"{newest.name}/{named}" in event["reason"] and expected in event["reason"]
    told = "CANNOT BE READ and is left as it is" if missing else "is DAMAGED and was put aside"
    assert f"checkpoint {newest.name} {told}" in ended.out
    if missing:
        assert not (newest / "quarantined.json").exists()
    else:
        assert json.loads((newest / "quarantined.json").read_text())["reason"] == event["reason"]
    assert resumed_from(command) == 4 and [row["step"] for row in ended.rows] == list(range(4, STEPS))
    assert ended.summary["digests"] == whole


@pytest.mark.slow
def test_when_no_checkpoint_is_good_the_run_says_so(trained, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    for checkpoint in checkpoints(tmp_path / "run"):
        flip(checkpoint / "rank-000001.bin", 99)
    command = Again(tmp_path / "run", "--resume", "auto", *sets(JOB))
    ended = command.end(PATIENCE_S)
    ended.check_clean()
    assert ended.code == 2, ended.err
    for part in ("--resume = 'auto'", "no good checkpoint is left", "rank-000001.bin", "remedy: restore one"):
        assert part in ended.err
    assert len(command.events("checkpoint_quarantined")) == 2


# -- a bad disk


def disk_full(directory: Path) -> dict | None:
    """Run on a disk that is full for the first checkpoint, then has room again."""
    directory.mkdir(exist_ok=True)
    with small_disk(directory / "disk", size_kb=4096) as disk:
        if disk is None:
            return None
        filler = fill_disk(disk, leave_bytes=6 * 4096)  # room to note who writes there, but for no checkpoint
        values = JOB | {"train.steps": 160, "checkpoint.every_steps": 40, "checkpoint.dir": disk}
        command = Command(directory / "run", *sets(values))
        command.wait_until(lambda: command.events("checkpoint_failed"), PATIENCE_S)
        filler.unlink()
        ended = command.end(PATIENCE_S)
        made = sorted(int(p.parent.name.split("-")[1]) for p in disk.glob("*/manifest.json"))
        return {"ended": ended, "made": made, "failed": command.events("checkpoint_failed"), "disk": str(disk)}


def full_then_killed(directory: Path) -> dict | None:
    """Have the first checkpoint fail and later a rank die, while what is newer is only in memory."""
    directory.mkdir(exist_ok=True)
    with small_disk(directory / "disk", size_kb=4096) as disk:
        if disk is None:
            return None
        filler = fill_disk(disk, leave_bytes=6 * 4096)  # room to note who writes there, but for no checkpoint
        every = {"checkpoint.every_steps": 50, "checkpoint.memory_every_steps": 1, "checkpoint.dir": disk}
        command = Again(directory / "run", *sets(JOB | every | {"train.steps": 100_000}))
        command.wait_until(lambda: command.events("checkpoint_failed"), PATIENCE_S)
        filler.unlink()
        before = len(command.rows())
        command.wait_until(lambda: len(command.rows()) > before + 20, PATIENCE_S)
        command.signal(signal.SIGKILL, pid=command.pid_of("rank 1"))
        ended = command.end(PATIENCE_S)
        made = max((int(p.parent.name.split("-")[1]) for p in disk.glob("*/manifest.json")), default=0)
        return {"ended": ended, "made": made}


def disk_slow(directory: Path) -> dict:
    values = JOB | {"train.steps": 60, "checkpoint.every_steps": 40, "checkpoint.keep_last": 1}
    command = Command(directory / "run", *sets(values), env=slow_disk(directory))
    ended = command.end(PATIENCE_S)
    return {"ended": ended, "made": command.events("checkpoint"), "kept": checkpoints(directory / "run")}


def read_only(directory: Path) -> dict | None:
    with small_disk(directory / "disk", read_only=True) as disk:
        if disk is None and os.getuid() == 0:
            return None
        disk = directory / "disk"
        disk.chmod(0o555) if os.getuid() else None
        ended = Command(directory / "run", *sets(JOB | {"checkpoint.dir": disk / "checkpoints"})).end(PATIENCE_S)
        return {"ended": ended, "disk": disk}


# -- memory that changes by itself


def slots_of(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    paths = [f"{folder}/{fd}" for fd in os.listdir(folder)]
    slots = [path for path in paths if "phalanx-snapshot" in os.readlink(path)]
    return list({os.stat(path).st_ino: path for path in slots}.values())  # a mapping holds one more descriptor


def memory_flipped(directory: Path) -> dict:
    """Stop the keeper until two snapshots of each rank wait for it, then flip a bit of each."""
    values = JOB | {"train.steps": 200, "checkpoint.every_steps": 50, "checkpoint.memory_every_steps": 50}
    command = Again(directory / "run", *sets(values))
    command.wait_until(lambda: command.events("ready"), PATIENCE_S)
    keeper = command.pid_of("keeper-0")
    os.kill(keeper, signal.SIGSTOP)
    # The snapshots of 50, 100 and 150 are sealed; that of 200 must wait.
    command.wait_until(lambda: len(command.rows()) >= 198, PATIENCE_S)
    time.sleep(0.5)
    slots = slots_of(keeper)
    for path in slots:
        flip(path, 40)
    os.kill(keeper, signal.SIGCONT)
    ended = command.end(PATIENCE_S)
    return {
        "ended": ended,
        "slots": len(slots),
        "failed": command.events("checkpoint_failed"),
        "made": committed(directory / "run"),
    }


SCENARIOS = {
    "disk full": disk_full,
    "full, then killed": full_then_killed,
    "disk slow": disk_slow,
    "read only": read_only,
    "memory flipped": memory_flipped,
}


@pytest.mark.parametrize("name", ["disk full"])
def test_a_full_disk_does_not_stop_the_run(outcomes, name):
    out = outcomes(name)
    if out is None:
        pytest.skip("no file system can be mounted here")
    ended = out["ended"]
    ended.check_clean()
    assert ended.code == 0 and len(ended.rows) == 160, ended.err
    for failed in out["failed"]:
        assert out["disk"] in failed["reason"] and "No space left on device" in failed["reason"]
        assert failed["rank"] in (0, 1) and failed["checkpoint"].startswith(f"step-{failed['step']:09d}")
    assert {failed["step"] for failed in out["failed"]} >= {40}
    assert "the checkpoint of step 40 FAILED" in ended.out
    assert out["made"][-1] == 160, "once there is room again"


@pytest.mark.parametrize("name", ["full, then killed"])
def test_a_checkpoint_that_failed_does_not_cost_those_after_it(outcomes, name):
    out = outcomes(name)
    if out is None:
        pytest.skip("no file system can be mounted here")
    out["ended"].check_clean()
    assert out["made"] >= len(out["ended"].rows) - 2, "what is in memory is written when a rank dies, as ever"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["disk slow"])
def test_the_last_retention_is_not_left_out(outcomes, name):
    """It is done even though it takes its time when the run is over."""
    (kept,) = outcomes(name)["kept"]
    assert kept.name.startswith("step-000000060-")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["disk slow"])
def test_a_slow_disk_does_not_slow_the_steps(outcomes, name):
    """A rank's file takes two writes of 1.5 s each."""
    out = outcomes(name)
    ended = out["ended"]
    ended.check_clean()
    assert ended.code == 0, ended.err
    first = out["made"][0]
    assert first["step"] == 40 and first["drain_s"] > 3.0
    assert first["stall_s"] < first["drain_s"] / 2
    after = [row["time_s"] for row in ended.rows if row["step"] >= 40]
    assert max(after) < first["drain_s"] / 2, "no step has waited for it"
    assert [made["step"] for made in out["made"]] == [40, 60]


@pytest.mark.parametrize("name", ["read only"])
def test_a_folder_that_may_not_be_written_to_is_refused_at_the_start(outcomes, name):
    out = outcomes(name)
    if out is None:
        pytest.skip("root may write anywhere")
    ended = out["ended"]
    ended.check_clean()
    assert ended.code == 2, ended.err
    for part in (f"checkpoint.dir = '{out['disk']}/checkpoints'", "no checkpoint can be written there", "remedy: name"):
        assert part in ended.err
    assert ended.rows == [] and "File" not in ended.err


@pytest.mark.parametrize("name", ["memory flipped"])
def test_a_snapshot_that_changed_in_memory_is_never_committed(outcomes, name):
    out = outcomes(name)
    ended = out["ended"]
    ended.check_clean()
    assert ended.code == 0, ended.err
    assert out["slots"] == 6
    assert {f["checkpoint"][:14] for f in out["failed"]} == {f"step-{step:09d}" for step in (50, 100, 150)}
    for failed in out["failed"]:
        assert "the snapshot in memory: bytes 0 to" in failed["reason"] and "instead of" in failed["reason"]
    assert out["made"] == [200], "the ones after it are well"
