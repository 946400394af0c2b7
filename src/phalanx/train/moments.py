"""Store an optimizer's two moments when torch does not, in parcels of equal size: in memory (the device's or the
host's), or in a file without a name. `Parcels` visits them in turn. Parcels that are not on the device are read and
written while the one between them is updated.

            parcel      i - 1          i          i + 1
    file or host       <-- written   updated     read -->     threads, or two side streams
"""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Any, Protocol

import torch
from torch import Tensor

from phalanx.core.errors import UserError
from phalanx.parallel.device import Device

BUFFERS = 3  # one arrives, one is worked on, one leaves
PAGE_BYTES = 4096  # direct I/O needs lengths and addresses in multiples of it


class Store(Protocol):
    place: str
    size_bytes: int

    def begin(self, i: int) -> None:
        """Start to fetch parcel `i`."""

    def fetch(self, i: int) -> Tensor:
        """Return its bytes, to be read and written in place until `keep`."""

    def keep(self, i: int, ready: torch.Event | None) -> None:
        """Store its bytes, which have been rewritten, or will have been when the device reaches `ready`."""


class Memory:
    def __init__(self, sizes: list[int], device: Device, place: str):
        self.place, self.size_bytes = place, sum(sizes)
        if place == "host":
            self._held = [device.host_bytes(size).zero_() for size in sizes]
        else:
            self._held = [torch.zeros(size, dtype=torch.uint8, device=device.torch) for size in sizes]

    def begin(self, i: int) -> None: ...

    def fetch(self, i: int) -> Tensor:
        return self._held[i]

    def keep(self, i: int, ready: torch.Event | None) -> None: ...


@dataclass(slots=True)
class Traffic:
    size_bytes: int = 0
    seconds: float = 0.0  # while a request was under way


