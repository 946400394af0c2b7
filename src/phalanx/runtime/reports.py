"""The path of the run's record: from the agents, through the aggregators, to the process that keeps it.

An agent numbers its items and keeps each until it hears that it is recorded; over a new connection it sends the rest
again. On the way, equal items of many ranks are folded (`observe.fold`), so the process that keeps the record gets a
few messages per step, however many ranks there are. Repetitions are recorded once: events are recognised by their
numbers, folds by their ranks.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from phalanx.observe.fold import aged, folded, in_blocks
from phalanx.runtime import kernel
from phalanx.runtime.secret import Identity, Secret
from phalanx.runtime.transport import Link, Loop, Server, Session, in_parts
from phalanx.runtime.wire import Message, Schemas

GATHER_S = 0.005  # for which an agent gathers items
FOLD_S = 0.01  # for which an aggregator gathers events
STEPS_S = 0.1  # and steps, which nobody waits for: long enough for all nodes to report theirs
RELAY_S = 0.5  # for which a relay waits for the steps of its other aggregators
RETRY_S = 0.25
MOST_BYTES = 1 << 20  # in one message of an agent
AGGREGATORS = ("aggregator",)  # who may speak for the record

#: To the process that keeps the record, or to a relay before it.
SAID: Schemas = {"said": {"items": list}}


class Reporter:
    """An agent's end. `tell` returns whether a connection took the message. `life` is unique to this process."""

    def __init__(self, loop: Loop, life: str, tell: Callable[[Message], bool], on_empty: Callable[[], object]):
        self.size_bytes = 0
        self._loop, self._life, self._tell, self._on_empty = loop, life, tell, on_empty
        self._kept: deque[tuple[int, Message, int, float]] = deque()  # number, item, bytes, and when it was added
        self._last = self._sent = 0
        self._due = False

    @property
    def is_empty(self) -> bool:
        return not self._kept

    def say(self, item: Message) -> None:
        size = len(json.dumps(item)) if len(item) < 12 else 1024  # folds are of about this size
        if size > MOST_BYTES:
            kernel.complain(f"not recorded, because it has {size} bytes: {str(item)[:100]}")
            return
        self._last += 1
        if "ranks" not in item:
            item = {**item, "n": self._last, "life": self._life}
        self._kept.append((self._last, item, size, time.monotonic()))
        self.size_bytes += size
        self._later(GATHER_S)

    def opened(self) -> None:
        """Send everything again, over a new connection, that may not have been recorded."""
        self._sent = self._kept[0][0] - 1 if self._kept else self._last
        self._later(0.0)

    def recorded(self, upto: int) -> None:
        while self._kept and self._kept[0][0] <= upto:
            self.size_bytes -= self._kept.popleft()[2]
        if not self._kept:
            self._on_empty()

    def _later(self, seconds: float) -> None:
        if not self._due:
            self._due = True
            self._loop.after(seconds, self._flush)

    def _flush(self) -> None:
        """Send as much as a frame is sure to hold, and leave the rest for the next."""
        self._due = False
        now, upto, items, size_bytes = time.monotonic(), self._sent, list[Message](), 0
        for number, item, size, at in self._kept:
            if number <= self._sent:
                continue
            size_bytes += size
            if items and size_bytes > MOST_BYTES:
                break
            upto = number
            items.append(aged(item, now - at))
        if not items:
            return
        if self._tell({"type": "said", "upto": upto, "items": folded(items)}):
            self._sent = upto
            if upto < self._last:
                self._later(0.0)
        else:
            self._later(RETRY_S)


