"""Context parallelism: every sequence is split over the cp ranks, and attention alone notices.

Ring: keys and values travel round the ranks. Each rank attends to one block after the other and merges the results by
their log-sum-exp; the next block travels while the current one is worked on. A rank holds one piece from the front and
its mirror from the back, so that a causal mask gives all the same work. Nothing is masked: only queries and keys that
see each other are brought together, which the host knows from the documents. Windows and softcaps have no kernels that
return a log-sum-exp, so they use the formulas, some queries at a time.

Ulysses: an all-to-all exchanges positions for heads, each rank attends over the whole sequence with some of the heads,
and a second all-to-all brings them back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.core.layout import Layout
from phalanx.model.attention import Attend, document_offsets
from phalanx.model.family import Batch
from phalanx.parallel.block import (
    Bend,
    Offsets,
    attend_backward,
    attend_block,
    attend_documents,
    attend_documents_backward,
    merge,
)
from phalanx.parallel.collectives import Shift, swap_dims

BENT_QUERIES = 1024  # at a time: their scores are materialized


def local_positions(layout: Layout, seq_len: int, cp: int) -> Tensor:
    """Return the positions in the sequence of cp rank `cp`'s tokens, in that rank's order."""
    if layout.cp_style == "ulysses":
        return torch.arange(seq_len).chunk(layout.cp)[cp]
    pieces = torch.arange(seq_len).chunk(2 * layout.cp)
    return torch.cat((pieces[cp], pieces[-1 - cp]))


def cut_batch(batch: Batch, layout: Layout, seq_len: int, cp: int) -> Batch:
    """Return this cp rank's part of the batch. Documents stay whole: a few integers that save messages."""
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

    def whole_length(self, length: int) -> int:
        return length * self.group.size()


class _Swap(torch.autograd.Function):
    """Exchanges parts of dim `cut` for the other ranks' parts of dim `joined`."""

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

    @torch.compiler.disable  # it would recompile for every place at which a document may end
    def forward(self, q_BHLE: Tensor, k_BKLE: Tensor, v_BKLE: Tensor, batch: Batch) -> Tensor:
        if k_BKLE.shape != v_BKLE.shape:  # they go round in one message
            raise UserError(
                f"keys are {k_BKLE.shape[-1]} wide and values {v_BKLE.shape[-1]}; the ring takes equal widths only",
                field="layout.cp_style",
                value="ring",
                remedy='set layout.cp_style = "ulysses"',
            )
        return _Ring.apply(q_BHLE, k_BKLE, v_BKLE, self._tiles(batch, batch.documents_BL), self.group)

    def prepare(self, batch: Batch, documents_BL: Tensor | None, put: Callable[[Tensor], Tensor]) -> None:
        self._tiles(batch, documents_BL, put)

    def _tiles(
        self, batch: Batch, documents_BL: Tensor | None, put: Callable[[Tensor], Tensor] = lambda t: t
    ) -> list[list[_Tile]]:
        """Return which queries meet which keys, by how many ranks the keys have moved round the ring."""
        key = ("ring", *self.kind)
        if key not in batch.cache:
            me, width = self.group.rank(), self.group.size()
            length = width * batch.positions().shape[0]
            places = [local_positions(self.layout, length, rank) for rank in range(width)]
            batch.cache[key] = [self._block(documents_BL, places, me, (me - hop) % width, put) for hop in range(width)]
        return batch.cache[key]

    def _block(
        self,
        documents_BL: Tensor | None,
        places: list[Tensor],
        me: int,
        source: int,
        put: Callable[[Tensor], Tensor],
    ) -> list[_Tile]:
        """Return the tiles of queries here and the keys of rank `source` that they see."""
        window = self.window if self._hides(len(places) * len(places[me])) else 0
        if window or self.softcap:
            return list(self._bent(documents_BL, places[me], places[source], window))
        whole, half = len(places[me]), len(places[me]) // 2
        q, k = slice(0, whole), slice(0, whole)
        if self.causal and source < me:
            k = slice(0, half)  # its front piece lies before both of ours, its back piece after them
        elif self.causal and source > me:
            q = slice(half, whole)  # our back piece lies after both of its, our front piece before them
        own = source == me  # a rank's own positions are in order
        if documents_BL is None:
            return [_Tile(slice(None), q, k, self.causal and own)]
        ours_BQ, theirs_BK = documents_BL[:, places[me][q]], documents_BL[:, places[source][k]]
        if own and self.packed:
            starts = document_offsets(ours_BQ)
            longest = int(starts.diff().max())
            return [_Tile(slice(None), q, k, self.causal, (put(starts), longest))]
        return [
            _Tile(slice(row, row + 1), _within(q, mine), _within(k, theirs), self.causal and own)
            for row in range(len(documents_BL))
            for mine, theirs in _shared(ours_BQ[row], theirs_BK[row])
        ]

    def _bent(self, documents_BL: Tensor | None, ours: Tensor, theirs: Tensor, window: int) -> Iterator[_Tile]:
        """Yield the same for the formulas: neighbouring places, no more keys than are seen, and a few queries."""
        for (mine, q), (others, k) in product(_pieces(ours), _pieces(theirs)):
            rows = range(1 if documents_BL is None else len(documents_BL))
            for row in rows:
                shared = [(slice(0, len(mine)), slice(0, len(others)))]
                if documents_BL is not None:
                    shared = list(_shared(documents_BL[row, mine], documents_BL[row, others]))
                for queries, keys in shared:
                    for first in range(queries.start, queries.stop, BENT_QUERIES):
                        some = slice(first, min(first + BENT_QUERIES, queries.stop))
                        at, last, begin = int(mine[some.start]), int(mine[some.stop - 1]), int(others[0])
                        low = max(keys.start, at - window + 1 - begin) if window else keys.start
                        high = min(keys.stop, last + 1 - begin) if self.causal else keys.stop
                        if low < high:
                            bend = Bend(at - begin - low, window, self.softcap)
                            of = slice(None) if documents_BL is None else slice(row, row + 1)
                            seen = _within(k, slice(low, high))
                            yield _Tile(of, _within(q, some), seen, self.causal, bend=bend)


