"""Triton kernel of square_sum.py, in integers: the square of an fp32 significand has 48 bits, and a shift puts it where
it belongs. The formula's steps in fp64 are exact but for rounding down, so the bits are the same."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, TIMES = 2048, 8


@triton.jit
def _shifted(value, left):
    return tl.where(
        left < 0, value >> tl.minimum(tl.maximum(-left, 0), 63), value << tl.minimum(tl.maximum(left, 0), 63)
    )


@triton.jit
def _add_squares(x, scale, limbs, numel, BITS: tl.constexpr, BLOCK: tl.constexpr, TIMES: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK * TIMES
    power = ((tl.load(scale).to(tl.int64, bitcast=True) >> 52) & 2047).to(tl.int32) - 1023  # of two
    high = tl.zeros((BLOCK,), tl.int64)
    low = tl.zeros((BLOCK,), tl.int64)
    for k in range(TIMES):
        i = first + k * BLOCK + tl.arange(0, BLOCK)
        bits = tl.load(x + i, i < numel, 0).to(tl.float32).to(tl.int32, bitcast=True)
        exponent = (bits >> 23) & 255
        significand = (bits & 0x7FFFFF) | tl.where(exponent > 0, 0x800000, 0)
        wide = significand.to(tl.int64)
        square = wide * wide
        left = 2 * (tl.maximum(exponent, 1) - 150 + power) + BITS  # in units of 2^-BITS
        right = tl.minimum(tl.maximum(-left, 0), 62)
        high += _shifted(square >> right, tl.maximum(left, 0))
        low += _shifted(square & ((1 << right.to(tl.int64)) - 1), left + BITS)
    tl.atomic_add(limbs, tl.sum(high, 0))
    tl.atomic_add(limbs + 1, tl.sum(low, 0))


def add_squares_(limbs: Tensor, x: Tensor, scale: Tensor, bits: int) -> None:
    x = x.contiguous()
    grid = (triton.cdiv(x.numel(), BLOCK * TIMES),)
    _add_squares[grid](x, scale, limbs, x.numel(), BITS=bits, BLOCK=BLOCK, TIMES=TIMES)
