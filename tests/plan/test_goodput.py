"""Goodput, recovery and the bill, compared with published effective times and in their limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.hardware.catalogue import load_packaged
from phalanx.plan.cost.goodput import (
    DAY_S,
    contained_share,
    figures,
    goodput,
    interval_s,
    rate_per_chip_s,
    restart_share,
)
from phalanx.plan.cost.money import DRAWN, bill
from phalanx.plan.cost.profiles import default_profile
from phalanx.plan.known_models import published_shape
from phalanx.plan.planner import Request, find, plan_of, usual_batch
from phalanx.plan.search.space import Ask, Limits


@pytest.fixture(scope="module")
def catalogue():
    return load_packaged()


@pytest.fixture(scope="module")
def found(catalogue):
    shape = published_shape("llama3-405b", 8192)
    limits = Limits(pins={"tp": 8, "pp": 16, "cp": 1, "micro_batch": 1})
    cluster = catalogue.cluster("h100", 16384)
    ask = Ask(shape, cluster, default_profile(cluster.node.chip), usual_batch(16384, 8192), limits)
    return find(Request("llama3-405b", ask, 15e12))


@pytest.mark.parametrize("case", figures()["published"], ids=lambda case: case["name"])
def test_published_effective_times(case):
    mtbf = DAY_S / (case["per_1000_node_days"] / 1000 * case["chips"] / 8)
    stop = case.get("stop_s", figures()["stops"]["restart_s"])
    every = interval_s(5.0, mtbf)
    if case.get("contained"):
        share = contained_share(mtbf, stop, 5.0, every, 60.0, 32)
    else:
        share = restart_share(mtbf, stop, 5.0, every)
    if case["kind"] == "at least":
        assert case["effective"] <= share < 1
    else:
        assert share == pytest.approx(case["effective"], abs=0.1)


def test_rates_are_those_of_their_sources(catalogue):
    rate = figures()["rates"]["llama3"]["per_1000_node_days"]
    assert rate == pytest.approx(419 / 54 / 2048 * 1000, rel=1e-3)
    h100 = catalogue.cluster("h100", 16384)
    assert 1 / (rate_per_chip_s(h100) * 16384) / 3600 == pytest.approx(54 * 24 / 419, rel=1e-3)
    assert rate_per_chip_s(h100, per_1000_node_days=8.0) == pytest.approx(1e-3 / DAY_S)
    assert rate_per_chip_s(catalogue.cluster("tpu-v5p", 64)) < rate_per_chip_s(h100)


def test_the_interval_is_the_best_there_is():
    mtbf, cost, stop = 3600.0, 20.0, 300.0
    best = float(interval_s(cost, mtbf))
    assert best == pytest.approx((2 * cost * mtbf) ** 0.5 - cost, rel=0.03)
    around = [float(restart_share(mtbf, stop, cost, best * f)) for f in (0.7, 1.0, 1.4)]
    assert max(around) == around[1]


def test_a_share_is_a_share_even_when_nothing_ever_gets_done():
    mtbf = np.array([1e-3, 1.0, 1e3, 1e9])
    for share in (restart_share(mtbf, 600.0, 10.0, interval_s(10.0, mtbf)),
                  contained_share(mtbf, 60.0, 10.0, interval_s(10.0, mtbf), 60.0, 8)):  # fmt: skip
        assert np.all((share >= 0) & (share <= 1)) and np.all(np.isfinite(share))
        assert np.all(np.diff(share) >= 0) and share[-1] > 0.99


def test_containment_beats_a_restart_and_needs_two_replicas(found):
    ask, c = found.ask, found.candidates
    with_it, without = (goodput(ask.cluster, c, found.costs, on) for on in (True, False))
    many = c.replica > 1
    assert many.any() and np.all(with_it.share[many] > without.share[many])
    assert np.all(with_it.share[~many] == without.share[~many]) and not np.any(with_it.contained[~many])
    assert np.all(goodput(ask.cluster, c, found.costs, which="high").share <= with_it.share)


def test_a_join_stops_all_for_its_state(found):
    ask, c = found.ask, found.candidates
    slow = replace(ask.cluster, node=replace(ask.cluster.node, nic_bytes_per_s=ask.cluster.node.nic_bytes_per_s / 100))
    fast, slow = (goodput(cluster, c, found.costs) for cluster in (ask.cluster, slow))
    state = found.costs.memory["weights"] + found.costs.memory["optimizer"]
    longer = 99 * state / ask.cluster.node.nic_bytes_per_s
    many = fast.contained
    assert np.allclose((slow.stop_s - fast.stop_s)[many], np.broadcast_to(longer, many.shape)[many])
    assert np.all(slow.share[many] < fast.share[many])


def test_the_bill_adds_up(catalogue):
    cluster = catalogue.cluster("h100", 16384, site="us-hyperscale")
    price = cluster.node.dollars_per_chip_hour
    b = bill(cluster, 15e12, 15e12 / (30 * DAY_S))
    assert b.days == pytest.approx(30) and b.chip_hours == pytest.approx(16384 * 720)
    assert b.dollars == pytest.approx(price.median * b.chip_hours) and b.dollars_low < b.dollars < b.dollars_high
    assert b.mwh == pytest.approx(2048 * 10.2e-3 * DRAWN * 720 * 1.1)
    assert b.tonnes_co2 == pytest.approx(b.mwh * 0.373) and b.joules_per_token == pytest.approx(b.mwh * 3.6e9 / 15e12)


def test_what_the_catalogue_does_not_know_stays_unknown(catalogue):
    cluster = catalogue.cluster("h100", 8)
    bare = replace(cluster.node, dollars_per_chip_hour=None, watts=0.0, chip=replace(cluster.node.chip, watts=0.0))
    b = bill(replace(cluster, node=bare), 1e9, 1e6)
    assert b.dollars is None and b.mwh is None and b.tonnes_co2 is None and b.seconds == pytest.approx(1000)


def test_llama_405b_takes_about_what_it_took(found):
    """30.84 M H100-hours for 15.6 T tokens (model card of Llama 3.1 405B), part of which used longer sequences and
    fewer GPUs than here."""
    ask = replace(found.ask, profile=default_profile(found.ask.cluster.node.chip, "megatron"), contains=False)
    request = Request("llama3-405b", ask, 15.6e12)
    plan = plan_of(request, find(request))
    assert plan.bill.chip_hours == pytest.approx(30.84e6, rel=0.25)
    assert plan.bill.days < plan.bill_high.days and plan.step_low_s < plan.step_s < plan.step_high_s
    assert sum(plan.seconds.values()) == pytest.approx(plan.step_s)
    assert sum(plan.memory.values()) == pytest.approx(plan.memory_bytes)
