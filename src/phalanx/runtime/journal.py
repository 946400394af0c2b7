"""The journal: what a controller heard and what it decided, in one SQLite file. State is the fold of it, so a command
may take effect only when the entries that led to it are durable. One writer; anybody may `read` beside it.

SQLite runs in WAL mode with synchronous=FULL: each commit ends with an fsync of the WAL, and what was acknowledged is
there after a power failure. (With NORMAL, which syncs only when the WAL is folded into the file, a power failure takes
the last commits with it; a killed process loses nothing in either.) As an fsync takes milliseconds, a thread commits
whatever was appended while the commit before it ran, all at once.

Each entry carries a hash over itself and the hash before it, and the head of that chain is kept beside them: an entry
that was changed, lost or cut off is found and named. What SQLite itself throws away cannot be: a WAL that was damaged
from outside before it was folded ends, for SQLite, where the damage begins.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import sqlite3
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from phalanx.core.store import sync_folder

GENESIS = bytes(16)  # the hash before the first entry
KEPT_SNAPSHOTS = 2
PACKED_BYTES = 1024  # and more: compressed
RETRY_S = 1.0  # between attempts to write to a disk that is full
VERSION = 1

_HEAD = struct.Struct(">qqq")
_SCHEMA = """
CREATE TABLE entry (number INTEGER PRIMARY KEY, time_ns INTEGER NOT NULL, term INTEGER NOT NULL,
                    kind TEXT NOT NULL, body TEXT NOT NULL, hash BLOB NOT NULL);
