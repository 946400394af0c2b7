"""A model of your own: a GPT-2-like decoder with LayerNorm, learned positions, GELU and biases, and
the Family that says how its layers split. Train it with `phalanx train examples/custom-model.toml`."""

from torch import nn

from phalanx import Attend, Family, Init


class Attention(nn.Module):
    def __init__(self, dim, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.attend = Attend()  # causal, inside documents; context parallelism takes its place

    def forward(self, x, batch):  # -1: as many heads as this rank holds
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(self.attend(q, k, v, batch).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, head_dim):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(dim), Attention(dim, head_dim)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, batch):
        x = x + self.attention(self.norm1(x), batch)
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        dim, heads = config.options["dim"], config.options["heads"]
        self.embed = nn.Embedding(config.vocab_size, dim)
        self.position = nn.Embedding(config.options["context"], dim)
        self.layers = nn.ModuleList(Block(dim, dim // heads) for _ in range(config.options["layers"]))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, config.vocab_size)

    def forward(self, batch, x=None):
        if x is None:  # else it comes from the stage before
            positions = batch.document_positions()  # from 0 in every document
            x = self.embed(batch.tokens_BL) + self.position(positions)  # in: all ids; out: this rank's slice of them
        for layer in self.layers:
            x = layer(x, batch)
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
    first=("embed", "position"),
    last=("norm", "head"),
    width=lambda config: config.options["dim"],
)
