"""Layout: the degrees of every axis, and which rank stands where.

A replica holds one whole copy of the model; inside it ranks are ordered shard-major, tp-minor, so
that the ranks of one TP group are neighbours. Nothing here knows torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Coord:
    """Where a rank stands: one index per axis."""

    replica: int
    shard: int
    tp: int


@dataclass(frozen=True, slots=True)
class Layout:
    replica: int = 1
    shard: int = 1
    tp: int = 1
    zero: int = 3
    ranks_per_node: int = 0  # 0: all ranks on one node

    AXES = ("replica", "shard", "tp")

    @property
    def replica_size(self) -> int:
        return self.shard * self.tp

    @property
    def world_size(self) -> int:
        return self.replica * self.replica_size

    @property
    def data_ranks(self) -> int:
        """How many ranks see different samples."""
        return self.replica * self.shard

    def coord(self, rank: int) -> Coord:
        assert 0 <= rank < self.world_size, (rank, self)
        replica, inside = divmod(rank, self.replica_size)
        shard, tp = divmod(inside, self.tp)
        return Coord(replica, shard, tp)

    def rank(self, coord: Coord) -> int:
        return coord.replica * self.replica_size + coord.shard * self.tp + coord.tp

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node if self.ranks_per_node else 0

    def peers_by_node(self, coord: Coord) -> list[list[int]]:
        """The replicas holding this coordinate, grouped by the node their rank lives on."""
        nodes: dict[int, list[int]] = {}
        for replica in range(self.replica):
            node = self.node(self.rank(Coord(replica, coord.shard, coord.tp)))
            nodes.setdefault(node, []).append(replica)
        return list(nodes.values())

    def describe(self) -> str:
        degrees = " x ".join(f"{axis} {getattr(self, axis)}" for axis in self.AXES)
        return f"{degrees} = {self.world_size} rank{'s' if self.world_size > 1 else ''}"
