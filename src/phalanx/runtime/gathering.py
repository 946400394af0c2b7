"""How long an aggregator gathers the reports of its nodes before it passes them on in one message.

A fleet reports in rounds: all nodes are up, then their ranks are built, and so on. The first report of a round waits
`FIRST_S`. A later one waits as long as the round has lasted, so gathering at most doubles the round, but no longer than
`limit_s`, the time that an aggregator needs for one round of all its nodes. A round costs a logarithmic number of
messages, and one more for each `limit_s` that it lasts; both grow with the nodes. A handful of nodes never waits longer
than `FIRST_S`.

A node's response to an answer belongs to the next round, so a chain of questions and answers does not slow down. The
n-th report of a node, since nobody reported for `limit_s`, belongs to the n-th round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from phalanx.gate.loop import Loop

FIRST_S = 0.002
NODE_S = 0.0004  # of CPU for a node's part in a round of a start: half of what first_step.py finds, as that has an
# aggregator and a controller in one process
MOST = 500  # items in a message
ROUNDS = 1000  # that are told apart: in training there may never be a silence
NODES = 100_000  # likewise

T = TypeVar("T")


def limit_s(nodes: int) -> float:
    """Return the longest time to gather the reports of this many nodes: 0.2 s for 500."""
    return max(FIRST_S, nodes * NODE_S)


class Rounds:
    """Decide how long each report waits. Times are seconds of any clock."""

    def __init__(self) -> None:
        self._words: dict[Hashable, int] = {}  # by node, since the last silence
        self._began: list[float] = []  # by round
        self._last = -math.inf

    def wait_s(self, node: Hashable, limit: float, now: float) -> float:
        if now - self._last > limit or len(self._began) > ROUNDS or len(self._words) > NODES:
            self._words, self._began = {}, []
        self._last = now
        number = self._words[node] = self._words.get(node, -1) + 1
        if number == len(self._began):
            self._began.append(now)
        return min(limit, max(FIRST_S, now - self._began[number]))


class Gatherer(Generic[T]):
    """Pass items to `send` in bundles. `limit_s()`: how long an item may wait."""

    def __init__(self, loop: Loop, limit_s: Callable[[], float], send: Callable[[list[T]], object]):
        self.items: list[T] = []
        self._loop, self._limit_s, self._send = loop, limit_s, send
        self._rounds = Rounds()
        self._due_at = math.inf

    def add(self, node: Hashable, item: T, urgent: bool = False) -> None:
        """Add an item. `urgent`: it and all before it wait no longer than `FIRST_S`."""
        self.items.append(item)
        now = time.monotonic()
        self._at_latest(now + (FIRST_S if urgent else self._rounds.wait_s(node, self._limit_s(), now)))
        if len(self.items) >= MOST:
            self.flush()

    def put_back(self, items: list[T], after_s: float) -> None:
        """Put back items that could not be sent: they are tried again, before those that came since."""
        self.items[:0] = items
        if self.items:
            self._at_latest(time.monotonic() + after_s)

    def flush(self) -> None:
        items, self.items, self._due_at = self.items, [], math.inf
        if items:
            self._send(items)

    def _at_latest(self, at: float) -> None:
        if at < self._due_at:
            self._due_at = at
            self._loop.after(at - time.monotonic(), self._wake)

    def _wake(self) -> None:
        if time.monotonic() >= self._due_at:  # else it was flushed, and what came since may wait
            self.flush()
