"""Sums whose order does not depend on who adds. Leaves are numbered by the global micro-batch index
and added in one fixed binary tree; whoever holds a contiguous run of leaves can add up the aligned
nodes inside it, and only those, so any assignment of leaves to ranks gives the same bits.

A node (level, index) is the sum of leaves [index << level, (index + 1) << level)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Node = tuple[int, int]


def span(start: int, stop: int) -> list[Node]:
    """The fewest aligned nodes that cover leaves [start, stop), in order."""
    nodes = []
    while start < stop:
        level = (stop - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        nodes.append((level, start >> level))
        start += 1 << level
    return nodes


class TreeSum:
    """A binary counter: push leaves or nodes in index order; it adds what may be added, in place."""

    def __init__(self) -> None:
        self.parts: list[tuple[Node, Tensor]] = []

    def push(self, node: Node, value: Tensor) -> None:
        level, index = node
        while self.parts and index % 2 and self.parts[-1][0] == (level, index - 1):
            value = self.parts.pop()[1].add_(value)
            level, index = level + 1, index // 2
        self.parts.append(((level, index), value))

    def take(self) -> list[tuple[Node, Tensor]]:
        parts, self.parts = self.parts, []
        return parts

    def compact(self) -> None:
        """Let go of receive buffers of which only one row is still needed."""
        self.parts = [
            (node, t.clone() if t.untyped_storage().nbytes() > t.numel() * t.element_size() else t)
            for node, t in self.parts
        ]

    @property
    def size_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for _, t in self.parts)


def fold(parts: list[tuple[Node, Tensor]]) -> Tensor:
    """What is left of a number of leaves that is not a power of two, added from the right."""
    total = parts[-1][1]
    for _, value in reversed(parts[:-1]):
        total = value.add_(total)
    return total


def exchange(parts: list[tuple[Node, Tensor]], spans: Sequence[Sequence[Node]], group: Any) -> TreeSum:
    """Reduce-scatter by tree. Each of the group's w ranks brings its nodes (`spans[r]`, each a flat
    tensor of w equal slices) and leaves with its own slice of the nodes of all of them together.
    Moves (w-1)/w of a rank's nodes, as a ring does, when each rank brings one node."""
    width = len(spans)
    size = parts[0][1].numel() // width
    if len(parts) == 1:
        outgoing = parts[0][1]
    else:
        outgoing = torch.stack([t.view(width, size) for _, t in parts], dim=1).view(-1)
    incoming = outgoing.new_empty(sum(len(s) for s in spans) * size)
    group.alltoall_base(incoming, outgoing, [len(s) * size for s in spans], [len(parts) * size] * width).wait()
    merged = TreeSum()
    rows = incoming.view(-1, size)
    for row, node in enumerate(node for s in spans for node in s):
        merged.push(node, rows[row])
    return merged
