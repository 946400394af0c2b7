"""Take a rank's snapshots, and load the state that it starts from. All ranks must take a snapshot after the same
update. The interval that was announced last holds from the next durable checkpoint on, if the votes for that step show
that all ranks have received it."""

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

FIRST_STEP = 10  # early, so that its cost is known soon; then the distance doubles until an interval is agreed


class Saver:
    """`heard.interval` is the latest announcement: its version, and steps between checkpoints and between snapshots."""

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
        """Begin a generation: all ranks at the same step, and without what was agreed on before."""
        self.snapshots.generation, self._began = generation, self.state.step
        self._to_disk = -1  # the last step of this generation whose snapshot is to be durable
        self.every = self.job.checkpoint.every_steps
        self.memory_every = self.job.checkpoint.memory_every_steps
        self.next_durable = self._after(self.state.step, self.every)
        self.next_memory = self._after(self.state.step, self.memory_every)

    def _after(self, step: int, every: int) -> int:
        """Return the step of the next snapshot. With an interval it is one of its multiples, no matter when the
        generation began: generations shorter than the interval would otherwise never take any."""
        return step - step % every + every if every else step + max(FIRST_STEP, step - self._began)

    def before_update(self) -> dict[str, Any]:
        """Return for the step's report what is held in memory, and what the last snapshot has cost."""
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
        """Take a snapshot if one is due. `known`: the votes for the step show that all ranks know the same interval."""
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
        """Save now, unless that is under way. (A snapshot that stays in memory does not count.)"""
        if self._to_disk != step:
            self.snapshots.wait()
            self.snapshots.begin(step, durable=True, about=self._about())
            self._under_way = self._to_disk = step

    def _about(self) -> dict[str, Any]:
        """Return what the manifest says of the step; all ranks must say the same."""
        cursor = self.facts.cursor(self.state.step, self.job.train.global_batch)
        state = self.state
        return {"cursor": cursor, "ledger": state.ledger, "updates": state.updates, "recent": state.recent}

    def close(self) -> None:
        """Close the line when what is under way is written."""
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
    """Load a checkpoint of any layout, and return the message about it. Raise BadCheckpoint or OSError."""
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
    else:  # these are not the ranks that had drawn numbers
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
    """Load the checkpoint that this run made of `step` in that generation."""
    store = open_store(url)
    for found in Catalog(store).find(Place(generation, step), lineage):
        resume(job, coord, state, device, url, found.name, progress=progress)
        return
    raise BadCheckpoint(f"there is no checkpoint of step {step}, generation {generation}, at {url}")


def resume_from_memory(layout: Layout, coord: Coord, state: State, device: Device, slot: Slot) -> int:
    """Load a snapshot of this rank, or of its peer in another replica, and return its step. `layout` and `coord` are
    those in which it was made."""
    header = slot.header()
    if header is None:
        raise BadCheckpoint("there is no whole snapshot in memory")
    about = json.loads(header["seal"])
    fill = partial(load_slot, slot, state.entries, layout, coord)
    state.restore(fill, header["step"], int(about["updates"]))
    state.ledger, state.recent = str(about.get("ledger", GENESIS)), list(about.get("recent", []))
    set_rng_state(device, base64.b64decode(header["rng"]))
    return state.step
