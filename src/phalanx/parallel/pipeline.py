"""The pipeline: when a rank runs which forward and backward, and what it sends to its neighbours. The orders of the
interleaved and zero-bubble schedules and the places of sends and receives come from torch.distributed.pipelining. We
execute them ourselves, so that every backward is an ordinary one for FSDP2 and the reducer, micro-batch by micro-batch,
and a step without a pipeline is the same loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _Action, _add_send_recv
from torch.distributed.pipelining.schedules import _ComputationType as Kind

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.parallel.device import Device

TORCH_NAME = {"interleaved": "Interleaved1F1B", "interleaved-zb": "InterleavedZeroBubble", "zbv": "ZBVZeroBubble"}


@cache
def order(layout: Layout, num_micro: int) -> dict[int, list[_Action]]:
    """Return every pipeline rank's forwards, backwards, sends and receives."""
    if layout.pp == 1:
        return {0: [a for m in range(num_micro) for a in _both(0, m)]}
    if layout.schedule in TORCH_NAME:
        compute = _of_torch(layout, num_micro)
    elif layout.schedule == "gpipe":
        kinds = (Kind.FORWARD, Kind.FULL_BACKWARD)
        compute = {r: [_Action(r, kind, m) for kind in kinds for m in range(num_micro)] for r in range(layout.pp)}
    else:
        compute = {r: _one_forward_one_backward(r, layout.pp, num_micro) for r in range(layout.pp)}
    return _add_send_recv(compute, layout.rank_of_stage, layout.num_stages)


@cache
def forward_order(layout: Layout, num_micro: int) -> dict[int, list[_Action]]:
    """Return the same for a pass without a backward: a rank's stages one after the other."""
    compute = {
        rank: [_Action(stage, Kind.FORWARD, m) for stage in sorted(layout.stages_of(rank)) for m in range(num_micro)]
        for rank in range(layout.pp)
    }
    return compute if layout.pp == 1 else _add_send_recv(compute, layout.rank_of_stage, layout.num_stages)


def receive_early(actions: list[_Action]) -> list[_Action]:
    """Move every receive before the work that precedes it. Gloo sends nothing before the receiver is ready, so the
    message then travels during that work."""
    out: list[_Action] = []
    work = None  # index in `out` of the latest work
    for action in actions:
        if action.computation_type in (Kind.RECV_F, Kind.RECV_B) and work is not None:
            out.insert(work, action)
            work += 1
        else:
            out.append(action)
            if action.is_compute_op:
                work = len(out) - 1
    return out


def _both(stage: int, micro: int) -> list[_Action]:
    return [_Action(stage, Kind.FORWARD, micro), _Action(stage, Kind.FULL_BACKWARD, micro)]


def _one_forward_one_backward(rank: int, pp: int, num_micro: int) -> list[_Action]:
    warm_up = min(pp - 1 - rank, num_micro)
    actions = [_Action(rank, Kind.FORWARD, m) for m in range(warm_up)]
    for m in range(num_micro):
        if m + warm_up < num_micro:
            actions.append(_Action(rank, Kind.FORWARD, m + warm_up))
        actions.append(_Action(rank, Kind.FULL_BACKWARD, m))
    return actions


def _of_torch(layout: Layout, num_micro: int) -> dict[int, list[_Action]]:
    """Take the order from torch, which computes the whole table from any rank's stages and reads only their numbers."""
    numbers = {"num_stages": layout.num_stages, "group_size": layout.pp, "group_rank": 0}
    stages = [SimpleNamespace(stage_index=s, has_backward=True, submod=None, **numbers) for s in layout.stages_of(0)]
    schedule = torch_schedules.get_schedule_class(TORCH_NAME[layout.schedule])(stages, num_micro, loss_fn=_no_loss)
    return {rank: [a for a in actions if a is not None] for rank, actions in schedule.pipeline_order.items()}


def _no_loss(*_: Any) -> None: ...


