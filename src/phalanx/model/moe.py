"""A decoder with experts: the dense family's layers with a mixture of SwiGLU experts in place of the FFN, in all but
the first `dense_layers`. Every token goes to its top_k experts; none is dropped.

Nothing here knows about parallelism, but `MoE` has three plain functions that a parallel axis replaces: `exchange`
(experts on other ranks), `sum_counts` and `sequence_length` (a sequence that is split over ranks).

Shapes: B batch, L sequence, T = B x L tokens, D model dim, E experts, K experts of a token, N = T x K rows, F width of
an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.shape import ModelConfig
from phalanx.kernels.expert_rows import combine_rows, take_rows
from phalanx.model.dense import DENSE, Block, Decoder, FeedForward, HalfBlock
from phalanx.model.family import Batch, Family, Init
from phalanx.model.grouped import grouped_linear

Back = Callable[[Tensor], Tensor]


def own_rows(rows_ND: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Back]:
    """Exchange nothing, because every expert is here."""
    return rows_ND, counts_E, lambda out_ND: out_ND


def own_counts(counts_BE: Tensor) -> Tensor:
    return counts_BE


def own_length(length: int) -> int:
    return length


def inverse(order_N: Tensor) -> Tensor:
    """Invert a permutation."""
    return torch.empty_like(order_N).scatter_(0, order_N, torch.arange(len(order_N), device=order_N.device))


def next_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """Return the bias after a step: an expert with less than the mean load is then chosen more readily, one with more
    less (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). The load is compared in integers, so that a tie is a tie."""
    missing_E = load_E.sum() - load_E * load_E.numel()
    return bias_E + rate * missing_E.sign().to(bias_E.dtype)


class _Routed(torch.autograd.Function):
    """Passes the layer's output on. In backward the balance loss gets its gradient, and the load is counted. Forward is
    no place to count, because it runs twice when activations are recomputed."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, balance: Tensor, scale: Tensor, load_E: Tensor, moe: MoE) -> Tensor:
        ctx.save_for_backward(scale, load_E)
        ctx.moe = moe
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        scale, load_E = ctx.saved_tensors
        if ctx.moe.training:
            ctx.moe.load_E = load_E.clone() if ctx.moe.load_E is None else ctx.moe.load_E + load_E
        return grad, scale, None, None, None


