"""The whole answer to "which layout": the plan, close alternatives, what limits it, what would help, and
comparisons."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import UserError
from phalanx.hardware import Catalogue
from phalanx.plan.planner import Plan, Request, find, plan_of
from phalanx.plan.search.advice import Change, binds, changes, runner_up
from phalanx.plan.search.impossible import impossible, parse_pins

PARETO = 6  # trades between time and memory that are shown


@dataclass(frozen=True, slots=True)
class Answer:
    request: Request
    plan: Plan
    second: Plan | None  # the runner-up
    pareto: tuple[Plan, ...]  # faster against less memory
    binds: tuple[str, ...]
    changes: tuple[Change, ...]
    compared: tuple[tuple[str, Plan | UserError], ...]  # the best with the pinned degrees, or why there is none
    considered: int
    costed: int
    search_s: float  # of CPU time


def answer(request: Request, catalogue: Catalogue, compare: tuple[str, ...] = ()) -> Answer:
    """Answer the request. If nothing fits, raise a UserError that says what would."""
    asked = {text: parse_pins(text, "compare") for text in compare}
    began = time.process_time()
    found = find(request)
    took = time.process_time() - began
    if not len(found):
        raise impossible(request.ask, catalogue)
    plan = plan_of(request, found)
    if plan.bill.days > request.days:
        remedy = f"allow {plan.bill.days:,.1f} days, or take more or faster chips"
        raise UserError("no layout is that fast", field="days", value=request.days, remedy=remedy)
    second = runner_up(found)
    gains = changes(request, found, catalogue)
    others: list[tuple[str, Plan | UserError]] = []
    for text, pins in asked.items():
        ask = replace(found.ask, limits=replace(request.ask.limits, pins=request.ask.limits.pins | pins))
        rivals = find(request, ask)
        others.append((text, plan_of(request, rivals) if len(rivals) else impossible(ask, catalogue)))
    rows = found.pareto()[:PARETO]
    return Answer(
        request, plan, None if second is None else plan_of(request, found, second),
        tuple(plan_of(request, found, int(row)) for row in rows), tuple(binds(plan, found, gains)), tuple(gains),
        tuple(others), found.considered, found.costed, took,
    )  # fmt: skip


def sizes(request: Request, steps: int = 3) -> list[tuple[int, dict[str, Any]]]:
    """Return (chips, figures) of the best layouts on clusters of other sizes with the same batch, omitting sizes at
    which nothing fits."""
    from phalanx.plan.search.objective import resized

    cluster, out = request.ask.cluster, []
    for power in range(-steps, 3):
        nodes = cluster.nodes * 2**power if power >= 0 else cluster.nodes // 2**-power
        if nodes < 1 or (power < 0 and cluster.nodes % 2**-power):
            continue
        at = replace(request, ask=request.ask.at(resized(cluster, nodes)), objective="time")
        found = find(at, slack=1.0)
        if len(found):
            plan = plan_of(at, found)
            out.append(
                (plan.chips, {"tokens_per_s": plan.tokens_per_s * plan.goodput["share"], "mfu": plan.mfu["full"]})
            )
    return out
