"""A plan is only as good as the figures it starts from: all hardware asked for is there, in the right units, and each
figure has a source."""

from __future__ import annotations

import math

import pytest

from phalanx.core.errors import UserError
from phalanx.hardware import Catalogue, cluster

GB, TERA, GIB = 1e9, 1e12, 2**30
# chip, bf16 TFLOP/s, GB in its name, memory TB/s, scale-up GB/s one way, domain, Gbit/s per chip
DATA_SHEETS = [
    ("a100-40", 312, 40, 1.555, 300, 8, 200),
    ("a100-80", 312, 80, 2.039, 300, 8, 200),
    ("h100", 989, 80, 3.35, 450, 8, 400),
    ("h800", 989, 80, 3.35, 200, 8, 400),
    ("h200", 989, 141, 4.8, 450, 8, 400),
    ("gh200-144", 989, 144, 4.8, 450, 32, 400),
    ("b200", 2250, 180, 8, 900, 8, 400),
    ("b300", 2250, 288, 8, 900, 8, 800),
    ("gb200", 2500, 186, 8, 900, 72, 400),
    ("gb300", 2500, 288, 8, 900, 72, 800),
    ("mi300x", 1307, 192, 5.3, 448, 8, 400),
    ("tpu-v5e", 197, 16, 0.819, 4 * 45, 256, 25),
    ("tpu-v5p", 459, 96, 2.765, 6 * 90, 8960, 50),
    ("tpu-v6e", 918, 32, 1.638, 4 * 90, 256, 100),
    ("trn2", 667, 96, 2.9, 512, 16, 200),
    ("gaudi3", 1677, 128, 3.67, 525, 8, 600),
]


@pytest.mark.parametrize("name, bf16, named_gb, memory, scale_up, domain, net", DATA_SHEETS)
def test_the_figures_of_the_data_sheets_in_si_units(catalogue, name, bf16, named_gb, memory, scale_up, domain, net):
    node = catalogue.node(name)
    assert node.chip.peak["bf16"] == pytest.approx(bf16 * TERA, rel=1e-3)
    assert node.chip.memory_bytes_per_s == pytest.approx(memory * TERA)
    # Data sheets round and mix GB with GiB; what can be allocated is never more than that many GiB.
    assert 0.88 * named_gb * GIB < node.chip.memory_bytes <= named_gb * GIB
    assert node.scale_up.bytes_per_s == pytest.approx(scale_up * GB) and node.scale_up.domain == domain
    assert node.nic_bytes_per_s == pytest.approx(net * GB / 8)


def test_an_h100_is_what_the_arithmetic_of_the_requirements_starts_from(catalogue):
    node = catalogue.node("h100")
    assert node.chips == 8 and node.chip.sms == 132 and node.watts == 10_200
    assert 2 * node.scale_up.bytes_per_s == 900 * GB  # NVLink is usually quoted both ways
    assert node.nics * node.nic_bytes_per_s * 8 == pytest.approx(3.2 * TERA)
    assert node.dollars_per_chip_hour and node.dollars_per_chip_hour.median == 3.25


def test_every_entry_has_sources_and_plausible_figures(catalogue):
    entries = [*catalogue.chips.values(), *catalogue.nodes.values(), *catalogue.fabrics.values()]
    for entry in [*entries, *catalogue.sites.values()]:
        assert len(" ".join(entry.source)) > 40, entry.name
    for node in catalogue.nodes.values():
        assert node.chip is catalogue.chips[node.chip.name]
        assert not node.watts or 1 < node.watts / (node.chips * node.chip.watts) < 2.5, node.name
        assert all(0.4 < got / node.chip.peak[name] < 1 for name, got in node.chip.mamf.items()), node.name
        if node.scale_up.shape == "mesh":
            assert node.scale_up.link_bytes_per_s * (node.scale_up.domain - 1) == node.scale_up.bytes_per_s
    for site in catalogue.sites.values():
        assert 1 < site.pue < 2 and 0 < site.grams_co2_per_kwh < 1000 and 0.02 < site.dollars_per_kwh < 0.5


@pytest.mark.parametrize("said", ["H100", "h100", "dgx-h100", "H100-80GB (A3)", " DGX H100 ", "dgx_h100"])
def test_people_write_names_in_many_ways(catalogue, said):
    assert catalogue.node(said).name == "dgx-h100" and catalogue.chip(said).name == "h100"


@pytest.mark.parametrize(
    "ask, field, near",
    [
        (lambda c: c.chip("h10"), "chip", "h100"),
        (lambda c: c.cluster("b20", 8), "hardware", "b200"),
        (lambda c: c.fabric("rail_ndr2"), "fabric", "rail-ndr"),
        (lambda c: c.site("frnace"), "site", "france"),
        (lambda c: c.find("lama3"), "name", "meta-llama3"),
    ],
)
def test_an_unknown_name_lists_the_near_ones(catalogue, ask, field, near):
    with pytest.raises(UserError) as error:
        ask(catalogue)
    assert error.value.field == field and near in error.value.remedy


def test_a_name_like_nothing_lists_all(catalogue):
    with pytest.raises(UserError, match=r"there is a100-40, .*tpu-v6e"):
        catalogue.chip("zzzzzz")


@pytest.mark.parametrize(
    "gpus, nearest", [(12, "8 or 16"), (99_999, "99,992 or 100,000"), (3, "ask for 8;"), (0, "8"), (-8, "8")]
)
def test_a_part_of_a_node_is_refused_with_the_nearest_counts(catalogue, gpus, nearest):
    with pytest.raises(UserError) as error:
        catalogue.cluster("h100", gpus)
    assert error.value.field == "gpus" and error.value.value == gpus and nearest in error.value.remedy


def test_a_divisor_of_one_node_is_a_share_of_it(catalogue):
    whole, part = catalogue.cluster("h100", 8), catalogue.cluster("h100", 2)
    assert part.num_chips == 2 and part.nodes == 1 and part.node.scale_up.domain == 2 and part.node.nics == 2
    assert part.node.watts == whole.node.watts / 4 and part.node.nic_bytes_per_s == whole.node.nic_bytes_per_s
    assert part.node.host_memory_bytes == whole.node.host_memory_bytes // 4


def test_a_scale_up_domain_may_be_many_nodes(catalogue):
    rack = catalogue.cluster("gb200", 144)
    assert rack.nodes == 36 and rack.node.domain_nodes == 18 and rack.num_chips == 144
    assert catalogue.node("tpu-v5p").domain_nodes == 2240 and math.prod(catalogue.node("tpu-v5p").scale_up.dims) == 8960


def test_a_cluster_without_a_catalogue_at_hand():
    made = cluster("h100", gpus=16384, site="france")
    assert (made.nodes, made.num_chips, made.fabric.name, made.site.name) == (2048, 16384, "rail-ndr", "france")


def test_all_hardware_of_the_catalogue_makes_clusters_of_every_size(catalogue: Catalogue):
    for name, node in catalogue.nodes.items():
        for wanted in (1, node.chips, 1024, 100_000, 1_000_000):
            gpus = max(1, wanted // node.chips * node.chips)
            if wanted == 1_000_000 and not catalogue.fabrics[node.fabric].larger:
                continue
            made = catalogue.cluster(name, gpus)
            assert made.num_chips == gpus and made.fabric.tier_of(made.nodes).span_nodes >= made.nodes
