"""Where the groups of a run find each other: keys and values, without a port of their own. There is a hub on each node,
in each aggregator and in the controller. A hub tells the next one up what was set below it, answers what it knows, and
asks the next one up for the rest, each key once, however many below it wait. Nothing here does I/O.

A scope is what meets, a replica or the gang, and the number of that meeting, which only grows: a later one ends all
before it. A key is set once in its scope; counters live in the topmost hub alone.

After a connection to the next hub was lost, `resync` says everything again. So a hub may die and come back empty at any
time, and those who wait at others go on waiting for the key, not for the hub.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Hashable
from typing import Any

from phalanx.core.errors import WireError

Item = list[Any]
#: From below and from above: the fields after the kind, and their types. A value is base64; of a call, JSON.
ITEMS: dict[str, tuple[type | tuple[type, ...], ...]] = {
    "set": (str, int, str, str),  # what meets, its number, key, value
    "want": (str, int, str),
    "call": (int, str, int, str, list),  # a number of the caller, what meets, its number, operation, arguments
}
ANSWERS: dict[str, tuple[type | tuple[type, ...], ...]] = {
    "have": (str, int, str, str),
    "over": (str, int, str),  # the key that was wanted: a later meeting has begun
    "result": (int, (int, str, bool, type(None))),  # None: it cannot be had
}


class Hub:
    """`send(who, item)` tells one below, `up(item)` the next hub; None: this is the topmost."""

    def __init__(self, send: Callable[[Any, Item], object], up: Callable[[Item], object] | None = None):
        self._send, self._up = send, up
        self._numbers: dict[str, int] = {}  # the last meeting of each
        self._values: dict[str, dict[str, str]] = {}  # of that
        self._waiting: dict[str, dict[str, set[Hashable]]] = {}  # of that, by key
        self._calls: dict[int, tuple[Any, int]] = {}  # on their way up: whose, and its number
        self._count = 0

    # -- from below

    def take(self, who: Hashable, item: Any) -> None:
        """WireError."""
        kind, *fields = check(item, ITEMS)
        if kind == "call":
            self._call(who, *fields)
        elif not self._enter(fields[0], fields[1]):
            if kind == "want":
                self._send(who, ["over", *fields])
        elif kind == "set":
            self._set(*fields)
        else:
            self._want(who, *fields)

    def lose(self, who: Hashable) -> None:
        """It waits for nothing any more."""
        for waiting in self._waiting.values():
            for key in [key for key, waiters in waiting.items() if who in waiters]:
                waiting[key].discard(who)
                if not waiting[key]:
                    del waiting[key]
        self._calls = {number: call for number, call in self._calls.items() if call[0] != who}

    def _enter(self, what: str, number: int) -> bool:
        """Whether that meeting is the last one known; if it is a new one, the one before is over."""
        last = self._numbers.get(what, -1)
        if number > last:
            for key, waiters in self._waiting.pop(what, {}).items():
                for who in waiters:
                    self._send(who, ["over", what, last, key])
            self._numbers[what], self._values[what], self._waiting[what] = number, {}, {}
        return number >= last

    def _set(self, what: str, number: int, key: str, value: str) -> None:
        self._keep(what, number, key, value)
        if self._up:
            self._up(["set", what, number, key, value])

    def _keep(self, what: str, number: int, key: str, value: str) -> None:
        self._values[what][key] = value
        for who in self._waiting[what].pop(key, ()):
            self._send(who, ["have", what, number, key, value])

    def _want(self, who: Hashable, what: str, number: int, key: str) -> None:
        value = self._values[what].get(key)
        if value is not None:
            self._send(who, ["have", what, number, key, value])
            return
        waiters = self._waiting[what].setdefault(key, set())
        if not waiters and self._up:
            self._up(["want", what, number, key])
        waiters.add(who)

    def _call(self, who: Hashable, theirs: int, what: str, number: int, op: str, args: list[Any]) -> None:
        if self._up:
            self._count += 1
            self._calls[self._count] = (who, theirs)
            self._up(["call", self._count, what, number, op, args])
        else:
            done = self._do(what, number, op, args) if self._enter(what, number) else None
            self._send(who, ["result", theirs, done])

    def _do(self, what: str, number: int, op: str, args: list[Any]) -> int | str | bool:
        """In the topmost hub."""
        values = self._values[what]
        if op == "check":
            return all(key in values for key in args)
        if op == "count":
            return len(values)
        if op == "delete":
            return values.pop(args[0], None) is not None
        if op == "add":
            total = int(base64.b64decode(values.get(args[0], ""))) if args[0] in values else 0
            total += int(args[1])
            self._keep(what, number, args[0], base64.b64encode(str(total).encode()).decode())
            return total
        if op == "compare_set":
            key, expected, wanted = args
            there = values.get(key)
            if there == expected or (there is None and not expected):
                self._keep(what, number, key, wanted)
            return values.get(key, expected)
        raise WireError(f"there is no operation {op!r}")

    # -- from above

    def hear(self, item: Any) -> None:
        """WireError."""
        kind, *fields = check(item, ANSWERS)
        if kind == "result":
            number, value = fields
            if call := self._calls.pop(number, None):
                self._send(call[0], ["result", call[1], value])
        elif self._numbers.get(fields[0]) == fields[1]:
            if kind == "have":
                self._keep(*fields)
            else:
                for who in self._waiting[fields[0]].pop(fields[2], ()):
                    self._send(who, item)

    def resync(self) -> None:
        """There is a next hub again, and it may know nothing."""
        assert self._up
        calls, self._calls = self._calls, {}
        for who, number in calls.values():
            self._send(who, ["result", number, None])
        for what, number in self._numbers.items():
            for key, value in self._values[what].items():
                self._up(["set", what, number, key, value])
            for key in self._waiting[what]:
                self._up(["want", what, number, key])


def check(item: Any, kinds: dict[str, tuple[type | tuple[type, ...], ...]]) -> Item:
    fields = kinds.get(item[0]) if isinstance(item, list) and item and isinstance(item[0], str) else None
    if fields is None or len(item) != len(fields) + 1 or not all(map(isinstance, item[1:], fields)):
        raise WireError(f"store item {str(item)[:200]!r}: expected one of {', '.join(kinds)}")
    return item
