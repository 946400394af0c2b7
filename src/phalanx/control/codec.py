"""Encode dataclasses as JSON and decode them by their annotations. The encoding is canonical, so equal values are equal
bytes on every machine. Decoding is strict, so bad input from outside is refused with the field and the value. Sets
travel as sorted lists.

A decoder is built once for each type, and an error message is composed only when something is wrong. In bytes, a
dictionary is a table: its keys, then a column for each field, in which a run of equal values is stored once. A state
has 100,000 workers, and most are alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import chain, groupby, repeat
from operator import attrgetter, itemgetter
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
Decoder = Callable[[Any], Any]
PLAIN = frozenset((int, str, bool))


class _Refused(ValueError):
    """A refusal. Its text follows the name of the value."""


def to_bytes(value: Any) -> bytes:
    return json.dumps(encode(value, table=True), sort_keys=True, separators=(",", ":")).encode()


def from_bytes(kind: type[T], data: bytes) -> T:
    return decode(kind, json.loads(data), kind.__name__, table=True)


def encode(value: Any, table: bool = False) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in (tuple, list):
        return list(value) if PLAIN.issuperset(map(type, value)) else [encode(item, table) for item in value]
    if kind is dict:
        if table:
            return _table(value)
        if PLAIN.issuperset(map(type, value.values())):
            return dict(value)
        return {key: encode(item) for key, item in value.items()}
    if kind is set:
        return sorted(value)
    return None if value is None else {name: encode(getattr(value, name), table) for name in hints(kind)}


def _table(value: dict[Any, Any]) -> list[Any]:
    keys = sorted(value)
    rows = [value[key] for key in keys]
    if rows and is_dataclass(rows[0]):
        return [keys, *(_column([*map(attrgetter(name), rows)]) for name in hints(type(rows[0])))]
    return [keys, _column(rows)]


def _column(values: list[Any]) -> list[list[Any]]:
    """Encode values as a list, or as runs with their lengths if that is shorter. Mutable values are never run-length
    encoded: decoding would turn them into one shared object."""
    if len(values) > 1 and values[0] == values[1] and all(map(_fixed, set(map(type, values)))):
        runs = [(value, len([*same])) for value, same in groupby(values)]
        if 2 * len(runs) < len(values):
            return [[encode(value, True) for value, _ in runs], [count for _, count in runs]]
    return [encode(values, True)]


def _fixed(kind: type) -> bool:
    made = getattr(kind, "__dataclass_params__", None)
    return kind in PLAIN or kind is type(None) or bool(made and made.frozen)


def decode(kind: Any, value: Any, where: str, table: bool = False) -> Any:
    """Decode a value of a kind. Raise ValueError if it does not fit."""
    try:
        return _decoder(kind, table)(value)
    except _Refused as error:
        raise ValueError(f"{where}{error}") from None


@cache
def _decoder(kind: Any, table: bool) -> Decoder:
    if kind in PLAIN:
        return _plain(kind)
    if is_dataclass(kind):
        return _object(kind, table)
    origin, args = get_origin(kind), get_args(kind)
    if type(None) in args:
        some = _decoder(args[0], table)
        return lambda value: None if value is None else some(value)
    if origin is dict:
        return _rows(*args) if table else _dict(*args)
    if origin is tuple and args[-1] is not Ellipsis:
        return _row(args, table)
    return _many(origin, args[0], table)


def _wrong(value: Any, expected: str) -> _Refused:
    return _Refused(f" = {str(value)[:200]!r}: expected {expected}")


def _plain(kind: type) -> Decoder:
    def take(value: Any) -> Any:
        if type(value) is not kind:
            raise _wrong(value, kind.__name__)
        return value

    return take


def _many(origin: Any, of: Any, table: bool) -> Decoder:
    """Return a decoder for a list, tuple or set of any length."""
    item, only = _decoder(of, table), {of}

    def take(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _wrong(value, origin.__name__)
        if of in PLAIN and only.issuperset(map(type, value)):
            return origin(value)
        return origin(map(item, value))

    return take


def _row(of: tuple[Any, ...], table: bool) -> Decoder:
    items = tuple(_decoder(one, table) for one in of)

    def take(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _wrong(value, "tuple")
        if len(value) != len(items):
            raise _wrong(value, f"{len(items)} of them")
        return tuple(item(v) for item, v in zip(items, value, strict=True))

    return take


def _dict(of_key: type, of: Any) -> Decoder:
    item, only = _decoder(of, False), {of}

    def take(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong(value, "dict")
        keys = value if of_key is str else map(_number, value)
        if of in PLAIN and only.issuperset(map(type, value.values())):
            return dict(zip(keys, value.values(), strict=True))
        found = {}
        for key, (name, v) in zip(keys, value.items(), strict=True):
            try:
                found[key] = item(v)
            except _Refused as error:
                raise _Refused(f".{name}{error}") from None
        return found

    return take


def _rows(of_key: Any, of: Any) -> Decoder:
    """Return a decoder for a dictionary that is encoded as a table."""
    one, counts = is_dataclass(of), _many(list, int, True)
    key, kinds = _many(list, of_key, True), hints(of).values() if one else (of,)
    columns = [_many(list, kind, True) for kind in kinds]

    def take(value: Any) -> Any:
        if not isinstance(value, list) or not value or len(value) != 1 + (len(columns) if value[0] else 1):
            raise _wrong(value, "a table")
        keys, found = key(value[0]), []
        for column, said in zip(columns, value[1:], strict=False):
            if not isinstance(said, list) or len(said) not in (1, 2):
                raise _wrong(said, "a column")
            values = column(said[0])
            found.append([*chain.from_iterable(map(repeat, values, counts(said[1])))] if said[1:] else values)
        if any(len(column) != len(keys) for column in found):
            raise _wrong(value, f"columns of {len(keys)}")
        return dict(zip(keys, map(of, *found) if one and keys else found[0], strict=True))

    return take


def _number(key: str | int) -> int:
    """Return a key as a number: JSON turns keys into text, but a value that has not travelled still has the number."""
    if isinstance(key, int):
        return key
    if not key.isascii() or not key.removeprefix("-").isdigit():
        raise _Refused(f": the key {key[:200]!r} is no number")
    return int(key)


def _object(kind: Any, table: bool) -> Decoder:
    known = hints(kind)
    names = known.keys()
    items = [(name, _decoder(hint, table)) for name, hint in known.items()]
    plain = [hint if hint in PLAIN else None for hint in known.values()]
    others = [(at, decoder) for at, (_, decoder) in enumerate(items) if plain[at] is None]
    values = itemgetter(*known) if len(known) > 1 else lambda value: tuple(value.values())

    def take(value: Any) -> Any:
        if not isinstance(value, dict) or value.keys() != names:
            raise _wrong(value, f"the fields {', '.join(names)}")
        row = [*values(value)]
        for at, v in enumerate(row):
            wanted = plain[at]
            if wanted is not None and type(v) is not wanted:
                raise _Refused(f".{items[at][0]}{_wrong(v, wanted.__name__)}")
        for at, decoder in others:
            try:
                row[at] = decoder(row[at])
            except _Refused as error:
                raise _Refused(f".{items[at][0]}{error}") from None
        return kind(*row)

    return take


def hints(kind: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are not derived from others, with their types."""
    return _hints(kind)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    known = get_type_hints(kind)
    return {f.name: known[f.name] for f in fields(kind) if f.init}


def describe(*kinds: Any) -> str:
    """Describe the form of dataclasses and of all types in them. If one release writes what another cannot read, their
    descriptions differ."""
    found: dict[str, str] = {}
    left = list(kinds)
    while left:
        kind = left.pop()
        left += get_args(kind)
        if isinstance(kind, type) and is_dataclass(kind) and kind.__name__ not in found:
            left += hints(kind).values()
            found[kind.__name__] = ", ".join(f"{f.name}: {f.type}" for f in fields(kind) if f.init)
    return "\n".join(f"{name}({about})" for name, about in sorted(found.items()))
