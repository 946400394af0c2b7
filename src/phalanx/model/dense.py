"""A dense decoder: RMSNorm, rotary positions, grouped-query attention, a gated FFN. The config says how models of this
kind differ: where norms stand, which biases there are, how positions are scaled, who sees whom.

Nothing here knows about parallelism. Widths are read from the tensors (`-1`), so the same code runs on a rank that
holds all heads and on one that holds a few.

Shapes: B batch, L sequence, D model dim, H query heads, K key/value heads, E head dim, F ffn dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core import rotary
from phalanx.core.shape import ModelConfig
from phalanx.model.attention import Attend
from phalanx.model.family import Batch, Family, Init
from phalanx.model.head import Head
from phalanx.model.rms import SplitNorm, make_norm

Rope = tuple[Tensor, Tensor]  # cos and sin


def rotary_tables(batch: Batch, c: ModelConfig, dtype: torch.dtype, local: bool = False) -> Rope:
    """Return cos and sin of position x frequency, (L, 1, pairs), computed in fp64 and rounded once."""
    positions_L = batch.positions().double()
    frequency = torch.tensor(rotary.frequencies(c, local), dtype=torch.float64, device=positions_L.device)
    angle, gain = torch.outer(positions_L, frequency).unsqueeze(1), rotary.gain(c, local)
    table = torch.float64 if dtype == torch.float64 else torch.float32
    return (angle.cos() * gain).to(table), (angle.sin() * gain).to(table)


def rotate(x_BLHE: Tensor, cos_L1E: Tensor, sin_L1E: Tensor) -> Tensor:
    """Rotate the pairs (e, e + E/2) by the position's angle; in fp32 at least. If the tables are narrower than a head,
    its end is left as it is."""
    width = 2 * cos_L1E.shape[-1]
    first, second = x_BLHE[..., :width].to(cos_L1E.dtype).chunk(2, dim=-1)
    turned = [first * cos_L1E - second * sin_L1E, second * cos_L1E + first * sin_L1E]
    if width < x_BLHE.shape[-1]:
        turned.append(x_BLHE[..., width:].to(cos_L1E.dtype))
    return torch.cat(turned, dim=-1).to(x_BLHE.dtype)


def products(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    return [layer(x) for layer in layers]


class Attention(nn.Module):
    multiply = staticmethod(products)  # several layers applied to one input; replaced for fp8

    def __init__(self, c: ModelConfig, causal: bool = True, window: int = 0):
        super().__init__()
        self.head_dim, self.num_kv_heads = c.head_dim, c.num_kv_heads
        bias, out_bias = c.attention_bias != "none", c.attention_bias == "all"
        self.wq = nn.Linear(c.dim, c.num_heads * c.head_dim, bias=bias)
        self.wk = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=bias)
        self.wv = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=bias)
        self.wo = nn.Linear(c.num_heads * c.head_dim, c.dim, bias=out_bias)
        self.norms = c.qk_norm
        if c.qk_norm == "head":
            self.q_norm, self.k_norm = make_norm(c.head_dim, c), make_norm(c.head_dim, c)
        elif c.qk_norm == "all":
            self.wide_q_norm, self.wide_k_norm = (SplitNorm(n * c.head_dim, c) for n in (c.num_heads, c.num_kv_heads))
        # Every kernel divides by sqrt(E), so queries are multiplied by what differs from that.
        self.query_scale = c.attention_scale * c.head_dim**0.5 if c.attention_scale else 1.0
        self.attend = Attend(causal, window, c.attention_softcap)

    def forward(self, x_BLD: Tensor, rope: Rope | None, batch: Batch) -> Tensor:
        q_BLHE, k_BLKE, v_BLKE = self.heads(x_BLD)
        if rope is not None:
            q_BLHE, k_BLKE = rotate(q_BLHE, *rope), rotate(k_BLKE, *rope)
        if self.query_scale != 1.0:
            q_BLHE = q_BLHE * self.query_scale
        out_BHLE = self.attend(q_BLHE.transpose(1, 2), k_BLKE.transpose(1, 2), v_BLKE.transpose(1, 2), batch)
        return self.wo(out_BHLE.transpose(1, 2).flatten(2))

    def heads(self, x_BLD: Tensor) -> list[Tensor]:
        """Return queries, keys and values, normalized."""
        q, k, v = self.multiply(x_BLD, (self.wq, self.wk, self.wv))
        if self.norms == "all":
            q, k = self.wide_q_norm(q), self.wide_k_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, self.whole_heads(k), self.whole_heads(v)))
        if self.norms == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return [q, k, v]

    def whole_heads(self, y_BLF: Tensor) -> Tensor:
        """Return keys or values of the heads that queries here need. A rank that holds a part of a head replaces
        this."""
        return y_BLF


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": gelu}


class FeedForward(nn.Module):
    def __init__(self, dim: int, inner: int, activation: str = "silu", bias: bool = False):
        super().__init__()
        self.w1 = nn.Linear(dim, inner, bias=bias)
        self.w2 = nn.Linear(inner, dim, bias=bias)
        self.w3 = nn.Linear(dim, inner, bias=bias)
        self.activation = activation

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.w2(ACTIVATIONS[self.activation](self.w1(x_BLD)) * self.w3(x_BLD))


class HalfBlock(nn.Module):
    """Attention followed by `feed`, which a subclass defines; norms before, after, or both."""

    def __init__(self, c: ModelConfig, causal: bool = True, window: int = 0):
        super().__init__()
        before, after = c.norm_place != "post", c.norm_place != "pre"
        self.attention_norm = make_norm(c.dim, c) if before else None
        self.attention_post_norm = make_norm(c.dim, c) if after else None
        self.attention = Attention(c, causal, window)
        self.ffn_norm = make_norm(c.dim, c) if before else None
        self.ffn_post_norm = make_norm(c.dim, c) if after else None

    def forward(self, x_BLD: Tensor, rope: Rope | None, batch: Batch) -> Tensor:
        h_BLD = self.attention(_through(self.attention_norm, x_BLD), rope, batch)
        x_BLD = x_BLD + _through(self.attention_post_norm, h_BLD)
        return x_BLD + _through(self.ffn_post_norm, self.feed(_through(self.ffn_norm, x_BLD), batch))

    def feed(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError


def _through(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class Block(HalfBlock):
    def __init__(self, c: ModelConfig, causal: bool = True, window: int = 0):
        super().__init__(c, causal, window)
        self.ffn = FeedForward(c.dim, c.ffn_dim, c.activation, c.ffn_bias)

    def feed(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        return self.ffn(x_BLD)


class Decoder(nn.Module):
    def __init__(self, c: ModelConfig, block: Callable[[int], nn.Module] | None = None):
        """`block` makes the layer of that number; None: a Block."""
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        make = block or (lambda layer: Block(c, window=c.window_of(layer)))
        self.layers = nn.ModuleDict({str(i): make(i) for i in range(c.num_layers)})
        self.norm = make_norm(c.dim, c)
        self.head = Head(c.dim, c.vocab_size, bias=False, softcap=c.logit_softcap)
        if c.tied:
            self.head.weight = self.embed.weight
        self._kept_tables: dict[tuple[int, torch.dtype, torch.device], list[Rope]] = {}

    def forward(self, batch: Batch, x_BLD: Tensor | None = None) -> Tensor:
        if x_BLD is None:
            x_BLD = self.embed(batch.tokens_BL)
            if self.config.embedding_scale != 1.0:
                x_BLD = x_BLD * self.config.embedding_scale
        everywhere, local = self._rotary_tables(batch, x_BLD.dtype)
        for i, layer in enumerate(self.layers.values()):
            x_BLD = layer(x_BLD, local if self.config.window_of(i) else everywhere, batch)
        return self.head(self.norm(x_BLD), batch)  # (B, L, V)

    def _rotary_tables(self, batch: Batch, dtype: torch.dtype) -> list[Rope]:
        """Return the tables of layers without a window, and of those with one. Tables for positions from 0 on are kept
        from one step to the next."""
        kept = self._kept_tables if batch.positions_L is None else {}
        key = batch.tokens_BL.shape[1], dtype, batch.tokens_BL.device
        if key not in kept:
            kept.clear()
            tables = rotary_tables(batch, self.config, dtype)
            local = rotary_tables(batch, self.config, dtype, local=True) if self.config.rope_local_theta else tables
            kept[key] = [tables, local]
        return kept[key]


def _init(name: str, c: ModelConfig) -> Init:
    """GPT-2's scheme: 0.02, and the layers that write to the residual stream scaled by its depth."""
    if name.endswith("bias"):
        return Init(std=0.0)
    if "norm" in name:
        return Init(std=0.0, mean=0.0 if c.norm_centered else 1.0)
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
        "layers.*.attention.wide_[qk]_norm": "norm",
        "layers.*.ffn": "gather",
        "layers.*.ffn.w[13]": "column",
        "layers.*.ffn.w2": "row",
        "head": "head",
    },
    first=("embed",),
    last=("norm", "head"),
    ends_in_head=True,
)
