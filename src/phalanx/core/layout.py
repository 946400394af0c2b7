"""Layout: the degrees of every axis, and which rank stands where.

A replica holds one whole copy of the model; inside it ranks are ordered pp-major, then shard, cp, and tp-minor, so that
the ranks that communicate most are neighbours. State is sharded over shard x cp; experts over ep of the shard x cp x tp
ranks of a stage, and over the rest of them by rows. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Model chunks that a pipeline rank holds, unless `chunks` says otherwise.
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "interleaved-zb": 2, "zbv": 2}
SPLIT_BACKWARD = ("interleaved-zb", "zbv")


@dataclass(frozen=True, slots=True)
class Coord:
    """A rank's place: one index per axis."""

    replica: int
    shard: int
    tp: int
    pp: int = 0
    cp: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    replica: int = 1
    shard: int = 1
    tp: int = 1
    zero: int = 3
    ranks_per_node: int = 0  # 0: all ranks on one node
    pp: int = 1
    cp: int = 1
    ep: int = 1  # divides shard x cp x tp, whose ranks it takes
    schedule: str = "1f1b"  # gpipe | 1f1b | interleaved | interleaved-zb | zbv
    chunks: int = 0  # pieces of the model on a pipeline rank; 0: what the schedule needs
    cp_style: str = "ring"  # ring | ulysses

    AXES = ("replica", "pp", "shard", "cp", "tp")

    @property
    def stage_size(self) -> int:
        """Return the number of ranks that work on one pipeline stage of one replica."""
        return self.shard * self.cp * self.tp

    @property
    def replica_size(self) -> int:
        return self.pp * self.stage_size

    @property
    def world_size(self) -> int:
        return self.replica * self.replica_size

    @property
    def data_ranks(self) -> int:
        """Return how many ranks see different samples."""
        return self.replica * self.shard

    @property
    def num_chunks(self) -> int:
        return 1 if self.pp == 1 else self.chunks or CHUNKS[self.schedule]

    @property
    def num_stages(self) -> int:
        return self.pp * self.num_chunks

    @property
    def splits_backward(self) -> bool:
        return self.pp > 1 and self.schedule in SPLIT_BACKWARD

    def in_one_pass(self, num_micro: int) -> bool:
        """Return whether the schedule can take so many micro-batches through the pipeline at once. Interleaved ones
        take whole rounds of about pp through one chunk before they turn to the next."""
        if self.num_chunks == 1 or self.schedule == "zbv":
            return True
        return num_micro % max(1, num_micro // self.pp) == 0

    def passes(self, num_micro: int) -> list[int]:
        """Return how many micro-batches each pass takes: all of them at once, if that is possible."""
        out = []
        while num_micro:
            out.append(next(n for n in range(num_micro, 0, -1) if self.in_one_pass(n)))
            num_micro -= out[-1]
        return out

    def coord(self, rank: int) -> Coord:
        assert 0 <= rank < self.world_size, (rank, self)
        replica, inside = divmod(rank, self.replica_size)
        pp, inside = divmod(inside, self.stage_size)
        shard, inside = divmod(inside, self.cp * self.tp)
        cp, tp = divmod(inside, self.tp)
        return Coord(replica, shard, tp, pp, cp)

    def rank(self, coord: Coord) -> int:
        return coord.replica * self.replica_size + self.inside(coord)

    def inside(self, coord: Coord) -> int:
        """Return the rank within its replica."""
        return coord.pp * self.stage_size + self.in_stage(coord)

    def in_stage(self, coord: Coord) -> int:
        return (coord.shard * self.cp + coord.cp) * self.tp + coord.tp

    def stages_of(self, pp: int) -> list[int]:
        """Return the pipeline stages on a rank: in a loop, or down and up again (zbv)."""
        if self.schedule == "zbv" and self.pp > 1:
            return [pp, 2 * self.pp - 1 - pp]
        return [pp + chunk * self.pp for chunk in range(self.num_chunks)]

    def rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank that holds a stage."""
        return next(pp for pp in range(self.pp) if stage in self.stages_of(pp))

    def node(self, rank: int) -> int:
        return rank // self.ranks_per_node if self.ranks_per_node else 0

    def by_node(self, ranks: list[int]) -> list[list[int]]:
        """Group the positions in `ranks` by the node that the rank lives on."""
        nodes: dict[int, list[int]] = {}
        for position, rank in enumerate(ranks):
            nodes.setdefault(self.node(rank), []).append(position)
        return list(nodes.values())

    def peers_by_node(self, coord: Coord, replicas: Sequence[int] | None = None) -> list[list[int]]:
        """Group the positions in `replicas` (None: all) by the node that their rank with this coordinate lives on."""
        replicas = range(self.replica) if replicas is None else replicas
        return self.by_node([replica * self.replica_size + self.inside(coord) for replica in replicas])

    def describe(self) -> str:
        shown = [a for a in self.AXES if a not in ("pp", "cp") or getattr(self, a) > 1]
        degrees = " x ".join(f"{axis} {getattr(self, axis)}" for axis in shown)
        experts = f", ep {self.ep}" if self.ep > 1 else ""
        return f"{degrees}{experts} = {self.world_size} rank{'s' if self.world_size > 1 else ''}"


def num_nodes(layout: Layout) -> int:
    return -(-layout.world_size // layout.ranks_per_node) if layout.ranks_per_node else 1
