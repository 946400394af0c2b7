"""Which network a group of ranks talks over: spans that follow from the switches, and refusals where they end."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.hardware.catalogue import load_packaged

CATALOGUE = load_packaged()


def spans(hardware: str, gpus: int, fabric: str | None = None) -> list[int]:
    return [tier.span_nodes for tier in CATALOGUE.cluster(hardware, gpus, fabric=fabric).fabric.tiers]


@pytest.mark.parametrize(
    "fabric, ports",
    [
        ("rail-ndr", 65_536),  # K^3/4 with K = 64
        ("rail-xdr", 746_496),  # and with K = 144
        ("fat-tree-ndr", 65_536),
        ("multiplane-ndr", 16_384),  # 8 planes of K^2/2
        ("slingshot", 261_632),
        ("meta-llama3", 24_576),
    ],
)
def test_a_fabric_joins_as_many_ports_as_its_switches_give(fabric, ports):
    assert CATALOGUE.cluster("h100", ports, fabric=fabric).num_chips == ports
    with pytest.raises(UserError) as error:
        CATALOGUE.cluster("h100", ports + 8, fabric=fabric)
    assert error.value.field == "fabric" and f"{ports:,} chips" in error.value.remedy


def test_two_tiers_are_built_where_they_suffice():
    assert spans("h100", 2048, "rail-ndr") == [32, 256]  # K/2 nodes on the rails of a leaf, K^2/2 ports
    assert spans("h100", 2056, "rail-ndr") == [32, 128, 8192]  # a third tier takes half the spine's ports
    assert spans("h100", 2048, "fat-tree-ndr") == [4, 256]  # all eight cards of a node on one leaf
    assert spans("gh200", 2048, "fat-tree-ndr") == [32, 2048]  # one card per node


def test_oversubscription_narrows_what_is_beyond_the_leaf_and_widens_it():
    wired = CATALOGUE.cluster("h100", 1024, fabric="fat-tree-ndr:3").fabric
    assert wired.name == "fat-tree-ndr:3"
    assert [tier.span_nodes for tier in wired.tiers] == [6, 384]  # 48 of 64 ports down, 64 such leaves
    assert [tier.bytes_per_s_factor for tier in wired.tiers] == pytest.approx([1, 1 / 3])


@pytest.mark.parametrize(
    "name", ["fat-tree-ndr:0.5", "fat-tree-ndr:three", "fat-tree-ndr:", "rail-ndr:-1", "rail-ndr:nan"]
)
def test_a_wrong_oversubscription_is_refused(name):
    with pytest.raises(UserError, match="no oversubscription"):
        CATALOGUE.fabric(name)


def test_a_cluster_that_outgrows_its_fabric_is_built_as_a_campus():
    building, campus = (CATALOGUE.cluster("h100", gpus).fabric for gpus in (65_536, 99_968))
    assert (building.name, campus.name) == ("rail-ndr", "campus-ndr")
    assert campus.tier_of(12_496).bytes_per_s_factor == pytest.approx(1 / 2.8)
    assert campus.tier_of(6_016).bytes_per_s_factor == 1  # 32 x 32 x 47 ports of a building, by eights
    with pytest.raises(UserError):
        CATALOGUE.cluster("h100", 99_968, fabric="rail-ndr")


def test_metas_networks():
    llama3, llama4 = CATALOGUE.fabric("meta-llama3"), CATALOGUE.fabric("meta-llama4")
    assert [llama3.tier_of(n).name for n in (1, 2, 3, 384, 385, 3072)] == ["rack", "rack", "pod", "pod"] + [
        "cluster"
    ] * 2
    assert llama3.tier_of(2048).bytes_per_s_factor == pytest.approx(1 / 7)
    rack_s = llama4.tiers[0].latency_s
    assert [tier.latency_s / rack_s for tier in llama4.tiers] == pytest.approx([1, 7, 15, 30])
    assert [1 / tier.bytes_per_s_factor for tier in llama4.tiers] == pytest.approx([1, 1, 2.8, 2.8])


def test_a_torus_is_its_own_first_tier():
    wired = CATALOGUE.cluster("tpu-v5e", 1024)
    slice_, beyond = wired.fabric.tier_of(32), wired.fabric.tier_of(33)
    assert slice_.span_nodes * wired.node.chips == 256
    assert slice_.bytes_per_s_factor * wired.node.nic_bytes_per_s == pytest.approx(4 * 45e9)
    assert beyond.bytes_per_s_factor == 1


@given(st.sampled_from(sorted(CATALOGUE.fabrics)), st.lists(st.integers(1, 3000), min_size=1, max_size=20))
def test_many_groups_at_once_see_what_each_alone_sees(name, groups):
    wired = CATALOGUE.fabrics[name].sized(CATALOGUE.node("h100"), 1500)
    factors, latencies_s = wired.tiers_of(np.array(groups))
    assert factors.tolist() == [wired.tier_of(n).bytes_per_s_factor for n in groups]
    assert latencies_s.tolist() == [wired.tier_of(n).latency_s for n in groups]


@given(st.sampled_from(sorted(CATALOGUE.nodes)), st.integers(1, 20_000))
def test_farther_is_never_faster(name, nodes):
    node = CATALOGUE.nodes[name]
    tiers = CATALOGUE.cluster(name, nodes * node.chips).fabric.tiers
    for near, far in itertools.pairwise(tiers):
        assert near.span_nodes < far.span_nodes
        assert near.bytes_per_s_factor >= far.bytes_per_s_factor and near.latency_s <= far.latency_s
    assert tiers[-1].span_nodes >= nodes
