"""Hardware files: TOML that is checked against `keys` and made into nouns. An entry of a later file lays its keys over
the entry of that name, so that a user can correct one figure. Mistakes name the file, the entry, the key and the
remedy."""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from dataclasses import replace
from typing import Any

from phalanx.core.errors import UserError
from phalanx.hardware.keys import REQUIRED, SECTIONS, Key, Section

Table = dict[str, Any]
Layer = dict[str, dict[str, tuple[Table, str]]]  # section -> entry -> its keys, and the file that spoke last
NAMES = "names"
LIKE = "like"


def plain(name: str) -> str:
    """Write a name as entries have it: "A100-80GB (paper)" is a100-80gb, "TPU v5e" is tpu-v5e."""
    return re.sub(r"[\s_]+", "-", re.sub(r"\(.*?\)", "", name).strip().lower())


def read_layer(data: bytes, file: str) -> Table:
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        remedy = "correct the line; docs/hardware.md has an example"
        raise UserError(f"not a TOML file: {error}", field="hardware file", value=file, remedy=remedy) from None


def lay_over(layer: Layer, table: Table, file: str, packaged: bool = False) -> None:
    """Lay the entries of a file over those that are in `layer`."""
    for section, entries in table.items():
        if section not in SECTIONS and section != NAMES:
            raise _wrong(file, section, entries, "there is no such section", _near(section, [*SECTIONS, NAMES]))
        if not isinstance(entries, dict):
            raise _wrong(file, section, entries, "a section holds entries", f"write [{section}.NAME] above the keys")
        known = layer.setdefault(section, {})
        for name, given in entries.items():
            where = f"{section}.{name}"
            if name != plain(name):
                message = "a name is in lower case, with - for blanks"
                raise _wrong(file, where, name, message, f"write {plain(name)}")
            if section == NAMES:
                known[name] = {"node": given}, file
                continue
            if not isinstance(given, dict):
                raise _wrong(file, where, given, "an entry is a table", f"write [{where}] above its keys")
            base = given.get(LIKE, name)
            if not isinstance(base, str) or (LIKE in given and base not in known):
                raise _wrong(file, f"{where}.{LIKE}", base, "there is no such entry", _near(str(base), list(known)))
            own = {key: value for key, value in given.items() if key != LIKE}
            under = copy.deepcopy(known.get(base, ({}, ""))[0])
            if under and not packaged and "source" not in own:
                # What the user changed must not pass for the words of the packaged source.
                own["source"] = [*_texts(under.get("source", [])), f"{file}: {', '.join(own)}"]
            known[name] = _merged(under, own), file


def _merged(under: Table, over: Table) -> Table:
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(under.get(key), dict)
        under[key] = _merged(under[key], value) if both else value
    return under


def build(layer: Layer) -> dict[str, dict[str, Any]]:
    """Build the nouns of all entries, by section and name."""
    built: dict[str, dict[str, Any]] = {}
    for section, shape in SECTIONS.items():
        built[section] = {
            name: _noun(shape, table, file, f"{section}.{name}", name)
            for name, (table, file) in layer.get(section, {}).items()
        }
    for section, key, of in (
        ("nodes", "chip", "chips"),
        ("nodes", "fabric", "fabrics"),
        ("fabrics", "larger", "fabrics"),
    ):
        for name, noun in built[section].items():
            said = getattr(noun, key)
            if said and said not in built[of]:
                file, near = layer[section][name][1], _near(said, list(built[of]))
                raise _wrong(file, f"{section}.{name}.{key}", said, f"[{of}] has no such entry", near)
    built["nodes"] = {name: replace(node, chip=built["chips"][node.chip]) for name, node in built["nodes"].items()}
    built[NAMES] = {}
    for name, (table, file) in layer.get(NAMES, {}).items():
        node = table["node"]
        if not isinstance(node, str) or node not in built["nodes"]:
            raise _wrong(file, f"names.{name}", node, "there is no such node", _near(str(node), list(built["nodes"])))
        built[NAMES][name] = node
    return built


def _noun(shape: Section, table: Table, file: str, where: str, name: str = "") -> Any:
    for key, value in table.items():
        if key not in shape.keys:
            raise _wrong(file, f"{where}.{key}", value, "there is no such key", _near(key, list(shape.keys)))
    fields = {"name": name} if shape.named else {}
    for key, known in shape.keys.items():
        at = f"{where}.{key}"
        if key in table:
            fields[known.to] = _value(known, table[key], file, at)
        elif known.default is REQUIRED:
            raise _wrong(file, at, None, "it is missing", f"give {known.describe()}: {known.help}")
        else:
            fields[known.to] = known.default
    if wrong := shape.rule(fields):
        key, value, message, remedy = wrong
        raise _wrong(file, f"{where}.{key}", value, message, remedy)
    return shape.noun(**fields)


def _value(key: Key, value: Any, file: str, where: str) -> Any:
    def refuse(message: str) -> UserError:
        return _wrong(file, where, value, message, f"give {key.describe()}: {key.help}")

    match key.kind:
        case "text":
            if not isinstance(value, str) or (key.choices and value not in key.choices):
                near = difflib.get_close_matches(str(value), key.choices, n=1)
                raise refuse(f"did you mean {near[0]}?" if near else "it cannot be that")
            return value
        case "flag" if isinstance(value, bool):
            return value
        case "number" | "count":
            return _number(key, value, refuse)
        case "ratio":
            return 1 / _number(key, value, refuse)
        case "figures" if isinstance(value, dict) and (value or key.default is not REQUIRED):
            return {precision: _number(key, figure, refuse) for precision, figure in value.items()}
        case "counts" if isinstance(value, list):
            return tuple(_number(key, figure, refuse) for figure in value)
        case "texts" if texts := _texts(value):
            return texts
        case "table" if isinstance(value, dict):
            assert key.inside is not None
            return _noun(key.inside, value, file, where)
        case "tables" if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
            assert key.inside is not None
            return tuple(_noun(key.inside, one, file, f"{where}[{i}]") for i, one in enumerate(value))
    raise refuse("it cannot be that")


def _number(key: Key, value: Any, refuse: Any) -> float | int:
    whole = key.kind in ("count", "counts")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise refuse("it is not a whole number" if whole else "it is not a number")
    if not key.least <= value <= key.most:  # nan is neither
        raise refuse("it is out of range")
    if whole:
        return value
    scaled = float(f"{value * key.scale:.12g}")  # 4.6 us are 4.6e-06 s, not 4.599999999999999e-06
    return int(scaled) if key.to.endswith("_bytes") else scaled


def _texts(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    good = isinstance(texts, list | tuple) and all(isinstance(text, str) and text.strip() for text in texts)
    return tuple(texts) if good else ()


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"there is {', '.join(known)}"


def _wrong(file: str, where: str, value: object, message: str, remedy: str) -> UserError:
    return UserError(f"{message} (file {file})", field=where, value=value, remedy=remedy)
