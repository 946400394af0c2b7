"""One selector and one list of timers for everything that a process or thread waits for."""

from __future__ import annotations

import heapq
import math
import selectors
import time
from collections.abc import Callable
from typing import Any

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Loop:
    """Calls back when a source is ready or a timer is due. The callback of a source gets its events."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0

    def turn(self, timeout_s: float = math.inf) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heapq.heappop(self._timers)[2]()
        wait = min(timeout_s, self._timers[0][0] - now if self._timers else math.inf)
        known = self._selector.get_map()
        for key, mask in self._selector.select(None if wait == math.inf else max(0.0, wait)):
            found = known.get(key.fd)
            if found and found.fileobj is key.fileobj:  # otherwise a callback of this round has removed it
                key.data(mask)

    def after(self, seconds: float, callback: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._count, callback))

    def watch(self, source: Any, mask: int, callback: Callable[[int], object] | None = None) -> None:
        """Watch a source, or change its events and callback. Mask 0 stops watching it."""
        key = self._selector.get_map().get(source)
        if key is None:
            if mask:
                self._selector.register(source, mask, callback)
        elif mask:
            self._selector.modify(source, mask, callback)
        else:
            self._selector.unregister(source)
