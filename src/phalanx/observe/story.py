"""Story: a run as one line of steps, read from its record. A resumed run continues the record that it was resumed
from. An abandoned step is on a branch, and the step that replaced it is the one that counts."""

from __future__ import annotations

import json
import math
import os
import re
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from phalanx.core import document
from phalanx.core.layout import Layout
from phalanx.observe.goodput import NS, Painted, Segment, lost, segments, totals
from phalanx.observe.incidents import Incident, Incidents
from phalanx.observe.record import run_folders
from phalanx.observe.tail import Tail

Row = dict[str, Any]
NAME = re.compile(r"[A-Za-z0-9._-]+-\d{8}T\d{6}Z-[0-9a-f]{4}")
SILENT_S = 60.0  # a run on another host that is silent for longer, and has no summary, counts as lost
SPIKE_WINDOW, SPIKE_DEVIATIONS, SPIKE_LEAST, SPIKE_BATCH = 64, 8.0, 0.1, 8192
LONGEST_CHAIN = 1000
LASTING = ("step", "time", "time_s", "data_wait_s", "loss", "cursor", "generation", "served", "held")  # see `slim`


@dataclass(frozen=True, slots=True)
class Branch:
    """Steps that were completed and then abandoned."""

    step: int  # the first of them
    rows: tuple[Row, ...]


class Part:
    """One record: what one `phalanx train` left behind, or is still writing."""

    def __init__(self, path: Path):
        self.path = path
        self.meta, self.job = read_json(path / "meta.json"), read_json(path / "job.json")
        self.summary: Row | None = None
        job = self.job.get("job")
        self.settings: Row = job if isinstance(job, dict) else {}
        self.layout = _layout(self.settings.get("layout"))
        self.rows: list[Row] = []  # in the order in which they were written
        self.slimmed = 0  # rows that are no longer whole
        self.events: list[Row] = []
        self.incidents = Incidents(self.layout.replica, self.layout.replica_size)
        self._metrics, self._events = Tail(path / "metrics.jsonl"), Tail(path / "events.jsonl")
        self._anchors: dict[int, float] = {}  # generation -> when its first step was committed

    def update(self) -> bool:
        """Read what is new; return whether there was anything."""
        events, rows = self._events.read(), self._metrics.read()
        for event in events:
            if not _is_timed(event):
                self._events.damaged += 1
                continue
            self.events.append(event)
            self.incidents.add(event)
            if event.get("type") == "first commit":
                self._anchors[event.get("generation", 0)] = event.get("time", 0.0)
        for row in rows:
            if not isinstance(row.get("step"), int) or not _is_timed(row):
                self._metrics.damaged += 1
                continue
            row["time"] = self._time(row)
            self.rows.append(row)
        ended = self.summary is None and (self.path / "summary.json").is_file()
        if ended:
            self.summary = read_json(self.path / "summary.json")
        return bool(events or rows or ended)

    def _time(self, row: Row) -> float:
        """Return when the step was reported. Older records have this only for the first step of a generation."""
        if "time" in row:
            return float(row["time"])
        last, generation = self.rows[-1] if self.rows else None, row.get("generation", 0)
        if last is None or last.get("generation", 0) != generation:
            return self._anchors.get(generation, last["time"] if last else self.began)
        return last["time"] + float(row.get("time_s") or 0.0)

    @property
    def damaged(self) -> int:
        return self._metrics.damaged + self._events.damaged

    @property
    def began(self) -> float:
        started = self.meta.get("started")
        if isinstance(started, int | float):
            return float(started)
        return float(self.events[0].get("time", 0.0)) if self.events else 0.0

    @property
    def last_sign(self) -> float:
        return max([self.began, *(float(each[-1].get("time") or 0.0) for each in (self.rows, self.events) if each)])

    @property
    def state(self) -> str:
        """running, done, stopped, failed, or lost (no summary, and its process is gone)."""
        if self.summary is not None:
            return str(self.summary.get("status", "done"))
        process = self.meta.get("process")
        if isinstance(process, dict) and process.get("host") == os.uname().nodename:
            return "running" if process.get("began") == process_start(process.get("pid")) else "lost"
        return "running" if time.time() - self.last_sign < SILENT_S else "lost"

    @property
    def ended(self) -> float:
        return time.time() if self.state == "running" else self.last_sign

    @property
    def resumed(self) -> Row | None:
        return next((e for e in reversed(self.events) if e.get("type") == "resume"), None)

    @property
    def rates(self) -> Row:
        """Dollars and watts for each GPU, where they are known."""
        rates = self.meta.get("rates")
        return rates if isinstance(rates, dict) else {}


