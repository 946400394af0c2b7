"""Series: the steps of a story as columns, and their min/max envelope at any zoom. A spike never vanishes: each bucket
keeps its smallest and its largest value."""

from __future__ import annotations

from typing import Any

import numpy as np

from phalanx.observe.phases import PHASES
from phalanx.observe.readings import READINGS, worst
from phalanx.observe.story import Story

PHASE, HELD = "phase_", "held_"  # prefixes of column names
NAMES = (
    "loss", "validation_loss", "grad_norm", "lr", "tokens_per_s", "mfu", "time_s", "data_wait_s", "data_ready",
    "expert_load", "expert_idle",
    *(PHASE + name for name in PHASES), *(HELD + tier for tier in ("memory", "buddy")), *READINGS,
)  # fmt: skip
BREAK = 5.0  # a pause of this many usual steps is a gap in a line
MOST_POINTS = 4000
BLOCK = 64  # rows folded once and for all, for charts of long histories


class Columns:
    """Columns that grow with their story, and go back to the first abandoned step."""

    def __init__(self) -> None:
        self.count, self.branches = 0, 0
        self._names = ("time", "step", *NAMES)
        self._data = np.empty((len(self._names), 1024))
        self._blocks = _folded(np.empty((len(self._names), 0, 1)))
        self._used = np.zeros(len(self._names), bool)  # columns with a number in any row

    def update(self, story: Story) -> None:
        if len(story.branches) != self.branches:
            first = min(branch.step for branch in story.branches[self.branches :])
            self.count, self.branches = int(np.searchsorted(self["step"], first)), len(story.branches)
            self._blocks = tuple(block[:, : self.count // BLOCK] for block in self._blocks)
        rows = story.rows[self.count :]
        while self.count + len(rows) > self._data.shape[1]:
            self._data = np.concatenate([self._data, np.empty_like(self._data)], axis=1)
        for number, name in enumerate(self._names):
            values = [_number(_value(row, name)) for row in rows]
            self._data[number, self.count : self.count + len(rows)] = values
        self.extend(len(rows))

    def extend(self, count: int) -> None:
        """Take in the rows just written; time never runs backwards on an axis."""
        first = max(0, self.count - 1)
        self.count += count
        times = self._data[0, first : self.count]
        np.maximum.accumulate(times, out=times)
        self._used |= ~np.isnan(self._data[:, first : self.count]).all(axis=1)
        known, ready = self._blocks[0].shape[1], self.count // BLOCK
        if ready > known:
            new = _folded(self._data[:, known * BLOCK : ready * BLOCK].reshape(len(self._names), -1, BLOCK))
            self._blocks = tuple(np.concatenate(pair, axis=1) for pair in zip(self._blocks, new, strict=True))

    def load(self, columns: dict[str, np.ndarray]) -> None:
        """Take whole columns at once."""
        self.count, self._blocks = 0, _folded(np.empty((len(self._names), 0, 1)))
        length = len(columns["time"])
        self._data = np.full((len(self._names), length), np.nan)
        for number, name in enumerate(self._names):
            if name in columns:
                self._data[number] = columns[name]
        self.extend(length)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._data[self._names.index(name), : self.count]

    def query(self, begin: float, end: float, points: int, names: tuple[str, ...] = NAMES) -> dict[str, Any]:
        """Return at most `points` points between two times: the time, the step, and min, max and mean of each name."""
        points = max(1, min(points, MOST_POINTS))
        times = self["time"]
        first = max(0, int(np.searchsorted(times, begin)) - 1)  # one beyond each edge, so that lines reach it
        last = min(self.count, int(np.searchsorted(times, end, "right")) + 1)
        if last <= first:
            return {"time": [], "step": [], "breaks": [], "series": {}}
        named = [name for name in names if self._used[self._names.index(name)]]
        columns = [0, 1, *(self._names.index(name) for name in named)]  # time, step, and the columns to draw
        low, high, total, many = self._rows(columns, first, last, points)
        times, steps = high[0], high[1]
        if len(times) <= points:
            edges = np.arange(len(times))
        else:
            slots = np.linspace(times[0], times[-1], points, endpoint=False)
            edges = np.unique(np.searchsorted(times, slots))
            edges = edges[edges < len(times)]
        out: dict[str, Any] = {}
        for number, name in enumerate(named, 2):
            count = np.add.reduceat(many[number], edges)
            if not count.any():
                continue
            with np.errstate(invalid="ignore", divide="ignore"):
                mean = np.add.reduceat(total[number], edges) / count
            out[name] = {
                "min": _plain(np.fmin.reduceat(low[number], edges), count),
                "max": _plain(np.fmax.reduceat(high[number], edges), count),
                "mean": _plain(mean, count),
            }
        gaps = np.diff(times)
        usual = float(np.median(gaps)) if len(gaps) else 0.0
        if "time_s" in named:  # a long step is not a gap
            gaps -= total[2 + named.index("time_s")][1:]
        where = np.flatnonzero(gaps > max(BREAK * usual, 1e-9)) + 1
        lasts = np.append(edges[1:], len(times)) - 1
        return {
            "time": np.round(times[lasts], 4).tolist(),
            "step": steps[lasts].astype(np.int64).tolist(),
            "breaks": np.unique(np.searchsorted(edges, where, "right") - 1).tolist(),
            "series": out,
            "rows": last - first,
        }

    def _rows(self, columns: list[int], first: int, last: int, points: int) -> tuple[np.ndarray, ...]:
        """Return smallest, largest, sum and count of each column: for every row, or for blocks of rows where a point
        covers many."""
        if last - first < points * BLOCK * 2:
            return _folded(self._data[columns, first:last, None])
        a, b = first // BLOCK, min(self._blocks[0].shape[1], -(-last // BLOCK))
        parts = tuple(block[columns, a:b] for block in self._blocks)
        if b * BLOCK < last:
            rest = _folded(self._data[columns, None, b * BLOCK : last])
            parts = tuple(np.concatenate(pair, axis=1) for pair in zip(parts, rest, strict=True))
        return parts

    def spans(self, edges: np.ndarray) -> tuple[list[float], list[float]]:
        """Return when the steps between each edge and the next began and ended."""
        known, times = self["step"], self["time"]
        if not len(known):
            return [0.0] * (len(edges) - 1), [0.0] * (len(edges) - 1)
        at = np.clip(np.searchsorted(known, edges), 0, len(known))
        first, last = np.minimum(at[:-1], len(known) - 1), np.maximum(at[1:] - 1, 0)
        before = np.where(first > 0, times[np.maximum(first - 1, 0)], -np.inf)
        begins = np.maximum(before, times[first] - np.nan_to_num(self["time_s"][first]))
        return np.round(begins, 4).tolist(), np.round(np.maximum(begins, times[last]), 4).tolist()


def _folded(rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return smallest, largest, sum and count over the last axis, ignoring NaN."""
    if rows.shape[2] == 1:
        values = rows[:, :, 0]
        known = ~np.isnan(values)
        return values, values, np.where(known, values, 0.0), known.astype(np.int64)
    known = ~np.isnan(rows)
    return (
        np.fmin.reduce(rows, axis=2),
        np.fmax.reduce(rows, axis=2),
        np.where(known, rows, 0.0).sum(axis=2),
        known.sum(axis=2),
    )


def _value(row: dict[str, Any], name: str) -> object:
    if name in READINGS:
        return worst(row, name)
    for prefix, group in ((PHASE, "phases"), (HELD, "held")):
        if name.startswith(prefix):
            found = row.get(group)
            return found.get(name.removeprefix(prefix)) if isinstance(found, dict) else None
    return row.get(name) or None if name == "time_s" else row.get(name)  # 0: nobody was left to tell


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")


def _plain(values: np.ndarray, many: np.ndarray) -> list[float | None]:
    """Round to eight significant figures, with None for missing values."""
    known = np.isfinite(values) & (many > 0)
    held = np.where(known, values, 0.0)
    with np.errstate(divide="ignore"):
        digits = 7 - np.floor(np.log10(np.abs(held)))
    factor = 10.0 ** np.clip(np.nan_to_num(digits, posinf=0.0), -300, 300)
    rounded = (np.round(held * factor) / factor).tolist()
    return [v if k else None for v, k in zip(rounded, known.tolist(), strict=True)]
