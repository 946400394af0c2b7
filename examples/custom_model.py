"""A model of your own: a GPT-2-like decoder with LayerNorm, learned positions, GELU and biases, and
the Family that says how its layers split. Train it with `phalanx train examples/custom-model.toml`."""

import torch
import torch.nn.functional as F
from torch import nn

from phalanx import Family, Init


class Attention(nn.Module):
    def __init__(self, dim, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, mask):  # -1: as many heads as this rank holds
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, head_dim):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, head_dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim, heads = config.options["dim"], config.options["heads"]
        self.embed = nn.Embedding(config.vocab_size, dim)
        self.position = nn.Embedding(config.options["context"], dim)
        self.layers = nn.ModuleList(Block(dim, dim // heads) for _ in range(config.options["layers"]))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, config.vocab_size)

    def forward(self, batch):
        d = batch.documents_BL  # which document each position belongs to; None: no mask
        mask = None if d is None else (d[:, None, :, None] == d[:, None, None, :]).tril()
        ids = torch.arange(batch.tokens_BL.shape[1], device=batch.tokens_BL.device)[None]
        x = self.embed(batch.tokens_BL) + self.position(ids)  # all ids in, this rank's slice of the sequence out
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def init(name, config):
    if name.endswith("bias"):
        return Init(std=0.0)
    return Init(std=0.0, mean=1.0) if "norm" in name else Init(std=0.02)


FAMILY = Family(
    build=GPT,
    init=init,
    split={
        "embed": "vocab",
        "position": "vocab",
        "layers.*.attention": "gather",
        "layers.*.attention.[qkv]*": "column",
        "layers.*.attention.out": "row",
        "layers.*.mlp": "gather",
        "layers.*.mlp.0": "column",
        "layers.*.mlp.2": "row",
        "head": "head",
    },
)
