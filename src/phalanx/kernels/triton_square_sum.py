"""Triton kernel of square_sum.py, in integers: the square of an fp32 significand has 48 bits, and one shift puts it
where it belongs. The formula's steps in fp64 are exact except for rounding down, so the sum is the same. A GPU has few
lanes for integers, so instructions are the limit here, not bytes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, TIMES, TOGETHER = 1024, 16, 8


@triton.jit
def _squares(x, i, numel, most):
    """Return squares in units of 2^-(2 BITS), below 2^60. Numbers below the normal ones give zeros, as in the formula,
    where the scale leaves nothing of them."""
    bits = tl.load(x + i, i < numel, 0).to(tl.float32).to(tl.uint32, bitcast=True)
    significand = (bits << 8) | 0x80000000
    square = significand.to(tl.uint64) * (significand >> 1).to(tl.uint64)  # below 2^63: a shift by 63 leaves nothing
    right = most - 2 * ((bits << 1) >> 24)  # wraps around where the sum is not finite, and so not used
    return square >> tl.minimum(right, 63).to(tl.uint64)


@triton.jit
def _add_squares(
    x, scale, limbs, numel, BITS: tl.constexpr, BLOCK: tl.constexpr, TIMES: tl.constexpr, TOGETHER: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK * TIMES + tl.arange(0, BLOCK)
    power = ((tl.load(scale).to(tl.int64, bitcast=True) >> 52) & 2047).to(tl.int32) - 1023  # of two
    most = (2 * (158 - BITS - power) - 1).to(tl.uint32)  # by which a square of exponent 0 is shifted
    high = tl.zeros((BLOCK,), tl.uint64)
    low = tl.zeros((BLOCK,), tl.uint64)
    for k in range(0, TIMES, TOGETHER):
        some = _squares(x, i + k * BLOCK, numel, most)  # up to 16 fit in 64 bits
        for j in tl.static_range(1, TOGETHER):
            some += _squares(x, i + (k + j) * BLOCK, numel, most)
        high += some >> BITS
        low += some & ((1 << BITS) - 1)
    tl.atomic_add(limbs, tl.sum(high, 0).to(tl.int64))
    tl.atomic_add(limbs + 1, tl.sum(low, 0).to(tl.int64))


def add_squares_(limbs: Tensor, x: Tensor, scale: Tensor, bits: int) -> None:
    x = x.contiguous()
    grid = (triton.cdiv(x.numel(), BLOCK * TIMES),)
    _add_squares[grid](x, scale, limbs, x.numel(), BITS=bits, BLOCK=BLOCK, TIMES=TIMES, TOGETHER=TOGETHER)
