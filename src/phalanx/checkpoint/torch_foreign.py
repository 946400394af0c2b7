"""What the converters share: memory in which to put together a checkpoint of one rank, reading a tensor from a
checkpoint of any layout, and a folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.checkpoint.files import Reader, write_whole
from phalanx.core.checkpoint import PAGE_BYTES, Entry, Manifest, Plan, checkpoint_name
from phalanx.core.errors import UserError
from phalanx.core.held import Held
from phalanx.core.layout import Layout
from phalanx.core.shape import ModelConfig
from phalanx.core.store import Store, open_store, sync_folder
from phalanx.model.family import load_family
from phalanx.parallel.schema import describe, describe_buffers

MOMENTS = ("exp_avg", "exp_avg_sq")


def params_of(config: ModelConfig) -> list[Held]:
    return describe(load_family(config.family), config, Layout())


def buffers_of(config: ModelConfig) -> list[Held]:
    return [held for held, _ in describe_buffers(load_family(config.family), config, Layout())]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


class Image:
    """A checkpoint of one rank that is filled tensor by tensor. It is page-aligned, so that it can be written past the
    page cache."""

    def __init__(self, entries: list[Entry], job: dict[str, Any], *, step: int = 0, updates: int = 0, **more: Any):
        name = checkpoint_name(step, secrets.token_hex(4))
        self._draft = Manifest(name, step, Layout(), entries, [], updates, job=job, **more)
        plan = self._draft.plan(0)
        self._room = mmap.mmap(-1, plan.own_bytes)
        self._offsets = {entries[s.entry].held.name: s.offset for s in plan.own}
        self.size_bytes = sum(e.held.numel * e.item_bytes for e in entries)

    def tensor(self, name: str) -> Tensor:
        """Return the room for the tensor of an entry."""
        entry = self._draft.entries[self._draft.index[name]]
        dtype = getattr(torch, entry.dtype)
        flat = torch.frombuffer(self._room, dtype=dtype, count=entry.held.numel, offset=self._offsets[name])
        return flat.view(entry.held.shape)

    def commit(self, store: Store) -> Manifest:
        """Commit without random state: a run that continues from here has its own."""
        return write_whole(store, self._draft, [(memoryview(self._room), b"")])


IMAGE_BYTES = 1 << 30  # of a converted checkpoint, held in memory at a time
OnRows = Callable[[str, int, Tensor], None]


def write_streamed(
    store: Store,
    entries: list[Entry],
    job: dict[str, Any],
    fill: OnRows,
    progress: Callable[[int, int], None],
    image_bytes: int = IMAGE_BYTES,
) -> Manifest:
    """Write a checkpoint of any size one part at a time, as if it had been saved by enough ranks of a shard axis that
    each part fits in `image_bytes`. `fill(name, first, room)` puts rows of a tensor, from `first` on, into the room."""
    total, done = sum(e.held.numel * e.item_bytes for e in entries), 0
    layout = Layout(shard=max(1, -(-total // image_bytes)))
    draft = Manifest(checkpoint_name(0, secrets.token_hex(4)), 0, layout, entries, [], 0, job=job)

    def images() -> Iterator[tuple[memoryview, bytes]]:
        nonlocal done
        for rank in range(layout.shard):
            plan = Plan.of(entries, layout, layout.coord(rank))
            room = mmap.mmap(-1, max(plan.own_bytes, PAGE_BYTES))
            for s in plan.own:
                entry = entries[s.entry]
                dtype, count = getattr(torch, entry.dtype), s.size // entry.item_bytes
                rows = torch.frombuffer(room, dtype=dtype, count=count, offset=s.offset)
                fill(entry.held.name, s.r0, rows.view(s.r1 - s.r0, *entry.held.shape[1:]))
                done += s.size
                progress(done, total)
            rows = torch.empty(0)  # drops the view of the room, so that it can be freed
            yield memoryview(room)[: plan.own_bytes], b""

    return write_whole(store, draft, images())


def entry_of(kind: str, held: Held, dtype: str) -> Entry:
    return Entry(dataclasses.replace(held, name=f"{kind}/{held.name}"), dtype)


def config_of(reader: Reader) -> ModelConfig:
    model = reader.manifest.job.get("model")
    if not model:
        what = "its manifest does not say which model it holds"
        raise UserError(what, field="checkpoint", value=reader.name, remedy="convert one that a run has written")
    return ModelConfig(**model)


def read_rows(reader: Reader, name: str, first: int, last: int) -> Tensor:
    """Read rows [first, last) of a tensor, saved in any layout."""
    entry = reader.manifest.entries[reader.manifest.index[name]]
    held = entry.held
    room = np.empty((last - first, held.num_cols * held.inner * entry.item_bytes), np.uint8)
    reader.fill_blocks([(name, (first, last, 0, held.num_cols), room)])
    return torch.from_numpy(room).view(getattr(torch, entry.dtype)).view(last - first, *held.shape[1:])


def state_dict(path: str) -> dict[str, Tensor]:
    """Return the weights and buffers of a checkpoint, whole and on the host, by their names in the model's own
    module."""
    place, _, name = path.rstrip("/").rpartition("/")
    reader = Reader(open_store(place or "."), name)
    kinds = ("weights/", "buffers/")
    entries = [e.held for e in reader.manifest.entries if e.held.name.startswith(kinds)]
    return {h.name.partition("/")[2]: read_rows(reader, h.name, 0, h.num_rows).view(h.shape) for h in entries}


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder beside it, which is renamed to it when all its files are on the disk."""
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise _taken(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    near = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
    near.mkdir()
    try:
        yield near
        for path in near.iterdir():
            sync_folder(path)
        sync_folder(near)
        try:
            os.rename(near, folder)
        except OSError:
            if folder.exists():  # another process was faster
                raise _taken(folder) from None
            raise
    finally:
        shutil.rmtree(near, ignore_errors=True)
    sync_folder(folder.parent)


def _taken(folder: Path) -> UserError:
    what = "there is something already, which is never overwritten"
    return UserError(what, field="destination", value=str(folder), remedy="name another folder, or remove this one")
