"""The frequencies of rotary positions, in plain arithmetic: unchanged, stretched evenly (linear), stretched where they
turn slowly (Llama 3.1), or blended by how often they turn in the original context (YaRN)."""

from __future__ import annotations

import math

from phalanx.core.shape import ModelConfig


def frequencies(c: ModelConfig, local: bool = False) -> list[float]:
    """Return the angle per position of every rotated pair of a head. `local`: in layers with a window."""
    width = rotated_width(c)
    local = local and c.rope_local_theta > 0
    theta = c.rope_local_theta if local else c.rope_theta
    plain = [theta ** -(e / width) for e in range(0, width, 2)]
    if local or c.rope_scaling == "none":
        return plain
    if c.rope_scaling == "linear":
        return [f / c.rope_factor for f in plain]
    return [_llama3(f, c) for f in plain] if c.rope_scaling == "llama3" else _yarn(plain, c, theta, width)


def gain(c: ModelConfig, local: bool = False) -> float:
    """Return the factor on cosine and sine. YaRN sharpens attention over long contexts (arXiv:2309.00071, eq. 22)."""
    if c.rope_scaling != "yarn" or (local and c.rope_local_theta > 0):
        return 1.0
    return c.rope_gain or (0.1 * math.log(c.rope_factor) + 1.0 if c.rope_factor > 1 else 1.0)


def rotated_width(c: ModelConfig) -> int:
    return int(c.head_dim * c.rope_fraction)


def _llama3(frequency: float, c: ModelConfig) -> float:
    """Follow Llama 3.1's own code (llama_models, apply_scaling): waves longer than the original context over rope_low
    are stretched, those shorter than it over rope_high stay, and those between are blended."""
    turns = c.rope_original * frequency / (2 * math.pi)
    if turns > c.rope_high:
        return frequency
    if turns < c.rope_low:
        return frequency / c.rope_factor
    share = (turns - c.rope_low) / (c.rope_high - c.rope_low)
    return (1 - share) * frequency / c.rope_factor + share * frequency


def _yarn(plain: list[float], c: ModelConfig, theta: float, width: int) -> list[float]:
    """Follow arXiv:2309.00071, section 3.2, with the bounds in whole pairs as in the authors' code."""

    def pair(turns: float) -> float:
        """Return the pair that turns so often in the original context."""
        return width * math.log(c.rope_original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair(c.rope_fast)), 0)
    last = min(math.ceil(pair(c.rope_slow)), width - 1)
    span = last - first or 0.001
    out = []
    for i, frequency in enumerate(plain):
        stretched = min(max((i - first) / span, 0.0), 1.0)
        out.append(stretched * frequency / c.rope_factor + (1 - stretched) * frequency)
    return out
