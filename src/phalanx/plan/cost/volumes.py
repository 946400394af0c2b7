"""How often a rank speaks in a step, and how much it says each time, axis by axis. Plain arithmetic on numbers or on
columns of them: `traffic` counts this engine's calls with it, exactly, and the dry run proves that count against the
program; the cost model takes its seconds from the same functions."""

from __future__ import annotations

import numpy as np

from phalanx.plan.cost.sizes import Num


def forward_runs(full: Num) -> Num:
    """Times that a layer's forward runs: again before backward under full recomputation."""
    return 1 + np.asarray(full, dtype=int)


def tensor_pairs(runs: Num) -> Num:
    """Gathers (and as many scatters) around one split block, a micro-batch: a gather's backward is a scatter."""
    return runs + 1


def ring_messages(cp: Num, runs: Num) -> tuple[Num, Num]:
    """Messages round the ring, a micro-batch and layer: of keys and values, and of their gradients, which come home."""
    return (cp - 1) * (runs + 1), cp * (np.asarray(cp) > 1)


def expert_exchanges(runs: Num) -> Num:
    """All-to-alls of a layer of experts, a micro-batch: out and back, forward and backward."""
    return 2 * (runs + 1)


def state_gathers(zero: Num, micro: Num) -> Num:
    """Times a step that a layer's weights are gathered: for each forward and each backward (ZeRO-3), else once."""
    return np.where(np.asarray(zero) >= 3, 2 * micro, 1)


def state_scatters(zero: Num, micro: Num) -> Num:
    """Times a step that a layer's gradients are scattered: every micro-batch, by ZeRO-1 once."""
    return np.where(np.asarray(zero) >= 2, micro, 1)
