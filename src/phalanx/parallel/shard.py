"""The shard axis: ZeRO-1, 2 and 3 through FSDP2. Each unit is one FSDP2 module, and so are embedding and head; the
remaining parameters belong to the root. Stage 3 frees a unit's parameters after its forward. Stages 1 and 2 keep them
until the step's last backward, and stage 1 also reduces gradients only then. A rank alone does not use FSDP2."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from phalanx.core.job import Job
from phalanx.parallel.groups import Groups
from phalanx.parallel.tiers import apply_tiers

MASTER_DTYPE = {"fp8": torch.float32, "bf16": torch.float32, "fp32": torch.float32, "fp64": torch.float64}
# With fp8, everything but the operands of the blocks' products is in bf16.
COMPUTE_DTYPE = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def alone(groups: Groups) -> bool:
    """Return whether this rank holds all of its stage's parameters."""
    return groups.state.size() == 1 and (groups.experts is None or groups.experts["edp"].size() == 1)


def apply_shard(
    job: Job,
    model: nn.Module,
    units: list[nn.Module],
    experts: list[nn.Module],
    ends: list[nn.Module],
    groups: Groups,
) -> None:
    """Shard the model with FSDP2. `experts` lie inside units, and are sharded over the ranks that hold the same
    ones."""
    if alone(groups):
        return
    precision, zero, prefetch = job.train.precision, job.layout.zero, job.train.prefetch
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPE[precision],
        reduce_dtype=MASTER_DTYPE[precision],
        cast_forward_inputs=False,  # position tables stay in fp32
    )
    for module in experts:
        assert groups.experts is not None
        fully_shard(module, mesh=groups.experts["edp"], mp_policy=policy, reshard_after_forward=zero == 3)
    for unit in units:
        fully_shard(unit, mesh=groups.state, mp_policy=policy, reshard_after_forward=zero == 3)
    for module in (*ends, model):
        fully_shard(module, mesh=groups.state, mp_policy=policy, reshard_after_forward=False)
    for module in ends:
        # By default FSDP2 gathers what ran before this in a forward: in a pipeline, of another micro-batch.
        module.set_modules_to_backward_prefetch([module])
    apply_tiers(model, groups.tiers)
    # A unit and the experts inside it are gathered together.
    sharded = [[m for m in unit.modules() if isinstance(m, FSDPModule)] for unit in units]
    for i, (unit, *_) in enumerate(sharded):
        if prefetch > 0:
            unit.set_modules_to_forward_prefetch([m for s in sharded[i + 1 : i + 1 + prefetch] for m in s])
            behind = sharded[max(0, i - prefetch) : i][::-1]
            unit.set_modules_to_backward_prefetch([m for s in behind for m in s])


def set_micro_batch(model: nn.Module, zero: int, exact: bool, last: bool) -> None:
    """Set what FSDP2 frees and reduces at the end of the next backward."""
    if not isinstance(model, FSDPModule):
        return
    if zero < 3:
        model.set_reshard_after_backward(last)
    if zero == 1 and not exact:
        model.set_requires_gradient_sync(last)


def set_half(model: nn.Module, zero: int, half: str, last: bool) -> None:
    """Set the same for a backward in two halves. The first half reduces nothing; the second has parameters to free only
    if they were kept for the step."""
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(half == "weights")
    model.set_reshard_after_backward(zero == 3 or (half == "weights" and last))


def end_forward(model: nn.Module) -> None:
    """Free what passes without a backward have gathered, because the next update makes it stale. Also forget the order
    of the units, by which FSDP2 would prefetch in the next backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            state = module._get_fsdp_state()
            state._comm_ctx.post_forward_order.clear()
            if state._fsdp_param_group:
                state._fsdp_param_group._post_forward_indices.clear()
