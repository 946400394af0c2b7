"""Arithmetic about tensors and models that needs no tensor: who holds which rows, how many parameters, how many FLOPs.
The planner and the engine both use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return [start, stop) of part `index` when `size` rows are cut into `parts`, as torch.chunk cuts them: ceil(size /
    parts) each, the last ones shorter or empty."""
    step = -(-size // parts) if size else 0
    return min(index * step, size), min((index + 1) * step, size)


def even_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return [start, stop) of part `index` when `size` is cut into `parts` that differ by at most one, so that none is
    empty while there are as many elements as parts."""
    return size * index // parts, size * (index + 1) // parts


LOSS_BYTES = 4 << 30  # of logits that a rank holds at a time; each chunk reads and writes a gradient in fp32


def loss_rows(vocab_size: int, tp: int, item_bytes: int) -> int:
    """Return for how many tokens logits are made at a time, the same on every tensor-parallel rank. They are rounded to
    128s if there are as many, which suits matrix products."""
    rows = LOSS_BYTES // (-(-vocab_size // tp) * item_bytes)
    return max(1, rows // 128 * 128 or rows)


def balance(costs: Sequence[float], parts: int) -> list[int]:
    """Return how many neighbouring items each of `parts` gets (at least one), so that the most expensive part costs as
    little as possible. Among equals, the earlier parts get more."""
    assert len(costs) >= parts, (len(costs), parts)
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    # best[k][i]: the most expensive part when the items from i on are cut into k parts, and where the first ends
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
    """The model: a family (a built-in name or `path.py:NAME`) and its sizes."""

    family: str = "dense"
    vocab_size: int = 257
    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    ffn_dim: int = 344
    head_width: int = 0  # width of one head; 0: dim / num_heads
    tied: bool = False
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    context: int = 0  # tokens of the longest sequence that it is made for; 0: not known
    # Positions (core/rotary.py).
    rope_scaling: str = "none"  # none | linear | llama3 | yarn
    rope_factor: float = 1.0
    rope_original: int = 0  # tokens of the context that the frequencies were made for: llama3, yarn
    rope_low: float = 1.0  # llama3: turns in that context, below which a frequency is stretched
    rope_high: float = 4.0  # llama3: turns from which it stays
    rope_slow: float = 1.0  # yarn: the same two bounds
    rope_fast: float = 32.0
    rope_gain: float = 0.0  # yarn: factor on queries and keys; 0: 0.1 ln(rope_factor) + 1
    rope_fraction: float = 1.0  # share of a head that is rotated
    rope_local_theta: float = 0.0  # base in layers with a window, which are not scaled then; 0: as in the others
    # Attention.
    qk_norm: str = "none"  # none | head | all: RMS norm of queries and keys, of each head or of all together
    attention_bias: str = "none"  # none | qkv | all
    attention_scale: float = 0.0  # factor on q k'; 0: 1 / sqrt(head width)
    attention_softcap: float = 0.0  # c tanh(q k' / c); 0: none
    window: int = 0  # keys that a query sees, its own included; 0: all before it
    window_from: int = 0  # the first layer with a window
    full_every: int = 0  # every n-th layer has no window; 0: all have it
    # The rest of a block, and the ends.
    norm_place: str = "pre"  # pre | post | both: norm of what goes into attention and FFN, of what comes out, of both
    norm_centered: bool = False  # norms multiply by 1 + weight
    activation: str = "silu"  # silu | gelu (tanh): of the gate
    ffn_bias: bool = False
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0
    z_loss: float = 0.0  # weight of logsumexp(logits)^2 beside a token's loss
    # The moe family: experts in place of the FFN, in all but the first dense_layers layers.
    num_experts: int = 8
    top_k: int = 2
    expert_dim: int = 0  # inner width of one expert; 0: ffn_dim
    shared_experts: int = 0  # each as wide as an expert, for every token
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

    def window_of(self, layer: int) -> int:
        """Return the window of a layer; 0: it sees everything before it."""
        full = self.full_every > 0 and (layer + 1) % self.full_every == 0
        return 0 if full or layer < self.window_from else self.window

    @property
    def windowed_layers(self) -> int:
        return sum(self.window_of(layer) > 0 for layer in range(self.num_layers))

    @property
    def layer_vectors(self) -> int:
        """Count the elements of a layer's norms and of its attention's biases."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms = (4 if self.norm_place == "both" else 2) * self.dim
        norms += {"none": 0, "head": 2 * self.head_dim, "all": q + kv}[self.qk_norm]
        return norms + {"none": 0, "qkv": q + 2 * kv, "all": q + 2 * kv + self.dim}[self.attention_bias]

    @property
    def ffn_vectors(self) -> int:
        """Count the elements of the biases of a layer's FFN; experts have none."""
        return 2 * self.ffn_dim + self.dim if self.ffn_bias else 0

    @property
    def num_params(self) -> int:
        """Count the parameters, exactly for the dense and the moe family; tests compare it with the built module."""
        return self._params(self.num_experts)

    @property
    def active_params(self) -> int:
        """Count the parameters that one token uses: of the routed experts, its own."""
        return self._params(self.top_k)

    def _params(self, experts: int) -> int:
        """Count the parameters with so many routed experts in a layer."""
        attention = self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        ffn = 3 * self.dim * self.ffn_dim
        routed = 3 * self.dim * self.expert_width * (experts + self.shared_experts) + self.dim * self.num_experts
        with_ffn = self.dense_layers if self.family == "moe" else self.num_layers
        layers = self.num_layers * attention + with_ffn * ffn + (self.num_layers - with_ffn) * routed
        return layers + self._vectors + (1 if self.tied else 2) * self.vocab_size * self.dim

    @property
    def _vectors(self) -> int:
        """Count the elements that are in no matrix."""
        with_ffn = self.dense_layers if self.family == "moe" else self.num_layers
        return self.num_layers * self.layer_vectors + with_ffn * self.ffn_vectors + self.dim

    def flops_per_token(self, seq_len: int, convention: str = "full") -> int:
        """Return the training FLOPs per token (`training_flops`)."""
        looked_up = 0 if self.tied else self.vocab_size * self.dim
        matmul = self.active_params - self._vectors - looked_up
        keys = (self.num_layers - self.windowed_layers) * seq_len
        keys += self.windowed_layers * int(window_keys(self.window, seq_len))
        scores = 2 * keys * self.num_heads * self.head_dim
        return int(training_flops(matmul, scores, self.active_params, convention))


def window_keys(window: Any, keys: Any) -> Any:
    """Return the keys that a token sees through a window, counted as `keys` are without one: as if there were no
    causality, which is twice what is seen. Through a window of w a token sees w keys, and fewer at the beginning: w -
    w^2 / 2 L on average."""
    return window * (2 * keys - window) // keys * (window < keys) + keys * (window >= keys)


CONVENTIONS = ("full", "causal", "6N")  # how FLOPs are counted


def training_flops(matmul_params: Any, scores: Any, active_params: Any, convention: str = "full") -> Any:
    """Return the training FLOPs per token, the one count of the project, for numbers or columns of them. They are 6 for
    each weight of a product that a token meets (forward, and two backward; the embedding look-up is none), and 6 for
    each element of `scores`: (width of queries + of values) x keys, over all layers.

    full: all of attention (PaLM, arXiv:2204.02311, appendix B); what `train` and `plan` call MFU. causal: half of it
    (Megatron-LM, num_floating_point_operations). 6N: 6 x active parameters, no attention."""
    assert convention in CONVENTIONS, convention
    if convention == "6N":
        return 6 * active_params
    half = 2 if convention == "causal" else 1
    return 6 * matmul_params + 6 * scores / half


MFU_CONVENTION = "6N + 12*L*d*T FLOPs per token, causal attention not halved, embedding look-up not counted"
MFU_EXPERTS = f"{MFU_CONVENTION}, of the experts a token's own"
