"""`phalanx train --explain`: print the resolved job, each value with its origin."""

from __future__ import annotations

import json

from rich.table import Table

from phalanx.core.job import Job
from phalanx.run.console import PlainConsole
from phalanx.spec import Resolved, explain

WIDE = 110  # columns needed to show the meaning of each field too


def print_explanation(resolved: Resolved) -> None:
    console = PlainConsole()
    terminal = console.is_terminal
    lines = [["field", "value", "from", "meaning"]]
    lines += [[row.field, json.dumps(row.value), row.origin, row.help] for row in explain(resolved)]
    if terminal and console.width < WIDE:
        lines = [line[:-1] for line in lines]
    if terminal:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in lines[0]:
            table.add_column(name, no_wrap=name == "field", overflow="fold")
        for line in lines[1:]:
            table.add_row(*line)
        console.print(table)
    else:
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            text = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            console.print(text.rstrip(), soft_wrap=True)
    for text in _derived(resolved.job):
        console.print(text, soft_wrap=not terminal)


def _derived(job: Job) -> list[str]:
    lines = [
        "",
        f"layout: {job.layout.describe()}",
        f"batch: {job.num_micro} micro-batches per step, {job.micro_per_rank} per rank; "
        f"{job.tokens_per_step:,} tokens per step",
    ]
    if job.model.family in ("dense", "moe"):
        active = f", {job.model.active_params:,} of them for each token" if job.model.family == "moe" else ""
        lines.append(f"model: {job.model.num_params:,} parameters{active}")
    return [*lines, f"determinism: {job.promise}"]