def _pieces(places: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """Yield the two pieces of a rank and where they lie in its tokens. A piece is in order and has no gaps."""
    half = len(places) // 2
    for part in (slice(0, half), slice(half, len(places))):
        yield places[part], part


def _shared(ours_Q: Tensor, theirs_K: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield where each document that both have lies in the queries and in the keys. If the keys lie before the queries,
    there is one at most."""
    mine, theirs = _runs(ours_Q), _runs(theirs_K)
    for number in mine.keys() & theirs.keys():
        yield mine[number], theirs[number]


def _runs(documents_L: Tensor) -> dict[int, slice]:
    starts = document_offsets(documents_L[None]).tolist()
    numbers = documents_L[starts[:-1]].tolist()
    return {number: slice(*ends) for number, ends in zip(numbers, pairwise(starts), strict=True)}


def _within(outer: slice, inner: slice) -> slice:
    return slice(outer.start + inner.start, outer.start + inner.stop)


class _Tile(NamedTuple):
    """Queries and keys of a pair of ranks that see each other: a query sees all keys, or with `causal` those up to its
    own place; with `offsets` each document is separate."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool
    offsets: Offsets | None = None
    bend: Bend | None = None

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.rows, :, self.queries]

    def of_keys(self, x: Tensor) -> Tensor:
        return x[self.rows, :, self.keys]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, hops: list[list[_Tile]], group: dist.ProcessGroup) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:-1], float("-inf"), dtype=wide, device=q.device)
        held = torch.stack((k, v))
        for hop, tiles in enumerate(hops):
            coming = Shift(held, group) if hop < len(hops) - 1 else None
            for t in tiles:
                parts = t.of_queries(q), t.of_keys(held[0]), t.of_keys(held[1])
                if t.offsets:
                    part, part_lse = attend_documents(*parts, t.offsets, t.causal)
                else:
                    part, part_lse = attend_block(*parts, t.causal, t.bend)
                merge(t.of_queries(out), t.of_queries(lse), part, part_lse)
            held = coming.wait() if coming else held
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.hops, ctx.group = hops, group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        hops, group = ctx.hops, ctx.group
        dq = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        held, sums = torch.stack((k, v)), None  # the gradients of a block travel behind it
        for hop, tiles in enumerate(hops):
            coming = Shift(held, group) if hop < len(hops) - 1 else None
            sums_coming = Shift(sums, group) if sums is not None else None
            found = [_tile_backward(t, grad, q, held, out, lse) for t in tiles]
            sums = sums_coming.wait() if sums_coming else torch.zeros(held.shape, dtype=lse.dtype, device=q.device)
            for t, (dq_part, dk, dv) in zip(tiles, found, strict=True):
                t.of_queries(dq).add_(dq_part)
                t.of_keys(sums[0]).add_(dk)
                t.of_keys(sums[1]).add_(dv)
            held = coming.wait() if coming else held
        dk, dv = Shift(sums, group).wait()  # back to their rank
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _tile_backward(
    tile: _Tile, grad: Tensor, q: Tensor, held: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = tile.of_keys(held[0]), tile.of_keys(held[1])
    grad, q, out, lse = (tile.of_queries(t) for t in (grad, q, out, lse))
    if tile.offsets:
        return attend_documents_backward(grad, q, keys, values, out, lse, tile.offsets, tile.causal)
    return attend_backward(grad, q, keys, values, out, lse, tile.causal, tile.bend)
