"""Arithmetic about tensors and models that needs no tensor: who holds which rows, how many
parameters, how many FLOPs. The planner and the engine both count with these."""

from __future__ import annotations

from collections.abc import Sequence
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


LOSS_BYTES = 4 << 30  # of logits that a rank holds at a time; with each chunk a gradient in fp32 is read and written


def loss_rows(vocab_size: int, tp: int, item_bytes: int) -> int:
    """Tokens whose logits are made at a time, the same on every tensor-parallel rank; by 128s, as matrix products like
    their sides."""
    rows = LOSS_BYTES // (-(-vocab_size // tp) * item_bytes)
    return max(1, rows // 128 * 128 or rows)


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """How many neighbouring items each of `parts` gets (at least one), so that the dearest part is as
    cheap as can be; among equals, the earlier parts get more."""
    assert len(costs) >= parts, (len(costs), parts)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[k][i]: the dearest part when the items from i on are cut in k parts, and where the first ends
    best = {1: {i: (total[-1] - total[i], len(costs)) for i in range(len(costs))}}
    for k in range(2, parts + 1):
        best[k] = {}
        for i in range(len(costs) - k + 1):
            cuts = ((max(total[j] - total[i], best[k - 1][j][0]), -j) for j in range(i + 1, len(costs) - k + 2))
            dearest, end = min(cuts)
            best[k][i] = (dearest, -end)
    counts, start = [], 0
    for k in range(parts, 0, -1):
        end = best[k][start][1]
        counts.append(end - start)
        start = end
    return counts


FAMILIES = ("dense", "moe", "image")  # the built-in ones


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
    head_width: int = 0  # of one head; 0: dim / num_heads
    tied: bool = False
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    # The moe family: experts in place of the FFN, in all but the first dense_layers layers.
    num_experts: int = 8
    top_k: int = 2
    expert_dim: int = 0  # inner width of one expert; 0: ffn_dim
    shared_experts: int = 0  # as wide as an expert each, for every token
    dense_layers: int = 0
    scoring: str = "softmax"  # softmax | sigmoid
    route_scale: float = 1.0
    balance_loss: float = 0.01
    balance_bias: float = 0.0  # step of the selection bias; 0: none
    options: dict[str, Any] = field(default_factory=dict)  # for images, and for a family of the user's own

    @property
    def head_dim(self) -> int:
        return self.head_width or self.dim // self.num_heads

    @property
    def expert_width(self) -> int:
        return self.expert_dim or self.ffn_dim

    @property
    def num_params(self) -> int:
        """Exact for the dense and the moe family; tests compare it with the built module."""
        return self._params(self.num_experts)

    @property
    def active_params(self) -> int:
        """Those that one token uses: of the routed experts, its own."""
        return self._params(self.top_k)

    def _params(self, experts: int) -> int:
        """With so many routed experts in a layer."""
        attention = self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        ffn = 3 * self.dim * self.ffn_dim
        routed = 3 * self.dim * self.expert_width * (experts + self.shared_experts) + self.dim * self.num_experts
        with_ffn = self.dense_layers if self.family == "moe" else self.num_layers
        layers = self.num_layers * (attention + 2 * self.dim) + with_ffn * ffn + (self.num_layers - with_ffn) * routed
        return layers + (1 if self.tied else 2) * self.vocab_size * self.dim + self.dim

    def flops_per_token(self, seq_len: int, convention: str = "full") -> int:
        """Training FLOPs per token (`training_flops`)."""
        norms, looked_up = (2 * self.num_layers + 1) * self.dim, 0 if self.tied else self.vocab_size * self.dim
        matmul = self.active_params - norms - looked_up
        width = self.num_layers * self.num_heads * self.head_dim
        return int(training_flops(matmul, 2 * width * seq_len, self.active_params, convention))


CONVENTIONS = ("full", "causal", "6N")  # of counting FLOPs


def training_flops(matmul_params: Any, scores: Any, active_params: Any, convention: str = "full") -> Any:
    """Training FLOPs per token, the one count of the project; numbers or columns of them. 6 for each weight of a
    product that a token meets (forward, and two backward; the embedding look-up is none), and 6 for each element of
    `scores`: (width of queries + of values) x keys, over all layers.

    full: all of attention (PaLM, arXiv:2204.02311, appendix B); what `train` and `plan` call MFU. causal: half of it
    (Megatron-LM, num_floating_point_operations). 6N: 6 x active parameters, no attention."""
    assert convention in CONVENTIONS, convention
    if convention == "6N":
        return 6 * active_params
    half = 2 if convention == "causal" else 1
    return 6 * matmul_params + 6 * scores / half


MFU_CONVENTION = "6N + 12*L*d*T FLOPs per token, causal attention not halved, embedding look-up not counted"
MFU_EXPERTS = f"{MFU_CONVENTION}, of the experts a token's own"
