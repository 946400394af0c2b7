"""The shard axis: ZeRO-1, 2 and 3 through FSDP2. Each unit is one FSDP2 module, what is outside the
units belongs to the root. Stage 3 frees a unit's parameters after its forward; stages 1 and 2 keep
them until the step's last backward, and stage 1 also reduces gradients only then."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

MASTER_DTYPE = {"bf16": torch.float32, "fp32": torch.float32, "fp64": torch.float64}
COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def apply_shard(
    model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, zero: int, precision: str, prefetch: int
) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=COMPUTE_DTYPE[precision],
        reduce_dtype=MASTER_DTYPE[precision],
        cast_forward_inputs=False,  # position tables stay in fp32
    )
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=zero == 3)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    sharded = [u for u in units if isinstance(u, FSDPModule)]
    for i, unit in enumerate(sharded):
        if prefetch > 0:
            unit.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + prefetch])
            unit.set_modules_to_backward_prefetch(sharded[max(0, i - prefetch) : i][::-1])


def set_micro_batch(model: FSDPModule, zero: int, exact: bool, last: bool) -> None:
    """What FSDP2 does at the end of the coming backward."""
    if zero < 3:
        model.set_reshard_after_backward(last)
    if zero == 1 and not exact:
        model.set_requires_gradient_sync(last)
