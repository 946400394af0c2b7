"""The journal: what was acknowledged survives any end of process or disk; what was changed is named."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import select
import sqlite3
import threading
import time

import pytest

from phalanx.runtime import journal as module
from phalanx.runtime.journal import Damaged, Fenced, Journal, JournalError, read
from tests.checkpoint.faults import fill_disk, small_disk
from tests.runtime.cluster import wait_for


def load(data: bytes | None) -> dict:
    return json.loads(data) if data else {"count": 0, "hash": 0}


def fold(state: dict, entry) -> None:
    state["count"] += 1
    state["hash"] = (state["hash"] * 31 + entry.body["value"]) % 1_000_003


def folded(count: int) -> dict:
    state = load(None)
    for i in range(count):
        fold(state, module.Entry(i + 1, 0, 1, "event", {"value": i * 7919 % 1000}))
    return state


def filled(path, count=20, **options) -> None:
    with Journal(path, **options) as journal:
        for i in range(count):
            journal.append("event", {"value": i * 7919 % 1000}, i)
            if journal.snapshot_due:
                journal.snapshot(json.dumps(folded(i + 1)).encode())


def control(path, pipe: int) -> None:
    """Do what a controller does, in small: fold each event, take a snapshot now and then, and report what is
    durable."""
    journal = Journal(path, snapshot_every=7, prune=True)
    state = journal.recover(load, fold)
    while True:
        for _ in range(1 + state["count"] % 5):
            event = {"value": state["count"] * 7919 % 1000}
            fold(state, module.Entry(journal.append("event", event, 0), 0, journal.term, "event", event))
            if journal.snapshot_due:
                journal.snapshot(json.dumps(state).encode())
        journal.wait(journal.number)
        os.write(pipe, b"%d\n" % journal.number)


def controller(path) -> tuple[multiprocessing.Process, int]:
    """Start `control` in a process of its own. Return it, and a pipe with what it acknowledges."""
    ours, theirs = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=control, args=(path, theirs), daemon=True)
    process.start()
    os.close(theirs)
    return process, ours


def recovered(path) -> dict:
    with Journal(path) as journal:
        return journal.recover(load, fold)


def change(path, statement: str, *values) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement, values)
    db.close()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "journal.db"


def test_a_killed_controller_loses_nothing_that_it_acknowledged(path):
    dice, total = random.Random(1), 0
    for i in range(40):
        process, pipe = controller(path)
        with open(pipe) as said:
            first = [said.readline()] if i % 2 else []  # also while it starts
            time.sleep(dice.random() * 0.06)
            process.kill()
            acknowledged = max([total, *map(int, [*first, *said])])
        process.join()
        with Journal(path, snapshot_every=7) as journal:
            state = journal.recover(load, fold)
        assert state["count"] >= acknowledged and state == folded(state["count"])
        total = state["count"]
    assert total >= 20, "it was killed before it wrote anything"


def test_many_appends_share_a_commit(path, monkeypatch):
    commits, real, appended = [], Journal._commit, threading.Event()

    def slow(self, rows, snapshots):
        """Let the first commit take as long as all others take to append."""
        commits.append(len(rows))
        appended.wait()
        return real(self, rows, snapshots)

    monkeypatch.setattr(Journal, "_commit", slow)
    with Journal(path) as journal:
        threads = [threading.Thread(target=lambda: journal.wait(journal.append("event", {}, 0))) for _ in range(100)]
        [t.start() for t in threads]
        wait_for(lambda: journal.number == 100)
        appended.set()
        [t.join() for t in threads]
        assert journal.settled() == 100
    assert sum(commits) == 100 and len(commits) == 2


def test_it_is_durable_when_it_says_so(path):
    """After a power failure only what was followed by an fsync is there. SQLite's number for FULL is 2."""
    with Journal(path) as journal:
        assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_nothing_is_settled_before_its_commit(path, monkeypatch):
    gate, real = threading.Event(), Journal._commit
    monkeypatch.setattr(Journal, "_commit", lambda *args: gate.wait(10) and real(*args))
    with Journal(path) as journal:
        number = journal.append("event", {"value": 1}, 0)
        with pytest.raises(TimeoutError, match="entry 1 is not durable"):
            journal.wait(number, 0.05)
        assert journal.settled() == 0 and list(read(path)) == []
        gate.set()
        poll = select.poll()
        poll.register(journal, select.POLLIN)
        assert poll.poll(10_000), "a selector is not woken"
        assert journal.settled() == number and not poll.poll(0)
        assert [e.number for e in read(path)] == [number]


