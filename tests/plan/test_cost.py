"""Properties of the whole cost model that hold for any constants. If the model breaks one of them, a search over it
returns nonsense."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.hardware import load
from phalanx.plan.cost import rank_bytes as memory
from phalanx.plan.cost.candidates import PRECISIONS, RECOMPUTE, SCHEDULES, Candidates
from phalanx.plan.cost.chip import work
from phalanx.plan.cost.evaluate import TERMS, Costs, evaluate, setup_s
from phalanx.plan.cost.machine import Machine
from phalanx.plan.cost.numbers import exceptions, numbers, values
from phalanx.plan.cost.profiles import default_profile
from phalanx.plan.cost.sizes import ModelShape
from phalanx.plan.cost.software import names as engines
from phalanx.plan.known_models import shape_of

CATALOGUE = load()
MACHINE = Machine.of(CATALOGUE.cluster("h100", 1024))
PROFILE = default_profile(CATALOGUE.chip("h100"))
LLAMA_70B = ModelShape.of(80, 8192, 64, 28672, 128256, 8192, kv_heads=8)
DEEPSEEK = shape_of("DeepSeek-V3", {}, None, {}, 4096)
assert DEEPSEEK is not None

powers = st.sampled_from([1, 2, 4, 8])
layouts = st.fixed_dictionaries({
    "tp": powers, "pp": powers, "vpp": st.sampled_from([1, 2, 5]), "cp": st.sampled_from([1, 2, 4]), "ep": powers,
    "replica": powers, "shard": st.sampled_from([8, 16, 64]), "zero": st.integers(0, 3), "micro_batch": powers,
    "recompute": st.sampled_from(RECOMPUTE), "schedule": st.sampled_from(SCHEDULES),
    "precision": st.sampled_from(PRECISIONS),
})  # fmt: skip
shapes = st.sampled_from([LLAMA_70B, DEEPSEEK])
ZERO_BUBBLE = ("interleaved-zb", "zbv", "zb-h1", "zb-h2", "dualpipe")


def costs(shape: ModelShape, layout: dict, machine: Machine = MACHINE) -> Costs:
    return evaluate(shape, machine, Candidates.of(**layout), 4096, PROFILE)


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
@given(shapes, layouts, st.sampled_from(["nic_bytes_per_s", "up_bytes_per_s", "memory_bytes_per_s", "peak"]))
def test_faster_hardware_is_never_slower(shape, layout, what):
    better = replace(MACHINE, **{what: 2 * getattr(MACHINE, what)})
    # If the host is slowest, a third of its delay counts as forward, even if forward got faster. Weight gradients fill
    # a zero bubble, and faster ones fill less of what communication leaves.
    most = 1.03 if layout["schedule"] in ZERO_BUBBLE else 1.001
    assert costs(shape, layout, better).step_s[0] <= costs(shape, layout).step_s[0] * most


@settings(max_examples=40, deadline=None)
@given(shapes, layouts)
def test_more_memory_never_unfits(shape, layout):
    better = replace(MACHINE, memory_bytes=2 * MACHINE.memory_bytes)
    now, then = costs(shape, layout), costs(shape, layout, better)
    assert then.fits(PROFILE)[0] or not now.fits(PROFILE)[0]
    assert then.step_s[0] == now.step_s[0]


@settings(max_examples=40, deadline=None)
@given(shapes, layouts)
def test_recomputing_more_saves_memory_and_costs_time(shape, layout):
    none, selective, full = (costs(shape, layout | {"recompute": mode}) for mode in RECOMPUTE)
    most = 1.01  # if the host is slowest, a little more compute is free and hides more of a reduction
    assert none.step_s[0] <= selective.step_s[0] * most and selective.step_s[0] <= full.step_s[0] * most
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
    """The figures are the same one by one, in a chunk and across chunks."""
    rng = np.random.default_rng(3)
    many = Candidates.of(
        tp=2 ** rng.integers(0, 4, 25_000), pp=2 ** rng.integers(0, 4, 25_000), zero=rng.integers(0, 4, 25_000),
        micro_batch=2 ** rng.integers(0, 3, 25_000), recompute=rng.integers(0, 3, 25_000), shard=16,
    )  # fmt: skip
    together = evaluate(LLAMA_70B, MACHINE, many, 1024, PROFILE)
    assert len(together.step_s) == len(many)
    for i in (0, 9_999, 10_000, 24_999):
        alone = evaluate(LLAMA_70B, MACHINE, Candidates.of(**many.row(i)), 1024, PROFILE)
        assert alone.step_s[0] == pytest.approx(together.step_s[i])
        assert alone.memory_bytes[0] == pytest.approx(together.memory_bytes[i])


def test_what_does_not_divide_is_not_valid():
    layout = Candidates.of(
        tp=[8, 8, 128, 8], pp=[8, 64, 1, 1], vpp=[1, 2, 1, 1], shard=[16, 1, 1, 16], micro_batch=[1, 1, 1, 3]
    )
    assert evaluate(LLAMA_70B, MACHINE, layout, 1024, PROFILE).valid.tolist() == [True, False, False, False]
    experts = Candidates.of(tp=2, shard=16, ep=[32, 3, 512])
    assert evaluate(DEEPSEEK, MACHINE, experts, 1024, PROFILE).valid.tolist() == [True, False, False]


def test_weak_scaling_is_nearly_flat():
    """NVIDIA/dgxc-benchmarking, Llama 3.1 70B bf16: 14.66 s on 64 and on 2,048 H100."""
    steps = []
    for gpus in (64, 2048):
        layout = Candidates.of(tp=4, pp=4, vpp=5, cp=2, shard=gpus // 32)
        machine = Machine.of(CATALOGUE.cluster("h100", gpus))
        profile = default_profile(CATALOGUE.chip("h100"), "nemo")
        steps.append(evaluate(LLAMA_70B, machine, layout, 2 * gpus, profile).step_s[0])
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
        LLAMA_70B, machine, Candidates.of(shard=4 * node.chips, zero=3), 64 * node.chips, default_profile(node.chip)
    )
    assert 0.1 < got.mfu("causal")[0] < 0.8


def test_communicator_set_up():
    """arXiv:2510.20171: 14.5, 55.7 and 265 s at 8, 32 and 96 thousand ranks."""
    assert setup_s(np.array([8192, 32768, 98304])) == pytest.approx([14.5, 55.7, 265], rel=0.15)


def test_a_short_ring_is_slow():
    """Context parallelism is not free, because pieces of a sequence are short and every hop merges a part: this
    engine's ring forward took 3.0 times its share of the whole at cp 4, and 3.7 times at cp 8."""
    shape = replace(LLAMA_70B, attention_layers=80)
    spent = {}
    for cp in (1, 4, 8):
        c = Candidates.of(cp=cp, shard=16)
        spent[cp] = float(work(shape, MACHINE, PROFILE, c).attention_f[0]) * cp
    assert spent[4] / spent[1] == pytest.approx(3.0, rel=0.25) and spent[8] / spent[1] == pytest.approx(3.7, rel=0.25)


