"""Which route a message takes. When this fails, traffic goes over the slow links more often than it must, or ranks wait
for each other in different groups."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.job import CollectivesConfig
from phalanx.core.layout import Layout
from phalanx.parallel.algorithms import ALGORITHMS, MEASURED_KB, OPS, choose, has_tiers, order, possible, runs

TWO_BY_TWO = [[0, 1], [2, 3]]
KB = 1000


@pytest.mark.parametrize(
    "layout, ranks, nodes",
    [
        (Layout(shard=4), [0, 1, 2, 3], [[0, 1, 2, 3]]),
        (Layout(shard=4, ranks_per_node=2), [0, 1, 2, 3], [[0, 1], [2, 3]]),
        (Layout(shard=4, tp=2, ranks_per_node=4), [1, 3, 5, 7], [[0, 1], [2, 3]]),
        (Layout(shard=2, tp=2, ranks_per_node=2), [0, 2], [[0], [1]]),
        (Layout(replica=3, shard=2, ranks_per_node=3), [2, 3], [[0], [1]]),
        (Layout(replica=3, shard=2, ranks_per_node=3), [0, 2, 4], [[0, 1], [2]]),
    ],
)
def test_positions_are_grouped_by_node(layout, ranks, nodes):
    assert layout.by_node(ranks) == nodes


@pytest.mark.parametrize("op", OPS["shard"])
@pytest.mark.parametrize("axis", ["replica", "shard"])
@pytest.mark.parametrize(
    "wanted, nodes, size_bytes, algorithm",
    [
        ("auto", TWO_BY_TWO, 99 * KB, "flat"),
        ("auto", TWO_BY_TWO, 100 * KB, "hierarchical"),
        ("flat", TWO_BY_TWO, 10**9, "flat"),
        ("hierarchical", TWO_BY_TWO, 8, "hierarchical"),
        ("hierarchical", [[0, 1, 2, 3]], 10**9, "flat"),  # one node
        ("hierarchical", [[0], [1], [2]], 10**9, "flat"),  # one rank of the axis on each node
        ("hierarchical", [[0, 1], [2]], 10**9, "flat"),  # uneven
        ("auto", [[0, 1], [2]], 10**9, "flat"),
    ],
)
def test_the_decision_table(op, axis, wanted, nodes, size_bytes, algorithm):
    other = "shard" if axis == "replica" else "replica"
    config = CollectivesConfig(**{axis: wanted, other: "flat"}, crossover_kb=100)
    assert choose(config, "gloo", axis, op, nodes, size_bytes) == algorithm
    assert choose(config, "nccl", axis, op, nodes, size_bytes) == algorithm
    assert choose(config, "gloo", other, op, nodes, size_bytes) == "flat"


@pytest.mark.parametrize(
    "backend, op, nodes, size_bytes, algorithm",
    [
        ("gloo", "sum", TWO_BY_TWO, 8, "hierarchical"),
        ("gloo", "gather", TWO_BY_TWO, MEASURED_KB["gloo"] * KB - 1, "flat"),
        ("gloo", "gather", TWO_BY_TWO, MEASURED_KB["gloo"] * KB, "hierarchical"),
        ("gloo", "gather", [[0, 1, 2], [3, 4, 5]], 8, "hierarchical"),
        ("gloo", "gather", [[0, 1], [2, 3], [4, 5]], 8, "hierarchical"),
        ("nccl", "sum", TWO_BY_TWO, 10**9, "flat"),  # builds its rings and trees by node itself
        ("nccl", "gather", TWO_BY_TWO, 10**9, "flat"),
    ],
)
def test_the_crossover_that_was_measured(backend, op, nodes, size_bytes, algorithm):
    assert choose(CollectivesConfig(), backend, "shard", op, nodes, size_bytes) == algorithm


@pytest.mark.parametrize(
    "config, backend, nodes, names",
    [
        (CollectivesConfig(crossover_kb=100), "gloo", TWO_BY_TWO, ["flat", "hierarchical"]),
        (CollectivesConfig(crossover_kb=0), "nccl", TWO_BY_TWO, ["hierarchical"]),
        (CollectivesConfig(), "gloo", TWO_BY_TWO, ["flat", "hierarchical"]),
        (CollectivesConfig(), "gloo", [[0, 1, 2], [3, 4, 5]], ["hierarchical"]),
        (CollectivesConfig(), "nccl", TWO_BY_TWO, ["flat"]),
        (CollectivesConfig(shard="hierarchical"), "nccl", TWO_BY_TWO, ["hierarchical"]),
        (CollectivesConfig(shard="flat"), "gloo", TWO_BY_TWO, ["flat"]),
        (CollectivesConfig(shard="hierarchical"), "gloo", [[0, 1, 2, 3]], ["flat"]),
    ],
)
def test_groups_are_formed_for_what_may_be_chosen_and_no_more(config, backend, nodes, names):
    assert possible(config, backend, "shard", nodes) == names


def test_replicas_gather_nothing_so_what_gathers_need_is_not_formed_for_them():
    assert possible(CollectivesConfig(), "gloo", "replica", TWO_BY_TWO) == ["hierarchical"]


@st.composite
def some_nodes(draw):
    count, width = draw(st.integers(2, 6)), draw(st.integers(2, 8))
    return [list(range(n * width, (n + 1) * width)) for n in range(count)]


@pytest.mark.parametrize("name", ALGORITHMS)
@given(nodes=some_nodes())
def test_every_stage_splits_the_axis_evenly_and_the_last_reach_is_everybody(name, nodes):
    assert has_tiers(nodes)
    stages, size = ALGORITHMS[name](nodes), len(nodes) * len(nodes[0])
    for stage, before in zip(stages, runs(stages), strict=True):
        assert sorted(p for group in stage for p in group) == list(range(size))
        assert len({len(group) for group in stage}) == 1
        for group in stage:  # neighbours, in order: the next run starts where the one before it ends
            reach = [before[p] for p in group]
            assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(reach))
        for group in stages[-1]:
            last = runs(stages)[-1]
            assert (last[group[0]][0], last[group[-1]][1]) == (0, size - 1)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(nodes=some_nodes())
def test_after_all_stages_every_rank_holds_its_own_slice(name, nodes):
    stages = ALGORITHMS[name](nodes)
    held = {p: order(stages) for group in stages[0] for p in group}
    for stage in stages:
        for group in stage:
            for place, p in enumerate(group):
                width = len(held[p]) // len(group)
                held[p] = held[p][place * width : (place + 1) * width]
    assert held == {p: [p] for p in held}
