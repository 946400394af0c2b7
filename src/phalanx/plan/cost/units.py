"""The ranks of every group, every parameter of the built-in decoders, and the units in which this engine gathers
parameters and reduces gradients. All of it follows from the layout and the model's sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.core.errors import UserError
from phalanx.core.held import CODEC_BLOCK, Held, travels_whole
from phalanx.core.layout import Coord, Layout
from phalanx.core.shape import ModelConfig, balance

EMBEDDING_COST = 0.1  # as in parallel/stages.py
ENDS, REST = ("embed", "head"), "rest"  # units beside the layers; one unit if embedding and head are tied
AXES = ("tp", "cp", "shard", "state", "pp", "ep", "edp", "inside")


def members(layout: Layout, coord: Coord, axis: str) -> range:
    """Return the ranks of a group, numbered inside the replica. A stage's state is sharded over `state`, its experts'
    state over `edp`; `inside` is the whole replica."""
    me = layout.inside(coord)
    stride, size = {
        "tp": (1, layout.tp),
        "cp": (layout.tp, layout.cp),
        "shard": (layout.cp * layout.tp, layout.shard),
        "state": (layout.tp, layout.cp * layout.shard),
        "pp": (layout.stage_size, layout.pp),
        "ep": (1, layout.ep),
        "edp": (layout.ep, layout.stage_size // layout.ep),
        "inside": (1, layout.replica_size),
    }[axis]
    first = me - me // stride % size * stride
    return range(first, first + size * stride, stride)


def names(layout: Layout, coord: Coord, experts: bool) -> dict[range, str]:
    """Name each group of a rank; a group that serves several axes has the names of all of them."""
    out: dict[range, str] = {}
    for axis in AXES:
        ranks = members(layout, coord, axis)
        if len(ranks) == 1 or (axis == "state" and layout.cp == 1) or (axis in ("ep", "edp") and not experts):
            continue
        out[ranks] = f"{out[ranks]}/{axis}" if ranks in out else axis
    return out


def tensors(model: ModelConfig, layout: Layout) -> list[Held]:
    """List every parameter of a built-in decoder in the module's order, with the stage that holds it."""
    if model.family not in ("dense", "moe"):
        raise UserError(
            "the planner knows the layers of the dense and the moe family alone",
            field="model.family",
            value=model.family,
            remedy='plan for the "dense" or "moe" model that comes nearest to it',
        )
    stage_of = _stages(model, layout)
    last = layout.num_stages - 1
    out = [Held("embed.weight", (model.vocab_size, model.dim), 0, 0)]
    for layer in range(model.num_layers):
        for name, shape, tp_dim, experts in _layer(model, layer):
            out.append(Held(f"layers.{layer}.{name}", shape, tp_dim, stage_of[layer], experts))
    out.append(Held("norm.weight", (model.dim,), None, last))
    if not model.tied:
        out.append(Held("head.weight", (model.vocab_size, model.dim), 0, last))
    return out


def _layer(c: ModelConfig, layer: int) -> Iterator[tuple[str, tuple[int, ...], int | None, int]]:
    """Yield name, shape, the dim that TP splits, and the number of experts whose rows it holds."""
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    before, after = c.norm_place != "post", c.norm_place != "pre"
    norms = {"attention_norm": before, "attention_post_norm": after, "ffn_norm": before, "ffn_post_norm": after}
    for name in ("attention_norm", "attention_post_norm"):
        if norms[name]:
            yield f"{name}.weight", (c.dim,), None, 0
    for name, rows in (("wq", q), ("wk", kv), ("wv", kv)):
        yield f"attention.{name}.weight", (rows, c.dim), 0, 0
        if c.attention_bias != "none":
            yield f"attention.{name}.bias", (rows,), 0, 0
    yield "attention.wo.weight", (c.dim, q), 1, 0
    if c.attention_bias == "all":
        yield "attention.wo.bias", (c.dim,), None, 0
    for name, rows in (("q", q), ("k", kv)):
        if c.qk_norm == "head":
            yield f"attention.{name}_norm.weight", (c.head_dim,), None, 0
        elif c.qk_norm == "all":
            yield f"attention.wide_{name}_norm.weight", (rows,), 0, 0
    for name in ("ffn_norm", "ffn_post_norm"):
        if norms[name]:
            yield f"{name}.weight", (c.dim,), None, 0
    if not has_experts(c, layer):
        yield from _ffn("ffn", c.dim, c.ffn_dim, c.ffn_bias)
        return
    width, number = c.expert_width, c.num_experts
    yield "moe.gate.weight", (number, c.dim), None, 0
    for name, rows, cols in (("w1", width, c.dim), ("w2", c.dim, width), ("w3", width, c.dim)):
        yield f"moe.experts.{name}", (number * rows, cols), None, number
    if c.shared_experts:
        yield from _ffn("moe.shared", c.dim, c.shared_experts * width)


