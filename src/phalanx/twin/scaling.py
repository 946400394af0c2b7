"""Scaling efficiency: what a chip contributes in a large cluster, compared with a chip in a small one, when the job is
laid out well and when it is laid out badly. Failures count on both sides.

well    the planner's best layout; a failure stops only its replica
badly   everything sharded over one flat ring (ZeRO-3, no pipeline, one network card of a node at a time); a failure
        stops the job, which restarts from a checkpoint
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from html import escape
from math import log2
from typing import Any

from phalanx.core.errors import UserError
from phalanx.plan.planner import Plan, Request, find, plan_of
from phalanx.plan.report.html import STYLE
from phalanx.twin.closed import estimate
from phalanx.twin.from_plan import of_plan

SIZES = (8, 64, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144, 524_288, 1_048_576)
FLAT = {"pp": 1, "cp": 1, "zero": 3, "replica": 1}
# "Below 80 % beyond 16k GPUs without care, below 50 % beyond 8,192 when done badly": the requirement, as published.
PUBLISHED = ((16_384, 0.8), (8192, 0.5))
WIDTH, HEIGHT, LEFT, TOP = 860, 300, 60, 20


@dataclass(frozen=True, slots=True)
class Point:
    """One cluster size; `speed` is tokens per second and chip, failures included. 0: it makes no progress."""

    chips: int
    speed: float
    step_s: float
    goodput: float
    layout: str


@dataclass(frozen=True, slots=True)
class Curves:
    model: str
    hardware: str
    well: list[Point]
    badly: list[Point]

    @property
    def base(self) -> float:
        """Return the speed that counts as 100 %: that of the smallest cluster that holds the model, laid out well."""
        return self.well[0].speed

    def efficiency(self, which: str, least: int = 0) -> dict[int, float]:
        """Return the efficiency by number of chips, from `least` on."""
        return {p.chips: p.speed / self.base for p in getattr(self, which) if p.chips >= least}

    def to_json(self) -> dict[str, Any]:
        def rows(which: str) -> list[dict[str, Any]]:
            shares = self.efficiency(which)
            return [
                {"chips": p.chips, "efficiency": shares[p.chips], "tokens_per_chip_s": p.speed, "step_s": p.step_s,
                 "goodput": p.goodput, "layout": p.layout}
                for p in getattr(self, which)
            ]  # fmt: skip

        return {"model": self.model, "hardware": self.hardware, "well": rows("well"), "badly": rows("badly")}


def curves(at: Callable[[int], Request], sizes: Iterable[int] = SIZES) -> Curves:
    """Compute both curves. `at` returns the plan request for a number of chips. Sizes that cannot hold the model are
    left out."""
    well, badly, asked = [], [], None
    for chips in sizes:
        asked = at(chips)
        well += _point(asked, chips)
        badly += _point(_flat(asked), chips, stops_all=True)
    if asked is None or not well:
        raise UserError(
            "no cluster of these sizes holds the model", field="sizes", value=str(list(sizes)),
            remedy="name larger clusters, or chips with more memory",
        )  # fmt: skip
    return Curves(asked.model, asked.ask.cluster.node.name, well, badly)


def _flat(request: Request) -> Request:
    ask = request.ask
    software = replace(ask.profile.software, hierarchical=False, one_card=True)
    profile, limits = replace(ask.profile, software=software), replace(ask.limits, pins=FLAT)
    return replace(request, ask=replace(ask, profile=profile, limits=limits, contains=False))


def _point(request: Request, chips: int, stops_all: bool = False) -> list[Point]:
    found = find(request)
    if not len(found.candidates):
        return []
    try:
        plan = plan_of(request, found)
    except UserError:  # failures come faster than recovery
        return [Point(chips, 0.0, float(found.costs.step_s[0]), 0.0, "-")]
    scenario = of_plan(plan, request.model)
    if stops_all:
        scenario = replace(scenario, policy="restart", interval_s=plan.goodput["interval_s"])
    share = estimate(scenario, plan.goodput["interval_s"])
    return [Point(chips, plan.tokens_per_s / plan.used * share, plan.step_s, share, _words(plan))]


def _words(plan: Plan) -> str:
    degrees = ((name, int(plan.layout[name])) for name in ("tp", "cp", "shard", "pp", "replica"))
    return " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1)


def text(found: Curves) -> list[str]:
    """Render a table with one row per size."""
    well, badly = found.efficiency("well"), found.efficiency("badly")
    by_size = {p.chips: p for p in found.well}, {p.chips: p for p in found.badly}
    lines = [f"{found.model} on {found.hardware}: tokens per chip, of those of the smallest cluster that holds it", ""]
    lines.append(f"{'chips':>9}  {'well':>6}  {'goodput':>7}  {'badly':>6}  {'goodput':>7}  laid out well as")
    for chips in sorted(well | badly):
        sides = [
            f"{share[chips]:6.1%}  {points[chips].goodput:7.1%}" if chips in share else f"{'-':>6}  {'-':>7}"
            for share, points in zip((well, badly), by_size, strict=True)
        ]
        lines.append(f"{chips:9,}  {'  '.join(sides)}  {by_size[0][chips].layout if chips in well else '-'}")
    return lines


def page(all_found: list[Curves]) -> str:
    """Draw the curves as one self-contained page."""
    body = "".join(f"<h2>{escape(f.model)} on {escape(f.hardware)}</h2>{picture(f)}" for f in all_found)
    head = f"<meta charset=utf-8><title>Scaling</title><style>{STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body><h1>Scaling</h1>{body}</body></html>"


def picture(found: Curves, style: str = "") -> str:
    """Draw efficiency over chips on a logarithmic axis, with the published marks. `style`: for a file of its own."""
    sizes = [p.chips for p in (*found.well, *found.badly)]
    low, high = log2(min(sizes)), log2(max(sizes))

    def place(chips: int, share: float) -> tuple[float, float]:
        x = LEFT + (log2(chips) - low) / max(high - low, 1e-9) * (WIDTH - LEFT - 90)
        return x, TOP + (1 - min(share, 1.1) / 1.1) * HEIGHT

    parts = []
    for percent in (0, 25, 50, 75, 100):
        y = place(min(sizes), percent / 100)[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 90}" y1="{y:.1f}" y2="{y:.1f}" class="axis" opacity=".3"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" class="dim">{percent} %</text>')
    for chips in sorted(set(sizes))[::2]:
        x = place(chips, 0)[0]
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle" class="dim">{chips:,}</text>')
    for which, colour in (("well", "c0"), ("badly", "c4")):
        shares = found.efficiency(which)
        spots = [place(chips, share) for chips, share in shares.items()]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{line}" fill="none" stroke="var(--{colour})" stroke-width="1.5"/>')
        for (x, y), (chips, share) in zip(spots, shares.items(), strict=True):
            tip = f"<title>{chips:,} chips, {which}: {share:.1%}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="var(--{colour})">{tip}</circle>')
        if spots:
            parts.append(f'<text x="{spots[-1][0] + 8:.1f}" y="{spots[-1][1] + 4:.1f}">{which}</text>')
    for chips, share in PUBLISHED:
        x, y = place(chips, share)
        parts.append(f'<path d="M{x - 6:.1f} {y:.1f}h12M{x:.1f} {y - 6:.1f}v12" class="axis" stroke-width="2"/>')
        words = f"published: below {share:.0%} beyond it"
        parts.append(f'<text x="{x + 10:.1f}" y="{y - 6:.1f}" class="dim">{words}</text>')
    name = escape(f"scaling efficiency of {found.model} on {found.hardware}")
    size = f'viewBox="0 0 {WIDTH} {TOP + HEIGHT + 30}"'
    shapes = style + "".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{name}">{shapes}</svg>'
