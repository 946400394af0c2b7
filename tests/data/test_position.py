"""Where a resumed run continues in its data. When this fails, samples are served twice, or never, after a resume."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.core.job import DataConfig, Job, TrainConfig
from phalanx.core.layout import Layout
from phalanx.data.build import build
from phalanx.data.order import Order, Stage, Stream, continued, quotas
from phalanx.data.samples import places_of
from phalanx.data.selection import Position, RunData
from phalanx.data.tokenizer import Bytes

SOURCES = {"a": 80_000, "b": 48_000, "c": 64_000}  # bytes; each is a token

WEIGHTS = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)
LAYOUT = st.sampled_from([1, 2, 3, 4, 8]).flatmap(  # replicas, and how many of the ranks are on a node
    lambda replicas: st.builds(
        lambda ranks_per_node, shard: Layout(replica=replicas, shard=shard, ranks_per_node=ranks_per_node),
        st.sampled_from([n for n in range(1, replicas + 1) if replicas % n == 0]),
        st.sampled_from([1, 2]),
    )
)
# A run: its layout, micro-batches of 2 for each rank, steps, weights, how far a skip is ahead.
SEGMENT = st.tuples(LAYOUT, st.integers(1, 3), st.integers(1, 12), WEIGHTS, st.integers(0, 40))


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Build a data set of three sources, and return its address."""
    root = tmp_path_factory.mktemp("three")
    for n, (label, size) in enumerate(SOURCES.items()):
        (root / label).write_bytes(bytes([65 + n]) * size)
    inputs = [(label, str(root / label)) for label in SOURCES]
    build(inputs, root / "set", Bytes(), workers=1, chunk_items=128, shard_chunks=8)
    return str(root / "set")


def draws_of(order: Order, positions: np.ndarray) -> dict[tuple[int, int], list[int]]:
    """Return the draws at these positions of the order, in turn, for each stream and group."""
    index, group = np.divmod(positions, order.groups)
    stream, draw = np.empty_like(positions), np.empty_like(positions)
    for stage in set(order.stage(positions).tolist()):
        here = order.stage(positions) == stage
        stream[here], draw[here] = order._draws(stage, group[here], index[here])
    out: dict[tuple[int, int], list[int]] = {}
    for key, each in zip(zip(stream.tolist(), group.tolist(), strict=True), draw.tolist(), strict=True):
        out.setdefault(key, []).append(each)
    return out


@settings(max_examples=40, deadline=None)
@given(st.lists(SEGMENT, min_size=2, max_size=4), st.integers(0, 1 << 40))
def test_a_resume_serves_exactly_the_orders_samples_none_twice_and_none_left_out(three, segments, seed):
    before, step, seen, skips = None, 0, [], []
    for layout, micro, steps, weights, skip in segments:
        batch = 2 * micro * layout.world_size
        position = position_of(before, step) if before else None
        if before and skip:
            at = int(Order.from_dict(before.order).position(before.cursor(step)))
            skips = [[max(0, at - 5), at + skip]]
        config = DataConfig(
            source=three, stages=[{"at": 0, "weights": dict(zip("abc", weights, strict=True))}], skips=skips
        )
        train = TrainConfig(seq_len=16, global_batch=batch, micro_batch=2)
        job = Job(seed=seed, train=train, layout=layout, data=config)
        data = RunData.plan(job, three, position)
        alone = RunData.plan(replace(job, layout=Layout()), three, position)
        assert data.order == alone.order, "the order follows the layout"
        if before:  # what was served stays where it was
            past, orders = np.arange(before.cursor(step)), [Order.from_dict(d.order) for d in (before, data)]
            assert all(np.array_equal(a, b) for a, b in zip(*(order.locate(past) for order in orders), strict=True))
        for here in range(step, step + steps):
            coords = [layout.coord(rank) for rank in range(layout.world_size)]
            served = [places_of(list(job.micro_indices(coord)), 2) + data.cursor(here) for coord in coords]
            seen += sorted(np.concatenate(served).tolist())
        step += steps
        before = data
    order, cursor = Order.from_dict(before.order), before.cursor(step)
    assert seen == list(range(cursor)), "every place once, in its turn"
    served, skipped = order.position(np.arange(cursor)).tolist(), [p for a, b in order.skips for p in range(a, b)]
    assert sorted([*served, *(p for p in skipped if p < served[-1])]) == list(range(served[-1] + 1))
    for draws in draws_of(order, np.arange(served[-1] + 1)).values():
        assert draws == list(range(len(draws))), "a source goes on where it was, through every change of weights"
    streams, samples = order.locate(np.arange(cursor))
    for stream in range(3):
        mine = samples[streams == stream]
        assert len(set(mine.tolist())) == len(mine) or len(mine) > order.streams[stream].num_samples // 2


