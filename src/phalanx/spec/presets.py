"""Named model shapes from presets.toml. A shape sets every field of the model except its options; fields that the file
leaves out get their defaults. A preset laid over another therefore leaves nothing of it."""

from __future__ import annotations

import dataclasses
import tomllib
from importlib import resources
from typing import Any

from phalanx.core.shape import ModelConfig

DEFAULTS = {k: v for k, v in dataclasses.asdict(ModelConfig()).items() if k != "options"}
PRESETS: dict[str, dict[str, Any]] = {
    name: DEFAULTS | shape
    for name, shape in tomllib.loads(
        resources.files("phalanx.spec").joinpath("presets.toml").read_text(encoding="utf-8")
    ).items()
}
