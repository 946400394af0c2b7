"""Compare plans with the layouts that well-known teams published (teams.toml). The model costs both with the team's
software, chips and batch, and lists the terms in which they differ; `lab.docs` writes docs/plans-and-teams.md."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from itertools import product
from typing import Any

import numpy as np

from phalanx.hardware.catalogue import load_packaged
from phalanx.plan.cost.candidates import SCHEDULES, Candidates
from phalanx.plan.cost.numbers import values
from phalanx.plan.cost.profiles import Kind, profile_of
from phalanx.plan.cost.sizes import ModelShape
from phalanx.plan.cost.software import software
from phalanx.plan.known_models import published_shape
from phalanx.plan.search.exhaustive import evaluate_rows, search
from phalanx.plan.search.space import Ask, Limits

AXES = ("tp", "cp", "pp", "vpp", "ep", "shard", "replica", "zero", "micro_batch", "recompute")
NOTICED = 0.01  # of the step: terms that differ by less are not named
HEAD = "| model | chips | published | plan | steps, s | gain | made of | why |"


@dataclass(frozen=True, slots=True)
class Compared:
    name: str
    source: str
    chips: str
    published: dict[str, Any]
    published_s: float  # predicted
    published_fits: bool  # by the middle of its memory prediction
    planned: dict[str, Any]
    planned_s: float
    terms: dict[str, float]  # seconds that the plan gains (negative: loses), largest first
    why: str

    @property
    def gain(self) -> float:
        return self.published_s / self.planned_s - 1


def compared() -> list[Compared]:
    text = resources.files("phalanx.plan.lab").joinpath("teams.toml").read_text(encoding="utf-8")
    return [_compare(team) for team in tomllib.loads(text)["team"]]


def _compare(team: dict[str, Any]) -> Compared:
    shape = (
        published_shape(team["registry"], team["seq"]) if "registry" in team
        else ModelShape.of(**team["model"], seq=team["seq"])
    )  # fmt: skip
    cluster = load_packaged().cluster(team["hardware"], team["chips"], fabric=team.get("fabric"))
    facts = software(team["software"], **team.get("facts", {}))
    # The team's layout ran, so the middle of the memory prediction is compared.
    profile = replace(profile_of(Kind.of(cluster.node.chip), facts, values()), memory_error=(0.0, 0.0))
    precision = team.get("precision", "bf16")
    layout = {"precision": precision, "bucket_bytes": 200e6} | team["layout"]
    layout.setdefault("schedule", "interleaved" if layout.get("vpp", 1) > 1 else "1f1b")
    best = None
    names, choices = list(team["allowed"]), list(team["allowed"].values())
    for chosen in product(*choices):
        pins = dict(zip(names, chosen, strict=True))
        limits = Limits(0.0, 1.0, 0.0, True, SCHEDULES[:3], (precision,), engine=False, pins=pins)
        found = search(Ask(shape, cluster, profile, team["batch"], limits), slack=1.0)
        if len(found) and (best is None or found.value[0] < best.value[0]):
            best = found
    assert best is not None, team["name"]
    own = evaluate_rows(best.ask, Candidates.of(**layout), np.array([team["batch"]]))
    gaps = {name: float(own.seconds[name][0] - best.costs.seconds[name][0]) for name in own.seconds}
    planned_s = float(best.costs.step_s[0])
    told = dict(sorted(gaps.items(), key=lambda item: -abs(item[1])))
    told = {name: gap for name, gap in told.items() if abs(gap) > NOTICED * planned_s}
    row = Candidates.of(**layout).row(0)
    return Compared(
        team["name"], team["source"], f"{team['chips']:,} x {team['hardware']}", row, float(own.step_s[0]),
        bool(own.fits(profile)[0]), best.candidates.row(0), planned_s, told, team["why"],
    )  # fmt: skip


def teams_page() -> str:
    lines = [HEAD, "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for c in compared():
        terms = ", ".join(f"{name} {gap:+.2g}" for name, gap in list(c.terms.items())[:4]) or "the same"
        fits = "" if c.published_fits else " (by the model it does not fit)"
        lines.append(
            f"| {c.name} ({c.source}) | {c.chips} | {_layout(c.published)}{fits} | {_layout(c.planned)} | "
            f"{c.published_s:.3g}, {c.planned_s:.3g} | {c.gain:+.1%} | {terms} | {c.why} |"
        )
    words = resources.files("phalanx.plan.lab").joinpath("plans-and-teams.md").read_text(encoding="utf-8")
    return words.format(table="\n".join(lines))


def _layout(row: dict[str, Any]) -> str:
    shown = [
        f"{axis} {row[axis]}" for axis in AXES if axis not in ("zero", "recompute", "micro_batch") and row[axis] > 1
    ]
    return ", ".join(
        [*shown, f"zero {row['zero']}", f"micro-batch {row['micro_batch']}", f"recompute {row['recompute']}"]
    )
