"""Shelf: the runs of one folder, each read once and kept up to date for all viewers. Names come from the network, so a
run is found only by the name of a record that is really in the folder."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.observe import traces
from phalanx.observe.durability import headline as safe
from phalanx.observe.durability import place, tiers
from phalanx.observe.goodput import NS
from phalanx.observe.incidents import Incident
from phalanx.observe.mixture import mixture, stage_starts
from phalanx.observe.placement import fleet
from phalanx.observe.placement import headline as told
from phalanx.observe.story import NAME, Story, find_runs
from phalanx.observe.tiles import FOLDER, TileReader
from phalanx.observe.words import describe, unreadable
from phalanx.web.series import Columns

LOOK_S = 1.0  # least time between two reads of a record, for any number of viewers
COST = 20  # and at least this many times what reading and answering cost the last time
WHOLE = 1024  # last steps that are kept whole; older ones keep only what the columns lack
MOST_OPEN = 16  # runs whose steps are kept in memory
MOST_ANSWERS = 32  # of one version of a run
LITTLE = 3  # zlib level: half the time of the default, a tenth more bytes
MOST_SEGMENTS = 2000
REPORTS = "reports"  # folder beside the runs
REPORT, TRACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}\.html"), re.compile(r"\d+-\d+\.json\.gz")
LAST = 16  # recent steps that the map of ranks shows
Stamp = tuple[float, ...]


@dataclass
class Open:
    story: Story = field(init=False)  # read for the first viewer
    columns: Columns = field(default_factory=Columns)
    lock: threading.Lock = field(default_factory=threading.Lock)
    looked: float = 0.0
    cost_s: float = 0.0  # of the last read, and of the answers made from it
    version: int = 0
    about: dict[str, Any] | None = None
    state: str = ""
    answers: dict[tuple[Any, ...], bytes] = field(default_factory=dict)  # of this version, shared by all viewers
    making: threading.Lock = field(default_factory=threading.Lock)  # so that an answer is made once


class Shelf:
    def __init__(self, root: Path, price: float | None = None):
        self.root, self.price = root, price
        self._open: OrderedDict[str, Open] = OrderedDict()
        self._known: dict[str, tuple[Stamp, dict[str, Any]]] = {}  # runs that are over, by name
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        return [path.name for path in find_runs(self.root)]

    def runs(self) -> list[dict[str, Any]]:
        """Return the overview of each run, the newest first."""
        return [self._listed(path) for path in find_runs(self.root)]

    def _listed(self, path: Path) -> dict[str, Any]:
        """Return a run's overview. A run that is over is read again only if its files change, and one that cannot be
        read does not hide the others."""
        stamp = _stamp(path)
        if (known := self._known.get(path.name)) and known[0] == stamp:
            return known[1]
        try:  # the steps of a run that is over are not kept
            about = describe(Story(path, self.price)) if known or stamp[0] else self.about(path.name)
        except Exception as error:  # a file may contain anything
            about = unreadable(path, error)
        self._known.pop(path.name, None)
        if about["state"] != "running":
            self._known[path.name] = (stamp, about)
        return about

    def get(self, name: str) -> Open:
        """Return a run, read again if it is due. Raise KeyError if there is no such run."""
        path = self.root / name
        if not NAME.fullmatch(name) or not (path / "meta.json").is_file():
            raise KeyError(name)
        if path.resolve().parent != self.root.resolve():
            raise KeyError(name)  # a link that leads elsewhere
        with self._lock:
            if name not in self._open:
                self._open[name] = Open()
                while len(self._open) > MOST_OPEN:
                    self._open.popitem(last=False)
            self._open.move_to_end(name)
            one = self._open[name]
        with one.lock:
            if not one.version:  # under this run's lock: a long run takes a while, and only its viewers should wait
                one.story = Story(path, self.price)
            now = time.monotonic()
            if now - one.looked >= max(LOOK_S, COST * one.cost_s):
                state = one.story.part.state
                if one.story.update() or not one.looked or state != one.state:
                    one.columns.update(one.story)
                    one.story.slim(WHOLE)
                    one.version, one.about, one.state, one.answers = one.version + 1, None, state, {}
                one.looked, one.cost_s = now, time.monotonic() - now
        return one

    def about(self, name: str) -> dict[str, Any]:
        one = self.get(name)
        with one.lock:
            if one.about is None:
                began = time.monotonic()
                one.about = describe(one.story)
                one.cost_s += time.monotonic() - began
            return {**one.about, "version": one.version}

    def whole(self, name: str) -> dict[str, Any]:
        """Return everything about a run except its series and its record."""
        about, one = self.about(name), self.get(name)
        with one.lock:
            story = one.story
            events = [e for part in story.parts for e in part.events]
            return {
                **about,
                "incident_list": [brief(each) for each in story.incidents()],
                "checkpoints": [e for e in events if e.get("type") == "checkpoint"],
                "changes": [c for part in story.parts for c in part.incidents.changes],
                "segments": segments(story),
                "stages": stage_starts(story),
                "saved": {"tiers": (found := tiers(story)), "place": place(story), "headline": safe(found, story.done)},
                "family": model.get("family") if isinstance(model := story.part.settings.get("model"), dict) else None,
                "dropped": (story.part.summary or {}).get("dropped"),
                "has_ranks": (story.path / FOLDER / "tiles.json").is_file(),
            }

    def record(self, name: str) -> dict[str, Any]:
        """Return what was written when the run began and ended. It is separate because the diff of its code may have a
        megabyte."""
        one = self.get(name)
        with one.lock:
            part = one.story.part
            return {"job": part.job, "meta": part.meta, "summary": part.summary}

    def answer(self, name: str, kind: str, *about: Any) -> bytes:
        """Return the result of `whole`, `record` or `series` as compressed JSON, made once for all requests for the
        same version."""
        one, key = self.get(name), (kind, *about)
        with one.making:
            answers = one.answers
            if key not in answers:
                began, before = time.monotonic(), one.cost_s
                text = json.dumps(getattr(self, kind)(name, *about), allow_nan=False).encode()
                found = gzip.compress(text, LITTLE, mtime=0)
                one.cost_s = before + time.monotonic() - began
                if len(answers) < MOST_ANSWERS:
                    answers[key] = found
                return found
            return answers[key]

    def fleet(self, name: str) -> dict[str, Any]:
        """Return the nodes and ranks of a run, with how slow each rank was in the last steps."""
        import base64

        one = self.get(name)
        with one.lock:
            found = fleet(one.story.part)
            done = one.story.done
        codes, each = b"", 1
        with contextlib.suppress(OSError, ValueError, KeyError):
            reader = TileReader(one.story.path / FOLDER)
            each = reader.each
            rows = -(-reader.ranks // each)
            found_codes = reader.picture((0, reader.ranks), (max(0, done - LAST), done), rows, LAST)["codes"]
            codes = found_codes.max(axis=1, initial=0).tobytes()
        return {**found, "headline": told(found), "codes": base64.b64encode(codes).decode(), "each": each, "last": LAST}

    def mixture(self, name: str) -> dict[str, Any]:
        one = self.get(name)
        with one.lock:
            return mixture(one.story)

    def traces(self, name: str) -> list[dict[str, Any]]:
        """List the merged traces of a run (see `phalanx trace`)."""
        folder = self.get(name).story.path / traces.FOLDER
        return _files(folder, TRACE)

    def trace(self, name: str, file: str) -> Path:
        return _inside(self.get(name).story.path / traces.FOLDER, file, TRACE)

    def reports(self) -> list[dict[str, Any]]:
        """List the pages that `phalanx plan --html` and `phalanx simulate --html` have written beside the runs."""
        return sorted(_files(self.root / REPORTS, REPORT), key=lambda one: -one["time"])

    def report(self, file: str) -> Path:
        return _inside(self.root / REPORTS, file, REPORT)

    def incident(self, name: str, number: int) -> dict[str, Any]:
        """Return an incident. Raise KeyError if there is none of this number."""
        one = self.get(name)
        with one.lock:
            found = [each for each in one.story.incidents() if each.number == number]
            if not found:
                raise KeyError(number)
            return found[0].to_dict()

    def series(self, name: str, begin: float, end: float, points: int) -> dict[str, Any]:
        one = self.get(name)
        with one.lock:
            found = one.columns.query(begin, end, points)
        for name, drawn in found["series"].items():
            if drawn["min"] == drawn["mean"] == drawn["max"]:  # each point is one step
                found["series"][name] = {"mean": drawn["mean"]}
        return {"version": one.version, **found}

    def heat(
        self, name: str, ranks: tuple[int, int], steps: tuple[int, int], height: int, width: int
    ) -> dict[str, Any] | None:
        """Return a picture of the ranks' step times, with the times of its columns; None if this run has none."""
        import base64

        import numpy as np

        one = self.get(name)
        try:
            reader = TileReader(one.story.path / FOLDER)
            found = reader.picture(ranks, steps, max(1, min(height, 2000)), max(1, min(width, 4000)))
        except (OSError, ValueError, KeyError):
            return None
        codes = found["codes"]
        columns = codes.shape[1] if codes.size else 0
        edges = np.floor(np.linspace(found["steps"][0], found["steps"][1], columns + 1))
        with one.lock:
            begins, ends = one.columns.spans(edges)
        return {
            "ranks": found["ranks"],
            "steps": found["steps"],
            "all": [reader.ranks, reader.first, reader.first + reader.steps],
            "rows": int(codes.shape[0]),
            "columns": int(columns),
            "begins": begins,
            "ends": ends,
            "codes": base64.b64encode(codes.tobytes()).decode(),
        }


