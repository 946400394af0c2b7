"""A linear layer per expert over rows that are sorted by expert: one grouped kernel where torch has one for the device,
the dtype and the widths, else a loop. The gradients are written out, so that the weights' gradient can be taken on its
own.

Shapes: T rows, D in, O out, E experts; w_OD holds the O rows of one expert after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.kernels.swiglu import gate, gate_backward

KERNEL_DTYPES = (torch.bfloat16, torch.float32)
KERNEL_DEVICES = ("cpu", "cuda")
KERNEL_ALIGN_BYTES = 16  # of a row of either operand


@torch.compiler.disable  # it cannot trace the kernel in fp32, nor the loop
def grouped_linear(x_TD: Tensor, w_OD: Tensor, counts_E: Tensor) -> Tensor:
    """Multiply the first counts_E[0] rows by the first expert's weights, and so on, to (T, O). Any expert, or all of
    them, may have no rows; gradients are then zero."""
    return _GroupedLinear.apply(x_TD, w_OD, counts_E)


def input_gradient(grad_TO: Tensor, w_OD: Tensor, counts_E: Tensor) -> Tensor:
    return _multiply(grad_TO, _by_expert(w_OD, counts_E), counts_E)


def weight_gradient(x_TD: Tensor, grad_TO: Tensor, counts_E: Tensor) -> Tensor:
    """Return the gradient of w_OD, in its shape."""
    if _kernel_fits(x_TD, grad_TO):
        return F.grouped_mm(grad_TO.mT, x_TD, offs=_offsets(counts_E)).flatten(0, 1)
    counts = counts_E.tolist()
    pairs = zip(grad_TO.split(counts), x_TD.split(counts), strict=True)
    return torch.cat([grad.mT @ x for grad, x in pairs])


@torch.compiler.disable
def grouped_feed_forward(x_TD: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, counts_E: Tensor) -> Tensor:
    """Apply a SwiGLU feed-forward per expert. Of its inside it keeps only the first two products
    (kernels/swiglu.py)."""
    return _GroupedFeedForward.apply(x_TD, w1, w2, w3, counts_E)


class _GroupedFeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, counts_E: Tensor) -> Tensor:
        a_TF, b_TF = (_multiply(x_TD, _by_expert(w, counts_E).mT, counts_E) for w in (w1, w3))
        ctx.save_for_backward(x_TD, w1, w2, w3, counts_E, a_TF, b_TF)
        return _multiply(gate(a_TF, b_TF), _by_expert(w2, counts_E).mT, counts_E)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, w1, w2, w3, counts_E, a_TF, b_TF = ctx.saved_tensors
        grad_TD = grad_TD.contiguous()
        da_TF, db_TF, h_TF = gate_backward(a_TF, b_TF, input_gradient(grad_TD, w2, counts_E))
        dx_TD = input_gradient(da_TF, w1, counts_E) + input_gradient(db_TF, w3, counts_E)
        dw1, dw3 = weight_gradient(x_TD, da_TF, counts_E), weight_gradient(x_TD, db_TF, counts_E)
        return dx_TD, dw1, weight_gradient(h_TF, grad_TD, counts_E), dw3, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w_OD: Tensor, counts_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, w_OD, counts_E)
        return _multiply(x_TD, _by_expert(w_OD, counts_E).mT, counts_E)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_TD, w_OD, counts_E = ctx.saved_tensors
        grad_TO = grad_TO.contiguous()
        grad_x = input_gradient(grad_TO, w_OD, counts_E) if ctx.needs_input_grad[0] else None
        grad_w = weight_gradient(x_TD, grad_TO, counts_E) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None


def _by_expert(w_OD: Tensor, counts_E: Tensor) -> Tensor:
    return w_OD.view(counts_E.shape[0], -1, w_OD.shape[1])


def _multiply(x_TI: Tensor, w_EIJ: Tensor, counts_E: Tensor) -> Tensor:
    if _kernel_fits(x_TI, w_EIJ):
        return F.grouped_mm(x_TI, w_EIJ, offs=_offsets(counts_E))
    parts = zip(x_TI.split(counts_E.tolist()), w_EIJ, strict=True)
    return torch.cat([part @ w_IJ for part, w_IJ in parts])


def _offsets(counts_E: Tensor) -> Tensor:
    return counts_E.cumsum(0).to(torch.int32)


def _kernel_fits(x_TI: Tensor, other: Tensor) -> bool:
    """Return whether torch's kernel takes these operands. Both are dense, so their widths give the strides."""
    widths = (x_TI.shape[-1], *other.shape[1:]) if other.dim() == 3 else (x_TI.shape[-1], other.shape[-1])
    return (
        hasattr(F, "grouped_mm")
        and x_TI.dtype in KERNEL_DTYPES
        and x_TI.device.type in KERNEL_DEVICES
        and x_TI.shape[0] > 0
        and all(width * x_TI.element_size() % KERNEL_ALIGN_BYTES == 0 for width in widths)
    )
