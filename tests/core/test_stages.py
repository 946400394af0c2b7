"""Layers in runs of nearly equal cost; who holds which stage."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.layout import CHUNKS, Coord, Layout
from phalanx.core.shape import balance

degree = st.integers(1, 3)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_cheaper_dearest_part(costs, data):
    parts = data.draw(st.integers(1, len(costs)))

    def dearest(counts):
        edges = [0, *itertools.accumulate(counts)]
        return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

    counts = balance(costs, parts)
    assert sum(counts) == len(costs) and min(counts) >= 1 and len(counts) == parts
    others = itertools.combinations(range(1, len(costs)), parts - 1)
    best = min(dearest([b - a for a, b in itertools.pairwise((0, *cut, len(costs)))]) for cut in others)
    assert dearest(counts) == best


def test_a_heavy_head_takes_layers_from_the_last_stage():
    assert balance([1.0] * 8, 4) == [2, 2, 2, 2]
    assert balance([1.0] * 7 + [3.0], 4)[-1] == 1


@given(degree, degree, degree, degree, degree)
def test_every_rank_has_one_coordinate(replica, pp, shard, cp, tp):
    layout = Layout(replica, shard, tp, pp=pp, cp=cp)
    coords = [layout.coord(r) for r in range(layout.world_size)]
    assert len(set(coords)) == layout.world_size
    assert [layout.rank(c) for c in coords] == list(range(layout.world_size))


@pytest.mark.parametrize("schedule", CHUNKS)
def test_every_stage_is_on_one_rank(schedule):
    layout = Layout(pp=4, schedule=schedule)
    held = sorted(stage for pp in range(4) for stage in layout.stages_of(pp))
    assert held == list(range(layout.num_stages))
    assert all(stage in layout.stages_of(layout.rank_of_stage(stage)) for stage in held)


def test_the_v_goes_down_and_up_again():
    layout = Layout(pp=3, schedule="zbv")
    assert [layout.stages_of(pp) for pp in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert layout.rank_of_stage(0) == layout.rank_of_stage(5)  # input and loss on one rank


def test_ranks_that_talk_most_are_neighbours():
    layout = Layout(1, 2, 2, pp=2, cp=2)
    assert [layout.coord(r) for r in range(4)] == [Coord(0, 0, t, 0, c) for c in (0, 1) for t in (0, 1)]
