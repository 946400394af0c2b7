"""The list of axes, in the order in which they are applied to a model."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.layout import Coord, Layout
from phalanx.model.family import Family
from phalanx.parallel.context import apply_context_parallel
from phalanx.parallel.deferred import WeightGradients, apply_deferral
from phalanx.parallel.device import Device
from phalanx.parallel.expert import apply_expert_parallel
from phalanx.parallel.fused import apply_kernels
from phalanx.parallel.groups import Groups
from phalanx.parallel.loss import apply_loss
from phalanx.parallel.offload import apply_offload
from phalanx.parallel.recompute import apply_compile, compiler, keep_inputs, keep_products
from phalanx.parallel.shard import COMPUTE_DTYPE, apply_shard
from phalanx.parallel.stages import Absent, cut_stages, end_modules, keep_stage
from phalanx.parallel.tensor import apply_tensor_parallel


def parallelize(
    job: Job, family: Family, coord: Coord, groups: Groups, deferred: WeightGradients, device: Device
) -> dict[int, nn.Module]:
    """Return this rank's stages of the model, on the meta device, cut and wrapped; they hold no values yet. No
    collective is called, so a rank that joins can build alone."""
    if job.layout.ep > 1 and not family.experts:
        raise UserError(
            "the family names no experts (Family.experts)",
            field="layout.ep",
            value=job.layout.ep,
            remedy="set layout.ep = 1, or name the modules that hold the experts",
        )
    stages = {}
    for stage in job.layout.stages_of(coord.pp):
        with torch.device("meta"):
            model = family.build(job.model).to(COMPUTE_DTYPE[job.train.precision])
        _refuse_dropout(model, job.layout)
        where = cut_stages(family, model, job.model, job.layout)
        apply_tensor_parallel(model, family, groups.tp)
        if family.ends_in_head and family.loss is None:
            apply_loss(model, groups.tp, job.model)
        keep_stage(model, where, stage)
        apply_expert_parallel(model, job.layout, groups)
        apply_context_parallel(model, job.layout, groups.axis("cp"))
        if job.layout.splits_backward:
            apply_deferral(model, deferred)
        units = [m for m in family.modules(model, family.units) if not isinstance(m, Absent)]
        experts = family.modules(model, family.experts)
        apply_kernels(model, units, job, device)
        if job.train.recompute == "selective":
            keep_products(units, experts)
        apply_compile(units, experts, compiler(job, device))
        if job.train.recompute == "full":
            keep_inputs(units)
        if job.train.offload_activations:
            apply_offload(units, device)
        apply_shard(job, model, units, experts, end_modules(family, model), groups)
        stages[stage] = model
    return stages


def _refuse_dropout(model: nn.Module, layout: Layout) -> None:
    name = next((n for n, m in model.named_modules() if isinstance(m, _DropoutNd) and m.p > 0), "")
    if name:
        refuse_draws(f"the model drops values out in {name!r}", layout)


def refuse_draws(what: str, layout: Layout) -> None:
    """Refuse axes whose ranks would not draw the masks of one rank. Replicas and shards do, since masks are drawn anew
    for each micro-batch."""
    axis = next((axis for axis in ("tp", "cp", "pp") if getattr(layout, axis) > 1), "")
    if axis:
        raise UserError(
            f"{what}, and the ranks of this axis do not draw the masks of one rank",
            field=f"layout.{axis}",
            value=getattr(layout, axis),
            remedy=f"set layout.{axis} = 1, or leave the dropout out",
        )
