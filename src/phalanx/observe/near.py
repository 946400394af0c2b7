"""Near tables: step times of single ranks, kept by the aggregator to which the ranks report. The top of a large run
keeps only blocks of ranks; a reader that zooms into a block finds its ranks here (`observe.tiles.TileReader`).

A separate thread writes what the aggregator hands over, and drops and counts what it cannot keep up with. Times are
shown relative to the median of the ranks that report to this aggregator."""

from __future__ import annotations

import contextlib
import queue
import threading
from pathlib import Path
from typing import Any

from phalanx.observe.tiles import FOLDER, NEAR, SHARD, TileWriter

HELD = 4  # steps that wait for nodes that are late
WAITING = 256  # messages
DROPPED = "dropped"  # file with the count of dropped ones
ALIGN = 4096  # steps: tables begin at a multiple of it, so that all aggregators have the same blocks


class NearTables:
    """Tables in ranks/near/NAME.N below `folder`, the record of the run. A new aggregator of the same name starts new
    tables beside the old ones."""

    def __init__(self, folder: Path, name: str):
        at = folder / FOLDER / NEAR
        at.mkdir(parents=True, exist_ok=True)
        lives = sum(path.name.rpartition(".")[0] == name for path in at.iterdir())
        self.folder, self.dropped, self._told = at / f"{name}.{lives}", 0, 0
        self._open: dict[tuple[int, int], dict[int, float]] = {}  # generation and step -> rank -> seconds
        self._done = (0, -1)  # the last one written
        self._writers: dict[int, TileWriter] = {}  # by the first rank
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name="near tables", daemon=True)
        self._thread.start()

    def take(self, fold: dict[str, Any]) -> None:
        """Take a fold of steps as a node sent it, without ever waiting."""
        try:
            self._queue.put_nowait(fold)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is held and stop the thread."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (fold := self._queue.get()) is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # a fold of another version
                self._gather(fold)
        while self._open:
            self._write(min(self._open))
        for writer in self._writers.values():
            writer.close()

    def _gather(self, fold: dict[str, Any]) -> None:
        key, (block, times) = (int(fold["generation"]), int(fold["step"])), fold["times"]
        if block != 1 or key <= self._done:
            self.dropped += 1
            return
        self._open.setdefault(key, {}).update({int(rank): float(time_s) for rank, time_s in times.items()})
        while len(self._open) > HELD:
            self._write(min(self._open))

    def _write(self, key: tuple[int, int]) -> None:
        import numpy as np

        times, self._done = self._open.pop(key), key
        median = float(np.median([*times.values()]))
        for first in {rank // SHARD * SHARD for rank in times}:
            row = np.full(SHARD, np.nan, np.float32)
            own = {rank - first: time_s for rank, time_s in times.items() if first <= rank < first + SHARD}
            row[[*own]] = [*own.values()]
            try:
                if first not in self._writers:
                    start = key[1] // ALIGN * ALIGN
                    self._writers[first] = TileWriter(self.folder / f"{first:012d}", SHARD, start)
                self._writers[first].add(key[1], row, median)
            except OSError:
                self.dropped += 1
        if self.dropped != self._told:
            with contextlib.suppress(OSError):  # the disk is full: a later step writes the count
                self.folder.mkdir(exist_ok=True)
                (self.folder / DROPPED).write_text(str(self.dropped))
                self._told = self.dropped


def dropped(record: Path) -> int:
    """Return how many messages and rows the aggregators of a run have reported as dropped."""
    count = 0
    for file in (record / FOLDER / NEAR).glob(f"*/{DROPPED}"):
        with contextlib.suppress(OSError, ValueError):  # it is being written
            count += int(file.read_text())
    return count
