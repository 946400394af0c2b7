"""Who holds what, and first values that do not depend on it."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.layout import Layout
from phalanx.core.shape import ModelConfig, chunk_bounds
from phalanx.model import Init, load_family
from phalanx.model.init import draw
from phalanx.parallel.schema import describe
from tests.cases import EVEN, ODD, TIED


@given(st.integers(0, 200), st.integers(1, 12))
def test_chunks_are_those_of_torch(size, parts):
    pieces = torch.arange(size).chunk(parts) if size else []
    want = [len(p) for p in pieces] + [0] * (parts - len(pieces))
    assert [b - a for a, b in (chunk_bounds(size, parts, i) for i in range(parts))] == want


@given(st.integers(1, 3), st.integers(1, 5), st.sampled_from([1, 2]))
@settings(max_examples=20)
def test_a_replica_holds_every_element_once(replica, shard, tp):
    layout = Layout(replica, shard, tp)
    for info in describe(load_family("dense"), ODD):
        held = torch.zeros(info.shape, dtype=torch.int64)
        for rank in range(layout.replica_size):
            rows, cols = info.local_slice(layout, layout.coord(rank))
            held[(rows, cols)[: held.dim()]] += 1
        copies = 1 if info.tp_dim is not None else tp
        assert held.eq(copies).all(), info


@pytest.mark.parametrize("config", [EVEN, ODD, TIED, ModelConfig(), dataclasses.replace(EVEN, tied=True)])
def test_the_parameter_count_is_the_modules(config):
    assert sum(i.numel for i in describe(load_family("dense"), config)) == config.num_params


@given(st.integers(1, 400), st.integers(1, 300), st.data())
@settings(max_examples=30, deadline=None)
def test_any_slice_draws_the_numbers_of_the_whole(rows, cols, data):
    shape, init = torch.Size((rows, cols)), Init(std=0.02)
    whole = torch.empty(shape)
    draw(3, "w", shape, init, slice(0, rows), slice(0, cols), whole)
    r0 = data.draw(st.integers(0, rows - 1))
    r1 = data.draw(st.integers(r0, rows))
    c0 = data.draw(st.integers(0, cols - 1))
    c1 = data.draw(st.integers(c0, cols))
    part = torch.empty(r1 - r0, c1 - c0)
    draw(3, "w", shape, init, slice(r0, r1), slice(c0, c1), part)
    assert torch.equal(part, whole[r0:r1, c0:c1])


def test_names_seeds_and_blocks_draw_different_numbers():
    def values(seed, name):
        out = torch.empty(1000, 100)
        draw(seed, name, out.shape, Init(std=1.0), slice(0, 1000), slice(0, 100), out)
        return out

    a = values(1, "a")
    assert abs(a.std() - 1) < 0.02 and abs(a.mean()) < 0.02
    for other in (values(2, "a"), values(1, "b"), a.roll(655, 0)):
        assert abs((a * other).mean()) < 0.02