class Experts(nn.Module):
    """The experts that this rank holds, as many as the tensors have rows for."""

    def __init__(self, num_experts: int, dim: int, inner: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts * inner, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts * dim, inner))
        self.w3 = nn.Parameter(torch.empty(num_experts * inner, dim))
        self.multiply = grouped_linear  # a plain function, replaced to put weight gradients off

    def forward(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        """Apply each expert to its rows. They are sorted by expert, and `counts_E` says how many belong to each."""
        assert self.w1.shape[0] == counts_E.shape[0] * self.w2.shape[1], (self.w1.shape, counts_E.shape)
        inner_NF = F.silu(self.multiply(x_ND, self.w1, counts_E)) * self.multiply(x_ND, self.w3, counts_E)
        return self.multiply(inner_NF, self.w2, counts_E)


class MoE(nn.Module):
    # Replaced by the parallel axes:
    exchange: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Back]]  # sends rows to where their experts are
    sum_counts: Callable[[Tensor], Tensor]  # over the ranks that hold parts of the same sequences
    sequence_length: Callable[[int], int]  # of the whole sequence, from that of this rank's part

    load_E: Tensor | None  # tokens of each expert since it was last cleared, on this rank
    bias: Tensor | None

    def __init__(self, c: ModelConfig):
        super().__init__()
        self.config = c
        self.gate = nn.Linear(c.dim, c.num_experts, bias=False)
        self.experts = Experts(c.num_experts, c.dim, c.expert_width)
        self.shared = FeedForward(c.dim, c.shared_experts * c.expert_width) if c.shared_experts else None
        bias = torch.zeros(c.num_experts, dtype=torch.float32) if c.balance_bias > 0 else None
        self.register_buffer("bias", bias)
        self.load_E = None
        self.exchange, self.sum_counts, self.sequence_length = own_rows, own_counts, own_length

    def forward(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        c = self.config
        scores_BLE = self._scores(x_BLD)
        ids_BLK, weights_BLK = self._choose(scores_BLE)
        counts_BE = _count(ids_BLK.flatten(1), c.num_experts)
        counts_E = counts_BE.sum(0)
        out_BLD = self._route(x_BLD, ids_BLK, weights_BLK, counts_E)
        if self.shared is not None:
            out_BLD = out_BLD + self.shared(x_BLD)
        balance = self._balance(scores_BLE, counts_BE)
        scale = balance.new_ones(()) if batch.even is None else batch.even.to(balance.dtype)
        return _Routed.apply(out_BLD, balance, scale, counts_E, self)

    def _scores(self, x_BLD: Tensor) -> Tensor:
        """Score in fp32 at least: rounded logits would choose other experts."""
        dtype = torch.promote_types(x_BLD.dtype, torch.float32)
        logits_BLE = F.linear(x_BLD.to(dtype), self.gate.weight.to(dtype))
        return logits_BLE.sigmoid() if self.config.scoring == "sigmoid" else logits_BLE.softmax(-1)

    def _choose(self, scores_BLE: Tensor) -> tuple[Tensor, Tensor]:
        """Choose each token's experts and the weights of their outputs. The bias affects the choice, never the
        weights."""
        preference = scores_BLE.detach() if self.bias is None else scores_BLE.detach() + self.bias
        ids_BLK = preference.topk(self.config.top_k, dim=-1).indices
        chosen_BLK = scores_BLE.gather(-1, ids_BLK)
        return ids_BLK, chosen_BLK / chosen_BLK.sum(-1, keepdim=True) * self.config.route_scale

    def _route(self, x_BLD: Tensor, ids_BLK: Tensor, weights_BLK: Tensor, counts_E: Tensor) -> Tensor:
        top_k = ids_BLK.shape[-1]
        order_N = ids_BLK.flatten().argsort(stable=True)  # sorted row n is a copy of token order[n] // K
        places_TK = inverse(order_N).view(-1, top_k)
        rows_ND = take_rows(x_BLD.flatten(0, 1), order_N // top_k, places_TK)
        rows_ND, counts_E, back = self.exchange(rows_ND, counts_E)
        out_ND = back(self.experts(rows_ND, counts_E))
        return combine_rows(out_ND, places_TK, weights_BLK.flatten(0, 1)).view_as(x_BLD)

    def _balance(self, scores_BLE: Tensor, counts_BE: Tensor) -> Tensor:
        """Return the load-balance loss of every sequence times its length, summed over this rank's tokens: weight x E x
        sum_e f_e x P_e, where f_e is the share of the sequence's choices that fell on e and P_e the mean score
        (DeepSeek-V3, equations 17 to 20). It is taken by sequence, so that it does not depend on how a batch is cut."""
        c = self.config
        if c.balance_loss == 0:
            return scores_BLE.new_zeros(())
        choices = self.sequence_length(scores_BLE.shape[1]) * c.top_k
        share_BE = self.sum_counts(counts_BE).to(scores_BLE.dtype) / choices
        if c.scoring == "sigmoid":
            scores_BLE = scores_BLE / scores_BLE.sum(-1, keepdim=True)
        return c.balance_loss * c.num_experts * (share_BE * scores_BLE.sum(1)).sum()


def _count(ids_BN: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert occurs in each row."""
    counts_BE = ids_BN.new_zeros(ids_BN.shape[0], num_experts)
    return counts_BE.scatter_add_(1, ids_BN, torch.ones_like(ids_BN))


class MoEBlock(HalfBlock):
    def __init__(self, c: ModelConfig, window: int = 0):
        super().__init__(c, window=window)
        self.moe = MoE(c)

    def feed(self, x_BLD: Tensor, batch: Batch) -> Tensor:
        return self.moe(x_BLD, batch)


def build(c: ModelConfig) -> Decoder:
    def block(layer: int) -> HalfBlock:
        make = Block if layer < c.dense_layers else MoEBlock
        return make(c, window=c.window_of(layer))

    return Decoder(c, block)


def _init(name: str, c: ModelConfig) -> Init:
    return DENSE.init(f"{name}.weight" if ".experts." in name else name, c)


MOE = Family(
    build=build,
    init=_init,
    split={
        **DENSE.split,
        # Router and experts work on the rank's own slice of the sequence: only what every token uses is split.
        "layers.*.moe.shared": "gather",
        "layers.*.moe.shared.w[13]": "column",
        "layers.*.moe.shared.w2": "row",
    },
    optional=("layers.*.ffn", "layers.*.moe.shared"),
    first=DENSE.first,
    last=DENSE.last,
    experts=("layers.*.moe.experts",),
    buffers={"layers.*.moe.bias": 0.0},
    ends_in_head=True,
)
