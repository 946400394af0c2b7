"""The journal: what a controller heard and what it decided. State is the fold of it, so a command may take effect only
when the entries that led to it are durable. There is one writer; anybody may `read` beside it.

Its tables are in one file of SQLite (`journal_file`), or on a PostgreSQL server where several controllers stand by
(`journal_server`). As a commit takes milliseconds, a thread commits at once everything that was appended while the
commit before it ran. Every commit names the term of its writer, and fails if that is not the last one.

Each entry carries a hash over itself and the hash before it, and the head of that chain is kept beside them: an entry
that was changed, lost or cut off is found and named.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

GENESIS = bytes(16)  # the hash before the first entry
KEPT_SNAPSHOTS = 2
PACKED_BYTES = 1024  # a body of this size or more is compressed
RETRY_S = 1.0  # between attempts to write, where that fails
CLOSE_S = 5.0  # for the last commit, where a lease may end first
RESTORE = "restore it from a backup, or begin a new one"

_HEAD = struct.Struct(">qqq")
_SNAPSHOT = """INSERT INTO snapshot VALUES (?, ?, ?, ?) ON CONFLICT (number)
               DO UPDATE SET chain = excluded.chain, state = excluded.state, hash = excluded.hash"""

S = TypeVar("S")
Row = tuple[Any, ...]


class JournalError(RuntimeError):
    """The journal cannot be opened or written; nothing that was acknowledged is lost."""


class Fenced(JournalError):
    """Another controller has taken the journal over: this one may decide nothing more."""


class Damaged(JournalError):
    """The journal does not hold what was written."""


class Tables(Protocol):
    """The storage of a journal's rows. Statements have `?` for their values and raise `errors`."""

    name: str
    errors: type[Exception]
    lease_s: float  # after which another may take it over, unless it is renewed; 0: held as long as this process lives
    renewal: str  # what a commit changes in the head, beside number and hash

    def open(self, read_only: bool = False) -> Any: ...
    def run(self, db: Any, text: str, values: Any = ()) -> Any: ...
    def insert(self, db: Any, text: str, rows: list[Row]) -> None: ...
    def take(
        self, db: Any, form: int
    ) -> None: ...  # in one transaction: make the tables if there are none, and begin a new term
    def interrupt(self, db: Any) -> None: ...  # end the wait for an answer
    def explained(self, error: Exception, more: str = "") -> JournalError: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Entry:
    number: int  # from 1
    time_ns: int
    term: int  # of the controller that wrote it
    kind: str
    body: dict[str, Any]