def test_entries_come_back_as_they_were(path):
    with Journal(path) as journal:
        journal.append("event", {"node": "nö", "steps": [1, 2**60]}, 17)
        journal.append("decision", {"rung": 2, "reason": "spare"}, 2**62)
    assert [(e.number, e.time_ns, e.term, e.kind, e.body) for e in read(path)] == [
        (1, 17, 1, "event", {"node": "nö", "steps": [1, 2**60]}),
        (2, 2**62, 1, "decision", {"rung": 2, "reason": "spare"}),
    ]
    assert [e.number for e in read(path, after=1)] == [2] and list(read(path, after=2)) == []


def test_a_long_entry_is_packed_and_comes_back_whole(path):
    bodies = [{"events": [{"node": f"node-{i}", "step": step} for i in range(500)]} for step in range(20)]
    with Journal(path) as journal:
        for body in bodies:
            journal.append("events", body, 0)
    assert [e.body for e in read(path)] == bodies
    assert path.stat().st_size < len(json.dumps(bodies)) / 3
    for number, other in ((15, "(SELECT body FROM entry WHERE number = 16)"), (5, "substr(body, 1, 100)")):
        change(path, f"UPDATE entry SET body = {other} WHERE number = {number}")
        with pytest.raises(Damaged, match=f"entry {number} of the journal was changed"):
            list(read(path))


# -- snapshots


def test_the_fold_is_the_same_from_a_snapshot_and_from_the_beginning(path, tmp_path):
    filled(path, 25, snapshot_every=10)
    filled(tmp_path / "without.db", 25)
    assert recovered(path) == recovered(tmp_path / "without.db") == folded(25)
    assert len(list(read(path))) == 25


def test_a_damaged_snapshot_is_passed_over(path):
    filled(path, 35, snapshot_every=10, prune=True)
    assert [e.number for e in read(path)] == list(range(21, 36)), "the entries after the older of two snapshots"
    change(path, "UPDATE snapshot SET state = ? WHERE number = 30", b'{"count": 30, "hash": 1}')
    with Journal(path) as journal:
        assert journal.recover(load, fold) == folded(35) and journal.damaged_snapshots == [30]


def test_snapshots_do_not_pile_up(path):
    filled(path, 200, snapshot_every=10)
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT number FROM snapshot").fetchall() == [(190,), (200,)]
    db.close()


def test_without_any_good_snapshot_and_with_entries_pruned_it_does_not_guess(path):
    filled(path, 35, snapshot_every=10, prune=True)
    change(path, "UPDATE snapshot SET state = ?", b"{}")
    with pytest.raises(Damaged, match="entries 1 to 20 of the journal are missing"):
        recovered(path)


# -- damage


@pytest.mark.parametrize(
    "statement, said",
    [
        ("UPDATE entry SET body = '{\"value\":3}' WHERE number = 12", "entry 12 of the journal was changed"),
        ("UPDATE entry SET body = X'ff00' WHERE number = 12", "entry 12 of the journal was changed"),
        ("UPDATE entry SET kind = 'decision' WHERE number = 12", "entry 12 of the journal was changed"),
        ("UPDATE entry SET kind = 7 WHERE number = 20", "entry 20 of the journal was changed"),
        ("UPDATE entry SET time_ns = 1 WHERE number = 20", "entry 20 of the journal was changed"),
        ("UPDATE entry SET time_ns = 'noon' WHERE number = 20", "entry 20 of the journal was changed"),
        ("UPDATE entry SET term = 9 WHERE number = 1", "entry 1 of the journal was changed"),
        ("UPDATE entry SET hash = X'00' WHERE number = 2", "entry 2 of the journal was changed"),
        ("DELETE FROM entry WHERE number = 12", "entries 12 to 12 of the journal are missing"),
        ("DELETE FROM entry WHERE number > 17", "entries 18 to 20 of the journal are missing"),
        ("DELETE FROM entry", "entries 1 to 20 of the journal are missing"),
        ("UPDATE head SET number = 7", "head of the journal was changed"),
        ("UPDATE head SET hash = X'00'", "head of the journal was changed"),
        ("DELETE FROM head", "0 heads"),
        ("DROP TABLE snapshot", "no such table"),
    ],
)
def test_a_changed_journal_is_named_and_not_folded(path, statement, said):
    filled(path)
    change(path, statement)
    with pytest.raises(Damaged, match=said):
        recovered(path)


def test_an_entry_of_another_journal(path, tmp_path):
    """The entry is intact in itself."""
    filled(path)
    with Journal(tmp_path / "other.db") as other:
        for i in range(20):
            other.append("event", {"value": i}, i)
    with sqlite3.connect(path) as db:
        db.execute("ATTACH ? AS other", (str(tmp_path / "other.db"),))
        db.execute("INSERT OR REPLACE INTO entry SELECT * FROM other.entry WHERE number = 12")
    db.close()
    with pytest.raises(Damaged, match="entry 12 of the journal was changed"):
        recovered(path)