def test_without_a_change_the_order_is_the_same():
    streams = (Stream("a", 5000, 4, 8), Stream("b", 3000, 4, 8), Stream("c", 4000, 4, 8))
    order = Order(7, 4, streams, (Stage(0, quotas([1, 1, 1])), Stage(500, quotas([2, 1, 1]))), ((10, 20),))
    assert continued(order, 300, order).to_dict() == order.to_dict()


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    root = tmp_path_factory.mktemp("sets")
    for n, label in enumerate(("web", "code")):
        (root / label).write_bytes(bytes([65 + n]) * 9000)
    old = build([("web", str(root / "web"))], root / "set", Bytes(), workers=1, chunk_items=128, shard_chunks=8)[1]
    new = build([("code", str(root / "code"))], root / "set", Bytes(), workers=1, append=True)[1]
    build([("code", str(root / "code"))], root / "other", Bytes(), workers=1, chunk_items=128, shard_chunks=8)
    return root, old, new


def job_of(source, batch=8, seed=1, seq_len=16, **data):
    train = TrainConfig(seq_len=seq_len, global_batch=batch, micro_batch=2)
    return Job(seed=seed, train=train, layout=Layout(), data=DataConfig(source=str(source), **data))


def position_of(data, step):
    return Position(step, data.cursor(step), data.order, data.version, data.seq_len)


def test_another_batch_continues_at_the_cursor(sets):
    url = str(sets[0] / "set")
    first = RunData.plan(job_of(url), url)
    assert list(first.places(29)) == list(range(232, 240))
    second = RunData.plan(job_of(url, batch=16), url, position_of(first, 30))
    assert second.places(30) == range(240, 256) and second.places(31) == range(256, 272)
    third = RunData.plan(job_of(url, batch=2), url, position_of(second, 32))
    assert third.places(32) == range(272, 274) and third.order == first.order


def test_a_data_set_that_has_grown_is_mixed_in_from_the_cursor_on(sets):
    root, old, new = sets
    url = str(root / "set")
    first = RunData.plan(job_of(url, version=old), url)
    second = RunData.plan(job_of(url), url, position_of(first, 10))
    assert second.version == new and [start for start, _ in second.order["stages"]] == [0, 80]
    loader = second.open()
    rows = loader.rows(range(200))
    loader.close()
    letters = ["B" in bytes(row[:-1].astype(np.uint8)).decode() for row in rows]
    assert not any(letters[:80]) and any(letters[80:])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (dict(seed=2), "seed = 2"),
        (dict(seq_len=32), "train.seq_len = 32"),
        (dict(groups=16), "data.groups = 16"),
        (dict(source="other"), "data.source"),
    ],
)
def test_what_cannot_change_within_an_order_is_refused_by_its_name(sets, change, field):
    url = str(sets[0] / "set")
    first = RunData.plan(job_of(url), url)
    url = str(sets[0] / change.pop("source", "set"))
    with pytest.raises(UserError, match=field):
        RunData.plan(job_of(url, **change), url, position_of(first, 10))


def test_imported_weights_begin_with_the_first_sample(sets):
    url = str(sets[0] / "set")
    data = RunData.plan(job_of(url), url, Position(1000, 0, {}, "", 0))
    assert data.places(1000) == range(8)
