"""The GPUs of a cluster as the classical policies see them: equal nodes, and a job on as few of them as possible. A job
that fits on one node goes to the fullest node with room (best fit). A larger one gets whole free nodes, the last of
which may be used in part. Among equal nodes the first is taken, so that a trace has one answer.

The set of nodes with a given number of free GPUs is stored as the bits of one integer."""

from __future__ import annotations

from collections.abc import Iterable

Taken = tuple[tuple[int, int], ...]  # (node, GPUs) in the order of ranks


class Pool:
    def __init__(self, nodes: int, node_gpus: int):
        self.size, self.free = node_gpus, [node_gpus] * nodes
        self.with_free = [0] * node_gpus + [(1 << nodes) - 1]  # free GPUs -> nodes, as bits
        self.total = nodes * node_gpus

    def copy(self) -> Pool:
        other = Pool.__new__(Pool)
        other.size, other.free, other.total = self.size, self.free.copy(), self.total
        other.with_free = self.with_free.copy()
        return other

    @property
    def whole(self) -> int:
        """Return how many nodes are completely free."""
        return self.with_free[self.size].bit_count()

    def change(self, node: int, gpus: int) -> None:
        """Give `gpus` back to a node; a negative number takes them."""
        free, bit = self.free[node], 1 << node
        self.with_free[free] ^= bit
        self.free[node] = free + gpus
        self.with_free[free + gpus] ^= bit
        self.total += gpus

    def fits(self, gpus: int) -> bool:
        if gpus <= self.size:
            return any(self.with_free[gpus:])
        return self.whole * self.size >= gpus

    def find(self, gpus: int) -> Taken | None:
        """Find where a job would go."""
        if gpus <= self.size:
            nodes = next((nodes for nodes in self.with_free[gpus:] if nodes), 0)
            return ((_first(nodes), gpus),) if nodes else None
        if not self.fits(gpus):
            return None
        taken, nodes = list[tuple[int, int]](), self.with_free[self.size]
        while gpus:
            taken.append((_first(nodes), min(gpus, self.size)))
            nodes &= nodes - 1
            gpus -= taken[-1][1]
        return tuple(taken)

    def take(self, gpus: int) -> Taken | None:
        taken = self.find(gpus)
        if taken:
            self.use(taken)
        return taken

    def has(self, taken: Taken) -> bool:
        """Return True if these GPUs are free."""
        return all(self.free[node] >= gpus for node, gpus in taken)

    def use(self, taken: Taken) -> None:
        for node, gpus in taken:
            self.change(node, -gpus)

    def give(self, taken: Iterable[tuple[int, int]]) -> None:
        for node, gpus in taken:
            self.change(node, gpus)


def _first(nodes: int) -> int:
    return (nodes & -nodes).bit_length() - 1