def test_two_entries_that_changed_places(path):
    filled(path)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE entry SET number = 100 WHERE number = 3")
        db.execute("UPDATE entry SET number = 3 WHERE number = 4")
        db.execute("UPDATE entry SET number = 4 WHERE number = 100")
    db.close()
    with pytest.raises(Damaged, match="entry 3 of"):
        list(read(path))


def test_any_flipped_byte_is_found_or_harmless(path):
    """SQLite's pages have no checksums: what it misses, the chain finds."""
    filled(path, 200)
    whole, dice, found = path.read_bytes(), random.Random(2), 0
    for _ in range(150):
        at = dice.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << dice.randrange(8)]) + whole[at + 1 :])
        try:
            assert recovered(path) == folded(200)
        except JournalError:
            found += 1
        for beside in path.parent.glob("journal.db-*"):
            beside.unlink()
    assert found > 40


# -- one controller at a time


def test_a_second_controller_is_told_who_holds_it(path):
    with Journal(path), pytest.raises(JournalError, match=f"held by the controller with pid {os.getpid()}; stop"):
        Journal(path)
    Journal(path).close()


def test_the_lock_ends_with_its_process(path):
    process, pipe = controller(path)
    os.read(pipe, 1)
    with pytest.raises(JournalError, match=f"pid {process.pid};"):
        Journal(path)
    process.kill()
    process.join()
    os.close(pipe)
    Journal(path).close()


def test_the_term_grows_and_the_old_one_can_write_nothing(path):
    """This holds even where locks do not, as on some network file systems."""
    old = Journal(path)
    old.wait(old.append("event", {"value": 1}, 0))
    os.unlink(f"{path}.lock")
    with Journal(path) as new:
        assert (old.term, new.term) == (1, 2)
        number = old.append("event", {"value": 666}, 0)
        with pytest.raises(Fenced, match="term 1 is over"):
            old.wait(number, 10)
        with pytest.raises(Fenced):
            old.append("event", {}, 0)
        with pytest.raises(Fenced):
            old.close()
        new.wait(new.append("event", {"value": 2}, 0))
    assert [(e.term, e.body["value"]) for e in read(path)] == [(1, 1), (2, 2)]


# -- disks


def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RETRY_S", 0.05)
    with small_disk(tmp_path / "disk", size_kb=512) as disk:
        if disk is None:
            pytest.skip("mounting is not allowed here")
        path = disk / "journal.db"
        with Journal(path) as journal:
            journal.wait(journal.append("event", {"value": 0}, 0), 10)
            filler = fill_disk(disk)
            with pytest.raises(JournalError, match=r"full; make room .*; \d+ entries wait in memory"):
                for _ in range(1000):
                    number = journal.append("event", {"value": 0, "room": "x" * 1000}, 0)
                    journal.wait(number, 10)
            assert journal.number == number
            with pytest.raises(JournalError, match="full"):
                journal.append("event", {"value": 0}, 0)
            filler.unlink()
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                try:
                    journal.wait(number, 10)
                    break
                except JournalError:
                    time.sleep(0.02)
        assert len(list(read(path))) == number


def test_a_disk_that_stays_full_is_told_at_the_end(tmp_path):
    with small_disk(tmp_path / "disk", size_kb=512) as disk:
        if disk is None:
            pytest.skip("mounting is not allowed here")
        journal = Journal(disk / "journal.db")
        fill_disk(disk)
        journal.append("event", {"room": "x" * 100_000}, 0)
        with pytest.raises(JournalError, match="1 entries wait"):
            journal.close()


def test_a_read_only_folder_is_named(tmp_path):
    with small_disk(tmp_path / "disk", read_only=True) as disk:
        if disk is None:
            pytest.skip("mounting is not allowed here")
        with pytest.raises(JournalError, match=r"disk/journal.db cannot be written: .*Read-only.*; make room or give"):
            Journal(disk / "journal.db")


def test_what_is_no_journal_is_refused(path):
    path.write_text("not a database, and long enough that SQLite looks at it " * 100)
    with pytest.raises(Damaged, match="not a database"):
        Journal(path)
    path.unlink()
    change(path, "PRAGMA user_version = 99")
    with pytest.raises(JournalError, match=r"another release \(format 99, here 1\): continue the run with that one"):
        Journal(path)


def test_an_entry_costs_little_more_than_its_body(path):
    body = {"type": "node_dead", "node": "rack-017-node-12", "incarnation": 3, "reason": "silent for 15.3 s"}
    with Journal(path) as journal:
        for i in range(10_000):
            journal.append("event", body, 10**18 + i)
    size = len(json.dumps(body, separators=(",", ":")))
    assert path.stat().st_size / 10_000 < size + 64
