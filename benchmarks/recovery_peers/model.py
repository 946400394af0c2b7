"""The model and the optimizer of examples/quickstart.toml in plain PyTorch, for the peers; no phalanx in it.
Also how they report: one line of JSON per event, at the end of a file that all of them share."""

import ctypes
import json
import os
import signal
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, DIM, LAYERS, HEADS, KV_HEADS, FFN = 257, 128, 4, 4, 2, 344  # the preset "tiny"
THETA, EPS = 500_000.0, 1e-5
SEQ, BATCH = 256, 2  # per replica: a small batch, since the clocks are for the recovery and not for a step
LR, BETAS, WEIGHT_DECAY, CLIP = 3e-3, (0.9, 0.95), 0.1, 1.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        head = DIM // HEADS
        self.norms = nn.ModuleList(nn.RMSNorm(DIM, eps=EPS) for _ in range(2))
        self.wq, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(DIM, KV_HEADS * head, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(DIM, FFN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(FFN, DIM, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (w(y).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.wo(out.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM, eps=EPS)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        head = DIM // HEADS
        frequency = THETA ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)
        angle = torch.outer(torch.arange(SEQ, dtype=torch.float64), frequency)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def build() -> tuple[Decoder, torch.optim.AdamW]:
    torch.set_num_threads(1)  # a core per replica, as ours
    torch.manual_seed(1)
    model = Decoder()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)


def batch(step: int, replica: int) -> Tensor:
    """SEQ + 1 tokens a row: what is read and, shifted by one, what is asked for."""
    return torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(2 * step + replica))


def backward(model: nn.Module, tokens: Tensor) -> None:
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)


class Journal:
    """Appends lines with the time that all processes of a machine share."""

    def __init__(self, path: str):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive who started us
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(self, **what) -> None:
        os.write(self._file, (json.dumps({"at": time.monotonic(), "pid": os.getpid(), **what}) + "\n").encode())
