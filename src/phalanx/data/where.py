"""Finds which sample a run served where, and what it held, by arithmetic from the run's record alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.data.loader import Loader


@dataclass(frozen=True, slots=True)
class Found:
    place: int  # among the samples served; `position`: in the order, skips included
    position: int
    source: str
    shard: str
    chunk: int
    offset: int  # of the sample's first item in the shard
    replaces: int | None  # the sample that it replaces, whose chunk was corrupt
    sample: int
    row: np.ndarray


def where(loader: Loader, places: Iterable[int], events: Iterable[dict[str, Any]] = ()) -> Iterator[Found]:
    """Find the samples of these places. `events`: those of the run, which include replaced samples."""
    instead = {e["place"]: (e["extent"], e["used"]) for e in events if e.get("type") == "data_substitute"}
    places = list(places)
    extents, samples = loader.order.locate(np.array(places, np.int64))
    for place, extent, planned in zip(places, extents.tolist(), samples.tolist(), strict=True):
        used = instead.get(place, (extent, planned))
        shard, chunk, item = (int(x) for x in loader.cuts[extent].place(loader.manifest, np.int64(used[1])))
        yield Found(
            place=place,
            position=int(loader.order.position(place)),
            source=loader.manifest.extents[extent].source,
            shard=loader.manifest.shard_name(extent, shard),
            chunk=chunk,
            offset=chunk * loader.manifest.chunk_items + item,
            replaces=planned if place in instead else None,
            sample=used[1],
            row=loader.read(extent, used[1]),
        )
