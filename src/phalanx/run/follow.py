"""Follow a run by its record, from any process that can read it: the run does not notice. What its listener was told is
in the record too, so that who comes later sees the same."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.core.job import Job
from phalanx.observe.record import RunRecord
from phalanx.run.console import Console
from phalanx.runtime import kernel

LOOK_S = 0.2
TOLD = "told"  # an event: what the listener was told in words
STARTER = "PHALANX_STARTER"  # in the environment: a descriptor to which it says which record it keeps
HEAD = "head.json"  # which process keeps the record


def write_head(folder: Path) -> None:
    (folder / HEAD).write_text(json.dumps({"pid": os.getpid(), "began": _began(os.getpid())}))


def tell_head(folder: Path) -> None:
    """To the process that started this one, if it waits to hear which record is kept."""
    fd = os.environ.pop(STARTER, "")
    if fd:
        os.write(int(fd), f"{folder}\n".encode())
        os.close(int(fd))


def head_of(folder: Path) -> int:
    """The process that keeps the record; 0: none of this machine."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        said = json.loads((folder / HEAD).read_bytes())
        if _began(said["pid"]) == said["began"]:
            return int(said["pid"])
    return 0


def _began(pid: int) -> str:
    """When it did, in ticks since the machine's start: with the pid, no other process has it."""
    if not kernel.stat(pid)[0]:
        return ""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


class Tail:
    """The lines that were added to a file since the last look."""

    def __init__(self, path: Path):
        self.path, self._at = path, 0

    def look(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                self._at += len(line)
                yield json.loads(line)


def follow(record: RunRecord) -> int:
    """Show the run until it is over; the exit code that its own process would have."""
    job, folder = Job.from_dict(record.job["job"]), record.path
    events, rows = Tail(folder / "events.jsonl"), Tail(folder / "metrics.jsonl")
    with Console(job) as console:
        console.starting(folder)
        while True:
            is_over = record.summary is not None or not head_of(folder)
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
        if summary is None:
            console.note("the process that kept its record has died: continue with --resume auto")
            return 1
        if summary["status"] == "done":
            console.finished(summary)
            return 0
        console.note(f"{summary['status']}: {summary['reason']}")
        return 130 if summary["status"] == "stopped" else 1