class Folder:
    """An aggregator's part. `upstream` is None until it is known. The record keeps one step time per `block` ranks;
    finer ones are not passed on."""

    def __init__(self, loop: Loop, steps_s: float = STEPS_S) -> None:
        self.upstream: Link | None = None
        self.block = 1
        self._loop, self._steps_s = loop, steps_s
        self._items: list[tuple[Message, float]] = []  # and when they arrived
        self._owed: dict[str, Callable[[], object]] = {}  # sender -> what to call when its items are recorded
        self._passed: deque[tuple[int, dict[str, Callable[[], object]]]] = deque()
        self._due_at = math.inf

    def take(self, name: str, items: list[Message], recorded: Callable[[], object]) -> None:
        """Take items of `name`. Call `recorded` once they and all its earlier ones are recorded."""
        now = time.monotonic()
        self._items += [(item, now) for item in items]
        self._owed[name] = recorded
        self._later(self._steps_s if all(item["type"] == "step" for item in items) else FOLD_S)

    @property
    def waiting(self) -> Collection[str]:
        """Return the senders whose items have not been passed on yet."""
        return self._owed.keys()

    def flush(self) -> None:
        self._due_at = time.monotonic()
        self._send()

    def acked(self, number: int) -> None:
        """Note that the upstream end has acknowledged everything up to `number`."""
        while self._passed and self._passed[0][0] <= number:
            for recorded in self._passed.popleft()[1].values():
                recorded()

    def _later(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        if at < self._due_at:
            self._due_at = at
            self._loop.after(seconds, self._send)

    def _send(self) -> None:
        if time.monotonic() < self._due_at:
            return None  # it was done earlier
        self._due_at = math.inf
        if self._items and self.upstream:
            now = time.monotonic()
            items = folded(aged(item, now - at) for item, at in self._items)
            blocks = [in_blocks(item, self.block) for item in items]
            try:
                in_parts(partial(_post_said, self.upstream), blocks)
            except OverflowError:  # the process that keeps the record has been away for long
                return self._later(RETRY_S)
            self._passed.append((self.upstream.outbox.last, self._owed))
            self._items, self._owed = [], {}
        elif self._items:
            self._later(RETRY_S)
        return None


def _post_said(link: Link, items: list[Message]) -> None:
    link.post({"type": "said", "items": items})


class Relay:
    """Stands between many aggregators and the process that keeps the record. It folds their items once more, so only a
    few ends speak to that process, however large the fleet is. Once all its aggregators have reported, it passes their
    items on at once; otherwise it waits for the others."""

    def __init__(self, loop: Loop, secret: Secret, me: Identity, upstream: tuple[str, int], host: str, port: int = 0):
        self.folder = Folder(loop, RELAY_S)
        self.server = Server(loop, secret, me, SAID, self._heard, host=host, port=port, roles=AGGREGATORS)
        says_nothing = lambda session, number, body: None  # noqa: E731
        self.folder.upstream = Link(loop, secret, me, [upstream], {}, says_nothing, on_ack=self.folder.acked)

    def _heard(self, session: Session, number: int, body: Message) -> None:
        self.folder.take(session.peer.name, body["items"], lambda: session.ack(number))
        if {name for name, each in self.server.sessions.items() if each.conn} <= {*self.folder.waiting}:
            self.folder.flush()


class Recorder:
    """The end of the path. It passes each item to `on_item` once, and acknowledges it when that returns. If a step is
    still in `unrecorded()`, it acknowledges it later, and the sender keeps it until then."""

    def __init__(
        self,
        loop: Loop,
        secret: Secret,
        host: str,
        port: int,
        on_item: Callable[[Message], Any],
        unrecorded: Callable[[], Collection[tuple[int, int]]] = tuple,
    ):
        self.messages = 0
        self._on_item, self._unrecorded = on_item, unrecorded
        self._numbers: dict[str, int] = {}  # life -> the last number that was recorded
        self._owed: deque[tuple[Session, int, set[tuple[int, int]]]] = deque()  # messages, and the steps in them
        me = Identity("recorder", "recorder", 1)
        self.server = Server(loop, secret, me, SAID, self._heard, host=host, port=port, roles=AGGREGATORS)

    def _heard(self, session: Session, number: int, body: Message) -> None:
        self.messages += 1
        for item in body["items"]:
            if "life" in item:
                life, n = str(item.pop("life")), int(item.pop("n"))
                if n <= self._numbers.get(life, 0):
                    continue
                self._numbers[life] = n
            self._on_item(item)
        steps = {(item["generation"], item["step"]) for item in body["items"] if item["type"] == "step"}
        self._owed.append((session, number, steps))
        unrecorded = self._unrecorded()
        while self._owed and self._owed[0][2].isdisjoint(unrecorded):
            session, number, _ = self._owed.popleft()
            session.ack(number)

    def close(self) -> None:
        self.server.close()