class Story:
    """The record at `path` and those that it continues. `price`: dollars per GPU-hour, instead of the record's."""

    def __init__(self, path: Path, price: float | None = None):
        self.path, self.price = path, price
        self.parts = [Part(path)]
        self.rows: list[Row] = []  # the rows that count, one for each step
        self.branches: list[Branch] = []
        self._where: list[tuple[int, int]] = []  # part and index of each row that counts
        self._spikes: list[Row] = []
        self._judged = 0  # rows already checked for spikes
        self.parts[0].update()
        self._find_earlier()
        self._taken = [0 for _ in self.parts]  # rows of each part that are folded in
        self._abandoned: list[set[int]] = [set() for _ in self.parts]
        self._fold()

    @property
    def part(self) -> Part:
        """The latest part."""
        return self.parts[-1]

    @property
    def name(self) -> str:
        return self.path.name

    def update(self) -> bool:
        changed = self.part.update()
        if changed:
            self._fold()
        return changed

    def _find_earlier(self) -> None:
        seen = {self.path.resolve()}
        while len(self.parts) < LONGEST_CHAIN and (resumed := self.parts[0].resumed):
            path = _writer(self.parts[0], resumed)
            if path is None or path.resolve() in seen:
                return
            seen.add(path.resolve())
            earlier = Part(path)
            earlier.update()
            self.parts.insert(0, earlier)

    def _fold(self) -> None:
        self.__dict__.pop("_accounts", None)
        for number, part in enumerate(self.parts):
            for index in range(self._taken[number], len(part.rows)):
                self._add(number, index, part.rows[index])
            self._taken[number] = len(part.rows)

    def _add(self, number: int, index: int, row: Row) -> None:
        step = row["step"]
        if self.rows and step <= self.rows[-1]["step"]:
            keep = len(self.rows)
            while keep and self.rows[keep - 1]["step"] >= step:
                keep -= 1
            self.branches.append(Branch(self.rows[keep]["step"], tuple(self.rows[keep:])))
            for part, at in self._where[keep:]:
                self._abandoned[part].add(at)
            del self.rows[keep:], self._where[keep:]
            self._judged = min(self._judged, keep)
            self._spikes = [spike for spike in self._spikes if spike["step"] < step]
        self.rows.append(row)
        self._where.append((number, index))

    def slim(self, keep: int) -> None:
        """Drop the readings of old steps that nobody asks for; the last `keep` rows stay whole. This is for a reader
        that runs for weeks and keeps its own columns: a row with all readings takes 8 kB."""
        for part in self.parts:
            rows, before = part.rows, Row()
            for row in rows[part.slimmed : max(part.slimmed, len(rows) - keep)]:
                kept = {name: row[name] for name in LASTING if name in row}
                for name in ("served", "held"):  # mostly the same as in the step before
                    if kept.get(name) is not None and kept[name] == before.get(name):
                        kept[name] = before[name]
                row.clear()
                row.update(kept)
                before = row
            part.slimmed = max(part.slimmed, len(rows) - keep)

    # -- goodput

    @cached_property
    def _accounts(self) -> list[list[Segment]]:
        return [self._account(number) for number in range(len(self.parts))]

    def _account(self, number: int) -> list[Segment]:
        part, size = self.parts[number], self.parts[number].layout.replica_size
        forms = [(float(f.get("time", 0.0)), len(f.get("replicas") or ()) * size) for f in part.incidents.forms]
        windows = list(part.incidents.windows)
        windows += [(one.at, part.ended) for one in part.incidents.all if one.stops and one.open and not one.started]
        stalls: dict[int, float] = {}
        for event in part.events:
            if event.get("type") == "checkpoint":
                cost = float(event.get("stall_s") or 0.0) + float(event.get("slowdown_s") or 0.0)
                stalls[int(event.get("step", 0)) - 1] = cost
        return segments(
            Painted(
                part.began, part.ended, part.layout.world_size, part.rows, frozenset(self._abandoned[number]),
                part.incidents.ready, windows, forms, stalls, part.state != "running",
            )
        )  # fmt: skip

    def segments(self) -> Iterator[tuple[Part, Segment]]:
        for part, pieces in zip(self.parts, self._accounts, strict=True):
            for piece in pieces:
                yield part, piece

    def goodput(self) -> Row:
        """Add up GPU-seconds by state over all parts; time between two parts is not counted."""
        sums: dict[str, int] = {}
        ranks = [part.layout.world_size for part in self.parts]
        for count, pieces in zip(ranks, self._accounts, strict=True):
            for state, spent in totals(pieces, count).items():
                sums[state] = sums.get(state, 0) + spent
        total = sum(sums.values())
        price, watts = self.dollars_per_gpu_s, self.part.rates.get("watts_per_gpu")
        stops = [one for one in self.incidents() if one.stops]
        wall = sum(max(0.0, part.ended - part.began) for part in self.parts)
        trained_ns = sum(piece.end_ns - piece.begin_ns for _, piece in self.segments() if piece.state == "productive")
        kwh = watts / 3.6e6 / NS if isinstance(watts, int | float) else None  # per GPU-nanosecond
        return {
            "gpu_s": total / NS,
            "ranks": self.part.layout.world_size,
            "wall_s": wall,
            "ratio": sums["productive"] / total if total else 0.0,
            "dollars": total / NS * price if price is not None else None,
            "kwh": total * kwh if kwh is not None else None,
            "effective": trained_ns / NS / wall if wall else 0.0,
            "failures": len(stops),
            "mtbf_s": wall / len(stops) if stops else None,
            "states": [
                {
                    "state": state,
                    "gpu_s": spent / NS,
                    "share": spent / total if total else 0.0,
                    "dollars": spent / NS * price if price is not None else None,
                    "kwh": spent * kwh if kwh is not None else None,
                }
                for state, spent in sums.items()
            ],
        }

    @property
    def dollars_per_gpu_s(self) -> float | None:
        rate = self.price if self.price is not None else self.part.rates.get("dollars_per_gpu_hour")
        return rate / 3600 if isinstance(rate, int | float) else None

    # -- incidents

    def incidents(self) -> list[Incident]:
        """List all incidents, numbered across parts, with the cost of each."""
        out: list[Incident] = []
        price, watts = self.dollars_per_gpu_s, self.part.rates.get("watts_per_gpu")
        for part, pieces, abandoned in zip(self.parts, self._accounts, self._abandoned, strict=True):
            stops = [one for one in part.incidents.all if one.stops]
            times = list(accumulate((row["time"] for row in part.rows), max))
            for one in stops:
                before = bisect_right(times, one.at)
                one.since = times[before - 1] if before else one.at
                one.undone_since = _undone(part.rows, abandoned, before, one.step) or one.since
            for one in part.incidents.all:
                one.number = len(out) + 1
                out.append(one)
                if one.stops:
                    until = min([one.healed or part.ended, *(two.since for two in stops if two.at > one.at)])
                    one.lost_gpu_s = lost(pieces, part.layout.world_size, one.since, until, one.undone_since)
                    one.dollars = one.lost_gpu_s * price if price is not None else None
                    one.kwh = one.lost_gpu_s * watts / 3.6e6 if isinstance(watts, int | float) else None
        return out

    # -- steps

    def spikes(self) -> list[Row]:
        """List the steps whose loss stands out from the steps before, with their samples. Each step is judged once. A
        loss that is not finite is None, and stands out if the one before it was finite."""
        import numpy as np

        while (first := self._judged) < len(self.rows):
            last, early = min(len(self.rows), first + SPIKE_BATCH), max(0, SPIKE_WINDOW - first)
            near = self.rows[max(0, first - SPIKE_WINDOW) : last]
            known = [x if isinstance(x := row.get("loss"), int | float) else np.nan for row in near]
            losses = np.array([np.nan] * early + known)
            windows = np.lib.stride_tricks.sliding_window_view(losses, SPIKE_WINDOW)[:-1]
            enough = np.isfinite(windows).sum(axis=1) >= SPIKE_WINDOW // 2
            enough[:early] = False
            median = np.nanmedian if np.isnan(losses).any() else np.median  # which is much faster
            usual, spread = np.full((2, len(windows)), np.nan)
            usual[enough] = median(windows[enough], axis=1)
            spread[enough] = 1.4826 * median(np.abs(windows[enough] - usual[enough, None]), axis=1)
            least = np.maximum(SPIKE_DEVIATIONS * spread, SPIKE_LEAST * np.abs(usual))
            none = np.isnan(losses)
            stands_out = losses[SPIKE_WINDOW:] - usual > least
            stands_out |= none[SPIKE_WINDOW:] & ~none[SPIKE_WINDOW - 1 : -1]
            stands_out[0] |= first == 0 and none[SPIKE_WINDOW]
            for at in np.flatnonzero(stands_out).tolist():
                row, before = self.rows[first + at], self.rows[first + at - 1] if first + at else Row()
                about = {
                    "step": row["step"],
                    "time": row["time"],
                    "loss": row.get("loss"),
                    "usual": float(usual[at]) if enough[at] else None,
                }
                self._spikes.append({**about, "samples": [before.get("cursor"), row.get("cursor")]})
            self._judged = last
        return list(self._spikes)

    @property
    def not_finite_since(self) -> int | None:
        """Return the step since which no loss has been finite."""
        spikes = self.spikes() if self.rows and self.rows[-1].get("loss", 0.0) is None else ()
        return spikes[-1]["step"] if spikes else None

    @property
    def steps(self) -> int:
        """The number of steps that the job asks for."""
        train = self.part.settings.get("train")
        return int(train.get("steps", 0)) if isinstance(train, dict) else 0

    @property
    def done(self) -> int:
        return self.rows[-1]["step"] + 1 if self.rows else 0


