"""Between a rank's tensors and a checkpoint: snapshots that are taken beside the next forward and backward pass, and
loading into any layout. The state does not change between two updates, so a copy that is done before the next update
is a copy of one step, and only what of it outlasts the backward pass holds the training up."""

from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from phalanx.checkpoint.files import Reader
from phalanx.checkpoint.keeper import Line
from phalanx.checkpoint.memory import Slot
from phalanx.core.checkpoint import BadCheckpoint, Entry, Plan, Segment, checkpoint_name
from phalanx.core.layout import Coord, Layout

Get = Callable[[str], Tensor]  # a rank's slice of a tensor of the state, by its name
HASHERS = 8  # threads, for what comes from an accelerator


class Part(NamedTuple):
    """Bytes of a segment that lie in a chunk."""

    segment: int
    start: int  # in the segment
    stop: int
    at: int  # in the image


def parts_of(plan: Plan, bounds: list[tuple[int, int]]) -> list[list[Part]]:
    """For every chunk what it is made of."""
    out: list[list[Part]] = [[] for _ in bounds]
    chunk = 0
    for i, s in enumerate(plan.segments):  # in the order of their offsets
        end = s.offset + s.size
        while bounds[chunk][1] <= s.offset:
            chunk += 1
        at = chunk
        while at < len(bounds) and bounds[at][0] < end:
            a, b = max(s.offset, bounds[at][0]), min(end, bounds[at][1])
            out[at].append(Part(i, a - s.offset, b - s.offset, a))
            at += 1
    return out


class Source:
    """A rank's slices of the state, as flat bytes."""

    def __init__(self, entries: list[Entry], layout: Layout, coord: Coord, get: Get):
        self.entries, self.layout, self.coord, self.get = entries, layout, coord, get

    def bytes_of(self, s: Segment) -> Tensor:
        """Those of a segment."""
        entry = self.entries[s.entry]
        local = self.get(entry.held.name).detach()
        if _dtype(local) != entry.dtype:
            raise ValueError(f"{entry.held.name} is {_dtype(local)}, not {entry.dtype}")
        first = entry.held.bounds(self.layout, self.coord)[0]
        return as_bytes(local)[(s.r0 - first) * s.row_bytes : (s.r1 - first) * s.row_bytes]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Snapshotter:
    """`run`: the random mark of the run; with the generation it makes the names of its checkpoints unique."""

    def __init__(
        self,
        line: Line,
        entries: list[Entry],
        layout: Layout,
        coord: Coord,
        get: Get,
        device: Any,
        run: str,
        generation: int = 0,
    ):
        self.line, self.device, self.run, self.generation = line, device, run, generation
        self.rank = layout.rank(coord)
        self.source = Source(entries, layout, coord, get)
        self.plan = Plan.of(entries, layout, coord)
        self.parts = parts_of(self.plan, line.slots[0].bounds)
        self.stall_ns = 0  # of the snapshot under way, or the last
        self.copy_ns = 0
        self._slot = 1 - line.newest if line.newest >= 0 else 0
        self._work: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._copied: torch.Event | None = None
        self._stream = device.new_stream()
        self._images: dict[int, Tensor] = {}

    def begin(self, step: int, durable: bool, norm: Tensor | None = None) -> None:
        """Right after an update, which made the state that of `step`. If the gradient's `norm` was not finite the
        update was not made, and the snapshot is never sealed."""
        began = time.perf_counter_ns()
        self._join()
        number = self._slot
        self.line.wait_free(number)
        slot = self.line.slots[number]
        slot.break_seal()
        header = {
            "checkpoint": checkpoint_name(step, mark(self.run, self.generation, step)),
            "rank": self.rank,
            "world_size": self.source.layout.world_size,
            "step": step,
            "generation": self.generation,
            "rng": base64.b64encode(rng_state(self.device)).decode(),
        }
        work: Callable[[Slot], None]
        if self.device.is_cpu:
            work = self._copy
        else:
            sums = self._copy_from_device(number, slot)
            work = partial(self._hash, sums=sums)
        self._work = threading.Thread(target=self._run, args=(work, slot, number, header, durable, norm), daemon=True)
        self._work.start()
        self._slot = 1 - number
        self.stall_ns = time.perf_counter_ns() - began

    def wait(self) -> None:
        """Before the next update."""
        began = time.perf_counter_ns()
        if self._copied is not None:  # the update waits for the copy, on the device; the host goes on
            self.device.wait(None, self._copied)
            self._copied = None
        elif self.device.is_cpu:
            self._join()
        self.stall_ns += time.perf_counter_ns() - began

    def finish(self) -> None:
        """Until everything is with the keeper, and the keeper is done with it."""
        self._join()
        for slot in range(len(self.line.slots)):
            self.line.wait_free(slot)

    def _join(self) -> None:
        if self._work is not None:
            self._work.join()
            self._work = None
        if self._failure is not None:
            raise self._failure

    def _run(
        self,
        work: Callable[[Slot], None],
        slot: Slot,
        number: int,
        header: dict[str, Any],
        durable: bool,
        norm: Tensor | None,
    ) -> None:
        began = time.perf_counter_ns()
        try:
            work(slot)
            if norm is not None and not bool(torch.isfinite(norm)):
                return
            slot.seal(header)
            self.copy_ns = time.perf_counter_ns() - began
            self.line.sealed(number, durable)
        except BaseException as error:
            self._failure = error

    def _copy(self, slot: Slot) -> None:
        """On the host: each chunk is hashed while it is in the cache."""
        image, views = slot.array(), dict[int, np.ndarray]()
        for chunk, parts in enumerate(self.parts):
            for part in parts:
                if part.segment not in views:
                    views.clear()  # segments come one after the other
                    views[part.segment] = self.source.bytes_of(self.plan.segments[part.segment]).numpy()
                image[part.at : part.at + part.stop - part.start] = views[part.segment][part.start : part.stop]
            slot.put_hash(chunk)

    def _copy_from_device(self, number: int, slot: Slot) -> Tensor:
        """On a stream beside the trainer's, into memory that the device writes by itself. Sums that are taken on the
        device go along, so that what arrives can be compared with what was there."""
        if number not in self._images:
            self._images[number] = self.device.pin(torch.from_numpy(slot.array()))
        image = self._images[number]
        self.device.wait(self._stream, self.device.mark())
        sums = []
        with self.device.on(self._stream):
            for s in self.plan.segments:
                source = self.source.bytes_of(s)
                self.device.hold(source, self._stream)
                image[s.offset : s.offset + s.size].copy_(source, non_blocking=True)
                sums.append(source.view(self._word(s)).sum(dtype=torch.int64))
            total = torch.empty(len(sums), dtype=torch.int64, pin_memory=True)
            if sums:
                total.copy_(torch.stack(sums), non_blocking=True)
            self._copied = self.device.mark()
        return total

    def _word(self, s: Segment) -> torch.dtype:
        """An integer that an element can be read as, or that divides it."""
        return {1: torch.uint8, 2: torch.int16}.get(self.source.entries[s.entry].item_bytes, torch.int32)

    def _hash(self, slot: Slot, sums: Tensor) -> None:
        copied = self._stream.record_event()
        copied.synchronize()
        with ThreadPoolExecutor(HASHERS, "phalanx-hash") as pool:
            list(pool.map(slot.put_hash, range(len(slot.bounds))))
            found = list(pool.map(lambda s: self._sum(slot, s), self.plan.segments))
        for s, want, got in zip(self.plan.segments, sums.tolist(), found, strict=True):
            if want != got:
                name = self.source.entries[s.entry].held.name
                raise BadCheckpoint(f"{name}: the copy from the device has the sum {got} instead of {want}")

    def _sum(self, slot: Slot, s: Segment) -> int:
        word = str(self._word(s)).removeprefix("torch.")
        return int(slot.array()[s.offset : s.offset + s.size].view(word).sum(dtype=np.int64))


