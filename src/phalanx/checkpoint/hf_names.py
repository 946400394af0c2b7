"""Maps the tensors of another checkpoint to ours, as rows of a table (`phalanx.Weight`). The built-in families have a
table for every architecture that `hf_config` knows; a user's Family brings its own. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from phalanx.core.errors import UserError
from phalanx.core.held import Held
from phalanx.core.shape import ModelConfig
from phalanx.core.weights import Weight

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ENDS = (Weight(EMBEDDING, "embed.weight"), Weight("model.norm.weight", "norm.weight"), Weight(HEAD, "head.weight"))
ATTENTION = tuple(
    Weight(f"model.layers.*.self_attn.{x}_proj.*", f"layers.*.attention.w{x}.*") for x in ("q", "k", "v", "o")
)
FFN = tuple(
    Weight(f"model.layers.*.mlp.{theirs}_proj.*", f"layers.*.ffn.{ours}.*")
    for theirs, ours in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
)
NORMS = {  # by placement: theirs -> ours
    "pre": {"input": "attention_norm", "post_attention": "ffn_norm"},
    "post": {"post_attention": "attention_post_norm", "post_feedforward": "ffn_post_norm"},
    "both": {
        "input": "attention_norm",
        "post_attention": "attention_post_norm",
        "pre_feedforward": "ffn_norm",
        "post_feedforward": "ffn_post_norm",
    },
}
MIXTRAL = (
    Weight("model.layers.*.block_sparse_moe.gate.weight", "layers.*.moe.gate.weight"),
    *(
        Weight(f"model.layers.*.block_sparse_moe.experts.#.{w}.weight", f"layers.*.moe.experts.{w}")
        for w in ("w1", "w2", "w3")
    ),
)
QWEN_MOE = (
    Weight("model.layers.*.mlp.gate.weight", "layers.*.moe.gate.weight"),
    *(
        Weight(f"model.layers.*.mlp.experts.#.{theirs}_proj.weight", f"layers.*.moe.experts.{ours}")
        for theirs, ours in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
    ),
)
PHI3 = (
    Weight("model.layers.*.self_attn.qkv_proj.weight", tuple(f"layers.*.attention.w{x}.weight" for x in "qkv")),
    Weight("model.layers.*.mlp.gate_up_proj.weight", ("layers.*.ffn.w1.weight", "layers.*.ffn.w3.weight")),
)


def table_of(model_type: str, config: ModelConfig) -> tuple[Weight, ...]:
    """Return the names of a class of transformers. The first row that matches a tensor of ours counts."""
    own = {"mixtral": MIXTRAL, "qwen3_moe": QWEN_MOE, "phi3": PHI3}.get(model_type, ())
    norms = [
        Weight(f"model.layers.*.{theirs}_layernorm.weight", f"layers.*.{ours}.weight")
        for theirs, ours in NORMS[config.norm_place].items()
    ]
    wide = "wide_" if config.qk_norm == "all" else ""
    of_heads = [
        Weight(f"model.layers.*.self_attn.{x}_norm.weight", f"layers.*.attention.{wide}{x}_norm.weight") for x in "qk"
    ]
    return (*ENDS, *own, *norms, *of_heads, *ATTENTION, *FFN)


class Piece(NamedTuple):
    """Rows [first, last) of a tensor of ours, which are the rows of one of theirs from `at` on."""

    theirs: str
    ours: str
    first: int
    last: int
    at: int
    shape: tuple[int, ...]  # of theirs, as if it were not transposed
    transpose: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transpose else self.shape


def pieces_of(params: list[Held], table: Sequence[Weight], family: str = "dense") -> list[Piece]:
    """Cut every tensor of ours as theirs are, in our order."""
    shapes = {held.name: held.shape for held in params}
    pieces = []
    for held in params:
        pieces += _pieces(held, table, shapes, family)
    return pieces


def _pieces(held: Held, table: Sequence[Weight], shapes: dict[str, tuple[int, ...]], family: str) -> list[Piece]:
    for weight in table:
        ours = (weight.ours,) if isinstance(weight.ours, str) else weight.ours
        for i, pattern in enumerate(ours):
            stars = _match(pattern, held.name)
            if stars is None:
                continue
            name = _fill(weight.theirs, stars)
            if "#" in name:
                count = held.experts or 1
                rows = held.shape[0] // count
                shape = (rows, *held.shape[1:])
                return [
                    Piece(name.replace("#", str(e)), held.name, e * rows, (e + 1) * rows, 0, shape, weight.transpose)
                    for e in range(count)
                ]
            parts = [shapes[_fill(other, stars)] for other in ours]
            at = sum(part[0] for part in parts[:i])
            shape = (sum(part[0] for part in parts), *held.shape[1:])
            return [Piece(name, held.name, 0, held.shape[0], at, shape, weight.transpose)]
    raise UserError(
        f"its parameter {held.name!r} is in no row of the table of names",
        field="model.family",
        value=family,
        remedy="add a phalanx.Weight for it to Family.weights",
    )


def _match(pattern: str, name: str) -> list[str] | None:
    regex = "".join("([^.]+)" if part == "*" else re.escape(part) for part in re.split(r"(\*)", pattern))
    found = re.fullmatch(regex, name)
    return list(found.groups()) if found else None


def _fill(pattern: str, stars: list[str]) -> str:
    for star in stars:
        pattern = pattern.replace("*", star, 1)
    return pattern
