"""Who computes which micro-batches of a step, whichever replicas are there and whatever they hold already. When this
fails, a sample is trained on twice or never, or an intact replica idles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.deal import deal
from phalanx.core.layout import Coord, Layout
from phalanx.parallel.pipeline import order
from phalanx.parallel.tree import cover
from tests.cases import make_job


@st.composite
def jobs(draw):
    replica, shard, each = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    zero, tp = draw(st.sampled_from([1, 3])), draw(st.sampled_from([1, 2]))
    return make_job((replica, shard, tp), zero=zero, global_batch=replica * shard * each)


def lose_some(draw, job, held):
    """A generation after another: fewer replicas, and some have lost what they held."""
    there = sorted(held)
    left = draw(st.lists(st.sampled_from(there), min_size=1, unique=True))
    return {r: held[r] if draw(st.booleans()) else () for r in left}


@given(jobs(), st.data())
def test_every_micro_batch_is_dealt_once_evenly_and_to_all(job, data):
    held = dict.fromkeys(range(job.layout.replica), ())
    for _ in range(3):
        held = lose_some(data.draw, job, held)
        dealt = deal(job, held, held)
        assert dealt == deal(job, sorted(held, reverse=True), {r: set(h) for r, h in held.items() if h})
        wholes = [dealt.whole(r) for r in dealt.replicas]
        assert sorted(i for whole in wholes for i in whole) == list(range(job.num_micro))
        assert {r: tuple(sorted(held[r])) for r in held} == dealt.held
        sizes = [len(dealt.todo[r]) for r in held]
        assert max(sizes) - min(sizes) <= job.layout.shard
        for r, todo in dealt.todo.items():
            by_rank = [job.micro_indices(Coord(r, s, 0), todo) for s in range(job.layout.shard)]
            assert sorted(i for mine in by_rank for i in mine) == list(todo)
            assert len({len(mine) for mine in by_rank}) == 1, "the ranks of a replica make the same number of passes"
            if not job.reduces_once:  # they add up neighbours, micro-batch by micro-batch
                assert all(later == [i + s for i in by_rank[0]] for s, later in enumerate(by_rank))
        held = {r: dealt.whole(r) for r in dealt.replicas}


@given(jobs(), st.data())
def test_a_step_without_a_lost_replica_keeps_the_shares_of_full_strength(job, data):
    there = data.draw(st.sets(st.integers(0, job.layout.replica - 1), min_size=1))
    dealt = deal(job, there)
    for r in there:
        full = {i for s in range(job.layout.shard) for i in job.micro_indices(Coord(r, s, 0))}
        assert full <= set(dealt.todo[r])
        if len(there) == job.layout.replica:
            assert full == set(dealt.todo[r])


def test_eight_replicas_that_lose_one_leave_seven_busy():
    job = make_job((8, 1, 1), global_batch=64)
    shares = deal(job, [0, 1, 2, 4, 5, 6, 7]).todo
    assert sorted(map(len, shares.values())) == [9, 9, 9, 9, 9, 9, 10]
    assert max(len(cover(share)) for share in shares.values()) == 2, "few parts, so few bytes in the exact exchange"


def test_one_that_holds_nothing_is_helped_by_the_others():
    job = make_job((4, 1, 1), global_batch=16)
    dealt = deal(job, [0, 1, 2], {0: range(4), 1: range(4, 8)})  # 3 is gone, 2 has computed nothing
    assert dealt.todo == {0: (11, 12, 13), 1: (14, 15), 2: (8, 9, 10)}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "interleaved-zb", "zbv"])
@pytest.mark.parametrize("pp", [2, 4])
def test_a_share_is_cut_into_passes_that_the_schedule_allows(schedule, pp):
    layout = Layout(pp=pp, schedule=schedule)
    for count in range(1, 17):
        assert sum(layout.passes(count)) == count
        for n in layout.passes(count):
            assert set(order(layout, n)) == set(range(pp))
        if len(layout.passes(count)) > 1:
            with pytest.raises(ValueError, match="micro"):
                order(layout, count)
    assert layout.passes(0) == []
