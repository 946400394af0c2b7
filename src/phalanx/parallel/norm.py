"""The gradient norm, right under every mesh: a split parameter counts on every rank that holds a
part of it, one held whole by all tensor-parallel ranks counts once. `exact` does not depend on who
holds what: squares are added as integers."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def fast_norm(counted: list[Tensor], replica: dist.ProcessGroup | None, like: Tensor) -> Tensor:
    """`counted`: this rank's gradients that it is the one to count."""
    if counted:
        norms = torch.stack(torch._foreach_norm(counted)).double()
        total = norms.square_().sum()
    else:
        total = torch.zeros((), dtype=torch.float64, device=like.device)
    dist.all_reduce(total, group=replica)
    return total.sqrt_()


CACHE_CHUNK = 1 << 16  # elements worked on at once by a CPU, so that the temporaries stay in cache
DEVICE_CHUNK = 1 << 24  # by an accelerator, so that it has something to do per launch


def exact_norm(counted: list[Tensor], replica: dist.ProcessGroup | None, like: Tensor, num_total: int) -> Tensor:
    """Order-free: every square is cut to two limbs of fixed point against the largest element, and
    integers add in any order. `num_total` bounds the number of elements over all ranks. Stays on
    the device."""
    zero = torch.zeros((), dtype=torch.float64, device=like.device)
    top = torch.stack([zero, *(t.abs().max().double() for t in counted if t.numel())]).max()
    top = top.nan_to_num(nan=torch.inf)  # a maximum over ranks may drop a NaN, never an infinity
    dist.all_reduce(top, dist.ReduceOp.MAX, group=replica)
    _, exponent = torch.frexp(top)
    bits = 62 - max(1, num_total).bit_length()  # sums of num_total squares below 2**bits fit in int64
    scale = torch.ldexp(torch.ones_like(top), -exponent)
    limbs = torch.zeros(2, dtype=torch.int64, device=like.device)
    size = CACHE_CHUNK if like.device.type == "cpu" else DEVICE_CHUNK
    for t in counted:
        for chunk in t.reshape(-1).split(size):
            x = chunk.double() * scale  # a copy, also of fp64
            x.mul_(x).mul_(2.0**bits)
            high = x.floor()
            limbs[0] += high.long().sum()
            limbs[1] += x.sub_(high).mul_(2.0**bits).long().sum()
    dist.all_reduce(limbs, group=replica)
    high, low = limbs.double().unbind()
    norm = (high + low * 2.0**-bits).mul(2.0**-bits).sqrt()
    norm = torch.ldexp(norm, exponent)
    return torch.where(torch.isfinite(top), norm, top)
