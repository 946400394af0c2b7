"""When a rank takes a snapshot, and what it starts from. All ranks must take one after the same update. The interval
that was announced last holds from the next durable checkpoint on, if the votes for that step say that all ranks have
heard of it."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.files import Reader
from phalanx.checkpoint.keeper import Line
from phalanx.checkpoint.memory import Slot
from phalanx.checkpoint.torch_state import Snapshotter, load, load_slot, set_rng_state
from phalanx.core.checkpoint import BadCheckpoint, Facts, Manifest, Place, Plan
from phalanx.core.job import Job
from phalanx.core.layout import Coord, Layout
from phalanx.core.ledger import GENESIS
from phalanx.core.store import open_store
from phalanx.observe.progress import Phase
from phalanx.parallel.device import Device
from phalanx.train.state import State

FIRST_STEP = 10  # early, so that what it costs is known soon; then twice as far each time, until an interval is agreed


class Saver:
    """`heard.interval` is what was announced last: its version, and steps between checkpoints and between snapshots."""

    def __init__(
        self, job: Job, coord: Coord, state: State, device: Device, channel: Any, args: Any, heard: Any, facts: Facts
    ):
        """`args`: the keeper's address and the run's mark."""
        self.job, self.state, self.channel, self.heard, self.facts = job, state, channel, heard, facts
        plan = Plan.of(state.entries, job.layout, coord)
        base = Manifest(
            name="",
            step=0,
            layout=job.layout,
            entries=state.entries,
            files=[],
            updates=0,
            order=facts.order,
            data_version=facts.data_version,
            seq_len=job.train.seq_len,
            lineage=facts.lineage,
            job=job.to_dict(),
        )
        line = Line(args["address"], job.layout.rank(coord), plan.image_bytes, plan.own_bytes, base.to_json())
        self.snapshots = Snapshotter(
            line, state.entries, job.layout, coord, state.get, device, args["run"], lineage=facts.lineage
        )
        self._under_way = 0  # the step of the snapshot whose stall is not reported yet

    def begin(self, generation: int) -> None:
        """All ranks begin at the same step, and know nothing of what was agreed on before."""
        self.snapshots.generation, self._began = generation, self.state.step
        self._to_disk = -1  # the last step of this generation whose snapshot is to be durable
        self.every = self.job.checkpoint.every_steps
        self.memory_every = self.job.checkpoint.memory_every_steps
        self.next_durable = self._after(self.state.step, self.every)
        self.next_memory = self._after(self.state.step, self.memory_every)

    def _after(self, step: int, every: int) -> int:
        """Return the step of the next snapshot. Those of an interval are its multiples, whenever the generation began:
        generations that are shorter than it would never take any."""
        return step - step % every + every if every else step + max(FIRST_STEP, step - self._began)

    def before_update(self) -> dict[str, Any]:
        """For the step's report: what is held in memory, and what the last snapshot has cost."""
        held = {"held": self.snapshots.held()}
        if not self._under_way:
            return held
        self.channel.progress.mark(Phase.idle)  # if the disk is slow, the snapshot may have had to wait for a slot
        self.snapshots.wait()
        self.channel.progress.mark(Phase.optimizer)
        said = {"snapshot": {"step": self._under_way, "stall_s": self.snapshots.stall_ns / 1e9}}
        self._under_way = 0
        return held | said

    def after_update(self, norm: torch.Tensor, known: bool) -> None:
        """`known`: all ranks have heard of the same interval, as their votes for the step said."""
        step, last, v = self.state.step, self.state.step >= self.job.train.steps, self.job.validation
        durable = last or step >= self.next_durable or (v.keep_best and v.is_due(step, self.job.train.steps))
        if not durable and step < self.next_memory:
            return
        self.channel.progress.mark(Phase.idle)
        self.snapshots.begin(step, durable, norm, self._about())
        self._under_way = step
        self._to_disk = step if durable else self._to_disk
        if durable and not last:
            if known and self.heard.interval[0]:
                c, (_, every, memory_every) = self.job.checkpoint, self.heard.interval
                self.every, self.memory_every = c.every_steps or every, c.memory_every_steps or memory_every
            self.next_durable = self._after(step, self.every)
        self.next_memory = self._after(step, self.memory_every)

    def save(self, step: int) -> None:
        """Now, unless it is on its way. (One that stays in memory is not.)"""
        if self._to_disk != step:
            self.snapshots.wait()
            self.snapshots.begin(step, durable=True, about=self._about())
            self._under_way = self._to_disk = step

    def _about(self) -> dict[str, Any]:
        """What the manifest says of the step; all ranks must say the same."""
        cursor = self.facts.cursor(self.state.step, self.job.train.global_batch)
        state = self.state
        return {"cursor": cursor, "ledger": state.ledger, "updates": state.updates, "recent": state.recent}

    def close(self) -> None:
        """When what is under way is written."""
        self.snapshots.close()


def resume(
    job: Job,
    coord: Coord,
    state: State,
    device: Device,
    url: str,
    name: str,
    local_ranks: int = 1,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Go on from a checkpoint of any layout. Returns what is said about it. BadCheckpoint; OSError."""
    reader = Reader(open_store(url), name, local_ranks=local_ranks)
    m, size = reader.manifest, 0

    def fill(get: Any) -> None:
        nonlocal size

        def got(name: str) -> torch.Tensor:
            progress()
            return get(name)

        size = load(reader, state.entries, job.layout, coord, got)

    state.restore(fill, m.step, m.updates)
    state.ledger, state.recent = m.ledger or GENESIS, list(m.recent)
    rank = job.layout.rank(coord)
    if m.layout == job.layout and (rng := reader.file(rank).rng):
        set_rng_state(device, rng)
    else:  # other ranks than those that had drawn numbers
        key = hashlib.blake2b(f"{job.seed}/{m.step}/{rank}".encode(), digest_size=7).digest()
        torch.manual_seed(int.from_bytes(key, "little"))
    return {"type": "resumed", "checkpoint": name, "step": m.step, "bytes_read": size}


def resume_from_checkpoint(
    job: Job,
    coord: Coord,
    state: State,
    device: Device,
    url: str,
    step: int,
    generation: int,
    lineage: str = "",
    progress: Callable[[], object] = lambda: None,
) -> None:
    """Go on from the checkpoint that this run made of `step` in that generation."""
    store = open_store(url)
    for found in Catalog(store).find(Place(generation, step), lineage):
        resume(job, coord, state, device, url, found.name, progress=progress)
        return
    raise BadCheckpoint(f"there is no checkpoint of step {step}, generation {generation}, at {url}")


def resume_from_memory(layout: Layout, coord: Coord, state: State, device: Device, slot: Slot) -> int:
    """Go on from a snapshot of this rank, or of its peer in another replica; returns its step. `layout` and `coord`:
    in which it was made."""
    header = slot.header()
    if header is None:
        raise BadCheckpoint("there is no whole snapshot in memory")
    about = json.loads(header["seal"])
    fill = partial(load_slot, slot, state.entries, layout, coord)
    state.restore(fill, header["step"], int(about["updates"]))
    state.ledger, state.recent = str(about.get("ledger", GENESIS)), list(about.get("recent", []))
    set_rng_state(device, base64.b64decode(header["rng"]))
    return state.step
