"""One model of the engine: on links that carry a byte a second and hide nothing, the cost model's seconds equal the
bytes of the closed form, which the dry run checks against the program. If they differ, a plan costs another engine than
the one that runs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.core.job import Job, TrainConfig
from phalanx.core.layout import Coord, Layout
from phalanx.core.shape import ModelConfig
from phalanx.hardware import load
from phalanx.plan.cost.candidates import Candidates
from phalanx.plan.cost.evaluate import evaluate
from phalanx.plan.cost.machine import Machine
from phalanx.plan.cost.profiles import Profile, default_profile
from phalanx.plan.cost.sizes import ModelShape
from phalanx.plan.cost.traffic import expect

DENSE = ModelConfig(num_layers=12, dim=512, num_heads=8, num_kv_heads=4, ffn_dim=1536, vocab_size=1024)
MOE = replace(DENSE, family="moe", num_experts=16, top_k=2, expert_dim=256, balance_loss=0.0)
SEQ, BATCH, MICRO = 256, 64, 2


def byte_a_second() -> tuple[Machine, Profile]:
    machine = replace(Machine.of(load().cluster("h100", 4096)), up_bytes_per_s=1.0, domain=4096, nvls=False)
    profile = default_profile(load().chip("h100"))
    quiet = {"call_s": 0.0, "up_hop_s": 0.0, "out_hop_s": 0.0, "copy_bytes": 0.0, "interference": 1.0}
    return machine, replace(profile, **quiet, fsdp_interference=1.0, up=1.0, exchange=1.0, hides_tp=0.0, hides_ep=0.0)


def counted(model: ModelConfig, layout: Layout, recompute: str) -> dict[str, float]:
    """Count the bytes that a rank in the middle of the pipeline sends in a step, by axis, as in a ring."""
    job = Job(
        model=model, layout=layout,
        train=TrainConfig(seq_len=SEQ, global_batch=BATCH, micro_batch=MICRO, precision="bf16", recompute=recompute,
                          bucket_mb=1e9),
    )  # fmt: skip
    out: dict[str, float] = {}
    for key, volume in expect(job, Coord(0, 0, 0, layout.pp // 2)).traffic.items():
        if key.kind == "receive" or volume.size_bytes < 10_000:  # counts and norms
            continue
        share = 1.0 if key.kind == "send" else (key.ranks - 1) / key.ranks * (2 if key.kind == "all-reduce" else 1)
        axis = key.axis.split("/")[0]
        out[axis] = out.get(axis, 0.0) + share * volume.size_bytes
    return out


def predicted(model: ModelConfig, layout: Layout, recompute: str) -> dict[str, float]:
    machine, profile = byte_a_second()
    c = Candidates.of(
        tp=layout.tp, pp=layout.pp, cp=layout.cp, ep=layout.ep, shard=layout.shard, replica=layout.replica,
        zero=layout.zero, micro_batch=MICRO, recompute=recompute, bucket_bytes=1e15,
    )  # fmt: skip
    costs = evaluate(ModelShape.from_config(model, SEQ), machine, c, BATCH, profile)
    return {name: float(np.asarray(seconds)[0]) for name, seconds in costs.seconds.items()}


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_tensor_parallel_bytes(model, recompute):
    """They match except for gradients of norms, which are a few bytes."""
    layout = Layout(tp=4, pp=3, shard=2, zero=1)
    assert predicted(model, layout, recompute)["tp"] == pytest.approx(counted(model, layout, recompute)["tp"], rel=5e-3)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_ring_bytes(recompute):
    """Keys and values travel forward, a second time when recomputed, and back with gradients in fp32."""
    layout = Layout(cp=4, pp=3, shard=2, zero=1)
    assert predicted(DENSE, layout, recompute)["cp"] == pytest.approx(counted(DENSE, layout, recompute)["cp"], rel=1e-6)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bytes_to_the_experts_and_back(recompute):
    layout = Layout(ep=4, pp=3, shard=8, zero=1)
    assert predicted(MOE, layout, recompute)["ep"] == pytest.approx(counted(MOE, layout, recompute)["ep"], rel=1e-3)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bytes_of_state(zero):
    """Weights are sent in bf16 and gradients in fp32, once a step or with every micro-batch. The cost model gives every
    stage a vocabulary matrix, so the vocabulary is small here."""
    model = replace(DENSE, vocab_size=8)
    layout = Layout(shard=8, pp=3, zero=zero)
    seconds = predicted(model, layout, "none")
    assert seconds["fsdp" if zero == 3 else "dp"] == pytest.approx(counted(model, layout, "none")["shard"], rel=0.02)
    assert seconds["dp" if zero == 3 else "fsdp"] == 0


def test_bytes_between_replicas():
    model = replace(DENSE, vocab_size=8)
    layout = Layout(replica=4, pp=3, zero=1)
    assert predicted(model, layout, "none")["dp"] == pytest.approx(counted(model, layout, "none")["replica"], rel=0.02)
