"""Which options controllers that stand by need, and what must not be in them. The rest: `make test-postgres`."""

from __future__ import annotations

import pytest

from phalanx.core.errors import RunFailed, UserError
from phalanx.run.standby import check_options, take_turns
from phalanx.runtime.journal_server import JournalServer

URL = "postgresql://phalanx@db/run"


@pytest.mark.parametrize(
    "journal, standby, secret, said",
    [
        ("/tmp/journal.db", False, "s", "not the address of a PostgreSQL server"),
        ("", True, None, "nothing to stand by for"),
        (URL, False, None, "share a secret"),
    ],
)
def test_options_that_do_not_go_together(journal, standby, secret, said):
    with pytest.raises(UserError, match=said):
        check_options(journal, standby, secret)
    check_options(URL, True, "s")
    check_options("", False, "s")


@pytest.mark.parametrize("url", ["postgresql://u:word@db/run", "postgresql://u@db/run?password=word"])
def test_an_address_with_a_password_is_refused_and_not_repeated(url):
    with pytest.raises(UserError, match="PGPASSWORD") as error:
        JournalServer(url, "a")
    assert "word@" not in str(error.value) and "=word" not in str(error.value)


def test_an_address_that_is_none_is_named():
    with pytest.raises(UserError, match="no address of a server"):
        JournalServer("postgresql://db:notaport/x?nonsense=1", "a")


def test_a_server_that_is_not_there_is_named():
    with pytest.raises(RunFailed, match=r"host=127.0.0.1 port=1 .* cannot be opened"):
        take_turns("postgresql://u@127.0.0.1:1/x", False, None, print, print)


@pytest.mark.parametrize(
    ("url", "mode"),
    [
        ("postgresql://phalanx@db/run7", "require"),
        ("postgresql://phalanx@127.0.0.1,10.0.0.7/run7", "require"),
        ("postgresql://phalanx@db/run7?sslmode=verify-full", "verify-full"),
        ("postgresql://phalanx@db/run7?sslmode=disable", "disable"),
        ("postgresql://phalanx@localhost:5432/run7", None),
        ("postgresql:///run7?host=/run/postgresql", None),
        ("postgresql:///run7", None),
    ],
)
def test_what_goes_to_a_journal_on_another_host_is_encrypted(monkeypatch, url, mode):
    """The key by which ranks hand each other their state is in it."""
    pytest.importorskip("psycopg")
    for name in ("PGSSLMODE", "PGHOST"):
        monkeypatch.delenv(name, raising=False)
    assert JournalServer(url, "a")._about.get("sslmode") == mode
    monkeypatch.setenv("PGSSLMODE", "verify-ca")  # which libpq reads itself
    assert JournalServer("postgresql://phalanx@db/run7", "a")._about.get("sslmode") is None
