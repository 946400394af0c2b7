"""The sizes of a model that cost time and memory, and the arithmetic on them: parameters, and FLOPs by convention.
Every field is a number, or a column of numbers for many models at once. Nothing here branches on a value, so a million
layouts or five hundred published runs take one pass."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from phalanx.core.shape import CONVENTIONS, ModelConfig, training_flops, window_keys

Num = Any  # a number, or a numpy column of them
__all__ = ["CONVENTIONS", "ModelShape", "Num", "hardware_flops_sc21"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    layers: Num  # what the pipeline deals out
    hidden: Num
    heads: Num
    kv_heads: Num
    head_dim: Num
    ffn: Num  # inner width of the dense FFN
    vocab: Num
    seq: Num  # tokens of one sample
    gated: Num = True  # SwiGLU: three matrices in the FFN and in every expert, else two
    tied: Num = False
    causal: Num = True
    window: Num = 0  # keys that a query sees in the windowed_layers
    windowed_layers: Num = 0
    vectors: Num = 0  # elements of all layers outside matrices, beyond two norms per layer
    attended: Num = 0.0  # sum of squared document lengths / seq, when documents are packed; 0: seq
    # Mixture of experts, in the layers with an FFN that are not dense_layers.
    experts: Num = 0
    top_k: Num = 0
    expert_ffn: Num = 0
    shared_ffn: Num = 0  # for every token, all shared experts together
    dense_layers: Num = 0  # layers with the dense FFN
    moe_layers: Num = 0
    imbalance: Num = 1.0  # tokens of the fullest rank's experts over the mean
    biased: Num = False  # experts with biases and a clamped activation, which few kernels fuse (gpt-oss)
    latent: Num = 0  # experts work on a projection of this width; 0: hidden
    # Multi-head latent attention (DeepSeek); head_dim is then the width without position.
    q_lora: Num = 0
    kv_lora: Num = 0
    rope_dim: Num = 0
    v_dim: Num = 0
    # Hybrids: the number of attention layers, and of Mamba-2 layers with this inner width.
    attention_layers: Num = 0
    mamba_layers: Num = 0
    mamba_inner: Num = 0
    mamba_state: Num = 128  # of a head; the projections carry 8 groups of it twice
    mtp: Num = 0  # extra prediction heads (a layer and a pass through the LM head each)

    @classmethod
    def of(cls, layers: int, hidden: int, heads: int, ffn: int, vocab: int, seq: int, **more: Num) -> ModelShape:
        """Build a shape with the usual defaults: as many kv heads as heads, head_dim hidden / heads, attention in every
        layer, and a dense FFN in all layers, or in `dense_layers` of them if there are experts."""
        experts = more.get("experts", 0)
        dense = more.pop("dense_layers", 0 if experts else layers)
        more.setdefault("moe_layers", layers - dense if experts else 0)
        more.setdefault("attention_layers", layers)
        kv_heads = more.pop("kv_heads", 0) or heads
        head_dim = more.pop("head_dim", 0) or hidden // heads
        if experts:
            more["expert_ffn"] = more.get("expert_ffn", 0) or ffn
        return cls(layers, hidden, heads, kv_heads, head_dim, ffn, vocab, seq, dense_layers=dense, **more)

    @classmethod
    def from_config(cls, config: ModelConfig, seq: int) -> ModelShape:
        """Build the shape of one of the engine's own families."""
        moe = config.family == "moe"
        return cls.of(
            config.num_layers, config.dim, config.num_heads, config.ffn_dim, config.vocab_size, seq,
            kv_heads=config.num_kv_heads, head_dim=config.head_dim, tied=config.tied,
            window=config.window, windowed_layers=config.windowed_layers,
            vectors=config.num_layers * (config.layer_vectors - 2 * config.dim)
            + (config.dense_layers if moe else config.num_layers) * config.ffn_vectors,
            experts=config.num_experts if moe else 0, top_k=config.top_k if moe else 0,
            expert_ffn=config.expert_width if moe else 0,
            shared_ffn=config.shared_experts * config.expert_width if moe else 0,
            dense_layers=config.dense_layers if moe else config.num_layers,
        )  # fmt: skip

    @classmethod
    def stack(cls, shapes: list[ModelShape]) -> ModelShape:
        """Return one shape whose fields are columns, with a row for each of `shapes`."""
        return cls(**{f.name: np.array([getattr(s, f.name) for s in shapes], dtype=float) for f in fields(cls)})

    def take(self, rows: Num) -> ModelShape:
        """Select rows of the columns."""
        return ModelShape(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    @property
    def context(self) -> Num:
        """Keys that a token would see without causality."""
        return np.where(np.asarray(self.attended) > 0, self.attended, self.seq)

    @property
    def keys(self) -> Num:
        """`context` summed over all layers that attend, limited by the window where there is one."""
        window = np.maximum(self.window, 1)
        seen = np.minimum(window_keys(window, self.seq), self.context)
        return (self.attention_layers - self.windowed_layers) * self.context + self.windowed_layers * seen

    @property
    def q_width(self) -> Num:
        """Width of all heads' queries (and keys), whose products are the scores."""
        return self.heads * (self.head_dim + self.rope_dim)

    @property
    def v_width(self) -> Num:
        return self.heads * np.where(np.asarray(self.v_dim) > 0, self.v_dim, self.head_dim)

    @property
    def qkv_params(self) -> Num:
        """Parameters of the projections into attention, per layer. MLA follows Megatron's FLOP count."""
        plain = self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads)
        q = np.where(
            np.asarray(self.q_lora) > 0, self.q_lora * (self.hidden + self.q_width), self.hidden * self.q_width
        )
        latent = (
            q + self.kv_lora * (self.hidden + self.heads * self.head_dim + self.v_width) + self.hidden * self.rope_dim
        )
        return np.where(np.asarray(self.kv_lora) > 0, latent, plain)

    @property
    def out_params(self) -> Num:
        return self.v_width * self.hidden

    @property
    def matrices(self) -> Num:
        """Matrices of an FFN."""
        return 2 + np.asarray(self.gated, dtype=float)

    @property
    def expert_width(self) -> Num:
        """Width of an expert's input."""
        return np.where(np.asarray(self.latent) > 0, self.latent, self.hidden)

    @property
    def expert_params(self) -> Num:
        """Parameters of one expert."""
        return self.matrices * self.expert_width * self.expert_ffn

    @property
    def moe_fixed_params(self) -> Num:
        """Parameters of an expert layer outside its routed experts: shared, router, projections to latent width."""
        return (
            self.matrices * self.hidden * self.shared_ffn + self.hidden * self.experts + 2 * self.hidden * self.latent
        )

    @property
    def mamba_params(self) -> Num:
        """Parameters of one Mamba-2 layer: in and out projection, with 8 groups of B and C."""
        return self.hidden * (3 * self.mamba_inner + 16 * self.mamba_state * (np.asarray(self.mamba_inner) > 0))

    @property
    def dense_params(self) -> Num:
        """Parameters of all layers outside the routed experts, norms included."""
        return (
            self.attention_layers * (self.qkv_params + self.out_params)
            + self.dense_layers * self.matrices * self.hidden * self.ffn
            + self.moe_layers * self.moe_fixed_params
            + self.mamba_layers * self.mamba_params
            + self.layers * 2 * self.hidden
            + self.vectors
        )

    @property
    def routed_params(self) -> Num:
        return self.moe_layers * self.experts * self.expert_params

    @property
    def layer_params(self) -> Num:
        return self.dense_params + self.routed_params

    @property
    def head_params(self) -> Num:
        return self.vocab * self.hidden

    @property
    def params(self) -> Num:
        return self.layer_params + self.head_params * (2 - np.asarray(self.tied, dtype=float)) + self.hidden

    @property
    def active_params(self) -> Num:
        """Parameters that one token uses, with only its own routed experts."""
        return self.params - self.moe_layers * (self.experts - self.top_k) * self.expert_params

    @property
    def scores(self) -> Num:
        """Elements of one token's scores and of their products with values, in all layers and without causality:
        keys x (queries + values)."""
        return self.keys * (self.q_width + self.v_width)

    @property
    def matmul_params(self) -> Num:
        """Weights that one token is multiplied with: only its own routed experts, and no embedding, which is a look-up.
        Scans of Mamba-2 count as products in chunks of 256: state in and out, and within the chunk."""
        norms = self.layers * 2 * self.hidden + self.vectors
        layers = self.dense_params - norms + self.moe_layers * self.top_k * self.expert_params
        scans = self.mamba_layers * self.mamba_inner * (2 * self.mamba_state + 256)
        return layers * (1 + self.mtp / self.layers) + self.head_params * (1 + self.mtp) + scans

    def flops_per_token(self, convention: str = "full") -> Num:
        """Return the training FLOPs per token (core.shape.training_flops)."""
        return training_flops(self.matmul_params, self.scores, self.active_params, convention)


def hardware_flops_sc21(shape: ModelShape) -> Num:
    """Return FLOPs per token with full recomputation, as Megatron-LM counted in 2021: 96 s l h^2 (1 + s/6h + V/16lh)
    per sequence (arXiv:2104.04473, equation 3)."""
    h, layers = shape.hidden, shape.layers
    return 96 * layers * h**2 * (1 + shape.seq / (6 * h) + shape.vocab / (16 * layers * h))
