"""The groups over which a rank communicates along one axis, for every algorithm that the policy may choose, and FSDP2's
two collectives over them. A single level is left to FSDP2's own group; one node needs nothing here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from phalanx.core.job import CollectivesConfig
from phalanx.parallel.algorithms import ALGORITHMS, Nodes, Stage, choose, order, possible, runs
from phalanx.parallel.tree import Node, Part, TreeSum, exchange, join

Form = Callable[[str, list[int], int], Any]  # (name, positions, own position) -> process group

# torch 2.13 renamed these; 2.11 has only the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Way:
    """One algorithm with its groups: stage after stage down, and back up."""

    def __init__(self, name: str, stages: list[Stage], me: int, form: Form):
        self._mine = [next(group for group in stage if me in group) for stage in stages]
        self._reach = [[before[p] for p in mine] for before, mine in zip(runs(stages), self._mine, strict=True)]
        self._order = order(stages)
        self._index: dict[tuple[str, torch.device], Tensor] = {}
        self.sent_bytes = 0
        self._groups = [form(f"{name}{k}.{mine[0]}", mine, me) for k, mine in enumerate(self._mine)]

    @property
    def depth(self) -> int:
        return len(self._mine)

    def group(self, stage: int) -> Any:
        """Return the group of a stage for one call. Do not keep it: a reference to a group keeps its sockets open."""
        if not self._groups:
            raise RuntimeError("the groups of this axis are closed")
        return self._groups[stage]

    def close(self) -> None:
        self._groups.clear()

    def down(self, flat: Tensor, depth: int) -> Tensor:
        """Reduce-scatter over the first `depth` stages."""
        for stage in range(depth):
            group = self.group(stage)
            self.count(flat, group)
            part = flat.new_empty(flat.numel() // group.size())
            if isinstance(group, dist.ProcessGroupGloo):
                _add_up(part, flat, group)
            else:
                group._reduce_scatter_base(part, flat, dist.ReduceScatterOptions()).wait()
            flat = part
        return flat

    def up(self, part: Tensor, depth: int) -> Tensor:
        """All-gather, over the same stages in the opposite order."""
        for stage in reversed(range(depth)):
            group = self.group(stage)
            whole = part.new_empty(part.numel() * group.size())
            self.count(whole, group)
            group._allgather_base(whole, part.contiguous()).wait()
            part = whole
        return part

    def tree(self, parts: list[Part], nodes: Sequence[Sequence[Node]]) -> TreeSum:
        """Do `down` in the fixed order of the exact tree. `nodes[p]` are those of the parts that position p brings."""
        merged = TreeSum()
        for stage, reach in enumerate(self._reach):
            group = self.group(stage)
            self.count(parts[0][1], group, times=len(parts))
            brought = [join(node for n in nodes[first : last + 1] for node in n) for first, last in reach]
            merged = exchange(parts, brought, group)
            parts = merged.parts
        return merged

    def sorted_in(self, flat: Tensor) -> Tensor:
        """Reorder slices from the order of ranks to that in which `down` hands them out."""
        return self._pick(flat, "in", self._order).view(-1)

    def sorted_out(self, gathered: Tensor, out: Tensor) -> None:
        """Write what `up` has gathered to `out`, in the order of ranks."""
        positions = [self._order.index(p) for p in range(len(self._order))]
        self._pick(gathered, "out", positions, out.view(len(positions), -1))

    def _pick(self, flat: Tensor, name: str, positions: list[int], out: Tensor | None = None) -> Tensor:
        key = (name, flat.device)
        if key not in self._index:
            self._index[key] = torch.tensor(positions, device=flat.device)
        return torch.index_select(flat.view(len(positions), -1), 0, self._index[key], out=out)

    def count(self, buffer: Tensor, group: Any, times: int = 1) -> None:
        """Count the bytes that this rank sends by the algorithm: (w-1)/w of the buffer each time."""
        width = group.size()
        self.sent_bytes += times * size_bytes(buffer) * (width - 1) // width


def _add_up(part: Tensor, flat: Tensor, group: Any) -> None:
    """Reduce-scatter by all-to-all: Gloo's own is an all-reduce that throws most of its result away."""
    incoming = torch.empty_like(flat)
    group.alltoall_base(incoming, flat, [], []).wait()
    first, *others = incoming.view(group.size(), -1)
    part.copy_(first)
    for other in others:
        part.add_(other)


class Peers:
    """The ranks of one axis that share this rank's other coordinates."""

    def __init__(
        self,
        axis: str,
        nodes: Nodes,
        me: int,
        config: CollectivesConfig,
        backend: str,
        form: Form,
        own_flat: bool = True,
    ):
        """`own_flat`: form a group for one level too; otherwise it exists already."""
        self.axis, self.nodes, self.config, self.backend = axis, nodes, config, backend
        self.size = sum(len(node) for node in nodes)
        names = [n for n in possible(config, backend, axis, nodes) if own_flat or n != "flat"]
        self._ways = {name: Way(name, ALGORITHMS[name](nodes), me, form) for name in names}

    def way(self, op: str, message: Tensor) -> Way | None:
        """Return the way for `message`; None: one level, over the existing group."""
        return self._ways.get(choose(self.config, self.backend, self.axis, op, self.nodes, size_bytes(message)))

    @property
    def sent_bytes(self) -> int:
        return sum(way.sent_bytes for way in self._ways.values())

    def close(self) -> None:
        """Drop the groups; their sockets close with the last reference."""
        for way in self._ways.values():
            way.close()


def way_over(tiers: Mapping[str, Peers], group: Any, op: str, whole: Tensor) -> Way | None:
    """Return how `whole` is reduced or gathered; None: over `group`. The keys of `tiers` name groups of one level."""
    peers = tiers.get(group.group_name)
    return peers.way(op, whole) if peers else None


class _Tiered:
    """A collective of FSDP2, which passes the group and expects rank r's slice at position r."""

    def __init__(self, tiers: Mapping[str, Peers]):
        self._tiers = tiers

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class TieredReduceScatter(_Tiered):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        way = way_over(self._tiers, group, "sum", input_tensor)
        if way is None:
            return _scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        assert op == dist.ReduceOp.SUM, op
        output_tensor.copy_(way.down(way.sorted_in(input_tensor), way.depth))
        return None


class TieredAllGather(_Tiered):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        way = way_over(self._tiers, group, "gather", output_tensor)
        if way is None:
            return _gather(output_tensor, input_tensor, group=group, async_op=async_op)
        way.sorted_out(way.up(input_tensor, way.depth), output_tensor)
        return None


def apply_tiers(model: nn.Module, tiers: Mapping[str, Peers]) -> None:
    if not tiers:
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(TieredAllGather(tiers))
            module.set_custom_reduce_scatter(TieredReduceScatter(tiers))
