"""Pipeline schedules: the bubble, the number of micro-batches whose activations a rank holds, and the layers of the
slowest stage. Sources: PipeDream-flush and interleaving arXiv:2104.04473; zero bubble arXiv:2401.10241;
ZB-V arXiv:2405.15362; DualPipe arXiv:2412.19437."""

from __future__ import annotations

import numpy as np

from phalanx.plan.cost.candidates import SCHEDULES
from phalanx.plan.cost.sizes import Num

GPIPE, F1B, INTERLEAVED, INTERLEAVED_ZB, ZBV, ZB_H1, ZB_H2, DUALPIPE = range(len(SCHEDULES))


def divides(parts: Num, whole: Num) -> Num:
    """Return whether `parts` divides `whole`; much faster than a remainder."""
    return np.floor(whole / parts) * parts == whole


def bubble_s(schedule: Num, pp: Num, vpp: Num, micro_batches: Num, f: Num, d: Num, w: Num) -> Num:
    """Return the idle seconds of a rank in a step. `f`, `d` and `w` are its forward, input-gradient and weight-gradient
    seconds per micro-batch. 1f1b: (p-1)(F+D+W); interleaved: 1/v of that, plus the wait of a last round that is not
    full when p does not divide m."""
    ramp = pp - 1
    whole = f + d + w
    left = micro_batches - np.floor(micro_batches / pp) * pp
    ragged = np.where((left > 0) & (micro_batches > pp), (vpp - 1) / vpp * (pp - left) * whole / vpp, 0.0)
    bubble = np.select(
        [schedule == INTERLEAVED, schedule == INTERLEAVED_ZB, schedule == ZBV, schedule == ZB_H1,
         schedule == ZB_H2, schedule == DUALPIPE],
        [ramp * whole / vpp + ragged, ramp * (f + d - w) / vpp + ragged, ramp * (f + d - 2 * w) / 2, ramp * (f + d - w),
         ramp * (f + d - 2 * w), (pp / 2 - 1) * (f + 2 * d - w)],
        ramp * whole,
    )  # fmt: skip
    return np.where(pp > 1, np.maximum(bubble, 0.0), 0.0)


def in_flight(schedule: Num, pp: Num, vpp: Num, micro_batches: Num) -> Num:
    """Return the number of micro-batches whose activations (of all its layers) the fullest rank holds."""
    m = micro_batches
    held = np.select(
        [schedule == GPIPE, schedule == INTERLEAVED, schedule == INTERLEAVED_ZB, schedule == ZB_H2,
         schedule == DUALPIPE],
        [m, pp * (1 + (pp - 1) / (pp * vpp)), pp * (1 + (pp - 1) / (pp * vpp)), 2 * pp - 1, pp + 1],
        pp,
    )  # fmt: skip
    return np.where(pp > 1, np.minimum(held, m), 1.0)


def stage_layers(layers: Num, pp: Num, vpp: Num, head: Num) -> tuple[Num, Num]:
    """Return the layers of the slowest rank, and whether it also has the head; `head` is the head's time in layers.
    Where the stages divide the layers, all get the same number and the last one has the head on top. Otherwise the
    first and the last stage get fewer, and the slowest rank does not have the head."""
    even = divides(pp * vpp, layers)
    most = np.ceil((layers + np.where(pp > 1, np.minimum(head, 1.0), 0.0)) / pp)
    uneven = np.maximum(most, (layers + head) / pp)
    return np.where(even | (pp == 1), layers / pp, uneven), np.where(even | (pp == 1), 1.0, 0.0)
