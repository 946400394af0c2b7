"""The list of axes, in the order in which they are applied to a model."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.core.job import Job
from phalanx.model.family import Family
from phalanx.parallel.groups import Groups
from phalanx.parallel.recompute import apply_recompute
from phalanx.parallel.shard import MASTER_DTYPE, apply_shard
from phalanx.parallel.tensor import apply_tensor_parallel


def parallelize(job: Job, family: Family, groups: Groups) -> nn.Module:
    """The model on the meta device, cut and wrapped; it holds no values yet. No collective is called
    here, so a rank that joins can build alone."""
    with torch.device("meta"):
        model = family.build(job.model).to(MASTER_DTYPE[job.train.precision])
    units = family.unit_modules(model)
    apply_tensor_parallel(model, family, groups.tp)
    apply_recompute(units, job.train.recompute)
    apply_shard(model, units, groups.mesh["shard"], job.layout.zero, job.train.precision, job.train.prefetch)
    return model
