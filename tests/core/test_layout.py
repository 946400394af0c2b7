"""Ranks and coordinates."""

from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.job import Job
from phalanx.core.layout import Coord, Layout
from tests.cases import make_job

degree = st.integers(1, 6)


@given(degree, degree, degree)
def test_every_rank_has_one_coordinate(replica, shard, tp):
    layout = Layout(replica, shard, tp)
    coords = [layout.coord(r) for r in range(layout.world_size)]
    assert len(set(coords)) == layout.world_size
    assert [layout.rank(c) for c in coords] == list(range(layout.world_size))


def test_ranks_of_one_tp_group_are_neighbours():
    layout = Layout(2, 2, 4)
    assert [layout.coord(r).tp for r in range(8)] == [0, 1, 2, 3] * 2
    assert {layout.coord(r).replica for r in range(8)} == {0}


def test_replicas_are_grouped_by_the_node_they_live_on():
    assert Layout(4, 1, 2, ranks_per_node=4).peers_by_node(Coord(0, 0, 1)) == [[0, 1], [2, 3]]
    assert Layout(4, 1, 2).peers_by_node(Coord(0, 0, 0)) == [[0, 1, 2, 3]]
    assert Layout(2, 2, 2, ranks_per_node=4).peers_by_node(Coord(0, 0, 0)) == [[0], [1]]


@given(degree, degree, st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_every_micro_batch_is_worked_on_once_and_a_replica_holds_a_run(replica, shard, per_rank, zero):
    job = make_job((replica, shard, 1), zero=zero, global_batch=replica * shard * per_rank)
    by_replica = [sorted(i for s in range(shard) for i in job.micro_indices(Coord(r, s, 0))) for r in range(replica)]
    assert [i for run in by_replica for i in run] == list(range(job.num_micro))


def test_a_job_survives_json():
    job = make_job((2, 2, 2), reduction="exact")
    assert Job.from_dict(job.to_dict()) == job