def mark(run: str, generation: int, step: int) -> str:
    """The same on all ranks, and in no other attempt at this step."""
    return hashlib.blake2b(f"{run}/{generation}/{step}".encode(), digest_size=4).hexdigest()


# -- random numbers


def rng_state(device: Any) -> bytes:
    """Of torch's generators on the host and on the device."""
    states = [torch.get_rng_state()]
    if not device.is_cpu:
        states.append(torch.get_device_module(device.torch).get_rng_state(device.torch))
    return b"".join(len(s).to_bytes(4, "little") + s.numpy().tobytes() for s in states)


def set_rng_state(device: Any, data: bytes) -> None:
    """What there is of it: a checkpoint of another kind of device has only the host's."""
    states = []
    while data:
        size = int.from_bytes(data[:4], "little")
        states.append(torch.frombuffer(bytearray(data[4 : 4 + size]), dtype=torch.uint8))
        data = data[4 + size :]
    torch.set_rng_state(states[0])
    if not device.is_cpu and len(states) > 1:
        torch.get_device_module(device.torch).set_rng_state(states[1], device.torch)


# -- loading


def load(reader: Reader, entries: list[Entry], layout: Layout, coord: Coord, get: Get) -> int:
    """Fill this rank's slices of all that the checkpoint has of `entries`, whatever layout it was saved in; returns
    the bytes read. Every byte is verified before anything is put to use: BadCheckpoint leaves the state half filled,
    and it must be filled again."""
    wanted, after = [], []
    for entry in entries:
        held = entry.held
        if not held.held_by(layout, coord) or held.name not in reader.manifest.index:
            continue
        saved = reader.manifest.entries[reader.manifest.index[held.name]]
        if saved.held.shape != held.shape:
            raise ShapeDiffers(held.name, saved.held.shape, held.shape)
        r0, r1, c0, c1 = held.bounds(layout, coord)
        local = get(held.name).detach()
        if not local.numel():
            continue
        direct = local.is_cpu and local.is_contiguous() and saved.dtype == entry.dtype
        dtype = getattr(torch, saved.dtype)
        room = local if direct else torch.empty(local.shape, dtype=dtype)
        if not direct:
            after.append((local, room))
        wanted.append((held.name, (r0, r1, c0, c1), as_bytes(room).view(r1 - r0, -1).numpy()))
    size = reader.fill_blocks(wanted)
    for local, room in after:
        local.copy_(room)
    return size


class ShapeDiffers(Exception):
    def __init__(self, name: str, saved: tuple[int, ...], wanted: tuple[int, ...]):
        super().__init__(
            f"{name} is {'x'.join(map(str, saved))} in the checkpoint and {'x'.join(map(str, wanted))} here"
        )


def load_slot(slot: Slot, entries: list[Entry], layout: Layout, coord: Coord, get: Get) -> None:
    """The same from a snapshot in memory, of this very rank."""
    if slot.header() is None:
        raise BadCheckpoint("there is no whole snapshot in memory")
    slot.verify()
    plan, image = Plan.of(entries, layout, coord), torch.from_numpy(slot.array())
    if (plan.image_bytes, plan.own_bytes) != (slot.image_bytes, slot.own_bytes):
        raise BadCheckpoint("the snapshot in memory is of another layout")
    source = Source(entries, layout, coord, get)
    for s in plan.segments:
        source.bytes_of(s).copy_(image[s.offset : s.offset + s.size])
