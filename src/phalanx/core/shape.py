"""Arithmetic about tensors and models that needs no tensor: who holds which rows, how many
parameters, how many FLOPs. The planner and the engine both count with these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """[start, stop) of part `index` when `size` rows are cut in `parts`, as torch.chunk cuts them:
    ceil(size / parts) each, the last ones shorter or empty."""
    step = -(-size // parts) if size else 0
    return min(index * step, size), min((index + 1) * step, size)


def even_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """[start, stop) of part `index` when `size` is cut in `parts` that differ by one at most, so that
    none is empty while there are as many elements as parts."""
    return size * index // parts, size * (index + 1) // parts


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model: a family (a built-in name or `path.py:NAME`) and its sizes."""

    family: str = "dense"
    vocab_size: int = 257
    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_dim: int = 344
    tied: bool = False
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    options: dict[str, Any] = field(default_factory=dict)  # for a family of the user's own

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    @property
    def num_params(self) -> int:
        """Exact for the dense family; tests compare it with the built module."""
        attention = self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        return self.num_layers * block + (1 if self.tied else 2) * self.vocab_size * self.dim + self.dim

    def flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs per token: 6 per matmul parameter (the embedding look-up is not one) plus
        12 * layers * dim * seq_len for attention, causality NOT halved (PaLM, appendix B)."""
        matmul = self.num_params - (0 if self.tied else self.vocab_size * self.dim)
        return 6 * matmul + 12 * self.num_layers * self.dim * seq_len


MFU_CONVENTION = "6N + 12*L*d*T FLOPs per token, causal attention not halved, embedding look-up not counted"