class File:
    """A file without a name, so that nothing is ever left behind, with one reader and one writer thread. It uses direct
    I/O where the file system has it, so as not to fill the page cache. It is no checkpoint, so it is never
    synchronized."""

    place = "file"

    def __init__(self, sizes: list[int], device: Device, folder: str):
        assert all(size % PAGE_BYTES == 0 for size in sizes), sizes
        self._folder, self._sizes, self.size_bytes = folder, sizes, sum(sizes)
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._file = _nameless_file(folder)
        try:
            os.posix_fallocate(self._file.fileno(), 0, max(self.size_bytes, 1))  # reads as zeros
        except OSError as error:
            raise self._refusal(error) from error
        self._buffers = [device.host_bytes(max(sizes)) for _ in sizes[:BUFFERS]]
        self.direct = all(b.data_ptr() % PAGE_BYTES == 0 for b in self._buffers) and _make_direct(self._file)
        self.read, self.written = Traffic(), Traffic()
        self._holds: list[int | None] = [None] * len(self._buffers)
        self._reads: list[Future[None] | None] = [None] * len(self._buffers)
        self._writes: list[Future[None] | None] = [None] * len(self._buffers)
        self._reader, self._writer = (ThreadPoolExecutor(1, f"moments-{way}") for way in ("in", "out"))

    def begin(self, i: int) -> None:
        """Start to read parcel `i`, once its buffer's last write, and so any write of the parcel, is over."""
        b = i % BUFFERS
        if write := self._writes[b]:
            write.result()
        if self._holds[b] != i:
            self._holds[b] = i
            self._reads[b] = self._reader.submit(self._transfer, i, self.read, os.preadv, None)

    def fetch(self, i: int) -> Tensor:
        read = self._reads[i % BUFFERS]
        assert read is not None and self._holds[i % BUFFERS] == i, i
        read.result()
        return self._buffers[i % BUFFERS][: self._sizes[i]]

    def keep(self, i: int, ready: torch.Event | None) -> None:
        self._writes[i % BUFFERS] = self._writer.submit(self._transfer, i, self.written, os.pwritev, ready)

    def _transfer(self, i: int, traffic: Traffic, call: Any, ready: torch.Event | None) -> None:
        if ready is not None:
            ready.synchronize()
        start, done = time.perf_counter(), 0
        left = memoryview(self._buffers[i % BUFFERS].numpy())[: self._sizes[i]]
        try:
            while done < self._sizes[i]:
                count = call(self._file.fileno(), [left[done:]], self._offsets[i] + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file of the moments is shorter than it was made")
                done += count
        except OSError as error:
            raise self._refusal(error) from error
        traffic.size_bytes += done
        traffic.seconds += time.perf_counter() - start

    def _refusal(self, error: OSError) -> Exception:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return error
        return UserError(
            f"no room for {self.size_bytes / 1e9:.3g} GB of moments: {error.strerror}",
            field="optimizer.offload_dir",
            value=self._folder,
            remedy="make room there, name a folder on a larger disk, or raise layout.shard",
        )


def _nameless_file(folder: str) -> IO[bytes]:
    """Open a file that only this user can read, unlinked from the start where the kernel can do that, else at once."""
    try:
        return tempfile.TemporaryFile(dir=folder, prefix="phalanx-moments-", buffering=0)
    except OSError as error:
        raise UserError(
            f"no file can be made there: {error.strerror}",
            field="optimizer.offload_dir",
            value=folder,
            remedy="name a folder that exists and that you may write to, on a local disk",
        ) from None


def _make_direct(file: IO[bytes]) -> bool:
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:  # such as tmpfs on older kernels
        return False
    return True


class Parcels:
    """The parcels of a store, on the device in turn. An accelerator gets three buffers, and two streams beside the
    current one. On a CPU the store's own memory is worked on."""

    def __init__(self, store: Store, sizes: list[int], device: Device):
        self.store, self._sizes, self._device = store, sizes, device
        self._staged = not device.is_cpu and store.place != "device"
        count = BUFFERS if self._staged else 0
        self._buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=device.torch) for _ in sizes[:count]]
        self._left: list[torch.Event | None] = [None] * count
        self._in, self._out = device.new_stream(), device.new_stream()
        if self._staged:
            device.wait(self._in, device.mark())  # others may have used the buffers' memory until now

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes by place, buffers included."""
        held = {"device": sum(b.numel() for b in self._buffers), "host": 0, "file": 0}
        held[self.store.place] += self.store.size_bytes
        if isinstance(self.store, File):
            held["host"] += sum(b.numel() for b in self.store._buffers)
        return held

    def read(self, i: int) -> Tensor:
        """Return a parcel where the store has it, after waiting for everything under way."""
        self._device.synchronize()
        self.store.begin(i)
        return self.store.fetch(i)

    def visit(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each parcel's bytes on the device. What they hold when the caller asks for the next one is kept."""
        last = len(self._sizes) - 1
        if last < 0:
            return
        self.store.begin(0)
        if self._staged and self._out is not None:
            self._device.wait(self._in, self._out.record_event())  # after what the last step sent away is there
        arriving = self._bring(0)
        for i in range(len(self._sizes)):
            here, arrived = arriving
            if i < last:
                self.store.begin(i + 1)
            self._device.wait(None, arrived)
            yield i, here
            self._send(i, here)
            if i < last:
                arriving = self._bring(i + 1)

    def _bring(self, i: int) -> tuple[Tensor, torch.Event | None]:
        host = self.store.fetch(i)
        if not self._staged:
            return host, None
        here = self._buffers[i % BUFFERS][: self._sizes[i]]
        self._device.wait(self._in, self._left[i % BUFFERS])
        with self._device.on(self._in):
            here.copy_(host, non_blocking=True)
            return here, self._device.mark()

    def _send(self, i: int, here: Tensor) -> None:
        if not self._staged:
            self.store.keep(i, None)
            return
        self._device.wait(self._out, self._device.mark())
        with self._device.on(self._out):
            self.store.fetch(i).copy_(here, non_blocking=True)
            self._left[i % BUFFERS] = self._device.mark()
        self.store.keep(i, self._left[i % BUFFERS])
