"""Sums whose order does not depend on who adds. Leaves are numbered by the global micro-batch index
and added in one fixed binary tree. A rank adds up the nodes whose leaves it holds, all of them, and
only those, so any assignment of leaves to ranks gives the same bits.

A node (level, index) is the sum of leaves [index << level, (index + 1) << level)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Node = tuple[int, int]
Part = tuple[Node, Tensor]


def first_leaf(node: Node) -> int:
    return node[1] << node[0]


def join(nodes: Iterable[Node]) -> list[Node]:
    """Return the nodes that are left, in leaf order, once everything that may be added is added."""
    out: list[Node] = []
    for level, index in sorted(nodes, key=first_leaf):
        while out and index % 2 and out[-1] == (level, index - 1):
            out.pop()
            level, index = level + 1, index // 2
        out.append((level, index))
    return out


def cover(leaves: Iterable[int]) -> list[Node]:
    """Return the fewest nodes that sum these leaves and no others, in leaf order."""
    return join((0, leaf) for leaf in leaves)


class TreeSum:
    """A binary counter: push leaves or nodes in index order; it adds what may be added, in place."""

    def __init__(self) -> None:
        self.parts: list[Part] = []

    def push(self, node: Node, value: Tensor) -> None:
        level, index = node
        while self.parts and index % 2 and self.parts[-1][0] == (level, index - 1):
            value = self.parts.pop()[1].add_(value)
            level, index = level + 1, index // 2
        self.parts.append(((level, index), value))

    def take(self) -> list[Part]:
        parts, self.parts = self.parts, []
        return parts

    def compact(self) -> None:
        """Free receive buffers when only one of their rows is still needed."""
        self.parts = [
            (node, t.clone() if t.untyped_storage().nbytes() > t.numel() * t.element_size() else t)
            for node, t in self.parts
        ]

    @property
    def size_bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for _, t in self.parts)


def merge(parts: Iterable[Part]) -> TreeSum:
    """Add up the parts of several sums, in leaf order; in place."""
    merged = TreeSum()
    for node, value in sorted(parts, key=lambda part: first_leaf(part[0])):
        merged.push(node, value)
    return merged


def fold(parts: Sequence[Part]) -> Tensor:
    """Add the parts that are left when the number of leaves is not a power of two, from the right. The parts are not
    changed; the sum of a single one is that part itself."""
    total = parts[-1][1]
    for i, (_, value) in enumerate(reversed(parts[:-1])):
        total = total.add_(value) if i else total + value
    return total


def exchange(parts: Sequence[Part], nodes: Sequence[Sequence[Node]], group: Any) -> TreeSum:
    """Reduce-scatter in tree order. Each of the group's w ranks brings the parts `nodes[r]`, each a flat tensor of w
    equal slices, and leaves with its own slice of the sum of all of them. When each rank brings one part, it sends
    (w-1)/w of it, as in a ring."""
    width = len(nodes)
    size = parts[0][1].numel() // width
    if len(parts) == 1:
        outgoing = parts[0][1]
    else:
        outgoing = torch.stack([t.view(width, size) for _, t in parts], dim=1).view(-1)
    incoming = outgoing.new_empty(sum(len(n) for n in nodes) * size)
    group.alltoall_base(incoming, outgoing, [len(n) * size for n in nodes], [len(parts) * size] * width).wait()
    return merge(zip((node for n in nodes for node in n), incoming.view(-1, size), strict=True))
