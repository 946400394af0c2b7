"""Decide which steps are not applied: those whose loss or gradient norm is not finite and, if the job asks for it,
those whose loss is far above the latest ones (as OLMo-core's SkipStepOptimizer does). All ranks judge by the same
numbers, and the latest losses travel with the state, so the judgement survives recovery and resume."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from phalanx.core.job import TrainConfig

WINDOW = 64  # steps that a loss is compared with
LEAST = 16  # of them, before any is judged

Recent = list[float | None]  # losses of the latest steps; None: it was not applied


def why_skip(train: TrainConfig, recent: Recent, loss: float, norm: float) -> str:
    """Return why the step must be skipped; an empty string: apply it."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return f"the loss is {loss:.6g} and the gradient norm {norm:.6g}"
    known = [each for each in recent if each is not None]
    if train.spike > 0 and len(known) >= LEAST:
        mean, deviation = statistics.fmean(known), statistics.pstdev(known)
        if loss > mean + train.spike * deviation:
            return f"the loss {loss:.6g} is {(loss - mean) / max(deviation, 1e-12):.1f} deviations above {mean:.6g}"
    return ""


def remembered(train: TrainConfig, recent: Recent, loss: float, skipped: bool) -> Recent:
    """Return the losses by which the next step is judged, to six digits, since every checkpoint contains them."""
    if skipped:
        return [*recent, None][-WINDOW:]
    if train.spike > 0:
        return [*recent, float(f"{loss:.6g}")][-WINDOW:]
    return []


def in_a_row(recent: Recent) -> int:
    """Count the latest steps that were skipped in a row."""
    count = 0
    for each in reversed(recent):
        if each is not None:
            break
        count += 1
    return count


def suspects(losses: Sequence[float], parts: int) -> list[int]:
    """Return the micro-batches, of `parts` losses each, whose sum is not finite; if all are, the one with the
    greatest."""
    sums = [sum(losses[i : i + parts]) for i in range(0, len(losses), parts)]
    bad = [i for i, loss in enumerate(sums) if not math.isfinite(loss)]
    return bad or [max(range(len(sums)), key=sums.__getitem__)]
