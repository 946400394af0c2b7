"""Random variates that are identical on every machine and Python. The generator already is (Mersenne Twister, 53-bit
floats). Logarithms and exponentials of the C library are not, to the last bit, so they are computed here from
additions, multiplications and divisions alone, which IEEE 754 fixes."""

from __future__ import annotations

import math
from random import Random

LN2 = 0.6931471805599453
S = 10**9


def ln(x: float) -> float:
    """Compute the natural logarithm: x = m 2^e with m in [0.7, 1.4], and 2 atanh((m - 1) / (m + 1)) as a series."""
    mantissa, exponent = math.frexp(x)
    if mantissa < 0.7071067811865476:
        mantissa, exponent = mantissa * 2, exponent - 1
    y = (mantissa - 1) / (mantissa + 1)
    square, power, total = y * y, y, 0.0
    for odd in range(1, 25, 2):
        total += power / odd
        power *= square
    return 2 * total + exponent * LN2


def exp(x: float) -> float:
    """Compute e to the x: the nearest power of two, and a series for the rest."""
    twos = round(x / LN2)
    rest, term, total = x - twos * LN2, 1.0, 1.0
    for n in range(1, 18):
        term *= rest / n
        total += term
    return math.ldexp(total, twos)


class Draw:
    def __init__(self, seed: int):
        self.uniform = Random(seed).random  # noqa: S311

    def below(self, n: int) -> int:
        return int(self.uniform() * n)

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.uniform()

    def chance(self, share: float) -> bool:
        return self.uniform() < share

    def wait_ns(self, per_s: float) -> int:
        """Draw the time to the next event of a Poisson process."""
        return int(-ln(1.0 - self.uniform()) / per_s * S)

    def lognormal(self, mean: float, sigma: float) -> float:
        return mean * exp(sigma * self._normal() - sigma * sigma / 2)

    def log_uniform(self, low: float, high: float) -> float:
        return low * exp(self.uniform() * ln(high / low))

    def _normal(self) -> float:
        """Draw a normal variate by Marsaglia's polar method."""
        while True:
            u, v = 2 * self.uniform() - 1, 2 * self.uniform() - 1
            s = u * u + v * v
            if 0 < s < 1:
                return u * math.sqrt(-2 * ln(s) / s)
