"""What this engine runs. The search asks the same rules by which the engine refuses jobs (core.compat). So the engine
accepts every layout that the search prints, and the search finds a newly supported layout at once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from phalanx.core import compat
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.layout import SPLIT_BACKWARD, Layout
from phalanx.core.shape import ModelConfig

RUN_PRECISIONS = ("bf16", "fp8", "fp32")  # among those that the planner knows
PROBE = Job(model=ModelConfig(num_layers=8, num_heads=8, num_kv_heads=8))


@cache
def takes_tied_pipelines() -> bool:
    """Return whether embedding and head may share one matrix when they are in different stages."""
    job = replace(PROBE, model=replace(PROBE.model, tied=True), layout=Layout(pp=2))
    job = replace(job, train=replace(job.train, global_batch=4, micro_batch=1))
    return refusal(job) is None


@cache
def splits_backward_in_fp8() -> bool:
    """Return whether schedules that split the backward pass run in fp8."""
    job = replace(PROBE, layout=Layout(pp=2, schedule=SPLIT_BACKWARD[-1]))
    job = replace(job, train=replace(job.train, global_batch=4, micro_batch=1, precision="fp8"))
    return refusal(job) is None


def refusal(job: Job) -> UserError | None:
    """Return why the engine refuses a job; None: it accepts it."""
    try:
        compat.check(job)
    except UserError as error:
        return error
    return None
