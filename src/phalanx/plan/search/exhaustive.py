"""Search all layouts exhaustively. Each is either costed in full or excluded by a lower bound that is worse than the
best found; the bound is its time without the terms that sharding decides (gradients, gathers, optimizer). The result is
deterministic: among equals the first in the order of the axes wins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.cost.candidates import CHUNK, Candidates
from phalanx.plan.cost.evaluate import Costs, _join, evaluate
from phalanx.plan.cost.machine import Machine
from phalanx.plan.search.space import BUCKETS, Ask, children, cores, size_of

BLOCK = 30_000  # children costed before the bound is compared with the best again
SLACK = 1.25  # layouts within this factor of the best are kept: runners-up, and the Pareto set
KEPT = 20_000
NEAR = 1.5  # cores whose bound is within this factor of the best are kept for later searches
ACTIVE = ("dp", "fsdp", "optimizer", "straggler")  # terms that sharding changes: left out of the bound
SHARED = ("activations", "logits")  # bytes that sharding does not change

Space = tuple[Candidates, NDArray]  # cores, and the global batch of each
# Value of each candidate; less is better. It is never below seconds per token times `scale`.
Value = Callable[[Ask, Candidates, Costs], NDArray]


def seconds_per_token(ask: Ask, c: Candidates, costs: Costs) -> NDArray:
    return np.asarray(costs.step_s / costs.tokens)


@dataclass(frozen=True)
class Found:
    """Layouts that fit, best first."""

    ask: Ask
    candidates: Candidates
    batch: NDArray
    costs: Costs
    value: NDArray
    considered: int  # layouts of the space
    costed: int  # layouts costed in full; the others are proven worse
    near: Space  # cores that come near

    def __len__(self) -> int:
        return len(self.candidates)

    def pareto(self) -> NDArray:
        """Return the rows that no other beats in both value and memory, best value first."""
        memory = np.asarray(self.costs.memory_bytes)
        best = np.minimum.accumulate(memory)
        # A trade has to save at least a gigabyte.
        rows, last = [], np.inf
        for row in np.flatnonzero(memory <= best):
            if memory[row] < last - 1e9:
                rows.append(row)
                last = memory[row]
        return np.array(rows, dtype=np.int64)


def search(
    ask: Ask, value: Value = seconds_per_token, scale: float = 1.0, slack: float = SLACK, space: Space | None = None
) -> Found:
    """Return up to KEPT layouts that fit and lie within `slack` of the best, from the whole space or from some
    cores."""
    machine = Machine.of(ask.cluster)
    core, batch = space or cores(ask)
    considered = size_of(ask, core, batch)
    if not considered:
        return _nothing(ask, considered, 0)
    bound, least = _bounds(ask, machine, core, batch)
    bound = bound * scale
    order = np.lexsort((np.arange(len(core)), bound))
    order = order[least[order] <= (1 - ask.limits.margin) * float(np.max(machine.memory_bytes))]
    kept: list[tuple[Candidates, NDArray, NDArray]] = []
    best, costed, start = np.inf, len(core), 0
    step = max(1, BLOCK * len(core) * len(BUCKETS) // considered)
    while start < len(order) and bound[order[start]] <= best * slack:
        rows = order[start : start + step]
        start += step
        found, sizes = children(ask, core.take(rows), batch[rows])
        if not len(found):
            continue
        costs, worth = _cost(ask, machine, found, sizes, value)
        costed += len(found)
        fits = costs.valid & costs.fits(ask.profile, ask.limits.margin)
        best = min(best, float(worth[fits].min(initial=np.inf)))
        near = fits & (worth <= best * slack)
        kept.append((found.take(near), sizes[near], worth[near]))
    if not np.isfinite(best):
        return _nothing(ask, considered, costed)
    found = Candidates.concat([k[0] for k in kept])
    sizes, worth = np.concatenate([k[1] for k in kept]), np.concatenate([k[2] for k in kept])
    rows = np.lexsort((*_tie(found), worth))
    rows = rows[worth[rows] <= best * slack][:KEPT]
    near = bound <= best * NEAR
    found, sizes = found.take(rows), sizes[rows]
    return _with_buckets(ask, machine, found, sizes, value, considered, costed, (core.take(near), batch[near]))


def _cost(ask: Ask, machine: Machine, found: Candidates, batch: NDArray, value: Value) -> tuple[Costs, NDArray]:
    costs = evaluate_rows(ask, found, batch, machine)
    return costs, value(ask, found, costs)


def evaluate_rows(ask: Ask, found: Candidates, batch: NDArray, machine: Machine | None = None) -> Costs:
    """Evaluate every row with its own batch."""
    machine = machine or Machine.of(ask.cluster)
    starts = range(0, max(1, len(found)), CHUNK)
    parts = [
        evaluate(ask.shape, machine, found.take(slice(i, i + CHUNK)), batch[i : i + CHUNK], ask.profile) for i in starts
    ]
    return parts[0] if len(parts) == 1 else _join(parts)


def _bounds(ask: Ask, machine: Machine, core: Candidates, batch: NDArray) -> tuple[NDArray, NDArray]:
    """Bound each core: return seconds per token and bytes that no child of it can undercut."""
    costs = evaluate_rows(ask, core, batch, machine)
    seconds = sum(s for name, s in costs.seconds.items() if name not in ACTIVE)
    shared = sum(costs.memory[name] for name in SHARED)
    return np.asarray(seconds / costs.tokens), np.exp(ask.profile.memory_interval[1]) * shared + costs.memory["context"]


def _tie(c: Candidates) -> tuple[NDArray, ...]:
    """Return keys that prefer, among equals, fewer stages, less tensor parallelism and smaller shards."""
    return (c.micro_batch, c.recompute, c.zero, c.shard, c.cp, c.vpp, c.tp, c.pp)


def _with_buckets(
    ask: Ask,
    machine: Machine,
    found: Candidates,
    batch: NDArray,
    value: Value,
    considered: int,
    costed: int,
    near: Space,
) -> Found:
    """Give each survivor its best bucket size. The search used the largest one, which is slower by at most the exposed
    time of its last piece."""
    pinned = ask.limits.pins.get("bucket_bytes")
    values, tables = [], []
    for size in (float(pinned),) if pinned else BUCKETS:
        columns = {f.name: getattr(found, f.name) for f in fields(Candidates)}
        sized = Candidates(**columns | {"bucket_bytes": np.full(len(found), size)})
        values.append(_cost(ask, machine, sized, batch, value)[1])
        tables.append(size)
    pick = np.argmin(np.array(values), axis=0)
    columns = {f.name: getattr(found, f.name) for f in fields(Candidates)}
    found = Candidates(**columns | {"bucket_bytes": np.array(tables)[pick]})
    worth = np.min(np.array(values), axis=0)
    rows = np.lexsort((*_tie(found), worth))
    found, batch = found.take(rows), batch[rows]
    costs = evaluate_rows(ask, found, batch, machine)
    return Found(ask, found, batch, costs, worth[rows], considered, costed + len(values) * len(found), near)


def _nothing(ask: Ask, considered: int, costed: int) -> Found:
    none = Candidates.of(tp=np.zeros(0, dtype=np.int64), bucket_bytes=np.zeros(0))
    empty = np.zeros(0)
    costs = Costs({}, {}, empty, empty, empty, empty, empty, {}, empty, empty)
    return Found(ask, none, empty, costs, empty, considered, costed, (none, empty))
