"""Collectives that return their result, waited for. They trace and can be recomputed; the names
differ between torch versions, which is known here alone."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

# torch 2.13 renamed these; 2.11 has only the old names.
_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return funcol.wait_tensor(_gather(x.contiguous(), dim, group))


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return funcol.wait_tensor(_scatter(x.contiguous(), "sum", dim, group))


def all_reduce(x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    return funcol.wait_tensor(funcol.all_reduce(x, op, group))
