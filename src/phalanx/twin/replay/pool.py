"""The GPUs of a cluster as the classical policies see them: equal nodes, a job on as few of them as possible. Whole
nodes for the whole part of a request, and the fullest node with room for the rest (best fit); among equal nodes the
one that changed last, so that untouched nodes stay whole."""

from __future__ import annotations

from collections.abc import Iterable

Taken = tuple[tuple[int, int], ...]  # (node, GPUs) in the order of ranks


class Pool:
    def __init__(self, nodes: int, node_gpus: int):
        self.size, self.free = node_gpus, [node_gpus] * nodes
        self.with_free: list[dict[int, None]] = [{} for _ in range(node_gpus + 1)]  # nodes, the last changed last
        self.with_free[node_gpus] = dict.fromkeys(range(nodes))
        self.total = nodes * node_gpus

    def copy(self) -> Pool:
        other = Pool.__new__(Pool)
        other.size, other.free, other.total = self.size, self.free.copy(), self.total
        other.with_free = [each.copy() for each in self.with_free]
        return other

    def change(self, node: int, gpus: int) -> None:
        """Give so many GPUs back to a node; fewer than 0: take them."""
        free = self.free[node]
        del self.with_free[free][node]
        self.free[node] = free + gpus
        self.with_free[free + gpus][node] = None
        self.total += gpus

    def fits(self, gpus: int) -> bool:
        whole, rest = divmod(gpus, self.size)
        spare = len(self.with_free[self.size]) - whole
        return spare >= 0 and (not rest or spare > 0 or any(self.with_free[rest : self.size]))

    def take(self, gpus: int) -> Taken | None:
        if gpus > self.total or not self.fits(gpus):
            return None
        whole, rest = divmod(gpus, self.size)
        taken = list[tuple[int, int]]()
        for _ in range(whole):
            taken.append((next(reversed(self.with_free[self.size])), self.size))
            self.change(taken[-1][0], -self.size)
        if rest:
            nodes = next(nodes for nodes in self.with_free[rest:] if nodes)
            taken.append((next(reversed(nodes)), rest))
            self.change(taken[-1][0], -rest)
        return tuple(taken)

    def take_inside(self, gpus: int, room: Pool) -> Taken | None:
        """Take GPUs where another pool, of the same nodes at a later time, has them too; from both."""
        whole, rest = divmod(gpus, self.size)
        nodes = self.with_free[self.size]
        chosen = [n for n in reversed(nodes) if room.free[n] == self.size][:whole] if whole else []
        if len(chosen) < whole:
            return None
        taken = [(node, self.size) for node in chosen]
        if rest:
            found = next(
                (
                    n
                    for near in self.with_free[rest:]
                    for n in reversed(near)
                    if room.free[n] >= rest and n not in chosen
                ),
                None,
            )
            if found is None:
                return None
            taken.append((found, rest))
        for node, count in taken:
            self.change(node, -count)
            room.change(node, -count)
        return tuple(taken)

    def give(self, taken: Iterable[tuple[int, int]]) -> None:
        for node, gpus in taken:
            self.change(node, gpus)
