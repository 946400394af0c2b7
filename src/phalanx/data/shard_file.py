"""Shards: a stream of items, cut into files whose footer holds two hashes of every chunk.

    [items, little-endian, fixed width][one item of the next shard, if tokens][32 bytes per chunk]

A chunk's 32 bytes are its xxh3-128, checked whenever it arrives, and the first half of its blake3, checked by
`data verify`. The blake3 of the footer is the shard's root, which the manifest records.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from blake3 import blake3

from phalanx.core.manifest import HASH_BYTES

CHUNK_BYTES = 1 << 20
SHARD_BYTES = 512 << 20


def fast_hash(data: object) -> bytes:
    return xxhash.xxh3_128_digest(data)  # type: ignore[arg-type]


def strong_hash(data: object) -> bytes:
    return blake3(data).digest()[:16]  # type: ignore[arg-type]


def root_of(footer: object) -> bytes:
    return blake3(footer).digest()  # type: ignore[arg-type]


def version_of(manifest: bytes) -> str:
    return blake3(manifest).hexdigest()


class ShardWriter:
    """Takes the items of one extent in order, in pieces of any size, and passes each finished file to `on_shard`. What
    it writes depends on the items alone, not on the pieces."""

    def __init__(
        self,
        staging: Path,
        dtype: np.dtype,
        overlap: int,
        chunk_items: int,
        shard_chunks: int,
        on_shard: Callable[[int, Path], None],
        roots: Sequence[bytes] = (),
    ):
        """Continue after the shards that exist already: `roots` are theirs, and the next item is the first after
        them."""
        self.staging, self.dtype, self.overlap = staging, dtype, overlap
        self.chunk_items, self.shard_items, self.on_shard = chunk_items, chunk_items * shard_chunks, on_shard
        self.roots = list(roots)
        self.items = len(self.roots) * self.shard_items
        self._rest = np.empty(0, dtype)  # less than a chunk and its overlap
        self._hashes = bytearray()
        self._file = open(self._path, "wb")  # noqa: SIM115  (closed in _end_shard and abort)

    @property
    def _path(self) -> Path:
        return self.staging / f"{len(self.roots):06d}.partial"

    def add(self, items: np.ndarray) -> None:
        assert items.dtype == self.dtype, (items.dtype, self.dtype)
        self.items += len(items)
        held = np.concatenate([self._rest, items]) if len(self._rest) else items
        first = 0
        while len(held) - first >= self.chunk_items + self.overlap:
            self._chunk(held[first : first + self.chunk_items + self.overlap])
            first += self.chunk_items
            if self.items - (len(held) - first) == (len(self.roots) + 1) * self.shard_items:
                self._end_shard(held[first : first + self.overlap])
        self._rest = held[first:].copy()

    def finish(self) -> np.ndarray:
        """Write the last shard, unless it would be empty, and return the roots of all shards."""
        if len(self._rest):
            self._chunk(self._rest, last=True)
        if self._hashes:
            self._end_shard(self._rest[:0])
        self.abort()
        return np.frombuffer(b"".join(self.roots), np.uint8).reshape(-1, HASH_BYTES)

    def abort(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _chunk(self, items: np.ndarray, last: bool = False) -> None:
        data = np.ascontiguousarray(items).view(np.uint8)
        self._hashes += fast_hash(data) + strong_hash(data)
        own = data if last else data[: self.chunk_items * self.dtype.itemsize]
        self._file.write(own.data)

    def _end_shard(self, overlap: np.ndarray) -> None:
        self._file.write(overlap.tobytes() + self._hashes)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        path = self._path
        self.roots.append(root_of(bytes(self._hashes)))
        self._hashes.clear()
        self.on_shard(len(self.roots) - 1, path)
        self._file = open(self._path, "wb")  # noqa: SIM115
