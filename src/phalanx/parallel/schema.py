"""The tensors of a family's state, and how the axes cut them (core/held.py)."""

from __future__ import annotations

from phalanx.core.held import Held
from phalanx.core.layout import Layout
from phalanx.core.shape import ModelConfig
from phalanx.model.family import Family, skeleton
from phalanx.parallel.stages import cut_stages, stage_of
from phalanx.parallel.tensor import SPLIT_DIM


def describe(family: Family, config: ModelConfig, layout: Layout | None = None) -> list[Held]:
    """Describe every parameter of the model in module order; tied ones appear once."""
    model = skeleton(family, config)
    stages = cut_stages(family, model, config, layout or Layout())
    infos = []
    for name, param in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        style = family.style_of(owner)
        split = SPLIT_DIM.get(style or "")
        if style in ("row", "input") and leaf == "bias":
            split = None
        experts = config.num_experts if family.is_expert(owner) else 0
        infos.append(Held(name, tuple(param.shape), split, stage_of(name, stages), experts))
    return infos


def describe_buffers(family: Family, config: ModelConfig, layout: Layout) -> list[tuple[Held, float]]:
    """Describe every buffer and return its first value with it."""
    model = skeleton(family, config)
    stages = cut_stages(family, model, config, layout)
    return [
        (Held(name, tuple(buffer.shape), stage=stage_of(name, stages), whole=True), family.buffer_start(name))
        for name, buffer in model.named_buffers()
    ]
