"""Which route a message takes along an axis: over all of its ranks at once, or inside the nodes first and then across
them. This file is arithmetic on positions and sizes, without torch.

An algorithm is a list of stages. A stage splits the ranks of the axis into groups of equal size. A sum goes down the
stages, each a reduce-scatter that leaves a rank with a smaller slice, and comes back up by all-gathers. To add an
algorithm, put it into ALGORITHMS and name it in [collectives]. Each stage must join neighbouring runs of ranks, in
order; otherwise the exact tree could not add what it brings together."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

from phalanx.core.job import CollectivesConfig

Nodes = list[list[int]]  # positions on the axis, by the node their rank lives on
Stage = list[list[int]]  # positions on the axis, by the group they form
OPS = {"replica": ("sum",), "shard": ("sum", "gather")}  # by axis


def flat(nodes: Nodes) -> list[Stage]:
    return [[[position for node in nodes for position in node]]]


def hierarchical(nodes: Nodes) -> list[Stage]:
    """Group the ranks of each node, then the ranks that have the same place in their nodes."""
    return [nodes, [list(column) for column in zip(*nodes, strict=True)]]


ALGORITHMS: dict[str, Callable[[Nodes], list[Stage]]] = {"flat": flat, "hierarchical": hierarchical}


# For libraries that know nothing of nodes: kilobytes from which two levels gather faster even if they save only one
# step of latency (measured: docs/collectives.md). Libraries that are not listed choose for themselves.
MEASURED_KB = {"gloo": 128}


def crossover_kb(config: CollectivesConfig, backend: str, op: str, nodes: Nodes) -> float:
    """Return the size from which `auto` uses two levels. A ring of n = k x g ranks has n - 1 steps; two levels have k +
    g - 2, but cost one more call. For a small gather, one saved step does not pay for that call."""
    if config.crossover_kb >= 0:
        return config.crossover_kb
    if backend not in MEASURED_KB:
        return math.inf
    steps_saved = (len(nodes) - 1) * (len(nodes[0]) - 1)
    return MEASURED_KB[backend] if op == "gather" and steps_saved == 1 else 0


def has_tiers(nodes: Nodes) -> bool:
    """Return whether two levels can gain anything: several nodes, each with the same number of ranks, more than one."""
    return len(nodes) > 1 and {len(node) for node in nodes} == {len(nodes[0])} and len(nodes[0]) > 1


def choose(config: CollectivesConfig, backend: str, axis: str, op: str, nodes: Nodes, size_bytes: float) -> str:
    """Choose the algorithm for one message. `op` is sum (all-reduce, reduce-scatter) or gather; `size_bytes` is the
    whole buffer, before it is scattered or after it was gathered."""
    wanted = str(getattr(config, axis))
    if not has_tiers(nodes):
        return "flat"
    if wanted == "auto":
        return "hierarchical" if size_bytes >= 1000 * crossover_kb(config, backend, op, nodes) else "flat"
    return wanted


def possible(config: CollectivesConfig, backend: str, axis: str, nodes: Nodes) -> list[str]:
    """List every algorithm that `choose` may return; groups are formed for each."""
    largest = sys.float_info.max
    return sorted({choose(config, backend, axis, op, nodes, size) for op in OPS[axis] for size in (0, largest)})


def runs(stages: list[Stage]) -> list[list[tuple[int, int]]]:
    """Return, before each stage, the first and last position that each position's sum already covers."""
    size = sum(len(group) for group in stages[0])
    before = [[(position, position) for position in range(size)]]
    for stage in stages[:-1]:
        after = list(before[-1])
        for group in stage:
            reach = [before[-1][position] for position in group]
            for position in group:
                after[position] = (reach[0][0], reach[-1][1])
        before.append(after)
    return before


def order(stages: list[Stage]) -> list[int]:
    """Return the order in which a buffer must hold the ranks' slices so that every rank gets its own: stage by stage, a
    group's k-th rank keeps the k-th part of what is left."""
    places: dict[int, list[int]] = {}
    for stage in stages:
        for group in stage:
            for place, position in enumerate(group):
                places.setdefault(position, []).append(place)
    return sorted(places, key=lambda position: places[position])
