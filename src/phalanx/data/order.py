"""The order of samples as arithmetic: position in, sample out, with nothing in memory. A keyed
bijection (an unbalanced Feistel network that walks until it lands inside) shuffles each epoch."""

from __future__ import annotations

ROUNDS = 6
_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """splitmix64's finaliser."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def permute(index: int, size: int, key: int) -> int:
    """Where `index` of [0, size) goes under `key`."""
    assert 0 <= index < size, (index, size)
    bits = max(2, (size - 1).bit_length())
    low_bits = bits // 2
    high_bits = bits - low_bits
    while True:
        for round_ in range(ROUNDS):
            # The halves swap places and widths each round, so both are mixed when bits is odd.
            high, low = index >> low_bits, index & ((1 << low_bits) - 1)
            high ^= _mix(low ^ _mix(key + round_)) & ((1 << high_bits) - 1)
            index = (low << high_bits) | high
            low_bits, high_bits = high_bits, low_bits
        if index < size:
            return index


def sample_of(position: int, num_samples: int, seed: int) -> int:
    """The sample that the `position`-th draw of a run sees; every epoch has an order of its own."""
    epoch, index = divmod(position, num_samples)
    return permute(index, num_samples, _mix(seed * 0x10001 + epoch))
