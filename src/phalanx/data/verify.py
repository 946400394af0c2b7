"""Checks every byte of a data set against its manifest: the size of each shard, its footer's root, and both hashes of
each chunk. Threads read whole shards, and all damage is reported, not only the first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from phalanx.core.manifest import HASH_BYTES, Manifest, manifest_name
from phalanx.core.store import Store
from phalanx.data.shard_file import fast_hash, root_of, strong_hash
from phalanx.data.tokenizer import TOKENIZER, Bytes

SPAN_BYTES = 8 << 20  # read at once
TRIES = 4


@dataclass(frozen=True, slots=True)
class Damage:
    name: str  # of the file
    chunk: int | None
    reason: str
    expected: str = ""
    got: str = ""

    def __str__(self) -> str:
        where = self.name if self.chunk is None else f"{self.name} chunk {self.chunk}"
        return f"{where}: {self.reason}" + (f": expected {self.expected}, got {self.got}" if self.expected else "")


def verify(
    store: Store,
    manifest: Manifest,
    version: str,
    *,
    fast: bool = False,
    threads: int = 4,
    on_progress: Callable[[int], None] | None = None,
) -> list[Damage]:
    """Return all damage, in the order of the shards. `fast`: check only sizes and footers. `on_progress` gets the
    number of bytes that have been checked."""
    checked = 0
    damage = list(_beside(store, manifest, version))
    waiting: deque[Future[tuple[int, list[Damage]]]] = deque()
    shards = ((e, s) for e in range(len(manifest.extents)) for s in range(manifest.num_shards(e)))

    def hear() -> None:
        nonlocal checked
        size, found = waiting.popleft().result()
        checked += size
        damage.extend(found)
        if on_progress:
            on_progress(checked)

    with ThreadPoolExecutor(threads, "phalanx-verify") as pool:
        try:
            for extent, shard in shards:
                waiting.append(pool.submit(_shard, store, manifest, extent, shard, fast))
                if len(waiting) > 2 * threads:
                    hear()
            while waiting:
                hear()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return damage


def bytes_to_check(manifest: Manifest, fast: bool = False) -> int:
    of_shard = manifest.footer_bytes if fast else manifest.shard_bytes
    return sum(of_shard(e, s) for e in range(len(manifest.extents)) for s in range(manifest.num_shards(e)))


def _beside(store: Store, m: Manifest, version: str) -> Iterator[Damage]:
    """Check the files beside the shards."""
    wanted = {manifest_name(version): version}
    if m.tokenizer_hash not in ("", Bytes.vocabulary.hash):
        wanted[TOKENIZER] = m.tokenizer_hash
    for name, expected in wanted.items():
        try:
            got = blake3(_tried(store.read, name)).hexdigest()
        except OSError as error:
            yield _unreadable(name, error)
            continue
        if got != expected:
            yield Damage(name, None, "its bytes are not those that were written", f"blake3 {expected}", f"blake3 {got}")


def _shard(store: Store, m: Manifest, extent: int, shard: int, fast: bool) -> tuple[int, list[Damage]]:
    name, size = m.shard_name(extent, shard), m.shard_bytes(extent, shard)
    checked = m.footer_bytes(extent, shard) if fast else size
    try:
        return checked, list(_damage(store, m, extent, shard, fast))
    except OSError as error:
        return checked, [_unreadable(name, error)]


def _damage(store: Store, m: Manifest, extent: int, shard: int, fast: bool) -> Iterator[Damage]:
    name, size, footer_bytes = m.shard_name(extent, shard), m.shard_bytes(extent, shard), m.footer_bytes(extent, shard)
    got_size = _tried(store.size, name)
    if got_size != size:
        yield Damage(name, None, "its size is wrong", f"{size} bytes", f"{got_size} bytes")
    footer = bytes(_tried(store.read_range, name, size - footer_bytes, size))
    root, got_root = m.root(extent, shard).hex(), root_of(footer).hex()
    if root != got_root:
        reason = "its footer is not the one that was written, so that its chunks cannot be checked"
        yield Damage(name, None, reason, f"blake3 {root}", f"blake3 {got_root}")
        return
    if fast:
        return
    count = m.num_chunks(extent, shard)
    stride = max(1, SPAN_BYTES // (m.chunk_items * m.dtype.itemsize))
    for first in range(0, count, stride):
        chunks = range(first, min(count, first + stride))
        ranges = [m.chunk_range(extent, shard, c) for c in chunks]
        begin, end = ranges[0][0], ranges[-1][1]
        data = memoryview(_tried(store.read_range, name, begin, end))
        for chunk, (start, stop) in zip(chunks, ranges, strict=True):
            got = data[start - begin : stop - begin]
            hashes = footer[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES]
            yield from _chunk(name, chunk, got, stop - start, hashes)


def _chunk(name: str, chunk: int, data: memoryview, size: int, hashes: bytes) -> Iterator[Damage]:
    fast, strong = hashes[: HASH_BYTES // 2], hashes[HASH_BYTES // 2 :]
    got_fast, got_strong = fast_hash(data), strong_hash(data)
    if (fast, strong) != (got_fast, got_strong):
        yield Damage(
            name,
            chunk,
            "its bytes are not those that were written",
            f"xxh3 {fast.hex()} blake3 {strong.hex()} of {size} bytes",
            f"xxh3 {got_fast.hex()} blake3 {got_strong.hex()} of {len(data)} bytes",
        )


def _unreadable(name: str, error: OSError) -> Damage:
    if isinstance(error, FileNotFoundError):
        return Damage(name, None, "the file is missing")
    return Damage(name, None, f"it cannot be read ({error.strerror or error})")


def _tried(call: Callable[..., Any], *args: Any) -> Any:
    """Call a function, and retry it after errors that may pass."""
    for attempt in range(TRIES):
        try:
            return call(*args)
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            if attempt == TRIES - 1:
                raise
            time.sleep(0.25 * 4**attempt)
    raise AssertionError
