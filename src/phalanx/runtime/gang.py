"""Gang: workers that live and die together. When one fails, its peers fail of it milliseconds later; the gang
gathers these deaths, names the first cause, ends everybody and raises RunFailed."""

from __future__ import annotations

import os
import re
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import RunFailed
from phalanx.runtime.client import NodeClient
from phalanx.runtime.wire import Message

GATHER_S = 0.3  # for the deaths that belong to the first one seen
DOUBT_S = 2.0  # longer, while all that was seen is complaints about a peer: a large process dies slowly
TAIL_LINES = 15

ECHO = re.compile(
    r"connection (closed|reset|refused)|broken pipe|gloo|nccl|timed out|timeout|DistBackendError|DistNetworkError",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"can't allocate memory|out of memory|not enough memory|cannot allocate memory", re.IGNORECASE)
MEMORY_REMEDY = 'lower train.micro_batch, set train.recompute = "full", or raise layout.shard or layout.tp'
HANG_REMEDY = "see where it stands in the stack above; if the step is only slow, set a larger run.hang_timeout_s"


@dataclass
class Failure:
    """All that is known of one worker's end."""

    worker: int
    kind: str = ""  # of the exception, with its text
    text: str = ""
    code: int | None = None
    signal: str | None = None
    hang: str = ""
    log_tail: str = ""
    progress: dict[str, Any] | None = None

    @property
    def is_echo(self) -> bool:
        """It may well be the consequence of a peer's end."""
        return self.signal == "SIGABRT" or bool(self.kind and ECHO.search(f"{self.kind}: {self.text}"))

    @property
    def out_of_memory(self) -> bool:
        return self.kind in ("OutOfMemoryError", "MemoryError") or bool(_MEMORY.search(self.text))

    def severity(self) -> int:
        """Lower is nearer to the first cause."""
        if self.out_of_memory:
            return 1
        return 2 if self.is_echo else 0 if self.signal or self.hang else 1

    def sentence(self, name: str) -> str:
        where, p = "", self.progress
        if p:
            where = " while starting" if p["phase"] == "starting" else f" in {p['phase']} of step {p['step']}"
        if self.hang:
            return f"{name} hangs{where}: it {self.hang}"
        if self.kind:
            return f"{name} failed{where} with {self.kind}: {self.text.strip()[:1000]}"
        if self.text:
            return f"{name} failed{where}: {self.text}"
        if self.signal == "SIGKILL":
            return f"{name} was killed by SIGKILL{where}; if nobody did that, the kernel's out-of-memory killer did"
        if self.signal:
            return f"{name} was killed by {self.signal}{where}"
        if self.code == 0:
            return f"{name} ended{where} before it was done"
        return f"{name} exited with code {self.code}{where}"

    def remedy(self) -> str:
        if self.out_of_memory:
            return MEMORY_REMEDY
        if self.signal == "SIGKILL":
            return f"if memory ran out, as the kernel's log would say: {MEMORY_REMEDY}"
        if self.hang.startswith("is stopped"):
            return "find out what stopped it; SIGCONT would let it go on"
        return HANG_REMEDY if self.hang else ""


class Gang:
    """Workers of one client. A worker does its duty by sending {"type": "done"} and exiting with code 0."""

    def __init__(self, client: NodeClient):
        self.client = client
        self.done: set[int] = set()  # sent "done"
        self.ended: set[int] = set()  # and exited well
        self._names: dict[int, str] = {}
        self._logs: dict[int, Path] = {}
        self._failures: dict[int, Failure] = {}  # in the order in which they were seen
        self._lost = ""
        self._queue: deque[Message] = deque()
        self.spared: set[int] = set()  # who is not ended with the others

    def spawn(self, worker: int, name: str, entry: str, args: dict[str, Any], log: Path) -> None:
        self._names[worker], self._logs[worker] = name, log
        self.client.spawn(worker, entry, args, log)

    def next(self, timeout: float) -> Message | None:
        """The next event, None after `timeout`; RunFailed once all events up to a failure were handed out."""
        if not self._queue and not self._failed:
            self._take(timeout)
            if self._failed:
                self._gather()
        if self._queue:
            return self._queue.popleft()
        if self._failed:
            raise self._verdict()
        return None

    @property
    def _failed(self) -> bool:
        return bool(self._lost or self._failures)

    def _take(self, timeout: float) -> None:
        event = self.client.events(timeout)
        if event is None:
            return
        kind, worker = event["type"], event.get("worker", -1)
        if kind == "node_lost":
            self._lost = event["reason"]
            return
        self._queue.append(event)
        if kind == "message":
            body = event["body"]
            if body.get("type") == "done":
                self.done.add(worker)
            elif body.get("type") == "error":
                failure = self._failure(worker)
                failure.kind, failure.text = str(body.get("kind")), str(body.get("text"))
        elif kind == "hang":
            failure = self._failure(worker)
            failure.hang, failure.log_tail, failure.progress = event["reason"], event["log_tail"], event["progress"]
        elif kind == "exit":
            if event["code"] == 0 and worker in self.done:
                self.ended.add(worker)
                return
            failure = self._failure(worker)
            failure.code, failure.signal, failure.progress = event["code"], event["signal"], event["progress"]
            failure.text = failure.text or event["error"]

    def _failure(self, worker: int) -> Failure:
        return self._failures.setdefault(worker, Failure(worker))

    def _gather(self) -> None:
        start = time.monotonic()
        while not self._lost:
            in_doubt = all(f.is_echo for f in self._failures.values()) and len(self._failures) < len(self._names)
            left = start + (DOUBT_S if in_doubt else GATHER_S) - time.monotonic()
            if left <= 0:
                break
            self._take(min(left, 0.05))
        for worker in set(self.client.running) - self.spared:
            self.client.kill(worker)

    def _verdict(self) -> RunFailed:
        if self._lost:
            return RunFailed(f"the processes of this node were lost: {self._lost}")
        first = min(self._failures.values(), key=Failure.severity)  # the earliest among equals
        log = self._logs[first.worker]
        tail = first.log_tail or tail_of(log)
        reason = first.sentence(self._names[first.worker])
        if first.worker < 0:  # not a rank
            return RunFailed(f"{reason}\n{tail}".strip(), remedy=first.remedy())
        return RunFailed(reason, rank=first.worker, log_tail=tail, remedy=first.remedy())


def tail_of(log: Path, lines: int = TAIL_LINES) -> str:
    try:
        with open(log, "rb") as f:
            f.seek(max(0, os.fstat(f.fileno()).st_size - (1 << 16)))
            return "\n".join(f.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
