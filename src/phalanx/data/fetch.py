"""Fetches chunks with threads and verifies them as they arrive. A bad chunk is fetched again; if it stays bad,
`Corrupt` is raised, and the loader decides what happens to its samples.

Reads of a remote store are retried until a deadline, with growing, jittered pauses. They are also hedged: a read that
takes longer than nearly all before it gets a rival, and the first answer counts. A refusal is not retried.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from phalanx.core.errors import UserError
from phalanx.core.manifest import HASH_BYTES, MANIFEST, Manifest, manifest_name
from phalanx.core.store import File, Folder, Store, patiently
from phalanx.data.address import reach, restore, versions
from phalanx.data.cache import Cache
from phalanx.data.shard_file import fast_hash, root_of, version_of

TRIES = 3  # at data that is missing or arrives damaged
DISK = (errno.EIO, errno.ESTALE, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO, errno.ENODATA)
FOOTERS_BYTES = 1 << 20  # of hashes kept in memory
OPEN_FILES = 16  # per reader

Chunk = tuple[int, int, int]  # extent, shard, chunk in the shard


class Corrupt(Exception):
    """A chunk that cannot be read as the manifest describes it."""

    def __init__(self, shard: str, chunk: int | None, reason: str, expected: str = "", got: str = ""):
        where = f"shard {shard}" + ("" if chunk is None else f", chunk {chunk}")
        hashes = f": expected {expected}, got {got}" if expected else ""
        super().__init__(f"{where}: {reason}{hashes}")
        self.facts = {"shard": shard, "chunk": chunk, "reason": reason, "expected": expected, "got": got}


def read_manifest(
    store: Store, version: str = "", field: str = "data.source", version_field: str = "data.version"
) -> tuple[Manifest, str]:
    """Return the manifest of a data set (the newest, or that of `version`) and its version. A UserError names the
    fields in which the user gave the data set and the version."""
    name = manifest_name(version) if version else MANIFEST
    for attempt in range(TRIES):
        try:
            data = patiently(partial(store.read, name), lambda text: None)
            if not version_of(data).startswith(version):
                raise ValueError(f"its hash is {version_of(data)}, not {version}")
            manifest = Manifest.decode(data)
            if not version:
                _check_copy(store, data)
            return manifest, version_of(data)
        except FileNotFoundError:
            raise _missing(store, version, field, version_field) from None
        except NotADirectoryError:
            remedy = "name the folder of a data set, in which manifest.jsonl lies"
            raise UserError("it is a file", field=field, value=store.url, remedy=remedy) from None
        except UserError as error:  # written by a newer version
            raise UserError(error.message, field=field, value=store.url, remedy=error.remedy) from None
        except ValueError as error:
            if attempt < TRIES - 1:
                continue  # it may have been damaged in transit
            remedy = "restore this file, or name another version" if version else restore(store)
            if version and next(versions(store), "").startswith(version):
                remedy = f"copy {MANIFEST} over it, which holds the same version"
            raise UserError(f"{name} is damaged: {error}", field=field, value=store.url, remedy=remedy) from None
        except OSError as error:
            message = f"{name} cannot be read: {_plainly(store, error)}"
            raise UserError(message, field=field, value=store.url, remedy=reach(store.url)) from None
    raise AssertionError


def _check_copy(store: Store, data: bytes) -> None:
    """Refuse a manifest without a copy: manifest.jsonl is always written under the name of its hash first."""
    name = manifest_name(version_of(data))
    try:
        store.size(name)
    except FileNotFoundError:
        raise ValueError(f"it is not as it was written, for its copy {name} is not there") from None


def _missing(store: Store, version: str, field: str, version_field: str) -> UserError:
    known = list(versions(store)) if version else []
    if known:
        return UserError(
            "there is no such version of the data set",
            field=version_field,
            value=version,
            remedy=f"name one of {', '.join(v[:16] for v in known)}; the first is the newest",
        )
    remedy = "name the folder or URL that `phalanx data build --out` was given"
    return UserError(f"there is no data set there ({MANIFEST} is missing)", field=field, value=store.url, remedy=remedy)


def _plainly(store: Store, error: OSError) -> str:
    """Drop the hint about AWS credentials from the errors of stores other than S3."""
    return str(error) if store.url.startswith("s3:") else str(error).replace(" (AWS_ACCESS_KEY_ID and others)", "")


@dataclass
class Counters:
    """Counts of what a fetcher has done; for metrics and benchmarks."""

    bytes_read: int = 0
    bytes_from_cache: int = 0
    retries: int = 0  # after failed reads
    hedges: int = 0
    corrupt: int = 0  # reads of missing, unreadable or altered data


@dataclass
class Fetcher:
    store: Store
    manifest: Manifest
    cache: Cache | None = None
    pool_bytes: int = 256 << 20  # chunks kept in memory
    threads: int = 0  # 0: 2 for a folder, 16 for a remote store
    deadline_s: float = 60.0  # for one chunk, retries included
    max_id: int | None = None  # tokens must be below it
    start_jitter_s: float = 0.5  # spreads the first remote reads: all nodes start at the same instant
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.num_threads = threads = self.threads or (2 if self.store.is_local else 16)
        self._loaders = ThreadPoolExecutor(threads, "phalanx-fetch")
        # A read that lost to its rival keeps its thread until it ends, so there are spare threads.
        self._readers = None if self.store.is_local else ThreadPoolExecutor(4 * threads, "phalanx-read")
        self._lock = threading.Lock()
        self._pool: OrderedDict[Chunk, np.ndarray] = OrderedDict()
        self._pooled = 0
        self._pending: dict[Chunk, Future[np.ndarray]] = {}
        self._footers: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._footers_bytes = 0
        self._footers_pending: dict[tuple[int, int], Future[bytes]] = {}
        self._latency: deque[float] = deque(maxlen=200)
        self._closed = threading.Event()
        self._started = 0.0  # when the first remote read was requested
        # Not the global generator: that is the user's, and often has the same seed on all nodes.
        self._random = random.Random()  # noqa: S311  (it only spreads load)

    def close(self) -> None:
        """Abandon fetches in progress; their callers get an error. The threads end with their last read."""
        self._closed.set()
        for executor in filter(None, (self._loaders, self._readers)):
            executor.shutdown(wait=False, cancel_futures=True)

    def start(self, ids: Iterable[Chunk]) -> None:
        """Start to fetch the chunks that are not in memory, and keep those that are. Chunks on a disk are read by the
        caller of `get`: handing them to another thread takes as long as reading them."""
        for i in ids:
            if self._touch(i) is None and i not in self._pending and not self.store.is_local:
                self._future(i)

    def reader(self, room: np.ndarray) -> Callable[[Chunk], bool]:
        """Return the fastest reader for chunks on a local disk that are not in memory. It reads a chunk into `room`,
        which has the size of a chunk with its overlap, and verifies it there. It returns False if that fails, as it
        must for a shorter chunk; `get` then finds out why. It does little besides calls that release the interpreter
        lock: moving a MB evicts the interpreter itself from the processor's cache and makes it slow."""
        data, files = room.view(np.uint8).data, dict[tuple[int, int], tuple[File, bytes]]()
        into, step = [data], self.manifest.chunk_items * room.itemsize

        def read(i: Chunk) -> bool:
            if not isinstance(self.store, Folder) or i in self._pool:
                return False
            shard, at = i[:2], i[2] * HASH_BYTES // 2
            try:
                if shard not in files:
                    if len(files) == OPEN_FILES:
                        files.clear()
                    hashes = self._hashes(*shard, time.monotonic() + 1)
                    files[shard] = self.store.open(self.manifest.shard_name(*shard)), hashes
                file, hashes = files[shard]
                taken = os.preadv(file.fd, into, i[2] * step)
            except (Corrupt, OSError):
                return False
            if taken < len(data) or fast_hash(data) != hashes[at : at + HASH_BYTES // 2]:
                return False
            self._check_ids(i, room)
            self.counters.bytes_read += taken
            return True

        return read

    def get(self, i: Chunk) -> np.ndarray:
        """Return the verified items of a chunk; for tokens, with the item that follows. Raise Corrupt; OSError if the
        store does not answer; UserError if it refuses or an id is out of range."""
        items = self._touch(i)
        if items is not None:
            return items
        return self._load(i) if self.store.is_local else self._future(i).result()

    def _touch(self, i: Chunk) -> np.ndarray | None:
        """Look in the pool without the lock: each operation is one step of the interpreter."""
        items = self._pool.get(i)
        if items is not None:
            with contextlib.suppress(KeyError):  # dropped just now
                self._pool.move_to_end(i)
        return items

    def _future(self, i: Chunk) -> Future[np.ndarray]:
        with self._lock:
            if i in self._pool:
                ready: Future[np.ndarray] = Future()
                ready.set_result(self._pool[i])
                return ready
            if i not in self._pending:
                self._pending[i] = self._loaders.submit(self._load, i)
            return self._pending[i]

    def _load(self, i: Chunk) -> np.ndarray:
        try:
            items = self._fetch(i)
        except BaseException:
            with self._lock:
                self._pending.pop(i, None)  # the next caller tries again
            raise
        with self._lock:
            if i not in self._pool:
                self._pooled += items.nbytes
            self._pool[i] = items
            while self._pooled > self.pool_bytes and len(self._pool) > 1:
                self._pooled -= self._pool.popitem(last=False)[1].nbytes
            self._pending.pop(i, None)
        return items

    def _fetch(self, i: Chunk) -> np.ndarray:
        extent, shard, chunk = i
        name, until = self.manifest.shard_name(extent, shard), time.monotonic() + self.deadline_s
        want = self._hashes(extent, shard, until)[chunk * HASH_BYTES // 2 : (chunk + 1) * HASH_BYTES // 2]
        if self.cache and (data := self.cache.get(want)) is not None:
            if fast_hash(data) == want:
                self._count(bytes_from_cache=len(data))
                return self._items(i, data)
            self.cache.drop(want)
        start, end = self.manifest.chunk_range(*i)
        data = self._verified(
            name,
            chunk,
            (start, end),
            until,
            lambda data: len(data) == end - start and fast_hash(data) == want,
            lambda data: f"xxh3 {fast_hash(data).hex()} of {len(data)} bytes",
            ("its bytes are not those that were written", f"xxh3 {want.hex()} of {end - start} bytes"),
        )
        if self.cache:
            self.cache.put(want, data)
        return self._items(i, data)

    def _items(self, i: Chunk, data: Any) -> np.ndarray:
        items = np.frombuffer(data, self.manifest.dtype)
        self._check_ids(i, items)
        return items

    def _check_ids(self, i: Chunk, items: np.ndarray) -> None:
        if self.max_id is None or not self.manifest.is_tokens:
            return
        extent, shard, chunk = i
        # As an unsigned number, a negative id is a large one.
        ids = items.view(f"u{items.itemsize}") if items.dtype.kind == "i" else items
        if np.maximum.reduce(ids) >= self.max_id:
            at = int(np.argmax(ids >= self.max_id))
            name, item = self.manifest.shard_name(extent, shard), chunk * self.manifest.chunk_items + at
            raise UserError(
                f"token {int(items[at])} at item {item} of {name}, but the model knows ids from 0 to {self.max_id - 1}",
                field="model.vocab_size",
                value=self.max_id,
                remedy=f"set it to at least {max(self.manifest.vocab_size, int(items.max()) + 1)}, the tokenizer's",
            )

    def _hashes(self, extent: int, shard: int, until: float) -> bytes:
        """Return the xxh3 of every chunk of a shard, from its footer. Threads that need the same share one read."""
        key = extent, shard
        with self._lock:
            known = self._footers.get(key)
            if known is not None:
                self._footers.move_to_end(key)
                return known
            pending = self._footers_pending.get(key)
            mine = pending is None
            if pending is None:
                pending = self._footers_pending[key] = Future()
        if not mine:
            return pending.result()
        try:
            footer = np.frombuffer(self._footer(extent, shard, until), np.uint8).reshape(-1, HASH_BYTES)
            hashes = footer[:, : HASH_BYTES // 2].tobytes()
            with self._lock:
                self._footers[key] = hashes
                self._footers_bytes += len(hashes)
                while self._footers_bytes > FOOTERS_BYTES and len(self._footers) > 1:
                    self._footers_bytes -= len(self._footers.popitem(last=False)[1])
            pending.set_result(hashes)
            return hashes
        except BaseException as error:
            pending.set_exception(error)
            raise
        finally:
            with self._lock:
                self._footers_pending.pop(key)

    def _footer(self, extent: int, shard: int, until: float) -> Any:
        m, name, root = self.manifest, self.manifest.shard_name(extent, shard), self.manifest.root(extent, shard)
        if self.cache and (data := self.cache.get(root)) is not None:
            if root_of(data) == root:
                return data
            self.cache.drop(root)
        end = m.shard_bytes(extent, shard)
        data = self._verified(
            name,
            None,
            (end - m.footer_bytes(extent, shard), end),
            until,
            lambda data: root_of(data) == root,
            lambda data: f"blake3 {root_of(data).hex()} of {len(data)} bytes",
            ("its footer is not the one that was written", f"blake3 {root.hex()}"),
        )
        if self.cache:
            self.cache.put(root, data)
        return data

    def _verified(
        self,
        name: str,
        chunk: int | None,
        span: tuple[int, int],
        until: float,
        good: Callable[[Any], bool],
        describe: Callable[[Any], str],
        wrong: tuple[str, str],
    ) -> Any:
        """Read a range of a shard. Retry if it is missing or not good, then raise Corrupt."""
        corrupt = Corrupt(name, chunk, wrong[0])
        for attempt in range(TRIES):
            if attempt:
                self.store.refresh(name)  # repairing a shard replaces its file
            try:
                data = self._read(name, span, until)
            except FileNotFoundError:
                corrupt = Corrupt(name, chunk, "the file is missing")
            except _Unreadable as error:
                corrupt = Corrupt(name, chunk, str(error))
            else:
                if good(data):
                    self._count(bytes_read=len(data))
                    return data
                corrupt = Corrupt(name, chunk, *wrong, describe(data))
            self._count(corrupt=1)
        raise corrupt

    def _read(self, name: str, span: tuple[int, int], until: float) -> Any:
        """Read a range, and retry if a remote store fails now and then."""
        pause = 0.05
        while True:
            try:
                return self._read_once(name, span, until)
            except FileNotFoundError:
                raise
            except PermissionError as error:
                message = f"it may not be read: {_plainly(self.store, error)}"
                raise UserError(
                    message, field="data.source", value=self.store.url, remedy=reach(self.store.url)
                ) from None
            except OSError as error:
                if self._readers is None:
                    if error.errno in DISK:
                        raise _Unreadable(f"the disk cannot read it ({error.strerror})") from None
                    raise  # this machine lacks something, and the data may be good
                if self._closed.is_set() or time.monotonic() + pause > until:
                    text = "was closed" if self._closed.is_set() else f"has not answered for {self.deadline_s:g} s"
                    raise OSError(f"{self.store.url} {text}: {error}") from None
            self._count(retries=1)
            self._closed.wait(pause * self._random.uniform(0.5, 1.5))
            pause = min(2 * pause, 5.0)

    def _read_once(self, name: str, span: tuple[int, int], until: float) -> Any:
        if self._readers is None:
            return self.store.read_range(name, *span)
        self._spread()
        if self._closed.is_set():
            raise OSError("not asked")
        began = time.monotonic()
        running = {self._readers.submit(self.store.read_range, name, *span)}
        hedge_at = began + self._hedge_after()
        while True:
            limit = min(until, hedge_at) - time.monotonic()
            done, running = wait(running, timeout=max(0.0, limit), return_when=FIRST_COMPLETED)
            good = [future for future in done if not future.cancelled() and future.exception() is None]
            if good:
                with self._lock:
                    self._latency.append(time.monotonic() - began)
                return good[0].result()
            errors = [error for future in done if not future.cancelled() and (error := future.exception())]
            if errors and not running:
                raise errors[0]
            if time.monotonic() >= until or self._closed.is_set():
                raise TimeoutError("no answer")
            if time.monotonic() >= hedge_at:
                self._count(hedges=1)
                running.add(self._readers.submit(self.store.read_range, name, *span))
                hedge_at = until

    def _spread(self) -> None:
        """Wait for a random time if this is one of the first reads."""
        with self._lock:
            now = time.monotonic()
            self._started = self._started or now
            rest = self._started + self.start_jitter_s - now
        if rest > 0:
            self._closed.wait(self._random.uniform(0, rest))

    def _hedge_after(self) -> float:
        """Return twice the time in which 19 of 20 reads ended, at least 20 ms; 1 s until 20 reads are known."""
        with self._lock:
            known = sorted(self._latency)
        return 1.0 if len(known) < 20 else max(0.02, 2 * known[len(known) * 19 // 20])

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, value in more.items():
                setattr(self.counters, name, getattr(self.counters, name) + value)


class _Unreadable(Exception):
    pass
