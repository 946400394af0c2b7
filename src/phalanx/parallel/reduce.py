"""From the gradients of a backward to their sum over all micro-batches and replicas, unit by unit.

FSDP2 calls the hook of each module as its backward ends, with that module's gradient reduced over
the shard axis; where a rank holds all parameters there is no FSDP2, and a unit is complete when autograd has left the
gradient of its last parameter. The reducer accumulates over micro-batches itself (FSDP2's own accumulation has no
place for a fixed order), fills buckets during the last backward, and sends each full bucket across
the replicas from a thread of its own while the backward goes on. A failed exchange is recorded, not
raised: the shard peers of this rank are inside collectives of their own and must get through them.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from phalanx.core.held import travels_whole
from phalanx.core.job import Job
from phalanx.core.layout import Coord
from phalanx.parallel.device import Device
from phalanx.parallel.groups import Groups
from phalanx.parallel.shard import MASTER_DTYPE
from phalanx.parallel.tiers import way_over
from phalanx.parallel.tree import Node, TreeSum, exchange, fold, span

CLOSE_LIMIT_S = 0.5


class StepFailed(RuntimeError):
    """The gradients of this step are not usable; throw the engine away and redo the step."""


@dataclass(slots=True, eq=False)
class _Unit:
    """Parameters that are gathered and reduced together, and their accumulated gradient. A micro-batch is one leaf of
    the exact sum, or several when ranks that share it (cp, and tp for experts) are added up by FSDP2."""

    params: list[nn.Parameter] = field(default_factory=list)
    slices: list[tuple[int, bool]] = field(default_factory=list)  # of those: elements, padded; if they travel whole
    arrived: int = 0  # gradients in this backward, without FSDP2
    leaves: int = 1
    scattered: bool = False
    tree: TreeSum = field(default_factory=TreeSum)  # exact
    total: Tensor | None = None  # fast
    flat: Tensor | None = None  # the sum over everything, at the step's end

    def views(self, flat: Tensor) -> list[Tensor]:
        parts = flat.split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]


@dataclass(slots=True)
class BucketTrace:
    size_bytes: int
    issued_ns: int  # handed to the thread
    started_ns: int = 0  # its first collective called
    done_ns: int = 0


class Reducer:
    def __init__(self, job: Job, coord: Coord, groups: Groups, device: Device):
        self.job, self.coord, self.groups, self.device = job, coord, groups, device
        self.exact = job.train.reduction == "exact"
        self.every_micro = not job.reduces_once
        self.indices = job.micro_indices(coord)
        self.trace: list[BucketTrace] = []
        self.peak_pending_bytes = 0
        self._units: list[_Unit] = []
        self._unit_of: dict[nn.Parameter, _Unit] = {}
        self._sharded: dict[nn.Module, list[nn.Parameter]] = {}  # by model; at times FSDP2 has others in their place
        self._dtype = MASTER_DTYPE[job.train.precision]
        # Nothing to add to a gradient: it stays where autograd has put it.
        self._single = len(self.indices) == 1 and groups.cross is None
        self.held_back = False  # gradients are not complete when they arrive
        self._micro = 0
        self._bucket: list[tuple[Tensor, list[tuple[Node, Tensor]]]] = []
        self._slices: list[list[tuple[int, bool]]] = []  # of what is in the bucket
        self._bucket_leaves = 1
        self._flying: list[Future[None]] = []
        self._error: BaseException | None = None
        self._stream = device.new_stream()
        self._thread = ThreadPoolExecutor(1, "cross-replica") if groups.cross else None

    def attach(self, parts: list[nn.Module]) -> None:
        """The model, its units and its experts: a parameter belongs to the last part that has it."""
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
            unit.params.append(param)
            if not isinstance(param, DTensor):
                unit.slices.append((param.numel(), travels_whole(names[param], tuple(param.shape))))
                param.register_post_accumulate_grad_hook(partial(self._arrived, unit))
        self._unit_of |= owner
        self._sharded[parts[0]] = [p for p in owner if isinstance(p, DTensor)]

    def close(self) -> None:
        """Does not wait for a peer that is silent: what its bucket still writes to is ours no more."""
        if self._thread:
            self._thread.shutdown(wait=False, cancel_futures=True)
            wait(self._flying, timeout=CLOSE_LIMIT_S)

    # -- one step ---------------------------------------------------------------------------------

    def begin(self, micro: int) -> None:
        """The backward of this micro-batch is next; each stage's come in order."""
        self._micro = micro

    @property
    def last(self) -> bool:
        return self._micro == len(self.indices) - 1

    def sum_counts(self, count: Tensor) -> Tensor:
        """An integer summed over every rank that sees different samples. Opens the step."""
        self.trace.clear()
        if self.groups.shard.size() > 1:
            dist.all_reduce(count, group=self.groups.shard)
        if cross := self.groups.cross:
            self._guard(lambda: cross.sum_(count))
        return count[0]

    def sum_loads(self, loads: Tensor) -> Tensor:
        """Integers summed over all ranks of the stage in all replicas, when no bucket is under way."""
        assert self.groups.experts is not None and not self._flying
        for axis in ("edp", "ep"):
            dist.all_reduce(loads, group=self.groups.experts.get_group(axis))
        if cross := self.groups.cross:
            self._guard(lambda: cross.sum_(loads.view(-1)))
            self._raise()
        return loads

    def finish(self) -> None:
        """Wait until every gradient is final."""
        self._send_bucket()
        for flight in self._flying:
            flight.result()
        self._flying.clear()
        if self._stream is not None:
            self.device.wait(None, self._stream.record_event())
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise StepFailed(f"the reduction across replicas failed: {self._error}") from self._error

    def clear(self, model: nn.Module) -> None:
        """After a backward that is not the step's last: what FSDP2 has left has been taken."""
        for param in self._sharded.get(model, []):
            param.grad = None

    def take(self) -> dict[nn.Parameter, Tensor]:
        """The final gradients, in the precision of the master weights unless there was nothing to add. A parameter
        that has got none is left out."""
        out: dict[nn.Parameter, Tensor] = {}
        for unit in self._units:
            flat, unit.flat = unit.flat, None
            for param in unit.params:
                grad, param.grad = param.grad, None
                if isinstance(grad, DTensor):
                    out[param] = grad = grad.to_local()
                    if flat is not None and flat.dtype != grad.dtype:  # FSDP2 has rounded its own
                        out[param] = flat.as_strided(grad.shape, grad.stride(), grad.storage_offset())
                elif grad is not None:
                    out[param] = grad
            if flat is not None and not any(isinstance(p, DTensor) for p in unit.params):
                out |= zip(unit.params, unit.views(flat), strict=True)
        return out

    # -- called in backward -----------------------------------------------------------------------

    def _reduced(self, unit: _Unit, flat: Tensor) -> None:
        """`flat`: of one micro-batch, reduced over the shard axis."""
        if self.last:
            unit.flat = flat
        if self.exact:
            if not unit.scattered:  # there is no reduce-scatter in a group of one
                self.device.hold(flat)
                unit.tree.push((0, self.indices[self._micro]), flat)
                self.note_pending()
            if self.last:
                self._add_to_bucket(flat, unit.tree.take(), unit.leaves, unit.slices)
            return
        if unit.total is not None:
            self.device.hold(unit.total)
            flat.add_(unit.total)
        unit.total = None if self.last else flat
        if self.last and self.groups.cross:
            self._add_to_bucket(flat, [], 1, unit.slices)

    def _arrived(self, unit: _Unit, param: nn.Parameter) -> None:
        unit.arrived += not self.held_back
        if unit.arrived == len(unit.params):
            self._complete(unit)

    def complete(self, params: Iterable[nn.Parameter]) -> None:
        """The gradients of these have been put together by hand, after they were held back."""
        for unit in reversed(list(dict.fromkeys(self._unit_of[p] for p in params))):
            self._complete(unit)

    def _complete(self, unit: _Unit) -> None:
        unit.arrived = 0
        if self._single or (not self.exact and self.groups.cross is None and unit.params[0].dtype == self._dtype):
            return  # autograd adds up the micro-batches by itself, in this precision
        grads = [cast(Tensor, p.grad) for p in unit.params]
        for param in unit.params:
            param.grad = None
        if self.exact or unit.total is None:
            flat = torch.empty(sum(g.numel() for g in grads), dtype=self._dtype, device=grads[0].device)
            torch._foreach_copy_(unit.views(flat), grads)
        else:  # in one pass, and rounded once
            flat, unit.total = unit.total, None
            torch._foreach_add_(unit.views(flat), grads)
        self._reduced(unit, flat)

    def note_pending(self) -> None:
        self.peak_pending_bytes = max(self.peak_pending_bytes, sum(u.tree.size_bytes for u in self._units))

    # -- across replicas --------------------------------------------------------------------------

    def _add_to_bucket(
        self, flat: Tensor, parts: list[tuple[Node, Tensor]], leaves: int, slices: list[tuple[int, bool]]
    ) -> None:
        for _, part in parts:
            self.device.hold(part, self._stream if self.groups.cross else None)
        if not self.groups.cross:
            total = fold(parts)
            if total.data_ptr() != flat.data_ptr():
                flat.copy_(total)
            return
        if leaves != self._bucket_leaves:
            self._send_bucket()
        self._bucket_leaves = leaves
        self._bucket.append((flat, parts))
        self._slices.append(slices)
        if sum(f.numel() * f.element_size() for f, _ in self._bucket) >= self.job.train.bucket_mb * 1e6:
            self._send_bucket()

    def _send_bucket(self) -> None:
        if not self._bucket or not self._thread:
            return
        bucket, self._bucket, leaves = self._bucket, [], self._bucket_leaves
        slices, self._slices = self._slices, []
        trace = BucketTrace(sum(f.numel() * f.element_size() for f, _ in bucket), time.perf_counter_ns())
        slot = len(self.trace)
        self.trace.append(trace)
        ready = self.device.mark()

        def run() -> None:
            with self.device.on(self._stream):
                self.device.wait(self._stream, ready)
                trace.started_ns = time.perf_counter_ns()
                self._guard(lambda: self._reduce_bucket(bucket, slices, slot, leaves))
            trace.done_ns = time.perf_counter_ns()

        self._flying.append(self._thread.submit(run))

    def _reduce_bucket(
        self,
        bucket: list[tuple[Tensor, list[tuple[Node, Tensor]]]],
        slices: list[list[tuple[int, bool]]],
        slot: int,
        leaves: int,
    ) -> None:
        cross, flats = self.groups.cross, [flat for flat, _ in bucket]
        assert cross is not None
        if self.job.train.compress != "none":  # never with the exact reduction
            parts = [part for flat, of in zip(flats, slices, strict=True) for part in _cut(flat, of)]
            cross.sum_parts_(parts, self.job.train.compress, slot)
            return
        if self.exact:
            nodes = [node for node, _ in bucket[0][1]]
            joined = [(node, torch.cat([p[k][1] for _, p in bucket])) for k, node in enumerate(nodes)]
            share = leaves * self.job.num_micro // self.job.layout.replica
            ranges = [(r * share, (r + 1) * share) for r in range(self.job.layout.replica)]
            total = cross.tree_sum(joined, ranges)
        else:
            total = flats[0] if len(flats) == 1 else torch.cat(flats)
            cross.sum_(total)
        if total.data_ptr() != flats[0].data_ptr() or len(flats) > 1:
            for flat, part in zip(flats, total.split([f.numel() for f in flats]), strict=True):
                flat.copy_(part)

    def _guard(self, work: Callable[[], Any]) -> None:
        if self._error is not None:
            return
        try:
            work()
        except RuntimeError as error:  # what torch raises when a peer is gone
            self._error = error
            traceback.clear_frames(error.__traceback__)  # they hold the group, and so its sockets
            if self.groups.cross:
                self.groups.cross.close()  # so that peers waiting for us fail at once


