"""A plan as settings of a job: everything that the prediction assumed, so that the run is the one that was planned."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from phalanx.core.layout import SPLIT_BACKWARD
from phalanx.plan.planner import Plan


def settings(plan: Plan, kept: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Field and value of a job file; but those of [train] that are `kept`."""
    at = plan.layout
    for axis in ("replica", "shard", "tp", "pp", "cp", "ep"):
        yield f"layout.{axis}", at[axis]
    yield "layout.zero", max(1, at["zero"])  # over one rank it is all the same
    if at["pp"] > 1:
        yield "layout.schedule", at["schedule"]
        yield "layout.chunks", at["vpp"]
    train = {
        "seq_len": plan.seq,
        "global_batch": plan.global_batch,
        "micro_batch": at["micro_batch"],
        "precision": at["precision"],
        "recompute": at["recompute"],
        "bucket_mb": at["bucket_bytes"] / 1e6,
        "compile": "inductor" if plan.compiled and at["schedule"] not in SPLIT_BACKWARD else "none",
    }
    for name, value in train.items():
        if name not in kept:
            yield f"train.{name}", value


def job_lines(plan: Plan) -> list[str]:
    """The same as sections of a job file."""
    lines: list[str] = []
    for field, value in settings(plan):
        section, name = field.split(".")
        if f"[{section}]" not in lines:
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        lines.append(f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value:g}")
    return lines
