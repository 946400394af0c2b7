"""How good the planner's pick is where runs of one model on one cluster were published with several layouts: by how
much the layout that it would pick, with the source left out of the fit, is slower than the best that was measured."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from phalanx.hardware import Catalogue
from phalanx.plan.cost.candidates import SCHEDULES, Candidates
from phalanx.plan.cost.numbers import values
from phalanx.plan.cost.profiles import Kind, profile_of
from phalanx.plan.lab.reading import read_runs
from phalanx.plan.lab.runs import Run
from phalanx.plan.lab.validate import RowResult, predict
from phalanx.plan.search.exhaustive import evaluate_rows, search
from phalanx.plan.search.space import Ask, Limits


@dataclass(frozen=True, slots=True)
class Pick:
    source: str
    model: str
    chip: str
    gpus: int
    layouts: int  # that were measured
    spread: float  # of the slowest over the fastest of them, 0.4: 40 % slower
    row: int  # of the file, picked
    regret: float  # of the pick over the fastest, measured; without what was learned from this source


def picks(path: Path, catalogue: Catalogue) -> list[Pick]:
    """Every group of runs that differ in their layout alone."""
    runs, _ = read_runs(path, catalogue)
    groups: dict[tuple[object, ...], list[tuple[Run, RowResult]]] = defaultdict(list)
    for run, result in zip(runs, predict(runs), strict=True):
        if np.isfinite(run.step_s):
            precision, seq = run.options[0].layout["precision"], float(run.shape.seq)
            key = (run.source, run.model, run.chip, run.cluster.num_chips, seq, precision, run.global_batch)
            groups[key].append((run, result))
    return [_pick(group) for group in groups.values() if len({_layouts(run) for run, _ in group}) > 1]


def headroom(run: Run) -> float | None:
    """How much faster than the run's own layout the best that the search finds for it is, both predicted: never below
    0, or the search leaves out what people run. None: the row does not say all of its layout, the memory model refuses
    it, or experts are split by tp, which the search leaves out."""
    layout = run.options[0].layout
    if len(run.options) > 1 or layout.get("etp", 1) != 1:
        return None
    profile = profile_of(Kind.of(run.cluster.node.chip), run.software, values())
    profile = replace(profile, memory_error=(0.0, 0.0))  # it ran, so its middle is what is compared
    limits = Limits(0.0, 1.0, 0.0, False, SCHEDULES, (run.precision,), engine=False)
    ask = Ask(run.shape, run.cluster, profile, run.global_batch, limits)
    own = evaluate_rows(ask, Candidates.of(**layout), np.array([run.global_batch]))
    if not own.valid[0] or not own.fits(profile)[0]:
        return None
    return float(own.step_s[0] / search(ask, slack=1.0).costs.step_s[0] - 1)


def _layouts(run: Run) -> str:
    return repr([sorted(option.layout.items()) for option in run.options])


def _pick(group: list[tuple[Run, RowResult]]) -> Pick:
    measured = np.array([run.step_s for run, _ in group])
    best = int(np.argmin([result.predicted_s for _, result in group]))
    run = group[best][0]
    slower = measured / measured.min() - 1
    return Pick(
        run.source, run.model, run.chip, run.cluster.num_chips, len(group), float(slower.max()), run.row,
        float(slower[best]),
    )  # fmt: skip