class Pipe:
    """Moves activations and their gradients between neighbouring stages. On Gloo a message finds its receiver by a tag
    and goes through host memory, since Gloo cannot send from an accelerator. NCCL matches messages by their order,
    which torch's table makes the same at both ends."""

    def __init__(self, layout: Layout, group: dist.ProcessGroup, device: Device, shape: Sequence[int], dtype: Any):
        self.layout, self.group, self.device = layout, group, device
        self.shape, self.dtype = tuple(shape), dtype
        self.on_gloo = device.backend == "gloo"
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._coming: dict[tuple[Kind, int, int], tuple[Any, Tensor]] = {}

    def send(self, kind: Kind, stage: int, micro: int, tensor: Tensor) -> None:
        """Start sending `tensor`; `kind` and `stage` are the receiver's."""
        if tensor.shape != self.shape:
            raise UserError(
                f"between stages goes {tuple(tensor.shape)}, where {self.shape} is expected",
                field="layout.pp",
                value=self.layout.pp,
                remedy="let Family.width give the last of these sizes: a stage gives (batch, sequence, width)",
            )
        tensor = tensor.detach().to(self.dtype).contiguous()
        if self.on_gloo:
            tensor = tensor.cpu()
        self._sent = [(w, t) for w, t in self._sent if not w.is_completed()]
        self._sent.append((self._start(dist.isend, kind, stage, micro, tensor, stage), tensor))

    def expect(self, kind: Kind, stage: int, micro: int) -> None:
        buffer = torch.empty(self.shape, dtype=self.dtype, device="cpu" if self.on_gloo else self.device.torch)
        source = stage - 1 if kind == Kind.RECV_F else stage + 1
        self._coming[kind, stage, micro] = self._start(dist.irecv, kind, stage, micro, buffer, source), buffer

    def take(self, kind: Kind, stage: int, micro: int) -> Tensor:
        work, buffer = self._coming.pop((kind, stage, micro))
        work.wait()
        return self.device.put(buffer) if self.on_gloo else buffer

    def finish(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _start(self, operation: Any, kind: Kind, stage: int, micro: int, tensor: Tensor, other_stage: int) -> dist.Work:
        peer = self.layout.rank_of_stage(other_stage)
        if self.on_gloo:
            tag = 2 * (micro * self.layout.num_stages + stage) + (kind == Kind.RECV_B)
            if operation is dist.isend:
                return dist.isend(tensor, group=self.group, tag=tag, group_dst=peer)
            return dist.irecv(tensor, group=self.group, tag=tag, group_src=peer)
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=self.group, group_peer=peer)])
        return work


class Stages:
    """Runs a rank's actions. `forward(stage, micro, x)` returns a stage's output, or the scaled loss of the last one.
    `backward(stage, micro, run, half)` calls `run`, which does the backward, and does the work around it; `half` is
    "both", "inputs" or "weights" (then there is nothing to run)."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        pipe: Pipe,
        forward: Callable[[int, int, Tensor | None], Tensor],
        backward: Callable[[int, int, Callable[[], None], str], None],
    ):
        self.layout, self.rank, self.pipe = layout, rank, pipe
        self._forward, self._backward = forward, backward
        self.running: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}  # input and output
        self.inputs: dict[tuple[int, int], Tensor] = {}  # from a stage on this rank
        self.grads: dict[tuple[int, int], Tensor] = {}

    def run(self, num_micro: int, *, backward: bool = True) -> None:
        last = self.layout.num_stages - 1
        actions = (order if backward else forward_order)(self.layout, num_micro)[self.rank]
        for action in receive_early(actions) if self.pipe.on_gloo else actions:
            stage, kind, micro = action.stage_index, action.computation_type, action.microbatch_index
            assert micro is not None
            if kind == Kind.FORWARD:
                x = None if stage == 0 else self._take(self.inputs, Kind.RECV_F, stage, micro).requires_grad_()
                out = self._forward(stage, micro, x)
                self.running[stage, micro] = x, out
                if stage < last and self._is_here(stage + 1):
                    self.inputs[stage + 1, micro] = out.detach()
            elif kind in (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT):
                self._back(stage, micro, "both" if kind == Kind.FULL_BACKWARD else "inputs")
            elif kind == Kind.BACKWARD_WEIGHT:
                self._backward(stage, micro, _nothing, "weights")
            elif kind in (Kind.RECV_F, Kind.RECV_B):
                self.pipe.expect(kind, stage, micro)
            elif kind == Kind.SEND_F:
                self.pipe.send(Kind.RECV_F, stage + 1, micro, self.running[stage, micro][1])
            else:
                assert kind == Kind.SEND_B, action
                self.pipe.send(Kind.RECV_B, stage - 1, micro, self.grads.pop((stage - 1, micro)))
        self.pipe.finish()
        if not backward:
            self.running.clear()
        assert not (self.running or self.inputs or self.grads), "the schedule left something over"

    def _back(self, stage: int, micro: int, half: str) -> None:
        last = self.layout.num_stages - 1
        grad = None if stage == last else self._take(self.grads, Kind.RECV_B, stage, micro)
        x, out = self.running.pop((stage, micro))
        self._backward(stage, micro, lambda: torch.autograd.backward(out, grad), half)
        if x is not None:
            assert x.grad is not None
            self.grads[stage - 1, micro] = x.grad

    def _take(self, local: dict[tuple[int, int], Tensor], kind: Kind, stage: int, micro: int) -> Tensor:
        source = stage - 1 if kind == Kind.RECV_F else stage + 1
        if self._is_here(source):
            return local.pop((stage, micro))
        return self.pipe.take(kind, stage, micro)

    def _is_here(self, stage: int) -> bool:
        return self.layout.rank_of_stage(stage) == self.rank


def _nothing() -> None: ...