def _stamp(path: Path) -> Stamp:
    """Return when the summary was written (0: not yet), and the sizes of the files that grow."""
    found: list[os.stat_result | None] = []
    for name in ("summary.json", "metrics.jsonl", "events.jsonl"):
        try:
            found.append((path / name).stat())
        except OSError:
            found.append(None)
    done, *growing = found
    return (done.st_mtime if done else 0.0, *(each.st_size if each else 0 for each in growing))


def _files(folder: Path, pattern: re.Pattern[str]) -> list[dict[str, Any]]:
    """List the files directly in the folder whose names match."""
    found = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                about = entry.stat()
                found.append({"name": entry.name, "bytes": about.st_size, "time": about.st_mtime})
    return sorted(found, key=lambda one: one["name"])


def _inside(folder: Path, name: str, pattern: re.Pattern[str]) -> Path:
    """Return a file directly in the folder. Raise KeyError if there is none of this name."""
    path = folder / name
    if not pattern.fullmatch(name) or path.is_symlink() or not path.is_file():
        raise KeyError(name)
    return path


def brief(one: Incident) -> dict[str, Any]:
    out = one.to_dict()
    out["evidence"] = len(out["evidence"])
    return out


def segments(story: Story) -> list[list[Any]]:
    """Return [begin, end, state, present, ranks] of the run, joining neighbours of one state. If there are too many to
    draw, short ones are joined too. `ranks` is that of the part's layout, which a resumed run may have changed."""
    pieces: list[list[Any]] = [
        [s.begin_ns / NS, s.end_ns / NS, s.state, s.present, part.layout.world_size]
        for part, s in story.segments()
    ]  # fmt: skip
    least = 0.0
    while True:
        out: list[list[Any]] = []
        for piece in pieces:
            if out and (out[-1][2:] == piece[2:] or piece[1] - piece[0] < least) and out[-1][1] >= piece[0] - 1e-9:
                out[-1][1] = piece[1]
            else:
                out.append(list(piece))
        if len(out) <= MOST_SEGMENTS:
            return out
        least = 2 * least or (pieces[-1][1] - pieces[0][0]) / 20_000
