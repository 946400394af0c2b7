"""Turn a failed validation into one UserError: every wrong field with its value, where it was given, and what to write
instead."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from phalanx.core.errors import UserError
from phalanx.spec.describe import fields, sections
from phalanx.spec.fields import StageSection, did_you_mean


def user_error(error: ValidationError, origin: Callable[[tuple[str, ...]], str]) -> UserError:
    """Report all wrong fields at once; `origin` returns where a field was given."""
    wrong = [_one(details, origin) for details in error.errors(include_url=False)]
    if len(wrong) == 1:
        return wrong[0]
    return UserError(f"{len(wrong)} fields are wrong:\n" + textwrap.indent("\n".join(map(str, wrong)), "  "))


def _one(details: Any, origin: Callable[[tuple[str, ...]], str]) -> UserError:
    # Inside the free table pydantic's location continues with the types it tried.
    path = tuple(str(part) for part in details["loc"])[: 3 if details["loc"][:2] == ("model", "options") else 2]
    name, value, context = ".".join(path), details["input"], details.get("ctx", {})
    known = fields().get(".".join(path[:2]))
    inside = path[:2] == ("data", "stages") and len(details["loc"]) > 2
    if inside:
        name = ".".join(map(str, details["loc"]))
    if details["type"] == "extra_forbidden" and inside:
        message, remedy = "there is no such field", f"the fields of a stage are {', '.join(StageSection.model_fields)}"
    elif details["type"] == "extra_forbidden":
        message, remedy = _unknown(name, value)
    elif "remedy" in context:
        message, remedy = context["message"], context["remedy"]
    elif known is None:
        message, remedy = (
            f"[{name}] is a section, not a field",
            f"write [{name}] on a line of its own and its fields below, or --set {name}.FIELD=VALUE",
        )
    else:
        message = details["msg"].replace("Input should", "must").replace("input was", "is")
        remedy = f"{did_you_mean(value, known.choices)}Give {known.kind}. {known.help}"
    return UserError(f"{message} ({origin(path)})", field=name, value=value, remedy=remedy)


def _unknown(name: str, value: object) -> tuple[str, str]:
    section, _, leaf = name.rpartition(".")
    names = [known for known in sections() if known]
    if isinstance(value, dict) and not section:
        near = [f"[{known}]" for known in difflib.get_close_matches(leaf, names)]
        near = near or [field for key in value for field in _nearest(str(key), leaf)]
        message, listing = "there is no such section", f"The sections are {', '.join(names)}"
    else:
        near = _nearest(leaf, section)
        inside = [known.rpartition(".")[2] for known in fields() if known.rpartition(".")[0] == section]
        where = f"[{section}]" if section else "the top level"
        message, listing = "there is no such field", f"The fields of {where} are {', '.join(inside)}"
    if near:
        return message, f"did you mean {' or '.join(dict.fromkeys(near))}?"
    return message, listing


def _nearest(leaf: str, section: str) -> list[str]:
    """Return fields of any section with this name, or else a similar one; those in `section` win."""
    by_leaf: dict[str, list[str]] = {}
    for field in fields():
        by_leaf.setdefault(field.rpartition(".")[2], []).append(field)
    close = [leaf] if leaf in by_leaf else difflib.get_close_matches(leaf, by_leaf, n=2)
    near = [field for match in close for field in by_leaf[match]]
    return [_place(field) for field in [f for f in near if f.rpartition(".")[0] == section] or near]


def _place(field: str) -> str:
    return field if "." in field else f"{field} (above the first section)"