def _slices(module: FSDPModule, names: dict[int, str]) -> list[tuple[int, bool]]:
    """Of the parameters of an FSDP2 module, in the order of its flat gradient."""
    group = module._get_fsdp_state()._fsdp_param_group
    out = []
    for param in group.fsdp_params if group else ():
        name = f"{names[id(param._module_info.module)]}.{param._module_info.param_name}"
        out.append((param.padded_sharded_param_size.numel(), travels_whole(name, tuple(param._orig_size))))
    return out


def _cut(flat: Tensor, slices: list[tuple[int, bool]]) -> list[tuple[Tensor, bool]]:
    """Into parameters. If one has no gradient, the places of the others are not known, and all travel whole."""
    if sum(size for size, _ in slices) != flat.numel():
        return [(flat, True)]
    parts = flat.split([size for size, _ in slices])
    return [(part, whole) for part, (_, whole) in zip(parts, slices, strict=True) if part.numel()]


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
            ranges = [(first + s, first + s + 1) for s in range(width)]
            for node, part in self._exchange([((0, mine), input_tensor)], ranges, group).take():
                tree.push(node, part)
            if not reducer.last:
                tree.compact()
        else:
            tree.push((0, mine), input_tensor)
            if reducer.last:
                n = len(reducer.indices)
                start = reducer.indices[0] - reducer.coord.shard * n
                ranges = [(start + s * n, start + (s + 1) * n) for s in range(width)]
                self.unit.tree = self._exchange(tree.take(), ranges, group)
        reducer.note_pending()  # output_tensor is written by the hook, once the sum is whole

    def _exchange(self, parts: list[tuple[Node, Tensor]], ranges: list[tuple[int, int]], group: Any) -> TreeSum:
        way = way_over(self.reducer.groups.tiers, group, "sum", parts[0][1])
        if way is None:
            return exchange(parts, [span(*r) for r in ranges], group)
        return way.tree([(node, way.sorted_in(t)) for node, t in parts], ranges)
