"""Turn a plan into settings of a job: everything that the prediction assumed, so that the run matches the plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from phalanx.core.layout import SPLIT_BACKWARD
from phalanx.plan.planner import Plan


def settings(plan: Plan, kept: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    """Yield each field of a job file with its value, except the [train] fields named in `kept`."""
    at = plan.layout
    for axis in ("replica", "shard", "tp", "pp", "cp", "ep"):
        yield f"layout.{axis}", at[axis]
    yield "layout.zero", max(1, at["zero"])  # over one rank all ZeRO stages are the same
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
    """Return the settings as the lines of a job file, by section."""
    lines: list[str] = []
    for field, value in settings(plan):
        section, name = field.split(".")
        if f"[{section}]" not in lines:
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        lines.append(f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value:g}")
    return lines
