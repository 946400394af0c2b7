"""Ctrl-C, SIGTERM, a closed terminal and the end of a time limit ask a run for an orderly stop. So does SIGUSR1, by
which an engine warns that its time limit is near; the run may then be restarted."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stop:
    """A context in which the first signal asks the run to save and leave within its grace period; the second asks it to
    leave at once, though still in order. `limit_s`: the run stops by itself after this; 0: never. `left_s`: the engine
    wants it to leave after this."""

    def __init__(self, limit_s: float = 0.0, left_s: float = math.inf) -> None:
        self.at_limit = time.monotonic() + limit_s if limit_s else math.inf
        self.at_end = time.monotonic() + left_s
        self.hurried = False
        self.number = 0  # number of the first signal
        self._signalled = False
        self._warned = False
        self._raises = False
        self._before: dict[int, Any] = {}

    @property
    def asked(self) -> bool:
        return self._signalled or self._warned or time.monotonic() > min(self.at_limit, self.at_end)

    @property
    def is_time_up(self) -> bool:
        """Return True if only the engine asks for the stop, because its time is over."""
        over = self._warned or time.monotonic() > self.at_end
        return over and not self._signalled and time.monotonic() <= self.at_limit

    @property
    def why(self) -> str:
        if self.is_time_up:
            return "stopped before the engine's time limit"
        return "stopped" if self._signalled or not self.asked else "stopped by run.time_limit_s"

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Let a signal raise KeyboardInterrupt while nothing runs that needs an orderly end."""
        self._raises = True
        try:
            if self._signalled:
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup, or a shell that runs this in the background
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # not the main thread: the caller handles signals
                return self
        self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._warn)
        return self

    def _warn(self, number: int, frame: FrameType | None) -> None:
        self._warned = True

    def _ask(self, number: int, frame: FrameType | None) -> None:
        first, self._signalled = not self._signalled, True
        self.hurried, self.number = not first, self.number or number
        if first and self._raises:
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
