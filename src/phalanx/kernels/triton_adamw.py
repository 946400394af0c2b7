"""Triton kernel of adamw.py. It moves 18 bytes an element with moments in bf16, 26 in fp32. Divisions and roots are
rounded as IEEE requires, and products are not fused with sums, so that a CPU computes the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from phalanx.kernels.adamw import Rates

BLOCK = 2048


@triton.jit
def _adamw(
    weight,
    remainder,
    grad,
    mean,
    square,
    now,
    gate,
    numel,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    decay,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    lr = tl.load(now)
    correct_mean = tl.load(now + 1)
    correct_square = tl.load(now + 2)
    g = tl.load(grad + i, inside, 0).to(tl.float32) * tl.load(now + 3)
    m = tl.load(mean + i, inside, 0).to(tl.float32) * beta1 + g * rest1
    v = tl.load(square + i, inside, 0).to(tl.float32) * beta2 + (g * g) * rest2
    high = tl.load(weight + i, inside, 0).to(tl.int16, bitcast=True).to(tl.int32)
    bits = (high << 16) + tl.load(remainder + i, inside, 0).to(tl.int32)
    master = bits.to(tl.float32, bitcast=True) * (1 - lr * decay)
    moved = master - tl.div_rn(lr * (m * correct_mean), tl.sqrt_rn(v * correct_square) + eps)
    bits = moved.to(tl.int32, bitcast=True)
    high = (bits + 0x8000) >> 16
    inside = inside & (tl.load(gate) != 0)
    tl.store(weight + i, high.to(tl.int16).to(tl.bfloat16, bitcast=True), inside)
    tl.store(remainder + i, (bits - (high << 16)).to(tl.int16), inside)
    tl.store(mean + i, m.to(mean.dtype.element_ty), inside)
    tl.store(square + i, v.to(square.dtype.element_ty), inside)


def update_(
    weight: Tensor, remainder: Tensor, grad: Tensor, mean: Tensor, square: Tensor, rates: Rates, gate: Tensor
) -> None:
    _adamw[(triton.cdiv(weight.numel(), BLOCK),)](
        weight,
        remainder,
        grad,
        mean,
        square,
        rates.now,
        gate,
        weight.numel(),
        rates.beta1,
        1 - rates.beta1,
        rates.beta2,
        1 - rates.beta2,
        rates.eps,
        rates.weight_decay,
        BLOCK=BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
