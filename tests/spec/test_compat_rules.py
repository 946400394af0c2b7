"""Every refusal refuses, in words that help. A rule without a job that trips it fails here."""

import pytest

from phalanx.core.compat import RULES
from phalanx.core.errors import UserError
from phalanx.spec import from_mapping

TRIPPED_BY: dict[str, dict] = {
    "options-dense": {"model": {"options": {"depth": 3}}},
    "heads-dim": {"model": {"num_heads": 3}},
    "rope-even": {"model": {"dim": 12}},
    "gqa": {"model": {"num_kv_heads": 3}},
    "tp-heads": {"layout": {"tp": 8}},
    "tp-kv-heads": {"layout": {"tp": 4}},
    "tp-sequence": {"layout": {"tp": 2}, "train": {"seq_len": 255}},
    "micro-batch": {"train": {"global_batch": 15}},
    "batch-ranks": {"layout": {"shard": 3}},
    "exact-compress": {"layout": {"replica": 2}, "train": {"reduction": "exact", "compress": "bf16"}},
    "compress-replica": {"train": {"compress": "bf16"}},
    "compress-fp64": {"layout": {"replica": 2}, "train": {"precision": "fp64", "compress": "int8"}},
    "nodes-even": {"layout": {"ranks_per_node": 3}},
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
    assert text.startswith(f"{rule.field} = ") and (value is None or text.startswith(f"{rule.field} = {value!r}: "))
    assert rule.why in text and rule.remedy in text


def test_rule_names_are_unique():
    assert len({rule.name for rule in RULES}) == len(RULES)


def test_the_message_carries_both_numbers():
    with pytest.raises(UserError, match=r"model\.num_heads \(4\) is not a multiple of layout\.tp \(8\)"):
        from_mapping(TRIPPED_BY["tp-heads"])


@pytest.mark.parametrize("name", ["heads-dim", "rope-even", "gqa", "tp-heads", "tp-kv-heads"])
def test_a_family_of_ones_own_checks_its_sizes_itself(name, tmp_path):
    (tmp_path / "mine.py").touch()
    job = TRIPPED_BY[name]
    from_mapping(job | {"model": job.get("model", {}) | {"family": f"{tmp_path}/mine.py:F"}})
