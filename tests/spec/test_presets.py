"""Presets have the sizes that were published: a slip in one is a run of another model."""

import pytest

from phalanx.core.shape import ModelConfig
from phalanx.spec import from_mapping
from phalanx.spec.presets import PRESETS

# In billions, from the model cards and the safetensors headers of the releases; language model alone.
PUBLISHED = {
    "llama3.1-8b": 8.030, "llama3.1-70b": 70.554, "llama3.1-405b": 405.853, "llama3.2-1b": 1.236,
    "llama3.2-3b": 3.213, "llama3.3-70b": 70.554, "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen2.5-3b": 3.086,
    "qwen2.5-7b": 7.616, "qwen2.5-14b": 14.770, "qwen2.5-32b": 32.764, "qwen2.5-72b": 72.706, "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721, "qwen3-4b": 4.022, "qwen3-8b": 8.191, "qwen3-14b": 14.768, "qwen3-32b": 32.762,
    "qwen3-30b-a3b": 30.532, "qwen3-235b-a22b": 235.094, "mistral-7b-v0.1": 7.242, "mistral-7b-v0.3": 7.248,
    "mistral-nemo-12b": 12.248, "mistral-small-24b": 23.572, "gemma2-2b": 2.614, "gemma2-9b": 9.242,
    "gemma2-27b": 27.227, "gemma3-1b": 1.000, "gemma3-4b": 3.880, "gemma3-12b": 11.766, "gemma3-27b": 27.009,
    "olmo2-1b": 1.485, "olmo2-7b": 7.299, "olmo2-13b": 13.716, "olmo2-32b": 32.234, "phi3-mini": 3.821,
    "phi3-medium": 13.960, "phi4": 14.660,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
    assert ModelConfig(**PRESETS[name]).num_params / 1e9 == pytest.approx(PUBLISHED[name], abs=0.0006)


# rope_theta, window, context: from config.json of the releases; the number of parameters tells nothing of them.
POSITIONS = {
    "llama3.1-8b": (500_000.0, 0, 131_072),
    "qwen3-8b": (1_000_000.0, 0, 40_960),
    "mistral-7b-v0.1": (10_000.0, 4096, 32_768),
    "mistral-7b-v0.3": (1_000_000.0, 0, 32_768),
    "gemma2-9b": (10_000.0, 4096, 8192),
    "olmo2-7b": (500_000.0, 0, 4096),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_a_preset_has_the_published_positions(name):
    config = ModelConfig(**PRESETS[name])
    assert (config.rope_theta, config.window, config.context) == POSITIONS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_job(name):
    job = {"model": {"preset": name}, "train": {"seq_len": 256}}
    assert from_mapping(job).job.model == ModelConfig(**PRESETS[name])
