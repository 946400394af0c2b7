"""The SwiGLU feed-forward, (silu(x w1') * (x w3')) w2', as one function. It keeps x and the two products for the
backward, but not silu(a) * b, which the backward computes again in a pass that it needs anyway.

Shapes: T tokens, D model dim, F inner dim; weights are those of nn.Linear, (out, in)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels import has_kernel, operator

_silu_backward = torch.ops.aten.silu_backward


def gate(a: Tensor, b: Tensor) -> Tensor:
    """Return silu(a) * b."""
    return _gate(a, b) if has_kernel(a) else F.silu(a) * b


def gate_backward(a: Tensor, b: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a and b, and silu(a) * b again."""
    if has_kernel(a):
        return _gate_backward(a, b, grad)
    s = F.silu(a)
    return _silu_backward(grad * b, a), grad * s, s * b


@operator
def _gate(a: Tensor, b: Tensor) -> Tensor:
    from phalanx.kernels import triton_swiglu

    return triton_swiglu.gate(a, b)


@operator
def _gate_backward(a: Tensor, b: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from phalanx.kernels import triton_swiglu

    return triton_swiglu.gate_backward(a, b, grad)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w1_FD: Tensor, w2_DF: Tensor, w3_FD: Tensor) -> Tensor:
        a_TF, b_TF = x_TD @ w1_FD.t(), x_TD @ w3_FD.t()
        ctx.save_for_backward(x_TD, w1_FD, w2_DF, w3_FD, a_TF, b_TF)
        return gate(a_TF, b_TF) @ w2_DF.t()

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x_TD, w1_FD, w2_DF, w3_FD, a_TF, b_TF = ctx.saved_tensors
        da_TF, db_TF, h_TF = gate_backward(a_TF, b_TF, grad_TD @ w2_DF)
        dx_TD = torch.addmm(da_TF @ w1_FD, db_TF, w3_FD)
        return dx_TD, da_TF.t() @ x_TD, grad_TD.t() @ h_TF, db_TF.t() @ x_TD


def feed_forward(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Apply the feed-forward over the last dim of x."""
    return _FeedForward.apply(x.flatten(0, -2), w1, w2, w3).unflatten(0, x.shape[:-1])
