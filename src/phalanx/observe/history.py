"""History: the steps of a story as a Parquet file beside its record, and SQL over them with DuckDB. The file is made
from the record on the first query, and again once the record has grown; training never waits for it."""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.observe.export import flat, write_parquet
from phalanx.observe.story import Story

FOLDER = "history"


def parquet(story: Story) -> Path | None:
    """Return an up-to-date file of all steps that count, or None if the record's folder is not writable."""
    sizes = [_size(part.path / "metrics.jsonl") for part in story.parts]
    path = story.path / FOLDER / f"steps-{len(story.parts)}-{sum(sizes)}.parquet"
    if path.is_file():
        return path
    try:
        path.parent.mkdir(exist_ok=True)
        write_parquet(near := path.with_suffix(".tmp"), table_rows(story))
        near.replace(path)
    except OSError:
        return None
    for old in path.parent.glob("steps-*.parquet"):
        if old != path:
            with contextlib.suppress(OSError):
                old.unlink()
    return path


def table_rows(story: Story) -> list[dict[str, Any]]:
    """Return one row per step, with nested values named like phases_reduce so that SQL needs no quotes."""
    return [{name.replace(".", "_"): value for name, value in flat(flat(row)).items()} for row in story.rows]


def connect(story: Story) -> Any:
    """Return a DuckDB connection that sees only the tables steps, events, incidents and states. Raise UserError if a
    package is missing."""
    try:
        import duckdb
        import pyarrow
    except ImportError as error:
        remedy = "pip install 'phalanx[history]'"
        raise UserError(f"SQL over a run needs {error.name}, which is not installed", remedy=remedy) from None
    database = duckdb.connect()
    with tempfile.TemporaryDirectory() as folder:
        path = parquet(story)
        if path is None:
            write_parquet(path := Path(folder) / "steps.parquet", table_rows(story))
        database.execute("CREATE TABLE steps AS SELECT * FROM read_parquet(?)", [str(path)])
    events = [{**about, "part": part.path.name} for part in story.parts for about in part.events]
    tables = {
        "events": [{name: e.get(name) for name in ("time", "type", "part")} | {"said": json.dumps(e)} for e in events],
        "incidents": [
            {**{k: v for k, v in one.to_dict().items() if not isinstance(v, list | dict)}, **_seconds(one.phases())}
            for one in story.incidents()
        ],
        "states": story.goodput()["states"],
    }
    for name, rows in tables.items():
        database.register("given", pyarrow.Table.from_pylist(rows or [{"none": None}]))
        database.execute(f"CREATE TABLE {name} AS SELECT * FROM given{'' if rows else ' LIMIT 0'}")  # noqa: S608
        database.unregister("given")
    database.execute("SET enable_external_access = false")
    database.execute("SET lock_configuration = true")
    return database


def query(story: Story, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Run a query and return column names and rows. Raise UserError if DuckDB rejects it."""
    import duckdb

    database = connect(story)
    try:
        answer = database.execute(sql)
        return [column[0] for column in answer.description or ()], answer.fetchall()
    except duckdb.Error as error:
        remedy = "tables: steps, events, incidents, states; `DESCRIBE steps` lists columns"
        raise UserError(str(error).splitlines()[0], field="SQL", value=sql, remedy=remedy) from None


def _seconds(phases: dict[str, float]) -> dict[str, float]:
    return {f"{name.replace(' ', '_').replace('-', '_')}_s": took for name, took in phases.items()}


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
