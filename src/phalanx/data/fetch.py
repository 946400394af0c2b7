"""Chunks, fetched by threads and verified as they arrive. A chunk that is wrong is fetched again; one that stays
wrong is told as `Corrupt`, and what becomes of its samples is the loader's business.

Reads of a remote store are retried until a deadline, with growing and jittered pauses, and hedged: one that takes
longer than nearly all before it gets a rival, and the first answer counts.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.core.errors import UserError
from phalanx.core.manifest import HASH_BYTES, MANIFEST, Manifest, manifest_name
from phalanx.data.cache import Cache
from phalanx.data.shard import fast_hash, root_of, version_of
from phalanx.data.store import Store

TRIES = 3  # of a chunk that arrives, but wrong

Chunk = tuple[int, int, int]  # extent, shard, chunk in the shard


class Corrupt(Exception):
    """A chunk that cannot be had as the manifest says it is."""

    def __init__(self, shard: str, chunk: int | None, reason: str, expected: str = "", got: str = ""):
        where = f"shard {shard}" + ("" if chunk is None else f", chunk {chunk}")
        hashes = f": expected {expected}, got {got}" if expected else ""
        super().__init__(f"{where}: {reason}{hashes}")
        self.facts = {"shard": shard, "chunk": chunk, "reason": reason, "expected": expected, "got": got}


def read_manifest(store: Store, version: str = "") -> tuple[Manifest, str]:
    """The newest manifest of a data set, or that of a version, and its version."""
    name = manifest_name(version) if version else MANIFEST
    try:
        data = store.read(name)
        if version and version_of(data) != version:
            raise ValueError(f"its hash is {version_of(data)}, not {version}")
        return Manifest.decode(data), version_of(data)
    except FileNotFoundError:
        what = f"there is no version {version} of a data set" if version else "there is no data set"
        remedy = "name the folder or URL that `phalanx data build --out` was given"
        raise UserError(f"{what} there ({name} is missing)", field="data", value=store.url, remedy=remedy) from None
    except ValueError as error:
        remedy = "build it again, or restore this file"
        raise UserError(f"{name}: {error}", field="data", value=store.url, remedy=remedy) from None
    except OSError as error:
        remedy = "check the address, the credentials and the network"
        raise UserError(f"{name} cannot be read: {error}", field="data", value=store.url, remedy=remedy) from None


@dataclass
class Counters:
    """What a fetcher has done; for metrics and benchmarks."""

    bytes_read: int = 0
    bytes_from_cache: int = 0
    retries: int = 0
    hedges: int = 0
    corrupt: int = 0


@dataclass
class Fetcher:
    store: Store
    manifest: Manifest
    cache: Cache | None = None
    pool_bytes: int = 256 << 20  # chunks kept in memory
    threads: int = 0  # 0: 2 for a folder, 16 for a remote store
    deadline_s: float = 60.0  # for one chunk, retries included
    max_id: int | None = None  # tokens must be below it
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        threads = self.threads or (2 if self.store.is_local else 16)
        self._loaders = ThreadPoolExecutor(threads, "phalanx-fetch")
        self._readers = None if self.store.is_local else ThreadPoolExecutor(2 * threads, "phalanx-read")
        self._lock = threading.Lock()
        self._pool: OrderedDict[Chunk, np.ndarray] = OrderedDict()
        self._pooled = 0
        self._pending: dict[Chunk, Future[np.ndarray]] = {}
        self._footers: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._latency: deque[float] = deque(maxlen=200)

    def close(self) -> None:
        for executor in filter(None, (self._loaders, self._readers)):
            executor.shutdown(wait=False, cancel_futures=True)

    def start(self, ids: Iterable[Chunk]) -> None:
        """Begin to fetch what is not there yet."""
        for i in ids:
            self._future(i)

    def get(self, i: Chunk) -> np.ndarray:
        """The items of a chunk, verified, with the item that follows it if tokens. Raises Corrupt, or OSError when
        the store does not answer."""
        with self._lock:
            items = self._pool.get(i)
            if items is not None:
                self._pool.move_to_end(i)
                return items
        return self._future(i).result()

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
                self._pending.pop(i, None)  # whoever asks next tries again
            raise
        with self._lock:
            self._pool[i] = items
            self._pooled += items.nbytes
            while self._pooled > self.pool_bytes and len(self._pool) > 1:
                self._pooled -= self._pool.popitem(last=False)[1].nbytes
            self._pending.pop(i, None)
        return items

    def _fetch(self, i: Chunk) -> np.ndarray:
        extent, shard, chunk = i
        name = self.manifest.shard_name(extent, shard)
        footer = self._footer(extent, shard)
        want = footer[chunk * HASH_BYTES : chunk * HASH_BYTES + HASH_BYTES // 2]
        start, end = self.manifest.chunk_range(*i)
        if self.cache and (data := self.cache.get(want)) is not None:
            if fast_hash(data) == want:
                self.counters.bytes_from_cache += len(data)
                return self._items(i, data)
            self.cache.drop(want)
        got = ""
        for _ in range(TRIES):
            data = self._read(name, chunk, start, end)
            if len(data) == end - start and fast_hash(data) == want:
                self.counters.bytes_read += len(data)
                if self.cache:
                    self.cache.put(want, data)
                return self._items(i, data)
            got = f"xxh3 {fast_hash(data).hex()} of {len(data)} bytes"
            self.counters.corrupt += 1
        expected = f"xxh3 {want.hex()} of {end - start} bytes"
        raise Corrupt(name, chunk, "its bytes are not those that were written", expected, got)

    def _items(self, i: Chunk, data: Any) -> np.ndarray:
        extent, shard, chunk = i
        items = np.frombuffer(data, self.manifest.dtype)
        if self.max_id is not None and self.manifest.is_tokens and int(items.max()) >= self.max_id:
            at = int(np.argmax(items >= self.max_id))
            name, item = self.manifest.shard_name(extent, shard), chunk * self.manifest.chunk_items + at
            raise UserError(
                f"token {int(items[at])} at item {item} of {name}, but the model knows ids below {self.max_id}",
                field="model.vocab_size",
                value=self.max_id,
                remedy=f"set it to at least {max(self.manifest.vocab_size, int(items.max()) + 1)}, the tokenizer's",
            )
        return items

    def _footer(self, extent: int, shard: int) -> bytes:
        with self._lock:
            footer = self._footers.get((extent, shard))
        if footer is not None:
            return footer
        m, name = self.manifest, self.manifest.shard_name(extent, shard)
        end, got = m.shard_bytes(extent, shard), ""
        for _ in range(TRIES):
            footer = bytes(self._read(name, None, end - m.footer_bytes(extent, shard), end))
            if root_of(footer) == m.root(extent, shard):
                with self._lock:
                    self._footers[extent, shard] = footer
                    while len(self._footers) > 64:
                        self._footers.popitem(last=False)
                return footer
            got = root_of(footer).hex()
            self.counters.corrupt += 1
        expected = m.root(extent, shard).hex()
        raise Corrupt(name, None, "its footer is not the one that was written", f"blake3 {expected}", f"blake3 {got}")

    def _read(self, name: str, chunk: int | None, start: int, end: int) -> Any:
        """A range, in spite of a store that fails now and then."""
        until, pause = time.monotonic() + self.deadline_s, 0.05
        while True:
            try:
                return self._read_once(name, start, end, until)
            except FileNotFoundError:
                raise Corrupt(name, chunk, "the file is missing") from None
            except OSError as error:
                if self._readers is None or time.monotonic() + pause > until:
                    if self._readers is None:
                        raise Corrupt(name, chunk, f"the disk cannot read it ({error.strerror})") from None
                    raise OSError(f"{self.store.url} has not answered for {self.deadline_s:.0f} s: {error}") from None
            self.counters.retries += 1
            time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311  (it spreads load, nothing else)
            pause = min(2 * pause, 5.0)

    def _read_once(self, name: str, start: int, end: int, until: float) -> Any:
        if self._readers is None:
            return self.store.read_range(name, start, end)
        began = time.monotonic()
        running = {self._readers.submit(self.store.read_range, name, start, end)}
        hedge_at = began + self._hedge_after()
        while True:
            limit = min(until, hedge_at) - time.monotonic()
            done, running = wait(running, timeout=max(0.0, limit), return_when=FIRST_COMPLETED)
            for future in done:
                error = future.exception()
                if error is None:
                    self._latency.append(time.monotonic() - began)
                    return future.result()
                if not running:
                    raise error
            if time.monotonic() >= until:
                raise TimeoutError("no answer")
            if time.monotonic() >= hedge_at:
                self.counters.hedges += 1
                running.add(self._readers.submit(self.store.read_range, name, start, end))
                hedge_at = until

    def _hedge_after(self) -> float:
        """Longer than 19 of 20 reads took; before that is known, a second."""
        known = sorted(self._latency)
        return 1.0 if len(known) < 20 else max(0.02, 2 * known[len(known) * 19 // 20])
