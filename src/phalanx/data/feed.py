"""A rank's end of the data service: it reads the rows of each step from shared memory."""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass

import numpy as np

from phalanx.core.manifest import Field, dtype_of

_WORD = struct.Struct("=Q")
GONE = "the data service closed the connection"  # so worded, the cause is looked for at its end


@dataclass(slots=True)
class Rows:
    """The rows of one step. `rows` lies in shared memory, which is reused for another step after `Feed.release`."""

    rows: np.ndarray  # (samples, items)
    served: dict[str, int]  # rows by source
    waited_s: float
    ready: int  # steps that are ready, this one included


class Feed:
    def __init__(self, address: str, indices: list[int], step: int, peers: int = 1):
        """Connect a rank that works on these micro-batches of every step from `step` on. `peers`: the ranks of this
        node that work on the same ones, including itself."""
        self.indices = indices
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.connect("\0" + address)
        self._sock.send(json.dumps({"indices": indices, "step": step, "peers": peers}).encode())
        reply, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, 1)
        if not fds:
            raise ConnectionError(GONE)
        hello = json.loads(reply)
        self.eos, self._sources = hello["eos"], hello["sources"]
        self._slots, self._slot_bytes, self._width = hello["slots"], hello["slot_bytes"], hello["width"]
        self._dtype = dtype_of(Field(name, dtype, tuple(shape)) for name, dtype, shape in hello["fields"])
        self._memory = mmap.mmap(fds[0], self._slots * self._slot_bytes, prot=mmap.PROT_READ)
        os.close(fds[0])
        self._sock.send(b"+")
        self._ready = step

    def take(self, step: int) -> Rows:
        """Wait until the step is ready, and return its rows."""
        began = time.perf_counter()
        self._drain(block=False)
        while self._ready <= step:
            self._drain(block=True)
        at = step % self._slots * self._slot_bytes
        counts = np.frombuffer(self._memory, np.int64, len(self._sources), at)
        n = int(counts.sum())
        rows = np.frombuffer(self._memory, self._dtype, n * self._width, at + counts.nbytes).reshape(n, self._width)
        served: dict[str, int] = {}
        for source, count in zip(self._sources, counts.tolist(), strict=True):
            served[source] = served.get(source, 0) + count
        return Rows(rows, served, time.perf_counter() - began, self._ready - step)

    def release(self, step: int) -> None:
        """Give back the memory of this step and all before it."""
        try:
            self._sock.send(_WORD.pack(step + 1))
        except OSError:
            raise ConnectionError(GONE) from None

    def close(self) -> None:
        self._sock.close()

    def _drain(self, block: bool) -> None:
        self._sock.setblocking(block)
        try:
            data = self._sock.recv(_WORD.size * 64)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            raise ConnectionError(GONE)
        while len(data) % _WORD.size:
            self._sock.setblocking(True)
            data += self._sock.recv(_WORD.size - len(data) % _WORD.size)
        self._ready = max(self._ready, _WORD.unpack(data[-_WORD.size :])[0])
