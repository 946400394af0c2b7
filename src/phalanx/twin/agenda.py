"""Simulated time: a queue of calls by time, and by insertion order where times are equal. The twin runs on it, and so
does the adversary of the control plane in tests/control/sim."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

S = 10**9


class Agenda:
    def __init__(self) -> None:
        self.now = 0  # ns
        self.queue: list[tuple[int, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._order = count()

    def after(self, delay_ns: int, call: Callable[..., Any], *args: Any) -> None:
        heapq.heappush(self.queue, (self.now + delay_ns, next(self._order), call, args))

    def run(self, until: int = 10**15, stop: Callable[[], Any] | None = None) -> None:
        """Make the calls that are due, until a time, or until `stop()` is true."""
        while self.queue and self.queue[0][0] <= until:
            if stop and stop():
                return
            self.now, _, call, args = heapq.heappop(self.queue)
            call(*args)
