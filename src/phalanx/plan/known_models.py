"""Find a model's shape from its name and its known sizes. The sizes come from the registry of published models
(models.toml) and from notes about experts; a bare parameter count gets a typical shape."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any

from phalanx.plan.cost.sizes import ModelShape


@cache
def _registry() -> list[dict[str, Any]]:
    return tomllib.loads(resources.files("phalanx.plan").joinpath("models.toml").read_text())["model"]


@cache
def published() -> dict[str, str]:
    """Map each registered name to the source of its sizes."""
    return {model["name"]: model["source"] for model in _registry()}


def published_shape(name: str, seq: int) -> ModelShape:
    shape = shape_of(name, {}, None, {}, seq)
    assert shape is not None, name
    return shape


def known_model(name: str) -> dict[str, Any]:
    """Return the sizes of a published model, or nothing if no entry matches the name."""
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for entry in _registry():
        if re.search(entry["match"], plain):
            return {key: value for key, value in entry.items() if key not in ("match", "source", "assumed")}
    return {}


def shape_of(
    name: str, sizes: dict[str, int], params_b: float | None, routed: dict[str, Any], seq: int
) -> ModelShape | None:
    """Combine the known `sizes` (0: unknown) and the experts' (`routed`) with the registry's, which they override.
    Return None if too little is known."""
    known = known_model(name)
    known_layers = known.get("layers", 0)
    known.pop("name", None)
    more = known | routed
    more |= {key: value for key, value in sizes.items() if value}
    if not all(more.get(key) for key in ("layers", "hidden", "heads")):
        total, active = _counts(name)
        if active and total > active:
            return ModelShape.of(**_usual_experts(total, active), seq=seq)
        params = params_b * 1e9 if params_b else total
        return ModelShape.of(**_usual(params), seq=seq) if params else None
    more.setdefault("ffn", 4 * more["hidden"])
    more.setdefault("vocab", 51200)
    if more.get("experts"):
        more["expert_ffn"] = more.get("expert_ffn") or more["ffn"]
        more.setdefault("dense_layers", 0)
        more["dense_layers"] = min(more["dense_layers"], more["layers"])
        if known_layers and known_layers != more["layers"]:  # a shortened proxy
            for key in ("moe_layers", "attention_layers", "mamba_layers"):
                if key in more:
                    more[key] = round(more[key] * more["layers"] / known_layers)
    window = more.pop("window", 0)
    if window:  # every other layer sees only this many tokens
        more["attended"] = (seq + min(seq, 2 * window)) / 2
    if "gated" in more:
        return ModelShape.of(**more, seq=seq)
    choices = [
        ModelShape.of(**(more | {"gated": gated, "tied": tied}), seq=seq)
        for gated in (False, True) for tied in (True, False)
    ]  # fmt: skip
    if params_b:
        return min(choices, key=lambda shape: abs(float(shape.params) / (params_b * 1e9) - 1))
    return choices[1] if more["ffn"] == 4 * more["hidden"] and not more.get("experts") else choices[3]


def _counts(name: str) -> tuple[float, float]:
    """Read total and active parameters from a name like "30B-A3B", "7b" or "350m"; 0 if the name has none."""
    found = re.findall(r"(?<![A-Za-z0-9.])(a?)(\d+(?:\.\d+)?)(b|m)(?![a-z0-9])", name.lower().replace("_", " "))
    sizes = {bool(active): float(size) * (1e9 if unit == "b" else 1e6) for active, size, unit in reversed(found)}
    return sizes.get(False, 0.0), sizes.get(True, 0.0)


def _usual(params: float) -> dict[str, int]:
    """Return sizes in GPT-3's proportions: hidden 128 x layers, heads of 128, FFN 4 x hidden, so N = 12 L h^2."""
    hidden = max(128, round((params * 128 / 12) ** (1 / 3) / 128) * 128)
    layers = max(1, round(params / (12 * hidden**2)))
    return {
        "layers": layers,
        "hidden": hidden,
        "heads": hidden // 128,
        "ffn": 4 * hidden,
        "vocab": 32000,
        "gated": False,
    }


def _usual_experts(params: float, active: float) -> dict[str, int]:
    """Return sizes in the proportions of DeepSeek-V3 and Qwen3: 60 layers, 8 routed experts and a shared one per token,
    and a hidden size that grows with the square root of the active parameters. The two counts determine the width and
    the number of experts."""
    layers, vocab, top_k = 60, 131072, 8
    hidden = max(512, round(7168 * (active / 37e9) ** 0.5 / 128) * 128)
    left = max(active - 2 * vocab * hidden - 2.5 * layers * hidden**2, 0.3 * active)
    width = max(64, round(left / (layers * (top_k + 1) * 3 * hidden) / 64) * 64)
    experts = max(top_k, round((params - active) / (layers * 3 * hidden * width) + top_k))
    return {
        "layers": layers, "hidden": hidden, "heads": hidden // 128, "kv_heads": max(1, hidden // 1024), "ffn": width,
        "vocab": vocab, "experts": experts, "top_k": top_k, "expert_ffn": width, "shared_ffn": width, "dense_layers": 0,
    }  # fmt: skip
