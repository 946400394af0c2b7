"""A user's own hardware: added, corrected, and refused with the file, the place and the remedy where it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.core.errors import UserError
from phalanx.hardware import load

CHIP = """
[chips.mine]
vendor = "us"
peak_tflops = { bf16 = 100 }
memory_gib = 10
memory_tb_per_s = 1
sms = 10
source = "measured"
"""


@pytest.fixture
def given(tmp_path: Path):
    def write(text: str, name: str = "my.toml") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_new_node_of_a_new_chip(given):
    text = CHIP + '[nodes.box]\nlike = "dgx-h100"\nchip = "mine"\nsource = "our rack"\n[names]\nours = "box"\n'
    node = load(given(text)).node("ours")
    assert (node.name, node.chip.name, node.chips, node.source) == ("box", "mine", 8, ("our rack",))
    assert node.chip.memory_bytes == 10 * 2**30 and node.chip.peak == {"bf16": 1e14}


def test_a_node_of_ones_own_goes_before_what_people_call_another(given):
    mine = load(given('[nodes.h100]\nlike = "dgx-h100"\nchips = 4\nsource = "our rack"\n'))
    assert mine.node("H100").chips == 4 and mine.find("h100")["nodes"].chips == 4 and mine.node("dgx-h100").chips == 8


def test_one_corrected_figure_leaves_the_others_and_says_whose_it_is(given, catalogue):
    path = given("[nodes.dgx-h100.price]\nmedian = 2.0\n[chips.h100]\nwatts = 650\nmamf_tflops = { bf16 = 700 }\n")
    mine, packaged = load(path), catalogue
    price, before = mine.node("h100").dollars_per_chip_hour, packaged.node("h100").dollars_per_chip_hour
    assert (price.median, price.low, price.source) == (2.0, before.low, before.source)
    chip = mine.chip("h100")
    assert (chip.watts, chip.sms, chip.mamf["bf16"]) == (650, 132, 7e14)
    assert chip.mamf["fp8"] == packaged.chip("h100").mamf["fp8"]
    assert chip.source == (*packaged.chip("h100").source, f"{path}: watts, mamf_tflops")


def test_the_file_at_home_is_under_the_one_that_is_named(given, home):
    entry = '[sites.hall]\npue = {}\ngrams_co2_per_kwh = 1\ndollars_per_kwh = {}\nsource = "meter"\n'
    given(entry.format(1.3, 0.03), "home/.config/phalanx/hardware.toml")
    assert load().site("hall").pue == 1.3
    named = load(given("[sites.hall]\npue = 1.2\n"))
    assert named.site("hall").pue == 1.2 and named.site("hall").dollars_per_kwh == 0.03


NODE = '[nodes.n]\nlike = "dgx-h100"\n'
FABRIC = '[fabrics.f]\nkind = "fat-tree"\ntechnology = "x"\nsource = "us"\n'
WRONG = [
    # what is written, the field that is named, what the remedy or the message says
    ("[chip.x]\n", "chip", "did you mean chips"),
    ("chips = 3\n", "chips", "[chips.NAME]"),
    ("[chips]\nx = 3\n", "chips.x", "[chips.x]"),
    ("[chips.h100]\nwats = 3\n", "chips.h100.wats", "did you mean watts"),
    ("[chips.x]\nvendor = 'us'\n", "chips.x.peak_tflops", "it is missing"),
    ("[chips.h100]\nwatts = '700'\n", "chips.h100.watts", "a number >= 0"),
    ("[chips.h100]\nwatts = true\n", "chips.h100.watts", "not a number"),
    ("[chips.h100]\nwatts = -1\n", "chips.h100.watts", "out of range"),
    ("[chips.h100]\nwatts = nan\n", "chips.h100.watts", "out of range"),
    ("[chips.h100]\nwatts = inf\n", "chips.h100.watts", "out of range"),
    ("[chips.h100]\nsms = 1.5\n", "chips.h100.sms", "whole number"),
    ("[chips.h100]\nmemory_gib = 0\n", "chips.h100.memory_gib", "a number > 0"),
    ("[chips.h100]\nsource = []\n", "chips.h100.source", "Where the figures are from"),
    ("[chips.h100.peak_tflops]\nbf_16 = 3\n", "chips.h100.peak_tflops", "did you mean bf16"),
    ("[chips.h100.mamf_tflops]\nbf16 = 2000\n", "chips.h100.mamf_tflops", "peak"),
    ("[chips.h100]\npeak_tflops = 3\n", "chips.h100.peak_tflops", "bf16 = 989.4"),
    ("[chips.x]\nlike = 'h10'\n", "chips.x.like", "did you mean h100"),
    (NODE + "chip = 'h10'\n", "nodes.n.chip", "did you mean h100"),
    (NODE + "fabric = 'rail'\n", "nodes.n.fabric", "rail-"),
    (NODE + "[nodes.n.scale_up]\nshape = 'swich'\n", "nodes.n.scale_up.shape", "did you mean switch"),
    (NODE + "[nodes.n.scale_up]\nshape = 'torus'\ndims = [2, 2]\n", "nodes.n.scale_up.dims", "sides"),
    (NODE + "[nodes.n.scale_up]\ndomain = 12\n", "nodes.n.scale_up.domain", "multiple or a divisor of 8"),
    (NODE + "[nodes.n.scale_up]\nlink_gb_per_s = 900\n", "nodes.n.scale_up.link_gb_per_s", "sum over the links"),
    (NODE + "[nodes.n.price]\nlow = 9\n", "nodes.n.price.median", "order the three"),
    (FABRIC + "tiers = []\n", "fabrics.f.tiers", "a list of tables with name"),
    (FABRIC + "tiers = [{ name = 'a', latency_us = 1 }]\n", "fabrics.f.tiers", "the radix of the switches"),
    (FABRIC + "tiers = [{ name = 'a', latency = 1 }]\n", "fabrics.f.tiers[0].latency", "did you mean latency_us"),
    (
        FABRIC
        + "tiers = [{ name = 'a', span_nodes = 8, latency_us = 1 }, { name = 'b', span_nodes = 4, latency_us = 2 }]\n",
        "fabrics.f.tiers",
        "wider than the one before",
    ),
    (
        FABRIC
        + "radix = 8\ntiers = [{ name = 'a', latency_us = 1, oversubscription = 2 }, { name = 'b', latency_us = 2 }]\n",
        "fabrics.f.tiers",
        "narrow far",
    ),
    (FABRIC + "radix = 8\nlarger = 'camp'\ntiers = [{ name = 'a', latency_us = 1 }]\n", "fabrics.f.larger", "campus"),
    ("[sites.france]\npue = 0.9\n", "sites.france.pue", "a number >= 1"),
    ("[names]\nx = 'dgx'\n", "names.x", "dgx-"),
    ("[names]\nx = 3\n", "names.x", "no such node"),
    ("[names]\nx = ['dgx-h100']\n", "names.x", "no such node"),
    ("[names]\nX = 'dgx-h100'\n", "names.X", "write x"),
    ("[nodes.'Our H100']\nlike = 'dgx-h100'\n", "nodes.Our H100", "write our-h100"),
    (f"[chips.h100]\nwatts = 1{'0' * 400}\n", "chips.h100.watts", "out of range"),
    ("[fabrics.slingshot]\ntiers = [{ name = 'a', latency_us = 1 }]\n", "fabrics.slingshot.tiers", "three"),
    ("[chips.h100\n", "hardware file", "not a TOML file"),
]


@pytest.mark.parametrize("text, field, said", WRONG)
def test_a_wrong_file_is_refused_with_the_place_and_the_remedy(given, text, field, said):
    path = given(text)
    with pytest.raises(UserError) as error:
        load(path)
    assert error.value.field == field
    assert said in str(error.value) and str(path) in str(error.value) and error.value.remedy


def test_a_file_that_is_not_there_is_the_users_mistake(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "none.toml")


def test_fabrics_that_name_each_other_as_the_larger_one_end_in_a_refusal(given):
    text = "[fabrics.rail-ndr]\nlarger = 'multiplane-ndr'\n[fabrics.multiplane-ndr]\nlarger = 'rail-ndr'\n"
    with pytest.raises(UserError, match="more than"):
        load(given(text)).cluster("h100", 800_000)
