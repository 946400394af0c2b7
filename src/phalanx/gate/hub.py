"""The key-value store through which the groups of a run find each other, without a port of its own. There is a hub on
each node, in each aggregator and in the controller. Nothing here does I/O.

A scope names what meets (a replica or the gang) and the number of the meeting. Numbers only grow, and a later meeting
ends all earlier ones. Inside a scope each group has a room, named by the part of its keys before the last slash. When a
rank uses a room, the hub of its node joins that room at the next hub up, and then receives every key that is set there.
So a key from another node has usually arrived before a rank asks for it, and a group's keys go only to the nodes of
that group.

A key is set once per scope; a different value for it is ignored. Counters live in the topmost hub and are read by
adding 0.

After a hub has lost the connection to the next one, `resync` repeats everything. So a hub may die and come back empty
at any time: ranks at other hubs wait for the key, not for the hub.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.errors import MOST_INT, WireError

Item = list[Any]
Kinds = dict[str, tuple[type | tuple[type, ...], ...]]
#: Items from below: the types of the fields after the kind. The first two are the scope. Values are base64.
ITEMS: Kinds = {
    "join": (str, int, str),  # a room
    "set": (str, int, str, str),  # key, value
    "want": (str, int, str),  # key
    "call": (str, int, int, str, list),  # the caller's number, operation, arguments
}
#: The operations of a call and the types of their arguments; `check` is one too, and takes any number of keys.
CALLS: dict[str, tuple[type, ...]] = {
    "count": (),
    "delete": (str,),
    "add": (str, int),
    "compare_set": (str, str, str),
}
#: Items from above.
ANSWERS: Kinds = {
    "have": (str, int, str, str),  # key, value
    "over": (str, int),  # a later meeting has begun
    "result": (str, int, int, (int, str, bool, type(None))),  # the caller's number, the result; None: the call failed
}


@dataclass(slots=True)
class Gathering:
    number: int
    rooms: dict[str, dict[str, str]] = field(default_factory=dict)  # room -> its keys and values
    members: dict[str, set[Hashable]] = field(default_factory=dict)  # room -> hubs below that joined it
    waiting: dict[str, set[Hashable]] = field(default_factory=dict)  # key -> ranks that wait for it
    people: set[Hashable] = field(default_factory=set)  # everyone to notify when it ends
    is_over: bool = False


class Hub:
    """`send(who, item)` sends an item to a rank or hub below, `up(item)` to the next hub; without `up` this is the
    topmost. `newest(what)` returns the number of the last meeting that anyone was sent to, or None if it is not known
    here."""

    def __init__(
        self,
        send: Callable[[Any, Item], object],
        up: Callable[[Item], object] | None = None,
        newest: Callable[[str], int | None] = lambda what: None,
    ):
        self._send, self._up, self._newest = send, up, newest
        self._scopes: dict[str, Gathering] = {}  # the latest meeting of each
        self._calls: dict[int, tuple[Any, int]] = {}  # calls on their way up: the caller, and its number
        self._count = 0

    def room(self, what: str, key: str) -> dict[str, str]:
        """Return all known keys and values of a key's room."""
        return self._scopes[what].rooms.get(room_of(key), {})

    # -- from below

    def take(self, who: Hashable, item: Any) -> None:
        """Handle an item from below. Raises WireError if it is malformed."""
        kind, what, number, *fields = check(item, ITEMS)
        if not 0 <= number < MOST_INT:
            raise WireError(f"store item of the meeting {str(number)[:30]}: expected 0 to {MOST_INT}")
        if kind == "call":
            check_call(*fields[1:])  # checked here, so that only its sender's connection ends
        scope = self._enter(what, number)
        if scope is None:
            self._send(who, ["result", what, number, fields[0], None] if kind == "call" else ["over", what, number])
        elif kind == "call":
            self._call(who, scope, what, *fields)
        else:
            scope.people.add(who)
            TAKE[kind](self, who, scope, what, *fields)

    def lose(self, who: Hashable) -> None:
        """Forget a rank or hub that is gone."""
        for scope in self._scopes.values():
            scope.people.discard(who)
            for table in (scope.members, scope.waiting):
                for key in [key for key, found in table.items() if who in found]:
                    table[key].discard(who)
                    if not table[key]:
                        del table[key]
        self._calls = {number: call for number, call in self._calls.items() if call[0] != who}

    def _enter(self, what: str, number: int) -> Gathering | None:
        """Return the meeting, or None if it is over or nobody was sent to it. A new meeting ends the one before."""
        last = self._scopes.get(what)
        if last is None or number > last.number:
            newest = self._newest(what)
            if newest is not None and number > newest:
                return None
            if last:
                self._end(what, last)
            self._scopes[what] = last = Gathering(number)
        return last if last.number == number and not last.is_over else None

    def _end(self, what: str, scope: Gathering) -> None:
        for who in scope.people:
            self._send(who, ["over", what, scope.number])
        scope.people, scope.waiting, scope.is_over = set(), {}, True

    def _open(self, scope: Gathering, what: str, room: str) -> dict[str, str]:
        if room not in scope.rooms:
            scope.rooms[room] = {}
            if self._up:
                self._up(["join", what, scope.number, room])
        return scope.rooms[room]

    def _join(self, who: Hashable, scope: Gathering, what: str, room: str) -> None:
        for key, value in self._open(scope, what, room).items():
            self._send(who, ["have", what, scope.number, key, value])
        scope.members.setdefault(room, set()).add(who)

    def _set(self, who: Hashable, scope: Gathering, what: str, key: str, value: str) -> None:
        room = room_of(key)
        known = self._open(scope, what, room).get(key)
        if known not in (None, value):
            if who in scope.members.get(room, ()):  # a hub below, which has to agree with the others
                self._send(who, ["have", what, scope.number, key, known])
            return
        self._keep(scope, what, key, value, who)
        if self._up:
            self._up(["set", what, scope.number, key, value])

    def _keep(self, scope: Gathering, what: str, key: str, value: str, who: Hashable = None) -> None:
        """Store a value and send it to all who need it, except to `who`, who sent it."""
        room = room_of(key)
        self._open(scope, what, room)[key] = value
        for one in (scope.members.get(room, set()) - {who}) | scope.waiting.pop(key, set()):
            self._send(one, ["have", what, scope.number, key, value])

    def _want(self, who: Hashable, scope: Gathering, what: str, key: str) -> None:
        value = self._open(scope, what, room_of(key)).get(key)
        if value is None:
            scope.waiting.setdefault(key, set()).add(who)
        else:
            self._send(who, ["have", what, scope.number, key, value])

    def _call(self, who: Hashable, scope: Gathering, what: str, theirs: int, op: str, args: list[Any]) -> None:
        if self._up:
            self._count += 1
            self._calls[self._count] = (who, theirs)
            self._up(["call", what, scope.number, self._count, op, args])
        else:
            self._send(who, ["result", what, scope.number, theirs, self._do(scope, what, op, args)])

    def _do(self, scope: Gathering, what: str, op: str, args: list[Any]) -> int | str | bool | None:
        """Execute a call in the topmost hub. Return None if that fails."""
        if op == "count":
            return sum(map(len, scope.rooms.values()))
        if op == "check":
            return all(key in scope.rooms.get(room_of(key), {}) for key in args)
        values = self._open(scope, what, room_of(args[0]))
        there = values.get(args[0])
        if op == "delete":
            return values.pop(args[0], None) is not None
        if op == "add":
            try:
                total = args[1] + (int(base64.b64decode(there)) if there else 0)
            except ValueError:  # the value there is not a number
                return None
            if not -MOST_INT <= total < MOST_INT:
                return None
            self._keep(scope, what, args[0], base64.b64encode(str(total).encode()).decode())
            return total
        _, expected, wanted = args  # compare_set
        if there == expected or (there is None and not expected):
            self._keep(scope, what, args[0], wanted)
        return str(values.get(args[0], expected))

    # -- from above

    def hear(self, item: Any) -> None:
        """Handle an item from above. Raises WireError if it is malformed."""
        kind, what, number, *fields = check(item, ANSWERS)
        scope = self._scopes.get(what)
        if kind == "result":
            if call := self._calls.pop(fields[0], None):
                self._send(call[0], ["result", what, number, call[1], fields[1]])
        elif scope and scope.number == number and not scope.is_over:
            if kind == "have":
                self._keep(scope, what, *fields)
            else:
                self._end(what, scope)

    def resync(self) -> None:
        """Fail the calls under way, and repeat all else to the next hub, which is back and may know nothing."""
        assert self._up
        calls, self._calls = self._calls, {}
        for who, number in calls.values():
            self._send(who, ["result", "", 0, number, None])
        for what, scope in [(what, scope) for what, scope in self._scopes.items() if not scope.is_over]:
            for room, values in scope.rooms.items():
                self._up(["join", what, scope.number, room])
                for key, value in values.items():
                    self._up(["set", what, scope.number, key, value])


TAKE: dict[str, Callable[..., None]] = {"join": Hub._join, "set": Hub._set, "want": Hub._want}


def room_of(key: str) -> str:
    return key.rpartition("/")[0]


def check(item: Any, kinds: Kinds) -> Item:
    fields = kinds.get(item[0]) if isinstance(item, list) and item and isinstance(item[0], str) else None
    if fields is None or len(item) != len(fields) + 1 or not all(map(isinstance, item[1:], fields)):
        raise WireError(f"store item {str(item)[:200]!r}: expected one of {', '.join(kinds)}")
    return item


def check_call(op: str, args: list[Any]) -> None:
    types = (str,) * len(args) if op == "check" else CALLS.get(op)
    if types is None or len(args) != len(types) or not all(map(isinstance, args, types)):
        raise WireError(f"store call {op!r} of {str(args)[:200]}: expected one of check, {', '.join(CALLS)}")
    if not all(-MOST_INT <= arg < MOST_INT for arg in args if isinstance(arg, int)):
        raise WireError(f"store call {op!r} with a number over {MOST_INT}")
