"""Collectives that wait and return their result. On NCCL they use the functional form, which can be traced and whose
results selective recomputation can keep. On Gloo all but the all-reduce go by all-to-all, one message per peer: its own
all-gather and reduce-scatter send many small ones, and the functional form crashes in torch 2.11 when ranks share an
accelerator.

None returns the very tensor that a collective or an addition wrote into. If torch 2.11 compiles an autograd function
whose forward does so, its gradients are zero, without an error (pytorch issue 180642): the traced forward returns that
tensor twice, and its gradient goes to the wrong place."""

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
    """Send parts[r] to rank r, and return what every rank sent to this one."""
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
            first = first + other
        return first
    return funcol.wait_tensor(_scatter(x.contiguous(), "sum", dim, group))


def all_reduce(x: Tensor, op: str, group: dist.ProcessGroup) -> Tensor:
    if _on_gloo(group):
        out = x.clone()
        dist.all_reduce(out, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=group)
        return out.view_as(out)
    return funcol.wait_tensor(funcol.all_reduce(x, op, group))


def all_to_all(x: Tensor, out: list[int], into: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send the first out[0] rows to rank 0, and so on; receive into[r] rows from rank r."""
    got = x.new_empty(sum(into), *x.shape[1:])
    dist.all_to_all_single(got, x.contiguous(), into, out, group=group)
    return got


def swap_dims(x: Tensor, cut: int, joined: int, group: dist.ProcessGroup) -> Tensor:
    """Cut dim `cut` into as many parts as there are ranks, send part r to rank r, and join the received parts along dim
    `joined` in rank order."""
    parts = torch.stack(x.chunk(group.size(), dim=cut))
    return torch.cat(_exchange(parts, group).unbind(), dim=joined)


class Shift:
    """A tensor being sent to the next rank of a ring while the previous rank's is received. Gloo cannot send from an
    accelerator's memory, so on Gloo it goes through host memory."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup):
        me, width = group.rank(), group.size()
        self.home = x.device
        self.out = (x.cpu() if _on_gloo(group) else x).contiguous()
        self.into = torch.empty_like(self.out)
        ops = [
            dist.P2POp(dist.isend, self.out, group=group, group_peer=(me + 1) % width),
            dist.P2POp(dist.irecv, self.into, group=group, group_peer=(me - 1) % width),
        ]
        self.works = dist.batch_isend_irecv(ops)

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.into.to(self.home)
