"""Tiles: how slow each rank was at each step, kept so that any part of it can be drawn at any zoom in bounded time.

A value is one byte: a rank's step time over the median of that step, on a scale of 1.4 %, rounded up; 0: the
rank did not report. Beside the full table there is a table for every combination of rank blocks and step blocks of 4,
16, 64 ..., which holds the largest value of each block. So one slow rank in a million shows at every zoom, and a
picture of any part reads at most 16 values for each pixel. In a file, 64 ranks x 64 steps share one page of memory, so
reading one rank over all steps is as cheap as all ranks at one step. Where the top keeps blocks of ranks, the
aggregators keep the single ranks (`observe.near`), and a picture of few ranks is drawn from their tables."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.observe.record import FULL

FOLDER, NEAR = "ranks", "near"
SHARD = 4096  # ranks in an aggregator's table
MOST_ROWS = 1024  # in a picture that is searched
FACTOR = 4
SIDE = 64  # ranks and steps of a page
LEAST, MOST = 0.5, 16.0  # times the median; values beyond are shown as the end of the scale
MOST_SAMPLED = 1 << 16  # ranks that the median is taken from; if there are more, an evenly spaced sample
_SCALE = 254 / np.log2(MOST / LEAST)
Codes = np.ndarray[Any, np.dtype[np.uint8]]


def encode(times_s: np.ndarray, median_s: float) -> Codes:
    """Write times as codes. NaN: absent."""
    position = np.asarray(times_s, np.float32) * np.float32(1 / (median_s * LEAST))
    absent = np.isnan(position)
    with np.errstate(divide="ignore", invalid="ignore"):
        np.log2(position, out=position)
        position *= np.float32(_SCALE)
    np.ceil(position, out=position)
    np.fmax(position, 0, out=position)  # for a time of 0, and for absent values
    np.fmin(position, 254, out=position)
    position += 1
    codes = position.astype(np.uint8)
    if absent.any():
        codes[absent] = 0
    return codes


def decode(codes: Codes) -> np.ndarray:
    """Read codes as multiples of the median; NaN: absent."""
    ratio = LEAST * 2 ** ((codes.astype(np.float32) - 1) / _SCALE)
    return np.where(codes == 0, np.nan, ratio)


def levels(count: int) -> int:
    """Return the number of block sizes, size 1 included."""
    number = 1
    while count > 1:
        count, number = -(-count // FACTOR), number + 1
    return number


class _Table:
    """A file of rows, of which SIDE steps are mapped for writing: (block of ranks, step, rank)."""

    def __init__(self, path: Path, width: int):
        self.width, self.blocks = width, -(-width // SIDE)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._chunk, self._map = -1, np.zeros((0, 0, 0), np.uint8)
        self._whole = width // SIDE * SIDE

    def write(self, row: int, values: Codes) -> None:
        """Write one row. A lack of room raises OSError before anything is touched."""
        pages = self._at(row // SIDE)[:, row % SIDE, :]
        pages[: self._whole // SIDE] = values[: self._whole].reshape(-1, SIDE)
        if self._whole < self.width:
            pages[-1, : self.width - self._whole] = values[self._whole :]

    def largest(self, first: int, last: int) -> Codes:
        """Return the largest value of each column in these rows."""
        out = np.zeros(self.width, np.uint8)
        for row in range(first, last):
            np.maximum(out, self._at(row // SIDE)[:, row % SIDE, :].reshape(-1)[: self.width], out=out)
        return out

    def close(self) -> None:
        self._map = np.zeros((0, 0, 0), np.uint8)
        os.close(self._fd)

    def _at(self, chunk: int) -> Codes:
        if chunk != self._chunk:
            size = self.blocks * SIDE * SIDE
            os.posix_fallocate(self._fd, chunk * size, size)  # writing to a map on a full disk would end the process
            view = mmap.mmap(self._fd, size, offset=chunk * size)
            self._map = np.frombuffer(view, np.uint8).reshape(self.blocks, SIDE, SIDE)
            self._chunk = chunk
        return self._map


class TileWriter:
    """Takes one row for each step, in order; a repeated step replaces the abandoned one. A full disk costs rows, which
    are counted, but never a training step."""

    def __init__(self, folder: Path, ranks: int, first_step: int = 0, each: int = 1, in_all: int = 0):
        """`ranks`: rows of the table, of `each` ranks each; `in_all`: ranks in total (0: those of all rows)."""
        folder.mkdir(parents=True, exist_ok=True)
        self.ranks, self.first, self.dropped = ranks, first_step, 0
        about: dict[str, float] = {"ranks": ranks, "each": each, "in_all": in_all or ranks * each}
        about |= {"first_step": first_step, "factor": FACTOR, "least": LEAST, "most": MOST}
        (folder / "tiles.json").write_text(json.dumps(about))
        self.widths = [-(-ranks // FACTOR**i) for i in range(levels(ranks))]
        self._folder = folder
        self._tables: dict[tuple[int, int], _Table] = {}
        self._medians = os.open(folder / "medians.f32", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self._count = 0  # rows written
        self._blocks: list[
            list[Codes]
        ] = []  # by size of step block, from FACTOR on: the largest values so far in the open block

    def add(self, step: int, times_s: Sequence[float] | np.ndarray, median_s: float | None = None) -> None:
        """`times_s`: one for each rank, NaN if unknown; `median_s`: the reference, if not the median of these times."""
        times = np.asarray(times_s, dtype=np.float32)
        some = times[:: -(-len(times) // MOST_SAMPLED)] if len(times) > MOST_SAMPLED else times
        known = some[np.isfinite(some)]
        at = step - self.first
        if times.shape != (self.ranks,) or at < 0 or not len(known):
            self.dropped += 1
            return
        median = (float(np.median(known)) if median_s is None else median_s) or 1e-9
        try:
            if at < self._count:
                self._rewind(at)
            while self._count < at:  # dropped rows
                self._append(np.zeros(self.ranks, np.uint8), 0.0)
            self._append(encode(times, median), median)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.dropped += 1

    def close(self) -> None:
        os.close(self._medians)
        for table in self._tables.values():
            table.close()
        self._tables.clear()

    def _append(self, codes: Codes, median: float) -> None:
        at, rows = self._count, [codes]
        for width in self.widths[1:]:
            rows.append(_blocked(rows[-1], width))
        self._write(0, at, rows)
        number, size = 1, 1  # a block of steps takes in each next smaller block when that is complete
        while (at + 1) % size == 0:
            if len(self._blocks) < number:
                self._blocks.append([np.zeros(width, np.uint8) for width in self.widths])
            block = self._blocks[number - 1]
            fresh = (at + 1 - size) % (size * FACTOR) == 0
            for held, row in zip(block, rows, strict=True):
                if fresh:
                    held[:] = row
                else:
                    np.maximum(held, row, out=held)
            size *= FACTOR
            self._write(number, at // size, block)
            rows, number = block, number + 1
        os.pwrite(self._medians, np.float32(median).tobytes(), 4 * at)  # written last, because a reader counts these
        self._count = at + 1

    def _rewind(self, at: int) -> None:
        """Forget the rows from `at` on, which were abandoned."""
        os.ftruncate(self._medians, 4 * at)
        self._count = at
        for number, block in enumerate(self._blocks, 1):
            size = FACTOR**number
            first, last = at // size * FACTOR, at // (size // FACTOR)
            for level in range(len(self.widths)):
                block[level][:] = self._table(level, number - 1).largest(first, last)
            if last > first:
                self._write(number, at // size, block)

    def _write(self, number: int, row: int, rows: list[Codes]) -> None:
        for level, values in enumerate(rows):
            self._table(level, number).write(row, values)

    def _table(self, level: int, number: int) -> _Table:
        if (level, number) not in self._tables:
            self._tables[level, number] = _Table(self._folder / f"r{level}s{number}.u8", self.widths[level])
        return self._tables[level, number]


class TileReader:
    """Draws parts of what a TileWriter has written, even while it is still writing."""

    def __init__(self, folder: Path):
        about = json.loads((folder / "tiles.json").read_bytes())
        self.folder, self._rows_in_all, self.first = folder, int(about["ranks"]), int(about["first_step"])
        self.each = int(about.get("each", 1))  # ranks of a row
        self.ranks = int(about.get("in_all", self._rows_in_all))
        if about["factor"] != FACTOR or min(self._rows_in_all, self.each, self.ranks) < 1:
            raise ValueError(f"{folder} was written with blocks of {about['factor']}; this version reads {FACTOR}")

    @property
    def steps(self) -> int:
        """The number of steps written."""
        try:
            return (self.folder / "medians.f32").stat().st_size // 4
        except OSError:
            return 0

    def picture(self, ranks: tuple[int, int], steps: tuple[int, int], height: int, width: int) -> dict[str, Any]:
        """Draw these ranks (rows) and steps (columns); each cell holds its largest value. `ranks` and `steps` are
        half-open; they come back widened to whole blocks."""
        count, each, last = self.steps, self.each, self._rows_in_all
        low = (max(0, min(ranks[0] // each, last - 1)), max(0, min(steps[0] - self.first, count - 1)))
        high = (max(low[0] + 1, min(-(-ranks[1] // each), last)), max(low[1] + 1, min(steps[1] - self.first, count)))
        if not count:
            none = np.zeros((0, 0), np.uint8)
            return {"ranks": [low[0] * each, high[0] * each], "steps": [self.first, self.first], "codes": none}
        level = _level(high[0] - low[0], height, last)
        number = _level(high[1] - low[1], width, count)
        rows, columns = FACTOR**level, FACTOR**number  # in a block
        r0, r1 = low[0] // rows, -(-high[0] // rows)
        s0, s1 = low[1] // columns, -(-high[1] // columns)
        table = self._rows(level, number, s0, s1, r0, r1, count)
        codes = _pooled(_pooled(table, min(width, len(table))).T, min(height, r1 - r0))
        shown = (self.first + s0 * columns, self.first + min(count, s1 * columns))
        if each > 1 and ranks[1] - ranks[0] <= height:
            single = (max(0, ranks[0]), min(self.ranks, ranks[1]))
            near = self._near(single, shown, codes.shape[1])
            if near is not None:
                unkept = np.flatnonzero(~near.any(axis=1))  # only their block is kept
                near[unkept] = codes[(unkept + single[0]) // each - r0]
                return {"ranks": [*single], "steps": [*shown], "codes": near}
        return {"ranks": [r0 * rows * each, min(self.ranks, r1 * rows * each)], "steps": [*shown], "codes": codes}

    def slowest(self, steps: tuple[int, int], most: int = 10) -> list[dict[str, Any]]:
        """List the ranks with the largest values in these steps, or their block where single ranks are not kept."""
        out = []
        for a, b, code in self._worst((0, self.ranks), steps)[:most]:
            while (inside := self._worst((a, b), steps)) and inside[0][1] - inside[0][0] < b - a:
                a, b, code = inside[0]
            out.append({"ranks": [a, b], "ratio": float(decode(np.array(code, np.uint8)))})
        return out

    def _worst(self, ranks: tuple[int, int], steps: tuple[int, int]) -> list[tuple[int, int, int]]:
        """List (first rank, end, code) for each row of a picture, largest code first."""
        found = self.picture(ranks, steps, MOST_ROWS, 1)
        (first, end), rows = found["ranks"], len(found["codes"])
        codes, many = found["codes"].max(axis=1, initial=0).tolist(), end - first
        spans = [(first + r * many // rows, first - (-(r + 1) * many // rows), codes[r]) for r in range(rows)]
        return sorted((s for s in spans if s[2] and s[0] < ranks[1] and s[1] > ranks[0]), key=lambda s: -s[2])

    def _near(self, ranks: tuple[int, int], steps: tuple[int, int], columns: int) -> Codes | None:
        """Draw single ranks from the tables of the aggregators; None: no table covers any of them."""
        out, found = np.zeros((ranks[1] - ranks[0], columns), np.uint8), False
        for shard in self.folder.glob(f"{NEAR}/*/*/tiles.json"):
            first = int(shard.parent.name) if shard.parent.name.isdigit() else -SHARD
            a, b = max(ranks[0], first), min(ranks[1], first + SHARD)
            reader = TileReader(shard.parent) if a < b else self
            s0, s1 = max(steps[0], reader.first), min(steps[1], reader.first + reader.steps)
            if a >= b or s0 >= s1:
                continue
            part = reader.picture((a - first, b - first), (s0, s1), b - a, columns)
            begin_step, end_step = part["steps"]
            edges = np.linspace(begin_step, end_step, part["codes"].shape[1] + 1)
            place = np.clip((edges - steps[0]) * columns / (steps[1] - steps[0]), 0, columns)
            begins, ends = np.floor(place[:-1]).astype(int), np.ceil(place[1:] - 1e-9).astype(int)
            for column, begin, end in zip(part["codes"].T, begins, ends, strict=True):
                cells = out[a - ranks[0] : b - ranks[0], begin:end]
                np.maximum(cells, column[:, None], out=cells)
            found = True
        return out if found else None

    def _rows(self, level: int, number: int, s0: int, s1: int, r0: int, r1: int, count: int) -> Codes:
        """Return rows s0 to s1 of a table. The newest steps are missing from it until part of their block is complete,
        so they are read from the tables with smaller blocks."""
        part = max(1, FACTOR ** (number - 1))  # steps by which a row grows
        written = -(-(count // part * part) // FACTOR**number)
        table = self._read(level, number, s0, min(s1, written), r0, r1)
        newest = count // part * part  # the first step that is not in the table
        if number and newest < min(count, s1 * FACTOR**number):
            row = newest // FACTOR**number
            tail = self._rows(level, number - 1, newest // part, -(-count // part), r0, r1, count).max(axis=0)
            if row < s0 + len(table):
                table[row - s0] = np.maximum(table[row - s0], tail)
            else:
                table = np.concatenate([table, tail[None]])
        return table

    def _read(self, level: int, number: int, s0: int, s1: int, r0: int, r1: int) -> Codes:
        """Read a rectangle of a table."""
        if s1 <= s0:
            return np.zeros((0, r1 - r0), np.uint8)
        width = -(-self._rows_in_all // FACTOR**level)
        blocks = -(-width // SIDE)
        c0, c1, b0, b1 = s0 // SIDE, -(-s1 // SIDE), r0 // SIDE, -(-r1 // SIDE)
        pages = np.zeros((c1 - c0, b1 - b0, SIDE, SIDE), np.uint8)
        size, page = (b1 - b0) * SIDE * SIDE, SIDE * SIDE
        places = [(chunk * blocks + b0) * page for chunk in range(c0, c1)]
        fd = os.open(self.folder / f"r{level}s{number}.u8", os.O_RDONLY)
        try:
            for place in places:  # queue all reads at once
                os.posix_fadvise(fd, place, size, os.POSIX_FADV_WILLNEED)
            for chunk, place in zip(pages, places, strict=True):
                os.preadv(fd, [chunk.data], place)
        finally:
            os.close(fd)
        some = pages.transpose(0, 2, 1, 3).reshape((c1 - c0) * SIDE, (b1 - b0) * SIDE)
        return some[s0 - c0 * SIDE : s1 - c0 * SIDE, r0 - b0 * SIDE : r1 - b0 * SIDE]


def _level(span: int, pixels: int, count: int) -> int:
    """Return the level of the largest blocks that are no larger than a pixel."""
    level = 0
    while level + 1 < levels(count) and span >= pixels * FACTOR ** (level + 1):
        level += 1
    return level


def _blocked(row: Codes, width: int) -> Codes:
    """Return the largest of each FACTOR values."""
    if len(row) % FACTOR:
        row = np.concatenate([row, np.zeros(-len(row) % FACTOR, np.uint8)])
    return row.reshape(width, FACTOR).max(axis=1)


def _pooled(table: Codes, rows: int) -> Codes:
    """Reduce the table to `rows` rows; each keeps its largest values."""
    if not len(table) or rows == len(table):
        return np.ascontiguousarray(table)
    edges = np.arange(rows) * len(table) // rows
    return np.maximum.reduceat(table, edges, axis=0)