def _undone(rows: list[Row], abandoned: set[int], end: int, step: int) -> float:
    """Return when the steps from `step` on, abandoned together with the row before `end`, began; 0: it counts."""
    first = end
    while first and first - 1 in abandoned and rows[first - 1]["step"] >= step:
        if first < end and rows[first - 1]["step"] >= rows[first]["step"]:
            break  # the rest were abandoned earlier
        first -= 1
    return float(rows[first]["time"] - (rows[first].get("time_s") or 0.0)) if first < end else 0.0


def find_runs(root: Path) -> list[Path]:
    """List the records below a folder, the newest first."""
    try:
        found = [p for p in root.iterdir() if NAME.fullmatch(p.name) and (p / "meta.json").is_file()]
    except OSError:
        return []
    return sorted(found, key=lambda p: p.name.rsplit("-", 2)[1:], reverse=True)


def process_start(pid: object) -> str:
    """Return when a process on this host started, in the kernel's count; "": it is gone."""
    try:
        with open(f"/proc/{int(str(pid))}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    except (OSError, ValueError, IndexError):
        return ""


def _writer(part: Part, resumed: Row) -> Path | None:
    """Find the run that wrote the checkpoint from which `part` was resumed."""
    url = Path(str(resumed.get("url", "")))
    # A record may have been moved together with its neighbours.
    for folder in (url.parent, part.path.parent / url.parent.name):
        if folder != part.path and (folder / "meta.json").is_file() and NAME.fullmatch(folder.name):
            return folder
    wanted = json.dumps(str(resumed.get("name", ""))).encode()
    for folder in run_folders(part.path.parent, str(part.settings.get("name", ""))):
        file = folder / "events.jsonl"
        if folder != part.path and file.is_file() and wanted in file.read_bytes():
            events = Tail(file).read()
            if any(e.get("type") == "checkpoint" and e.get("checkpoint") == resumed.get("name") for e in events):
                return folder
    return None


def _is_timed(row: Row) -> bool:
    """Return whether the row's time, if it has one, is a number."""
    at = row.get("time", 0.0)
    return isinstance(at, int | float) and math.isfinite(at)


def _layout(fields: object) -> Layout:
    try:
        layout = document.make(Layout, fields) if isinstance(fields, dict) else Layout()
        return layout if isinstance(layout.world_size, int) else Layout()  # the record is unchecked
    except TypeError:
        return Layout()


def read_json(path: Path) -> Row:
    """Read a JSON object from a file; {}: there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
