"""The data of one run: which data set, which version, which order. Fixed before the ranks start and kept in the run's
record, from which alone every sample of the run can be found again."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.store import Store, open_store
from phalanx.data.address import open_set
from phalanx.data.cache import Cache
from phalanx.data.fetch import Fetcher, read_manifest
from phalanx.data.loader import Event, Loader, make_order
from phalanx.data.order import Order
from phalanx.data.samples import Samples, unpack

FILE = "data.json"
POOL_BYTES = 2 << 30  # of chunks in memory, at most


@dataclass(frozen=True)
class RunData:
    url: str
    version: str
    order: dict[str, Any]
    seq_len: int
    global_batch: int
    micro_batch: int
    max_id: int | None
    buffer_steps: int
    cache_dir: str
    cache_gb: float
    quarantine_limit: int

    @staticmethod
    def plan(job: Job, url: str) -> RunData:
        """Of a job that reads the data set at `url`. UserError if they do not fit together."""
        d, store = job.data, open_set(url, "data.source")
        manifest, version = read_manifest(store, d.version)
        reads = {"dense": "tokens", "moe": "tokens", "image": "records"}.get(job.model.family)
        if reads and (reads == "tokens") != manifest.is_tokens:
            what = "a stream of tokens" if manifest.is_tokens else f"records of {[f.name for f in manifest.fields]}"
            remedy = "choose a model.family that reads it, or other data"
            raise UserError(f"it holds {what}", field="data.source", value=url, remedy=remedy)
        if manifest.vocab_size > job.model.vocab_size:
            raise UserError(
                f"{manifest.tokenizer} tokens need a vocabulary of {manifest.vocab_size}",
                field="model.vocab_size",
                value=job.model.vocab_size,
                remedy=f"set model.vocab_size to at least {manifest.vocab_size}",
            )
        default: dict[str, Any] = {"at": 0, "weights": {}}
        stages, known = [], []
        for number, stage in enumerate(d.stages or [default]):
            stages.append((stage["at"], stage["weights"]))
            given, field = stage.get("version"), f"data.stages.{number}.version"
            seen = read_manifest(store, given, version_field=field)[0] if given else manifest
            if not manifest.extends(seen):
                remedy = "name a version that this one was made from by `phalanx data build --append`"
                raise UserError(f"version {version[:16]} does not extend it", field=field, value=given, remedy=remedy)
            known.append(len(seen.extents))
        nodes = -(-job.layout.world_size // (job.layout.ranks_per_node or job.layout.world_size))
        groups = d.groups or max(8, 1 << (nodes - 1).bit_length())
        order = make_order(manifest, job.train.seq_len, job.seed, groups, stages, [(a, b) for a, b in d.skips], known)
        return RunData(
            url=store.url,
            version=version,
            order=order.to_dict(),
            seq_len=job.train.seq_len,
            global_batch=job.train.global_batch,
            micro_batch=job.train.micro_batch,
            max_id=job.model.vocab_size if manifest.is_tokens else None,
            buffer_steps=d.buffer_steps,
            cache_dir=d.cache_dir,
            cache_gb=d.cache_gb,
            quarantine_limit=d.quarantine_limit,
        )

    def write(self, run_dir: Path) -> None:
        (run_dir / FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @staticmethod
    def read(run_dir: Path) -> RunData:
        return RunData(**json.loads((run_dir / FILE).read_bytes()))

    def open(self, on_event: Callable[[Event], None] = lambda event: None) -> Loader:
        store = open_store(self.url)
        manifest, _ = read_manifest(store, self.version)
        order = Order.from_dict(self.order)
        fetcher = Fetcher(store, manifest, cache=self._cache(store), max_id=self.max_id)
        loader = Loader(manifest, order, self.seq_len, fetcher, self.quarantine_limit, on_event)
        chunk_bytes = manifest.chunk_items * manifest.dtype.itemsize * loader.cuts[0].unit_chunks
        windows = order.groups * sum(s.window for s in order.streams)
        fetcher.pool_bytes = min(POOL_BYTES, max(64 << 20, int(1.25 * windows * chunk_bytes)))
        return loader

    def _cache(self, store: Store) -> Cache | None:
        if store.is_local or not self.cache_gb:
            return None
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return Cache(Path(self.cache_dir) if self.cache_dir else home / "phalanx" / "chunks", int(self.cache_gb * 1e9))

    def places(self, step: int) -> range:
        """What the run serves in a step."""
        return range(step * self.global_batch, (step + 1) * self.global_batch)


def first_samples(loader: Loader, count: int) -> Samples:
    total = sum(s.num_samples for s in loader.order.streams)
    return unpack(loader.rows(range(min(count, total))), loader.manifest.eos)


def unigram_entropy(loader: Loader, count: int) -> float:
    """In nats: the loss of a model that knows only how frequent each target is among the first samples."""
    targets = first_samples(loader, count).targets_BL
    counts = np.unique(targets, return_counts=True)[1] / targets.size
    return float(-(counts * np.log(counts)).sum())
