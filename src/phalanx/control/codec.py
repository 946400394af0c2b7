"""Dataclasses as JSON and back, by their annotations: canonical, so that equal values are equal bytes on every machine,
and strict, so that what comes from outside is refused with the field and the value. Sets travel as sorted lists."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_bytes(value: Any) -> bytes:
    return json.dumps(encode(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def from_bytes(kind: type[T], data: bytes) -> T:
    return decode(kind, json.loads(data), kind.__name__)


def encode(value: Any) -> Any:
    kind = type(value)
    if kind in (int, str, bool):
        return value
    if kind in (tuple, list):
        return [encode(item) for item in value]
    if kind is dict:
        return {key: encode(item) for key, item in value.items()}
    if kind is set:
        return sorted(value)
    return None if value is None else {name: encode(getattr(value, name)) for name in hints(kind)}


def decode(kind: Any, value: Any, where: str) -> Any:
    """ValueError: it is none of that kind."""
    if kind in (int, str, bool):
        if type(value) is not kind:
            raise ValueError(f"{where} = {str(value)[:200]!r}: expected {kind.__name__}")
        return value
    if is_dataclass(kind):
        return _object(kind, value, where)
    origin, args = get_origin(kind), get_args(kind)
    if type(None) in args:
        return None if value is None else decode(args[0], value, where)
    if origin is dict and isinstance(value, dict):
        return {_key(args[0], key, where): decode(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is dict or not isinstance(value, (list, tuple)):
        raise ValueError(f"{where} = {str(value)[:200]!r}: expected {origin.__name__}")
    if origin is tuple and args[-1] is not Ellipsis:
        if len(value) != len(args):
            raise ValueError(f"{where} = {str(value)[:200]!r}: expected {len(args)} of them")
        return tuple(decode(arg, item, where) for arg, item in zip(args, value, strict=True))
    return origin(decode(args[0], item, where) for item in value)


def _object(kind: Any, value: Any, where: str) -> Any:
    known = hints(kind)
    if not isinstance(value, dict) or value.keys() != known.keys():
        raise ValueError(f"{where} = {str(value)[:200]!r}: expected the fields {', '.join(known)}")
    return kind(**{name: decode(known[name], value[name], f"{where}.{name}") for name in known})


def _key(kind: type, key: str, where: str) -> Any:
    """JSON has text for a key."""
    if kind is str:
        return key
    if not key.isascii() or not key.removeprefix("-").isdigit():
        raise ValueError(f"{where}: the key {key[:200]!r} is no number")
    return int(key)


def hints(kind: Any) -> dict[str, Any]:
    """The fields of a dataclass and their types."""
    return _hints(kind)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    known = get_type_hints(kind)
    return {f.name: known[f.name] for f in fields(kind)}
