"""Hangs: who stands still too long, and which of the ranks that wait for each other is the cause.

These are pure functions over what the node has read (progress records, process states, stacks), so a judgement can be
tested without hanging anything. The node does the reading and the asking.
"""

from __future__ import annotations

import linecache
import re
from itertools import islice, takewhile
from typing import NamedTuple

from phalanx.observe.progress import QUIET, Reading

SOLO_FACTOR = 3  # patience with a worker that stands still while others move
STOPPED = frozenset("Tt")  # states of a stopped process in /proc: by a signal, by a debugger
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_WAITS = re.compile(
    r"\.wait\(|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier|\bi?(recv|send)\(", re.IGNORECASE
)


def stuck(readings: dict[int, Reading], now_ns: int, since_ns: int, limit_ns: int) -> set[int]:
    """Return the workers that stand still too long: all that should move if none does, else those that are far too
    late. No age counts from before `since_ns`."""
    ages = {worker: now_ns - max(r.time_ns, since_ns) for worker, r in readings.items()}
    active = {worker for worker, r in readings.items() if r.phase not in QUIET}
    if active and min(ages.values()) > limit_ns:
        return active
    return {worker for worker in active if ages[worker] > SOLO_FACTOR * limit_ns}


class Evidence(NamedTuple):
    worker: int
    reading: Reading
    state: str  # of the process, as /proc has it: R, S, D, T...
    stack: str  # what it wrote when asked where it stands; "" when it did not answer

    @property
    def top(self) -> tuple[str, int, str] | None:
        frame = _FRAME.search(self.stack)
        return (frame["file"], int(frame["line"]), frame["function"]) if frame else None

    @property
    def waits(self) -> bool:
        """Return whether the worker waits for others: it is inside torch.distributed, in a wait(), or at a line that
        calls a collective. A wait in C++ has no Python frame of its own, hence the look at the source line."""
        frames = [m.groupdict() for m in _FRAME.finditer(self.stack)]
        inside = takewhile(lambda f: "/torch/" in f["file"] or f["function"] == "wait", frames)
        if any("torch/distributed" in f["file"] or f["function"] == "wait" for f in islice(inside, 3)):
            return True
        return bool(frames) and bool(_WAITS.search(linecache.getline(frames[0]["file"], int(frames[0]["line"]))))


def judge(evidence: list[Evidence]) -> tuple[list[int], str]:
    """Return the culprits among stuck workers, and the reason, to be read after "rank 3 ", for example."""
    stopped = [e for e in evidence if e.state in STOPPED]
    if stopped:
        return [e.worker for e in stopped], "is stopped, by SIGSTOP or by a debugger"
    silent = [e for e in evidence if not e.stack]
    if silent and len(silent) < len(evidence):
        state = "in an uninterruptible system call (state D)" if silent[0].state == "D" else "not answering signals"
        return [e.worker for e in silent], f"is {state}"
    busy = [e for e in evidence if not e.waits]
    if busy and len(busy) < len(evidence):
        return [e.worker for e in busy], f"stands still{_at(busy[0])}, while the others wait in a collective"
    behind = min((e.reading.step, e.reading.micro, e.reading.counter) for e in evidence)
    last = [e for e in evidence if (e.reading.step, e.reading.micro, e.reading.counter) == behind]
    if len(evidence) == 1:
        return [last[0].worker], f"stands still{_at(last[0])}"
    if len(last) == len(evidence):
        return [e.worker for e in last], f"and all others stand at the same point{_at(last[0])}; none is behind"
    return [e.worker for e in last], f"is furthest behind and stands still{_at(last[0])}"


def _at(e: Evidence) -> str:
    return f" in {e.top[2]} ({e.top[0]}:{e.top[1]})" if e.top else ""
