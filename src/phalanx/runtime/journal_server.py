"""A journal on a PostgreSQL server, for controllers on several machines. Only one of them acts.

The head of the journal names its holder and counts beats: each commit is a beat, and now and then there is one without
entries. A controller that stands by watches term and beat. If neither changes for the length of a lease, by its own
clock, it begins a new term by comparing and setting both, so only one of several succeeds. The holder counts its lease
from before it sent the beat, so the lease has ended by then, and the holder knows it. No clock is compared with that of
another host.

Besides the entries, the server keeps what a controller needs to continue a run: the plan of its gang, and what its
nodes serve, with the key by which ranks hand state to each other. Passwords are left to libpq: PGPASSWORD, or a file. A
database holds one journal, in the schema `phalanx`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import UserError
from phalanx.runtime.journal import GENESIS, RESTORE, Damaged, Fenced, JournalError, Row, check_form

LEASE_S = 10.0
POLL_S = 1.0  # between two looks at the head
LEFT = -1  # the beat of a holder that has left
WAIT_MS = 3000  # for a lock, and for a client that is silent in a transaction
_LATCH = 0x7068616C  # the lock under which tables are made

_SCHEMA = """
CREATE TABLE entry (number bigint PRIMARY KEY, time_ns bigint NOT NULL, term bigint NOT NULL,
                    kind bytea NOT NULL, body bytea NOT NULL, hash bytea NOT NULL);
CREATE TABLE snapshot (number bigint PRIMARY KEY, chain bytea NOT NULL, state bytea NOT NULL, hash bytea NOT NULL);
CREATE TABLE head (term bigint NOT NULL, number bigint NOT NULL, hash bytea NOT NULL,
                   beat bigint NOT NULL, holder text NOT NULL, host text NOT NULL, version integer NOT NULL);
CREATE TABLE run (name text NOT NULL, plan text NOT NULL, spec text NOT NULL, done boolean NOT NULL);
"""
_END_CUT_OFF = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()
    AND usename = current_user AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%%'
    AND now() - state_change > %s * interval '1 millisecond'"""
_CLAIM = "UPDATE head SET term = term + 1, beat = 0, holder = %s, host = %s WHERE (term, beat) = (%s, %s)"


@dataclass(frozen=True, slots=True)
class Kept:
    """A run as the server keeps it. `done`: it is over, and there is nothing to continue."""

    name: str
    plan: dict[str, Any]
    spec: dict[str, Any]
    done: bool


