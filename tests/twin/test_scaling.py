"""Scaling curves: users decide by them how large a cluster to rent."""

import pytest

from phalanx.cli.plan_ask import Options, parse_sizes, request
from phalanx.core.errors import UserError
from phalanx.hardware import load
from phalanx.twin.scaling import curves, page, text

CATALOGUE = load()


def at(chips):
    return request(Options("llama3-70b", chips, "h100"), CATALOGUE.cluster("h100", chips))


def test_a_flat_ring_falls_behind_as_the_cluster_grows():
    found = curves(at, (64, 1024, 16_384))
    well, badly = found.efficiency("well"), found.efficiency("badly")
    assert well[64] == 1.0 and all(0 < share <= 1.1 for share in well.values())
    assert well[16_384] > 0.7 and badly[16_384] < 0.5 * well[16_384]
    assert badly[16_384] < badly[1024] <= well[1024]
    worse = {p.chips: p for p in found.badly}[16_384]
    assert worse.goodput < {p.chips: p for p in found.well}[16_384].goodput  # every failure stops the job


def test_sizes_that_cannot_hold_the_model_are_left_out_and_shown_so():
    found = curves(at, (8, 1024))
    assert [p.chips for p in found.well] == [1024] and "1,024" in "\n".join(text(found))
    assert page([found]).count("<circle") == len(found.well) + len(found.badly)
    with pytest.raises(UserError, match="holds the model"):
        curves(at, (8,))


@pytest.mark.parametrize("given", ["8,a", "", "0", "-8", "8;64"])
def test_a_list_of_sizes_that_is_none_is_refused(given):
    with pytest.raises(UserError, match="numbers of chips"):
        parse_sizes(given)
