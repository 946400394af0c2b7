"""Collectives that return their result, waited for. On NCCL the functional form, which traces and can
be kept by selective recomputation. On Gloo everything goes by all-to-all, one message per peer: its
own all-gather and reduce-scatter send many small ones, and the functional form crashes in torch 2.11
when ranks share an accelerator."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

# torch 2.13 renamed these; 2.11 has only the old names.
_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor


def _on_gloo(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "gloo"


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """parts[r] goes to rank r; back comes what every rank had for this one."""
    parts = parts.contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out.view(-1), parts.view(-1), group=group)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    if _on_gloo(group):
        parts = _exchange(x.unsqueeze(0).expand(group.size(), *x.shape), group)
        return parts.movedim(0, dim).flatten(dim, dim + 1)
    return funcol.wait_tensor(_gather(x.contiguous(), dim, group))


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    if _on_gloo(group):
        first, *others = _exchange(x.unflatten(dim, (group.size(), -1)).movedim(dim, 0), group)
        for other in others:
            first.add_(other)
        return first
    return funcol.wait_tensor(_scatter(x.contiguous(), "sum", dim, group))


def all_reduce(x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    if _on_gloo(group):
        out = x.clone()
        dist.all_reduce(out, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=group)
        return out
    return funcol.wait_tensor(funcol.all_reduce(x, op, group))
