"""The node's watch over its workers. It reads their progress records, asks those that stand still for their stacks, and
reports who hangs. The rules for judging a hang are in `hang`.

A worker that waits for others may be waiting for one on another node, whose watch finds it. If it still stands there
much later, no watch does, and the hang is final.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from phalanx.observe.progress import Progress, Reading
from phalanx.runtime import hang, kernel
from phalanx.runtime.wire import Message

ANSWER_S = 0.5  # for writing a stack; as long again when somebody is silent


class Watched(Protocol):
    number: int
    pid: int
    progress: Progress
    log: int  # file descriptor


@dataclass
class Probe:
    """Stuck workers were asked for their stacks; the answers are due."""

    due_ns: int
    asked: dict[int, tuple[Reading, int]]  # worker -> its record and the size of its log when asked
    patient: bool = True


class Watch:
    def __init__(self) -> None:
        self.limit_ns = 0  # 0: do not watch
        self._since_ns = 0
        self._last_look_ns = 0
        self._probe: Probe | None = None
        self._told: dict[int, Reading] = {}  # hangs that were reported, once each
        self._waiting: tuple[int, dict[int, Reading], Message] | None = None  # due when, where they stood, the event

    def set(self, timeout_s: float) -> None:
        self.limit_ns, self._probe = int(timeout_s * 1e9), None
        self.forgive()

    def forgive(self) -> None:
        """Do not count the time until now: the workers were not to blame for it."""
        self._since_ns = self._last_look_ns = time.monotonic_ns()

    def tick_s(self) -> float | None:
        return max(0.02, min(0.25, self.limit_ns / 10e9)) if self.limit_ns else None

    def look(self, workers: Iterable[Watched]) -> Iterator[Message]:
        """Yield a hang event when there is one. To be called at least every tick."""
        if not self.limit_ns:
            return
        now = time.monotonic_ns()
        if now - self._last_look_ns < 10e6:
            return  # a busy node turns its loop far more often than progress is worth reading
        if now - self._last_look_ns > 2e9:
            self.forgive()  # this process was held up, so the workers may have been too
        self._last_look_ns = now
        present = {w.number: w for w in workers if w.pid}
        readings = {number: w.progress.read() for number, w in present.items()}
        yield from self._still(now, readings)
        if self._probe is None:
            found = hang.stuck(readings, now, self._since_ns, self.limit_ns)
            if found:  # they may wait for one that was stopped between two steps, where standing still means nothing
                found |= {number for number, w in present.items() if kernel.stat(w.pid)[0] in hang.STOPPED}
            if any(self._told.get(number) != readings[number] for number in found):
                self._ask(now, {number: present[number] for number in found}, readings)
        elif any(readings.get(number) != before for number, (before, _) in self._probe.asked.items()):
            self._probe = None  # somebody moved or ended meanwhile: no hang, or another one
        elif now >= self._probe.due_ns:
            yield from self._conclude(present, readings)

    def _ask(self, now: int, found: dict[int, Watched], readings: dict[int, Reading]) -> None:
        asked = {number: (readings[number], os.fstat(w.log).st_size) for number, w in found.items()}
        for w in found.values():
            with contextlib.suppress(ProcessLookupError):  # it ended; the zygote's report is on its way
                os.kill(w.pid, signal.SIGUSR1)
        self._probe = Probe(now + int(ANSWER_S * 1e9), asked)

    def _conclude(self, present: dict[int, Watched], readings: dict[int, Reading]) -> Iterator[Message]:
        assert self._probe
        evidence = []
        for number, (reading, size) in self._probe.asked.items():
            w = present[number]
            answer = os.pread(w.log, 1 << 20, size).decode(errors="replace")
            stack = answer[answer.find("most recent call first") :] if "most recent call first" in answer else ""
            evidence.append(hang.Evidence(number, reading, kernel.stat(w.pid)[0], stack))
        if self._probe.patient and any(not e.stack and e.state not in hang.STOPPED for e in evidence):
            self._probe.patient = False  # a loaded host, perhaps
            self._probe.due_ns += int(ANSWER_S * 1e9)
            return
        self._probe, self._told = None, {e.worker: readings[e.worker] for e in evidence}
        culprits, reason = hang.judge(evidence)
        waits = next(e.waits for e in evidence if e.worker == culprits[0])
        event = {
            "type": "hang",
            "worker": culprits[0],
            "workers": culprits,
            "reason": reason,
            "progress": readings[culprits[0]].to_dict(),
            "final": not waits,
        }
        if waits:
            patience_ns = (hang.SOLO_FACTOR - 1) * self.limit_ns
            self._waiting = time.monotonic_ns() + patience_ns, {n: readings[n] for n in culprits}, event
        yield event

    def _still(self, now: int, readings: dict[int, Reading]) -> Iterator[Message]:
        """Yield a final event for those that still wait for others, much later."""
        if self._waiting and now >= self._waiting[0]:
            _, stood, event = self._waiting
            self._waiting = None
            same = [number for number, reading in stood.items() if readings.get(number) == reading]
            if same:
                yield {**event, "worker": same[0], "workers": same, "final": True}
