"""The arithmetic of models, compared with their papers and NVIDIA's recipes. A planner that miscounts these is wrong
everywhere."""

import numpy as np
import pytest

from phalanx.core.shape import CONVENTIONS, ModelConfig
from phalanx.plan.cost.sizes import ModelShape, hardware_flops_sc21
from phalanx.plan.known_models import known_model, shape_of

LLAMA_8B = ModelShape.of(32, 4096, 32, 14336, 128256, 8192, kv_heads=8)
LLAMA_70B = ModelShape.of(80, 8192, 64, 28672, 128256, 8192, kv_heads=8)
LLAMA_405B = ModelShape.of(126, 16384, 128, 53248, 128256, 8192, kv_heads=8)
GPT3 = ModelShape.of(96, 12288, 96, 49152, 51200, 2048, gated=False, tied=True)
NEMOTRON_340B = ModelShape.of(96, 18432, 96, 73728, 256000, 4096, kv_heads=8, gated=False)


def published(name: str, seq: int = 4096, **sizes: int) -> ModelShape:
    shape = shape_of(name, sizes, None, {}, seq)
    assert shape is not None
    return shape


@pytest.mark.parametrize(
    ("shape", "billions"),
    [(LLAMA_8B, 8.03), (LLAMA_70B, 70.6), (LLAMA_405B, 405.9), (GPT3, 174.6), (NEMOTRON_340B, 341)],
)
def test_parameters_of_dense_models(shape, billions):
    assert float(shape.params) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("DeepSeek-V3", 671, 37), ("Qwen3-235B-A22B", 235, 22), ("Qwen3_30B_a3B", 30.5, 3.3),
        ("Mixtral-8x7B", 46.7, 12.9), ("GPT OSS 120B", 117, 5.1),
        ("Kimi_K2", 1026, 32), ("Nemotron_3_Nano", 31.6, 3.6), ("Grok1-314B", 316, 86),
    ],
)  # fmt: skip
def test_parameters_of_expert_models(name, total, active):
    shape = published(name)
    assert float(shape.params) / 1e9 == pytest.approx(total, rel=0.02)
    # Whether both embeddings count as active differs from paper to paper.
    assert float(shape.active_params) / 1e9 == pytest.approx(active, rel=0.13)


@pytest.mark.parametrize(
    ("shape", "flops"),
    [(LLAMA_8B, 4.74e14), (LLAMA_70B, 3.94e15), (LLAMA_405B, 2.17e16), (GPT3, 2.20e15)],
)
def test_flops_of_a_sequence_as_nvidia_counts_them(shape, flops):
    """NVIDIA/dgxc-benchmarking counts attention in full. Its 1.01e16 for Nemotron-4 340B counts a gate too many."""
    assert float(shape.flops_per_token("full") * shape.seq) == pytest.approx(flops, rel=0.011)


@pytest.mark.parametrize(
    ("shape", "gflops"),
    [
        (shape_of("DeepSeek-V3", {}, None, {"mtp": 0}, 4096), 250),
        (ModelShape.of(126, 16384, 128, 53248, 128256, 4096, kv_heads=8), 2448),
    ],
)
def test_causal_flops_per_token(shape, gflops):
    """They match what DeepSeek publishes for DeepSeek-V3 and Llama 405B at 4,096 tokens."""
    assert float(shape.flops_per_token("causal")) / 1e9 == pytest.approx(gflops, rel=0.015)


def test_conventions_are_ordered_and_differ():
    causal, full = LLAMA_8B.flops_per_token("causal"), LLAMA_8B.flops_per_token("full")
    assert full - causal == pytest.approx(0.5 * 6 * float(LLAMA_8B.scores))
    assert LLAMA_8B.flops_per_token("6N") == pytest.approx(6 * float(LLAMA_8B.params))


def test_megatron_2021_counts_recomputation():
    """Table 1 of arXiv:2104.04473: 174.6B at 1536 samples on 384 GPUs and 153 TFLOP/s is about 77 s."""
    step = 1536 * 2048 * float(hardware_flops_sc21(GPT3)) / (384 * 153e12)
    assert step == pytest.approx(76.8, rel=0.01)
    assert float(hardware_flops_sc21(GPT3)) == pytest.approx(4 / 3 * float(GPT3.flops_per_token("full")), rel=0.01)


def test_the_engines_own_models_count_alike():
    for config in (
        ModelConfig(num_layers=3, dim=64, num_heads=4, num_kv_heads=2, ffn_dim=160, vocab_size=500),
        ModelConfig(
            family="moe", num_layers=4, dim=64, num_experts=8, top_k=2, expert_dim=96, shared_experts=1, dense_layers=1
        ),
        ModelConfig(tied=True),
        ModelConfig(norm_place="both", qk_norm="all", attention_bias="all", ffn_bias=True, window=100, full_every=3),
        ModelConfig(family="moe", qk_norm="head", attention_bias="qkv", norm_place="post", window=300, dense_layers=1),
    ):
        shape = ModelShape.from_config(config, 256)
        assert float(shape.params) == config.num_params
        assert float(shape.active_params) == config.active_params
        for convention in CONVENTIONS:  # what `train` prints as MFU and what `plan` does
            assert float(shape.flops_per_token(convention)) == config.flops_per_token(256, convention)


def test_a_window_leaves_few_keys():
    """The count is twice what a token sees on average, as it is without a window (twice L / 2)."""
    whole, cut = ModelConfig(num_layers=4), ModelConfig(num_layers=4, window=64, full_every=2)
    seen = 2 * sum(min(at + 1, 64) for at in range(4096)) / 4096
    ratio = (2 * seen + 2 * 4096) / (4 * 4096)
    scores = [c.flops_per_token(4096) - c.flops_per_token(4096, "causal") for c in (whole, cut)]
    assert scores[1] / scores[0] == pytest.approx(ratio, rel=1e-3)


def test_packed_documents_attend_to_less():
    whole = ModelShape.of(32, 4096, 32, 14336, 128256, 8192, kv_heads=8)
    packed = ModelShape.of(32, 4096, 32, 14336, 128256, 8192, kv_heads=8, attended=8 * 1024**2 / 8192)
    assert float(packed.scores) == pytest.approx(float(whole.scores) / 8)


def test_columns_of_shapes_count_like_single_ones():
    shapes = [LLAMA_8B, GPT3, published("DeepSeek-V3")]
    stacked = ModelShape.stack(shapes)
    assert np.allclose(stacked.params, [float(s.params) for s in shapes])
    assert np.allclose(stacked.flops_per_token("causal"), [float(s.flops_per_token("causal")) for s in shapes])


def test_a_name_alone_and_a_count_alone():
    assert known_model("Llama-3.1-70B")["hidden"] == 8192
    assert known_model("llama 3 70b") == known_model("LLAMA3_70B")
    assert known_model("no such model") == {}
    assert shape_of("no such model", {}, None, {}, 2048) is None
    for guessed in (shape_of("somebody's", {}, 64, {}, 2048), shape_of("somebody-64B", {}, None, {}, 2048)):
        assert guessed is not None and float(guessed.params) / 1e9 == pytest.approx(64, rel=0.05)
    experts = shape_of("Nobodys_80B_a3B", {}, None, {}, 4096)
    assert experts is not None and float(experts.params) / 1e9 == pytest.approx(80, rel=0.1)
    assert float(experts.active_params) / 1e9 == pytest.approx(3, rel=0.3)
