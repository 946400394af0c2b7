"""The numbers that no data sheet gives (numbers.toml): a prior for each, and bounds that keep it physical. `lab.fit`
fits all of them at once to published runs and writes fitted.toml; nothing else in the cost model is fitted."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

RATE = (0.5, 1.0)  # of a rate on a data sheet


@dataclass(frozen=True, slots=True)
class Number:
    name: str
    prior: float
    spread: float  # of ln(value), before any run is seen
    low: float
    high: float
    what: str
    source: str
    rate: bool  # a share of a data-sheet rate


@cache
def _tables(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("phalanx.plan.cost").joinpath(name).read_text())


@cache
def numbers() -> tuple[Number, ...]:
    return tuple(
        Number(name, n["prior"], n["spread"], low, high, n["what"], n["source"], n.get("rate", False))
        for name, n in _tables("numbers.toml")["numbers"].items()
        for low, high in [n.get("bounds", RATE)]
    )


def exceptions() -> dict[str, str]:
    """Return the shares of a data-sheet rate that may lie outside RATE, with the reason for each."""
    return _tables("numbers.toml")["exceptions"]


def fitted() -> dict[str, Any]:
    """Return fitted.toml: `numbers` by name, and the errors of predictions for left-out sources (`errors`)."""
    return _tables("fitted.toml")


def values() -> dict[str, float]:
    """Return the fitted numbers by name."""
    return fitted()["numbers"]
