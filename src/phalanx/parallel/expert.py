"""Expert parallelism: each of a stage's ep ranks holds some of the experts. Two all-to-alls send rows to the ranks of
their experts and bring the results back. The ep axis takes its ranks from shard x cp x tp. All of these hold different
tokens here: under tensor parallelism a rank routes its own slice of the sequence. No row is dropped, so the sizes are
known only after the counts are exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.core.layout import Layout
from phalanx.core.shape import even_bounds
from phalanx.kernels.expert_rows import take_rows
from phalanx.model.moe import Experts, MoE, inverse
from phalanx.parallel.collectives import all_to_all
from phalanx.parallel.groups import Groups


def apply_expert_parallel(model: nn.Module, layout: Layout, groups: Groups) -> None:
    """Keep only this rank's experts (on the meta device), and send their rows through the exchange."""
    for moe in [m for m in model.modules() if isinstance(m, MoE)]:
        if layout.ep > 1:
            assert groups.experts is not None
            exchange = Exchange(groups.experts.get_group("ep"), moe.config.num_experts)
            _keep(moe.experts, moe.config.num_experts, *exchange.held)
            moe.exchange = exchange
        if layout.cp * layout.tp > 1:
            moe.sum_counts = _SumOver([groups.axis("cp"), groups.axis("tp")])
            moe.sequence_length = lambda length: length * layout.cp * layout.tp


def _keep(experts: Experts, number: int, first: int, last: int) -> None:
    for name, param in list(experts.named_parameters()):
        rows = param.shape[0] // number
        setattr(experts, name, nn.Parameter(param[first * rows : last * rows].clone()))


class _SumOver:
    def __init__(self, groups: list[dist.ProcessGroup]):
        self.groups = [g for g in groups if g.size() > 1]

    def __call__(self, counts: Tensor) -> Tensor:
        counts = counts.clone()
        for group in self.groups:
            dist.all_reduce(counts, group=group)
        return counts


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, out: list[int], into: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.out, ctx.into, ctx.group = out, into, group
        return all_to_all(rows, out, into, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all(grad, ctx.into, ctx.out, ctx.group), None, None, None


class Exchange:
    """Sends rows sorted by expert to the ranks that hold the experts, and returns the way back for results."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int):
        self.group = group
        bounds = [even_bounds(num_experts, group.size(), r) for r in range(group.size())]
        self.sizes = [last - first for first, last in bounds]
        self.held = bounds[group.rank()]

    def __call__(self, rows_ND: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
        width, mine = self.group.size(), self.held[1] - self.held[0]
        # How many rows every rank has for each of the experts here.
        counts_RE = all_to_all(counts_E, self.sizes, [mine] * width, self.group).view(width, mine)
        out_R = torch.stack([part.sum() for part in counts_E.split(self.sizes)])
        sizes = torch.cat((out_R, counts_RE.sum(1))).tolist()  # the host needs the sizes, so it waits for the router
        out, into = sizes[:width], sizes[width:]
        got_ND = _AllToAll.apply(rows_ND, out, into, self.group)
        # Rows arrive sorted by rank, then expert; the experts need them sorted by expert, then rank.
        each_RE = torch.arange(mine, device=rows_ND.device).repeat(width)
        expert_N = each_RE.repeat_interleave(counts_RE.flatten(), output_size=sum(into))
        order_N = expert_N.argsort(stable=True)
        place_N = inverse(order_N)

        def back(out_ND: Tensor) -> Tensor:
            return _AllToAll.apply(take_rows(out_ND, place_N, order_N.unsqueeze(1)), into, out, self.group)

        return take_rows(got_ND, order_N, place_N.unsqueeze(1)), counts_RE.sum(0), back
