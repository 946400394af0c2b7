"""How often a rank communicates in a step, axis by axis: plain arithmetic on numbers or on columns of them. `traffic`
counts this engine's calls exactly with these functions, and the dry run checks that count against the program. The cost
model derives its seconds from the same functions."""

from __future__ import annotations

import numpy as np

from phalanx.plan.cost.sizes import Num


def forward_runs(full: Num) -> Num:
    """Return how often a layer's forward runs: a second time before backward under full recomputation."""
    return 1 + np.asarray(full, dtype=int)


def tensor_pairs(runs: Num) -> Num:
    """Return the gathers (and as many scatters) around one split block per micro-batch: a gather's backward is a
    scatter."""
    return runs + 1


def ring_messages(cp: Num, runs: Num) -> tuple[Num, Num]:
    """Return the ring messages per micro-batch and layer: keys and values, and their gradients, which return home."""
    return (cp - 1) * (runs + 1), cp * (np.asarray(cp) > 1)


def expert_exchanges(runs: Num) -> Num:
    """Return the all-to-alls of an expert layer per micro-batch: out and back, forward and backward."""
    return 2 * (runs + 1)


def state_gathers(zero: Num, micro: Num) -> Num:
    """Return how often a step gathers a layer's weights: for each forward and each backward (ZeRO-3), else once."""
    return np.where(np.asarray(zero) >= 3, 2 * micro, 1)


def state_scatters(zero: Num, micro: Num) -> Num:
    """Return how often a step scatters a layer's gradients: every micro-batch, with ZeRO-1 once."""
    return np.where(np.asarray(zero) >= 2, micro, 1)
