"""Properties of the whole cost model: what must hold whatever the constants. A search over a model that breaks one of
them finds nonsense."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.hardware import load
from phalanx.plan import memory
from phalanx.plan.candidates import PRECISIONS, RECOMPUTE, SCHEDULES, Candidates
from phalanx.plan.cost import TERMS, Costs, evaluate, setup_s
from phalanx.plan.machine import Machine
from phalanx.plan.model import ModelShape
from phalanx.plan.names import shape_of
from phalanx.plan.profiles import default_profile

CATALOGUE = load()
MACHINE = Machine.of(CATALOGUE.cluster("h100", 1024))
LLAMA_70B = ModelShape.of(80, 8192, 64, 28672, 128256, 8192, kv_heads=8)
DEEPSEEK = shape_of("DeepSeek-V3", {}, None, "", 4096)
assert DEEPSEEK is not None

powers = st.sampled_from([1, 2, 4, 8])
layouts = st.fixed_dictionaries({
    "tp": powers, "pp": powers, "vpp": st.sampled_from([1, 2, 5]), "cp": st.sampled_from([1, 2, 4]), "ep": powers,
    "replica": powers, "shard": st.sampled_from([8, 16, 64]), "zero": st.integers(0, 3), "micro_batch": powers,
    "recompute": st.sampled_from(RECOMPUTE), "schedule": st.sampled_from(SCHEDULES),
    "precision": st.sampled_from(PRECISIONS),
})  # fmt: skip
shapes = st.sampled_from([LLAMA_70B, DEEPSEEK])


def costs(shape: ModelShape, layout: dict, machine: Machine = MACHINE) -> Costs:
    return evaluate(shape, machine, Candidates.of(**layout), 4096)


@settings(max_examples=60, deadline=None)
@given(shapes, layouts)
def test_every_term_is_there_finite_and_not_negative(shape, layout):
    got = costs(shape, layout)
    assert list(got.seconds) == list(TERMS) and list(got.memory) == list(memory.TERMS)
    for value in (*got.seconds.values(), *got.memory.values()):
        assert np.isfinite(value).all() and (value >= 0).all()
    assert got.step_s[0] == pytest.approx(sum(v[0] for v in got.seconds.values()))
    assert 0 < got.mfu()[0] < 1


@settings(max_examples=60, deadline=None)
@given(shapes, layouts, st.sampled_from(["nic_bytes_per_s", "up_bytes_per_s", "memory_bytes_per_s", "ceiling"]))
def test_faster_hardware_is_never_slower(shape, layout, what):
    better = replace(MACHINE, **{what: 2 * getattr(MACHINE, what)})
    assert costs(shape, layout, better).step_s[0] <= costs(shape, layout).step_s[0] * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(shapes, layouts)
def test_more_memory_never_unfits(shape, layout):
    better = replace(MACHINE, memory_bytes=2 * MACHINE.memory_bytes)
    now, then = costs(shape, layout), costs(shape, layout, better)
    assert then.possible[0] or not now.possible[0]
    assert then.margin[0] > now.margin[0] and then.step_s[0] == now.step_s[0]


@settings(max_examples=40, deadline=None)
@given(shapes, layouts)
def test_recomputing_more_saves_memory_and_costs_time(shape, layout):
    none, selective, full = (costs(shape, layout | {"recompute": mode}) for mode in RECOMPUTE)
    assert none.step_s[0] <= selective.step_s[0] <= full.step_s[0]
    assert none.memory["activations"][0] >= selective.memory["activations"][0]


@settings(max_examples=40, deadline=None)
@given(shapes, layouts)
def test_a_higher_zero_stage_never_holds_more_state(shape, layout):
    state = [
        sum(costs(shape, layout | {"zero": stage}).memory[n][0] for n in ("weights", "gradients", "optimizer"))
        for stage in range(4)
    ]
    assert all(a >= b for a, b in pairwise(state))


def test_rows_do_not_depend_on_their_neighbours():
    """One by one, in a chunk and across chunks: the same figures."""
    rng = np.random.default_rng(3)
    many = Candidates.of(
        tp=2 ** rng.integers(0, 4, 25_000), pp=2 ** rng.integers(0, 4, 25_000), zero=rng.integers(0, 4, 25_000),
        micro_batch=2 ** rng.integers(0, 3, 25_000), recompute=rng.integers(0, 3, 25_000), shard=16,
    )  # fmt: skip
    together = evaluate(LLAMA_70B, MACHINE, many, 1024)
    assert len(together.step_s) == len(many)
    for i in (0, 9_999, 10_000, 24_999):
        alone = evaluate(LLAMA_70B, MACHINE, Candidates.of(**many.row(i)), 1024)
        assert alone.step_s[0] == pytest.approx(together.step_s[i])
        assert alone.memory_bytes[0] == pytest.approx(together.memory_bytes[i])


def test_what_does_not_divide_is_not_valid():
    layout = Candidates.of(
        tp=[8, 8, 128, 8], pp=[8, 64, 1, 1], vpp=[1, 2, 1, 1], shard=[16, 1, 1, 16], micro_batch=[1, 1, 1, 3]
    )
    assert evaluate(LLAMA_70B, MACHINE, layout, 1024).valid.tolist() == [True, False, False, False]
    experts = Candidates.of(tp=2, shard=16, ep=[32, 3, 512])
    assert evaluate(DEEPSEEK, MACHINE, experts, 1024).valid.tolist() == [True, False, False]


def test_weak_scaling_is_nearly_flat():
    """NVIDIA/dgxc-benchmarking, Llama 3.1 70B bf16: 14.66 s on 64 and on 2,048 H100."""
    steps = []
    for gpus in (64, 2048):
        layout = Candidates.of(tp=4, pp=4, vpp=5, cp=2, shard=gpus // 32)
        machine = Machine.of(CATALOGUE.cluster("h100", gpus))
        steps.append(
            evaluate(LLAMA_70B, machine, layout, 2 * gpus, default_profile("h100", framework="megatron")).step_s[0]
        )
    assert steps[1] / steps[0] == pytest.approx(1, abs=0.05)
    assert steps[0] == pytest.approx(14.66, rel=0.12)


def test_experts_out_of_balance_are_slower():
    layout = {"shard": 64, "ep": 8, "pp": 8}
    assert costs(replace(DEEPSEEK, imbalance=1.5), layout).step_s[0] > 1.05 * costs(DEEPSEEK, layout).step_s[0]


@pytest.mark.parametrize("name", ["a100-80", "h200", "b200", "gb300", "mi300x", "tpu-v5p", "trn2", "gaudi3"])
def test_every_kind_of_chip_is_costed(name):
    node = CATALOGUE.node(name)
    machine = Machine.of(CATALOGUE.cluster(name, 4 * node.chips))
    got = evaluate(
        LLAMA_70B, machine, Candidates.of(shard=4 * node.chips, zero=3), 64 * node.chips, default_profile(name)
    )
    assert 0.1 < got.mfu("causal")[0] < 0.75


def test_communicator_set_up():
    """arXiv:2510.20171: 14.5, 55.7 and 265 s at 8, 32 and 96 thousand ranks."""
    assert setup_s(np.array([8192, 32768, 98304])) == pytest.approx([14.5, 55.7, 265], rel=0.15)
