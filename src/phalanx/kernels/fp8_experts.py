"""A SwiGLU feed-forward per expert whose nine grouped products run in fp8, over rows that are sorted by expert.

All operands are e4m3: the grouped kernel takes nothing else. Where a product sums over features (output and input
gradient), every row has a scale of its own, from its largest element. Where it sums over tokens (weight gradient), an
expert has one: the largest of its rows. Elements keep their digits down to 2^-15 of the largest, so a scale for each
column would only add a pass over memory.

The kernel needs both operands row-major along the summed dim. For the weight gradient that dim is an expert's rows,
which must begin at a multiple of 16 and be at least one. So operands that are transposed ("turned") are padded with
zeros to whole blocks, at least one; no others are.

Shapes: N rows, D model dim, F inner dim, E experts, W either width, P columns of a turned operand; weights hold the
rows of one expert after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.fp8 import ALIGN, FORWARD, TINY
from phalanx.kernels.swiglu import gate, gate_backward

BLOCK = 128  # rows: the tile of the product kernel along the summed dim, so that padding costs it nothing
MOST_EXPERTS = 1023  # the most that the product kernel takes
TOP = torch.finfo(FORWARD).max


class Groups(NamedTuple):
    """Where each expert's rows end, plain and turned."""

    ends_E: Tensor
    padded_E: Tensor
    columns: int  # at least the last of the padded ends, which the host need not know


