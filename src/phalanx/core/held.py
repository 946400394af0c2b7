"""Which rank holds what: for every tensor of the state its whole shape and how the axes cut it. The pipeline gives it
to one stage; then tensor parallelism cuts one dim, or expert parallelism the experts; then the shard axis cuts the rows
of what is left. A slice that several ranks hold is cut once more, by rows, into the pieces that each of them writes
when the state is saved. This is pure arithmetic from the layout, so nothing has to be gathered to know it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.core.layout import Coord, Layout
from phalanx.core.shape import chunk_bounds, even_bounds

CODEC_BLOCK = 1024  # values of a gradient that share one scale when it travels in 8 bits


def travels_whole(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter's gradient is never compressed: that of vectors, and of the routers of experts. They
    are few, and an error in them affects every token."""
    return len(shape) < 2 or name.endswith("gate.weight")


@dataclass(frozen=True, slots=True)
class Held:
    name: str
    shape: tuple[int, ...]  # of the whole tensor
    tp_dim: int | None = None  # None: every TP rank holds it whole
    stage: int = 0  # of the pipeline
    experts: int = 0  # how many experts' rows these are, one after the other; 0: none's
    whole: bool = False  # whole on every rank of its stage

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def num_cols(self) -> int:
        return self.shape[1] if len(self.shape) > 1 else 1

    @property
    def inner(self) -> int:
        """Return the elements of one row and column."""
        return math.prod(self.shape[2:])

    def held_by(self, layout: Layout, coord: Coord) -> bool:
        return self.stage in layout.stages_of(coord.pp)

    # -- the slice of a rank

    def split_bounds(self, layout: Layout, part: int) -> tuple[int, int, int, int]:
        """Return the rows and columns that TP rank `part`, or EP rank `part`, has left to be sharded."""
        bounds = [(0, self.num_rows), (0, self.num_cols)]
        if self.experts:
            first, last = even_bounds(self.experts, layout.ep, part)
            rows = self.shape[0] // self.experts
            bounds[0] = (first * rows, last * rows)
        elif self.tp_dim is not None:
            bounds[self.tp_dim] = even_bounds(self.shape[self.tp_dim], layout.tp, part)
        return *bounds[0], *bounds[1]

    def _cuts(self, layout: Layout) -> tuple[int, int]:
        """Return the number of parts of the split, and of the sharding of each."""
        if self.whole:
            return 1, 1
        if self.experts:
            return layout.ep, layout.stage_size // layout.ep
        return (1 if self.tp_dim is None else layout.tp), layout.shard * layout.cp

    def bounds(self, layout: Layout, coord: Coord) -> tuple[int, int, int, int]:
        """Return first and last row, first and last column of a rank's slice, which the model calls local."""
        inside = layout.in_stage(coord)
        parts = self._cuts(layout)[1]
        if self.whole:
            split, part = 0, 0
        elif self.experts:
            split, part = inside % layout.ep, inside // layout.ep
        else:
            split, part = coord.tp, inside // layout.tp
        r0, r1, c0, c1 = self.split_bounds(layout, split)
        start, stop = chunk_bounds(r1 - r0, parts, part)
        return r0 + start, r0 + stop, c0, c1

    def local_slice(self, layout: Layout, coord: Coord) -> tuple[slice, slice]:
        r0, r1, c0, c1 = self.bounds(layout, coord)
        return slice(r0, r1), slice(c0, c1)

    def local_shape(self, layout: Layout, coord: Coord) -> tuple[int, ...]:
        r0, r1, c0, c1 = self.bounds(layout, coord)
        return (r1 - r0, c1 - c0, *self.shape[2:])[: len(self.shape)]

    # -- the rows of it that this rank writes

    def _copies(self, layout: Layout) -> int:
        """Return the number of ranks that hold the same slice."""
        if self.whole:
            return layout.replica * layout.stage_size
        return layout.replica * (layout.tp if self.tp_dim is None and not self.experts else 1)

    def own_rows(self, layout: Layout, coord: Coord, turn: int) -> tuple[int, int]:
        """Return [first, last) of the rows that this rank writes. `turn` differs between tensors, so that the ranks
        take turns at the rows that do not divide."""
        copies = self._copies(layout)
        if self.whole:
            copy = coord.replica * layout.stage_size + layout.in_stage(coord)
        else:
            copy = coord.replica if copies == layout.replica else coord.replica * layout.tp + coord.tp
        r0, r1, _, _ = self.bounds(layout, coord)
        start, stop = even_bounds(r1 - r0, copies, (copy + turn) % copies)
        return r0 + start, r0 + stop

    def writers(self, layout: Layout, turn: int, rows: tuple[int, int]) -> Iterator[int]:
        """Yield the ranks whose pieces have some of these rows, without asking the others."""
        base = layout.rank_of_stage(self.stage) * layout.stage_size
        splits, parts = self._cuts(layout)
        copies = self._copies(layout)
        for split in range(splits):
            first, last, _, _ = self.split_bounds(layout, split)
            step = max(1, -(-(last - first) // parts))
            low, high = max(rows[0], first) - first, min(rows[1], last) - first
            if low >= high:
                continue
            for part in range(low // step, (high - 1) // step + 1):
                start, stop = chunk_bounds(last - first, parts, part)
                size, lo, hi = stop - start, max(low - start, 0), min(high, stop) - start
                for piece in range(lo * copies // size, min(copies, hi * copies // size + 1)):
                    a, b = even_bounds(size, copies, piece)
                    if a < hi and b > lo and a < b:
                        copy = (piece - turn) % copies
                        yield base + self._rank_of(layout, split, part, copy)

    def _rank_of(self, layout: Layout, split: int, part: int, copy: int) -> int:
        if self.whole:
            replica, inside = divmod(copy, layout.stage_size)
        elif self.experts:
            replica, inside = copy, part * layout.ep + split
        elif self.tp_dim is None:
            replica, tp = divmod(copy, layout.tp)
            inside = part * layout.tp + tp
        else:
            replica, inside = copy, part * layout.tp + split
        return replica * layout.replica_size + inside
