"""Compare other ways to train on the same seeds: what each recovery policy loses, what each way to combine gradients
loses, and which checkpoint interval is best. The results show why replicas train in step and why failures are
contained."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from phalanx.twin.agenda import Agenda, S
from phalanx.twin.assumed import DAY_S
from phalanx.twin.closed import rates
from phalanx.twin.draw import Draw
from phalanx.twin.fleet import Fault, Fleet
from phalanx.twin.scenario import POLICIES, Scenario
from phalanx.twin.seeds import Result, Tell, many
from phalanx.twin.times import across_s, round_trip_s, times_of, whole_step_s

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # multiples of the interval of Young and Daly


@dataclass(frozen=True, slots=True)
class Way:
    """One way to combine the gradients of replicas."""

    name: str
    effective: float  # share of the time in which replicas train, with failures
    exchange_s: float  # how long a step waits for others
    updates_old: float  # how stale a gradient is when it is applied
    samples: float  # samples needed, relative to synchronous training
    step_s: float

    @property
    def useful(self) -> float:
        """Return progress per time, relative to a fleet that never fails and never waits."""
        return self.effective * self.step_s / (self.step_s + self.exchange_s) / self.samples

    def to_json(self) -> dict[str, Any]:
        names = ("name", "effective", "exchange_s", "updates_old", "samples", "useful")
        return {name: getattr(self, name) for name in names}


def policies(scenario: Scenario, seeds: int, tell: Tell | None = None) -> list[Result]:
    """Run the same failures under every policy that the job's replicas allow."""
    several = scenario.gpus > scenario.replica_gpus
    names = [name for name in POLICIES if several or name not in ("contained", "shrink")]
    return [many(scenario.changed(f"policy={name}"), seeds, tell) for name in names if name != scenario.policy]


def ways(scenario: Scenario, result: Result) -> list[Way]:
    """List the ways to combine gradients. `result`: that of the scenario itself, whose replicas are in step."""
    assume, replicas = scenario.assumed, scenario.gpus // scenario.replica_gpus
    seeds = [outcome.seed for outcome in result.outcomes]
    far_s, across = round_trip_s(scenario), across_s(scenario)
    every = assume("ways.local_every")
    # Replicas away from the server's site send gradients and fetch weights through the link between sites.
    asked = 2 * across * replicas * (scenario.sites - 1) / scenario.sites
    alone = fmean(_loose(scenario, seed) for seed in seeds)
    sync, server = far_s + across, far_s + max(0.0, asked - scenario.step_s)

    def way(name: str, effective: float, exchange_s: float, old: float, samples: float) -> Way:
        return Way(name, effective, exchange_s, old, samples, scenario.step_s)

    return [
        way("synchronous", result.effective, sync, 0.0, 1.0),
        way("semi-synchronous", result.effective, sync / every, every, assume("ways.local_samples")),
        way("parameter server", alone, server, replicas - 1.0, assume("ways.server_samples")),
    ]


def _loose(scenario: Scenario, seed: int) -> float:
    """Return the share of time in which independent replicas train: a failure costs only its own replica, until it is
    healed."""
    agenda, times, reset_s = Agenda(), times_of(scenario), scenario.assumed("repair.reset_s")
    places = max(1, scenario.replica_gpus // scenario.gpus_per_node)
    replicas, length_ns = scenario.gpus // scenario.replica_gpus, int(scenario.days * DAY_S * S)
    until, lost = dict[int, int](), 0

    def strike(fault: Fault) -> None:
        nonlocal lost
        if fault.effect in ("planned", "limp", "storage"):
            return
        heal_ns = times.detect.get(fault.effect, 0) + times.launch + times.build + times.live
        heal_ns += 0 if fault.swap else int(reset_s * S)
        for replica in sorted({node // places for node in fault.nodes or (0,) if node < fleet.job_nodes}):
            begin_ns = max(agenda.now, until.get(replica, 0))
            until[replica] = max(begin_ns, min(length_ns, agenda.now + heal_ns))
            lost += until[replica] - begin_ns

    fleet = Fleet(scenario, agenda, Draw(2 * seed), strike)
    agenda.run(length_ns)
    return 1 - lost / (replicas * length_ns)


def young_s(scenario: Scenario) -> float:
    """Return the interval of Young and Daly: sqrt(2 x stall x time between failures)."""
    per_s = sum(rate for effect, rate in rates(scenario).items() if effect not in ("planned", "limp"))
    return math.sqrt(2 * times_of(scenario).stall / S / per_s)


def around_best_interval(scenario: Scenario, seeds: int, tell: Tell | None = None) -> list[tuple[float, float]]:
    """Try checkpoint intervals around that of Young and Daly on the same seeds. Return each interval in seconds with
    its effective training time."""
    spans = [max(whole_step_s(scenario), factor * young_s(scenario)) for factor in FACTORS]
    return [(s, many(scenario.changed(f"interval={s:.6g}"), seeds, tell).effective) for s in spans]


@dataclass
class Beside:
    """Additional results that the user asked for."""

    scenario: Scenario
    ways: list[Way] = field(default_factory=list)
    intervals: list[tuple[float, float]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self.ways:
            out["ways"] = [way.to_json() for way in self.ways]
        if self.intervals:
            out["young_daly_s"] = young_s(self.scenario)
            out["intervals"] = [{"interval_s": s, "effective_training_time": e} for s, e in self.intervals]
        return out

    def tables(self) -> list[tuple[str, list[list[str]]]]:
        """Return the results as titles and rows."""
        out = []
        if self.ways:
            rows = [["", "trains", "waits, s a step", "updates old", "samples", "useful"]]
            rows += [
                [w.name, f"{w.effective:.2%}", f"{w.exchange_s:.3g}", f"{w.updates_old:g}", f"{w.samples:.2f}",
                 f"{w.useful:.2%}"]
                for w in self.ways
            ]  # fmt: skip
            out.append((f"Ways to combine gradients, steps of {self.scenario.step_s:g} s", rows))
        if self.intervals:
            best = max(share for _, share in self.intervals)
            rows = [["seconds", "effective", ""]]
            rows += [[f"{s:.1f}", f"{e:.3%}", "best of these" if e == best else ""] for s, e in self.intervals]
            out.append((f"Checkpoint intervals; Young and Daly: {young_s(self.scenario):.1f} s", rows))
        return out
