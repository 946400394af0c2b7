"""Model shapes by name, from presets.toml."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any

PRESETS: dict[str, dict[str, Any]] = tomllib.loads(
    resources.files("phalanx.spec").joinpath("presets.toml").read_text(encoding="utf-8")
)
