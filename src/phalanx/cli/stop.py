"""Ctrl-C, SIGTERM and a closed terminal ask a run for an orderly stop."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Stop:
    """While it is entered the first signal asks, and more of them change nothing: the stop takes a
    moment, is bounded, and leaves a record; cutting it short would only lose the record."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        if self.asked:
            raise KeyboardInterrupt

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup, or a shell that runs this in the background
            try:
                self._before[number] = signal.signal(number, self._ask)
            except ValueError:  # not the main thread: the caller handles signals
                break
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
