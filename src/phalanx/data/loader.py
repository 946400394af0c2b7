"""The loader returns the samples that the run serves at given places, as rows of items from verified chunks.

A chunk that stays corrupt is quarantined. A sample in it is replaced by the one at the same place of the next good unit
of the same extent. Each replacement is reported, and beyond a limit of bad chunks the run stops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.core.errors import UserError
from phalanx.core.manifest import Cut, Manifest
from phalanx.data.fetch import Chunk, Corrupt, Fetcher
from phalanx.data.order import MAX_BLOCK, Order, Stage, Stream, quotas

WINDOW = 64  # units of an extent that are shuffled together
AT_ONCE = 8192  # places located in one go: array arithmetic is cheap for many and expensive for few

Event = dict[str, Any]
# A chunk, the rows that lie in it, the index of each row's sample, and whether they are all its samples, each once.
Group = tuple[Chunk, np.ndarray, np.ndarray, bool]


class DataLost(Exception):
    """The run cannot continue with this data. The message names the shard and the chunk, and both hashes."""


@dataclass(slots=True)
class Located:
    """Places of the run, and the samples that are served there."""

    places: np.ndarray
    extents: np.ndarray
    samples: np.ndarray

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, part: slice) -> Located:
        return Located(*(getattr(self, name)[part] for name in self.__slots__))


@dataclass
class Loader:
    manifest: Manifest
    order: Order
    seq_len: int
    fetcher: Fetcher
    quarantine_limit: int = 8
    on_event: Callable[[Event], None] = lambda event: None

    def __post_init__(self) -> None:
        self.cuts = cuts_of(self.manifest, self.seq_len)
        self.width = self.cuts[0].span + self.manifest.overlap  # items in a row
        self._one_chunk = self.cuts[0].unit_chunks == 1  # for every sample
        self._bad: dict[Chunk, Corrupt] = {}  # quarantined
        # The threads that copy also read a local disk, so there are several; a remote store has threads of its own.
        self._num_helpers = self.fetcher.num_threads - 1 if self.fetcher.store.is_local else 0
        self._helpers = ThreadPoolExecutor(max(1, self._num_helpers), "phalanx-copy")
        self._thread = threading.local()
        # Freeing this makes malloc keep the memory that `locate` frees, which would otherwise be faulted in each time.
        np.empty(4 << 20, np.uint8)

    def close(self) -> None:
        """Close the loader and its fetcher."""
        self._helpers.shutdown(wait=False)
        self.fetcher.close()

    def rows(self, places: Iterable[int]) -> np.ndarray:
        """Return the samples that the run serves at these places: (n, seq_len + 1) ids, or (n, 1) records."""
        located = self.locate(places)
        out = np.empty((len(located), self.width), self.manifest.dtype)
        self.fill(located, out)
        return out

    def locate(self, places: Iterable[int]) -> Located:
        at = places if isinstance(places, np.ndarray) else np.fromiter(places, np.int64)
        return Located(at, *self.order.locate(at))

    def start(self, located: Located) -> None:
        """Begin to fetch the chunks that these samples need."""
        if self._one_chunk:
            self.fetcher.start(chunk for chunk, *_ in self._by_chunk(located) if chunk not in self._bad)
        else:
            for e, s in zip(located.extents.tolist(), located.samples.tolist(), strict=True):
                self.fetcher.start(chunk for chunk in self._chunks(e, s) if chunk not in self._bad)

    def fill(self, located: Located, out: np.ndarray) -> None:
        """Copy the samples into the rows of `out`, waiting for chunks that have not arrived. Large requests are faster:
        a chunk whose samples are all wanted is copied while it is in the processor's cache, and not kept."""
        left: list[int] = []  # rows that need more than a copy
        if self._one_chunk:
            groups = self._by_chunk(located)
            if not self.fetcher.store.is_local:
                self.fetcher.start(chunk for chunk, *_ in groups if chunk not in self._bad)
            todo = iter(groups)
            helpers = self._num_helpers if len(groups) > 8 else 0
            helped = [self._helpers.submit(self._copy_rows, todo, out, left) for _ in range(helpers)]
            try:
                self._copy_rows(todo, out, left)
            finally:
                wait(helped)
            for future in helped:
                future.result()
        else:
            self.start(located)
            left = list(range(len(located)))
        for r in sorted(left):
            self._fill(out[r], int(located.places[r]), int(located.extents[r]), int(located.samples[r]))

    def _by_chunk(self, located: Located) -> list[Group]:
        """Group the rows by chunk, in the order of the chunks' first use."""
        if not len(located):
            return []
        per_unit, n = self.cuts[0].per_unit, len(located)
        by = np.argsort((located.extents << 44) | located.samples)
        extents, samples = located.extents[by], located.samples[by]
        units = samples // per_unit
        inside = samples - units * per_unit
        first = np.flatnonzero((np.diff(units, prepend=-1) != 0) | (np.diff(extents, prepend=-1) != 0))
        end = np.append(first[1:], n)
        use = np.argsort(np.minimum.reduceat(by, first))
        shards = units[first] // self.manifest.shard_chunks
        chunks = units[first] - shards * self.manifest.shard_chunks
        once = np.logical_and.reduceat(inside == np.arange(n) - np.repeat(first, end - first), first)
        whole = once & (end - first == per_unit)
        ids = zip(*(a[use].tolist() for a in (extents[first], shards, chunks, first, end, whole)), strict=True)
        return [((e, s, c), by[a:b], inside[a:b], w) for e, s, c, a, b, w in ids]

    def _copy_rows(self, todo: Iterator[Group], out: np.ndarray, left: list[int]) -> None:
        """Copy the rows of chunks from `todo`, which several threads share."""
        cut, width, scratch = self.cuts[0], self.width, self._scratch()
        samples = np.ndarray((cut.per_unit, width), out.dtype, scratch, 0, (cut.span * out.itemsize, out.itemsize))
        read = self.fetcher.reader(scratch)
        for chunk, rows, inside, whole in todo:
            if chunk in self._bad:
                left += rows.tolist()
                continue
            # A chunk whose samples are all wanted goes through the processor's cache, and is not kept.
            if whole and read(chunk):
                out[rows] = samples
                continue
            try:
                items = self.fetcher.get(chunk)
            except Corrupt:
                left += rows.tolist()
            else:
                for row, k in zip(rows.tolist(), (inside * cut.span).tolist(), strict=True):
                    out[row] = items[k : k + width]

    def _scratch(self) -> np.ndarray:
        """Return this thread's own buffer for a chunk."""
        if not hasattr(self._thread, "scratch"):
            self._thread.scratch = np.empty(self.manifest.chunk_items + self.manifest.overlap, self.manifest.dtype)
        return self._thread.scratch

    def read(self, extent: int, sample: int) -> np.ndarray:
        """Read a sample of an extent, outside any order. Raises Corrupt."""
        row = np.empty(self.width, self.manifest.dtype)
        self._copy(row, extent, sample, self.fetcher.get)
        return row

    def _chunks(self, extent: int, sample: int) -> list[Chunk]:
        """List the chunks in which a sample lies."""
        cut, m = self.cuts[extent], self.manifest
        unit, k = divmod(sample, cut.per_unit)
        first = unit * cut.unit_chunks + k * cut.span // m.chunk_items
        last = unit * cut.unit_chunks + ((k + 1) * cut.span - 1) // m.chunk_items
        return [(extent, *divmod(c, m.shard_chunks)) for c in range(first, last + 1)]

    def _copy(self, row: np.ndarray, extent: int, sample: int, get: Callable[[Chunk], np.ndarray]) -> None:
        cut, m = self.cuts[extent], self.manifest
        item = sample % cut.per_unit * cut.span % m.chunk_items
        filled = 0
        for chunk in self._chunks(extent, sample):
            part = get(chunk)[item : item + len(row) - filled]
            row[filled : filled + len(part)] = part
            # A chunk ends with the first item of the next chunk, which then writes that item itself.
            filled, item = filled + len(part) - m.overlap, 0
        assert filled + m.overlap == len(row), (extent, sample)

    def _fill(self, row: np.ndarray, place: int, extent: int, sample: int) -> None:
        for used in self._candidates(extent, sample):
            chunks = self._chunks(extent, used)
            if not self._bad.keys().isdisjoint(chunks):
                continue
            try:
                self._copy(row, extent, used, self._get)
            except Corrupt:
                continue
            if used != sample:
                self.on_event(
                    {"type": "data_substitute", "place": place, "extent": extent, "sample": sample, "used": used}
                )
            return
        first = next(self._bad[c] for c in self._chunks(extent, sample) if c in self._bad)
        raise DataLost(f"{first}; it cannot be replaced, because no other of its source is good")

    def _candidates(self, extent: int, sample: int) -> Iterator[int]:
        """Yield the sample, then those that may replace it. The choice depends only on what is bad, not on what was
        read before, so it is the same on every node."""
        yield sample
        per_unit = self.cuts[extent].per_unit
        unit, k = divmod(sample, per_unit)
        whole = self.cuts[extent].num_samples // per_unit  # the last unit may be short, and lack this place
        for other in (*range(unit + 1, whole), *range(min(unit, whole))):
            yield other * per_unit + k

    def _get(self, chunk: Chunk) -> np.ndarray:
        try:
            return self.fetcher.get(chunk)
        except Corrupt as corrupt:
            self._bad[chunk] = corrupt
            self.on_event({"type": "data_quarantine", **corrupt.facts, "extent": chunk[0], "chunk": chunk[2]})
            if len(self._bad) > self.quarantine_limit:
                why = f"more than {self.quarantine_limit} are bad (data.quarantine_limit)"
                raise DataLost(f"{corrupt}; it is not replaced, because {why}") from None
            raise


