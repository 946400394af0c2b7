"""Run a scenario over many seeds: where time, money and energy went, and how much that varies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.control import invariants
from phalanx.hardware.catalogue import load
from phalanx.plan.cost.money import watts
from phalanx.twin.agenda import S
from phalanx.twin.assumed import DAY_S
from phalanx.twin.gang_job import Job
from phalanx.twin.scenario import Scenario
from phalanx.twin.spent import PARTS
from phalanx.twin.times import whole_step_s

Tell = Callable[[Scenario, float, int], None]  # seeds done, including the share of the current one; total seeds


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one seed."""

    seed: int
    waterfall: dict[str, float]  # shares of the gang's time; they sum to 1
    interruptions: int  # unplanned ones
    planned: int
    generations: int
    steps: int
    digest: str
    causes: dict[str, int]  # how often each thing failed
    incidents: list[tuple[float, str, str]]  # the first ones: time in seconds, what failed, what was decided
    fewest_spares: int  # the smallest number left after any failure or recovery

    @property
    def effective(self) -> float:
        return self.waterfall["productive"]


@dataclass(frozen=True)
class Result:
    scenario: Scenario
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def effective(self) -> float:
        return statistics.fmean(o.effective for o in self.outcomes)

    @property
    def interruptions(self) -> float:
        return statistics.fmean(o.interruptions for o in self.outcomes)

    @property
    def waterfall(self) -> dict[str, float]:
        return {part: statistics.fmean(o.waterfall[part] for o in self.outcomes) for part in PARTS}

    def quantile(self, share: float) -> float:
        """Return the effective training time below which this share of the seeds lies."""
        ordered = sorted(o.effective for o in self.outcomes)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def spares(self) -> dict[str, float]:
        """Return how many spare nodes there are, and how many were in use at once: on average, and at the 95th
        percentile of the seeds. If all were used, that is only a lower bound on how many are needed."""
        there = 0 if self.scenario.policy == "shrink" else self.scenario.num_spares
        used = sorted(there - o.fewest_spares for o in self.outcomes)
        most = used[min(len(used) - 1, int(0.95 * len(used)))]
        return {"nodes": there, "used": statistics.fmean(used), "used_p95": most, "all_used": most >= there > 0}

    @property
    def spares_used(self) -> str:
        """Return how many spares suffice in 95 % of the seeds; ">=" where all were used."""
        found = self.spares()
        return f"{'>= ' if found['all_used'] else ''}{found['used_p95']:,}"

    def days_for(self, steps: int) -> dict[str, float]:
        """Return how many days `steps` take: on average, and at the 5th and 95th percentiles; inf: they never
        finish."""
        days = steps * whole_step_s(self.scenario) / DAY_S
        shares = {"mean": self.effective, "p5": self.quantile(0.95), "p95": self.quantile(0.05)}
        return {name: days / share if share > 0 else math.inf for name, share in shares.items()}

    def dollars_for(self, steps: int) -> float | None:
        """Return the average cost of `steps`, without the spares. None: the hardware has no price; inf: they never
        finish."""
        dollars = [cost["dollars"] for cost in self.costs().values()]
        per_day = sum(d for d in dollars if d is not None) / self.scenario.days
        return None if None in dollars else per_day * self.days_for(steps)["mean"]

    def costs(self) -> dict[str, dict[str, float | None]]:
        """Return the cost of each part of the waterfall, for the job's own GPUs without spares."""
        scenario = self.scenario
        cluster = load().cluster(scenario.hardware, scenario.gpus, site=scenario.site)
        price, power, site = cluster.node.dollars_per_chip_hour, watts(cluster), cluster.site
        hours = scenario.days * 24
        out: dict[str, dict[str, float | None]] = {}
        for part, share in self.waterfall.items():
            kwh = None if power is None else power / 1000 * site.pue * hours * share
            out[part] = {
                "seconds": share * hours * 3600,
                "gpu_hours": share * hours * scenario.gpus,
                "dollars": None if price is None else share * hours * scenario.gpus * price.median,
                "kwh": kwh,
                "kg_co2": None if kwh is None else kwh * site.grams_co2_per_kwh / 1000,
            }
        return out

    def to_json(self) -> dict[str, Any]:
        s = self.scenario
        return {
            "scenario": s.name, "about": s.about, "gpus": s.gpus, "days": s.days, "policy": s.policy,
            "seeds": len(self.outcomes), "effective_training_time": self.effective,
            "effective_low": self.quantile(0.05), "effective_high": self.quantile(0.95),
            "interruptions": self.interruptions, "waterfall": self.waterfall, "costs": self.costs(),
            "spares": self.spares(),
            "per_seed": [
                {"seed": o.seed, "effective_training_time": o.effective, "interruptions": o.interruptions,
                 "planned": o.planned, "generations": o.generations, "steps": o.steps, "digest": o.digest,
                 "fewest_spares": o.fewest_spares, "waterfall": o.waterfall}
                for o in self.outcomes
            ],
        }  # fmt: skip


def one(scenario: Scenario, seed: int, tell: Callable[[float], None] | None = None) -> Outcome:
    job = Job(scenario, seed)
    job.run(tell=tell)
    invariants.check(job.gang)
    spent, total_ns = job.progress.spent, job.progress.now_ns
    assert sum(spent.values()) == total_ns, "the waterfall does not add up"
    job.digest.update(repr(sorted(spent.items())).encode())
    return Outcome(
        seed, {part: ns / total_ns for part, ns in spent.items()}, job.interruptions, job.planned,
        job.gang.generation, spent["productive"] // job.progress.step_ns, job.digest.hexdigest(), job.causes,
        job.incidents, job.fewest_spares,
    )  # fmt: skip


def many(scenario: Scenario, seeds: int, tell: Tell | None = None) -> Result:
    """Run the scenario over seeds. The same seeds give the same failures to every scenario with the same fleet."""
    outcomes: list[Outcome] = []

    def report(share: float) -> None:
        if tell:
            tell(scenario, len(outcomes) + share, seeds)

    for seed in range(seeds):
        outcomes.append(one(scenario, seed, report))
    report(0.0)
    return Result(scenario, outcomes)


def mttf_hours(scenario: Scenario, events: int = 20_000) -> float:
    """Return the mean time between unexpected failures that hit the job, from the fleet alone."""
    from phalanx.twin.agenda import Agenda
    from phalanx.twin.draw import Draw
    from phalanx.twin.fleet import Fault, Fleet

    agenda, seen, causes = Agenda(), [0], set[int]()

    def count(fault: Fault) -> None:
        hit = not fault.nodes or any(node < fleet.job_nodes for node in fault.nodes)
        unexpected = fault.effect not in ("planned", "limp", "storage")
        if hit and unexpected and fault.cause not in causes:
            seen[0] += 1
            causes.update({fault.cause} - {0})

    fleet = Fleet(scenario, agenda, Draw(0), count)
    agenda.run(until=10**30, stop=lambda: seen[0] >= events)
    return agenda.now / S / 3600 / seen[0]
