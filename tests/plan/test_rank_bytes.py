"""Bytes of a rank, compared with the papers that the formulas come from and with published peaks. Users do not trust a
planner that rejects a run that worked, or accepts one that did not fit."""

from dataclasses import replace

import numpy as np
import pytest

from phalanx.hardware import load
from phalanx.plan.cost.candidates import Candidates
from phalanx.plan.cost.evaluate import evaluate
from phalanx.plan.cost.profiles import default_profile
from phalanx.plan.cost.rank_bytes import activation_bytes
from phalanx.plan.cost.sizes import ModelShape
from phalanx.plan.cost.software import Software, software

GPT_22B = ModelShape.of(48, 6144, 64, 24576, 51200, 2048, gated=False, tied=True)
GPT_530B = ModelShape.of(105, 20480, 128, 81920, 51200, 2048, gated=False, tied=True)
LLAMA_8B = ModelShape.of(32, 4096, 32, 14336, 128256, 8192, kv_heads=8)
LLAMA_405B = ModelShape.of(126, 16384, 128, 53248, 128256, 8192, kv_heads=8)
PLAIN = Software(attention="scores")
H100 = default_profile(load().chip("h100"))


def per_layer(shape: ModelShape, tp: int, mode: int, soft: Software = PLAIN) -> float:
    column = np.array([mode])
    return float(activation_bytes(shape, np.array([tp]), column, soft, column < 0)[0] / shape.layers)


@pytest.mark.parametrize("tp", [1, 8])
def test_activations_as_in_korthikanti(tp):
    """arXiv:2205.05198, table 2, per token: (34 + 5 a s / h) h / t with sequence parallelism, 34 h / t when attention
    is recomputed, 2 h / t when everything is."""
    h, a, s = 6144, 64, 2048
    assert per_layer(GPT_22B, tp, 0) == pytest.approx((34 + 5 * a * s / h) * h / tp)
    assert per_layer(GPT_22B, tp, 1) == pytest.approx(34 * h / tp, rel=0.001)
    assert per_layer(GPT_22B, tp, 2) == pytest.approx(2 * h / tp)


def test_flash_attention_and_gates():
    """8h + 2(a + 2k)d + 2ad + 4a + 6f bytes per token and layer, nothing recomputed."""
    expected = 8 * 4096 + 2 * (32 + 16) * 128 + 2 * 4096 + 4 * 32 + 6 * 14336
    assert per_layer(LLAMA_8B, 1, 0, Software()) == pytest.approx(expected)


