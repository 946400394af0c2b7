"""The layouts that the search considers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.hardware import cluster
from phalanx.plan.cost.profiles import default_profile
from phalanx.plan.known_models import published_shape
from phalanx.plan.search.space import Ask, Limits, chunk_counts


@pytest.mark.parametrize(("model", "layers"), [("llama2-70b", 80), ("deepseek-v3", 61)])
def test_only_chunks_that_cut_the_layers_evenly_are_looked_at_unless_one_is_pinned(model, layers):
    """Uneven ones stall in ways that the bubble formula does not cover: 12 % of a step for 126 layers in 112."""
    shape = published_shape(model, 4096)
    assert int(shape.layers) == layers
    h100 = cluster("h100", 1024)
    ask = Ask(shape, h100, default_profile(h100.node.chip), 1024)
    for pp in (2, 4, 8, 16):
        counts = chunk_counts(ask, pp)
        assert counts[0] == 1
        assert all(not layers % (pp * v) or not (layers + 2) % (pp * v) for v in counts[1:]), (pp, counts)
    pinned = replace(ask, limits=Limits(pins={"vpp": 3}))
    assert chunk_counts(pinned, 8) == [3]
    assert chunk_counts(ask, 1) == [1]
