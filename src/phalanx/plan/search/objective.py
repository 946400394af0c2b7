"""The objectives of the search (seconds of a step, time to the tokens with failures, dollars), and the search for
each."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from phalanx.hardware import Cluster
from phalanx.plan.cost.candidates import Candidates
from phalanx.plan.cost.evaluate import Costs
from phalanx.plan.cost.goodput import goodput
from phalanx.plan.search.exhaustive import SLACK, Found, Space, search, seconds_per_token
from phalanx.plan.search.space import Ask

OBJECTIVES = {
    "time": "wall clock to the tokens, failures and checkpoints included",
    "step": "seconds of a step, as if nothing ever failed",
    "cost": "dollars to the tokens; fewer chips than given if that is cheaper",
}


def wall_per_token(ask: Ask, c: Candidates, costs: Costs) -> NDArray:
    share = goodput(ask.cluster, c, costs, ask.contains, rate=ask.failures).share
    # A run without progress ranks last, but its value stays finite.
    return np.asarray(costs.step_s / costs.tokens / np.maximum(share, 1e-300))


def best(
    ask: Ask, objective: str = "time", slack: float = SLACK, deadline: float = math.inf, space: Space | None = None
) -> Found:
    """Search by one of OBJECTIVES. `deadline`: the most wall-clock seconds per token that the cheapest cluster may
    take. `space`: search only these cores."""
    if objective == "step":
        return search(ask, seconds_per_token, slack=slack, space=space)
    if objective == "time":
        return search(ask, wall_per_token, slack=slack, space=space)
    found = [search(smaller, _chip_seconds, float(smaller.cluster.num_chips), slack) for smaller in _sizes(ask)]
    return min(found, key=lambda f: _price(f, deadline))


def _price(found: Found, deadline: float) -> tuple[bool, float, int]:
    chips = found.ask.cluster.num_chips
    worth = float(found.value[0]) if len(found) else math.inf
    late = worth / chips > deadline
    return late, worth / chips if late else worth, -chips  # if all are late, the fastest wins


def _chip_seconds(ask: Ask, c: Candidates, costs: Costs) -> NDArray:
    return wall_per_token(ask, c, costs) * ask.cluster.num_chips


def _sizes(ask: Ask) -> list[Ask]:
    """List the cluster and its successive halves, down to one node."""
    nodes, out = ask.cluster.nodes, []
    while nodes >= 1:
        out.append(ask.at(resized(ask.cluster, nodes)))
        nodes //= 2
    return out


def resized(cluster: Cluster, nodes: int) -> Cluster:
    return replace(cluster, nodes=nodes)
