"""Tiles: how slow each rank was at each step, kept so that any part of it can be drawn at any zoom in bounded time.

A value is one byte: a rank's step time over the median of that step, on a scale of 1.4 %, rounded up; 0: the
rank did not report. Beside the full table there is a table for every combination of rank blocks and step blocks of 8,
64, 512 ..., which holds the largest value of each block. So one slow rank in a million shows at every zoom, and a
picture of any part reads at most 64 values for a pixel. The tables are files to which a step appends one row; an
aggregator keeps those of its ranks, and only pictures travel."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "ranks"
FACTOR = 8
LEAST, MOST = 0.5, 16.0  # of the median; what is beyond is shown as the end of the scale
MOST_SAMPLED = 1 << 16  # ranks that the median is taken from; of more, evenly spread ones
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
    np.fmax(position, 0, out=position)  # of a time of 0, and of what is absent
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
    """How many sizes of blocks there are, the single one included."""
    number = 1
    while count > 1:
        count, number = -(-count // FACTOR), number + 1
    return number


class TileWriter:
    """Takes one row for each step, in order; a step that is done again replaces the one that was abandoned. A disk that
    is full costs rows, never a step: they are counted."""

    def __init__(self, folder: Path, ranks: int, first_step: int = 0):
        folder.mkdir(parents=True, exist_ok=True)
        self.ranks, self.first, self.dropped = ranks, first_step, 0
        about = {"ranks": ranks, "first_step": first_step, "factor": FACTOR, "least": LEAST, "most": MOST}
        (folder / "tiles.json").write_text(json.dumps(about))
        self.widths = [-(-ranks // FACTOR**i) for i in range(levels(ranks))]
        self._folder = folder
        self._fds: dict[tuple[int, int], int] = {}
        self._medians = self._open("medians.f32")
        self._last = first_step - 1
        # Of each size of step blocks but the first: the largest values of the block that is being filled.
        self._blocks: list[list[Codes]] = []

    def add(self, step: int, times_s: Sequence[float] | np.ndarray) -> None:
        """`times_s`: of every rank, NaN where it is not known."""
        times = np.asarray(times_s, dtype=np.float32)
        some = times[:: -(-len(times) // MOST_SAMPLED)] if len(times) > MOST_SAMPLED else times
        known = some[np.isfinite(some)]
        if times.shape != (self.ranks,) or step < self.first or not len(known):
            self.dropped += 1
            return
        median = float(np.median(known)) or 1e-9
        rows = self._by_ranks(encode(times, median))
        at = step - self.first
        try:
            if step <= self._last:
                self._rewind(at)
            while len(self._blocks) < levels(at + 1) - 1:
                self._blocks.append(self._before(len(self._blocks) + 1, at))
            os.pwrite(self._medians, np.float32(median).tobytes(), 4 * at)
            self._write(0, at, rows)
            for number, block in enumerate(self._blocks):
                if at % FACTOR ** (number + 1) == 0:
                    for values in block:
                        values.fill(0)
                for values, row in zip(block, rows, strict=True):
                    np.maximum(values, row, out=values)
                self._write(number + 1, at // FACTOR ** (number + 1), block)
            self._last = step
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS):
                raise
            self.dropped += 1

    def close(self) -> None:
        for fd in (self._medians, *self._fds.values()):
            os.close(fd)
        self._fds.clear()

    def _by_ranks(self, codes: Codes) -> list[Codes]:
        rows = [codes]
        for width in self.widths[1:]:
            rows.append(_blocked(rows[-1], width))
        return rows

    def _before(self, number: int, at: int) -> list[Codes]:
        """The largest values so far of a block, from the table with the next smaller blocks."""
        size = FACTOR**number
        first, last = at // size * FACTOR, -(-(at % size) // FACTOR ** (number - 1)) + at // size * FACTOR
        out = []
        for level, width in enumerate(self.widths):
            data = os.pread(self._fd(level, number - 1), (last - first) * width, first * width) if last > first else b""
            table = np.frombuffer(data[: len(data) // width * width], np.uint8).reshape(-1, width)
            out.append(table.max(axis=0) if len(table) else np.zeros(width, np.uint8))
        return out

    def _rewind(self, at: int) -> None:
        """Forget rows from `at` on: they were abandoned."""
        for number in range(len(self._blocks) + 1):
            row = at // FACTOR**number
            for level, width in enumerate(self.widths):
                os.ftruncate(self._fd(level, number), row * width)
        os.ftruncate(self._medians, 4 * at)
        self._blocks = []
        for number in range(1, levels(at + 1)):
            self._blocks.append(self._before(number, at))

    def _write(self, number: int, row: int, rows: list[Codes]) -> None:
        for level, values in enumerate(rows):
            os.pwrite(self._fd(level, number), values.data, row * len(values))

    def _fd(self, level: int, number: int) -> int:
        if (level, number) not in self._fds:
            self._fds[level, number] = self._open(f"r{level}s{number}.u8")
        return self._fds[level, number]

    def _open(self, name: str) -> int:
        return os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)


class TileReader:
    """Draws parts of what a TileWriter has written, also while it writes."""

    def __init__(self, folder: Path):
        about = json.loads((folder / "tiles.json").read_bytes())
        self.folder, self.ranks, self.first = folder, int(about["ranks"]), int(about["first_step"])
        if about["factor"] != FACTOR or self.ranks < 1:
            raise ValueError(f"{folder} was written with blocks of {about['factor']}; this version reads {FACTOR}")

    @property
    def steps(self) -> int:
        """How many steps there are."""
        try:
            return (self.folder / "r0s0.u8").stat().st_size // self.ranks
        except OSError:
            return 0

    def picture(self, ranks: tuple[int, int], steps: tuple[int, int], height: int, width: int) -> dict[str, Any]:
        """The largest value in each cell of a picture of these ranks (rows) and steps (columns). `ranks` and `steps`
        are half-open; they come back widened to whole blocks."""
        count = self.steps
        low = (max(0, min(ranks[0], self.ranks - 1)), max(0, min(steps[0] - self.first, count - 1)))
        high = (max(low[0] + 1, min(ranks[1], self.ranks)), max(low[1] + 1, min(steps[1] - self.first, count)))
        if not count:
            return {"ranks": [low[0], high[0]], "steps": [self.first, self.first], "codes": np.zeros((0, 0), np.uint8)}
        level = _level(high[0] - low[0], height, self.ranks)
        number = _level(high[1] - low[1], width, count)
        rows, columns = FACTOR**level, FACTOR**number  # of a block
        r0, r1 = low[0] // rows, -(-high[0] // rows)
        s0, s1 = low[1] // columns, -(-high[1] // columns)
        table = self._table(level, number, s0, s1)[:, r0:r1]
        s1 = s0 + len(table)
        codes = _pooled(_pooled(table, min(width, len(table))).T, min(height, r1 - r0))
        return {
            "ranks": [r0 * rows, min(self.ranks, r1 * rows)],
            "steps": [self.first + s0 * columns, self.first + min(count, s1 * columns)],
            "codes": codes,
        }

    def medians(self, steps: tuple[int, int]) -> np.ndarray:
        """Seconds of the median rank at each of these steps."""
        first, last = max(0, steps[0] - self.first), max(0, steps[1] - self.first)
        with open(self.folder / "medians.f32", "rb") as f:
            f.seek(4 * first)
            return np.frombuffer(f.read(4 * (last - first)), np.float32)

    def _table(self, level: int, number: int, first: int, last: int) -> Codes:
        width = -(-self.ranks // FACTOR**level)
        path = self.folder / f"r{level}s{number}.u8"
        size = path.stat().st_size // width * width
        if size <= first * width:
            return np.zeros((0, width), np.uint8)
        return np.memmap(path, np.uint8, "r", shape=(size // width, width))[first:last]


def _level(span: int, pixels: int, count: int) -> int:
    """The largest blocks that are no larger than a pixel."""
    level = 0
    while level + 1 < levels(count) and span >= pixels * FACTOR ** (level + 1):
        level += 1
    return level


def _blocked(row: Codes, width: int) -> Codes:
    """The largest of each eight."""
    if len(row) % FACTOR:
        row = np.concatenate([row, np.zeros(-len(row) % FACTOR, np.uint8)])
    return row.reshape(width, FACTOR).max(axis=1)


def _pooled(table: Codes, rows: int) -> Codes:
    """Reduce to so many rows by the largest."""
    if not len(table) or rows == len(table):
        return np.ascontiguousarray(table)
    edges = np.arange(rows) * len(table) // rows
    return np.maximum.reduceat(table, edges, axis=0)
