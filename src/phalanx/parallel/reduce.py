"""Sum the gradients of a backward over all micro-batches and replicas, unit by unit.

FSDP2 calls the hook of each module as its backward ends, with that module's gradient reduced over the shard axis. Where
a rank holds all parameters there is no FSDP2, and a unit is complete when autograd has left the gradient of its last
parameter. The reducer accumulates over micro-batches itself, because FSDP2's own accumulation has no place for a fixed
order. During the last backward it hands each unit to the link, which sums it over the replicas while the backward
continues. The replica's own sums are kept until the step is committed: when another replica dies, only its
micro-batches are missing. Further passes add them, and all is summed again over another link.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from phalanx.core.deal import Deal, deal
from phalanx.core.held import travels_whole
from phalanx.core.job import Job
from phalanx.core.layout import Coord
from phalanx.parallel.cross import Cross
from phalanx.parallel.device import Device
from phalanx.parallel.groups import Groups
from phalanx.parallel.link import BucketTrace, Link, Nodes, Slices
from phalanx.parallel.shard import MASTER_DTYPE
from phalanx.parallel.tiers import size_bytes, way_over
from phalanx.parallel.tree import Part, TreeSum, cover, exchange, fold, merge

WHOLE = (0, 0)  # the name of the one part of a fast sum


class StepFailed(RuntimeError):
    """The sum over the replicas failed. What this replica has computed is intact (`Reducer.held`)."""


class Place(NamedTuple):
    """The place of a parameter's gradient in its unit's flat gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(slots=True, eq=False)
class _Unit:
    """Parameters that are gathered and reduced together, and their accumulated gradient. A micro-batch is one leaf of
    the exact sum, or several when ranks that share it (cp, and tp for experts) are added up by FSDP2."""

    places: dict[nn.Parameter, Place] = field(default_factory=dict)  # FSDP2's only once they are known
    slices: Slices = field(default_factory=list)
    arrived: int = 0  # gradients in this backward, without FSDP2
    leaves: int = 1
    scattered: bool = False
    tree: TreeSum = field(default_factory=TreeSum)  # exact: of the passes since the last reduction
    kept: list[Part] = field(default_factory=list)  # summed over this replica
    out: Tensor | None = None  # summed over all replicas

    def views(self, flat: Tensor) -> list[Tensor]:
        return [place.view(flat) for place in self.places.values()]


