"""The search finds the best layout, deterministically, and keeps to the question."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.hardware import Catalogue
from phalanx.hardware.catalogue import load_packaged
from phalanx.plan.cost.candidates import Candidates
from phalanx.plan.cost.machine import Machine
from phalanx.plan.cost.profiles import default_profile
from phalanx.plan.cost.sizes import ModelShape
from phalanx.plan.known_models import published, published_shape
from phalanx.plan.planner import Request, find, plan_of, usual_batch
from phalanx.plan.search.advice import changes, differences, runner_up
from phalanx.plan.search.exhaustive import Found, _bounds, evaluate_rows, search, seconds_per_token
from phalanx.plan.search.objective import best
from phalanx.plan.search.space import BUCKETS, Ask, Limits, children, cores, data_ranks, size_of


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load_packaged()


def asked(catalogue: Catalogue, model: str = "llama3-8b", gpus: int = 64, hardware: str = "h100", **limits) -> Ask:
    shape = published_shape(model, 8192)
    profile = default_profile(catalogue.node(hardware).chip)
    cluster = catalogue.cluster(hardware, gpus)
    return Ask(shape, cluster, profile, usual_batch(gpus, 8192), Limits(**limits))


def everything(ask: Ask) -> tuple[Candidates, np.ndarray]:
    """Return all layouts of a small space, without leaving any out."""
    found, batch = children(ask, *cores(ask))
    parts = [
        Candidates(
            **{name: getattr(found, name) for name in found.__slots__} | {"bucket_bytes": np.full(len(found), b)}
        )
        for b in BUCKETS
    ]
    return Candidates.concat(parts), np.tile(batch, len(BUCKETS))


@pytest.mark.parametrize("model, gpus", [("llama3-8b", 8), ("llama3-70b", 64), ("mixtral-8x7b", 32)])
def test_nothing_in_the_whole_space_is_better(catalogue, model, gpus):
    ask = asked(catalogue, model, gpus)
    layouts, batch = everything(ask)
    costs = evaluate_rows(ask, layouts, batch)
    value = seconds_per_token(ask, layouts, costs)[costs.valid & costs.fits(ask.profile)]
    found = search(ask)
    assert found.value[0] == pytest.approx(value.min(), rel=1e-12)
    assert found.costed < len(layouts) == found.considered


@pytest.mark.parametrize("model, gpus", [("llama3-70b", 256), ("mixtral-8x7b", 64), ("llama3-8b", 131072)])
def test_no_child_is_below_the_bound_of_its_core(catalogue, model, gpus):
    """The search relies on this when it skips layouts without costing them."""
    ask = asked(catalogue, model, gpus)
    core, batch = cores(ask)
    bound, least = _bounds(ask, Machine.of(ask.cluster), core, batch)
    for row in range(0, len(core), len(core) // 60):
        layouts, sizes = children(ask, core.take([row]), batch[[row]])
        if len(layouts):
            costs = evaluate_rows(ask, layouts, sizes)
            assert seconds_per_token(ask, layouts, costs).min() >= bound[row] * (1 - 1e-12)
            assert np.min(costs.memory_interval(ask.profile)[1]) >= least[row] * (1 - 1e-12)


def test_the_same_question_has_the_same_answer(catalogue):
    ask = asked(catalogue, "llama3-70b", 256)
    one, two = search(ask), search(ask)
    assert [one.candidates.row(i) for i in range(5)] == [two.candidates.row(i) for i in range(5)]
    request = Request("llama3-70b", ask, 1e12)
    assert plan_of(request, find(request)).hash == plan_of(request, find(request)).hash


def test_what_is_found_keeps_to_the_limits(catalogue):
    ask = asked(catalogue, "llama3-70b", 256, margin=0.1)
    found = search(ask)
    c = found.candidates
    assert np.all(found.costs.memory_bytes <= 0.9 * ask.cluster.node.chip.memory_bytes)
    assert np.all(c.tp <= 8) and np.all(8 % c.tp == 0)
    assert np.all((c.world <= 256) & (c.world >= 0.95 * 256))
    assert np.all(found.batch % (c.data_ranks * c.micro_batch) == 0)
    assert np.all(np.abs(found.batch / ask.batch - 1) <= 0.125)
    assert np.all(np.diff(found.value) >= 0)


def test_a_given_batch_is_kept_to_the_sample(catalogue):
    ask = replace(asked(catalogue, "llama3-8b", 64, tolerance=0.0), batch=480)
    found = search(ask)
    assert len(found) and np.all(found.batch == 480)
    assert all(480 % d == 0 for d in data_ranks(ask, 1))


def test_pins_are_kept_and_wrong_ones_leave_nothing(catalogue):
    found = search(asked(catalogue, "llama3-70b", 64, pins={"tp": 4, "pp": 2, "zero": 1, "recompute": "full"}))
    assert found.candidates.row(0) | {"tp": 4, "pp": 2, "zero": 1, "recompute": "full"} == found.candidates.row(0)
    assert not len(search(asked(catalogue, "llama3-70b", 64, pins={"tp": 3})))  # 64 heads


def test_more_memory_and_more_network_never_hurt(catalogue):
    ask = asked(catalogue, "llama3-70b", 256)
    request = Request("llama3-70b", ask, 1e12)
    gains = {c.what: c.gain for c in changes(request, find(request), catalogue)}
    assert gains and all(g > 0 for g in gains.values())
    assert "141 GB of memory" in gains or "2x network" in gains
    node = ask.cluster.node
    slow = ask.at(replace(ask.cluster, node=replace(node, nic_bytes_per_s=node.nic_bytes_per_s / 8)))
    assert best(slow).value[0] > best(ask).value[0]


def test_the_pareto_set_trades_time_for_memory(catalogue):
    found = search(asked(catalogue, "llama3-70b", 256))
    rows = found.pareto()
    memory, value = np.asarray(found.costs.memory_bytes)[rows], found.value[rows]
    assert rows[0] == 0 and len(rows) > 2
    assert np.all(np.diff(memory) < 0) and np.all(np.diff(value) >= 0)
    for row in rows:  # nothing is better in both
        assert not np.any((found.costs.memory_bytes < found.costs.memory_bytes[row]) & (found.value < found.value[row]))


def test_the_runner_up_is_another_layout_and_its_terms_add_up(catalogue):
    request = Request("llama3-70b", asked(catalogue, "llama3-70b", 256), 1e12, "step")
    found = find(request)
    row = runner_up(found)
    assert row is not None
    first, second = plan_of(request, found), plan_of(request, found, row)
    gap = second.step_s * first.global_batch / second.global_batch - first.step_s
    assert sum(g for _, g in differences(first, second)) == pytest.approx(gap, abs=0.02 * first.step_s)
    assert gap >= 0


def test_cost_takes_fewer_chips_and_keeps_the_deadline(catalogue):
    ask = asked(catalogue, "llama3-8b", 1024)
    cheap, fast = best(ask, "cost", 1.0), best(ask, "time", 1.0)
    assert cheap.ask.cluster.num_chips < 1024 and cheap.value[0] < fast.value[0] * 1024
    deadline = float(fast.value[0]) * 1.5
    hurried = best(ask, "cost", 1.0, deadline)
    assert hurried.value[0] / hurried.ask.cluster.num_chips <= deadline
    assert hurried.ask.cluster.num_chips > cheap.ask.cluster.num_chips


def test_a_million_chips_are_searched(catalogue):
    """The whole space is covered and the answer is sane. benchmarks/planner_speed.py measures the seconds."""
    shape = ModelShape.of(128, 25600, 160, 68096, 51200, 8192)
    cluster = catalogue.cluster("h100", 1_000_000)
    ask = Ask(shape, cluster, default_profile(cluster.node.chip), usual_batch(1_000_000, 8192))
    found = search(ask, slack=1.0)
    assert isinstance(found, Found) and found.considered > 4_000_000
    assert found.costs.mfu()[0] > 0.2 and found.candidates.world[0] >= 950_000


@pytest.mark.parametrize("name", [*published()][::3])
def test_published_models_have_a_layout(catalogue, name):
    found = search(asked(catalogue, name, 256, "b300", schedules=("1f1b",)), slack=1.0)
    assert len(found) and 0 < found.costs.mfu()[0] < 1


def test_experts_are_spread_over_ranks_that_are_there(catalogue):
    c = search(asked(catalogue, "deepseek-v3", 2048)).candidates
    assert np.all((c.tp * c.cp * c.shard) % c.ep == 0) and np.all(256 % c.ep == 0) and np.any(c.ep > 1)


def test_the_size_of_a_space_counts_each_layout_once(catalogue):
    ask = asked(catalogue, "llama3-8b", 8)
    layouts, _ = everything(ask)
    rows = {tuple(layouts.row(i).values()) for i in range(len(layouts))}
    assert len(rows) == len(layouts) == size_of(ask, *cores(ask))
