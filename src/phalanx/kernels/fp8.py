"""Linear layers whose three products (output, input gradient, weight gradient) run in fp8. Every tensor has one scale,
taken from its own largest element just before it is rounded ("per-tensor current scaling"): e4m3 for activations and
weights, e5m2 for gradients, which need range more than digits. Sums are in fp32, results in bf16.

The product kernel needs both operands row-major along the summed dim, so a tensor that takes part in two products is
needed plain and transposed: one pass over it writes both. A CPU rounds in the same way and then computes a plain
product.

Shapes: T tokens, D in, O out, F inner dim of a feed-forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from phalanx.kernels import operator
from phalanx.kernels.swiglu import gate, gate_backward

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
TINY = 1e-12  # the least maximum, so that a tensor of zeros has a scale too
ROUNDED_UP = 1.25  # at most, by e5m2 (1/8), e4m3 (1/16) and bf16
ALIGN = 16  # every side of a product is a multiple of it


def fits(tokens: int, weight: Tensor) -> bool:
    """Return whether fp8 is used. A product with a side that is not a multiple of 16 falls back to bf16."""
    return tokens % ALIGN == 0 and all(side % ALIGN == 0 for side in weight.shape)


def scale_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale at which the largest element just fits in `dtype`. Rows are reduced first: when compiled, that
    half is fused into the operation that makes x."""
    return _scale(x.detach().abs().amax(-1).amax().float(), dtype)


def _scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    return largest.clamp(min=TINY) / torch.finfo(dtype).max