def test_state_is_sixteen_or_eighteen_bytes_a_parameter():
    cluster = load().cluster("h100", 8)
    for grad_bytes, total in ((2.0, 16), (4.0, 18)):
        profile = replace(H100, software=Software(grad_bytes=grad_bytes))
        costs = evaluate(LLAMA_8B, cluster, Candidates.of(shard=8, zero=[0, 1, 2, 3]), 8, profile)
        state = sum(costs.memory[name] for name in ("weights", "gradients", "optimizer")) / float(LLAMA_8B.params)
        expected = [total, 2 + grad_bytes + 12 / 8, 2 + (grad_bytes + 12) / 8, total / 8]
        assert state == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("gpus", "micro", "seq", "cp", "mode", "precision", "peak_gib"),
    [
        (8, 2, 8192, 1, "selective", "bf16", 77.0), (128, 2, 8192, 1, "selective", "bf16", 62.0),
        (128, 2, 8192, 1, "selective", "fp8", 61.8), (8, 1, 32768, 1, "full", "fp8", 83.9),
        (8, 1, 65536, 2, "full", "fp8", 84.2), (8, 1, 131072, 4, "full", "fp8", 84.0),
    ],
)  # fmt: skip
def test_peaks_that_torchtitan_published(gpus, micro, seq, cp, mode, precision, peak_gib):
    """benchmarks/llama3_h100_202412_torchtitan.md, compiled: within 10 %."""
    shape = ModelShape.of(32, 4096, 32, 14336, 128256, seq, kv_heads=8)
    layout = Candidates.of(cp=cp, shard=gpus // cp, zero=3, micro_batch=micro, recompute=mode, precision=precision)
    profile = replace(H100, software=software("torchtitan"))
    costs = evaluate(shape, load().cluster("h100", gpus), layout, micro * gpus // cp, profile)
    assert costs.memory_bytes[0] == pytest.approx(peak_gib * 2**30, rel=0.10)


LLAMA_1B = ModelShape.of(16, 2048, 32, 8192, 128256, 4096, kv_heads=8, tied=True)
SMALL = ModelShape.of(24, 1024, 16, 2816, 32768, 1024)
SPARSE = ModelShape.of(8, 1024, 16, 2816, 32768, 4096, experts=16, top_k=2, expert_ffn=1408)
MANY = ModelShape.of(4, 2048, 16, 2816, 32768, 4096, experts=64, top_k=6, expert_ffn=1408)


@pytest.mark.parametrize(
    ("shape", "micro", "number", "mode", "precision", "peak_gb"),
    [
        (LLAMA_1B, 4, 1, "none", "bf16", 35.43), (LLAMA_1B, 4, 1, "none", "fp8", 29.96 + 4 * 1.2358),
        (LLAMA_1B, 4, 2, "none", "bf16", 40.31), (LLAMA_1B, 4, 2, "selective", "bf16", 38.16),
        (LLAMA_1B, 4, 2, "full", "bf16", 25.78), (SMALL, 16, 2, "none", "bf16", 18.18),
        (SPARSE, 4, 2, "none", "bf16", 16.71), (SPARSE, 4, 2, "full", "bf16", 11.99),
        (MANY, 2, 2, "none", "bf16", 44.50),
    ],
)  # fmt: skip
def test_peaks_of_this_engine(shape, micro, number, mode, precision, peak_gb):
    """Bytes allocated on one H200 for `number` micro-batches of `micro` samples (fp8: moments in bf16): within 3 %."""
    layout = Candidates.of(micro_batch=micro, recompute=mode, precision=precision)
    profile = replace(H100, software=software("phalanx", reserve=1.0))
    memory = evaluate(shape, load().cluster("h200", 1), layout, micro * number, profile).memory
    held = sum(float(size[0]) for name, size in memory.items() if name not in ("context", "buffers"))
    assert held == pytest.approx(peak_gb * 1e9, rel=0.03)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_rank_alone_pays_nothing_for_zero(zero):
    """It gathers and scatters nothing: the engine runs without FSDP2 there."""
    found = [
        evaluate(LLAMA_1B, load().cluster("h200", 1), Candidates.of(zero=stage, micro_batch=2), 4, H100)
        for stage in (1, zero)
    ]
    assert found[0].step_s == found[1].step_s and found[0].memory_bytes == found[1].memory_bytes


def test_runs_that_do_not_fit_are_refused():
    """arXiv:2205.05198, figure 1: without recomputation or sequence parallelism 530B and 1T do not fit 80 GB."""
    cluster = load().cluster("a100-80", 280)
    layout = Candidates.of(tp=8, pp=35, vpp=3, zero=0, replica=1, recompute=["none", "full"])
    profile = replace(H100, software=Software(attention="scores", sequence_parallel=False), memory_error=(0.0, 0.0))
    costs = evaluate(GPT_530B, cluster, layout, 280, profile)
    assert costs.fits(profile).tolist() == [False, True]
    # And a model whose state alone does not fit.
    costs = evaluate(LLAMA_405B, load().cluster("h100", 64), Candidates.of(tp=8, shard=8, zero=3), 64, H100)
    assert costs.memory_interval(H100)[0] > costs.capacity_bytes


def test_in_flight_micro_batches_by_schedule():
    """The first stage holds p with 1f1b, all with gpipe, a little more than 1f1b if interleaved, and never more than
    there are."""
    cluster = load().cluster("h100", 64)
    names = ["1f1b", "gpipe", "interleaved", "zb-h2", "dualpipe"]
    layout = Candidates.of(tp=8, pp=8, vpp=[1, 1, 2, 1, 1], schedule=names)
    held = evaluate(LLAMA_405B, cluster, layout, 64, H100).memory["activations"]
    assert held / held[0] == pytest.approx([1, 8, 1 + 7 / 16, 15 / 8, 9 / 8])
    few = evaluate(LLAMA_405B, cluster, layout, 2, H100).memory["activations"]
    assert few / held[0] == pytest.approx([2 / 8] * 5)


def test_fitting_means_that_the_upper_end_fits():
    """A layout is not called fitting if only the middle of its prediction fits."""
    layout = Candidates.of(shard=8, zero=3, recompute="full")
    costs = evaluate(LLAMA_8B, load().cluster("h100", 8), layout, 8, H100)
    low, high = costs.memory_interval(H100)
    assert low < costs.memory_bytes < high
    tight = replace(costs, capacity_bytes=(costs.memory_bytes + high) / 2)
    assert not tight.fits(H100).any() and replace(costs, capacity_bytes=high).fits(H100).all()
    assert not replace(costs, capacity_bytes=high).fits(H100, margin=0.01).any()
