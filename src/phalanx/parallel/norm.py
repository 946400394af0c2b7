"""The gradient norm, correct under every mesh: a split parameter counts on every rank that holds a part of it, and one
that all tensor-parallel ranks hold whole counts once. The `exact` norm does not depend on who holds what, because
squares are added as integers."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.kernels.square_sum import MOST_BITS, MOST_POWER, add_squares_


def fast_norm(counted: list[Tensor], replica: dist.ProcessGroup | None, like: Tensor) -> Tensor:
    """Return the norm over all ranks of the replica. `counted` are the gradients that this rank must count."""
    if counted:
        wide = torch.promote_types(counted[0].dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(counted, 2, dtype=wide)).double()
        total = norms.square_().sum()
    else:
        total = torch.zeros((), dtype=torch.float64, device=like.device)
    _over(replica, total)
    return total.sqrt_()


def exact_norm(counted: list[Tensor], replica: dist.ProcessGroup | None, like: Tensor, num_total: int) -> Tensor:
    """Return the same norm, independent of the order of addition. Squares are added as integers, relative to the
    largest element (kernels/square_sum.py) or to 2^-64, so gradients that are all smaller lose digits. `num_total`
    bounds the number of elements over all ranks. The result stays on the device."""
    counted = [t for t in counted if t.numel()]
    top = torch.zeros((), dtype=torch.float64, device=like.device)
    if counted:
        wide = torch.promote_types(counted[0].dtype, torch.float32)
        top = torch.stack(torch._foreach_norm(counted, math.inf, dtype=wide)).max().double()
    top = top.nan_to_num(nan=torch.inf)  # a maximum over ranks may drop a NaN, never an infinity
    _over(replica, top, dist.ReduceOp.MAX)
    exponent = torch.frexp(top).exponent.clamp(min=-MOST_POWER)
    bits = min(MOST_BITS, 62 - max(1, num_total).bit_length())  # sums of num_total squares below 2**bits fit in int64
    scale = torch.ldexp(torch.ones_like(top), -exponent)
    limbs = torch.zeros(2, dtype=torch.int64, device=like.device)
    for t in counted:
        add_squares_(limbs, t, scale, bits)
    _over(replica, limbs)
    high, low = limbs.unbind()
    high, low = high + (low >> bits), low & ((1 << bits) - 1)  # many pairs stand for one sum; take the canonical one
    norm = (high.double() + low.double() * 2.0**-bits).mul(2.0**-bits).sqrt()
    norm = torch.ldexp(norm, exponent)
    return torch.where(torch.isfinite(top), norm, top)


def _over(group: dist.ProcessGroup | None, value: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(value, op, group=group)
