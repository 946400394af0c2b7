"""Compare two runs: find the first step at which they part, and everything that differs between them."""

from __future__ import annotations

import hashlib
from typing import Any

from phalanx.core.ledger import from_bits
from phalanx.observe.story import Story, read_json
from phalanx.observe.tail import Tail

#: Fields of a ledger record, in the order of cause and effect.
FIELDS = {
    "data_version": "they read other data sets",
    "samples": "they trained on other samples",
    "loss_bits": "the same samples gave another loss",
    "norm_bits": "the same loss gave another gradient norm",
}
MISSING = "(not there)"


def ledger(story: Story) -> dict[int, dict[str, Any]]:
    """Return the records that count, by step. A later record of a step replaces an abandoned one."""
    out: dict[int, dict[str, Any]] = {}
    for part in story.parts:
        for record in Tail(part.path / "ledger.jsonl").read():
            if isinstance(record.get("step"), int):
                out[record["step"]] = record
    last = story.done
    return {step: record for step, record in out.items() if step < last}


def compare(a: Story, b: Story) -> dict[str, Any]:
    """Compare two runs. `part`: where they part, or None; `same`: the number of bit-identical steps before that."""
    one, other = ledger(a), ledger(b)
    common = sorted(one.keys() & other.keys())
    parting, same = None, 0
    for step in common:
        field = next((name for name in FIELDS if one[step].get(name) != other[step].get(name)), None)
        if field:
            values = [_value(field, record[step].get(field)) for record in (one, other)]
            parting = {"step": step, "field": field, "why": FIELDS[field], "values": values}
            break
        same += 1
    return {
        "runs": [a.name, b.name],
        "steps": [a.done, b.done],
        "compared": len(common),
        "same": same,
        "part": parting,
        "job": _differences(a.part.settings, b.part.settings),
        "meta": _differences(_identity(a), _identity(b)),
        "losses": [_last_loss(a), _last_loss(b)],
        "verdict": _verdict(a, b, len(common), same, parting),
    }


def _verdict(a: Story, b: Story, common: int, same: int, parting: dict[str, Any] | None) -> str:
    if not common:
        return "They have no step in common."
    if parting:
        values = " and ".join(str(value) for value in parting["values"])
        return f"They part at step {parting['step']:,}: {parting['why']} ({values}). {same:,} steps before are equal."
    if a.done == b.done:
        return f"All {common:,} steps are equal to the bit."
    longer = a if a.done > b.done else b
    return f"The {common:,} steps that both have are equal to the bit; {longer.name} goes on to step {longer.done:,}."


def _value(field: str, value: Any) -> Any:
    try:
        return from_bits(value) if field.endswith("_bits") else value
    except (ValueError, TypeError):
        return value


def _last_loss(story: Story) -> float | None:
    return story.rows[-1].get("loss") if story.rows else None


def _identity(story: Story) -> dict[str, Any]:
    """Return the part of the record that is equal in runs that should be equal."""
    meta = story.part.meta
    about = {name: meta.get(name) for name in ("phalanx", "python", "libraries", "driver", "promise", "host")}
    data = read_json(story.path / "data.json")
    about["data"] = {name: data.get(name) for name in ("version", "order")}
    code = meta.get("code")
    if isinstance(code, dict):
        diff = str(code.get("diff") or "")
        changed = hashlib.sha256(diff.encode(errors="surrogatepass")).hexdigest()[:12] if diff else False
        about["code"] = {"commit": code.get("commit"), "changed": changed, "untracked": code.get("untracked")}
    return about


def _differences(a: Any, b: Any, name: str = "") -> list[dict[str, Any]]:
    """List the fields that differ, by their full names."""
    if isinstance(a, dict) and isinstance(b, dict):
        out = []
        for key in sorted({*a, *b}):
            out += _differences(a.get(key, MISSING), b.get(key, MISSING), f"{name}.{key}" if name else str(key))
        return out
    return [] if a == b else [{"field": name, "values": [a, b]}]
