"""The exact sum of squares. When this fails, the exact reduction gives other bits on other layouts or devices."""

import math

import pytest
import torch

from phalanx.kernels.square_sum import MOST_BITS, MOST_POWER, add_squares_

SCALE, BITS = 2.0**-6, MOST_BITS


def total(x, bits, cuts=1, add=add_squares_, scale=SCALE):
    """Return the sum in units of 2^-(2 bits)."""
    out = torch.zeros(2, dtype=torch.int64, device=x.device)
    for part in x.chunk(cuts):
        add(out, part, torch.tensor(scale, dtype=torch.float64, device=x.device), bits)
    high, low = out.tolist()
    return (high << bits) + low


def values(dtype, numel=100_003):
    """Return values of all sizes, zeros and numbers below the normal ones included."""
    generator = torch.Generator().manual_seed(3)
    powers = torch.randint(-150, 3, (numel,), generator=generator)
    return torch.randn(numel, generator=generator).ldexp(powers.where(powers % 3 == 0, 0)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_sum_is_right_and_does_not_depend_on_the_cut(dtype, device):
    x = values(dtype).to(device)
    got = total(x, BITS)
    want = math.fsum((float(v) * SCALE) ** 2 for v in x.cpu())
    assert got / 4**BITS == pytest.approx(want, rel=1e-11)
    assert total(x, BITS, 7) == got


@pytest.mark.parametrize("bits", [20, 29, MOST_BITS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_gives_the_bits_of_the_formula(dtype, bits, device, triton_kernels):
    from phalanx.kernels import triton_square_sum

    x = values(dtype)
    assert total(x.to(device), bits, add=triton_square_sum.add_squares_) == total(x, bits)
    tiny = (x.float() * 2.0**-70).to(dtype)  # many of them below the normal numbers, for the largest scale
    small = [total(t, bits, add=add, scale=2.0**MOST_POWER) for t, add in
             ((tiny.to(device), triton_square_sum.add_squares_), (tiny, add_squares_))]  # fmt: skip
    assert small[0] == small[1] and (small[0] > 0 or bits < 29)
