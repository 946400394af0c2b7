"""A journal on a server: it has one holder at a time, wherever connections are cut, and the same entries as in a
file."""

from __future__ import annotations

import threading
import time

import psycopg
import pytest

from phalanx.core.errors import UserError
from phalanx.runtime import journal_server
from phalanx.runtime.journal import Damaged, Fenced, Journal, JournalError, read
from phalanx.runtime.journal_server import JournalServer
from tests.postgres.server import PASSWORD, Line
from tests.runtime.cluster import wait_for
from tests.runtime.test_journal import fold, folded, load

LEASE_S = 2.0


@pytest.fixture(autouse=True)
def short_lease(monkeypatch):
    monkeypatch.setattr(JournalServer, "lease_s", LEASE_S)
    monkeypatch.setattr(journal_server, "POLL_S", 0.1)


def claimed(url: str, holder: str, standby: bool = True) -> JournalServer:
    tables = JournalServer(url, holder)
    tables.claim(standby, lambda text: None)
    tables.rest()
    return tables


def fill(journal: Journal, first: int, count: int) -> None:
    for i in range(first, first + count):
        journal.append("event", {"value": i * 7919 % 1000, "nöde": "x" * (i % 3) * 1000}, i)


def test_another_continues_what_was_acknowledged(server, database):
    url = server.url(database)
    with Journal(claimed(url, "a"), snapshot_every=10) as first:
        fill(first, 0, 15)
        first.wait(15)
        first.snapshot(b'{"count": 15, "hash": %d}' % folded(15)["hash"])
        fill(first, 15, 10)
    with Journal(claimed(url, "b")) as second:
        assert second.recover(load, fold) == folded(25) and second.term > first.term
        fill(second, 25, 5)
    entries = list(read(JournalServer(url, "c")))
    assert [e.number for e in entries] == list(range(1, 31))
    assert [e.term for e in entries] == [first.term] * 25 + [second.term] * 5


def test_a_changed_entry_is_found(server, database):
    url = server.url(database)
    with Journal(claimed(url, "a")) as journal:
        fill(journal, 0, 5)
    with psycopg.connect(url) as db:
        db.execute("UPDATE phalanx.entry SET time_ns = 9 WHERE number = 3")
    with pytest.raises(Damaged, match="entry 3 of the journal was changed"):
        list(read(JournalServer(url, "c")))


def test_whoever_was_replaced_can_append_nothing(server, database):
    url = server.url(database)
    old = Journal(claimed(url, "a"))
    old.wait(old.append("event", {"value": 1}, 0), 10)
    old._commit = lambda rows, snapshots: time.sleep(60)  # it stands still without knowing
    new = Journal(claimed(url, "b"))
    assert not old.is_held
    del old._commit
    late = Journal._commit(old, [(2, 0, old.term, "event", "{}", b"x" * 16)], [])
    assert isinstance(late, Fenced) and "was taken over" in str(late)
    new.wait(new.append("event", {"value": 2}, 0), 10)
    new.close()
    assert [(e.term, e.body["value"]) for e in read(JournalServer(url, "c"))] == [(old.term, 1), (new.term, 2)]


def test_of_many_that_stand_by_one_gets_it(server, database):
    url, over, journals = server.url(database), threading.Event(), []
    claimed(url, "dead")  # it never beats

    def stand_by(name: str) -> None:
        with Journal(claimed(url, name)) as journal:
            journals.append(journal)
            over.wait(60)

    threads = [threading.Thread(target=stand_by, args=(f"s{i}",), daemon=True) for i in range(6)]
    [thread.start() for thread in threads]
    wait_for(lambda: journals)
    until = time.monotonic() + 3 * LEASE_S
    while time.monotonic() < until:
        assert sum(journal.is_held for journal in [*journals]) <= 1
        time.sleep(0.01)
    over.set()
    assert [journal.term for journal in journals] == sorted({journal.term for journal in journals})


def test_one_that_is_cut_off_knows_it_before_others_can_act(server, database):
    line = Line(server.port)
    old = Journal(claimed(server.url(database, line.port), "a"))
    old.wait(old.append("event", {"value": 1}, 0), 10)
    line.cut()
    old.append("event", {"value": 666}, 0)
    free = []
    thread = threading.Thread(target=lambda: free.append(claimed(server.url(database), "b")), daemon=True)
    thread.start()
    held = []
    while not free:
        held.append(old.is_held)
        time.sleep(0.01)
    assert held[0] and not held[-1], "it believed that it held the lease when another had it"
    with pytest.raises(JournalError):
        old.close()  # it does not wait for an answer for ever
    line.close()
    assert [e.body["value"] for e in read(free[0])] == [1]


def test_one_that_was_cut_off_in_the_middle_of_a_commit_keeps_no_lock(server, database):
    url = server.url(database)
    claimed(url, "dead")
    with psycopg.connect(url) as db:
        db.execute("UPDATE phalanx.head SET number = 666")  # it sends nothing more, and the server sees no end
        assert claimed(url, "b").holder == "b"
        with pytest.raises(psycopg.OperationalError):
            db.execute("SELECT 1")
    with Journal(claimed(url, "b")) as journal:
        assert journal.number == 0


def test_a_lost_answer_is_no_lost_entry(server, database):
    """The commit took place, but the connection ended before the answer."""
    tables = claimed(server.url(database), "a")
    with Journal(tables) as journal:
        real, lost = tables.run, []

        def run(db, text, values=()):
            out = real(db, text, values)
            if text == "COMMIT" and not lost:
                lost.append(db.close())
                raise psycopg.OperationalError("the connection was lost")
            return out

        tables.run = run
        number = journal.append("event", {"value": 1}, 0)
        wait_for(lambda: lost)
        wait_for(lambda: journal._durable >= number)
        assert journal.is_held
    assert [e.number for e in read(tables)] == [1]


def test_a_server_that_is_away_for_a_moment(server, database):
    line = Line(server.port)
    with Journal(claimed(server.url(database, line.port), "a")) as journal:
        journal.wait(journal.append("event", {"value": 1}, 0), 10)
        line.cut()
        line.mend()  # its connections are lost
        wait_for(lambda: _appends(journal))
        wait_for(lambda: journal._durable == 2)
    line.close()


def _appends(journal: Journal) -> bool:
    try:
        return journal.append("event", {"value": 2}, 0) == 2
    except JournalError:
        return False


def test_who_does_not_stand_by_is_refused(server, database):
    url = server.url(database)
    with (
        Journal(claimed(url, "a")) as journal,
        pytest.raises(UserError, match=r"is held by a controller on .*\n  remedy: stand by"),
    ):
        journal.append("event", {}, 0)
        claimed(url, "b", standby=False)
    with pytest.raises(Fenced, match="is held by"), Journal(JournalServer(url, "b")):
        pass


def test_a_wrong_password_and_no_server(server, database, monkeypatch):
    with pytest.raises(JournalError, match=r"cannot be opened or written: .*refused.*; is the server up"):
        claimed("postgresql://u@127.0.0.1:1/x", "a", standby=False)
    monkeypatch.setenv("PGPASSWORD", "wrong-word")
    with pytest.raises(JournalError, match="password authentication failed") as error:
        claimed(server.url(database), "a", standby=False)
    assert "wrong-word" not in str(error.value) and PASSWORD not in str(error.value)
