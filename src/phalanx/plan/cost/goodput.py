"""Goodput: the share of the wall clock in which training makes progress, after failures, checkpoints and recovery. It
takes and returns columns, so that the search can rank by it. Rates and stops, with their sources: failures.toml.

    M = 1 / (failures per chip and second x chips)                   mean time between failures of the job
    T = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + C / 18M) - C             checkpoint interval (Daly 2006); M if C >= 2M
    restart     g = T / (M e^(R/M) (e^((T+C)/M) - 1))                Daly's complete model: R to restart, work redone
    contained   g = T / (T + C) x e^(-R/M) / (1 + H / (M replicas))  R until the others continue, H until it heals
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from phalanx.hardware import Cluster
from phalanx.plan.cost.candidates import Candidates
from phalanx.plan.cost.evaluate import Costs, setup_s
from phalanx.plan.cost.numbers import values
from phalanx.plan.cost.sizes import Num

DAY_S = 86_400.0


@cache
def figures() -> dict[str, Any]:
    return tomllib.loads(resources.files("phalanx.plan.cost").joinpath("failures.toml").read_text())


@dataclass(frozen=True, slots=True)
class Goodput:
    share: Num  # of the wall clock that trains
    mtbf_s: Num
    checkpoint_s: Num  # what one costs the training
    interval_s: Num  # between two
    stop_s: Num  # of all ranks, per failure
    heal_s: Num  # until the replica is back; 0: all stop
    start_s: Num  # communicators, once
    contained: Num  # the other replicas continue without the one that failed


def rate_per_chip_s(cluster: Cluster, which: str = "usual", per_1000_node_days: float = 0.0) -> float:
    """Return failures per chip and second. A user's own figure refers to the cluster's own nodes."""
    if per_1000_node_days:
        return per_1000_node_days / 1000 / cluster.node.chips / DAY_S
    table = figures()
    tpu = cluster.node.chip.name.startswith("tpu")
    rate = table["rates"][table["choice"]["tpu" if tpu else which]]
    return float(rate["per_1000_node_days"] / 1000 / rate["chips"] / DAY_S)


def interval_s(cost_s: Num, mtbf_s: Num) -> Num:
    """Return Daly's second-order optimum of the checkpoint interval."""
    x = cost_s / (2 * mtbf_s)
    young = np.sqrt(2 * cost_s * mtbf_s)
    return np.where(x < 1, young * (1 + np.sqrt(x) / 3 + x / 9) - cost_s, mtbf_s)


def restart_share(mtbf_s: Num, stop_s: Num, cost_s: Num, every_s: Num) -> Num:
    """J. Daly, "A higher order estimate of the optimum checkpoint interval", FGCS 22 (2006), equation 20."""
    part = (every_s + cost_s) / mtbf_s
    # 1 / (e^x - 1) as e^-x / (1 - e^-x), so that nothing overflows where a run makes no progress.
    return every_s / mtbf_s * np.exp(-stop_s / mtbf_s - part) / -np.expm1(-part)


def contained_share(mtbf_s: Num, stop_s: Num, cost_s: Num, every_s: Num, heal_s: Num, replicas: Num) -> Num:
    return every_s / (every_s + cost_s) * np.exp(-stop_s / mtbf_s) / (1 + heal_s / (mtbf_s * replicas))


def goodput(
    cluster: Cluster, c: Candidates, costs: Costs, contains: bool = True, which: str = "usual", rate: float = 0.0
) -> Goodput:
    """Predict goodput. `contains`: the software lets the other replicas continue; a single replica always restarts.
    `which`: the `usual` rate and stops, or the `high` ones."""
    stops = figures()["stops"]
    inside = c.tp * c.cp * c.pp * c.shard
    mtbf = 1 / (rate_per_chip_s(cluster, which, rate) * c.world)
    # Weights and optimizer are copied to the host during the next step. The cost is the part of the copy that outlasts
    # the step, plus the slowdown from interference.
    state = costs.memory["weights"] + costs.memory["optimizer"]
    copy = state / cluster.node.host_link_bytes_per_s
    cost = np.maximum(copy - costs.step_s, 0.0) + values()["interference"] * copy
    every = np.maximum(interval_s(cost, mtbf), costs.step_s)
    alone = (c.replica == 1) | (not contains)
    # Each replica is a world of its own: one that returns sets up its own communicators and one across replicas.
    start = np.where(alone, setup_s(c.world), setup_s(inside) + setup_s(c.replica))
    heal = stops["heal_s"] + setup_s(inside)
    # All stop twice: until the others have done the failed replica's part, and while it rejoins and receives its state.
    join = setup_s(c.replica) + state / cluster.node.nic_bytes_per_s
    stop = stops["detect_s"] + setup_s(c.replica) + costs.step_s + join
    if which == "high":
        stop = np.maximum(stop, stops["contained_high_s"])
    stop = np.where(alone, stops["restart_s"] + setup_s(c.world), stop)
    share = np.where(
        alone,
        restart_share(mtbf, stop, cost, every),
        contained_share(mtbf, stop, cost, every, heal, c.replica),
    )
    return Goodput(share, mtbf, cost, every, stop, np.where(alone, 0.0, heal), start, ~alone)
