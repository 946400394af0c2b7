"""If one of these tests fails, figures of shipped scenarios, or of money, have changed since users decided by them."""

import dataclasses
import re
from importlib import resources

import pytest

from phalanx.cli.plan_ask import Options, ask
from phalanx.hardware.catalogue import load as catalogue
from phalanx.plan.cost.money import watts
from phalanx.twin import scenario
from phalanx.twin.closed import sensitivity
from phalanx.twin.seeds import Result, many, one
from phalanx.twin.spent import PARTS

SMALL = scenario.Scenario("small", gpus=64, hardware="h100", step_s=5.0, replica_gpus=16, days=0.5, params=1e9,
                          quality=300.0, spares=0.25)  # fmt: skip
FOLDER = resources.files("phalanx.twin").joinpath("data/scenarios")
PLANNED = {
    name: found[1]
    for name in scenario.shipped()
    if (found := re.search(r"^step_s = .*# phalanx plan (.*)$", FOLDER.joinpath(f"{name}.toml").read_text(), re.M))
}
# docs/twin.md explains how these differ from the planner's current layouts.
OTHER_LAYOUT = {"100k-h100-1t", "100k-sync", "byterobust-9600", "torus-8k"}


@pytest.mark.parametrize(
    ("policy", "digest"),
    [
        ("restart", "2e46051714b1688d"),
        ("hot", "bcc3fdee35aa3e86"),
        ("contained", "79609aca753d8a0a"),
        ("shrink", "10cb143727a2b98a"),
    ],
)
def test_a_seed_gives_the_same_events_as_ever(policy, digest):
    """An intended change, here or in control/, must update the digest."""
    assert one(dataclasses.replace(SMALL, policy=policy).checked(), 7).digest == digest


def test_llama3_is_within_its_published_bands():
    found = many(scenario.load("llama3-16k"), 4)
    assert 380 <= found.interruptions <= 461
    assert 0.90 <= found.effective <= 0.94
    assert many(scenario.load("llama3-16k-60min"), 1).effective < 0.85


@pytest.mark.parametrize("name", PLANNED)
def test_a_step_takes_what_its_plan_says(name):
    words = PLANNED[name].split()
    options = {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    whole = {key: int(value) for key, value in options.items() if key in ("gpus", "global_batch")}
    plan, case = ask(Options(**{**options, **whole})).plan, scenario.load(name)
    assert case.step_s == pytest.approx(plan.step_s, rel=0.05)
    same = (case.gpus, case.micro_batches) == (plan.used, plan.micro_batches)
    same = same and case.replica_gpus == plan.used // plan.layout["replica"]
    assert same == (name not in OTHER_LAYOUT)


def test_each_part_of_the_time_has_its_price():
    """Two days of 64 H100, a quarter of them lost: 768 GPU-hours."""
    case = dataclasses.replace(SMALL, days=2.0)
    shares = {**dict.fromkeys(PARTS, 0.0), "productive": 0.75, "lost": 0.25}
    found = Result(case, [dataclasses.replace(one(dataclasses.replace(SMALL, days=0.01), 0), waterfall=shares)])
    lost, cluster = found.costs()["lost"], catalogue().cluster("h100", 64)
    assert lost["seconds"] == 43_200 and lost["gpu_hours"] == 768
    assert lost["dollars"] == pytest.approx(768 * cluster.node.dollars_per_chip_hour.median)
    assert lost["kwh"] == pytest.approx(12 * watts(cluster) / 1000 * cluster.site.pue)
    assert lost["kg_co2"] == pytest.approx(lost["kwh"] * cluster.site.grams_co2_per_kwh / 1000)
    assert 0.7 < lost["kwh"] / lost["gpu_hours"] < 2.5 and 0.5 < lost["dollars"] / lost["gpu_hours"] < 20
    assert found.costs()["productive"]["dollars"] == pytest.approx(3 * lost["dollars"])
    steps = 17_280  # one day of steps
    assert found.days_for(steps)["mean"] == pytest.approx(4 / 3 * steps * 5 / 86_400)
    assert found.dollars_for(steps) == pytest.approx(2 * lost["dollars"] * found.days_for(steps)["mean"])


def test_what_moves_the_answer_most():
    """docs/twin.md prints these three."""
    found = sensitivity(scenario.load("1m-gpus"), 40.0)
    assert [name for name, _ in found[:3]] == [
        "quality.llama3", "contained.form_base_s", "slow.link_per_1000_node_days"
    ]  # fmt: skip
    assert [points for _, points in found[:3]] == pytest.approx([4.0, 1.2, 0.8], abs=0.05)
