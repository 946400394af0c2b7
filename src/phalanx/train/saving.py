"""When a rank takes a snapshot, and what it starts from. All ranks must take one after the same update, so the step
of the next one is agreed on at every durable checkpoint, by two sums over all ranks: the interval that the launcher
has announced holds from there on if every rank has heard of it."""

from __future__ import annotations

import base64
import hashlib
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from phalanx.checkpoint.files import Reader
from phalanx.checkpoint.keeper import Line
from phalanx.checkpoint.memory import Slot
from phalanx.checkpoint.torch_state import Snapshotter, load, load_slot, set_rng_state
from phalanx.core.checkpoint import BadCheckpoint, Manifest, Plan
from phalanx.core.job import Job
from phalanx.core.layout import Coord
from phalanx.core.store import open_store
from phalanx.observe.progress import Phase
from phalanx.parallel.device import Device
from phalanx.parallel.groups import Groups
from phalanx.train.state import State

FIRST_STEP = 10  # early, so that what it costs is known soon; then twice as far each time, until an interval is agreed


class Saver:
    def __init__(self, job: Job, coord: Coord, state: State, groups: Groups, device: Device, channel: Any, args: Any):
        self.job, self.state, self.groups, self.device, self.channel = job, state, groups, device, channel
        plan = Plan.of(state.entries, job.layout, coord)
        base = Manifest(
            name="",
            step=0,
            layout=job.layout,
            entries=state.entries,
            files=[],
            updates=0,
            data_version=args["data_version"],
            job=job.to_dict(),
        )
        line = Line(args["address"], job.layout.rank(coord), plan.image_bytes, plan.own_bytes, base.to_json())
        self.snapshots = Snapshotter(
            line, state.entries, job.layout, coord, state.get, device, args["run"], args["generation"]
        )
        c = job.checkpoint
        self.announced = (0, 0, 0)  # version, steps between durable checkpoints, and between snapshots in memory
        self.every = c.every_steps
        self.memory_every = c.memory_every_steps
        self._gap = FIRST_STEP
        self.next_durable = state.step + (self.every or FIRST_STEP)
        self.next_memory = state.step + self.memory_every if self.memory_every else self.next_durable
        self._under_way = 0  # the step of the snapshot whose stall is not reported yet

    def before_update(self) -> dict[str, Any]:
        """What the last snapshot has cost, for the step's report."""
        if not self._under_way:
            return {}
        self.channel.progress.mark(Phase.idle)  # if the disk is slow, the snapshot may have had to wait for a slot
        self.snapshots.wait()
        self.channel.progress.mark(Phase.optimizer)
        said = {"snapshot": {"step": self._under_way, "stall_s": self.snapshots.stall_ns / 1e9}}
        self._under_way = 0
        return said

    def after_update(self, norm: torch.Tensor) -> None:
        step, last = self.state.step, self.state.step >= self.job.train.steps
        durable = last or step >= self.next_durable
        if not durable and step < self.next_memory:
            return
        self.channel.progress.mark(Phase.idle)
        self.snapshots.begin(step, durable, norm)
        self._under_way = step
        if durable and not last:
            self._agree()
            self.next_durable = step + (self.every or self._gap)
            self._gap *= 2
        if self.memory_every:
            self.next_memory = step + self.memory_every
        else:
            self.next_memory = self.next_durable

    def _agree(self) -> None:
        """On the interval that was announced last, if all have heard of it."""
        while (message := self._heard()) is not None:
            if message.get("type") == "interval":
                self.announced = (int(message["version"]), int(message["steps"]), int(message["memory_steps"]))
        version, size = self.announced[0], self.job.layout.world_size
        sums = torch.tensor([version, version**2], device=self.device.torch)
        dist.all_reduce(sums)
        if cross := self.groups.cross:
            cross.sum_(sums)
        total, squares = sums.tolist()
        if version and total**2 == size * squares:
            if not self.job.checkpoint.every_steps:
                self.every = self.announced[1]
            if not self.job.checkpoint.memory_every_steps:
                self.memory_every = self.announced[2]

    def _heard(self) -> dict[str, Any] | None:
        try:
            return self.channel.recv(0)
        except TimeoutError:
            return None

    def close(self) -> None:
        """When what is under way is written."""
        self.snapshots.close()


def resume(
    job: Job, coord: Coord, state: State, device: Device, url: str, name: str, local_ranks: int = 1
) -> dict[str, Any]:
    """Go on from a checkpoint, of whatever layout. Returns what is said about it."""
    reader = Reader(open_store(url), name, local_ranks=local_ranks)
    m, size = reader.manifest, 0

    def fill(get: Any) -> None:
        nonlocal size
        size = load(reader, state.entries, job.layout, coord, get)

    state.restore(fill, m.step, m.updates)
    rank = job.layout.rank(coord)
    if m.layout == job.layout and (rng := reader.file(rank).rng):
        set_rng_state(device, rng)
    else:  # other ranks than those that had drawn numbers
        key = hashlib.blake2b(f"{job.seed}/{m.step}/{rank}".encode(), digest_size=7).digest()
        torch.manual_seed(int.from_bytes(key, "little"))
    return {"type": "resumed", "checkpoint": name, "step": m.step, "bytes_read": size}


def resume_from_memory(job: Job, coord: Coord, state: State, device: Device, slot: Slot) -> int:
    """Go on from this rank's own snapshot; returns its step."""
    header = slot.header()
    if header is None:
        raise BadCheckpoint("there is no whole snapshot in memory")
    state.restore(partial(load_slot, slot, state.entries, job.layout, coord), header["step"], header["step"])
    set_rng_state(device, base64.b64decode(header["rng"]))
    return state.step
