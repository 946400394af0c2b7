"""Context parallelism: every sequence is split over the cp ranks, and attention alone notices.

Ring: keys and values go round, each rank attends to one block after the other and merges the results
by their log-sum-exp; the next block travels while the current one is worked on. A rank holds one piece
from the front and its mirror from the back, so that a causal mask gives all the same work, and of the
blocks that a causal mask cuts in half only the visible half is computed.

Ulysses: an all-to-all exchanges positions for heads, each rank attends over the whole sequence with
some of the heads, and a second one brings them back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.model.attention import Attend, visible
from phalanx.model.family import Batch
from phalanx.parallel.block import attend_backward, attend_block, merge
from phalanx.parallel.collectives import Shift, swap_dims


def local_positions(layout: Layout, seq_len: int, cp: int) -> Tensor:
    """Where in the sequence the tokens of cp rank `cp` stand, in its order."""
    if layout.cp_style == "ulysses":
        return torch.arange(seq_len).chunk(layout.cp)[cp]
    pieces = torch.arange(seq_len).chunk(2 * layout.cp)
    return torch.cat((pieces[cp], pieces[-1 - cp]))


def cut_batch(batch: Batch, layout: Layout, seq_len: int, cp: int) -> Batch:
    """What this cp rank works on. Documents stay whole: a few integers that save messages."""
    if layout.cp == 1:
        return batch
    at = local_positions(layout, seq_len, cp)
    tokens, targets, weights = (t[:, at] for t in (batch.tokens_BL, batch.targets_BL, batch.weights_BL))
    return Batch(tokens, targets, weights, batch.documents_BL, at)


def apply_context_parallel(model: nn.Module, layout: Layout, group: dist.ProcessGroup) -> None:
    if layout.cp == 1:
        return
    found = [m for m in model.modules() if isinstance(m, Attend)]
    if not found and any(True for _ in model.parameters()):
        raise UserError(
            "the model has no phalanx.Attend module, so nothing says where it attends",
            field="layout.cp",
            value=layout.cp,
            remedy="call phalanx.Attend for the attention, or set layout.cp = 1",
        )
    for module in found:
        module.__class__ = RingAttend if layout.cp_style == "ring" else UlyssesAttend
        module.layout, module.group = layout, group


class UlyssesAttend(Attend):
    layout: Layout
    group: dist.ProcessGroup

    def forward(self, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, batch: Batch) -> Tensor:
        width, heads = self.group.size(), q_BHLE.shape[1]
        if heads % width:
            raise UserError(
                f"a rank has {heads} heads, which cannot be dealt out evenly to {width} cp ranks",
                field="layout.cp",
                value=width,
                remedy='choose layout.cp as a divisor of the heads of a rank, or set layout.cp_style = "ring"',
            )
        if k_BKLE.shape[1] % width:  # too few key/value heads to give each rank its own
            k_BKLE, v_BKLE = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (k_BKLE, v_BKLE))
        q, k, v = (_Swap.apply(t, 1, 2, self.group) for t in (q_BHLE, k_BKLE, v_BKLE))
        return _Swap.apply(super().forward(q, k, v, batch), 2, 1, self.group)


class _Swap(torch.autograd.Function):
    """Give away parts of dim `cut` for the others' parts of dim `joined`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: int, joined: int, group: dist.ProcessGroup) -> Tensor:
        ctx.cut, ctx.joined, ctx.group = cut, joined, group
        return swap_dims(x, cut, joined, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return swap_dims(grad, ctx.joined, ctx.cut, ctx.group), None, None, None


class RingAttend(Attend):
    layout: Layout
    group: dist.ProcessGroup

    def forward(self, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, batch: Batch) -> Tensor:
        return _Ring.apply(q_BHLE, k_BKLE, v_BKLE, self._blocks(batch), self.group)

    def prepare(self, batch: Batch) -> None:
        self._blocks(batch)

    def _blocks(self, batch: Batch) -> list[_Block]:
        """By how far the keys have come round the ring: what of it to compute, and the mask."""
        key = ("ring", self.causal)
        if key not in batch.cache:
            me, width = self.group.rank(), self.group.size()
            batch.cache[key] = [self._block(batch, me, (me - hop) % width) for hop in range(width)]
        return batch.cache[key]

    def _block(self, batch: Batch, me: int, source: int) -> _Block:
        positions = batch.positions()
        half = positions.shape[0] // 2
        q, k = slice(None), slice(None)
        if self.causal and source < me:
            k = slice(0, half)  # its front piece lies before both of ours, its back piece after them
        elif self.causal and source > me:
            q = slice(half, None)  # our back piece lies after both of its, our front piece before them
        causal = self.causal and source == me
        if batch.documents_BL is None and not causal:
            return _Block(q, k, None, False)
        if batch.documents_BL is None and me == source:
            return _Block(q, k, None, True)  # a rank's own positions are in order
        length = positions.shape[0] * self.group.size()
        theirs = local_positions(self.layout, length, source).to(positions.device)
        documents = batch.documents_BL
        assert documents is not None
        mask = visible(positions[q], theirs[k], documents[:, positions[q]], documents[:, theirs[k]], causal)
        return _Block(q, k, mask, False)


class _Block:
    """Which queries and keys of a pair of ranks' see each other."""

    __slots__ = ("causal", "keys", "mask", "queries")

    def __init__(self, queries: slice, keys: slice, mask: Tensor | None, causal: bool):
        self.queries, self.keys, self.mask, self.causal = queries, keys, mask, causal


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: list[_Block], group: dist.ProcessGroup) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:-1], float("-inf"), dtype=wide, device=q.device)
        held = torch.stack((k, v))
        for hop, b in enumerate(blocks):
            coming = Shift(held, group) if hop < len(blocks) - 1 else None
            keys, values = held[0][:, :, b.keys], held[1][:, :, b.keys]
            part, part_lse = attend_block(q[:, :, b.queries], keys, values, b.mask, b.causal)
            merge(out[:, :, b.queries], lse[:, :, b.queries], part, part_lse)
            held = coming.wait() if coming else held
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.blocks, ctx.group = blocks, group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        blocks, group = ctx.blocks, ctx.group
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        held, sums = torch.stack((k, v)), None  # the gradients of a block travel behind it
        for hop, b in enumerate(blocks):
            coming = Shift(held, group) if hop < len(blocks) - 1 else None
            sums_coming = Shift(sums, group) if sums is not None else None
            keys, values = held[0][:, :, b.keys], held[1][:, :, b.keys]
            parts = [t[:, :, b.queries] for t in (grad, q, out, lse)]
            dq_part, dk, dv = attend_backward(parts[0], parts[1], keys, values, parts[2], parts[3], b.mask, b.causal)
            dq[:, :, b.queries] += dq_part
            sums = sums_coming.wait() if sums_coming else torch.zeros(held.shape, dtype=lse.dtype, device=q.device)
            sums[0][:, :, b.keys] += dk
            sums[1][:, :, b.keys] += dv
            held = coming.wait() if coming else held
        dk, dv = Shift(sums, group).wait()  # home
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None
