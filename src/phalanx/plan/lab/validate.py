"""Score the cost model on published runs without leaking what it was fitted to. A row that the fit has seen is
predicted by numbers that were refitted without its whole source; any other row by the shipped numbers. Each prediction
has an interval made from the errors of other sources."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.hardware import Catalogue, load
from phalanx.hardware.catalogue import load_packaged
from phalanx.plan.cost.intervals import interval, memory_interval
from phalanx.plan.cost.numbers import numbers, values
from phalanx.plan.cost.profiles import Kind
from phalanx.plan.lab.columns import RunTable
from phalanx.plan.lab.fit import LEAST, TAIL, engine_on_chip, kinds, left_out, publisher
from phalanx.plan.lab.reading import packaged, read_runs
from phalanx.plan.lab.runs import BadRow, Run

COUNTED = 0.02  # least weight at which a layout that the row allows counts for memory
STALE = 1e-3  # ln: a stored prediction that differs by more comes from other code or numbers


@dataclass(frozen=True, slots=True)
class RowResult:
    row: int  # line of the file
    source: str
    model: str
    chip: str
    gpus: int
    stratum: str
    engine: str
    fitted: bool  # the numbers were fitted to this row, so its source is left out
    known: bool  # the fit has runs of this software on this generation of chips
    published_s: float
    predicted_s: float  # by numbers that have not seen the row's source, if they were fitted to it
    low_s: float  # P5
    high_s: float  # P95
    error: float  # predicted / published - 1
    shipped_s: float  # by the shipped numbers
    covered: bool  # published between P5 and P95
    memory_bytes: float  # of the most likely layout
    memory_low_bytes: float  # P5 of the leanest layout that the row allows
    memory_high_bytes: float  # P95 of the fullest
    capacity_bytes: float
    possible: bool  # some layout that the row allows may fit: P5 does
    fits: bool  # some layout surely fits: P95 does
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
    shipped_median: float  # with the shipped numbers, which have seen the rows that are fitted

    @classmethod
    def of(cls, rows: list[RowResult]) -> Score:
        if not rows:  # runs that ran out of memory have no time
            nan = float("nan")
            return cls(0, nan, nan, nan, nan, None, nan, nan)
        error = np.array([row.error for row in rows])
        size = np.abs(error)
        shipped = np.abs([row.shipped_s / row.published_s - 1 for row in rows])
        return cls(
            len(rows), _figure(np.median(size)), _figure(size.mean()), _figure(np.quantile(size, 0.95)),
            _figure(np.median(error)), _spearman(rows), _figure(np.mean([row.covered for row in rows])),
            _figure(np.median(shipped)),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Validation:
    rows: list[RowResult]
    bad: list[BadRow]  # rows that could not be read, with the reason
    total: Score
    by_source: dict[str, Score]
    by_stratum: dict[str, Score]
    new: Score  # rows whose software has no fitted runs on such chips

    @property
    def median_abs_error(self) -> float:
        return self.total.median_abs_error

    @property
    def p95_abs_error(self) -> float:
        return self.total.p95_abs_error

    @property
    def memory(self) -> dict[str, float | int]:
        """Share of published peaks inside the memory interval, and the median error of its middle."""
        peaks = [row for row in self.rows if row.peak_bytes]
        inside = [row.memory_low_bytes <= row.peak_bytes <= row.memory_high_bytes for row in peaks if row.peak_bytes]
        above = sum(row.peak_bytes > row.memory_high_bytes for row in peaks if row.peak_bytes)
        error = [row.memory_bytes / row.peak_bytes - 1 for row in peaks if row.peak_bytes]
        return {
            "peaks": len(peaks),
            "median_error": _figure(np.median(error)) if peaks else float("nan"),
            "coverage": _figure(np.mean(inside)) if peaks else float("nan"),
            "above_high": above,
        }

    def to_json(self) -> dict[str, Any]:
        lost = [row for row in self.rows if row.out_of_memory]
        return _clean({
            "rows": len(self.rows),
            "numbers": len(numbers()),
            **{f.name: getattr(self.total, f.name) for f in fields(Score) if f.name != "rows"},
            "by_source": {name: asdict(score) for name, score in self.by_source.items()},
            "by_stratum": {name: asdict(score) for name, score in self.by_stratum.items()},
            "new_software_or_chip": asdict(self.new),
            "memory": self.memory,
            "out_of_memory": {"rows": len(lost), "refused": sum(not row.fits for row in lost)},
            "predictions": [asdict(row) for row in self.rows],
            "unreadable": [asdict(row) for row in self.bad],
        })  # fmt: skip


def validate(path: Path | None = None, catalogue: Catalogue | None = None, refit: bool = False) -> Validation:
    """Score the table of runs at `path` (None: the packaged one). `refit`: refit without each source, which takes
    minutes, instead of reading what `lab.fit` last stored."""
    runs, bad = read_runs(path or packaged(), catalogue or load())
    if not runs:
        reasons = "; ".join(sorted({row.reason for row in bad})[:3]) or "the file has no rows"
        raise UserError(f"no row can be used: {reasons}", field="runs", value=str(path), remedy="give at least one row")
    rows = predict(runs, refit)
    timed = [row for row in rows if np.isfinite(row.published_s)]
    return Validation(
        rows, bad, Score.of(timed),
        {s: Score.of([r for r in timed if r.source == s]) for s in dict.fromkeys(r.source for r in timed)},
        {s: Score.of([r for r in timed if r.stratum == s]) for s in sorted({r.stratum for r in timed})},
        Score.of([r for r in timed if not r.known]),
    )  # fmt: skip


def predict(runs: list[Run], refit: bool = False) -> list[RowResult]:
    table, without = RunTable.of(runs), LeftOut.read(refit)
    costs = table.evaluate(values())
    shipped = np.bincount(table.owner, table.weight * np.log(costs.step_s), len(runs))
    possible = np.bincount(table.owner, table.possible(costs), len(runs)) > 0
    likely, kind = _likely(table), kinds(runs)
    ends = np.exp([memory_interval(run.engine) for run in runs])[table.owner]
    context = costs.memory["context"]
    low_bytes, high_bytes = (end * (costs.memory_bytes - context) + context for end in ends.T)
    rows = []
    for i, run in enumerate(runs):
        line, here = without.find(run), likely[i]
        known = without.knows(run, line is not None)
        low, high = without.interval(kind[i], known, run.source if line is not None else "")
        if Kind.of(run.cluster.node.chip).generation == "other":
            low, high = interval(kind[i], known, False)
        predicted = float(np.exp(shipped[i] if line is None else without.logs[line]))
        counted = (table.owner == i) & (table.weight >= COUNTED)
        least, most = low_bytes[counted].min(), high_bytes[counted].max()
        rows.append(RowResult(
            run.row, run.source, run.model, run.chip, run.cluster.num_chips, run.stratum, run.engine, line is not None,
            known, run.step_s, predicted, predicted * float(np.exp(low)), predicted * float(np.exp(high)),
            predicted / run.step_s - 1, float(np.exp(shipped[i])), bool(low <= np.log(run.step_s / predicted) <= high),
            float(costs.memory_bytes[here]), float(least), float(most), float(costs.capacity_bytes[here]),
            bool(possible[i]), bool(high_bytes[counted].min() <= costs.capacity_bytes[here]), run.peak_bytes,
            run.out_of_memory,
        ))  # fmt: skip
    return rows


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The packaged runs, each predicted with its source left out, and with its publisher left out."""

    lines: dict[tuple[object, ...], int]
    logs: NDArray  # ln of the prediction, source left out
    errors: dict[bool, NDArray]  # ln(published / predicted): source left out (True), publisher left out
    source: NDArray
    kind: NDArray
    engine: NDArray  # software and generation of the chip

    @classmethod
    def read(cls, refit: bool = False) -> LeftOut:
        """Read what `lab.fit` stored, or refit if asked or if code or numbers have changed since."""
        runs, _ = read_runs(packaged(), load_packaged())
        stored, table = _stored(), RunTable.of(runs)
        fresh = table.log_step(values())
        if refit or len(stored) != len(runs) or np.abs(stored[:, 0] - fresh).max() > STALE:
            near, far = leave_out(table)
        else:
            near, far = stored[:, 1], stored[:, 2]
        return cls(
            {run.identity: i for i, run in enumerate(runs)}, near,
            {True: table.published - near, False: table.published - far},
            np.array([run.source for run in runs]), np.array(kinds(runs)),
            np.array([engine_on_chip(run) for run in runs]),
        )  # fmt: skip

    def find(self, run: Run) -> int | None:
        """Return the run's row in the packaged table, from 0; None if the fit has not seen it."""
        return self.lines.get(run.identity)

    def knows(self, run: Run, fitted: bool) -> bool:
        """Return whether other sources (any source, if the row is new) have runs of its software on its generation of
        chips."""
        same = self.engine == engine_on_chip(run)
        return bool((same & (self.source != run.source)).any() if fitted else same.any())

    def interval(self, kind: str, known: bool, source: str) -> tuple[float, float]:
        """Return the interval for one kind of run, from quantiles of the errors of other sources."""
        error = self.errors[known][(self.kind == kind) & (self.source != source)]
        low, high = np.quantile(error, [TAIL, 1 - TAIL])
        return min(float(low), -LEAST), max(float(high), LEAST)

    def publisher_coverage(self) -> float:
        """Return the share of runs inside intervals made from the errors of other publishers, each run predicted with
        its publisher left out. The intervals use the same kind of run where other publishers have any."""
        who, error = np.array([publisher(str(source)) for source in self.source]), self.errors[False]
        inside = []
        for i, mine in enumerate(error):
            others = who != who[i]
            alike = others & (self.kind == self.kind[i])
            low, high = np.quantile(error[alike if alike.any() else others], [TAIL, 1 - TAIL])
            inside.append(min(low, -LEAST) <= mine <= max(high, LEAST))
        return float(np.mean(inside))


