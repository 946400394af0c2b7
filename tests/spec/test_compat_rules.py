"""Every refusal refuses, in words that help. A rule without a job that trips it fails here."""

import pytest

from phalanx.core.compat import RULES
from phalanx.core.errors import UserError
from phalanx.spec import from_mapping

PATCHES = {"image": 32, "patch": 8, "channels": 1}
IMAGE = {
    "model": {"family": "image", "options": PATCHES},
    "train": {"seq_len": 16},
    "data": {"source": "synthetic-images"},
}
TRIPPED_BY: dict[str, dict] = {
    "options-decoder": {"model": {"options": {"depth": 3}}},
    "heads-dim": {"model": {"num_heads": 3}},
    "rope-even": {"model": {"dim": 12}},
    "gqa": {"model": {"num_kv_heads": 3}},
    "tp-heads": {"layout": {"tp": 8}},
    "tp-kv-heads": {"layout": {"tp": 4}, "model": {"num_heads": 12, "num_kv_heads": 6, "head_width": 8}},
    "tp-head-parts": {"layout": {"tp": 4}, "model": {"num_kv_heads": 1, "head_width": 30}},
    "rope-fraction": {"model": {"rope_fraction": 0.1}},
    "rope-original": {"model": {"rope_scaling": "yarn", "rope_factor": 4.0}},
    "rope-unscaled": {"model": {"rope_factor": 4.0}},
    "rope-bounds": {"model": {"rope_high": 0.5}},
    "context": {"model": {"context": 128}},
    "window-layers": {"model": {"full_every": 2}},
    "image-features": IMAGE | {"model": IMAGE["model"] | {"window": 4}},
    "moe-ffn": {"model": {"family": "moe", "ffn_bias": True}},
    "top-k": {"model": {"family": "moe", "top_k": 9}},
    "dense-layers": {"model": {"family": "moe", "dense_layers": 4}},
    "images-text": {"model": {"family": "image", "options": PATCHES}, "train": {"seq_len": 16}},
    "text-images": {"data": {"source": "synthetic-images"}},
    "image-options": IMAGE | {"model": {"family": "image", "options": PATCHES | {"patch": 7}}},
    "image-patches": IMAGE | {"train": {"seq_len": 15}},
    "tp-sequence": {"layout": {"tp": 2}, "train": {"seq_len": 255}},
    "micro-batch": {"train": {"global_batch": 15}},
    "batch-ranks": {"layout": {"shard": 3}},
    "pp-layers": {"layout": {"pp": 8}},
    "pp-chunks": {"layout": {"pp": 2, "schedule": "zbv", "chunks": 3}, "model": {"num_layers": 8}},
    "pp-rounds": {"layout": {"pp": 2, "schedule": "interleaved"}, "train": {"global_batch": 10}},
    "cp-sequence": {"layout": {"cp": 2}, "train": {"seq_len": 258}},
    "ulysses-heads": {"layout": {"cp": 3, "cp_style": "ulysses"}, "train": {"seq_len": 258}},
    "ep-experts": {"layout": {"shard": 2, "ep": 2}},
    "ep-ranks": {"layout": {"shard": 4, "ep": 3}, "model": {"family": "moe"}},
    "exact-ep": {"layout": {"shard": 2, "ep": 2}, "model": {"family": "moe"}, "train": {"reduction": "exact"}},
    "tied-pp": {"layout": {"pp": 2}, "model": {"tied": True}},
    "compile-split": {"layout": {"pp": 2, "schedule": "zbv"}, "train": {"compile": "inductor"}},
    "fp8-split": {"layout": {"pp": 2, "schedule": "zbv"}, "train": {"precision": "fp8"}},
    "exact-compress": {"layout": {"replica": 2}, "train": {"reduction": "exact", "compress": "bf16"}},
    "compress-replica": {"train": {"compress": "bf16"}},
    "compress-fp64": {"layout": {"replica": 2}, "train": {"precision": "fp64", "compress": "int8"}},
    "nodes-even": {"layout": {"ranks_per_node": 3}},
    "bf16-state": {"optimizer": {"state": "bf16", "beta2": 0.999}},
    "schedule-fits": {"optimizer": {"warmup_steps": 201}},
    "wsd-decay": {"optimizer": {"schedule": "wsd"}},
    "cosine-decay": {"optimizer": {"decay_steps": 10}},
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_rule_refuses(rule):
    with pytest.raises(UserError) as caught:
        from_mapping(TRIPPED_BY[rule.name])
    text = str(caught.value)
    section, name = rule.field.split(".")
    value = TRIPPED_BY[rule.name].get(section, {}).get(name)
    named = f"{rule.field} = " if value is None else f"{rule.field} = {value!r}: "
    assert any(line.strip().startswith(named) for line in text.splitlines())
    assert rule.why in text and rule.remedy in text


def test_few_compositions_are_refused():
    assert len([rule for rule in RULES if rule.composition]) <= 6


def test_rule_names_are_unique():
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_the_message_carries_both_numbers():
    with pytest.raises(UserError, match=r"model\.num_heads \(4\) is not a multiple of layout\.tp \(8\)"):
        from_mapping(TRIPPED_BY["tp-heads"])


@pytest.mark.parametrize("name", ["heads-dim", "rope-even", "gqa", "tp-heads", "tp-kv-heads", "options-decoder"])
def test_the_moe_family_keeps_the_decoder_s_rules(name):
    job = TRIPPED_BY[name]
    with pytest.raises(UserError):
        from_mapping(job | {"model": job.get("model", {}) | {"family": "moe"}})


def test_images_that_fit_are_let_through():
    assert from_mapping(IMAGE).job.train.seq_len == 16


def test_a_head_width_of_its_own_need_not_divide():
    assert from_mapping({"model": {"num_heads": 3, "num_kv_heads": 3, "head_width": 8}}).job.model.head_dim == 8


@pytest.mark.parametrize("name", ["heads-dim", "rope-even", "gqa", "tp-heads", "tp-kv-heads"])
def test_a_family_of_ones_own_checks_its_sizes_itself(name, tmp_path):
    (tmp_path / "mine.py").touch()
    job = TRIPPED_BY[name]
    from_mapping(job | {"model": job.get("model", {}) | {"family": f"{tmp_path}/mine.py:F"}})