def cuts_of(manifest: Manifest, seq_len: int) -> list[Cut]:
    try:
        cuts = [Cut.of(manifest, e, seq_len) for e in range(len(manifest.extents))]
    except ValueError as error:
        remedy = f"lower it to {manifest.shard_items} or less, or build the data with larger shards"
        raise UserError(str(error), field="train.seq_len", value=seq_len, remedy=remedy) from None
    if not any(cut.num_samples for cut in cuts):
        most = max(manifest.extents, key=lambda extent: extent.items)
        raise UserError(
            f"source {most.source} has {most.items} tokens; one sample takes {seq_len + manifest.overlap}",
            field="train.seq_len",
            value=seq_len,
            remedy="name more text, or lower it",
        )
    return cuts


def held_out(num_samples: int, share: float) -> int:
    """Return how many samples at the end of an extent are not trained on."""
    return int(num_samples * share)


def make_order(
    manifest: Manifest,
    seq_len: int,
    seed: int,
    groups: int,
    stages: Sequence[tuple[int, Mapping[str, float]]] = ((0, {}),),
    skips: Sequence[tuple[int, int]] = (),
    extents: Sequence[int] = (),
    share: float = 0.0,
) -> Order:
    """Make the order of a run. A stage is a position and a weight per source; without weights, sources count by their
    size. An extent without a sample, or worth less than half a draw of the largest block, is not served. `extents`: how
    many extents of the manifest each stage knows, if it has grown since. `share`: the fraction of each extent that is
    held out."""
    cuts = cuts_of(manifest, seq_len)
    streams = tuple(
        Stream(extent.source, cut.num_samples - held_out(cut.num_samples, share), cut.per_unit, WINDOW)
        for extent, cut in zip(manifest.extents, cuts, strict=True)
    )
    made = []
    for (start, weights), count in zip(stages, extents or [len(streams)] * len(stages), strict=True):
        made.append(Stage(start, _quotas(streams[:count], weights) + (0,) * (len(streams) - count)))
    return Order(seed, groups, streams, tuple(made), tuple(skips))


