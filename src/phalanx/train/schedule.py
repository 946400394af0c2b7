"""The learning rate as a pure function of the step, so that it needs no state to resume."""

from __future__ import annotations

import math

from phalanx.core.job import OptimizerConfig


def learning_rate(c: OptimizerConfig, step: int, total: int) -> float:
    """Return the rate of step 0, 1, … total-1: linear warm-up, then a cosine to the end of the run, or a plateau and a
    final linear decay (wsd); never below min_lr_ratio."""
    warmup = c.warmup(total)
    if step < warmup:
        return c.lr * (step + 1) / warmup
    if c.schedule == "wsd":
        left = total - step
        ratio = 1.0 if left > c.decay_steps else left / (c.decay_steps + 1)
    else:
        done = (step - warmup) / max(1, total - warmup)
        ratio = 0.5 * (1 + math.cos(math.pi * done))
    return c.lr * (c.min_lr_ratio + (1 - c.min_lr_ratio) * ratio)
