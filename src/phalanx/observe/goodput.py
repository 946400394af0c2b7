"""Goodput: assign every GPU-second of a run to exactly one state. Time is in whole nanoseconds, so the states add up to
the run exactly. States are painted from left to right; unclaimed time counts as between steps."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

NS = 1_000_000_000
#: state -> what it means, in the order of every table and chart.
STATES = {
    "productive": "steps that count",
    "start": "processes start, data and state are loaded",
    "data": "ranks waited for samples",
    "checkpoint": "training waited for a checkpoint, or was slowed by one",
    "recovery": "the gang stood still because something failed or changed",
    "out": "ranks of replicas that were not taking part",
    "rollback": "steps that were done and abandoned",
    "between": "between steps: everything that nothing else claims",
    "end": "after the last step: saving and leaving",
}


@dataclass(frozen=True, slots=True)
class Segment:
    begin_ns: int
    end_ns: int
    state: str
    present: int  # ranks that take part


@dataclass(frozen=True, slots=True)
class Painted:
    """The inputs from which a run's account is painted, in seconds of one clock."""

    begin: float
    end: float
    ranks: int
    rows: Sequence[dict[str, Any]]  # of steps, in the order of writing
    abandoned: frozenset[int] = frozenset()  # indices of rows
    ready: float = 0.0  # when training began
    windows: Sequence[tuple[float, float]] = ()  # in which the gang stood still
    present: Sequence[tuple[float, int]] = ()  # (since when, number of ranks that take part)
    stalls: dict[int, float] | None = None  # of checkpoints, by step
    over: bool = True


def segments(run: Painted) -> list[Segment]:
    """Partition the run: each segment begins where the previous one ends."""
    begin = _ns(run.begin)
    end = max(begin, _ns(run.end))
    windows = _merged([(max(begin, _ns(a)), min(end, _ns(b))) for a, b in run.windows])
    ready = _ns(run.ready) if run.ready else end
    pieces: list[tuple[int, int, str]] = []
    cursor = begin
    stalls = run.stalls or {}

    def paint(until: int, state: str) -> None:
        nonlocal cursor
        if until > cursor:
            pieces.append((cursor, until, state))
            cursor = until

    def gap(until: int, otherwise: str) -> None:
        paint(min(until, ready), "start")
        if until > cursor:
            paint(until, "recovery" if _touches(windows, cursor, until) else otherwise)

    for index, row in enumerate(run.rows):
        stop = min(end, max(cursor, _ns(row["time"])))
        gap(min(stop, max(cursor, stop - _ns(row.get("time_s") or 0.0))), "between")
        waits = {"data": _ns(row.get("data_wait_s") or 0.0), "checkpoint": _ns(stalls.get(row["step"], 0.0))}
        state = "rollback" if index in run.abandoned else "productive"
        for a, b, inside in _split(windows, cursor, stop):
            if inside:
                paint(b, "recovery")
                continue
            for wait in waits if state == "productive" else ():
                taken = min(waits[wait], b - a)
                paint(a + taken, wait)
                waits[wait], a = waits[wait] - taken, a + taken
            paint(b, state)
    gap(end, "end" if run.over else "between")
    marks = [(_ns(at), max(0, min(run.ranks, count))) for at, count in sorted(run.present)]
    return [piece for a, b, state in pieces for piece in _by_presence(a, b, state, marks, run.ranks)]


def totals(pieces: Iterable[Segment], ranks: int) -> dict[str, int]:
    """Return GPU-nanoseconds by state; their sum is the length of all pieces times `ranks`."""
    out = dict.fromkeys(STATES, 0)
    for piece in pieces:
        length = piece.end_ns - piece.begin_ns
        out[piece.state] += length * piece.present
        out["out"] += length * (ranks - piece.present)
    return out


def lost(pieces: Sequence[Segment], ranks: int, begin: float, end: float, back: float) -> float:
    """Return the GPU-seconds that a failure cost: ranks that stood still or were absent between `begin` and `end`, and
    abandoned steps from `back` on."""
    first, last, earliest, out = _ns(begin), _ns(end), _ns(back), 0
    for piece in pieces:
        length = min(last, piece.end_ns) - max(first, piece.begin_ns)
        if length > 0:
            out += length * (ranks - piece.present)
            if piece.state == "recovery":
                out += length * piece.present
        before = min(first, piece.end_ns) - max(earliest, piece.begin_ns)
        if before > 0 and piece.state == "rollback":
            out += before * piece.present
    return out / NS


class Running:
    """Estimate the goodput of a live run from its steps as they are reported. Unlike `segments`, it ignores checkpoints
    and earlier parts of the run."""

    def __init__(self, began: float, ranks: int):
        self._began, self._ranks, self._first, self._at = began, ranks, -1, began
        self._sums = array("d")  # GPU-seconds of the steps that count, up to each one

    def add(self, step: int, time_s: float, wait_s: float, present: int, at: float) -> float:
        """Return the share of all GPU-seconds until `at`; `present`: ranks that took part in the step."""
        if not self._sums:
            self._first = step
        del self._sums[max(0, step - self._first) :]  # they were abandoned
        before = self._sums[-1] if self._sums else 0.0
        self._sums.append(before + present * max(0.0, min(time_s, at - self._at) - wait_s))
        self._at = max(self._at, at)
        return min(1.0, self._sums[-1] / (self._ranks * max(1e-9, at - self._began)))


def _by_presence(begin: int, end: int, state: str, marks: list[tuple[int, int]], ranks: int) -> Iterable[Segment]:
    at = bisect_left(marks, (begin, ranks + 1))
    present = marks[at - 1][1] if at else ranks
    while at < len(marks) and marks[at][0] < end:
        mark, count = marks[at]
        at += 1
        if mark > begin:
            yield Segment(begin, mark, state, present)
            begin = mark
        present = count
    yield Segment(begin, end, state, present)


def _ns(seconds: float) -> int:
    return round(max(0.0, seconds) * NS)


def _merged(windows: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for a, b in sorted(w for w in windows if w[1] > w[0]):
        if out and a <= out[-1][1]:
            out[-1] = (out[-1][0], max(b, out[-1][1]))
        else:
            out.append((a, b))
    return out


def _touches(windows: list[tuple[int, int]], begin: int, end: int) -> bool:
    at = bisect_left(windows, (end, 0))
    return at > 0 and windows[at - 1][1] > begin


def _split(windows: list[tuple[int, int]], begin: int, end: int) -> Iterable[tuple[int, int, bool]]:
    """Cut a span where windows begin and end: (from, until, inside a window)."""
    at = max(0, bisect_left(windows, (begin, 0)) - 1)
    for a, b in windows[at:]:
        if a >= end:
            break
        if b <= begin:
            continue
        if a > begin:
            yield begin, a, False
            begin = a
        stop = min(b, end)
        yield begin, stop, True
        begin = stop
    if begin < end:
        yield begin, end, False