def _quotas(streams: Sequence[Stream], weights: Mapping[str, float]) -> tuple[int, ...]:
    """Return a stage's quotas. Each source's weight is split among its extents by their size."""
    totals: dict[str, int] = {}
    for s in streams:
        totals[s.source] = totals.get(s.source, 0) + s.num_samples
    unknown = sorted(set(weights) - set(totals))
    if unknown:
        known = ", ".join(totals)
        raise UserError("there is no such source", field="data.stages", value=unknown[0], remedy=f"it has {known}")
    shares = weights or {source: float(size) for source, size in totals.items()}
    empty = [source for source, share in shares.items() if share and not totals[source]]
    if weights and empty:
        message = "it holds less than one sample"
        remedy = f"give {empty[0]} the weight 0, add to it, or lower train.seq_len"
        raise UserError(message, field="data.stages", value=empty[0], remedy=remedy)
    try:
        made = list(quotas([shares.get(s.source, 0.0) * s.num_samples / (totals[s.source] or 1) for s in streams]))
    except ValueError as error:
        remedy = "give at least one source more than 0"
        raise UserError(str(error), field="data.stages", value=dict(weights), remedy=remedy) from None
    total, block = sum(shares.values()), sum(made)
    for source, share in shares.items():
        mine = [i for i, s in enumerate(streams) if s.source == source]
        if not share or any(made[i] for i in mine):
            continue
        if 2 * block * share >= total:  # the largest of many small extents stands for all
            made[made.index(max(made))] -= 1
            made[max(mine, key=lambda i: streams[i].num_samples)] = 1
        elif weights:
            message = f"a weight of {share / total:.1e} of all is too small: a block has {MAX_BLOCK} draws"
            raise UserError(message, field="data.stages", value=source, remedy="give it a larger weight, or 0")
    return tuple(made)


def unserved(manifest: Manifest, order: Order, stages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line for each extent that is too small to be served. `stages` are those of the job."""
    for number, (extent, stream) in enumerate(zip(manifest.extents, order.streams, strict=True)):
        asked = [
            made.quotas[number]
            for stage, made in zip(reversed(stages or [{}]), reversed(order.stages), strict=False)
            if not stage.get("version") and (stage.get("weights") or {extent.source: 1.0}).get(extent.source)
        ]
        if asked and not any(asked):
            few = "less than one sample" if not stream.num_samples else "too small a share to be drawn"
            yield f"not served: extent {number} ({extent.source}), which holds {extent.items:,} items, {few}"
