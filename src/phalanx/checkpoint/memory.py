"""The memory tier: snapshots in shared memory that outlives the worker. Each rank has three slots: one that is being
filled and two whole ones, because a rank may be one snapshot ahead of another and all ranks must have a step in common.
A host with less memory gives each rank one slot: checkpoints are written from it, but no run continues from it. A slot
is valid only while its seal, which is written last, holds.

    slot   | image of the rank | hashes of its chunks | seal: length, blake3, who and when, blake3 of the hashes |
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import weakref
from typing import Any

import blake3
import numpy as np

from phalanx.checkpoint.files import HASH_BYTES, hash_of
from phalanx.core.checkpoint import PAGE_BYTES, BadCheckpoint, chunks
from phalanx.core.errors import UserError
from phalanx.core.limits import available_bytes

SEAL_BYTES = 64 << 10
SLOTS = 3
_HEAD = struct.Struct("<Q32s")


class Slot:
    """One snapshot of one rank. `fd`: its memory; None allocates new memory."""

    def __init__(self, image_bytes: int, own_bytes: int, fd: int | None = None):
        self.image_bytes, self.own_bytes = image_bytes, own_bytes
        self.bounds = chunks(0, own_bytes) + chunks(own_bytes, image_bytes)
        self.num_own = len(chunks(0, own_bytes))
        table = -(-len(self.bounds) * HASH_BYTES // PAGE_BYTES) * PAGE_BYTES
        self._seal_at = image_bytes + table
        self.size = slot_bytes(image_bytes, own_bytes)
        self.fd = os.memfd_create("phalanx-snapshot") if fd is None else fd
        self._close = weakref.finalize(self, os.close, self.fd)
        if fd is None:
            os.posix_fallocate(self.fd, 0, self.size)  # now, and not page by page in the first snapshot
        self.memory = mmap.mmap(self.fd, self.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        view = memoryview(self.memory)
        self.image = view[:image_bytes]
        self._table = view[image_bytes : image_bytes + len(self.bounds) * HASH_BYTES]
        self._seal = view[self._seal_at :]

    def break_seal(self) -> None:
        """Invalidate the slot, before its first byte is written."""
        _HEAD.pack_into(self._seal, 0, 0, bytes(32))

    def put_hash(self, chunk: int) -> None:
        a, b = self.bounds[chunk]
        self._table[chunk * HASH_BYTES : (chunk + 1) * HASH_BYTES] = hash_of(self.image[a:b])

    def seal(self, header: dict[str, Any]) -> None:
        """Make the slot valid, after its last byte is written."""
        body = json.dumps({**header, "table": blake3.blake3(self._table).hexdigest()}).encode()
        assert len(body) <= SEAL_BYTES - _HEAD.size, "the seal is too long"
        self._seal[_HEAD.size : _HEAD.size + len(body)] = body
        _HEAD.pack_into(self._seal, 0, len(body), blake3.blake3(body).digest())

    def header(self) -> dict[str, Any] | None:
        """Read the header of a valid seal; None: there is no snapshot here, or only half of one."""
        size, want = _HEAD.unpack_from(self._seal, 0)
        if not 0 < size <= SEAL_BYTES - _HEAD.size:
            return None
        body = bytes(self._seal[_HEAD.size : _HEAD.size + size])
        if blake3.blake3(body).digest() != want:
            return None
        header = json.loads(body)
        return header if header.pop("table") == blake3.blake3(self._table).hexdigest() else None

    def hashes(self, own: bool = False) -> bytes:
        return bytes(self._table[: self.num_own * HASH_BYTES] if own else self._table)

    def verify(self, own: bool = False) -> None:
        """Check the image against the hashes that were taken when it was made. Raises BadCheckpoint."""
        for i, (a, b) in enumerate(self.bounds[: self.num_own] if own else self.bounds):
            found, want = hash_of(self.image[a:b]), bytes(self._table[i * HASH_BYTES : (i + 1) * HASH_BYTES])
            if found != want:
                raise BadCheckpoint(
                    f"the snapshot in memory: bytes {a} to {b} have the xxh3 {found.hex()} instead of {want.hex()}"
                )

    def array(self) -> np.ndarray:
        return np.frombuffer(self.image, np.uint8)

    def close(self) -> None:
        self._close()  # the mapping is freed when nothing points into it any more


def slot_bytes(image_bytes: int, own_bytes: int) -> int:
    count = len(chunks(0, own_bytes)) + len(chunks(own_bytes, image_bytes))
    return image_bytes + -(-count * HASH_BYTES // PAGE_BYTES) * PAGE_BYTES + SEAL_BYTES


def num_slots(ranks: int, size: int, has_buddy: bool, available: int | None = None) -> int:
    """Return how many slots each of a host's ranks gets: all, or one if the host cannot hold that many for its own
    ranks and its buddy's."""
    available = available_bytes() if available is None else available
    if ranks * size * SLOTS * (2 if has_buddy else 1) <= available:
        return SLOTS
    if ranks * size <= available:
        return 1
    raise UserError(
        f"a snapshot of {ranks} ranks needs {ranks * size / 1e9:.3g} GB of this host's memory ({size / 1e9:.3g} GB "
        f"each), and {available / 1e9:.3g} GB are free",
        field="checkpoint.every_steps",
        value=0,
        remedy="raise layout.shard, put fewer ranks on a node, or set checkpoint.every_steps = -1 for a run "
        "without checkpoints",
    )
