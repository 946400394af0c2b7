"""Export the steps of a story to files that other tools read."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.observe.story import Story
from phalanx.observe.tensorboard import event_file

KINDS = (".csv", ".json", ".parquet", ".tfevents")


def write_steps(story: Story, out: Path) -> None:
    """Write the steps that count, in the format that the suffix of `out` names."""
    if out.suffix not in KINDS:
        raise UserError("the ending says no format", field="--out", value=str(out), remedy=f"use {', '.join(KINDS)}")
    rows = [flat(row) for row in story.rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        if out.suffix == ".json":
            out.write_text(json.dumps(rows) + "\n")
        elif out.suffix == ".csv":
            with open(out, "w", newline="") as f:
                writer = csv.DictWriter(f, names)
                writer.writeheader()
                writer.writerows(rows)
        elif out.suffix == ".tfevents":
            out.write_bytes(event_file(rows))
        else:
            write_parquet(out, rows)
    except OSError as error:
        remedy = "name a file in a folder that you may write to"
        raise UserError(f"it cannot be written: {error}", field="--out", value=str(out), remedy=remedy) from None


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """Give each value of a nested row its own name, such as phases.reduce."""
    out: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            out.update({f"{name}.{inner}": v for inner, v in value.items()})
        else:
            out[name] = value
    return out


def write_parquet(out: Path, rows: list[dict[str, Any]]) -> None:
    """Write one column for each name that any row has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        remedy = "pip install 'phalanx[history]', or write .csv"
        raise UserError("Parquet needs pyarrow", field="--out", value=str(out), remedy=remedy) from None
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    pyarrow.parquet.write_table(table, out)
