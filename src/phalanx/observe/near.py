"""Near tables: the step times of single ranks, kept by the aggregator that the ranks report to. The top of a large run
keeps blocks of ranks; a reader that zooms into a block finds its ranks here (`observe.tiles.TileReader`).

The aggregator only hands over what nodes said: a thread writes, and what it cannot keep up with is dropped and counted.
Times are shown against the median of the ranks that report to this aggregator."""

from __future__ import annotations

import contextlib
import queue
import threading
from pathlib import Path
from typing import Any

from phalanx.observe.tiles import FOLDER, NEAR, SHARD, TileWriter

HELD = 4  # steps that wait for nodes that are late
WAITING = 256  # messages
DROPPED = "dropped"  # file with their count
ALIGN = 4096  # steps: tables begin at a multiple, so that those of all aggregators have the same blocks


class NearTables:
    """In `folder`/ranks/near/NAME, `folder` being the record of the run. A new one of the same name begins anew beside
    the old one's tables."""

    def __init__(self, folder: Path, name: str):
        at = folder / FOLDER / NEAR
        at.mkdir(parents=True, exist_ok=True)
        lives = sum(path.name.rpartition(".")[0] == name for path in at.iterdir())
        self.folder, self.dropped, self._told = at / f"{name}.{lives}", 0, 0
        self._open: dict[tuple[int, int], dict[int, float]] = {}  # generation and step -> rank -> seconds
        self._done = (0, -1)  # the last that was written
        self._writers: dict[int, TileWriter] = {}  # by the first rank
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name="near tables", daemon=True)
        self._thread.start()

    def take(self, fold: dict[str, Any]) -> None:
        """A fold of steps, as a node sent it. Never waits."""
        try:
            self._queue.put_nowait(fold)
        except queue.Full:
            self.dropped += 1

    def close(self) -> None:
        """Write what is held, and leave."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (fold := self._queue.get()) is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version
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
            with contextlib.suppress(OSError):  # a disk that is full hears it with a later step
                self.folder.mkdir(exist_ok=True)
                (self.folder / DROPPED).write_text(str(self.dropped))
                self._told = self.dropped


def dropped(record: Path) -> int:
    """Return how many messages and rows the aggregators of a run could not keep, as far as they have told."""
    count = 0
    for file in (record / FOLDER / NEAR).glob(f"*/{DROPPED}"):
        with contextlib.suppress(OSError, ValueError):  # it is being written
            count += int(file.read_text())
    return count
