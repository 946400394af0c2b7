"""Turn a plan into a scenario: the job as planned, on the chips that the plan uses."""

from __future__ import annotations

from phalanx.plan.planner import Plan
from phalanx.twin.assumed import DAY_S
from phalanx.twin.scenario import Scenario

SPARES = 0.02  # NVL72 vendor guidance: about 2 %


def steps_of(plan: Plan) -> int:
    return max(1, round(plan.bill.tokens / (plan.global_batch * plan.seq)))


def of_plan(plan: Plan, name: str) -> Scenario:
    """Build the scenario. A job with one replica stops as a whole."""
    layout, days = plan.layout, steps_of(plan) * plan.step_s / DAY_S
    return Scenario(
        name=name,
        about=f"{plan.model} on {plan.used:,} {plan.hardware}, as planned: {plan.step_s:.3g} s a step",
        gpus=plan.used,
        hardware=plan.hardware,
        step_s=plan.step_s,
        model=plan.model,
        params=plan.params,
        days=max(days, 1.0),
        policy="contained" if layout["replica"] > 1 else "hot",
        replica_gpus=plan.used // layout["replica"],
        micro_batches=plan.micro_batches,
        pass_s=plan.step_s * layout["pp"] / (plan.micro_batches + layout["pp"] - 1),
        spares=SPARES,
        site=plan.site,
    ).checked()
