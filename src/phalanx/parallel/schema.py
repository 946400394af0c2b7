"""Who holds what: for every parameter its full shape and how the axes cut it. First tensor
parallelism cuts one dim, then the shard axis cuts the rows of what is left. Pure arithmetic from the
layout, so nothing has to be gathered to know it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.core.layout import Coord, Layout
from phalanx.core.shape import ModelConfig, chunk_bounds, even_bounds
from phalanx.model.family import Family
from phalanx.parallel.tensor import SPLIT_DIM


@dataclass(frozen=True, slots=True)
class ParamInfo:
    name: str
    shape: torch.Size  # of the whole parameter
    tp_dim: int | None  # None: every TP rank holds it whole, and its gradient is summed over them

    def tp_slice(self, layout: Layout, coord: Coord) -> tuple[slice, slice]:
        """Rows and columns that this TP rank holds (columns of a 1-D parameter: everything)."""
        bounds = [(0, size) for size in (*self.shape, 0, 0)[:2]]
        if self.tp_dim is not None:
            bounds[self.tp_dim] = even_bounds(self.shape[self.tp_dim], layout.tp, coord.tp)
        return slice(*bounds[0]), slice(*bounds[1])

    def local_slice(self, layout: Layout, coord: Coord) -> tuple[slice, slice]:
        rows, cols = self.tp_slice(layout, coord)
        start, stop = chunk_bounds(rows.stop - rows.start, layout.shard, coord.shard)
        return slice(rows.start + start, rows.start + stop), cols

    def local_shape(self, layout: Layout, coord: Coord) -> torch.Size:
        rows, cols = self.local_slice(layout, coord)
        sizes = [rows.stop - rows.start, cols.stop - cols.start, *self.shape[2:]]
        return torch.Size(sizes[: len(self.shape)])


def describe(family: Family, config: ModelConfig) -> list[ParamInfo]:
    """Every parameter of the model, tied ones once, in the module's order."""
    with torch.device("meta"):
        model = family.build(config)
    infos = []
    modules = dict(model.named_modules())
    for name, param in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        style = family.style_of(owner)
        split = SPLIT_DIM.get(style or "")
        if style == "row" and leaf == "bias":
            split = None
        assert owner in modules
        infos.append(ParamInfo(name, param.shape, split))
    return infos