CREATE TABLE snapshot (number INTEGER PRIMARY KEY, chain BLOB NOT NULL, state BLOB NOT NULL, hash BLOB NOT NULL);
CREATE TABLE head (term INTEGER NOT NULL, number INTEGER NOT NULL, hash BLOB NOT NULL);
"""

S = TypeVar("S")


class JournalError(RuntimeError):
    """It cannot be opened or written; nothing that was acknowledged is lost."""


class Fenced(JournalError):
    """Another controller has taken the journal over: this one must not decide any more."""


class Damaged(JournalError):
    """What is in the file is not what was written."""


@dataclass(frozen=True, slots=True)
class Entry:
    number: int  # from 1
    time_ns: int
    term: int  # of the controller that wrote it
    kind: str
    body: dict[str, Any]


class Journal:
    """`snapshot_every`: entries after which `snapshot_due`. `prune`: drop entries that no kept snapshot needs.

    `term` grows with every opening, and every commit checks that it is still the last one: a controller that was
    believed dead and goes on writes nothing any more. A selector may wait on the journal itself: it is readable when
    `settled()` has news."""

    def __init__(self, path: Path, snapshot_every: int = 10_000, prune: bool = False):
        self.path, self.snapshot_every, self.prune = Path(path), snapshot_every, prune
        self.damaged_snapshots: list[int] = []  # that `recover` had to pass over
        self._news = threading.Condition()
        self._rows: list[tuple[Any, ...]] = []  # not yet given to a commit
        self._snapshots: list[tuple[Any, ...]] = []
        self._trouble: JournalError | None = None
        self._closing = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _lock(self.path)
        except OSError as error:
            raise JournalError(f"the journal {path} cannot be written: {error}; {_REMEDY}") from None
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._lock_fd)
            try:
                self._db = undo.enter_context(contextlib.closing(_open(self.path)))
                self.term, self._number, self._hash = self._take_over()
                self.snapshot_number = self._db.execute("SELECT max(number) FROM snapshot").fetchone()[0] or 0
            except sqlite3.Error as error:
                raise _explained(self.path, error) from None
            undo.pop_all()
        self._durable = self._number
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="phalanx-journal")
        self._thread.start()

    def recover(self, load: Callable[[bytes | None], S], apply: Callable[[S, Entry], object]) -> S:
        """The state at the end of the journal: `load` makes it of the newest good snapshot, or of nothing, and
        `apply` folds each later entry into it. To be called before the first append."""
        try:
            with contextlib.closing(_open(self.path, read_only=True)) as db:
                number, chain, data = self._newest_snapshot(db)
                state = load(data)
                for entry in _entries(db, number, chain):
                    apply(state, entry)
        except sqlite3.Error as error:
            raise _explained(self.path, error) from None
        return state

    def append(self, kind: str, body: dict[str, Any], time_ns: int) -> int:
        """Its number. It is durable when `settled` or `wait` say so."""
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
        with self._news:
            self._raise_trouble()
            self._number += 1
            self._hash = _hash(self._hash, self._number, time_ns, self.term, kind.encode(), text.encode())
            self._rows.append((self._number, time_ns, self.term, kind, text, self._hash))
            self._news.notify_all()
            return self._number

    def snapshot(self, state: bytes) -> None:
        """Store the state after all that was appended until now."""
        with self._news:
            self._raise_trouble()
            chain, self.snapshot_number = self._hash, self._number
            self._snapshots.append((self._number, chain, state, _digest(chain, self._number, state)))
            self._news.notify_all()

    @property
    def snapshot_due(self) -> bool:
        return self._number - self.snapshot_number >= self.snapshot_every

    @property
    def number(self) -> int:
        """The number of the last entry appended."""
        return self._number

    def fileno(self) -> int:
        return self._event

    def settled(self) -> int:
        """All entries up to this number are durable. JournalError while the file cannot be written."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        with self._news:
            self._raise_trouble()
            return self._durable

    def wait(self, number: int, timeout_s: float | None = None) -> None:
        """Until an entry is durable. TimeoutError; JournalError."""
        with self._news:
            if not self._news.wait_for(lambda: self._durable >= number or self._trouble, timeout_s):
                raise TimeoutError(f"entry {number} is not durable after {timeout_s} s")
            if self._durable < number:
                self._raise_trouble()

    def close(self) -> None:
        """What was appended is written first. JournalError if it could not be."""
        if self._closing:
            return
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._thread.join()
        with contextlib.suppress(sqlite3.Error):  # folding the WAL is no more than tidiness
            self._db.close()
        os.close(self._event)
        os.close(self._lock_fd)
        if self._durable < self._number:
            self._raise_trouble()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread that commits

    def _serve(self) -> None:
        rows: list[tuple[Any, ...]] = []
        snapshots: list[tuple[Any, ...]] = []
        while True:
            with self._news:
                if rows or snapshots:  # the last attempt failed
                    self._news.wait_for(lambda: self._closing, RETRY_S)
                else:
                    self._news.wait_for(lambda: self._closing or self._rows or self._snapshots)
                rows, self._rows = rows + self._rows, []
                snapshots, self._snapshots = snapshots + self._snapshots, []
            if rows or snapshots:
                trouble = self._commit(rows, snapshots)
                with self._news:
                    self._trouble = trouble
                    if trouble is None:
                        self._durable = rows[-1][0] if rows else self._durable
                        rows, snapshots = [], []
                    self._news.notify_all()
                os.eventfd_write(self._event, 1)
                if isinstance(trouble, Fenced):
                    return
            if self._closing and not self._rows and not self._snapshots:
                return

    def _commit(self, rows: list[tuple[Any, ...]], snapshots: list[tuple[Any, ...]]) -> JournalError | None:
        """What went wrong: then nothing of it is in the file."""
        db = self._db
        number, chain = (rows[-1][0], rows[-1][-1]) if rows else snapshots[-1][:2]
        try:
            db.execute("BEGIN IMMEDIATE")
            same = db.execute("UPDATE head SET number = ?, hash = ? WHERE term = ?", (number, chain, self.term))
            if same.rowcount != 1:
                raise Fenced(f"the journal {self.path} was taken over: term {self.term} is over, this controller ends")
            packed = ((*row[:4], _packed(row[4]), row[5]) for row in rows)
            db.executemany("INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?)", packed)
            if snapshots:
                db.executemany("INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, ?)", snapshots)
                kept = db.execute(
                    "SELECT number FROM snapshot ORDER BY number DESC LIMIT ?", (KEPT_SNAPSHOTS,)
                ).fetchall()
                db.execute("DELETE FROM snapshot WHERE number < ?", kept[-1])
                if self.prune and len(kept) == KEPT_SNAPSHOTS:
                    db.execute("DELETE FROM entry WHERE number <= ?", kept[-1])
            db.execute("COMMIT")
        except Exception as error:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            if isinstance(error, JournalError):
                return error
            waiting = f"{len(rows)} entries wait in memory and are written as soon as they can be"
            return _explained(self.path, error, waiting)
        return None

    def _raise_trouble(self) -> None:
        if self._trouble:
            raise self._trouble

    # -- opening

    def _take_over(self) -> tuple[int, int, bytes]:
        """A term of its own, durable before anything is done in it; the head."""
        db = self._db
        db.execute("BEGIN IMMEDIATE")
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if not version:
            for statement in filter(str.strip, _SCHEMA.split(";")):
                db.execute(statement)
            db.execute("INSERT INTO head VALUES (0, 0, ?)", (GENESIS,))
            db.execute(f"PRAGMA user_version = {VERSION}")
        elif version != VERSION:
            raise JournalError(f"the journal {self.path} has format {version}, and this release reads {VERSION}")
        db.execute("UPDATE head SET term = term + 1")
        head = db.execute("SELECT * FROM head").fetchall()
        if len(head) != 1:
            raise Damaged(f"the journal {self.path} has {len(head)} heads instead of one; {_RESTORE}")
        db.execute("COMMIT")
        sync_folder(self.path.parent)
        return head[0]

    def _newest_snapshot(self, db: sqlite3.Connection) -> tuple[int, bytes, bytes | None]:
        for number, chain, state, digest in db.execute("SELECT * FROM snapshot ORDER BY number DESC"):
            if digest == _digest(chain, number, state):
                return number, chain, state
            self.damaged_snapshots.append(number)
        return 0, GENESIS, None


