"""Who holds what: for every parameter its full shape and how the axes cut it. The pipeline gives it to
one stage; then tensor parallelism cuts one dim, or expert parallelism the experts; then the shard axis
cuts the rows of what is left. Pure arithmetic from the layout, so nothing has to be gathered to know it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.core.layout import Coord, Layout
from phalanx.core.shape import ModelConfig, chunk_bounds, even_bounds
from phalanx.model.family import Family
from phalanx.parallel.stages import cut_stages, stage_of
from phalanx.parallel.tensor import SPLIT_DIM


@dataclass(frozen=True, slots=True)
class ParamInfo:
    name: str
    shape: torch.Size  # of the whole parameter
    tp_dim: int | None  # None: every TP rank holds it whole, and its gradient is summed over them
    stage: int = 0  # of the pipeline
    experts: int = 0  # whose rows these are, one after the other; 0: not an expert parameter

    def held_by(self, layout: Layout, coord: Coord) -> bool:
        return self.stage in layout.stages_of(coord.pp)

    def split_slice(self, layout: Layout, coord: Coord) -> tuple[slice, slice]:
        """Rows and columns that are left to be sharded (columns of a 1-D parameter: everything)."""
        bounds = [(0, size) for size in (*self.shape, 0, 0)[:2]]
        if self.experts:
            first, last = even_bounds(self.experts, layout.ep, layout.in_stage(coord) % layout.ep)
            rows = self.shape[0] // self.experts
            bounds[0] = (first * rows, last * rows)
        elif self.tp_dim is not None:
            bounds[self.tp_dim] = even_bounds(self.shape[self.tp_dim], layout.tp, coord.tp)
        return slice(*bounds[0]), slice(*bounds[1])

    def local_slice(self, layout: Layout, coord: Coord) -> tuple[slice, slice]:
        rows, cols = self.split_slice(layout, coord)
        parts, part = layout.shard * layout.cp, coord.shard * layout.cp + coord.cp
        if self.experts:
            parts, part = layout.stage_size // layout.ep, layout.in_stage(coord) // layout.ep
        start, stop = chunk_bounds(rows.stop - rows.start, parts, part)
        return slice(rows.start + start, rows.start + stop), cols

    def local_shape(self, layout: Layout, coord: Coord) -> torch.Size:
        rows, cols = self.local_slice(layout, coord)
        sizes = [rows.stop - rows.start, cols.stop - cols.start, *self.shape[2:]]
        return torch.Size(sizes[: len(self.shape)])


def describe(family: Family, config: ModelConfig, layout: Layout | None = None) -> list[ParamInfo]:
    """Every parameter of the model, tied ones once, in the module's order."""
    with torch.device("meta"):
        model = family.build(config)
    stages = cut_stages(family, model, config, layout or Layout())
    infos = []
    for name, param in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        style = family.style_of(owner)
        split = SPLIT_DIM.get(style or "")
        if style in ("row", "input") and leaf == "bias":
            split = None
        experts = config.num_experts if family.is_expert(owner) else 0
        infos.append(ParamInfo(name, param.shape, split, stage_of(name, stages), experts))
    return infos


def describe_buffers(
    family: Family, config: ModelConfig, layout: Layout, coord: Coord
) -> list[tuple[str, torch.Size, float]]:
    """Name, shape and first value of the buffers of this rank's stages."""
    with torch.device("meta"):
        model = family.build(config)
    stages = cut_stages(family, model, config, layout)
    return [
        (name, buffer.shape, family.buffer_start(name))
        for name, buffer in model.named_buffers()
        if stage_of(name, stages) in layout.stages_of(coord.pp)
    ]
