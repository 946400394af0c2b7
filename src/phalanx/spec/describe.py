"""Describe the job file from its types: the table of fields for `--explain`, error messages and documentation, and the
JSON schema."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.spec.fields import JobFile

if TYPE_CHECKING:
    from phalanx.spec.load import Resolved


class FieldHelp(NamedTuple):
    kind: str  # the accepted values, in words
    choices: list[str]
    default: Any
    help: str


class Row(NamedTuple):
    field: str
    value: Any
    origin: str
    help: str


def schema() -> dict[str, Any]:
    """Return the JSON schema of the job file, with descriptions and defaults; editors use it to complete TOML."""
    whole = _sections_alone()
    auto = {"const": "auto", "description": "The planner chooses every degree."}
    planned = {"anyOf": [whole["properties"]["layout"], auto]}
    return whole | {"properties": whole["properties"] | {"layout": planned}}


def _sections_alone() -> dict[str, Any]:
    """Return the schema with a table for every section."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **JobFile.model_json_schema()}


def explain(resolved: Resolved) -> list[Row]:
    """List every field of the job: its value, where the value comes from, and what the field means."""
    job = resolved.job.to_dict()
    rows = []
    for field, origin in resolved.origins.items():
        section, _, name = field.rpartition(".")
        rows.append(Row(field, job[section][name] if section else job[name], origin, fields()[field].help))
    return rows


@cache
def sections() -> dict[str, str]:
    """Return the sections by name, each with its description; the top level has the empty name."""
    defs = _sections_alone()["$defs"]
    named = {name: defs[ref]["description"] for name, ref in _references().items()}
    return {"": "Above the first section.", **named}


@cache
def fields() -> dict[str, FieldHelp]:
    """Return every field by its dotted name."""
    whole, references = _sections_alone(), _references()
    found = {name: _help(prop) for name, prop in whole["properties"].items() if name not in references}
    for section, ref in references.items():
        found |= {f"{section}.{name}": _help(prop) for name, prop in whole["$defs"][ref]["properties"].items()}
    return found


def _references() -> dict[str, str]:
    refs = {name: prop.get("$ref") for name, prop in _sections_alone()["properties"].items()}
    return {name: ref.rsplit("/", 1)[-1] for name, ref in refs.items() if ref}


def _help(prop: dict[str, Any]) -> FieldHelp:
    return FieldHelp(_kind(prop), prop.get("enum", []), prop.get("default"), prop["description"])


def _kind(prop: dict[str, Any]) -> str:
    prop = next((choice for choice in prop.get("anyOf", ()) if choice.get("type") != "null"), {}) | prop
    if "enum" in prop:
        return "one of " + ", ".join(json.dumps(choice) for choice in prop["enum"])
    words = {
        "integer": "an integer",
        "number": "a number",
        "boolean": "true or false",
        "string": "text in quotes",
        "array": "an array in [brackets]",
        "object": "a table of text, numbers, booleans, arrays and tables",
    }
    bounds = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    limits = " and ".join(f"{sign} {prop[key]}" for key, sign in bounds.items() if key in prop)
    pattern = f"matching {prop['pattern']}" if "pattern" in prop else ""
    return " ".join(filter(None, [words[prop["type"]], limits, pattern]))