def leave_out(table: RunTable) -> tuple[NDArray, NDArray]:
    """Return ln of every run's prediction with its source left out, and with its publisher left out."""
    sources = np.array([run.source for run in table.runs])
    return left_out(table, sources), left_out(table, np.array([publisher(s) for s in sources]))


def store(shipped: NDArray, near: NDArray, far: NDArray) -> None:
    """Write left_out.csv: ln of each packaged run's prediction with nothing, its source, and its publisher left out."""
    lines = ["shipped,source_left_out,publisher_left_out"]
    lines += [",".join(f"{value:.5f}" for value in row) for row in zip(shipped, near, far, strict=True)]
    Path(__file__).with_name("left_out.csv").write_text("\n".join(lines) + "\n")


def _stored() -> NDArray:
    file = resources.files("phalanx.plan.lab").joinpath("left_out.csv")
    rows = list(csv.reader(file.read_text().splitlines()))[1:] if file.is_file() else []
    return np.array([[float(cell) for cell in row] for row in rows]).reshape(-1, 3)


def _likely(table: RunTable) -> NDArray:
    """Return the candidate with the largest weight of each run."""
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
    """Rank the values; equal ones share their mean rank."""
    _, back, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[back]


def _clean(value: Any) -> Any:
    """Replace NaN and infinity by None, since JSON has neither."""
    if isinstance(value, dict):
        return {key: _clean(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_clean(each) for each in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _figure(value: float | np.floating) -> float:
    return round(float(value), 5)
