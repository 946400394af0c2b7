"""Scores the cost model on published runs: each row's prediction beside what was measured, and how good they are by
source and by kind of run. A row of a cluster that profiles.toml knows is predicted with its profile, and beside that
with one that was fitted without its source; any other with the default of its chip."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.hardware import Catalogue, load
from phalanx.plan.profiles import fitted, keys_of
from phalanx.plan.reading import read_runs
from phalanx.plan.runs import BadRow, Run
from phalanx.plan.table import RunTable


@dataclass(frozen=True, slots=True)
class RowResult:
    row: int  # line of the file
    source: str
    model: str
    chip: str
    gpus: int
    stratum: str
    known: bool  # its cluster has a fitted profile
    published_s: float
    predicted_s: float
    low_s: float  # P5
    high_s: float  # P95
    error: float  # predicted / published - 1
    left_out_s: float  # predicted without its source
    left_out_error: float
    covered: bool  # published between P5 and P95
    memory_bytes: float  # of the most likely layout
    capacity_bytes: float
    fits: bool  # some layout that the row allows does
    peak_bytes: float | None  # as published
    out_of_memory: bool  # as published


@dataclass(frozen=True, slots=True)
class Score:
    rows: int
    median_abs_error: float
    mean_abs_error: float  # MAPE
    p95_abs_error: float
    bias: float  # median of the signed error
    rank_correlation: float | None  # Spearman; None with fewer than three rows
    coverage: float  # share of rows between P5 and P95
    left_out_median: float  # with the source left out of the fit
    left_out_p95: float

    @classmethod
    def of(cls, rows: list[RowResult]) -> Score:
        if not rows:  # runs that went out of memory have no time
            nan = float("nan")
            return cls(0, nan, nan, nan, nan, None, nan, nan, nan)
        error = np.array([row.error for row in rows])
        out = np.abs([row.left_out_error for row in rows])
        size = np.abs(error)
        return cls(
            len(rows), _figure(np.median(size)), _figure(size.mean()), _figure(np.quantile(size, 0.95)),
            _figure(np.median(error)), _spearman(rows), _figure(np.mean([row.covered for row in rows])),
            _figure(np.median(out)), _figure(np.quantile(out, 0.95)),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Validation:
    rows: list[RowResult]
    bad: list[BadRow]  # rows that could not be read, with the reason
    total: Score
    by_source: dict[str, Score]
    by_stratum: dict[str, Score]

    @property
    def median_abs_error(self) -> float:
        return self.total.median_abs_error

    @property
    def p95_abs_error(self) -> float:
        return self.total.p95_abs_error

    def to_json(self) -> dict[str, Any]:
        lost = [row for row in self.rows if row.out_of_memory]
        return _clean({
            "rows": len(self.rows),
            **{f.name: getattr(self.total, f.name) for f in fields(Score) if f.name != "rows"},
            "by_source": {name: asdict(score) for name, score in self.by_source.items()},
            "by_stratum": {name: asdict(score) for name, score in self.by_stratum.items()},
            "out_of_memory": {"rows": len(lost), "refused": sum(not row.fits for row in lost)},
            "predictions": [asdict(row) for row in self.rows],
            "unreadable": [asdict(row) for row in self.bad],
        })  # fmt: skip


def validate(path: Path, catalogue: Catalogue | None = None) -> Validation:
    runs, bad = read_runs(path, catalogue or load())
    if not runs:
        reasons = "; ".join(sorted({row.reason for row in bad})[:3]) or "the file has no rows"
        raise UserError(f"no row can be used: {reasons}", field="runs", value=str(path), remedy="give at least one row")
    rows = predict(runs)
    timed = [row for row in rows if np.isfinite(row.published_s)]
    return Validation(
        rows, bad, Score.of(timed),
        {s: Score.of([r for r in timed if r.source == s]) for s in dict.fromkeys(r.source for r in timed)},
        {s: Score.of([r for r in timed if r.stratum == s]) for s in sorted({r.stratum for r in timed})},
    )  # fmt: skip


def predict(runs: list[Run]) -> list[RowResult]:
    table, profiles = RunTable.of(runs), fitted()
    keys = [keys_of(run.framework, run.chip, run.family, run.source) for run in runs]
    own = np.array([profiles.efficiency(k) for k in keys])
    without = np.array([
        np.exp(profiles.left_out[name]) if (name := f"{k['cluster']}|{run.family}") in profiles.left_out else e
        for k, e, run in zip(keys, own, runs, strict=True)
    ])  # fmt: skip
    costs = table.evaluate(own)
    logs = np.bincount(table.owner, table.weight * np.log(costs.step_s), len(runs))
    left = table.log_step(without)
    likely = _likely(table)
    fits = np.bincount(table.owner, costs.possible, len(runs)) > 0
    memory, capacity = costs.memory_bytes, costs.capacity_bytes
    rows = []
    for i, run in enumerate(runs):
        known = profiles.knows(keys[i])
        low, high = profiles.error_of(run.stratum, known)
        predicted, left_s = float(np.exp(logs[i])), float(np.exp(left[i]))
        rows.append(RowResult(
            run.row, run.source, run.model, run.chip, run.cluster.num_chips, run.stratum, known, run.step_s, predicted,
            predicted * float(np.exp(low)), predicted * float(np.exp(high)), predicted / run.step_s - 1, left_s,
            left_s / run.step_s - 1, bool(low <= np.log(run.step_s / predicted) <= high),
            float(memory[likely[i]]), float(capacity[likely[i]]), bool(fits[i]), run.peak_bytes, run.out_of_memory,
        ))  # fmt: skip
    return rows


def _likely(table: RunTable) -> NDArray:
    """The candidate of each run with the largest weight."""
    order = np.lexsort((-table.weight, table.owner))
    _, first = np.unique(table.owner[order], return_index=True)
    return order[first]


def _spearman(rows: list[RowResult]) -> float | None:
    if len(rows) < 3:
        return None
    ranks = [_ranks(np.array(v)) for v in ([r.published_s for r in rows], [r.predicted_s for r in rows])]
    if any(np.ptp(r) == 0 for r in ranks):
        return None
    return _figure(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: NDArray) -> NDArray:
    """Mean rank among equals."""
    _, back, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[back]


def _clean(value: Any) -> Any:
    """JSON has no word for what is no number."""
    if isinstance(value, dict):
        return {key: _clean(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_clean(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _figure(value: float | np.floating) -> float:
    return round(float(value), 5)