class JournalServer:
    """The tables of a journal on a server. `holder`: the name of a controller, the same for all its processes; no other
    has it."""

    errors: type[Exception]
    lease_s = LEASE_S
    renewal = ", beat = beat + 1"

    def __init__(self, url: str, holder: str):
        self.url, self.holder = url, holder
        self._over = threading.Event()
        try:
            import psycopg
        except ImportError:
            remedy = "pip install 'phalanx[postgres]'"
            raise UserError(
                "psycopg is not installed", field="--journal", value="postgresql://…", remedy=remedy
            ) from None
        self._connect, self.errors = psycopg.connect, psycopg.Error
        try:
            known = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            remedy = "write it as postgresql://USER@HOST:PORT/DATABASE"
            raise UserError(
                f"it is no address of a server: {error}", field="--journal", value="…", remedy=remedy
            ) from None
        if "password" in known or "sslpassword" in known:
            remedy = (
                "keep it in the environment (PGPASSWORD) or in a file (~/.pgpass, or the one that PGPASSFILE names)"
            )
            raise UserError(
                "it has a password in it, which others on this host can read",
                field="--journal",
                value="…",
                remedy=remedy,
            )
        self.name = "the journal " + " ".join(
            f"{key}={known[key]}" for key in ("host", "port", "dbname") if known.get(key)
        )
        times: dict[str, Any] = {
            "connect_timeout": 3,
            "keepalives_idle": 3,
            "keepalives_interval": 1,
            "keepalives_count": 3,
        }
        if not is_local(known) and "PGSSLMODE" not in os.environ:
            times["sslmode"] = "require"  # libpq would do without, but the key by which ranks hand on state goes there
        self._about: dict[str, Any] = {**times, "tcp_user_timeout": 5000, "application_name": "phalanx", **known}

    # -- as tables

    def open(self, read_only: bool = False) -> Any:
        db = self._connect(**self._about, autocommit=True)
        db.execute("SET search_path = phalanx")
        for name in ("lock_timeout", "idle_in_transaction_session_timeout"):
            db.execute(f"SET {name} = {0 if read_only else WAIT_MS}")
        # What is acknowledged must be on the server's disk, even if its configuration is laxer.
        db.execute(
            "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
        )
        return db

    def run(self, db: Any, text: str, values: Any = ()) -> Any:
        return db.execute(text.replace("?", "%s"), values)

    def insert(self, db: Any, text: str, rows: list[Row]) -> None:
        if rows:
            as_bytes = [tuple(v.encode() if isinstance(v, str) else v for v in row) for row in rows]
            db.cursor().executemany(text.replace("?", "%s"), as_bytes)

    def take(self, db: Any, form: int) -> None:
        """Begin a term. Only the controller that has claimed the journal may: others may have held it since."""
        self._make(db)
        mine = "UPDATE head SET term = term + 1, beat = 0 WHERE holder = %s AND beat <> %s"
        if db.execute(mine, (self.holder, LEFT)).rowcount == 0:
            raise self._refused(db)
        db.execute("UPDATE head SET version = %s WHERE version = 0", (form,))
        check_form(self.name, db.execute("SELECT version FROM head").fetchone()[0], form)

    def interrupt(self, db: Any) -> None:
        if db is not None:
            with contextlib.suppress(OSError, self.errors), socket.socket(fileno=os.dup(db.fileno())) as line:
                line.shutdown(socket.SHUT_RDWR)

    def explained(self, error: Exception, more: str = "") -> JournalError:
        text = " ".join(str(error).split())
        if type(error).__name__ in ("UndefinedTable", "UndefinedColumn"):
            return Damaged(f"{self.name} is damaged: {text}; {RESTORE}")
        remedy = "is the server up, and may this user connect, and create tables there?"
        return JournalError("; ".join(filter(None, [f"{self.name} cannot be opened or written: {text}", remedy, more])))

    def close(self) -> None:
        pass

    # -- as what several controllers share

    def claim(self, standby: bool, on_wait: Callable[[str], object], begins: bool = True) -> Kept | None:
        """Become the holder, and return the run that is there, if any. While another holder beats, wait if this
        controller stands by; else raise UserError. A controller that begins no run waits until there is one. A thread
        of this process holds the journal until `rest`; from then on the controller must."""
        seen: tuple[Any, ...] = ()
        since, said = 0.0, ""
        while True:
            try:
                with contextlib.closing(self.open()) as db:
                    self._make(db)
                    head = db.execute("SELECT term, beat, holder, host FROM head").fetchone()
                    if head[:2] != seen:
                        if seen and not standby and head[1] != LEFT:
                            raise UserError(str(self._refused(db)), remedy="stand by for it with --standby, or stop it")
                        seen, since = head[:2], time.monotonic()
                    is_free = head[1] == LEFT or head[2] == self.holder or time.monotonic() - since > self.lease_s
                    kept = self._kept(db)
                    if kept is None and not begins:
                        text = f"standing by: {self.name} has no run yet"
                    elif is_free and self._swap(db, seen):
                        self._keep()
                        return self._kept(db)
                    else:
                        text = f"standing by: {self.name} is held by a controller on {head[3]}"
            except self.errors as error:
                if not standby:
                    raise self.explained(error) from None
                text = f"standing by: {self.explained(error)}"
            if text != said:
                said = text
                on_wait(text)
            time.sleep(POLL_S)

    def _swap(self, db: Any, seen: tuple[Any, ...]) -> bool:
        """Try to become the holder. The last one may have been cut off in the middle of a commit. End its session, or
        the server keeps its lock for as long as it believes in the connection."""
        db.execute(_END_CUT_OFF, (WAIT_MS,))
        return bool(db.execute(_CLAIM, (self.holder, _host(), *seen)).rowcount == 1)

    def _keep(self) -> None:
        over = self._over = threading.Event()

        def beat() -> None:
            while not over.wait(self.lease_s / 4):
                with contextlib.suppress(JournalError), self._held() as db:
                    db.execute("UPDATE head SET beat = beat + 1 WHERE beat <> %s", (LEFT,))

        threading.Thread(target=beat, daemon=True, name="phalanx-claim").start()

    def rest(self) -> None:
        self._over.set()

    def begin(self, name: str, plan: Any, spec: Any) -> None:
        """Begin the journal of a new run, as its holder; delete that of an earlier run."""
        with self._held() as db:
            db.execute("DELETE FROM entry")
            db.execute("DELETE FROM snapshot")
            db.execute("DELETE FROM run")
            db.execute("UPDATE head SET number = 0, hash = %s, version = 0", (GENESIS,))
            db.execute("INSERT INTO run VALUES (%s, %s, %s, false)", (name, json.dumps(plan), json.dumps(spec)))

    def leave(self, done: bool) -> None:
        """Let others take the journal at once. `done`: there is nothing to continue. Do nothing if it has another
        holder."""
        self.rest()
        with contextlib.suppress(Fenced), self._held() as db:
            db.execute("UPDATE head SET beat = %s", (LEFT,))
            if done:
                db.execute("UPDATE run SET done = true")

    @contextlib.contextmanager
    def _held(self) -> Any:
        """Open a transaction as the holder."""
        try:
            with contextlib.closing(self.open()) as db, db.transaction():
                if db.execute("SELECT holder FROM head FOR UPDATE").fetchone() != (self.holder,):
                    raise self._refused(db)
                yield db
        except self.errors as error:
            raise self.explained(error) from None

    def _kept(self, db: Any) -> Kept | None:
        found = db.execute("SELECT name, plan, spec, done FROM run").fetchone()
        return Kept(found[0], json.loads(found[1]), json.loads(found[2]), found[3]) if found else None

    def _refused(self, db: Any) -> Fenced:
        found = db.execute("SELECT host, coalesce((SELECT max(name) FROM run), '') FROM head").fetchone()
        if found is None:
            raise Damaged(f"{self.name} has no head; {RESTORE}")
        host, name = found
        return Fenced(f"{self.name} is held by a controller on {host}" + (f", for the run {name}" if name else ""))

    def _make(self, db: Any) -> None:
        with db.transaction():
            db.execute("SELECT pg_advisory_xact_lock(%s)", (_LATCH,))
            if db.execute("SELECT to_regclass('phalanx.head')").fetchone()[0] is None:
                db.execute("CREATE SCHEMA IF NOT EXISTS phalanx")
                db.execute(_SCHEMA)
                db.execute("INSERT INTO head VALUES (0, 0, %s, %s, '', '', 0)", (GENESIS, LEFT))


def is_local(known: dict[str, Any]) -> bool:
    """Return whether what goes to a server stays on this host. `known`: the parts of its address, as libpq has them."""
    hosts = known.get("hostaddr") or known.get("host") or os.environ.get("PGHOST", "")
    near = ("", "localhost", "127.0.0.1", "::1")
    return all(host in near or host.startswith(("/", "@")) for host in str(hosts).split(","))


def _host() -> str:
    return f"{socket.gethostname()} (process {os.getpid()})"
