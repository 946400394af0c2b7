"""Who holds what, and first values that do not depend on it."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.layout import Layout
from phalanx.core.shape import ModelConfig, chunk_bounds
from phalanx.model import load_family
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