def test_rings_through_many_ranks_pay_for_every_hop():
    """Software without trees gathers a layer in n - 1 steps: the tail of strong scaling."""
    old, new = default_profile(CATALOGUE.chip("a100-80"), "llm-foundry"), default_profile(CATALOGUE.chip("a100-80"))
    new = replace(new, software=replace(old.software, hierarchical=True))
    machine = Machine.of(CATALOGUE.cluster("a100-80", 4096))
    shape = ModelShape.of(24, 2048, 16, 8192, 50368, 2048, gated=False, tied=True)
    ring, tree = (
        evaluate(shape, machine, Candidates.of(shard=4096, zero=3), 4096, profile).seconds["fsdp"][0]
        for profile in (old, new)
    )
    assert ring > 3 * tree


def test_hidden_exchange_and_dualpipe_bring_deepseek_near_its_published_step():
    """arXiv:2412.19437: 15,360 sequences of 4,096 on 2,048 H800 take 19.9 s; in no row that was fitted."""
    cluster = CATALOGUE.cluster("h800", 2048)
    layout = Candidates.of(pp=16, ep=64, shard=128, zero=1, schedule="dualpipe", precision="fp8")
    steps = {}
    for engine in ("deepseek", "nemo"):
        profile = default_profile(cluster.node.chip, engine)
        steps[engine] = evaluate(DEEPSEEK, cluster, layout, 15360, profile).step_s[0]
    assert steps["deepseek"] == pytest.approx(19.9, rel=0.2) and steps["nemo"] > 1.3 * steps["deepseek"]


def test_shares_of_a_data_sheet_rate_stay_physical():
    """Between half and all of it, for every software on every chip; attention and nvfp4 are the stated exceptions."""
    for chip in CATALOGUE.chips.values():
        for engine in engines():
            profile = default_profile(chip, engine)
            shares = [*np.asarray(profile.gemm)[:3], profile.memory, profile.up, profile.nic, profile.exchange]
            assert min(shares) >= 0.5 and max(shares) <= 1.0, (chip.name, engine, shares)


def test_ten_times_as_many_numbers_would_be_a_table():
    assert len(numbers()) <= 60 and len(exceptions()) <= 3
    for number in numbers():
        assert number.low <= values()[number.name] <= number.high, number.name
        assert number.low < number.prior < number.high and number.source and number.what


def test_tensor_parallelism_that_leaves_the_node_runs_at_the_cards_rate():
    """The same 16 ranks on one scale-up domain, and across two nodes of 8."""
    layout = {"tp": 16, "shard": 8}
    inside = costs(LLAMA_70B, layout, replace(MACHINE, domain=72)).seconds["tp"][0]
    assert costs(LLAMA_70B, layout).seconds["tp"][0] > 1.1 * inside
    slow = replace(MACHINE, nic_bytes_per_s=MACHINE.nic_bytes_per_s / 8)
    assert costs(LLAMA_70B, layout, slow).seconds["tp"][0] > 3 * inside
    assert costs(LLAMA_70B, {"tp": 8, "shard": 8}, slow).seconds["tp"][0] < inside


@settings(max_examples=40, deadline=None)
@given(shapes, layouts)
def test_fp32_moves_and_keeps_twice_the_bytes_of_bf16(shape, layout):
    """Otherwise a plan in fp32 would not fit, and would wait for messages twice as long as planned."""
    bf16, fp32 = (costs(shape, layout | {"precision": p}) for p in ("bf16", "fp32"))
    for name in ("activations", "gathered"):
        assert fp32.memory[name][0] == pytest.approx(2 * bf16.memory[name][0])
    quiet = replace(PROFILE, call_s=0.0, up_hop_s=0.0, out_hop_s=0.0, hides_tp=0.0, hides_ep=0.0, interference=1.0)
    still = replace(MACHINE, tier_latency_s=np.zeros_like(MACHINE.tier_latency_s))
    for term, more in (("tp", {"pp": 1}), ("ep", {"pp": 1}), ("pp", {})):  # stages are cut by the cost of their layers
        both = [Candidates.of(**layout | more | {"precision": p}) for p in ("bf16", "fp32")]
        bf16, fp32 = (evaluate(shape, still, c, 4096, quiet) for c in both)
        assert fp32.seconds[term][0] == pytest.approx(2 * bf16.seconds[term][0]), term
