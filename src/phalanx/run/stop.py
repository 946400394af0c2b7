"""Ctrl-C, SIGTERM and a closed terminal ask a run for an orderly stop."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stop:
    """While it is entered the first signal asks, and more of them only end a grace period: the stop takes a
    moment, is bounded, and leaves a record; cutting it short would only lose the record."""

    def __init__(self) -> None:
        self.asked = False
        self.gently = False  # by SIGTERM, as a scheduler does that wants its machines back, and not twice
        self._raises = False
        self._before: dict[int, Any] = {}

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """For a time in which nothing runs that wants an orderly end: a signal raises KeyboardInterrupt."""
        self._raises = True
        try:
            if self.asked:
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
                break
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, True
        self.gently = first and number == signal.SIGTERM
        if first and self._raises:
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
