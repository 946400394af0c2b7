"""Follow a run by its record, from any process that can read it, without affecting the run. The record holds all
messages to the listener, so that a late observer sees the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.job import Job
from phalanx.engines.table import ask_to_stop, state_of
from phalanx.observe.record import RunRecord, run_folders
from phalanx.observe.words import printable
from phalanx.run.console import Console
from phalanx.runtime import kernel

LOOK_S = 0.2
QUEUE_S, ENGINE_S = 2.0, 10.0  # polling interval of an engine: for a run that waits, and one that runs
TOLD = "told"  # an event with the text of a listener's note
STARTER = "PHALANX_STARTER"  # environment variable with the file descriptor by which a run reports to its starter
LAUNCHED = "launched"
HEAD, HEAD_LOG = "head.json", "head.log"  # the process that keeps the record; its output once nobody else listens
REFUSED = 2


class Starter:
    """The process, if any, that started this one and shows the record. It may die at any time."""

    def __init__(self) -> None:
        self._fd = int(os.environ.pop(STARTER, "-1"))

    def show(self, folder: Path) -> None:
        """Let the starter own the terminal from now on; this process only reports a refusal."""
        if self._fd >= 0:
            _point(1, Path(os.devnull))
            self._tell(str(folder))

    def let_go(self, folder: Path) -> None:
        """Detach from the terminal, because the ranks are about to start."""
        if self._fd >= 0:
            _point(2, folder / "logs" / HEAD_LOG)
            self._tell(LAUNCHED)
            os.close(self._fd)
            self._fd = -1

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self._fd, f"{line}\n".encode())


def _point(fd: int, path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, fd)
    os.close(file)


def write_head(folder: Path, reference: dict[str, str]) -> None:
    """Record which process keeps this record. `reference`: lets other hosts find the run on its engine; {}: they
    cannot."""
    said = {"pid": os.getpid(), "began": kernel.began(os.getpid()), "host": socket.gethostname(), "engine": reference}
    (folder / HEAD).write_text(json.dumps(said))


@dataclass(frozen=True, slots=True)
class Head:
    """The keeper of a record: a process of this machine (0: none), or a run on an engine."""

    pid: int = 0
    engine: dict[str, str] = field(default_factory=dict)

    @property
    def is_there(self) -> bool:
        return self.pid > 0 or bool(state_of(self.engine))

    def ask_to_stop(self, now: bool) -> None:
        if self.pid:
            for _ in range(2 if now else 1):
                os.kill(self.pid, signal.SIGTERM)
                time.sleep(0.1)
        else:
            ask_to_stop(self.engine, now)


def head_of(folder: Path) -> Head:
    with contextlib.suppress(OSError, ValueError, KeyError):
        said = json.loads((folder / HEAD).read_bytes())
        if said["host"] != socket.gethostname():
            return Head(engine=said["engine"])
        if kernel.began(said["pid"]) == said["began"]:
            return Head(said["pid"])
    return Head()


def record_of(run_dir: Path, job: str, reference: dict[str, str]) -> Path | None:
    """Return the newest record of a job that belongs to a run on an engine."""
    for folder in run_folders(run_dir, job):
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads((folder / HEAD).read_bytes())["engine"] == reference:
                return folder
    return None


class Tail:
    """Yields the lines added to a file since the last call."""

    def __init__(self, path: Path):
        self.path, self._at = path, 0

    def look(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # still being written
                self._at += len(line)
                yield json.loads(line)


def follow(record: RunRecord) -> int:
    """Show the run until it is over, and return the exit code of its own process."""
    job, folder = Job.from_dict(record.job["job"]), record.path
    events, rows = Tail(folder / "events.jsonl"), Tail(folder / "metrics.jsonl")
    ask_at, is_there = 0.0, True
    with Console(job) as console:
        console.starting(folder)
        while True:
            if time.monotonic() >= ask_at:
                head = head_of(folder)
                is_there, ask_at = head.is_there, time.monotonic() + (ENGINE_S if head.engine else LOOK_S)
            is_over = record.summary is not None or not is_there
            for event in events.look():
                if event["type"] == TOLD:
                    console.note(event["text"])
                elif event["type"] == "facts":
                    console.facts(event)
            for row in rows.look():
                console.step(row)
            if is_over:
                break
            time.sleep(LOOK_S)
        summary = record.summary
        if summary and summary["status"] == "done":
            console.finished(summary)
            return 0
    if not folder.exists():
        return REFUSED  # it has already reported why
    if summary is None:
        summary = {"status": "failed", "reason": f"the process that kept its record died; see {record.logs / HEAD_LOG}"}
    stopped = summary["status"] == "stopped"
    print(printable(f"{'' if stopped else 'error: '}{summary['reason']}"), file=sys.stderr)
    return 130 if stopped else 1


def follow_submitted(job: Job, reference: dict[str, str]) -> int:
    """Show a run from the queue to its end. If the engine restarts it, each start has a record, and all are shown."""
    shown, said, code = None, "", 1
    while True:
        folder = record_of(Path(job.run.dir), job.name, reference)
        if folder and folder != shown:
            shown, said, code = folder, "", follow(RunRecord.open(folder))
            continue
        state = state_of(reference)
        if not state:
            if shown is None:
                where = f"is {job.run.dir} a folder that this host shares with the nodes? The job's output says more"
                print(f"{reference['on']} job {reference['id']} is over and left no record: {where}", file=sys.stderr)
            return code
        if state != said:
            print(f"{reference['on']} job {reference['id']}: {state}", flush=True)
            said = state
        time.sleep(QUEUE_S)
