"""RunRecord: what a run leaves behind can be read while it runs, after it, and after a crash."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import signal

import pytest

from phalanx.observe.record import RunRecord


def without_time(row):
    assert row.pop("time") > 1e9
    return row


def test_a_record_is_read_back(tmp_path):
    record = RunRecord.create(tmp_path / "runs", "my job/7", {"torch": "2.13"}, job={"job": {"seed": 1}, "origins": {}})
    assert re.fullmatch(r"my-job-7-\d{8}T\d{6}Z-[0-9a-f]{4}", record.path.name)
    record.metric({"step": 0, "loss": 1.25})
    record.event({"type": "ready"})
    while_running = RunRecord.open(record.path)
    assert [without_time(row) for row in while_running.metrics()] == [{"step": 0, "loss": 1.25}]
    assert while_running.summary is None
    record.metric({"step": 1, "loss": math.nan, "norms": [math.inf, 1.0]})
    record.finish({"ok": True})
    after = RunRecord.open(record.path)
    assert after.job == {"job": {"seed": 1}, "origins": {}} and after.meta["torch"] == "2.13"
    assert without_time(list(after.metrics())[1]) == {"step": 1, "loss": None, "norms": [None, 1.0]}
    assert [e["type"] for e in after.events()] == ["ready"] and next(after.events())["time"] > 1e9
    assert after.summary == {"ok": True}
    assert {p.name for p in record.path.iterdir()} == {
        "job.json", "meta.json", "metrics.jsonl", "events.jsonl",
        "ledger.jsonl", "logs", "summary.json",
    }  # fmt: skip


def test_two_runs_of_one_name_do_not_meet(tmp_path):
    assert RunRecord.create(tmp_path, "a", {}).path != RunRecord.create(tmp_path, "a", {}).path


def test_a_torn_last_line_is_passed_over_and_a_damaged_one_is_not(tmp_path):
    record = RunRecord.create(tmp_path, "a", {})
    record.metric({"step": 0})
    with open(record.path / "metrics.jsonl", "a") as f:
        f.write('{"step": 1, "lo')
    assert [row["step"] for row in record.metrics()] == [0]
    with open(record.path / "metrics.jsonl", "a") as f:
        f.write("\n")
    with pytest.raises(ValueError, match="line 2"):
        list(record.metrics())


def test_a_kill_leaves_every_line_that_was_written(tmp_path):
    pid = os.fork()
    if pid == 0:
        record = RunRecord.create(tmp_path, "a", {})
        for step in range(50):
            record.metric({"step": step})
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (path,) = tmp_path.iterdir()
    assert [row["step"] for row in RunRecord.open(path).metrics()] == list(range(50))
    assert RunRecord.open(path).summary is None


def test_what_is_no_record_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a run record"):
        RunRecord.open(tmp_path)


def test_the_summary_is_whole_or_absent(tmp_path, monkeypatch):
    record = RunRecord.create(tmp_path, "a", {})
    with pytest.raises(TypeError):
        record.finish({"bad": object()})
    assert record.summary is None
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        record.finish({"ok": True})
    assert record.summary is None
    monkeypatch.undo()
    record.finish({"ok": True})
    assert json.loads((record.path / "summary.json").read_text()) == {"ok": True}


def test_a_full_disk_loses_no_line_while_there_is_room_for_them_in_memory(tmp_path, monkeypatch):
    record = RunRecord.create(tmp_path, "a", {})
    whole, full = os.write, [True]

    def write(fd, data):
        if full[0]:
            if len(data) > 10:
                return whole(fd, data[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(fd, data)

    monkeypatch.setattr("os.write", write)
    monkeypatch.setattr("phalanx.observe.record.MOST_WAITING", 5)
    for step in range(4):
        record.metric({"step": step})
    full[0] = False
    record.metric({"step": 4})
    assert [row["step"] for row in record.metrics()] == [0, 1, 2, 3, 4] and record.dropped == 0
    full[0] = True
    for step in range(5, 20):
        record.metric({"step": step})
    full[0] = False
    record.finish({"status": "done"})
    assert record.summary["dropped"] == 10
    again = [row["step"] for row in RunRecord.open(record.path).metrics()]
    assert again == sorted(set(again))  # whole lines, in order


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT])
def test_what_was_lost_is_told_once_the_disk_takes_lines_again(tmp_path, monkeypatch, code):
    record = RunRecord.create(tmp_path, "a", {})
    monkeypatch.setattr("phalanx.observe.record.MOST_WAITING", 2)
    with monkeypatch.context() as away:
        away.setattr("os.write", lambda *_: (_ for _ in ()).throw(OSError(code, os.strerror(code))))
        for step in range(5):
            record.metric({"step": step})
            assert record.take_dropped() == 0, "nobody could be told"
    told = []
    for step in range(5, 8):
        record.metric({"step": step})
        told.append(record.take_dropped())
    assert sum(told) == record.dropped == 3 and told[-1] == 0
    assert [row["step"] for row in record.metrics()] == [0, 4, 5, 6, 7]


def test_rank_times_are_kept_beside_the_rows(tmp_path):
    from phalanx.observe.tiles import TileReader

    record = RunRecord.create(tmp_path, "a", {})
    for step in range(3, 8):
        record.rank_times(step, [1, {"0": 0.1, "2": 0.2}], 3)
    record.close()
    reader = TileReader(record.path / "ranks")
    assert (reader.first, reader.steps, reader.ranks) == (3, 5, 3)
    assert reader.picture((0, 3), (0, 9), 9, 9)["codes"][1].tolist() == [0] * 5
