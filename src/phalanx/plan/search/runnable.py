"""What this engine runs. It refuses by rules (core.compat), and the search asks those very rules, so that a layout that
it prints is one that the engine takes, and one that the engine learns to take is found the same day."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from phalanx.core import compat
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.layout import SPLIT_BACKWARD, Layout
from phalanx.core.shape import ModelConfig

RUN_PRECISIONS = ("bf16", "fp8", "fp32")  # of those that the planner knows
PROBE = Job(model=ModelConfig(num_layers=8, num_heads=8, num_kv_heads=8))


@cache
def takes_tied_pipelines() -> bool:
    """Whether embedding and head may be one matrix when they stand in different stages."""
    job = replace(PROBE, model=replace(PROBE.model, tied=True), layout=Layout(pp=2))
    job = replace(job, train=replace(job.train, global_batch=4, micro_batch=1))
    return refusal(job) is None


@cache
def splits_backward_in_fp8() -> bool:
    """Whether schedules that split the backward pass run in fp8."""
    job = replace(PROBE, layout=Layout(pp=2, schedule=SPLIT_BACKWARD[-1]))
    job = replace(job, train=replace(job.train, global_batch=4, micro_batch=1, precision="fp8"))
    return refusal(job) is None


def refusal(job: Job) -> UserError | None:
    """Why the engine does not take a job; None: it does."""
    try:
        compat.check(job)
    except UserError as error:
        return error
    return None
