"""Read files that other versions of this program may have written. A document has a major version and named keys. Keys
that this version does not know are ignored; a document of a newer major version is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from phalanx.core.errors import UserError

T = TypeVar("T")


def check_version(body: Mapping[str, Any], newest: int, what: str, key: str = "format") -> int:
    """Return the document's major version. Raise ValueError if it has none, UserError if it is newer than `newest`."""
    version = body.get(key)
    if type(version) is not int or version < 1:
        raise ValueError(f"{what} has no version: {key} = {version!r}")
    if version > newest:
        remedy = "use the version of Phalanx that wrote it, or a newer one"
        raise UserError(
            f"{what} is newer than this program, which reads {newest}", field=key, value=version, remedy=remedy
        )
    return version


def make(kind: type[T], body: Mapping[str, Any]) -> T:
    """Make a dataclass from the keys that it knows. Raise TypeError if one that it needs is missing."""
    known = {field.name for field in dataclasses.fields(kind) if field.init}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in body.items() if key in known})
