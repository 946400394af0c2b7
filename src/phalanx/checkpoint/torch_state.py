"""Moves state between a rank's tensors and a checkpoint: it takes snapshots during the next forward and backward pass,
and loads into any layout. The state does not change between two updates, so a copy that is done before the next update
is a copy of one step. Training blocks only on the part that is still being copied after the backward pass."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from phalanx.checkpoint.files import Reader
from phalanx.checkpoint.keeper import Line
from phalanx.checkpoint.memory import Slot
from phalanx.core.checkpoint import BadCheckpoint, Entry, Plan, Segment, checkpoint_name, word_of
from phalanx.core.errors import UserError
from phalanx.core.layout import Coord, Layout

Get = Callable[[str], Tensor]  # returns a rank's slice of a tensor by its name


class Part(NamedTuple):
    """Bytes of a segment that lie in a chunk."""

    segment: int
    start: int  # in the segment
    stop: int
    at: int  # in the image


def parts_of(plan: Plan, bounds: list[tuple[int, int]]) -> list[list[Part]]:
    """Return the parts of every chunk."""
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
        self._seen: dict[Segment, tuple[int, Tensor]] = {}  # the address of the tensor, and its bytes
        self._fleeting: set[int] = set()  # entries made anew at each access: masters, moments in a file

    def bytes_of(self, s: Segment) -> Tensor:
        """Return the bytes of a segment."""
        entry = self.entries[s.entry]
        local = self.get(entry.held.name)
        where, seen = self._seen.get(s, (0, local))
        if where != local.data_ptr():
            seen = self._cut(s, entry, local.detach())
            if s.entry not in self._fleeting and local.is_contiguous() and self.get(entry.held.name) is local:
                self._seen[s] = local.data_ptr(), seen
            else:
                self._fleeting.add(s.entry)
        return seen

    def is_made(self, s: Segment) -> bool:
        """Return whether the segment's tensor is made anew at each access."""
        return s.entry in self._fleeting

    def _cut(self, s: Segment, entry: Entry, local: Tensor) -> Tensor:
        if _dtype(local) != entry.dtype:
            raise ValueError(f"{entry.held.name} is {_dtype(local)}, not {entry.dtype}")
        first = entry.held.bounds(self.layout, self.coord)[0]
        return as_bytes(local)[(s.r0 - first) * s.row_bytes : (s.r1 - first) * s.row_bytes]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class Snapshotter:
    """Takes snapshots of a rank. `run`: the random mark of the run; with the generation it makes the names of its
    checkpoints unique."""

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
        lineage: str = "",
    ):
        self.line, self.device, self.run, self.generation = line, device, run, generation
        self.lineage = lineage
        self.rank = layout.rank(coord)
        self.source = Source(entries, layout, coord, get)
        self.plan = Plan.of(entries, layout, coord)
        self.parts = parts_of(self.plan, line.slots[0].bounds)
        self.stall_ns = 0  # of the snapshot under way, or the last
        self.copy_ns = 0
        self._thread = ThreadPoolExecutor(1, "phalanx-snapshot")
        self._work: Future[None] = self._thread.submit(lambda: None)  # starts the thread before any snapshot needs it
        self._enqueued = threading.Event()
        self._copied: list[torch.Event] = []
        self._streams = [device.new_stream(), device.new_stream()]
        self._sums = torch.zeros(len(self.plan.segments), dtype=torch.int64, pin_memory=not device.is_cpu)
        self._images: dict[int, Tensor] = {}  # of the slots, pinned

    def begin(self, step: int, durable: bool, norm: Tensor | None = None, about: dict[str, Any] | None = None) -> None:
        """Start a snapshot right after the update to `step`. If the gradient's `norm` is not finite, the update was
        skipped and the snapshot is never sealed. `about`: facts about the step that are the same on all ranks."""
        began = time.perf_counter_ns()
        self._join()
        self._enqueued.clear()
        rng, ready = rng_state(self.device), self.device.mark()
        seal = json.dumps(about or {}, sort_keys=True)
        self._work = self._thread.submit(self._run, step, rng, durable, norm, ready, seal)
        self.stall_ns = time.perf_counter_ns() - began

    def _pick(self) -> int:
        """Wait for a slot that the keeper is done with, and return the one with the oldest snapshot. It is never the
        newest whole snapshot, if there are other slots."""
        while True:
            self.line.listen(block=False)
            steps = {i: (slot.header() or {"step": -1})["step"] for i, slot in enumerate(self.line.slots)}
            newest = max(steps, key=steps.__getitem__)
            free = [i for i in steps if i not in self.line.busy and (i != newest or steps[i] < 0 or len(steps) == 1)]
            if free:
                return min(free, key=steps.__getitem__)
            self.line.listen(block=True)

    def wait(self) -> None:
        """Make the next update wait for the copies."""
        began = time.perf_counter_ns()
        if self.device.is_cpu:
            self._join()
        elif not self._work.done():  # the update waits for the copies, on the device; the host continues
            self._enqueued.wait()
            for event in self._copied:
                self.device.wait(None, event)
        self.stall_ns += time.perf_counter_ns() - began

    def held(self) -> dict[str, int]:
        """Return the newest step that each tier holds, as far as the keeper has reported."""
        if self._work.done():  # otherwise its thread reads the line
            with contextlib.suppress(OSError):  # the next call that needs the keeper reports that it is gone
                self.line.listen(block=False)
        return dict(self.line.held)

    def finish(self) -> None:
        """Wait until the keeper has everything and is done with it."""
        self._join()
        for slot in range(len(self.line.slots)):
            self.line.wait_free(slot)

    def close(self) -> None:
        """Finish, and close the line."""
        self.finish()
        self._thread.shutdown()
        while self._images:
            self.device.unpin(self._images.popitem()[1])
        self.line.close()

    def _join(self) -> None:
        self._work.result()

    def _run(self, step: int, rng: bytes, durable: bool, norm: Tensor | None, ready: Any, seal: str) -> None:
        try:
            if self.device.is_cpu:
                time.sleep(0.002)  # lets the trainer begin its next pass; both would want the interpreter
            number = self._pick()
            began, slot, total = time.perf_counter_ns(), self.line.slots[number], None
            slot.break_seal()
            if self.device.is_cpu:
                self._copy(slot)
            else:
                total = self._copy_from_device(number, ready)
            if norm is not None and not bool(torch.isfinite(norm)):
                return
            header = {
                "checkpoint": checkpoint_name(
                    step, mark(self.run, self.generation, step), self.generation, self.lineage
                ),
                "rank": self.rank,
                "world_size": self.source.layout.world_size,
                "step": step,
                "generation": self.generation,
                "seal": seal,
                "rng": base64.b64encode(rng).decode(),
            }
            if total is None:
                slot.seal(header)
            self.copy_ns = time.perf_counter_ns() - began
            about = {key: header[key] for key in ("checkpoint", "step", "generation")}
            self.line.done(number, durable, about, None if total is None else {"header": header, "sum": total})
        finally:
            self._enqueued.set()

    def _copy(self, slot: Slot) -> None:
        """Copy on the host, and hash each chunk while it is in the cache."""
        image, views = slot.array(), dict[int, np.ndarray]()
        for chunk, parts in enumerate(self.parts):
            for part in parts:
                if part.segment not in views:
                    views.clear()  # segments follow each other
                    views[part.segment] = self.source.bytes_of(self.plan.segments[part.segment]).numpy()
                image[part.at : part.at + part.stop - part.start] = views[part.segment][part.start : part.stop]
            slot.put_hash(chunk)

    def image(self, number: int) -> Tensor:
        """Return a slot's image as memory that the device can write by itself."""
        if number not in self._images:
            self._images[number] = self.device.pin(torch.from_numpy(self.line.slots[number].array()))
        return self._images[number]

    def _copy_from_device(self, number: int, ready: Any) -> int:
        """Copy on a stream beside the trainer's, into memory that the device writes by itself. Return a sum, taken on
        the device on another stream, by which the keeper compares what has arrived with what was there. The keeper also
        hashes and seals, which here would take the interpreter from the trainer."""
        self.device.use()
        image, on_host = self.image(number), 0
        rooms, sources, weights = list[Tensor](), list[Tensor](), list[int]()
        sums_of_made, weights_of_made = list[Tensor](), list[int]()
        for stream in self._streams:
            self.device.wait(stream, ready)
        copies, adds = self._streams
        with self.device.on(copies):
            for i, s in enumerate(self.plan.segments):
                room, source = image[s.offset : s.offset + s.size], self.source.bytes_of(s)
                if source.is_cpu:  # offloaded
                    room.copy_(source)
                    on_host += (2 * i + 1) * int(content_sum(source))
                elif self.source.is_made(s):  # freed once it is copied, so that only one exists at a time
                    room.copy_(source, non_blocking=True)
                    sums_of_made.append(content_sum(source))
                    weights_of_made.append(2 * i + 1)
                else:
                    rooms.append(room)
                    sources.append(source)
                    weights.append(2 * i + 1)
            if sources:  # in one call, which leaves the interpreter to the trainer
                torch._foreach_copy_(rooms, sources, non_blocking=True)
            if sums_of_made:
                end = len(sources) + len(sums_of_made)
                self._sums[len(sources) : end].copy_(torch.stack(sums_of_made), non_blocking=True)
        if sources:
            with self.device.on(adds):
                self._sums[: len(sources)].copy_(torch.stack([content_sum(x) for x in sources]), non_blocking=True)
        weights += weights_of_made
        self._copied = [stream.record_event() for stream in self._streams]
        self._enqueued.set()
        for event in self._copied:
            event.synchronize()
        return on_host + sum(weight * each for weight, each in zip(weights, self._sums.tolist(), strict=False))


