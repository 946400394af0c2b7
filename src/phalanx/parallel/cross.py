"""The traffic between replicas, over standalone groups of one coordinate. The policy chooses one level or several for
each message (reduce inside the node, then across, then back). Fast sums are the library's; exact sums go by tree;
compressed ones travel in 16 or 8 bits and are added in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.core.held import CODEC_BLOCK as BLOCK
from phalanx.parallel.tiers import Peers, Way
from phalanx.parallel.tree import Node, Part, fold

MOST_DIRECT = 1 << 14  # integers, at most, that a rank sends directly to all others


class Cross:
    """The replicas that hold one coordinate. `close` closes the sockets. Rounding errors belong to these replicas:
    another membership has another object, which begins with none."""

    def __init__(self, peers: Peers):
        self._peers, self.size = peers, peers.size
        # Rounding errors of messages, by kind, bucket and number of stages before it.
        self._residual: dict[tuple[str, int, int], Tensor] = {}  # of the last step that counts
        self._pending: dict[tuple[str, int, int], Tensor] = {}  # of this step

    @property
    def sent_bytes(self) -> int:
        return self._peers.sent_bytes

    def close(self) -> None:
        self._peers.close()

    def commit(self) -> None:
        """Carry the rounding errors of a step that counts over to the next."""
        self._residual |= self._pending
        self._pending = {}

    def forget(self) -> None:
        """Drop the step's rounding errors, which may not even be numbers."""
        self._pending = {}

    def _way(self, message: Tensor) -> Way:
        way = self._peers.way("sum", message)
        assert way is not None
        return way

    def _padded(self, flat: Tensor, block: int = 1) -> Tensor:
        return F.pad(flat, (0, -flat.numel() % (self.size * block)))

    def sum_parts_(self, parts: Sequence[tuple[Tensor, bool]], codec: str, slot: int | None) -> None:
        """All-reduce parameters in place; each comes with whether it travels whole. In the message of the others each
        begins a block of its own, so that no two share a scale."""
        whole = [part for part, is_whole in parts if is_whole]
        coded = [part for part, is_whole in parts if not is_whole]
        if whole:
            total = torch.cat(whole)
            self.sum_(total)
            torch._foreach_copy_(whole, list(total.split([part.numel() for part in whole])))
        if coded:
            sizes = [-(-part.numel() // BLOCK) * BLOCK for part in coded]
            message = coded[0].new_zeros(sum(sizes))
            rooms = [room[: part.numel()] for room, part in zip(message.split(sizes), coded, strict=True)]
            torch._foreach_copy_(rooms, coded)
            self.sum_(message, codec, slot)
            torch._foreach_copy_(coded, rooms)

    def sum_(self, flat: Tensor, codec: str = "none", slot: int | None = None) -> None:
        """All-reduce in place. `slot` is the number of the bucket in the step. None: the bucket is cut differently than
        in other steps, so its rounding errors are not carried over."""
        way = self._way(flat)
        inner = way.depth - 1
        if inner == 0:
            self._sum_across(way, flat, codec, slot)
            return
        part = way.down(self._padded(flat, 1 if codec == "none" else BLOCK), inner)
        self._sum_across(way, part, codec, slot)
        flat.copy_(way.up(part, inner)[: flat.numel()])

    def _sum_across(self, way: Way, flat: Tensor, codec: str, slot: int | None) -> None:
        """Sum over the last stage, in place."""
        if codec != "none":
            self._compressed_sum_across(way, flat, codec, slot)
            return
        group = way.group(way.depth - 1)
        few = flat.dtype == torch.int64 and flat.numel() * group.size() <= MOST_DIRECT
        if few and flat.device.type == "cpu" and isinstance(group, dist.ProcessGroupGloo):
            self._sum_directly(way, group, flat)
            return
        way.count(flat, group, times=2)
        group.allreduce([flat]).wait()

    def _sum_directly(self, way: Way, group: Any, flat: Tensor) -> None:
        """Sum a few integers by sending them from each rank to every other one. Gloo's ring would take twice as many
        messages, and each would wait for the one before it."""
        said = flat.repeat(group.size())
        heard = torch.empty_like(said)
        way.count(said, group)
        group.alltoall_base(heard, said, [], []).wait()
        torch.sum(heard.view(group.size(), -1), 0, out=flat)

    def tree_sum(self, parts: list[Part], nodes: Sequence[Sequence[Node]]) -> Tensor:
        """Add the parts of all replicas exactly. `nodes[r]` are those that the r-th replica of the group brings."""
        way, numel = self._way(parts[0][1]), parts[0][1].numel()
        total = fold(way.tree([(node, self._padded(t)) for node, t in parts], nodes).take())
        return way.up(total, way.depth)[:numel]

    def _compressed_sum_across(self, way: Way, flat: Tensor, codec: str, slot: int | None) -> None:
        """Sum with error feedback: the rounding error of this step's message is added to the next one. Every replica
        decodes the same bytes, so all end with the same bits."""
        encode, decode = CODECS[codec]
        group = way.group(way.depth - 1)
        width = group.size()
        wanted = self._with_residual("send", way, slot, flat)
        wanted = F.pad(wanted, (0, -flat.numel() % (width * BLOCK)))
        message = torch.stack([encode(row) for row in wanted.view(width, -1)])
        self._owe("send", way, slot, (wanted - torch.cat([decode(m) for m in message]))[: flat.numel()])
        incoming = torch.empty_like(message)
        way.count(message, group)
        group.alltoall_base(incoming, message, [], []).wait()
        mine = decode(incoming[0])
        for row in incoming[1:]:
            mine.add_(decode(row))
        mine = self._with_residual("sum", way, slot, mine)
        answer = encode(mine)
        self._owe("sum", way, slot, mine - decode(answer))
        gathered = answer.new_empty(width * answer.numel())
        way.count(gathered, group)
        group._allgather_base(gathered, answer).wait()
        total = torch.cat([decode(m) for m in gathered.view(width, -1)])
        flat.copy_(total[: flat.numel()])

    def _with_residual(self, kind: str, way: Way, slot: int | None, value: Tensor) -> Tensor:
        residual = None if slot is None else self._residual.get((kind, slot, way.depth - 1))
        return value + residual if residual is not None and residual.shape == value.shape else value

    def _owe(self, kind: str, way: Way, slot: int | None, residual: Tensor) -> None:
        if slot is not None:
            self._pending[kind, slot, way.depth - 1] = residual


def _encode_bf16(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).view(torch.uint8)


def _decode_bf16(message: Tensor) -> Tensor:
    return message.view(torch.bfloat16).to(torch.float32)


def _encode_int8(values: Tensor) -> Tensor:
    blocks = values.view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    quantised = (blocks / scale).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat([quantised.view(-1).view(torch.uint8), scale.view(-1).view(torch.uint8)])


def _decode_int8(message: Tensor) -> Tensor:
    blocks = message.numel() // (BLOCK + 4)
    quantised = message[: blocks * BLOCK].view(torch.int8).view(blocks, BLOCK)
    scale = message[blocks * BLOCK :].view(torch.float32).view(blocks, 1)
    return (quantised * scale).view(-1)


CODECS = {"bf16": (_encode_bf16, _decode_bf16), "int8": (_encode_int8, _decode_int8)}