def round_both(x: Tensor, scale: Tensor, dtype: torch.dtype, plain: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return x / scale in fp8, plain and transposed; empty where it is not wanted."""
    if x.device.type != "cpu":
        return _round_both(x, scale, dtype, plain, transposed)
    top = torch.finfo(dtype).max
    rounded = (x.float() * (1.0 / scale)).clamp(-top, top).to(dtype)
    return rounded if plain else rounded.new_empty(0), rounded.t().contiguous() if transposed else rounded.new_empty(0)


@operator
def _round_both(x: Tensor, scale: Tensor, dtype: torch.dtype, plain: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    from phalanx.kernels import triton_fp8

    return triton_fp8.round_both(x, scale, dtype, plain, transposed)


def gate_largest(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(a) * b, and the largest absolute values of it, of a and of b."""
    if a.device.type != "cpu":
        return _gate_largest(a, b)
    h = gate(a, b)
    return h, torch.stack([t.abs().amax().float() for t in (h, a, b)])


@operator
def _gate_largest(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    from phalanx.kernels import triton_fp8

    return triton_fp8.gate_largest(a, b)


def gate_backward_rounded(
    a_TF: Tensor, b_TF: Tensor, grad_TF: Tensor, hs: Tensor, das: Tensor, dbs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return in fp8 the gradients of a and of b, each plain and transposed, and silu(a) * b, transposed."""
    if a_TF.device.type != "cpu":
        return _gate_backward_rounded(a_TF, b_TF, grad_TF, hs, das, dbs)
    da_TF, db_TF, h_TF = gate_backward(a_TF, b_TF, grad_TF)
    _, h8_FT = round_both(h_TF, hs, FORWARD, False, True)
    return *round_both(da_TF, das, GRADIENT, True, True), *round_both(db_TF, dbs, GRADIENT, True, True), h8_FT


@operator
def _gate_backward_rounded(
    a: Tensor, b: Tensor, grad: Tensor, hs: Tensor, das: Tensor, dbs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from phalanx.kernels import triton_fp8

    return triton_fp8.gate_backward_rounded(a, b, grad, hs, das, dbs)


def gate_gradient_scales(grad_TD: Tensor, s2: Tensor, largest_3: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales for the gradients of a and b before these are made, so that no pass looks for their largest values.
    They follow from |grad w2| <= sum |grad| * max |w2|, |silu'| < 1.1 and |silu(a)| <= |a|, and are 20 to 120 times too
    large (docs/performance.md). That is no loss: e5m2 has as many digits at any size, and reaches 2^30 down from its
    largest number."""
    row = grad_TD.detach().abs().sum(-1, dtype=torch.float32).amax()
    largest = ROUNDED_UP * row * (s2 * torch.finfo(FORWARD).max)
    _, largest_a, largest_b = largest_3.unbind()
    return _scale(1.1 * largest * largest_b, GRADIENT), _scale(largest * largest_a, GRADIENT)


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Return a b' in bf16, of two fp8 tensors."""
    if a.device.type != "cpu":
        return torch._scaled_mm(
            a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    return ((a.float() @ b.float().t()) * (scale_a * scale_b)).to(torch.bfloat16)


class _Linears(torch.autograd.Function):
    """Several layers on the same input, which is rounded once."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        xs, scales = scale_of(x_TD, FORWARD), [scale_of(w_OD, FORWARD) for w_OD in weights]
        x8_TD, x8_DT = round_both(x_TD, xs, FORWARD, True, True)
        ctx.save_for_backward(x8_DT, xs, *weights, *scales)
        rounded = [round_both(w_OD, ws, FORWARD, True, False)[0] for w_OD, ws in zip(weights, scales, strict=True)]
        return tuple([product(x8_TD, w8_OD, xs, ws) for w8_OD, ws in zip(rounded, scales, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x8_DT, xs, *rest = ctx.saved_tensors
        weights, scales = rest[: len(grads)], rest[len(grads) :]
        inputs, outputs = [], []
        for grad_TO, w_OD, ws in zip(grads, weights, scales, strict=True):
            gs = scale_of(grad_TO, GRADIENT)
            g8_TO, g8_OT = round_both(grad_TO, gs, GRADIENT, True, True)
            inputs.append(product(g8_TO, round_both(w_OD, ws, FORWARD, False, True)[1], gs, ws))
            outputs.append(product(g8_OT, x8_DT, gs, xs))
        dx_TD = inputs[0]
        for more_TD in inputs[1:]:
            dx_TD = dx_TD + more_TD
        return dx_TD, *outputs


class _FeedForward(torch.autograd.Function):
    """As in swiglu.py; x is rounded once for both of its products."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, w1_FD: Tensor, w2_DF: Tensor, w3_FD: Tensor) -> Tensor:
        xs, s1, s2, s3 = (scale_of(t, FORWARD) for t in (x_TD, w1_FD, w2_DF, w3_FD))
        x8_TD, x8_DT = round_both(x_TD, xs, FORWARD, True, True)
        a_TF = product(x8_TD, round_both(w1_FD, s1, FORWARD, True, False)[0], xs, s1)
        b_TF = product(x8_TD, round_both(w3_FD, s3, FORWARD, True, False)[0], xs, s3)
        h_TF, largest_3 = gate_largest(a_TF, b_TF)
        hs = _scale(largest_3[0], FORWARD)
        h8_TF, _ = round_both(h_TF, hs, FORWARD, True, False)
        w8_DF, _ = round_both(w2_DF, s2, FORWARD, True, False)
        ctx.save_for_backward(x8_DT, xs, a_TF, b_TF, hs, largest_3, w1_FD, s1, w2_DF, s2, w3_FD, s3)
        return product(h8_TF, w8_DF, hs, s2)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x8_DT, xs, a_TF, b_TF, hs, largest_3, w1_FD, s1, w2_DF, s2, w3_FD, s3 = ctx.saved_tensors
        gs = scale_of(grad_TD, GRADIENT)
        g8_TD, g8_DT = round_both(grad_TD, gs, GRADIENT, True, True)
        dh_TF = product(g8_TD, round_both(w2_DF, s2, FORWARD, False, True)[1], gs, s2)
        das, dbs = gate_gradient_scales(grad_TD, s2, largest_3)
        da8_TF, da8_FT, db8_TF, db8_FT, h8_FT = gate_backward_rounded(a_TF, b_TF, dh_TF, hs, das, dbs)
        dw2_DF = product(g8_DT, h8_FT, gs, hs)
        dx_TD = product(da8_TF, round_both(w1_FD, s1, FORWARD, False, True)[1], das, s1)
        dx_TD = dx_TD + product(db8_TF, round_both(w3_FD, s3, FORWARD, False, True)[1], dbs, s3)
        return dx_TD, product(da8_FT, x8_DT, das, xs), dw2_DF, product(db8_FT, x8_DT, dbs, xs)


def linears(x: Tensor, *weights: Tensor) -> list[Tensor]:
    """Return x w' over the last dim of x, for each of the weights. `fits` tells for which operands to use this."""
    return [out.unflatten(0, x.shape[:-1]) for out in _Linears.apply(x.flatten(0, -2), *weights)]


def feed_forward(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return _FeedForward.apply(x.flatten(0, -2), w1, w2, w3).unflatten(0, x.shape[:-1])
