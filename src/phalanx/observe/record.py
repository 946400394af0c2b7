"""RunRecord: the directory that a run leaves behind. It is plain JSON, appended line by line, and readable during the
run and after a crash. The summary exists only if the run came to its end."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.observe import fold

if TYPE_CHECKING:
    from phalanx.observe.tiles import TileWriter

Row = dict[str, Any]
MOST_WAITING = 10_000  # lines that wait for a full disk; beyond that the oldest are dropped
#: Disk errors that may pass, including those of a network disk.
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE, errno.ETIMEDOUT}


class RunRecord:
    """job.json, meta.json, metrics.jsonl and ledger.jsonl (a line per step), events.jsonl, ranks/ (the step times of
    each rank), logs/, summary.json. A full disk never stops the run: lines wait for room, and `dropped` counts those
    that are lost if too many wait."""

    def __init__(self, path: Path, writable: bool = False):
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        names = ("metrics", "events", "ledger") if writable else ()
        self._files = {name: os.open(path / f"{name}.jsonl", flags, 0o644) for name in names}
        self._waiting: dict[str, deque[bytes]] = {name: deque() for name in names}
        self._ranks: TileWriter | None = None
        self._lost = self._told = self._seen = 0

    @staticmethod
    def create(root: Path, name: str, meta: Row, job: Row | None = None) -> RunRecord:
        """Create the directory. `job`: the resolved job and the origin of each value; `meta`: versions, host,
        promise."""
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        path = Path(root) / f"{_safe(name)}-{stamp}-{secrets.token_hex(2)}"
        path.mkdir(parents=True)
        (path / "logs").mkdir()
        _write(path / "job.json", job or {})
        _write(path / "meta.json", {"started": time.time(), **meta})
        return RunRecord(path, writable=True)

    @staticmethod
    def open(path: Path) -> RunRecord:
        if not (Path(path) / "meta.json").is_file():
            raise FileNotFoundError(f"{path} is not a run record: it has no meta.json")
        return RunRecord(Path(path))

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def metric(self, row: Row) -> None:
        self._append("metrics", {"time": time.time(), **row})

    def event(self, event: Row) -> None:
        self._append("events", {"time": time.time(), **event})

    def rank_times(self, step: int, times: fold.Times, ranks: int) -> None:
        """Keep the time of each rank or block of ranks; those that did not report are shown as absent."""
        from phalanx.observe.tiles import FOLDER, TileWriter

        block = fold.block_of(ranks)
        longest = fold.merged_times([block, {}], times)[1]
        rows = -(-ranks // block)
        try:
            if self._ranks is None:
                self._ranks = TileWriter(self.path / FOLDER, rows, step, block, ranks)
            self._ranks.add(step, [longest.get(str(row), math.nan) for row in range(rows)])
        except OSError:
            self._lost += 1

    @property
    def dropped(self) -> int:
        """Number of lines and rows lost because the disk was full."""
        return self._lost + (self._ranks.dropped if self._ranks else 0)

    def take_dropped(self) -> int:
        """Return the number lost since it was last reported, once the disk accepts everything again; until then 0."""
        seen, self._seen = self._seen, self.dropped
        if self._seen != seen or any(self._waiting.values()):
            return 0
        lost, self._told = seen - self._told, seen
        return lost

    def ledger(self, line: str) -> None:
        self._append_line("ledger", line)

    def finish(self, summary: Row) -> None:
        self.close()
        more = {"dropped": self.dropped} if self.dropped else {}
        _write(self.path / "summary.json", {**summary, **more})

    def close(self) -> None:
        for name in self._files:
            self._flush(name)
            self._lost += len(self._waiting[name])
        for fd in self._files.values():
            with contextlib.suppress(OSError):  # a network disk may report only now that it is full
                os.close(fd)
        self._files.clear()
        if self._ranks:
            self._ranks.close()
            self._lost, self._ranks = self.dropped, None

    @property
    def job(self) -> Row:
        return json.loads((self.path / "job.json").read_bytes())

    @property
    def meta(self) -> Row:
        return json.loads((self.path / "meta.json").read_bytes())

    @property
    def summary(self) -> Row | None:
        """Contents of summary.json; None while the run is in progress, or if it crashed."""
        file = self.path / "summary.json"
        return json.loads(file.read_bytes()) if file.exists() else None

    def metrics(self) -> Iterator[Row]:
        return _read(self.path / "metrics.jsonl")

    def events(self) -> Iterator[Row]:
        return _read(self.path / "events.jsonl")

    def _append(self, name: str, row: Row) -> None:
        # One write on a file opened for appending: readers see whole lines, and a crash can tear only the last one.
        self._append_line(name, _json(row))

    def _append_line(self, name: str, text: str) -> None:
        waiting = self._waiting[name]
        waiting.append((text + "\n").encode())
        self._flush(name)
        if len(waiting) > MOST_WAITING:
            del waiting[1]  # the first may be partly written
            self._lost += 1

    def _flush(self, name: str) -> None:
        waiting = self._waiting[name]
        try:
            while waiting:
                taken = os.write(self._files[name], waiting[0])
                if taken < len(waiting[0]):  # the disk is full; only the next write raises
                    waiting[0] = waiting[0][taken:]
                else:
                    waiting.popleft()
        except OSError as error:
            if error.errno not in FULL:
                raise


def run_folders(root: Path, name: str) -> list[Path]:
    """List the folders of a job's runs, the newest first."""
    pattern = re.compile(re.escape(_safe(name)) + r"-\d{8}T\d{6}Z-[0-9a-f]{4}")
    found = [path for path in root.glob(f"{_safe(name)}-*") if pattern.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path.name.rsplit("-", 2)[1], path.stat().st_mtime), reverse=True)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), allow_nan=False, indent=indent)


def _plain(value: Any) -> Any:
    """Replace NaN and infinity by null, since JSON and its readers have neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def _write(path: Path, value: Row) -> None:
    """Write the whole file or nothing, even if the machine loses power."""
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w") as f:
        f.write(_json(value, indent=2) + "\n")
        f.flush()
        os.fsync(f.fileno())
    temporary.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def _read(path: Path) -> Iterator[Row]:
    if not path.exists():
        return
    with open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            if not line.endswith(b"\n"):
                return  # torn by a crash, or still being written
            try:
                yield json.loads(line)
            except ValueError as e:
                raise ValueError(f"{path}, line {number}, is damaged: {e}") from None
