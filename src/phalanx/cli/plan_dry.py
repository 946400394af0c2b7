"""`phalanx plan --dry-run`: one rank of the planned layout, its real program on tensors without values, compared with
what the plan counts."""

from __future__ import annotations

import sys
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.plan.planner import Plan
from phalanx.run.planned import settings

MICRO = 2  # micro-batches: they are alike


def dry(plan: Plan, model: str, to_stderr: bool = False) -> bool:
    """Prints the report; whether plan and program agree."""
    from phalanx.spec import PRESETS, load
    from phalanx.train.dryrun import dry_run

    path = Path(model) if model.endswith(".toml") or Path(model).is_file() else None
    if path is None and model.lower() not in PRESETS:
        remedy = f"choose one of {', '.join(PRESETS)}, or a job file"
        raise UserError("the engine cannot build it", field="--dry-run", value=model, remedy=remedy)
    sets = [] if path else [f"model.preset={model.lower()}"]
    sets += ["recovery.spares=0", "recovery.on=false", "train.reduction=fast", "layout.ranks_per_node=0"]
    sets += [f"train.precision={plan.layout['precision']}", f"train.seq_len={plan.seq}"]
    sets += [f"train.global_batch={plan.global_batch}", *settings(plan)]
    job = load(path, sets).job
    report = dry_run(job, job.layout.world_size // 2, MICRO)
    print("\n" + report.text(), file=sys.stderr if to_stderr else sys.stdout)
    return not report.differences