class Journal:
    """`place`: the path of the journal's file, or the tables themselves. `snapshot_every`: entries after which
    `snapshot_due` is true. `prune`: drop entries that no kept snapshot needs. `form`: the form of entries and
    snapshots; a journal that was begun with another is refused.

    `term` grows with every opening, and every commit checks that it is still the last one: a controller that was
    believed dead but continues can write nothing more. A selector may wait on the journal itself: it is readable when
    `settled()` has news.
    """

    def __init__(self, place: Path | Tables, snapshot_every: int = 10_000, prune: bool = False, form: str = ""):
        self.tables = tables_of(place)
        self.snapshot_every, self.prune = snapshot_every, prune
        self._form = zlib.crc32(form.encode()) >> 1 or 1  # SQLite keeps no more of it than a positive number
        self.damaged_snapshots: list[int] = []  # that `recover` had to pass over
        self._news = threading.Condition()
        self._rows: list[Row] = []  # not yet given to a commit
        self._snapshots: list[Row] = []
        self._trouble: JournalError | None = None
        self._closing = False
        self._db: Any = None
        since = time.monotonic()
        with contextlib.ExitStack() as undo:
            undo.callback(self.tables.close)
            try:
                self._db = undo.enter_context(contextlib.closing(self.tables.open()))
                self.term, self._number, self._hash = self._take_over()
                newest = self.tables.run(self._db, "SELECT max(number) FROM snapshot").fetchone()[0]
            except self.tables.errors as error:
                raise self.tables.explained(error) from None
            undo.pop_all()
        self.snapshot_number = newest or 0
        self._durable = self._number
        self._held_until = since + self.tables.lease_s
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="phalanx-journal")
        self._thread.start()

    @property
    def is_held(self) -> bool:
        """Return whether nobody else can have taken the journal over, by this host's clock, counted from before the
        last renewal was sent."""
        return not self.tables.lease_s or time.monotonic() < self._held_until

    def recover(self, load: Callable[[bytes | None], S], apply: Callable[[S, Entry], object]) -> S:
        """Fold the state at the end of the journal: `load` makes it from the newest good snapshot, or from nothing, and
        `apply` folds each later entry into it. To be called before the first append."""
        try:
            with contextlib.closing(self.tables.open(read_only=True)) as db:
                number, chain, data = self._newest_snapshot(db)
                state = load(data)
                for entry in _entries(self.tables, db, number, chain):
                    apply(state, entry)
        except self.tables.errors as error:
            raise self.tables.explained(error) from None
        return state

    def append(self, kind: str, body: dict[str, Any], time_ns: int) -> int:
        """Append an entry, and return its number. It is durable when `settled` or `wait` say so."""
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
        with self._news:
            self._raise_trouble()
            self._number += 1
            self._hash = _hash(self._hash, self._number, time_ns, self.term, kind.encode(), text.encode())
            self._rows.append((self._number, time_ns, self.term, kind, text, self._hash))
            self._news.notify_all()
            return self._number

    def snapshot(self, state: bytes) -> None:
        """Store the state after everything that was appended until now."""
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
        """Return the number of the last entry appended."""
        return self._number

    def fileno(self) -> int:
        return self._event

    def settled(self) -> int:
        """Return the number up to which all entries are durable. Raise JournalError while nothing can be written."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        with self._news:
            self._raise_trouble()
            return self._durable

    def wait(self, number: int, timeout_s: float | None = None) -> None:
        """Wait until an entry is durable. Raise TimeoutError or JournalError."""
        with self._news:
            if not self._news.wait_for(lambda: self._durable >= number or self._trouble, timeout_s):
                raise TimeoutError(f"entry {number} is not durable after {timeout_s} s")
            if self._durable < number:
                self._raise_trouble()

    def close(self) -> None:
        """Write what was appended, and close. Raise JournalError if it could not be written."""
        if self._closing:
            return
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._thread.join(CLOSE_S if self.tables.lease_s else None)
        if self._thread.is_alive():  # it waits for a server that does not answer
            self.tables.interrupt(self._db)
            self._thread.join(CLOSE_S)
        with contextlib.suppress(self.tables.errors):  # folding the WAL is no more than tidiness
            if self._db is not None:
                self._db.close()
        os.close(self._event)
        self.tables.close()
        if self._durable < self._number:
            self._raise_trouble()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the thread that commits

    def _serve(self) -> None:
        rows: list[Row] = []
        snapshots: list[Row] = []
        beat_s = self.tables.lease_s / 4 or None
        while True:
            with self._news:
                if self._trouble:  # the last attempt failed
                    self._news.wait_for(lambda: self._closing, RETRY_S)
                else:
                    self._news.wait_for(lambda: self._closing or self._rows or self._snapshots, beat_s)
                rows, self._rows = rows + self._rows, []
                snapshots, self._snapshots = snapshots + self._snapshots, []
            if rows or snapshots or (beat_s and not self._closing):
                since = time.monotonic()
                trouble = self._commit(rows, snapshots)
                with self._news:
                    self._trouble = trouble
                    if trouble is None:
                        self._held_until = since + self.tables.lease_s
                        self._durable = rows[-1][0] if rows else self._durable
                        rows, snapshots = [], []
                    self._news.notify_all()
                os.eventfd_write(self._event, 1)
                if isinstance(trouble, Fenced):
                    return
            if self._closing and not self._rows and not self._snapshots:
                return

    def _commit(self, rows: list[Row], snapshots: list[Row]) -> JournalError | None:
        """Commit rows and snapshots; without any, renew the lease. Return what went wrong: then nothing was written, or
        all of it, if only the answer was lost."""
        run, renewal = self.tables.run, self.tables.renewal
        try:
            if self._db is None:
                self._db = self.tables.open()
            db = self._db
            run(db, "BEGIN" if self.tables.lease_s else "BEGIN IMMEDIATE")
            if rows or snapshots:
                number, chain = (rows[-1][0], rows[-1][-1]) if rows else snapshots[-1][:2]
                changes = f"UPDATE head SET number = ?, hash = ?{renewal} WHERE term = ?"  # noqa: S608
                same = run(db, changes, (number, chain, self.term))
            else:
                same = run(db, "UPDATE head SET beat = beat + 1 WHERE term = ?", (self.term,))
            if same.rowcount != 1:
                raise Fenced(f"{self.tables.name} was taken over: term {self.term} is over, this controller ends")
            # A row that is there already was written before an answer was lost.
            packed = [(*row[:4], _packed(row[4]), row[5]) for row in rows]
            self.tables.insert(db, "INSERT INTO entry VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING", packed)
            if snapshots:
                self.tables.insert(db, _SNAPSHOT, snapshots)
                newest = "SELECT number FROM snapshot ORDER BY number DESC LIMIT ?"
                kept = run(db, newest, (KEPT_SNAPSHOTS,)).fetchall()
                run(db, "DELETE FROM snapshot WHERE number < ?", kept[-1])
                if self.prune and len(kept) == KEPT_SNAPSHOTS:
                    run(db, "DELETE FROM entry WHERE number <= ?", kept[-1])
            run(db, "COMMIT")
        except Exception as error:
            self._roll_back()
            if isinstance(error, JournalError):
                return error
            waiting = f"{len(rows)} entries wait in memory and are written as soon as they can be"
            return self.tables.explained(error, waiting)
        return None

    def _roll_back(self) -> None:
        """Roll back a failed commit. On a server the next attempt opens a connection of its own."""
        if self._db is None:
            return
        with contextlib.suppress(self.tables.errors):
            self.tables.run(self._db, "ROLLBACK")
        if self.tables.lease_s:
            with contextlib.suppress(self.tables.errors):
                self._db.close()
            self._db = None

    def _raise_trouble(self) -> None:
        if self._trouble:
            raise self._trouble

    # -- opening

    def _take_over(self) -> tuple[int, int, bytes]:
        """Begin a term, durable before anything is done in it. Return the head."""
        self.tables.take(self._db, self._form)
        head = self.tables.run(self._db, "SELECT term, number, hash FROM head").fetchall()
        if len(head) != 1:
            raise Damaged(f"{self.tables.name} has {len(head)} heads instead of one; {RESTORE}")
        return head[0]

    def _newest_snapshot(self, db: Any) -> tuple[int, bytes, bytes | None]:
        for number, chain, state, digest in self.tables.run(db, "SELECT * FROM snapshot ORDER BY number DESC"):
            if digest == _digest(chain, number, state):
                return number, chain, state
            self.damaged_snapshots.append(number)
        return 0, GENESIS, None


def check_form(name: str, found: int, here: int) -> None:
    if found != here:
        raise JournalError(
            f"{name} was written by another release (format {found}, here {here}): continue the run with that one, or "
            "begin a new run from its checkpoint"
        )


def tables_of(place: Path | Tables) -> Tables:
    from phalanx.runtime.journal_file import JournalFile

    if isinstance(place, Path):
        return JournalFile(place)
    return place


def read(place: Path | Tables, after: int = 0) -> Iterator[Entry]:
    """Yield verified entries, even while a controller is writing. Entries that were pruned are skipped."""
    tables = tables_of(place)
    try:
        with contextlib.closing(tables.open(read_only=True)) as db:
            first = tables.run(db, "SELECT min(number) FROM entry WHERE number > ?", (after,)).fetchone()[0]
            if first is None:
                return
            before = tables.run(
                db,
                "SELECT hash FROM entry WHERE number = ? UNION ALL SELECT chain FROM snapshot WHERE number = ?",
                (first - 1, first - 1),
            ).fetchone()
            yield from _entries(tables, db, first - 1, before[0] if before else GENESIS)
    except tables.errors as error:
        raise tables.explained(error) from None


def _entries(tables: Tables, db: Any, number: int, chain: bytes) -> Iterator[Entry]:
    """Yield the entries after `number`, up to the head, each verified."""
    # Read head and entries as of one moment.
    tables.run(db, "BEGIN ISOLATION LEVEL REPEATABLE READ" if tables.lease_s else "BEGIN")
    head_term, head_number, head_hash = tables.run(db, "SELECT term, number, hash FROM head").fetchone()
    for row in tables.run(db, "SELECT * FROM entry WHERE number > ? ORDER BY number", (number,)):
        found, time_ns, term, kind, text, said = row
        if found != number + 1:
            raise Damaged(f"entries {number + 1} to {found - 1} of the journal are missing; {RESTORE}")
        try:
            text = text if text.startswith(b"{") else zlib.decompress(text)
            chain = _hash(chain, found, time_ns, term, kind, text)
        except (AttributeError, TypeError, struct.error, zlib.error):  # not even of the right form
            chain = b""
        if chain != said or term > head_term:
            raise Damaged(f"entry {found} of the journal was changed: its hash does not hold; {RESTORE}")
        number = found
        yield Entry(number, time_ns, term, kind.decode(), json.loads(text))
    if number < head_number:
        raise Damaged(f"entries {number + 1} to {head_number} of the journal are missing; {RESTORE}")
    if (number, chain) != (head_number, head_hash):
        raise Damaged(f"the head of the journal was changed: it names entry {head_number}, the last is {number}")


def _packed(text: str) -> str | bytes:
    """Compress a large body. When a gang re-forms, reports of thousands of nodes are one entry, and most are alike."""
    return text if len(text) < PACKED_BYTES else zlib.compress(text.encode(), 1)


def _hash(before: bytes, number: int, time_ns: int, term: int, kind: bytes, text: bytes) -> bytes:
    said = b"".join((before, _HEAD.pack(number, time_ns, term), kind, b"\0", text))
    return hashlib.blake2b(said, digest_size=16).digest()


def _digest(chain: bytes, number: int, state: bytes) -> bytes:
    return hashlib.blake2b(chain + str(number).encode() + b"\0" + state, digest_size=16).digest()
