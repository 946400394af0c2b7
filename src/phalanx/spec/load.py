"""Read a job: defaults, then a preset, then the file, then `--set`, each over the one before. Every value's origin is
kept. The result is checked and handed on as a core Job."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from phalanx.core import compat
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.spec.errors import user_error
from phalanx.spec.fields import INPUT_ONLY, JobFile
from phalanx.spec.presets import PRESETS

KeyPath = tuple[str, ...]
QUICKSTART = "quickstart.toml"
PLANNED_TOO = {"ranks", "ranks_per_node", "cp_style"}  # layout fields that leave the rest to the planner


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checked job, and where the value of every field (by dotted name) came from."""

    job: Job
    origins: dict[str, str]
    auto: bool = False  # no degree of the layout is given, so the planner chooses
    ranks: int | None = None  # number of ranks to plan for


class Given(NamedTuple):
    """One value, where it was written, and the folder that relative paths there start from."""

    value: Any
    origin: str
    folder: Path


def load(path: Path | None = None, sets: Sequence[str] = ()) -> Resolved:
    """Load a job file (None: the packaged quickstart) with `section.field=value` settings over it."""
    given: dict[KeyPath, Given] = {}
    _lay_over(given, _read(path))
    _lay_over(given, (item for text in sets for item in _parse_set(text)))
    return _resolve(given)


def from_mapping(job: Mapping[str, Any], sets: Sequence[str] = ()) -> Resolved:
    """Load a job from a nested mapping in the shape of the job file, with `section.field=value` settings over it."""
    given: dict[KeyPath, Given] = {}
    _lay_over(given, ((path, Given(value, "given", Path())) for path, value in _flatten(job)))
    _lay_over(given, (item for text in sets for item in _parse_set(text)))
    return _resolve(given)


def folder_of_runs(job: Mapping[str, Any] | str | Path | None, sets: Sequence[str] = ()) -> Path:
    """Return the folder for records of a job, before the job is checked."""
    given: dict[KeyPath, Given] = {}
    if isinstance(job, Mapping):
        _lay_over(given, ((path, Given(value, "given", Path())) for path, value in _flatten(job)))
    else:
        _lay_over(given, _read(None if job is None else Path(job)))
    _lay_over(given, (item for text in sets for item in _parse_set(text)))
    asked = given.get(("run", "dir"))
    return Path(os.path.expanduser(asked.value if asked and isinstance(asked.value, str) else Job().run.dir))


def _flatten(table: Mapping[str, Any], prefix: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    for key, value in table.items():
        path = (*prefix, str(key))
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, path)
        else:
            yield path, value


def _lay_over(given: dict[KeyPath, Given], layer: Iterable[tuple[KeyPath, Given]]) -> None:
    """Lay a layer over the given values. A preset belongs to the layer that names it: `--set model.preset` replaces the
    sizes of the file."""
    items = list(layer)
    named = dict(items).get(("model", "preset"))
    if named and isinstance(named.value, str):
        preset = PRESETS.get(named.value, {})
        items = [(("model", k), Given(v, f"preset {named.value}", named.folder)) for k, v in preset.items()] + items
    for path, item in items:
        clash = [other for other in given if other[: len(path)] == path or path[: len(other)] == other]
        if isinstance(item.value, Mapping) and any(len(other) > len(path) for other in clash):
            continue  # an empty table takes nothing out of a full one
        for other in clash:
            del given[other]
        given[path] = item


def _resolve(given: dict[KeyPath, Given]) -> Resolved:
    def origin(path: KeyPath) -> str:
        found = [item.origin for other, item in given.items() if other[: len(path)] == path]
        return ", ".join(dict.fromkeys(found)) or "default"

    if (asked := given.get(("layout",))) and asked.value == "auto":
        given = {path: item for path, item in given.items() if path != ("layout",)}
    nested: dict[str, Any] = {}
    for path, item in given.items():
        table = nested
        for part in path[:-1]:
            table = table.setdefault(part, {})
        table[path[-1]] = item.value
    folders = {path[1]: item.folder for path, item in given.items() if len(path) == 2}
    try:
        spec = JobFile.model_validate(nested, context=folders)
    except ValidationError as error:
        raise user_error(error, origin) from None

    job = Job.from_dict(spec.model_dump(exclude=INPUT_ONLY))
    ranks = spec.layout.ranks
    auto = not {path[1] for path in given if path[0] == "layout" and len(path) > 1} - PLANNED_TOO
    if not auto and ranks not in (None, job.layout.world_size):
        remedy = f"set layout.ranks = {job.layout.world_size}, or degrees whose product is {ranks}"
        raise UserError(f"the degrees give {job.layout.describe()}", field="layout.ranks", value=ranks, remedy=remedy)
    compat.check(job)
    origins = {}
    for name, value in job.to_dict().items():
        for path in [(name, field) for field in value] if isinstance(value, dict) else [(name,)]:
            origins[".".join(path)] = origin(path)
    return Resolved(job, origins, auto, ranks)


def _read(path: Path | None) -> Iterator[tuple[KeyPath, Given]]:
    if path is None:
        data = resources.files("phalanx.spec").joinpath(QUICKSTART).read_bytes()
        label, folder = f"packaged {QUICKSTART}", Path()
    else:
        data, label, folder = _bytes_of(path), f"file {path}", path.parent
    try:
        text = data.decode("utf-8-sig")
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # both decoders raise a ValueError
        remedy = 'correct the line; text goes in quotes, sections in [brackets], values after "="'
        raise UserError(f"not a TOML file: {error}", field="job file", value=str(path), remedy=remedy) from None
    lines = _lines(text)
    for key, value in _flatten(table):
        line = next((lines[key[:n]] for n in range(len(key), 0, -1) if key[:n] in lines), None)
        yield key, Given(value, f"{label}:{line}" if line else label, folder)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        reason = getattr(error, "strerror", None) or str(error)
        folder = path if path.is_dir() else path.parent
        found = sorted(file.name for file in folder.glob("*.toml")) if os.path.isdir(folder) else []
        near = difflib.get_close_matches(path.name, found) or found[:5]
        remedy = f"{folder} has {', '.join(near)}" if near else "name a job file, or none for the quickstart"
        raise UserError(f"cannot be read: {reason}", field="job file", value=str(path), remedy=remedy) from None


def _lines(text: str) -> dict[KeyPath, int]:
    """Find the line of every key by a simple scan, which is good enough for pointing a reader at it."""
    lines: dict[KeyPath, int] = {}
    section: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = _keys(header[1])
            lines.setdefault(section, number)
        elif key := re.match(r"\s*([\w\"'.-]+)\s*=", line):
            lines.setdefault((*section, *_keys(key[1])), number)
    return lines


def _keys(dotted: str) -> KeyPath:
    return tuple(part.strip(" \t\"'") for part in dotted.split("."))


def _parse_set(text: str) -> Iterator[tuple[KeyPath, Given]]:
    name, equals, value = text.partition("=")
    path = _keys(name)
    if not equals or not all(path):
        raise UserError(
            "not a setting", field="--set", value=text, remedy="write section.field=value, such as train.steps=100"
        )
    for key, leaf in _flatten({path[-1]: _toml_value(value)}, path[:-1]):
        yield key, Given(leaf, "--set", Path())


def _toml_value(text: str) -> Any:
    """Parse a TOML value, or keep the text as it is: the shell may have removed the quotes."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text
