"""Intervals of predicted step time and memory. They come from published runs whose source was left out of the fit
(fitted.toml). They widen where evidence is missing: software without published runs on such chips, and chips without
any."""

from __future__ import annotations

import math
from typing import Any

from phalanx.plan.cost.numbers import fitted

LOW_PRECISIONS = ("fp8", "mxfp8", "nvfp4")
UNKNOWN_CHIP = 0.15  # ln: how far chips differ in their share of the best product (two standard deviations)
MEMORY = (-0.25, 0.25)  # ln(peak / predicted) where no peak of the software is published


def kind_of(experts: bool, precision: str, generation: str) -> str:
    """Return the kind of a run; runs of one kind are predicted about equally well."""
    if generation == "tpu":
        return "tpu"
    return "experts" if experts else "fp8" if precision in LOW_PRECISIONS else "dense"


def seen(engine: str, generation: str) -> bool:
    """Return whether the fit has runs of this software on this generation of chips."""
    return f"{engine} on {generation}" in fitted()["seen"]


def interval(kind: str, known: bool, chip_known: bool = True) -> tuple[float, float]:
    """Return ln(measured / predicted) of a step at 5 % and 95 %."""
    low, high = fitted()["errors"][f"{kind}, {'seen' if known else 'unseen'}"]
    if not chip_known:
        low, high = -math.hypot(low, UNKNOWN_CHIP), math.hypot(high, UNKNOWN_CHIP)
    return low, high


def memory_interval(engine: str) -> tuple[float, float]:
    """Return ln(peak / predicted) of a rank's memory at 5 % and 95 %."""
    known: dict[str, Any] = fitted()["memory"]
    low, high = known.get(engine, MEMORY)
    return float(low), float(high)


def evidence(engine: str, generation: str, chip: str) -> str:
    """Say in words what an interval is based on."""
    runs = fitted()["seen"].get(f"{engine} on {generation}", 0)
    if runs:
        return f"{runs} published runs of {engine} on {generation}"
    chips = sum(count for name, count in fitted()["seen"].items() if name.endswith(f" on {generation}"))
    if chips:
        return f"no published run of {engine} on {generation}, {chips} of other software"
    return f"no published run on {chip}: its speed is its best measured product times what other chips lose"
