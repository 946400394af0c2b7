"""Measure the planner's pick where runs of one model on one cluster were published with several layouts: how much
slower the layout it would pick (with the source left out of the fit) was than the fastest one measured."""

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
    layouts: int  # number measured
    spread: float  # the slowest over the fastest; 0.4: 40 % slower
    row: int  # the file's row that is picked
    regret: float  # measured time of the pick over the fastest; the pick has learned nothing from this source


def picks(path: Path, catalogue: Catalogue) -> list[Pick]:
    """Pick in every group of runs that differ only in their layout."""
    runs, _ = read_runs(path, catalogue)
    groups: dict[tuple[object, ...], list[tuple[Run, RowResult]]] = defaultdict(list)
    for run, result in zip(runs, predict(runs), strict=True):
        if np.isfinite(run.step_s):
            precision, seq = run.options[0].layout["precision"], float(run.shape.seq)
            key = (run.source, run.model, run.chip, run.cluster.num_chips, seq, precision, run.global_batch)
            groups[key].append((run, result))
    return [_pick(group) for group in groups.values() if len({_layouts(run) for run, _ in group}) > 1]


def headroom(run: Run) -> float | None:
    """Return by how much the best layout that the search finds beats the run's own, both predicted. A value below 0
    would mean that the search leaves out layouts that people run. None: the row's layout is incomplete, the memory
    model refuses it, or tp splits its experts, which the search does not cover."""
    layout = run.options[0].layout
    if len(run.options) > 1 or layout.get("etp", 1) != 1:
        return None
    profile = profile_of(Kind.of(run.cluster.node.chip), run.software, values())
    profile = replace(profile, memory_error=(0.0, 0.0))  # it ran, so compare the middle of the memory prediction
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