class Reducer:
    def __init__(self, job: Job, coord: Coord, groups: Groups, device: Device):
        self.job, self.coord, self.groups, self.device = job, coord, groups, device
        self.exact = job.train.reduction == "exact"
        self.every_micro = not job.reduces_once
        self.deal = deal(job, range(job.layout.replica))
        self.indices = job.micro_indices(coord)  # micro-batches of the pass
        self.held: tuple[int, ...] = ()  # micro-batches of this step in the sums that this replica keeps
        self.held_back = False  # gradients that arrive are not complete yet
        self.peak_pending_bytes = 0
        self.link: Link | None = None
        self._units: list[_Unit] = []
        self._unit_of: dict[nn.Parameter, _Unit] = {}
        self._sharded: dict[nn.Module, list[nn.Parameter]] = {}  # by model; FSDP2 puts others in their place at times
        self._dtype = MASTER_DTYPE[job.train.precision]
        self._nodes: dict[int, Nodes] = {}  # by the leaves of a micro-batch; 0: see brought_by_shards
        self._hooks: list[RemovableHandle] = []
        self._micro = 0
        self.rejoin(groups.cross)

    def attach(self, parts: list[nn.Module]) -> None:
        """Register the model, its units and its experts. A parameter belongs to the last part that has it."""
        owner: dict[nn.Parameter, _Unit] = {}
        modules = {id(module): name for name, module in parts[0].named_modules()}
        names = {param: name for name, param in parts[0].named_parameters()}
        for module in parts:
            unit = _Unit()
            self._units.append(unit)
            owner |= dict.fromkeys(module.parameters(), unit)
            if isinstance(module, FSDPModule):
                unit.slices = _slices(module, modules)
                # The loss already carries 1 / tokens, the same for every micro-batch: plain sums from here.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                module.set_all_reduce_hook(partial(self._reduced, unit))
                if self.exact:
                    module.set_custom_reduce_scatter(_TreeReduceScatter(self, unit))
        for param, unit in owner.items():
            if not isinstance(param, DTensor):
                offset = sum(size for size, _ in unit.slices)
                unit.places[param] = Place(tuple(param.shape), param.stride(), offset)
                unit.slices.append((param.numel(), travels_whole(names[param], tuple(param.shape))))
                self._hooks.append(param.register_post_accumulate_grad_hook(partial(self._arrived, unit)))
        self._unit_of |= owner
        self._sharded[parts[0]] = [p for p in owner if isinstance(p, DTensor)]

    def rejoin(self, cross: Cross | None) -> None:
        """Sum over these replicas from now on; None: there is no other. The kept sums stay. Rounding errors of earlier
        messages are forgotten: a new group begins with none, so that it depends on no earlier membership."""
        if old := self.link:
            old.cross.close()
            old.close(limit_s=0.0)
        self.groups.cross = cross
        self.link = Link(cross, self.job.train, self.device) if cross else None
        for unit in self._units:
            unit.out = None

    def close(self) -> None:
        """Release the model: a cycle through a hook of a parameter is never collected, and it holds the groups."""
        for hook in self._hooks:
            hook.remove()
        if self.link:
            self.link.close()

    @property
    def trace(self) -> list[BucketTrace]:
        """Return when the buckets of this step were sent and summed."""
        return self.link.trace if self.link else []

    # -- one step ---------------------------------------------------------------------------------

    def sum_counts(self, count: Tensor) -> Tensor:
        """Sum an integer over every rank that sees different samples. If the replicas are cut off from each other
        meanwhile, only some ranks of a replica may have the sum: those tell the others."""
        if self.groups.shard.size() > 1:
            dist.all_reduce(count, group=self.groups.shard)
        if link := self.link:
            link.guard(lambda: link.cross.sum_(count))
            if link.error:
                count.zero_()
            if dist.get_world_size() > 1:
                dist.all_reduce(count, dist.ReduceOp.MAX)
            if bool(count <= 0):
                raise StepFailed(f"the reduction across replicas failed before the step: {link.error}")
        return count[0]

    def start(self, dealt: Deal) -> None:
        """Prepare for the passes over this replica's part of the deal."""
        if not dealt.redo:
            self.drop()
        assert dealt.held[self.coord.replica] == self.held, (dealt, self.held)
        self.deal, self._nodes = dealt, {}
        self.indices = self.job.micro_indices(self.coord, dealt.todo[self.coord.replica])
        if self.link:
            self.link.trace.clear()

    def begin(self, micro: int) -> None:
        """Note that the backward of this micro-batch is next; each stage's come in order."""
        self._micro = micro

    @property
    def last(self) -> bool:
        return self._micro == len(self.indices) - 1

    def clear(self, model: nn.Module) -> None:
        """Clear what FSDP2 has left after a backward that is not the pass's last: it has been taken."""
        for param in self._sharded.get(model, []):
            param.grad = None

    def end_pass(self) -> None:
        """Note where FSDP2 has put each gradient in its unit's, and drop what it has left at the parameters."""
        for param in (p for params in self._sharded.values() for p in params):
            if isinstance(param.grad, DTensor):
                local, param.grad = param.grad.to_local(), None
                place = Place(tuple(local.shape), local.stride(), local.storage_offset())
                self._unit_of[param].places[param] = place
        self.held = self.deal.whole(self.coord.replica)

    def reduce_kept(self) -> None:
        """Sum the kept gradients over the replicas, without overlap and in the order of the units: a replica that has
        nothing to compute has no order of its own, and all must cut the same buckets."""
        for unit in self._units:
            if unit.kept:
                self._reduce(unit, feedback=False)

    def finish(self) -> None:
        """Wait for the sums. `agree` tells whether all of them arrived."""
        if self.deal.redo:
            self.reduce_kept()
        if self.link:
            self.link.flush(feedback=not self.deal.redo)
            for unit, total in self.link.wait():
                unit.out = total
        for unit in self._units:
            if unit.out is not None:
                self.device.hold(unit.out)
        if not any(unit.kept for unit in self._units):
            self.held = ()

    def sum_loads(self, loads: Tensor) -> Tensor:
        """Sum integers over all ranks of the stage in all replicas, while no bucket is in flight."""
        assert self.groups.experts is not None
        for axis in ("edp", "ep"):
            dist.all_reduce(loads, group=self.groups.experts.get_group(axis))
        if link := self.link:
            link.guard(lambda: link.cross.sum_(loads.view(-1)))
        return loads

    def agree(self) -> None:
        """Raise StepFailed on all ranks of this replica if one of them lacks sums: they may have received different
        ones."""
        if not self.link:
            return
        error = self.link.error
        failed = torch.tensor([int(error is not None)], device=self.device.torch)
        if dist.get_world_size() > 1:
            dist.all_reduce(failed, dist.ReduceOp.MAX)
        if bool(failed > 0):
            raise StepFailed(f"the reduction across replicas failed: {error or 'at a peer'}") from error

    def take(self) -> dict[nn.Parameter, Tensor]:
        """Return the final gradients, in the precision of the master weights unless there was nothing to add. They are
        views of the sums over all replicas, or as autograd has left them. Parameters without one are left out."""
        out: dict[nn.Parameter, Tensor] = {}
        for param, unit in self._unit_of.items():
            grad, param.grad = param.grad, None
            if unit.out is not None and param in unit.places:
                out[param] = unit.places[param].view(unit.out)
            elif grad is not None:
                out[param] = grad
        return out

    def commit(self) -> None:
        """End a step that counts and whose gradients were applied."""
        if self.groups.cross:
            self.groups.cross.commit()
        self.drop()

    def skip(self) -> None:
        """End a step that counts but whose gradients were not applied: none of its rounding errors are carried over."""
        if self.groups.cross:
            self.groups.cross.forget()
        self.drop()

    def drop(self) -> None:
        """Forget what was computed in this step."""
        for unit in self._units:
            unit.tree, unit.kept, unit.out = TreeSum(), [], None
        for param in self._unit_of:
            param.grad = None
        self.held = ()

    # -- called in backward -----------------------------------------------------------------------

    def _reduced(self, unit: _Unit, flat: Tensor) -> None:
        """Take in a unit's gradient, reduced over the shard axis: of one micro-batch, or of all with ZeRO-1."""
        if self.exact:
            if not unit.scattered:  # there is no reduce-scatter in a group of one
                self.device.hold(flat)
                unit.tree.push((0, self.indices[self._micro]), flat)
                self.note_pending()
            if self.last:
                unit.kept = merge(unit.kept + unit.tree.take()).take()
        else:
            for _, before in unit.kept:
                self.device.hold(before)
                flat.add_(before)
            unit.kept = [(WHOLE, flat)]
        if self.last and not self.deal.redo:
            self._reduce(unit, feedback=True)

    def _arrived(self, unit: _Unit, param: nn.Parameter) -> None:
        unit.arrived += not self.held_back
        if unit.arrived == len(unit.places):
            self._complete(unit)

    def complete(self, params: Iterable[nn.Parameter]) -> None:
        """Take in gradients that were held back and are complete now."""
        for unit in reversed(list(dict.fromkeys(self._unit_of[p] for p in params))):
            self._complete(unit)

    def _complete(self, unit: _Unit) -> None:
        unit.arrived = 0
        if self.job.layout.replica == 1 and (
            len(self.indices) == 1 or (not self.exact and next(iter(unit.places)).dtype == self._dtype)
        ):
            return  # nothing is added to them, or autograd adds up the micro-batches by itself in this precision
        grads = [cast(Tensor, p.grad) for p in unit.places]
        for param in unit.places:
            param.grad = None
        if self.exact or not unit.kept:
            flat = torch.empty(sum(g.numel() for g in grads), dtype=self._dtype, device=grads[0].device)
            torch._foreach_copy_(unit.views(flat), grads)
        else:  # in one pass, and rounded once
            ((_, flat),), unit.kept = unit.kept, []
            torch._foreach_add_(unit.views(flat), grads)
        self._reduced(unit, flat)

    def note_pending(self) -> None:
        self.peak_pending_bytes = max(self.peak_pending_bytes, sum(u.tree.size_bytes for u in self._units))

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of the sums that are kept until the commit, besides those over all replicas."""
        return sum(size_bytes(part) for unit in self._units for _, part in unit.kept)

    def _reduce(self, unit: _Unit, feedback: bool) -> None:
        parts = unit.kept
        if self.link:
            nodes = self._brought(unit.leaves) if self.exact else []
            self.link.add(unit, parts, unit.slices, nodes, feedback)
        else:
            unit.out = fold(parts)
        if not self.link or not self.job.recovery.on:  # nobody will need them again
            unit.kept = []

    def _brought(self, leaves: int) -> Nodes:
        """Return the tree nodes that each replica holds at the end of the step."""
        if leaves not in self._nodes:
            shares = [self.deal.whole(replica) for replica in self.deal.replicas]
            self._nodes[leaves] = [cover(i * leaves + j for i in share for j in range(leaves)) for share in shares]
        return self._nodes[leaves]

    def brought_by_shards(self) -> Nodes:
        """Return the same for the shard ranks of this replica at the end of a pass that reduces once."""
        if 0 not in self._nodes:
            todo, ranks = self.deal.todo[self.coord.replica], range(self.job.layout.shard)
            shares = [self.job.micro_indices(replace(self.coord, shard=s), todo) for s in ranks]
            self._nodes[0] = [cover(share) for share in shares]
        return self._nodes[0]


def _slices(module: FSDPModule, names: dict[int, str]) -> Slices:
    """List the parameters of an FSDP2 module, in the order of its flat gradient."""
    group = module._get_fsdp_state()._fsdp_param_group
    out = []
    for param in group.fsdp_params if group else ():
        name = f"{names[id(param._module_info.module)]}.{param._module_info.param_name}"
        out.append((param.padded_sharded_param_size.numel(), travels_whole(name, tuple(param._orig_size))))
    return out


class _TreeReduceScatter:
    """FSDP2's reduce-scatter, in tree order. With ZeRO-1 unsharded leaves are kept and exchanged
    once per step; otherwise every micro-batch is exchanged and only slices are kept."""

    def __init__(self, reducer: Reducer, unit: _Unit):
        self.reducer, self.unit = reducer, unit

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        reducer, tree, width = self.reducer, self.unit.tree, group.size()
        assert op == dist.ReduceOp.SUM, op
        leaves = self.unit.leaves = width // reducer.job.layout.shard
        self.unit.scattered = True
        mine = reducer.indices[reducer._micro] * leaves + group.rank() % leaves
        reducer.device.hold(input_tensor)
        if reducer.every_micro:
            first = mine - group.rank()
            brought = [[(0, first + s)] for s in range(width)]
            for node, part in self._exchange([((0, mine), input_tensor)], brought, group).take():
                tree.push(node, part)
            if not reducer.last:
                tree.compact()
        else:
            tree.push((0, mine), input_tensor)
            if reducer.last:
                self.unit.tree = self._exchange(tree.take(), reducer.brought_by_shards(), group)
        reducer.note_pending()  # nobody writes output_tensor: the gradients are views of the sum over all replicas

    def _exchange(self, parts: list[Part], brought: Nodes, group: Any) -> TreeSum:
        way = way_over(self.reducer.groups.tiers, group, "sum", parts[0][1])
        if way is None:
            return exchange(parts, brought, group)
        return way.tree([(node, way.sorted_in(t)) for node, t in parts], brought)
