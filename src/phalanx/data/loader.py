"""The loader: what the run serves at given places, as rows of items, out of verified chunks.

A chunk that stays corrupt is put into quarantine: its samples are replaced by those at the same place of the next
unit of the same extent that is good, each replacement is reported, and after a limit the run stops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.core.errors import UserError
from phalanx.core.manifest import Cut, Manifest
from phalanx.data.fetch import Chunk, Corrupt, Fetcher
from phalanx.data.order import Order, Stage, Stream, quotas

WINDOW = 128  # units of an extent that are shuffled into each other
AT_ONCE = 4096  # places that are located in one go: arithmetic on arrays is cheap for many and dear for few

Event = dict[str, Any]


class DataLost(Exception):
    """The run cannot go on with this data; says which shard and chunk, and both hashes."""


@dataclass(slots=True)
class Located:
    """Places of the run, and where their samples lie: chunk, and the item in it at which each begins."""

    places: np.ndarray
    extents: np.ndarray
    samples: np.ndarray
    chunks: list[Chunk]
    items: list[int]

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
    served: dict[str, int] = field(default_factory=dict)  # source -> samples

    def __post_init__(self) -> None:
        self.cuts = cuts_of(self.manifest, self.seq_len)
        self.width = self.cuts[0].span + self.manifest.overlap  # items in a row
        self._one_chunk = self.cuts[0].unit_chunks == 1  # of every sample
        self._bad: dict[tuple[int, int], int] = {}  # (extent, unit) -> the unit that stands in for it

    def rows(self, places: Iterable[int]) -> np.ndarray:
        """(n, seq_len + 1) ids, or (n, 1) records: the samples that the run serves at these places."""
        located = self.locate(places)
        out = np.empty((len(located), self.width), self.manifest.dtype)
        self.fill(located, out)
        return out

    def locate(self, places: Iterable[int]) -> Located:
        at = places if isinstance(places, np.ndarray) else np.fromiter(places, np.int64)
        extents, samples = self.order.locate(at)
        where = np.empty((3, len(at)), np.int64)
        for e in np.unique(extents):
            here = extents == e
            where[:, here] = self.cuts[e].place(self.manifest, samples[here])
        shards, chunks, items = where.tolist()
        return Located(at, extents, samples, list(zip(extents.tolist(), shards, chunks, strict=True)), items)

    def start(self, located: Located) -> None:
        """Begin to fetch what these will need."""
        if self._one_chunk:
            self.fetcher.start(located.chunks)
        else:
            for e, s in zip(located.extents.tolist(), located.samples.tolist(), strict=True):
                self.fetcher.start(self._chunks(e, s))

    def fill(self, located: Located, out: np.ndarray) -> None:
        """Copy the samples into the rows of `out`, waiting for what is not there yet."""
        self.start(located)
        get, width = self.fetcher.get, self.width
        for r, (chunk, item) in enumerate(zip(located.chunks, located.items, strict=True)):
            if self._one_chunk and not self._bad:
                try:
                    out[r] = get(chunk)[item : item + width]
                    continue
                except Corrupt:
                    pass
            self._fill(out[r], int(located.places[r]), int(located.extents[r]), int(located.samples[r]))
        for e, count in enumerate(np.bincount(located.extents, minlength=1).tolist()):
            source = self.manifest.extents[e].source
            self.served[source] = self.served.get(source, 0) + count

    def read(self, extent: int, sample: int) -> np.ndarray:
        """A sample of an extent, whatever the order. Raises Corrupt."""
        row = np.empty(self.width, self.manifest.dtype)
        self._copy(row, extent, sample)
        return row

    def _chunks(self, extent: int, sample: int) -> list[Chunk]:
        """Those in which a sample lies."""
        cut, m = self.cuts[extent], self.manifest
        unit, k = divmod(sample, cut.per_unit)
        first = unit * cut.unit_chunks + k * cut.span // m.chunk_items
        last = unit * cut.unit_chunks + ((k + 1) * cut.span - 1) // m.chunk_items
        return [(extent, *divmod(c, m.shard_chunks)) for c in range(first, last + 1)]

    def _copy(self, row: np.ndarray, extent: int, sample: int) -> None:
        cut, m = self.cuts[extent], self.manifest
        item = sample % cut.per_unit * cut.span % m.chunk_items
        filled = 0
        for chunk in self._chunks(extent, sample):
            part = self.fetcher.get(chunk)[item : item + len(row) - filled]
            row[filled : filled + len(part)] = part
            # A chunk ends with the first item of the next, which is then the next one's to give.
            filled, item = filled + len(part) - m.overlap, 0
        assert filled + m.overlap == len(row), (extent, sample)

    def _fill(self, row: np.ndarray, place: int, extent: int, sample: int) -> None:
        unit, k = divmod(sample, self.cuts[extent].per_unit)
        while True:
            used = self._bad.get((extent, unit), unit)
            try:
                self._copy(row, extent, used * self.cuts[extent].per_unit + k)
            except Corrupt as corrupt:
                self._quarantine(extent, unit, used, corrupt)
                continue
            if used != unit:
                instead = used * self.cuts[extent].per_unit + k
                self.on_event(
                    {"type": "data_substitute", "place": place, "extent": extent, "sample": sample, "used": instead}
                )
            return

    def _quarantine(self, extent: int, unit: int, used: int, corrupt: Corrupt) -> None:
        whole = self.cuts[extent].num_samples // self.cuts[extent].per_unit
        instead = (used + 1) % max(1, whole)
        self._bad[extent, used] = self._bad[extent, unit] = instead
        bad = len({u for (e, u) in self._bad if e == extent})
        event = {"type": "data_quarantine", **corrupt.facts, "extent": extent, "unit": used, "used": instead}
        self.on_event(event)
        if bad > self.quarantine_limit:
            why = f"more than {self.quarantine_limit} are bad (data.quarantine_limit)"
        elif whole < 2 or instead == unit:
            why = "none is good"
        else:
            return
        raise DataLost(f"{corrupt}; it cannot be replaced, because {why}")


def cuts_of(manifest: Manifest, seq_len: int) -> list[Cut]:
    try:
        cuts = [Cut.of(manifest, e, seq_len) for e in range(len(manifest.extents))]
    except ValueError as error:
        remedy = f"lower it to {manifest.shard_items} or less, or build the data with larger shards"
        raise UserError(str(error), field="train.seq_len", value=seq_len, remedy=remedy) from None
    for cut, extent in zip(cuts, manifest.extents, strict=True):
        if not cut.num_samples:
            raise UserError(
                f"source {extent.source} has {extent.items} tokens; one sample takes {seq_len + manifest.overlap}",
                field="train.seq_len",
                value=seq_len,
                remedy="name more text, or lower train.seq_len",
            )
    return cuts


def make_order(
    manifest: Manifest,
    seq_len: int,
    seed: int,
    groups: int,
    stages: Sequence[tuple[int, Mapping[str, float]]] = ((0, {}),),
    skips: Sequence[tuple[int, int]] = (),
    extents: Sequence[int] = (),
) -> Order:
    """The order of a run. A stage is a position and a weight per source; without weights, sources weigh as much as
    they hold. `extents`: how many extents of the manifest each stage knows, where it has grown since."""
    cuts = cuts_of(manifest, seq_len)
    streams = tuple(
        Stream(extent.source, cut.num_samples, cut.per_unit, WINDOW)
        for extent, cut in zip(manifest.extents, cuts, strict=True)
    )
    made = []
    for (start, weights), count in zip(stages, extents or [len(streams)] * len(stages), strict=True):
        made.append(Stage(start, _quotas(streams[:count], weights) + (0,) * (len(streams) - count)))
    return Order(seed, groups, streams, tuple(made), tuple(skips))


def _quotas(streams: Sequence[Stream], weights: Mapping[str, float]) -> tuple[int, ...]:
    """A source's weight goes to its extents by their size."""
    totals: dict[str, int] = {}
    for s in streams:
        totals[s.source] = totals.get(s.source, 0) + s.num_samples
    unknown = sorted(set(weights) - set(totals))
    if unknown:
        known = ", ".join(totals)
        raise UserError("there is no such source", field="data.stages", value=unknown[0], remedy=f"it has {known}")
    shares = weights or {source: float(size) for source, size in totals.items()}
    try:
        return quotas([shares.get(s.source, 0.0) * s.num_samples / totals[s.source] for s in streams])
    except ValueError as error:
        remedy = "give it a larger weight, or 0"
        raise UserError(str(error), field="data.stages", value=dict(weights), remedy=remedy) from None
