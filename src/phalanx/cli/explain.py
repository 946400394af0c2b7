"""`phalanx train --explain`: the resolved job, each value with its origin."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from phalanx.core.job import Job
from phalanx.spec import Resolved, explain


def print_explanation(resolved: Resolved) -> None:
    job: Job = resolved.job
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("field", "value", "from", "meaning"):
        table.add_column(column, overflow="fold")
    for row in explain(resolved):
        table.add_row(row.field, repr(row.value), row.origin, row.help)
    console = Console(highlight=False)
    console.print(table)
    console.print(f"\nlayout: {job.layout.describe()}")
    console.print(f"batch: {job.num_micro} micro-batches per step, {job.micro_per_rank} per rank")
    if job.model.family == "dense":
        console.print(f"model: {job.model.num_params:,} parameters")
    console.print(f"determinism: {job.promise}")
