"""Features in which current dense models differ, each alone and combined as in published models, and the axes under
which each must agree. `FEATURE_CASES` are rows of tests/cases.py."""

import dataclasses

from phalanx.core.shape import ModelConfig

BASE = ModelConfig(
    vocab_size=101, dim=60, num_layers=3, num_heads=6, num_kv_heads=2, head_width=12, ffn_dim=85, rope_theta=100.0
)
# Five of the six pairs turn between once and 32 times in 64 positions, so that every branch is covered.
LONG = dict(rope_original=64, rope_factor=8.0)
GEMMA = dict(norm_place="both", norm_centered=True, activation="gelu", embedding_scale=60**0.5, attention_scale=0.25)
FEATURES: dict[str, dict] = {
    "qk-norm of heads": dict(qk_norm="head"),
    "qk-norm of all": dict(qk_norm="all"),
    "biases on qkv": dict(attention_bias="qkv"),
    "all biases": dict(attention_bias="all", ffn_bias=True),
    "rope linear": dict(rope_scaling="linear", rope_factor=4.0),
    "rope llama3": dict(rope_scaling="llama3", **LONG),
    "rope yarn": dict(rope_scaling="yarn", **LONG),
    "rope on a part": dict(rope_fraction=0.5),
    "window": dict(window=5),
    "windows in turn": dict(window=5, window_from=1, full_every=2, rope_local_theta=10.0),
    "attention softcap": dict(attention_softcap=0.5),
    "logit softcap": dict(logit_softcap=0.5),
    "z-loss": dict(z_loss=0.1),
    "post-norm": dict(norm_place="post"),
    "both norms, centred": dict(norm_place="both", norm_centered=True),
    "gelu": dict(activation="gelu"),
    "embedding scale": dict(embedding_scale=60**0.5, attention_scale=0.25),
    "like Gemma 2": dict(window=5, full_every=2, attention_softcap=0.5, logit_softcap=2.0, tied=True, **GEMMA),
    "like Gemma 3": dict(window=5, full_every=3, rope_local_theta=10.0, qk_norm="head", **GEMMA),
    "like OLMo 2": dict(qk_norm="all", norm_place="post", z_loss=0.01),
}
# name -> replica x shard x tp, and the differences from the base job
AXES: dict[str, tuple[tuple[int, int, int], dict]] = {
    "single": ((1, 1, 1), {}),
    "replica 2": ((2, 1, 1), {}),
    "shard 2": ((1, 2, 1), {}),
    "tp 2": ((1, 1, 2), {}),
    "pp 2, ZB-V": ((1, 1, 1), dict(axes=dict(pp=2, schedule="zbv"))),
    "cp 2, ring": ((1, 1, 1), dict(axes=dict(cp=2))),
    "cp 2, Ulysses": ((1, 1, 1), dict(axes=dict(cp=2, cp_style="ulysses"))),
    "shard 2 x tp 2, exact, full recompute": ((1, 2, 2), dict(reduction="exact", recompute="full")),
    "tp 2, selective recompute": ((1, 1, 2), dict(recompute="selective")),
    "tp 2, compile": ((1, 1, 2), dict(compile="aot_eager")),
}


def _meets(model: ModelConfig, axis: str) -> bool:
    """Return True unless the pair is refused (core/compat.py)."""
    return not (axis.startswith("pp") and model.tied)


def _model(feature: str, axis: str) -> ModelConfig:
    layers = 4 if axis.startswith("pp") else 3
    return dataclasses.replace(BASE, num_layers=layers, **FEATURES[feature])


FEATURE_CASES = [
    (f"{feature}: {axis}", layout, dict(changes, model=_model(feature, axis)))
    for feature in FEATURES
    for axis, (layout, changes) in AXES.items()
    if _meets(_model(feature, axis), axis)
]
# More TP ranks than key/value heads.
SHARED = dataclasses.replace(BASE, num_heads=8, num_kv_heads=2, qk_norm="head", attention_bias="qkv")
SHARED_ALL = dataclasses.replace(SHARED, qk_norm="all", num_kv_heads=1)
EXPERTS = dataclasses.replace(
    BASE,
    family="moe",
    num_experts=4,
    top_k=2,
    expert_dim=20,
    qk_norm="head",
    window=5,
    full_every=2,
    attention_bias="qkv",
)
WINDOWS, SOFTCAP = (_model(feature, "cp 4") for feature in ("windows in turn", "attention softcap"))
FEATURE_CASES += [
    ("shared keys: tp 4", (1, 1, 4), dict(model=SHARED)),
    ("shared keys: tp 4, one head, selective recompute", (1, 1, 4), dict(model=SHARED_ALL, recompute="selective")),
    ("shared keys: shard 2 x tp 4, ZeRO-1", (1, 2, 4), dict(model=SHARED, zero=1)),
    ("shared keys: tp 4 x cp 2, ring", (1, 1, 4), dict(model=SHARED, axes=dict(cp=2))),
    ("shared keys: tp 4 x cp 2, Ulysses", (1, 1, 4), dict(model=SHARED, axes=dict(cp=2, cp_style="ulysses"))),
    (
        "shared keys: tp 4 x pp 2, ZB-V",
        (1, 1, 4),
        dict(model=dataclasses.replace(SHARED, num_layers=4), axes=dict(pp=2, schedule="zbv")),
    ),
    ("shared keys: tp 4, compile", (1, 1, 4), dict(model=SHARED, compile="aot_eager")),
    ("features, moe: shard 2 x tp 2, ep 2", (1, 2, 2), dict(model=EXPERTS, axes=dict(ep=2))),
    ("features, moe: pp 2 x cp 2, Ulysses", (1, 1, 1), dict(model=EXPERTS, axes=dict(pp=2, cp=2, cp_style="ulysses"))),
    ("features, moe: pp 2 x cp 2, ring", (1, 1, 1), dict(model=EXPERTS, axes=dict(pp=2, cp=2))),
    ("windows in turn: cp 4, ring, no mask", (1, 1, 1), dict(model=WINDOWS, document_mask=False, axes=dict(cp=4))),
    ("attention softcap: tp 2 x cp 4, ring", (1, 1, 2), dict(model=SOFTCAP, axes=dict(cp=4))),
]
