"""The assumptions of the twin: rates and durations from data/assumptions.toml, which gives a source for each."""

from __future__ import annotations

import copy
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from phalanx.core.errors import UserError

DAY_S = 86_400.0


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(resources.files("phalanx.twin").joinpath("data/assumptions.toml").read_text())


@dataclass(frozen=True, slots=True)
class Component:
    name: str
    effect: str
    swap: float  # share of failures that take the node out
    per: str  # gpu | node | job
    per_s: float  # events per second and unit, at quality 1


class Assumptions:
    """The assumed figures of one scenario. `overrides`: section.name -> value."""

    def __init__(self, overrides: dict[str, float] | None = None):
        self._table = copy.deepcopy(_file())
        for name, value in (overrides or {}).items():
            section, _, key = name.partition(".")
            found = self._table.get(section)
            if not isinstance(found, dict) or not isinstance(found.get(key), dict):
                names = [
                    f"{s}.{k}"
                    for s, t in _file().items()
                    if isinstance(t, dict)
                    for k, v in t.items()
                    if isinstance(v, dict)
                ]
                raise UserError(
                    "no such assumption", field="assume", value=name, remedy=f"choose among {', '.join(names)}"
                )
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
                raise UserError(
                    "expected a number >= 0", field=f"assume.{name}", value=value, remedy="write it as a number"
                )
            found[key] = {"value": value, "source": "the scenario"}

    def __call__(self, name: str) -> float:
        section, key = name.split(".")
        return float(self._table[section][key]["value"])

    def rows(self) -> list[tuple[str, float, str]]:
        """List all figures as name, value, source."""
        out = [(f"{s}.{k}", float(v["value"]), v["source"]) for s, t in self._table.items() if isinstance(t, dict)
               for k, v in t.items() if isinstance(v, dict)]  # fmt: skip
        return [(f"component: {c['name']}", float(c["count"]), c["source"]) for c in self._table["component"]] + out

    def quality(self, name: str | float) -> float:
        if isinstance(name, (int, float)) and not isinstance(name, bool) and name > 0:
            return float(name)
        if name in self._table["quality"]:
            return self(f"quality.{name}")
        names = ", ".join(self._table["quality"])
        raise UserError("no such fleet", field="quality", value=name, remedy=f"write a factor > 0, or one of {names}")

    # -- rates, calibrated on the counts of Llama 3

    def components(self) -> list[Component]:
        base = self._table["calibration"]
        seconds = base["days"] * DAY_S
        units = {"gpu": base["gpus"], "node": base["gpus"] / base["gpus_per_node"], "job": 1}
        scale = self._independent() / seconds
        rows = self._table["component"]
        return [
            Component(c["name"], c["effect"], c["swap"], c["per"], c["count"] * scale / units[c["per"]]) for c in rows
        ]

    def _independent(self) -> float:
        """Return the share of the counts that are independent events; the others are follow-ups, or hit many nodes at
        once. This belongs to the calibration, so a scenario's overrides do not affect it."""
        known = Assumptions()
        base, rows = known._table["calibration"], known._table["component"]
        nodes, years = base["gpus"] / base["gpus_per_node"], base["days"] / 365
        stays = sum(c["count"] * (1 - c["swap"]) for c in rows if c["effect"] in ("worker", "hang"))
        many = nodes / known("correlated.rack_nodes") * years * known("correlated.rack_per_rack_year")
        many += base["gpus"] / known("correlated.hall_gpus") * years * known("correlated.hall_per_hall_year")
        many += base["days"] * known("correlated.rollout_per_day")
        return (base["unexpected"] - many) / (base["unexpected"] + known("spread.again_share") * stays)

    def planned_per_gpu_s(self) -> float:
        base = self._table["calibration"]
        return float(base["planned"] / base["gpus"] / base["days"] / DAY_S)
