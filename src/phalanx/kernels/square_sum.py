"""Sums of squares whose bits do not depend on the order: every square is cut to fixed point, and integers add in any
order. A sum has two limbs, high * 2^bits + low. How it is divided between them depends on the kernel."""

from __future__ import annotations

from torch import Tensor

from phalanx.kernels import has_kernel

MOST_BITS = 30  # of a limb: 16 squares of two limbs fit in 64 bits
MOST_POWER = 64  # of two in a scale: squares of fp32 numbers below the normal ones leave nothing in the limbs
CHUNK = 1 << 16  # elements that a CPU works on at once, so that the temporaries stay in its cache


def add_squares_(limbs_2: Tensor, x: Tensor, scale: Tensor, bits: int) -> None:
    """Add the squares of x * scale, which are below 1, to int64 limbs: in units of 2^-bits, and the rest of each in
    units of 2^-(2 bits), rounded down. `scale` is a power of two, in fp64."""
    if has_kernel(x):
        from phalanx.kernels import triton_square_sum

        triton_square_sum.add_squares_(limbs_2, x, scale, bits)
        return
    for chunk in x.reshape(-1).split(CHUNK if x.is_cpu else max(1, x.numel())):
        square = chunk.double() * scale  # a copy, even of fp64
        square.mul_(square).mul_(2.0**bits)
        high = square.floor()
        limbs_2[0] += high.long().sum()
        limbs_2[1] += square.sub_(high).mul_(2.0**bits).long().sum()