def content_sum(data: Tensor) -> Tensor:
    """Sum bytes in the same way as the keeper."""
    word = getattr(torch, word_of(data.numel()))
    return (data if data.data_ptr() % word.itemsize == 0 else data.clone()).view(word).sum(dtype=torch.int64)


def mark(run: str, generation: int, step: int) -> str:
    """Return a mark that is the same on all ranks, and differs in any other attempt at this step."""
    return hashlib.blake2b(f"{run}/{generation}/{step}".encode(), digest_size=4).hexdigest()


# -- random numbers


def rng_state(device: Any) -> bytes:
    """Return the state of torch's generators on the host and on the device."""
    states = [torch.get_rng_state()]
    if not device.is_cpu:
        states.append(torch.get_device_module(device.torch).get_rng_state(device.torch))
    return b"".join(len(s).to_bytes(4, "little") + s.numpy().tobytes() for s in states)


def set_rng_state(device: Any, data: bytes) -> None:
    """Restore what was saved: a checkpoint of another kind of device has only the host's state."""
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
    """Fill this rank's slices of all `entries` that the checkpoint has, whichever layout it was saved in, and return
    the bytes read. Every byte is verified before use. After BadCheckpoint the state is half filled, and must be filled
    again."""
    wanted, after = [], []
    for entry in entries:
        held = entry.held
        if not held.held_by(layout, coord) or held.name not in reader.manifest.index:
            continue
        saved = reader.manifest.entries[reader.manifest.index[held.name]]
        if saved.held.shape != held.shape:
            was, here = ("x".join(map(str, shape)) for shape in (saved.held.shape, held.shape))
            remedy = "set the sizes of the model that was saved, or name a checkpoint of this one"
            raise UserError(f"{held.name} is {was} in the checkpoint and {here} here", remedy=remedy)
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


def load_slot(slot: Slot, entries: list[Entry], layout: Layout, coord: Coord, get: Get) -> None:
    """Do the same from a snapshot in memory, of this very rank."""
    if slot.header() is None:
        raise BadCheckpoint("there is no whole snapshot in memory")
    slot.verify()
    plan, image = Plan.of(entries, layout, coord), torch.from_numpy(slot.array())
    if (plan.image_bytes, plan.own_bytes) != (slot.image_bytes, slot.own_bytes):
        raise BadCheckpoint("the snapshot in memory is of another layout")
    source = Source(entries, layout, coord, get)
    for s in plan.segments:
        source.bytes_of(s).copy_(image[s.offset : s.offset + s.size])
