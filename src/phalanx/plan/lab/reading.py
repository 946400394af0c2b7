"""Read a CSV file of published runs. A bad row is reported with its reason and the others are still read; a file
without the columns is a UserError."""

from __future__ import annotations

import csv
from importlib import resources
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.hardware import Catalogue
from phalanx.plan.lab.prose import facts
from phalanx.plan.lab.rows import RowReader
from phalanx.plan.lab.runs import COLUMNS, FACTS, BadRow, RowError, Run


def packaged() -> Path:
    """Return the path of the project's own table."""
    return Path(str(resources.files("phalanx.plan.lab").joinpath("published_runs.csv")))


def read_runs(path: Path, catalogue: Catalogue) -> tuple[list[Run], list[BadRow]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            named = reader.fieldnames or []
            missing = [c for c in COLUMNS if c not in named]
            rows = [] if missing else list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"cannot be read: {error}", field="runs", value=str(path), remedy="give a CSV file in UTF-8"
        ) from error
    if missing:
        raise UserError(
            f"no column {', '.join(missing)}",
            field="runs",
            value=str(path),
            remedy=f"the first line of the file names the columns: {','.join(COLUMNS)}",
        )
    runs: list[Run] = []
    bad: list[BadRow] = []
    for number, row in enumerate(rows, start=2):
        text = {c: (row.get(c) or "").strip() for c in COLUMNS}
        told = {c: (row.get(c) or "").strip() for c in FACTS}
        if "software" not in named:  # a table of prose
            told = facts(text) | {c: value for c, value in told.items() if value}
        try:
            runs.append(RowReader(number, text | told, catalogue).run())
        except (RowError, UserError) as error:
            bad.append(BadRow(number, text["source"], str(error).splitlines()[0]))
    return runs, bad
