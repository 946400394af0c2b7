"""The part of `phalanx chaos` that runs inside the processes of the broken run: it holds the interpreter's lock, moves
the clock, or delays and duplicates control messages. Only such a run loads it, through a sitecustomize.py on its path.
An order arrives as a file and a signal."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "PHALANX_CHAOS"
SIGNAL = signal.SIGRTMIN + 5


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a run whose processes take orders."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text("from phalanx.chaos import door\n\ndoor.install()\n")
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(path)}


def order(folder: Path, pid: int, kind: str, **more: Any) -> None:
    near = folder / f".{pid}"
    near.write_text(json.dumps({"kind": kind, **more}))
    near.replace(folder / f"{pid}.json")
    os.kill(pid, SIGNAL)


def install() -> None:
    if FOLDER in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(SIGNAL, _obey)  # forked children have it too


def _obey(number: int, frame: Any) -> None:
    said = json.loads((Path(os.environ[FOLDER]) / f"{os.getpid()}.json").read_text())
    ORDERS[said.pop("kind")](**said)


def _hold_lock() -> None:
    """Hold the interpreter's lock forever in a call into C, as a bad extension would."""
    sleep = ctypes.PyDLL(None).sleep
    while True:
        sleep(1000)


def _move_clock(seconds: float) -> None:
    """Move the wall clock of this process. The real clock belongs to the machine, so only Python's view of it is
    changed."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds
    time.time_ns = lambda: now_ns() + round(seconds * 1e9)


def _garble(seconds: float) -> None:
    """Post every message twice until `seconds` have passed, and send nothing before then."""
    from phalanx.runtime.transport import Loop, Outbox, Session

    post, pump, turn = Outbox.post, Session.pump, Loop.turn
    until, held = time.monotonic() + seconds, set[Session]()

    def post_twice(self: Outbox, body: dict[str, Any]) -> int:
        if time.monotonic() < until:
            post(self, body)
        return post(self, body)

    def pump_late(self: Session) -> None:
        pump(self) if time.monotonic() >= until else held.add(self)

    def turn_and_pump(self: Loop, *args: float) -> None:
        while held and time.monotonic() >= until:
            held.pop().pump()
        turn(self, *args)

    Outbox.post, Session.pump, Loop.turn = post_twice, pump_late, turn_and_pump  # type: ignore
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, seconds + 0.01)  # this wakes the loop


ORDERS: dict[str, Callable[..., None]] = {"lock": _hold_lock, "clock": _move_clock, "messages": _garble}
