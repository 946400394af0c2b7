"""Collectives that return their result, waited for. They trace and can be kept by selective
recomputation; the names differ between torch versions, which is known here alone."""

from __future__ import annotations

import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

# torch 2.13 renamed these; 2.11 has only the old names.
_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _in_place(x: Tensor, group: dist.ProcessGroup) -> bool:
    """Gloo on an accelerator's tensors (ranks that share a device): the functional form crashes
    there in torch 2.11, the in-place one works."""
    return x.device.type != "cpu" and dist.get_backend(group) == "gloo"


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    if _in_place(x, group):
        out = x.new_empty(group.size(), *x.shape)
        _gather_into(out.view(-1), x.view(-1), group=group)
        return out.movedim(0, dim).flatten(dim, dim + 1)
    return funcol.wait_tensor(_gather(x, dim, group))


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    if _in_place(x, group):
        parts = x.unflatten(dim, (group.size(), -1)).movedim(dim, 0).contiguous()
        out = parts.new_empty(parts.shape[1:])
        _scatter_into(out.view(-1), parts.view(-1), group=group)
        return out
    return funcol.wait_tensor(_scatter(x.contiguous(), "sum", dim, group))


def all_reduce(x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    if _in_place(x, group):
        out = x.clone()
        dist.all_reduce(out, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=group)
        return out
    return funcol.wait_tensor(funcol.all_reduce(x, op, group))
