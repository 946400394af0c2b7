"""`phalanx train --explain`: the resolved job, each value with its origin."""

from __future__ import annotations

import json

from rich.table import Table

from phalanx.cli.console import plain_console
from phalanx.core.job import Job
from phalanx.spec import Resolved, explain

WIDE = 110  # columns from which on the meaning of each field has its place


def print_explanation(resolved: Resolved) -> None:
    console = plain_console()
    terminal = console.is_terminal
    names = ["field", "value", "from"] + (["meaning"] if not terminal or console.width >= WIDE else [])
    rows = [(row.field, json.dumps(row.value), row.origin, row.help) for row in explain(resolved)]
    rows = [row[: len(names)] for row in rows]
    if terminal:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in names:
            table.add_column(name, no_wrap=name == "field", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        widths = [max(len(row[i]) for row in (names, *rows)) for i in range(len(names))]
        for row in (names, *rows):
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            console.print(line.rstrip(), soft_wrap=True)
    for line in _derived(resolved.job):
        console.print(line, soft_wrap=True)


def _derived(job: Job) -> list[str]:
    lines = [
        "",
        f"layout: {job.layout.describe()}",
        f"batch: {job.num_micro} micro-batches per step, {job.micro_per_rank} per rank; "
        f"{job.tokens_per_step:,} tokens per step",
    ]
    if job.model.family == "dense":
        lines.append(f"model: {job.model.num_params:,} parameters")
    return [*lines, f"determinism: {job.promise}"]
