"""A dense decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Nothing here knows about parallelism. Widths are read from the tensors (`-1`), so the same code runs
on a rank that holds all heads and on one that holds a few.

Shapes: B batch, L sequence, D model dim, H query heads, K key/value heads, E head dim, F ffn dim,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.shape import ModelConfig
from phalanx.model.attention import Attend
from phalanx.model.family import Batch, Family, Init
from phalanx.model.head import Head

Rope = tuple[Tensor, Tensor]  # cos and sin


def rotary_tables(batch: Batch, head_dim: int, theta: float, dtype: torch.dtype) -> Rope:
    """cos and sin of position x frequency, (L, 1, E/2), computed in fp64 and rounded once."""
    positions_L = batch.positions().double()
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_L.device) / head_dim)
    angle = torch.outer(positions_L, frequency).unsqueeze(1)
    table = torch.float64 if dtype == torch.float64 else torch.float32
    return angle.cos().to(table), angle.sin().to(table)


def rotate(x_BLHE: Tensor, cos_L1E: Tensor, sin_L1E: Tensor) -> Tensor:
    """Rotate the pairs (e, e + E/2) by the position's angle; in fp32 at least."""
    first, second = x_BLHE.to(cos_L1E.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cos_L1E - second * sin_L1E, second * cos_L1E + first * sin_L1E), dim=-1)
    return turned.to(x_BLHE.dtype)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig, causal: bool = True):
        super().__init__()
        self.head_dim = c.head_dim
        self.wq = nn.Linear(c.dim, c.num_heads * c.head_dim, bias=False)
        self.wk = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=False)
        self.wv = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=False)
        self.wo = nn.Linear(c.num_heads * c.head_dim, c.dim, bias=False)
        self.attend = Attend(causal)

    def forward(self, x_BLD: Tensor, rope: Rope | None, batch: Batch) -> Tensor:
        q_BLHE, k_BLKE, v_BLKE = [y.unflatten(-1, (-1, self.head_dim)) for y in self.project(x_BLD)]
        if rope is not None:
            q_BLHE, k_BLKE = rotate(q_BLHE, *rope), rotate(k_BLKE, *rope)
        out_BHLE = self.attend(q_BLHE.transpose(1, 2), k_BLKE.transpose(1, 2), v_BLKE.transpose(1, 2), batch)
        return self.wo(out_BHLE.transpose(1, 2).flatten(2))

    def project(self, x_BLD: Tensor) -> list[Tensor]:
        """Queries, keys and values."""
        return [w(x_BLD) for w in (self.wq, self.wk, self.wv)]


class FeedForward(nn.Module):
    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.w1 = nn.Linear(dim, inner, bias=False)
        self.w2 = nn.Linear(inner, dim, bias=False)
        self.w3 = nn.Linear(dim, inner, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BLD)) * self.w3(x_BLD))


class HalfBlock(nn.Module):
    """Attention, and then what `feed` of a subclass does."""

    def __init__(self, c: ModelConfig, causal: bool = True):
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.attention = Attention(c, causal)
        self.ffn_norm = nn.RMSNorm(c.dim, eps=c.norm_eps)

    def forward(self, x_BLD: Tensor, rope: Rope | None, batch: Batch) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rope, batch)
        return x_BLD + self.feed(self.ffn_norm(x_BLD), batch)

    def feed(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError


class Block(HalfBlock):
    def __init__(self, c: ModelConfig, causal: bool = True):
        super().__init__(c, causal)
        self.ffn = FeedForward(c.dim, c.ffn_dim)

    def feed(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        return self.ffn(x_BLD)


class Decoder(nn.Module):
    def __init__(self, c: ModelConfig, block: Callable[[int], nn.Module] | None = None):
        """`block` makes the layer of that number; None: a Block."""
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleDict({str(i): block(i) if block else Block(c) for i in range(c.num_layers)})
        self.norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.head = Head(c.dim, c.vocab_size, bias=False)
        if c.tied:
            self.head.weight = self.embed.weight
        self._kept_tables: dict[tuple[int, torch.dtype, torch.device], Rope] = {}

    def forward(self, batch: Batch, x_BLD: Tensor | None = None) -> Tensor:
        if x_BLD is None:
            x_BLD = self.embed(batch.tokens_BL)
        rope = self._rotary_tables(batch, x_BLD.dtype)
        for layer in self.layers.values():
            x_BLD = layer(x_BLD, rope, batch)
        return self.head(self.norm(x_BLD), batch)  # (B, L, V)

    def _rotary_tables(self, batch: Batch, dtype: torch.dtype) -> Rope:
        """Those of positions from 0 on are kept from one step to the next."""
        kept = self._kept_tables if batch.positions_L is None else {}
        key = batch.tokens_BL.shape[1], dtype, batch.tokens_BL.device
        if key not in kept:
            kept.clear()
            kept[key] = rotary_tables(batch, self.config.head_dim, self.config.rope_theta, dtype)
        return kept[key]


def _init(name: str, c: ModelConfig) -> Init:
    """GPT-2's scheme: 0.02, and the layers that write to the residual stream scaled by its depth."""
    if "norm" in name:
        return Init(std=0.0, mean=1.0)
    if name.endswith(("wo.weight", "w2.weight")):
        return Init(std=0.02 / (2 * c.num_layers) ** 0.5)
    return Init(std=0.02)


DENSE = Family(
    build=Decoder,
    init=_init,
    split={
        "embed": "vocab",
        "layers.*.attention": "gather",
        "layers.*.attention.w[qkv]": "column",
        "layers.*.attention.wo": "row",
        "layers.*.ffn": "gather",
        "layers.*.ffn.w[13]": "column",
        "layers.*.ffn.w2": "row",
        "head": "head",
    },
    first=("embed",),
    last=("norm", "head"),
    ends_in_head=True,
)
