"""Published models by name (models.toml), for plans of what the engine has no preset for."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources

from phalanx.plan.model import ModelShape
from phalanx.plan.names import shape_of


@cache
def published() -> dict[str, str]:
    """Name -> where its sizes come from."""
    models = tomllib.loads(resources.files("phalanx.plan").joinpath("models.toml").read_text())["model"]
    return {m["name"]: m["source"] for m in models}


def published_shape(name: str, seq: int) -> ModelShape:
    shape = shape_of(name, {}, None, "", seq)
    assert shape is not None, name
    return shape
