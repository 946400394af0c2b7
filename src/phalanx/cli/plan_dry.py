"""Dry runs of a plan (`phalanx plan --dry-run`) or a job (`phalanx train --dry-run`): run one rank's real program on
tensors without values, and compare it with what the planner counts."""

from __future__ import annotations

import sys
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.plan.planner import Plan
from phalanx.plan.settings import settings

MICRO = 2  # micro-batches; more would only repeat these


def planned_job(plan: Plan, model: str) -> Job:
    """Return the job that a plan is for, checked against the engine's rules."""
    from phalanx.spec import PRESETS, load

    path = Path(model) if model.endswith(".toml") or Path(model).is_file() else None
    if path is None and model.lower() not in PRESETS:
        remedy = f"choose one of {', '.join(PRESETS)}, or a job file"
        raise UserError("the engine cannot build it", field="--dry-run", value=model, remedy=remedy)
    sets = [] if path else [f"model.preset={model.lower()}"]
    sets += ["recovery.spares=0", "recovery.on=false", "train.reduction=fast", "layout.ranks_per_node=0"]
    return load(path, [*sets, *(f"{field}={value}" for field, value in settings(plan))]).job


def dry(job: Job, to_stderr: bool = False) -> bool:
    """Print the report, and return whether plan and program agree."""
    from phalanx.train.dryrun import dry_run

    report = dry_run(job, job.layout.world_size // 2, MICRO)
    print("\n" + report.text(), file=sys.stderr if to_stderr else sys.stdout)
    return not report.differences
