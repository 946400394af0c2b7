"""The traffic between replicas: one standalone group per coordinate, or two levels of them when a
node holds several replicas (reduce inside the node, then across, then back). Fast sums are the
library's; exact sums go by tree; compressed ones travel in 16 or 8 bits and are added in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from phalanx.parallel.tree import Node, exchange, fold, span

BLOCK = 1024  # values that share one scale


class Cross:
    """The replicas that hold one coordinate. Dropping it (`close`) closes the sockets."""

    def __init__(self, across: Any, inside: Any, nodes: list[list[int]], me: int):
        self._across, self._inside = across, inside
        self.nodes, self.me = nodes, me
        self.size = sum(len(n) for n in nodes)
        self.sent_bytes = 0
        self._residual: dict[tuple[str, int], Tensor] = {}

    def close(self) -> None:
        self._across = self._inside = None

    def _check_open(self) -> None:
        if self._across is None:
            raise RuntimeError("the group across replicas is closed")

    def _padded(self, flat: Tensor) -> Tensor:
        return F.pad(flat, (0, -flat.numel() % self.size))

    def sum_(self, flat: Tensor, codec: str = "none", slot: int = 0) -> None:
        """All-reduce in place, in the library's order. `slot` says which bucket of the step it is."""
        self._check_open()
        if self._inside is None:
            self._sum_across(flat, codec, slot)
            return
        buffer = self._padded(flat)
        part = buffer.new_empty(buffer.numel() // self._inside.size())
        self._count(buffer, self._inside, times=2)
        self._inside._reduce_scatter_base(part, buffer, dist.ReduceScatterOptions()).wait()
        self._sum_across(part, codec, slot)
        self._inside._allgather_base(buffer, part).wait()
        flat.copy_(buffer[: flat.numel()])

    def _sum_across(self, flat: Tensor, codec: str, slot: int) -> None:
        if codec != "none":
            self._compressed_sum_across(flat, codec, slot)
            return
        self._count(flat, self._across, times=2)
        self._across.allreduce([flat]).wait()

    def tree_sum(self, parts: list[tuple[Node, Tensor]], ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Exact: add the tree nodes of all replicas. `ranges[r]` are the leaves replica r holds."""
        self._check_open()
        numel = parts[0][1].numel()
        parts = [(node, self._padded(t)) for node, t in parts]
        node = next(n for n in self.nodes if self.me in n)
        if self._inside is not None:
            self._count(parts[0][1], self._inside, times=len(parts))
            parts = exchange(parts, [span(*ranges[r]) for r in node], self._inside).take()
        spans = [span(ranges[n[0]][0], ranges[n[-1]][1]) for n in self.nodes]
        self._count(parts[0][1], self._across, times=len(parts))
        total = fold(exchange(parts, spans, self._across).take())
        for group in (self._across, self._inside):
            if group is not None:
                gathered = total.new_empty(total.numel() * group.size())
                self._count(gathered, group)
                group._allgather_base(gathered, total.contiguous()).wait()
                total = gathered
        return total[:numel]

    def _compressed_sum_across(self, flat: Tensor, codec: str, slot: int) -> None:
        """With error feedback: what rounding took from this step's message is added to the next
        one. Every replica decodes the same bytes, so all end with the same bits."""
        encode, decode = CODECS[codec]
        group, width = self._across, self._across.size()
        wanted = F.pad(flat, (0, -flat.numel() % (width * BLOCK)))
        wanted = self._with_residual(("send", slot), wanted)
        message = torch.stack([encode(row) for row in wanted.view(width, -1)])
        self._residual["send", slot] = wanted - torch.cat([decode(m) for m in message])
        incoming = torch.empty_like(message)
        self._count(message, group)
        group.alltoall_base(incoming, message, [], []).wait()
        mine = decode(incoming[0])
        for row in incoming[1:]:
            mine.add_(decode(row))
        mine = self._with_residual(("sum", slot), mine)
        answer = encode(mine)
        self._residual["sum", slot] = mine - decode(answer)
        gathered = answer.new_empty(width * answer.numel())
        self._count(gathered, group)
        group._allgather_base(gathered, answer).wait()
        total = torch.cat([decode(m) for m in gathered.view(width, -1)])
        flat.copy_(total[: flat.numel()])

    def _with_residual(self, key: tuple[str, int], value: Tensor) -> Tensor:
        residual = self._residual.get(key)
        return value + residual if residual is not None and residual.shape == value.shape else value

    def _count(self, buffer: Tensor, group: Any, times: int = 1) -> None:
        """Bytes this rank puts on the wire, by the algorithm: (w-1)/w of the buffer each time."""
        width = group.size()
        self.sent_bytes += times * buffer.numel() * buffer.element_size() * (width - 1) // width


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
