"""Predict the traffic and state of a rank in one step, from the job alone: every collective by kind, group, count and
bytes, and the bytes of weights, gradients and moments. It describes the libraries of accelerators (Gloo composes some
collectives from others). `train.dryrun` runs the program and compares. The counts come from volumes.py, which the cost
model uses too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from phalanx.core.held import CODEC_BLOCK
from phalanx.core.job import CollectivesConfig, Job
from phalanx.core.layout import Coord
from phalanx.core.shape import even_bounds, loss_rows
from phalanx.plan.cost.units import ENDS, REST, Unit, has_experts, members, names, tensors, units
from phalanx.plan.cost.volumes import (
    expert_exchanges,
    forward_runs,
    ring_messages,
    state_gathers,
    state_scatters,
    tensor_pairs,
)

MASTER_BYTES = {"fp8": 4, "bf16": 4, "fp32": 4, "fp64": 8}
COMPUTE_BYTES = {"fp8": 2, "bf16": 2, "fp32": 4, "fp64": 8}
COUNT_BYTES = 8  # counts are int64, and sums over all ranks fp64
PARCEL_NUMEL, PARCEL_ALIGN, PARCEL_ROUND = 1 << 21, 64, 1024  # as in train/optimizer.py


class Key(NamedTuple):
    """A kind of call over one group. Its bytes are those of the whole buffer: after a gather, before a scatter, and
    what a rank sends in an all-to-all."""

    kind: str  # all-reduce | all-gather | reduce-scatter | all-to-all | send | receive
    axis: str
    ranks: int


@dataclass(slots=True)
class Volume:
    count: int = 0
    size_bytes: int = 0


@dataclass(slots=True)
class Footprint:
    """What a rank communicates and holds in a step."""

    traffic: dict[Key, Volume] = field(default_factory=dict)
    weight_bytes: int = 0
    gradient_bytes: int = 0  # reduced, when the step's last backward is over
    kept_bytes: int = 0  # the replica's own sums, until the step is committed
    moment_bytes: int = 0

    def add(self, key: Key, count: int, size_bytes: int) -> None:
        """Count calls of `size_bytes` each. A group of one rank does not communicate."""
        if key.ranks > 1 and count:
            volume = self.traffic.setdefault(key, Volume())
            volume.count += count
            volume.size_bytes += count * size_bytes


def expect(job: Job, coord: Coord) -> Footprint:
    """Predict the footprint of the rank at `coord`, assuming even routing."""
    return _Step(job, coord).expected


class _Step:
    def __init__(self, job: Job, coord: Coord):
        self.job, self.coord = job, coord
        self.layout, self.model, train = job.layout, job.model, job.train
        self.held = tensors(job.model, job.layout)
        self.names = names(self.layout, coord, self.model.family == "moe")
        self.master, self.compute = MASTER_BYTES[train.precision], COMPUTE_BYTES[train.precision]
        self.exact = train.reduction == "exact"
        self.micro = job.micro_per_rank
        self.tokens = train.micro_batch * train.seq_len // self.layout.cp  # of a micro-batch, on a tp group
        self.expected = Footprint()
        self._state()
        self._counts()
        for stage in self.layout.stages_of(coord.pp):
            self._layers(stage)
            self._pipe(stage)
        self._shards()
        self._replicas()
        self._ends()

    def _add(self, kind: str, axis: str, count: int, size_bytes: int) -> None:
        ranks = members(self.layout, self.coord, axis)
        if len(ranks) > 1:
            self.expected.add(Key(kind, self.names[ranks], len(ranks)), count, size_bytes)

    def _state(self) -> None:
        """Count the slices that a rank holds, without padding."""
        mine = [h for h in self.held if h.held_by(self.layout, self.coord)]
        shapes = [h.local_shape(self.layout, self.coord) for h in mine]
        numel = sum(math.prod(s) for s in shapes)
        self.expected.weight_bytes = numel * self.master  # bf16 and its remainder together have the same width
        self.expected.gradient_bytes = numel * self.master
        if self.micro == self.layout.replica == 1 and self._alone():  # gradients are not added to anything
            whole = [h for h in mine if h.tp_dim is None and not h.experts] if self.layout.tp > 1 else []
            wide = sum(math.prod(h.local_shape(self.layout, self.coord)) for h in whole)  # summed over the tp ranks
            self.expected.gradient_bytes = (numel - wide) * self.compute + wide * self.master
        self.expected.moment_bytes = self._moments(shapes)

    def _alone(self) -> bool:
        """Return whether a rank holds all parameters of its stage, as parallel/shard.py decides."""
        experts = self.layout.stage_size // self.layout.ep if self.model.family == "moe" else 1
        return self.layout.shard * self.layout.cp == experts == 1

    def _moments(self, shapes: list[tuple[int, ...]]) -> int:
        """Return the bytes of both moments. Moments that are processed in turn lie in padded parcels."""
        optimizer = self.job.optimizer
        width = 2 if optimizer.state == "bf16" else self.master
        if optimizer.offload == "none" and (optimizer.state == "full" or self.compute < self.master):
            return 2 * width * sum(math.prod(s) for s in shapes)
        parcels: list[int] = []  # elements
        for matrices in (True, False):
            used = PARCEL_NUMEL
            for numel in (math.prod(s) for s in shapes if (len(s) > 1) is matrices):
                while numel > 0:
                    if used >= PARCEL_NUMEL:
                        parcels.append(0)
                        used = 0
                    piece = min(numel, PARCEL_NUMEL - used)
                    parcels[-1] = used + piece
                    used += _padded(piece, PARCEL_ALIGN)
                    numel -= piece
        return 2 * width * sum(_padded(numel, PARCEL_ROUND) for numel in parcels)

    # -- inside the model

    def _layers(self, stage: int) -> None:
        c, layout, train = self.model, self.layout, self.job.train
        runs = int(forward_runs(train.recompute == "full"))
        size = self.tokens * c.dim * self.compute
        first, last = stage == 0, stage == layout.num_stages - 1
        attending = [h for h in self.held if h.stage == stage and h.name.endswith("attention.wq.weight")]
        layers = [int(h.name.split(".")[1]) for h in attending]
        routed = [layer for layer in layers if has_experts(c, layer)]
        m = self.micro
        # Tensor parallelism: a gather's backward is a scatter, and the other way round.
        for layer in layers:
            pairs = 1 + (layer not in routed or c.shared_experts > 0)
            self._add("all-gather", "tp", m * pairs * tensor_pairs(runs), size)
            # Recomputation skips the scatter that ends a layer if backward needs nothing that follows it.
            idle = (runs - 1) * (layer not in routed and c.norm_place == "pre")
            self._add("reduce-scatter", "tp", m * (pairs * tensor_pairs(runs) - idle), size)
            self._keys(m, runs)
        for holds in (first, last):  # embedding: scattered; head: gathered
            self._add("all-gather", "tp", m * holds, size)
            self._add("reduce-scatter", "tp", m * holds, size)
        if last and layout.tp > 1:
            wide, rows = max(4, self.compute), loss_rows(c.vocab_size, layout.tp, self.compute)
            for start in range(0, self.tokens, rows):
                chunk = min(rows, self.tokens - start)
                self._add("all-reduce", "tp", m, chunk * wide)  # largest logit of a token
                self._add("all-reduce", "tp", m, 2 * chunk * wide)  # its normaliser and its target's logit
        if layout.cp > 1:
            self._attention(m * len(layers), runs)
        for _ in routed:
            self._experts(m, runs)

    def _keys(self, times: int, runs: int) -> None:
        """Count what tp ranks exchange inside attention: keys and values where they share heads, and sums of squares
        where a norm spans them."""
        c, layout = self.model, self.layout
        if c.num_kv_heads % layout.tp:
            size = self.tokens * c.num_kv_heads * c.head_dim * self.compute
            self._add("all-gather", "tp", times * 2 * runs, size)
            self._add("reduce-scatter", "tp", times * 2, size)
        if c.qk_norm == "all":
            again = 2 if self.job.train.recompute == "selective" else runs  # selective keeps no all-reduce
            self._add("all-reduce", "tp", times * 2 * (again + 1), self.tokens * max(4, self.compute))

    def _attention(self, times: int, runs: int) -> None:
        c, layout = self.model, self.layout
        kv_heads = max(1, c.num_kv_heads // layout.tp)
        keys = self.tokens * kv_heads * c.head_dim  # elements of a rank's keys
        queries = self.tokens * (c.num_heads // layout.tp) * c.head_dim
        runs = 2 if self.job.train.recompute == "selective" else runs  # selective keeps no result of these
        if layout.cp_style == "ring":
            held, returned = ring_messages(layout.cp, runs)
            for kind in ("send", "receive"):
                self._add(kind, "cp", times * held, 2 * keys * self.compute)
                self._add(kind, "cp", times * int(returned), 2 * keys * max(4, self.compute))
            return
        if kv_heads % layout.cp:
            keys = queries  # too few key heads to split, so every query head brings its own
        for numel in (queries, keys, keys, queries):
            self._add("all-to-all", "cp", times * (runs + 1), numel * self.compute)

    def _experts(self, times: int, runs: int) -> None:
        c, layout = self.model, self.layout
        if c.balance_loss:
            batch = self.job.train.micro_batch * c.num_experts * COUNT_BYTES
            for axis in ("cp", "tp"):
                self._add("all-reduce", axis, times * runs, batch)
        rows, row_bytes = self.tokens // layout.tp * c.top_k, c.dim * self.compute
        first, last = even_bounds(c.num_experts, layout.ep, layout.in_stage(self.coord) % layout.ep)
        here = rows * last // c.num_experts - rows * first // c.num_experts  # rows of each ep rank for these experts
        self._add("all-to-all", "ep", times * runs, c.num_experts * COUNT_BYTES)
        for given in (rows, layout.ep * here):  # to the experts and back; backward runs the other way round
            self._add("all-to-all", "ep", times * expert_exchanges(runs) // 2, given * row_bytes)

    def _pipe(self, stage: int) -> None:
        layout, num = self.layout, self.layout.num_stages
        size = self.tokens // layout.tp * self.model.dim * self.compute
        here = layout.stages_of(self.coord.pp)
        for other in (stage - 1, stage + 1):  # each activation sent one way has a gradient that returns
            if 0 <= other < num and other not in here:
                self._add("send", "pp", self.micro, size)
                self._add("receive", "pp", self.micro, size)

    # -- state

    def _counts(self) -> None:
        """Count the sum of target tokens, which precedes everything else."""
        self._add("all-reduce", "shard", 1, COUNT_BYTES)
        self._sum_replicas(COUNT_BYTES, COUNT_BYTES)
        self._agree()

    def _agree(self) -> None:
        """Count the agreement inside the replica on what was heard from the others."""
        self._add("all-reduce", "inside", int(self.layout.replica > 1), COUNT_BYTES)

    def _shards(self) -> None:
        """Count gathers of weights and scatters of gradients. ZeRO-3 gathers a layer for each forward and each
        backward, and everything outside layers for both at once; the other stages gather once a step. Gradients are
        scattered every micro-batch, with ZeRO-1 once."""
        zero = self.layout.zero
        mine = self.job.micro_indices(self.coord)
        for unit in units(self.held, self.layout, self.coord):
            gathers = int(state_gathers(zero, self.micro))
            gathers = gathers // 2 if zero >= 3 and unit.name in (*ENDS, REST) else gathers
            where, size = self._where(unit.axis), unit.numel * self.master
            where.gather(gathers, unit.numel * self.compute)
            if not self.exact:
                where.scatter(int(state_scatters(zero, self.micro)), size)
            elif self.job.reduces_once:
                where.tree(size, self.micro, mine[0] - where.place * self.micro)
            else:
                leaves = unit.parts // self.layout.shard
                for index in mine:
                    where.tree(size, 1, index * leaves + where.place % leaves - where.place)

    def _replicas(self) -> None:
        """Count gradients in buckets, filled during the last backward."""
        limit = self.job.train.bucket_mb * 1e6
        bucket: list[Unit] = []
        leaves = 1
        for unit in units(self.held, self.layout, self.coord):
            own = unit.parts // self.layout.shard if self.exact and unit.parts > 1 else 1
            if own != leaves:
                self._bucket(bucket, leaves)
                bucket = []
            leaves = own
            bucket.append(unit)
            if sum(u.slice_numel for u in bucket) * self.master >= limit:
                self._bucket(bucket, leaves)
                bucket = []
        self._bucket(bucket, leaves)

    def _bucket(self, bucket: list[Unit], leaves: int) -> None:
        where, replica = self._where("replica"), self.layout.replica
        size_bytes = sum(unit.slice_numel for unit in bucket) * self.master
        if not size_bytes or replica == 1:
            return
        if self.job.recovery.on:
            share = leaves * self.job.num_micro // replica
            first = self.coord.replica * share
            self.expected.kept_bytes += size_bytes * (num_nodes(first, first + share) if self.exact else 1)
        if not self.exact:
            if self.job.train.compress == "none":
                self._sum_replicas(size_bytes, self.master)
                return
            for numel, codec in (
                (sum(unit.whole_numel for unit in bucket), "none"),
                (sum(unit.coded_numel for unit in bucket), self.job.train.compress),
            ):
                if numel:
                    self._sum_replicas(numel * self.master, self.master, codec)
            return
        whole = _padded(size_bytes, replica * self.master)
        where.tree(whole, leaves * self.job.num_micro // replica, 0, size_bytes)
        where.gather(1, whole, size_bytes)

    def _sum_replicas(self, size_bytes: int, item_bytes: int, compress: str = "none") -> None:
        """Count a sum over replicas: inside the nodes first if there are two levels. Only the traffic between nodes is
        compressed."""
        where = self._where("replica")
        inside, across = where.levels(size_bytes)
        if inside > 1:
            block = 1 if compress == "none" else CODEC_BLOCK
            size_bytes = _padded(size_bytes, self.layout.replica * item_bytes * block)
            where.put("reduce-scatter", inside, 1, size_bytes)
            where.put("all-gather", inside, 1, size_bytes)
        size_bytes //= inside
        if compress == "none":
            where.put("all-reduce", across, 1, size_bytes)
            return
        values = _padded(size_bytes // item_bytes, across * CODEC_BLOCK)
        sent = 2 * values if compress == "bf16" else values + 4 * values // CODEC_BLOCK
        where.put("all-to-all", across, 1, sent)
        where.put("all-gather", across, 1, sent)

    def _where(self, axis: str) -> _Where:
        layout, coord = self.layout, self.coord
        if axis == "replica":
            nodes = layout.peers_by_node(coord)
            return _Where(self.expected, "replica", coord.replica, nodes, self.job.collectives, "replica")
        ranks = members(layout, coord, axis)
        nodes = layout.by_node([coord.replica * layout.replica_size + rank for rank in ranks])
        name, place = self.names.get(ranks, axis), ranks.index(layout.inside(coord))
        return _Where(self.expected, name, place, nodes, self.job.collectives, "shard")

    def _ends(self) -> None:
        """Count what follows the last backward: loads of experts, gradients to which every tp rank contributes, and the
        norm."""
        c, layout = self.model, self.layout
        stages = layout.stages_of(self.coord.pp)
        if c.family == "moe":
            routed = sum(h.name.endswith("moe.gate.weight") and h.stage in stages for h in self.held)
            size = routed * c.num_experts * COUNT_BYTES
            if routed:
                self._add("all-reduce", "edp", 1, size)
                self._add("all-reduce", "ep", 1, size)
                self._sum_replicas(size, COUNT_BYTES)
        self._agree()
        whole = [h for h in self.held if h.tp_dim is None and not h.experts and h.stage in stages]
        numel = sum(math.prod(h.local_shape(layout, self.coord)) for h in whole)
        self._add("all-gather", "tp", 1, layout.tp * numel * self.master)
        self._add("all-reduce", "inside", 1, COUNT_BYTES)
        if self.exact:
            self._add("all-reduce", "inside", 1, 2 * COUNT_BYTES)


@dataclass(frozen=True, slots=True)
class _Where:
    """A group over which state is sharded, or the replicas. Its collectives have one level, or two (inside nodes and
    across them); the size before padding decides."""

    expected: Footprint
    name: str
    place: int  # of this rank in the group
    nodes: list[list[int]]  # places, by node
    config: CollectivesConfig
    axis: str  # of the config

    def levels(self, size_bytes: int) -> tuple[int, int]:
        """Return the ranks inside a node and the number of nodes, or 1 and all ranks, as parallel/algorithms.py chooses
        for a library that knows nodes itself."""
        each, wanted = {len(node) for node in self.nodes}, getattr(self.config, self.axis)
        two = len(self.nodes) > 1 and len(each) == 1 and each != {1} and wanted != "flat"
        if two and wanted == "auto":
            two = 0 <= 1000 * self.config.crossover_kb <= size_bytes
        return (len(self.nodes[0]), len(self.nodes)) if two else (1, sum(map(len, self.nodes)))

    def put(self, kind: str, ranks: int, times: int, size_bytes: int) -> None:
        self.expected.add(Key(kind, self.name, ranks), times, size_bytes)

    def gather(self, times: int, size_bytes: int, judged_bytes: int = 0) -> None:
        inside, across = self.levels(judged_bytes or size_bytes)
        self.put("all-gather", across, times, size_bytes // inside)
        self.put("all-gather", inside, times, size_bytes)

    def scatter(self, times: int, size_bytes: int) -> None:
        inside, across = self.levels(size_bytes)
        self.put("reduce-scatter", inside, times, size_bytes)
        self.put("reduce-scatter", across, times, size_bytes // inside)

    def tree(self, size_bytes: int, leaves: int, first: int, judged_bytes: int = 0) -> None:
        """Count the exact sum by all-to-all. Each rank brings the tree's nodes over its own run of leaves; `first` is
        the first leaf of the group's first rank."""
        inside, across = self.levels(judged_bytes or size_bytes)
        start = first + self.place * leaves
        parts = num_nodes(start, start + leaves)
        if inside > 1:
            self.put("all-to-all", inside, 1, parts * size_bytes)
            node = next(places for places in self.nodes if self.place in places)
            parts = num_nodes(first + node[0] * leaves, first + (node[-1] + 1) * leaves)
        self.put("all-to-all", across, 1, parts * size_bytes // inside)


def num_nodes(start: int, stop: int) -> int:
    """Count the aligned nodes of a binary tree that cover leaves [start, stop), as parallel/tree.py cuts them."""
    count = 0
    while start < stop:
        size = 1 << ((stop - start).bit_length() - 1)
        if start:
            size = min(size, start & -start)
        start, count = start + size, count + 1
    return count


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
