"""The data of one run: its data set, version and order. They are fixed before the ranks start and kept in the run's
record, which suffices to find every sample of the run again."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.core import document
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.manifest import Manifest
from phalanx.core.store import Store, open_store
from phalanx.data.address import open_set
from phalanx.data.cache import Cache
from phalanx.data.fetch import Fetcher, read_manifest
from phalanx.data.loader import Event, Loader, make_order
from phalanx.data.order import Order, continued
from phalanx.data.samples import Samples, unpack

FILE = "data.json"
FORMAT = 1
GROUPS = 8  # for any number of nodes: the order must not depend on it
POOL_BYTES = 2 << 30  # limit for chunks in memory


@dataclass(frozen=True)
class Position:
    """The position that an earlier run had reached, from its checkpoint."""

    step: int
    cursor: int  # number of samples served
    order: dict[str, Any]  # in which they were served; empty if unknown
    data_version: str
    seq_len: int

    def check(self, job: Job) -> None:
        """Refuse changes that an order does not allow: they could repeat served samples and skip others."""
        try:
            order = Order.from_dict(self.order)
        except (ValueError, KeyError, TypeError) as error:
            remedy = "use the version of Phalanx that wrote it, or a newer one"
            raise UserError(f"the checkpoint's order cannot be read: {error}", remedy=remedy) from None
        fixed = {
            "seed": (job.seed, order.seed),
            "train.seq_len": (job.train.seq_len, self.seq_len),
            "data.groups": (job.data.groups or order.groups, order.groups),
        }
        for field, (here, there) in fixed.items():
            if here != there:
                raise UserError(
                    f"the checkpoint's data was served with {there!r}, and its order continues",
                    field=field,
                    value=here,
                    remedy=f"set {field} = {there!r}, or begin anew from its weights (`phalanx checkpoint convert`)",
                )


def _check_extends(store: Store, manifest: Manifest, version: str, served: str, job: Job) -> None:
    """Check that the data set still contains the version that was served so far."""
    try:
        before = read_manifest(store, served)[0]
    except UserError:
        before = None
    if before is None or not manifest.extends(before):
        field, value = ("data.version", job.data.version) if job.data.version else ("data.source", job.data.source)
        raise UserError(
            f"its version {version[:16]} does not contain what the checkpoint was trained on, version {served[:16]}",
            field=field,
            value=value,
            remedy="name the data of the checkpoint (text: with its data.max_mb), or a version that `phalanx data "
            "build --append` made from it",
        )


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
    first_step: int = 0  # where the run began
    first_place: int = 0  # number of samples served before it

    @staticmethod
    def plan(job: Job, url: str, position: Position | None = None) -> RunData:
        """Plan for a job that reads the data set at `url`, from the position of an earlier run on. Raise UserError if
        they do not fit together."""
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
        groups = d.groups or GROUPS
        if position and position.order:
            position.check(job)
            groups = int(position.order["groups"])
            if position.data_version != version:
                _check_extends(store, manifest, version, position.data_version, job)
        skips, share = [(a, b) for a, b in d.skips], job.validation.held_out
        order = make_order(manifest, job.train.seq_len, job.seed, groups, stages, skips, known, share)
        if position and position.order:
            served = Order.from_dict(position.order)
            if order.streams[: len(served.streams)] != served.streams:
                raise UserError(
                    "the checkpoint's data was served with another share held out",
                    field="validation.held_out",
                    value=share,
                    remedy="set it to that of the checkpoint's job (`phalanx checkpoint show`), or name "
                    "validation.sources instead",
                )
            order = continued(served, position.cursor, order)
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
            first_step=position.step if position else 0,
            first_place=position.cursor if position else 0,
        )

    def write(self, run_dir: Path) -> None:
        (run_dir / FILE).write_text(json.dumps({"format": FORMAT} | dataclasses.asdict(self), indent=2) + "\n")

    @staticmethod
    def read(run_dir: Path) -> RunData:
        """Raise UserError if a newer version wrote it."""
        body = json.loads((run_dir / FILE).read_bytes())
        document.check_version({"format": FORMAT, **body}, FORMAT, str(run_dir / FILE))
        return document.make(RunData, body)

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

    def cursor(self, step: Any) -> Any:
        """Return the number of samples served before a step, or before each step of an array."""
        return self.first_place + (step - self.first_step) * self.global_batch

    def places(self, step: int) -> range:
        """Return the samples that the run serves in a step, as positions in its order."""
        return range(self.cursor(step), self.cursor(step + 1))


def first_samples(loader: Loader, count: int) -> Samples:
    total = sum(s.num_samples for s in loader.order.streams)
    return unpack(loader.rows(range(min(count, total))), loader.manifest.eos)


def unigram_entropy(loader: Loader, count: int) -> float:
    """Return the loss, in nats, of a model that knows only the frequency of each target among the first samples."""
    targets = first_samples(loader, count).targets_BL
    counts = np.unique(targets, return_counts=True)[1] / targets.size
    return float(-(counts * np.log(counts)).sum())
