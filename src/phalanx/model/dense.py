"""A dense decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Nothing here knows about parallelism. Widths are read from the tensors (`-1`), so the same code runs
on a rank that holds all heads and on one that holds a few.

Shapes: B batch, L sequence, D model dim, H query heads, K key/value heads, E head dim, F ffn dim,
V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.shape import ModelConfig
from phalanx.model.family import Batch, Family, Init


def rotary_tables(length: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position x frequency, (L, E/2), in fp64 and rounded once by the caller's use."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64, device=device), frequency)
    return angle.cos(), angle.sin()


def rotate(x_BHLE: Tensor, cos_LE: Tensor, sin_LE: Tensor) -> Tensor:
    """Rotate the pairs (e, e + E/2) by the position's angle; in fp32 at least."""
    first, second = x_BHLE.to(cos_LE.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cos_LE - second * sin_LE, second * cos_LE + first * sin_LE), dim=-1)
    return turned.to(x_BHLE.dtype)


def document_mask(documents_BL: Tensor) -> Tensor:
    """(B, 1, L, L): true where a query may look, that is back, and inside its own document."""
    same = documents_BL[:, None, :, None] == documents_BL[:, None, None, :]
    return same.tril()


class Attention(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.wq = nn.Linear(c.dim, c.num_heads * c.head_dim, bias=False)
        self.wk = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=False)
        self.wv = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=False)
        self.wo = nn.Linear(c.num_heads * c.head_dim, c.dim, bias=False)

    def forward(self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        q_BHLE = self.wq(x_BLD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        k_BKLE = self.wk(x_BLD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        v_BKLE = self.wv(x_BLD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        out_BHLE = F.scaled_dot_product_attention(
            rotate(q_BHLE, *rope),
            rotate(k_BKLE, *rope),
            v_BKLE,
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q_BHLE.shape[1] != k_BKLE.shape[1],
        )
        return self.wo(out_BHLE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.w1 = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.w2 = nn.Linear(c.ffn_dim, c.dim, bias=False)
        self.w3 = nn.Linear(c.dim, c.ffn_dim, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BLD)) * self.w3(x_BLD))


class Block(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.attention = Attention(c)
        self.ffn_norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.ffn = FeedForward(c)

    def forward(self, x_BLD: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rope, mask)
        return x_BLD + self.ffn(self.ffn_norm(x_BLD))


class Decoder(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})
        self.norm = nn.RMSNorm(c.dim, eps=c.norm_eps)
        self.head = nn.Linear(c.dim, c.vocab_size, bias=False)
        if c.tied:
            self.head.weight = self.embed.weight

    def forward(self, batch: Batch) -> Tensor:
        c, length = self.config, batch.tokens_BL.shape[1]
        x_BLD = self.embed(batch.tokens_BL)
        cos, sin = rotary_tables(length, c.head_dim, c.rope_theta, x_BLD.device)
        table = torch.float64 if x_BLD.dtype == torch.float64 else torch.float32
        rope = (cos.to(table), sin.to(table))
        mask = None if batch.documents_BL is None else document_mask(batch.documents_BL)
        for layer in self.layers.values():
            x_BLD = layer(x_BLD, rope, mask)
        return self.head(self.norm(x_BLD))  # (B, L, V)


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
)
