"""Move rows to experts and back without a copy per choice in between: every token has K rows elsewhere, and `places_TK`
says where. Sums are in fp32 at least, in the order of the choices.

Shapes: T tokens, K choices of each, N = T x K rows, D width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.kernels import has_kernel, operator


def sum_rows(rows_ND: Tensor, places_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    """Return the sum of each token's rows, (T, D), weighted or not."""
    if has_kernel(rows_ND):
        return _sum_rows(rows_ND, places_TK, weights_TK)
    rows_TKD = rows_ND[places_TK]
    wide = torch.promote_types(rows_ND.dtype, torch.float32)
    rows_TKD = rows_TKD.to(wide) if weights_TK is None else rows_TKD * weights_TK.to(wide).unsqueeze(-1)
    return rows_TKD.sum(1).to(rows_ND.dtype)


def spread_rows(grad_TD: Tensor, rows_ND: Tensor, places_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows and the weights of `sum_rows`."""
    if has_kernel(rows_ND):
        return _spread_rows(grad_TD, rows_ND, places_TK, weights_TK)
    wide = torch.promote_types(rows_ND.dtype, torch.float32)
    grad_T1D = grad_TD.to(wide).unsqueeze(1)
    out_ND = torch.empty_like(rows_ND)
    out_ND[places_TK] = (grad_T1D * weights_TK.to(wide).unsqueeze(-1)).to(rows_ND.dtype)
    return out_ND, (grad_T1D * rows_ND[places_TK]).sum(-1).to(weights_TK.dtype)


@operator
def _sum_rows(rows_ND: Tensor, places_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    from phalanx.kernels import triton_rows

    return triton_rows.sum_rows(rows_ND, places_TK, weights_TK)


@operator
def _spread_rows(grad_TD: Tensor, rows_ND: Tensor, places_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
    from phalanx.kernels import triton_rows

    return triton_rows.spread_rows(grad_TD, rows_ND, places_TK, weights_TK)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, index_N: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(places_TK)
        return x_TD[index_N]

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (places_TK,) = ctx.saved_tensors
        if places_TK.shape[1] == 1:
            return grad_ND[places_TK.view(-1)], None, None
        return sum_rows(grad_ND.contiguous(), places_TK), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, places_TK: Tensor, weights_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_ND, places_TK, weights_TK)
        return sum_rows(rows_ND, places_TK, weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, Tensor]:
        drows_ND, dweights_TK = spread_rows(grad_TD.contiguous(), *ctx.saved_tensors)
        return drows_ND, None, dweights_TK


def take_rows(x_TD: Tensor, index_N: Tensor, places_TK: Tensor) -> Tensor:
    """Return x[index]. Each row is taken equally often, and `places_TK` lists where its copies go, so the gradient is a
    sum of rows in a fixed order, without atomics."""
    return _Take.apply(x_TD, index_N, places_TK)


def combine_rows(rows_ND: Tensor, places_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows, (T, D)."""
    return _Combine.apply(rows_ND.contiguous(), places_TK, weights_TK.contiguous())