def read(path: Path, after: int = 0) -> Iterator[Entry]:
    """Verified, beside a controller that may be writing. Entries that were pruned are passed over."""
    try:
        with contextlib.closing(_open(Path(path), read_only=True)) as db:
            first = db.execute("SELECT min(number) FROM entry WHERE number > ?", (after,)).fetchone()[0]
            if first is None:
                return
            before = db.execute(
                "SELECT hash FROM entry WHERE number = ?1 UNION ALL SELECT chain FROM snapshot WHERE number = ?1",
                (first - 1,),
            ).fetchone()
            yield from _entries(db, first - 1, before[0] if before else GENESIS)
    except sqlite3.Error as error:
        raise _explained(Path(path), error) from None


_REMEDY = "make room or give write permission there, or name another place"
_RESTORE = "restore it from a backup, or begin a new one"


def _open(path: Path, read_only: bool = False) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
    if read_only:
        db.text_factory = bytes  # a flipped bit need not leave text
    else:
        if db.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise JournalError(f"the journal {path} lies on a file system without shared memory; name a local disk")
        db.execute("PRAGMA synchronous = FULL")
    return db


def _lock(path: Path) -> int:
    """A file beside it, locked for as long as this process lives; its text is the process."""
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    except BlockingIOError:
        pid = os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
        os.close(fd)
        raise JournalError(
            f"the journal {path} is held by the controller with pid {pid}; stop that one, or name another journal"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _entries(db: sqlite3.Connection, number: int, chain: bytes) -> Iterator[Entry]:
    """After `number`, each verified, up to the head."""
    db.execute("BEGIN")  # head and entries of one moment
    head_term, head_number, head_hash = db.execute("SELECT * FROM head").fetchone()
    for row in db.execute("SELECT * FROM entry WHERE number > ? ORDER BY number", (number,)):
        found, time_ns, term, kind, text, said = row
        if found != number + 1:
            raise Damaged(f"entries {number + 1} to {found - 1} of the journal are missing; {_RESTORE}")
        try:
            text = text if text.startswith(b"{") else zlib.decompress(text)
            chain = _hash(chain, found, time_ns, term, kind, text)
        except (AttributeError, TypeError, struct.error, zlib.error):  # not even of the right form
            chain = b""
        if chain != said or term > head_term:
            raise Damaged(f"entry {found} of the journal was changed: its hash does not hold; {_RESTORE}")
        number = found
        yield Entry(number, time_ns, term, kind.decode(), json.loads(text))
    if number < head_number:
        raise Damaged(f"entries {number + 1} to {head_number} of the journal are missing; {_RESTORE}")
    if (number, chain) != (head_number, head_hash):
        raise Damaged(f"the head of the journal was changed: it names entry {head_number}, the last is {number}")


def _packed(text: str) -> str | bytes:
    """When a gang re-forms, reports of thousands of nodes are one entry, and much of it is the same."""
    return text if len(text) < PACKED_BYTES else zlib.compress(text.encode(), 1)


def _hash(before: bytes, number: int, time_ns: int, term: int, kind: bytes, text: bytes) -> bytes:
    said = b"".join((before, _HEAD.pack(number, time_ns, term), kind, b"\0", text))
    return hashlib.blake2b(said, digest_size=16).digest()


def _digest(chain: bytes, number: int, state: bytes) -> bytes:
    return hashlib.blake2b(chain + str(number).encode() + b"\0" + state, digest_size=16).digest()


def _explained(path: Path, error: Exception, more: str = "") -> JournalError:
    text = str(error)
    if "malformed" in text or "not a database" in text or "no such table" in text:
        return Damaged(f"the journal {path} is damaged: {text}; {_RESTORE}")
    return JournalError(
        "; ".join(filter(None, [f"the journal {path} cannot be opened or written: {text}", _REMEDY, more]))
    )