def by_counts(counts_E: Tensor, rows: int) -> Groups:
    blocks_E = ((counts_E + (BLOCK - 1)) // BLOCK).clamp(min=1)
    ends_E, padded_E = (n.cumsum(0).to(torch.int32) for n in (counts_E, blocks_E * BLOCK))
    return Groups(ends_E, padded_E, (-(-rows // BLOCK) + counts_E.shape[0]) * BLOCK)


def of_weights(experts: int, rows: int, device: torch.device) -> Groups:
    """Group the rows of a weight: every expert has the same number."""
    padded = -(-rows // BLOCK) * BLOCK
    number_E = torch.arange(1, experts + 1, dtype=torch.int32, device=device)
    return Groups(number_E * rows, number_E * padded, experts * padded)


def fits(x_ND: Tensor, w1: Tensor, experts: int) -> bool:
    """Return whether fp8 is used, not bf16: all widths are multiples of 16, there are rows, and not too many
    experts."""
    widths = (x_ND.shape[1], w1.shape[0] // experts)
    return x_ND.shape[0] > 0 and experts <= MOST_EXPERTS and all(width % ALIGN == 0 for width in widths)


# -- rounding: rows as they are, each with its scale; then turned, with a scale for each expert ---------


def round_rows(x_NW: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows in fp8, and their scales."""
    if not x_NW.is_cpu:
        from phalanx.kernels import triton_fp8_experts

        return triton_fp8_experts.round_rows(x_NW)
    scale_N = x_NW.abs().amax(-1).float().clamp(min=TINY) / TOP
    return _rounded(x_NW, scale_N.unsqueeze(-1)), scale_N


def largest_scales(scale_N: Tensor, ends_E: Tensor) -> Tensor:
    """Return the scales of the experts, (E,): the largest of their rows'. An expert without rows has a scale too."""
    if not scale_N.is_cpu:
        from phalanx.kernels import triton_fp8_experts

        return triton_fp8_experts.largest_scales(scale_N, ends_E)
    least_E = scale_N.new_full(ends_E.shape, TINY / TOP)
    return least_E.scatter_reduce(0, _expert_of(scale_N.shape[0], ends_E), scale_N, "amax")


def turn(x_NW: Tensor, scale_E: Tensor, groups: Groups) -> Tensor:
    """Return x in fp8 and transposed, (W, P), with zeros between the experts."""
    if not x_NW.is_cpu:
        from phalanx.kernels import triton_fp8_experts

        return triton_fp8_experts.turn(x_NW, scale_E, groups)
    expert_N = _expert_of(x_NW.shape[0], groups.ends_E)
    shift_E = F.pad(groups.padded_E[:-1] - groups.ends_E[:-1], (1, 0))
    place_N = torch.arange(x_NW.shape[0], device=x_NW.device) + shift_E[expert_N]
    out_PW = torch.zeros(groups.columns, x_NW.shape[1], device=x_NW.device)
    out_PW[place_N] = _rounded(x_NW, scale_E[expert_N].unsqueeze(-1)).float()
    return out_PW.t().contiguous().to(FORWARD)


def gate_rows(a_NF: Tensor, b_NF: Tensor) -> tuple[Tensor, Tensor]:
    """Return `round_rows` of silu(a) * b."""
    if not a_NF.is_cpu:
        from phalanx.kernels import triton_fp8_experts

        return triton_fp8_experts.gate_rows(a_NF, b_NF)
    return round_rows(gate(a_NF.float(), b_NF.float()))


def gate_backward_rows(a_NF: Tensor, b_NF: Tensor, grad_NF: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `round_rows` of the gradients of a and of b."""
    if not a_NF.is_cpu:
        from phalanx.kernels import triton_fp8_experts

        return triton_fp8_experts.gate_backward_rows(a_NF, b_NF, grad_NF)
    da_NF, db_NF, _ = gate_backward(a_NF.float(), b_NF.float(), grad_NF.float())
    return *round_rows(da_NF), *round_rows(db_NF)


def gate_backward_turn(
    a_NF: Tensor, b_NF: Tensor, grad_NF: Tensor, das_E: Tensor, dbs_E: Tensor, hs_E: Tensor, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `turn` of the gradients of a and of b, and of silu(a) * b."""
    if not a_NF.is_cpu:
        from phalanx.kernels import triton_fp8_experts

        return triton_fp8_experts.gate_backward_turn(a_NF, b_NF, grad_NF, das_E, dbs_E, hs_E, groups)
    da_NF, db_NF, h_NF = gate_backward(a_NF.float(), b_NF.float(), grad_NF.float())
    return turn(da_NF, das_E, groups), turn(db_NF, dbs_E, groups), turn(h_NF, hs_E, groups)


def _rounded(x: Tensor, scale: Tensor) -> Tensor:
    return (x.float() * (1.0 / scale)).clamp(-TOP, TOP).to(FORWARD)


def _expert_of(rows: int, ends_E: Tensor) -> Tensor:
    return torch.searchsorted(ends_E, torch.arange(rows, dtype=torch.int32, device=ends_E.device), right=True)


# -- products: sums in fp32, results in bf16 ---------------------------------------------------------


def by_weights(x8_NI: Tensor, w8_EIJ: Tensor, xs_N: Tensor, ws_EJ: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each row by its expert's weights, to (N, J)."""
    if not x8_NI.is_cpu:
        return _multiply(x8_NI, w8_EIJ, xs_N, ws_EJ, ends_E)
    sums_NJ = F.grouped_mm(x8_NI.to(torch.bfloat16), w8_EIJ.to(torch.bfloat16), offs=ends_E)  # operands are exact
    return (sums_NJ * xs_N.unsqueeze(-1) * ws_EJ[_expert_of(xs_N.shape[0], ends_E)]).to(torch.bfloat16)


def over_rows(g8_OP: Tensor, x8_DP: Tensor, gs_E: Tensor, xs_E: Tensor, padded_E: Tensor) -> Tensor:
    """Return the gradient of a weight, in its shape."""
    if not g8_OP.is_cpu:
        scales = (_spread(gs_E, g8_OP.shape[0]).view(-1), _spread(xs_E, x8_DP.shape[0]).view(-1))
        return _multiply(g8_OP, x8_DP.t(), *scales, padded_E).flatten(0, 1)
    sums_EOD = F.grouped_mm(g8_OP.to(torch.bfloat16), x8_DP.to(torch.bfloat16).t(), offs=padded_E)
    return (sums_EOD * (gs_E * xs_E).view(-1, 1, 1)).to(torch.bfloat16).flatten(0, 1)


def _multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, ends_E: Tensor) -> Tensor:
    return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs=ends_E, out_dtype=torch.bfloat16, use_fast_accum=True)


def _spread(scale_E: Tensor, width: int) -> Tensor:
    return scale_E.unsqueeze(-1).expand(-1, width).contiguous()


class Weight(NamedTuple):
    """A weight by expert in the form that the output's product needs, and the scales by which it is turned."""

    w8_EIJ: Tensor
    scale_EJ: Tensor
    turned_E: Tensor


def forward_weight(w: Tensor, experts: int) -> Weight:
    rows = w.shape[0] // experts
    w8, scale = round_rows(w)
    scale_EJ = scale.view(experts, rows)
    return Weight(w8.view(experts, rows, -1).mT, scale_EJ, scale_EJ.amax(-1))


def backward_weight(w: Tensor, turned_E: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight in the form that the input gradient's product needs, with its scales."""
    experts = turned_E.shape[0]
    rows = w.shape[0] // experts
    w8_DEO = turn(w, turned_E, of_weights(experts, rows, w.device)).unflatten(1, (experts, -1))
    return w8_DEO[..., :rows].permute(1, 2, 0), _spread(turned_E, w.shape[1])


def _input_gradient(g8_NO: Tensor, gs_N: Tensor, w: Tensor, turned_E: Tensor, ends_E: Tensor) -> Tensor:
    w8_EOD, scale_ED = backward_weight(w, turned_E)
    return by_weights(g8_NO, w8_EOD, gs_N, scale_ED, ends_E)


class _FeedForward(torch.autograd.Function):
    """Keeps the input in fp8, turned, and the first two products."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, counts_E: Tensor) -> Tensor:
        x_ND, experts = x_ND.contiguous(), counts_E.shape[0]
        groups = by_counts(counts_E, x_ND.shape[0])
        x8_ND, xs_N = round_rows(x_ND)
        xs_E = largest_scales(xs_N, groups.ends_E)
        first, second, third = (forward_weight(w, experts) for w in (w1, w2, w3))
        a_NF, b_NF = (by_weights(x8_ND, w.w8_EIJ, xs_N, w.scale_EJ, groups.ends_E) for w in (first, third))
        h8_NF, hs_N = gate_rows(a_NF, b_NF)
        hs_E = largest_scales(hs_N, groups.ends_E)
        turned = (w.turned_E for w in (first, second, third))
        ctx.save_for_backward(turn(x_ND, xs_E, groups), xs_E, a_NF, b_NF, hs_E, w1, w2, w3, *turned, *groups[:2])
        ctx.columns = groups.columns
        return by_weights(h8_NF, second.w8_EIJ, hs_N, second.scale_EJ, groups.ends_E)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        x8_DP, xs_E, a_NF, b_NF, hs_E, w1, w2, w3, turned1, turned2, turned3, ends_E, padded_E = ctx.saved_tensors
        groups, grad_ND = Groups(ends_E, padded_E, ctx.columns), grad_ND.contiguous()
        g8_ND, gs_N = round_rows(grad_ND)
        gs_E = largest_scales(gs_N, ends_E)
        dh_NF = _input_gradient(g8_ND, gs_N, w2, turned2, ends_E)
        da8_NF, das_N, db8_NF, dbs_N = gate_backward_rows(a_NF, b_NF, dh_NF)
        das_E, dbs_E = largest_scales(das_N, ends_E), largest_scales(dbs_N, ends_E)
        da8_FP, db8_FP, h8_FP = gate_backward_turn(a_NF, b_NF, dh_NF, das_E, dbs_E, hs_E, groups)
        dw2 = over_rows(turn(grad_ND, gs_E, groups), h8_FP, gs_E, hs_E, padded_E)
        dw1, dw3 = over_rows(da8_FP, x8_DP, das_E, xs_E, padded_E), over_rows(db8_FP, x8_DP, dbs_E, xs_E, padded_E)
        dx_ND = _input_gradient(da8_NF, das_N, w1, turned1, ends_E)
        dx_ND = dx_ND + _input_gradient(db8_NF, dbs_N, w3, turned3, ends_E)
        return dx_ND, dw1, dw2, dw3, None


@torch.compiler.disable  # the number of rows may differ every time
def feed_forward(x_ND: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, counts_E: Tensor) -> Tensor:
    """Apply the feed-forward to rows sorted by expert; `counts_E` says how many belong to each. `fits` tells for which
    operands to use this."""
    return _FeedForward.apply(x_ND, w1, w2, w3, counts_E)
