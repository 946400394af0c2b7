"""A journal in one file of SQLite, for the controller of one machine.

SQLite runs in WAL mode with synchronous=FULL: each commit ends with an fsync of the WAL, so what was acknowledged
survives a power failure. (With NORMAL, which syncs only when the WAL is folded into the file, a power failure takes the
last commits with it; a killed process loses nothing in either mode.) What SQLite itself throws away cannot be found: if
a WAL is damaged from outside before it is folded, SQLite ends it where the damage begins.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Any

from phalanx.core.store import sync_folder
from phalanx.runtime.journal import GENESIS, RESTORE, Damaged, JournalError, Row, check_form

_SCHEMA = """
CREATE TABLE entry (number INTEGER PRIMARY KEY, time_ns INTEGER NOT NULL, term INTEGER NOT NULL,
                    kind TEXT NOT NULL, body TEXT NOT NULL, hash BLOB NOT NULL);
CREATE TABLE snapshot (number INTEGER PRIMARY KEY, chain BLOB NOT NULL, state BLOB NOT NULL, hash BLOB NOT NULL);
CREATE TABLE head (term INTEGER NOT NULL, number INTEGER NOT NULL, hash BLOB NOT NULL);
"""
_REMEDY = "make room or give write permission there, or name another place"


class JournalFile:
    errors: type[Exception] = sqlite3.Error
    lease_s = 0.0
    renewal = ""

    def __init__(self, path: Path):
        self.path, self.name = Path(path), f"the journal {path}"
        self._lock_fd = -1

    def open(self, read_only: bool = False) -> sqlite3.Connection:
        if not read_only:
            self._lock()
        uri = f"{self.path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        if read_only:
            db.text_factory = bytes  # a flipped bit may leave bytes that are not text
            return db
        try:
            if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
                raise JournalError(f"{self.name} lies on a file system without shared memory; name a local disk")
            db.execute("PRAGMA synchronous = FULL")
        except BaseException:
            db.close()
            raise
        return db

    def _lock(self) -> None:
        """Lock a file beside the journal for as long as this process lives, and write the process's id into it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"{self.name} cannot be written: {error}; {_REMEDY}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        except BlockingIOError:
            pid = os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
            os.close(fd)
            remedy = "stop that one, or name another journal"
            raise JournalError(f"{self.name} is held by the controller with pid {pid}; {remedy}") from None
        except OSError as error:
            os.close(fd)
            raise JournalError(f"{self.name} cannot be written: {error}; {_REMEDY}") from None
        self._lock_fd = fd

    def run(self, db: Any, text: str, values: Any = ()) -> Any:
        return db.execute(text, values)

    def insert(self, db: Any, text: str, rows: list[Row]) -> None:
        db.executemany(text, rows)

    def take(self, db: Any, form: int) -> None:
        db.execute("BEGIN IMMEDIATE")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if not version:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                db.execute(statement)
            db.execute("INSERT INTO head VALUES (0, 0, ?)", (GENESIS,))
            db.execute(f"PRAGMA user_version = {form}")
        else:
            check_form(self.name, version, form)
        db.execute("UPDATE head SET term = term + 1")
        db.execute("COMMIT")
        sync_folder(self.path.parent)

    def interrupt(self, db: Any) -> None:
        db.interrupt()

    def explained(self, error: Exception, more: str = "") -> JournalError:
        text = str(error)
        if "malformed" in text or "not a database" in text or "no such table" in text:
            return Damaged(f"{self.name} is damaged: {text}; {RESTORE}")
        parts = [f"{self.name} cannot be opened or written: {text}", _REMEDY, more]
        return JournalError("; ".join(filter(None, parts)))

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