def _ffn(name: str, dim: int, inner: int, bias: bool = False) -> Iterator[tuple[str, tuple[int, ...], int | None, int]]:
    for leaf, rows, cols, tp_dim in (("w1", inner, dim, 0), ("w2", dim, inner, 1), ("w3", inner, dim, 0)):
        yield f"{name}.{leaf}.weight", (rows, cols), tp_dim, 0
        if bias:
            yield f"{name}.{leaf}.bias", (rows,), None if tp_dim else 0, 0


def has_experts(c: ModelConfig, layer: int) -> bool:
    return c.family == "moe" and layer >= c.dense_layers


def _stages(c: ModelConfig, layout: Layout) -> list[int]:
    """Return the stage of every layer, in runs of nearly equal cost: the matrix parameters that a token uses."""
    if layout.num_stages == 1:
        return [0] * c.num_layers
    costs = []
    for layer in range(c.num_layers):
        matrices = [(math.prod(shape), experts) for _, shape, _, experts in _layer(c, layer) if len(shape) > 1]
        costs.append(sum(numel * (c.top_k / c.num_experts if experts else 1.0) for numel, experts in matrices))
    costs[0] += EMBEDDING_COST * c.vocab_size * c.dim
    costs[-1] += c.vocab_size * c.dim
    counts = balance(costs, layout.num_stages)
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters gathered and reduced in one call: a layer, its experts, embedding, head, or the rest of a stage."""

    name: str
    stage: int
    axis: str
    parts: int  # ranks that share it
    slice_numel: int  # elements of a rank's slice, rows padded to the longest
    whole_numel: int  # the part that is never compressed
    coded_numel: int  # the other part, each parameter padded to whole blocks of the codec

    @property
    def numel(self) -> int:
        return self.parts * self.slice_numel


def units(held: list[Held], layout: Layout, coord: Coord) -> list[Unit]:
    """List this rank's units in the order in which backward finishes them. FSDP2 finishes the rest of a stage and the
    embedding last, because their inputs have no gradient."""
    tied = not any(h.name.startswith("head.") for h in held)
    slices: dict[tuple[int, str, str], list[Held]] = {}
    for h in held:
        if h.held_by(layout, coord):
            first, layer, *_ = h.name.split(".")
            name = f"layers.{layer}" if first == "layers" else REST if tied or first not in ENDS else first
            slices.setdefault((h.stage, name, "edp" if h.experts else "state"), []).append(h)
    sharded = any(len(members(layout, coord, axis)) > 1 for _, _, axis in slices)
    place = {"head": 0, REST: 3 if sharded else 1, "embed": 4}
    out = []
    for (stage, name, axis), some in slices.items():
        parts = len(members(layout, coord, axis))
        part = layout.in_stage(coord) % layout.ep if axis == "edp" else coord.tp
        sizes = [(_slice(h, layout, part, parts), travels_whole(h.name, h.shape)) for h in some]
        whole = sum(size for size, is_whole in sizes if is_whole)
        coded = sum(-(-size // CODEC_BLOCK) * CODEC_BLOCK for size, is_whole in sizes if not is_whole)
        numel = sum(size for size, _ in sizes)
        out.append(Unit(name + (".experts" if axis == "edp" else ""), stage, axis, parts, numel, whole, coded))
    where = {(u.name, u.stage): i for i, u in enumerate(out)}
    return sorted(out, key=lambda u: (-u.stage, place.get(u.name, 2), -where[u.name, u.stage]))


def _slice(held: Held, layout: Layout, part: int, parts: int) -> int:
    r0, r1, c0, c1 = held.split_bounds(layout, part)
    return -(-(r1 - r0) // parts) * (c1 - c0) * held.inner
