"""Closed-form estimates of a scenario, to compare the twin with (derived in docs/twin.md).

restart     g = T / (M e^(R/M) (e^((T+C)/M) - 1))    Daly's model; R with the drain of a checkpoint and the manual mean
contained   g = (1 - o) / (1 + sum over kinds of failures of their rate x what one costs all)
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from phalanx.control.policy import Policy
from phalanx.plan.cost.goodput import restart_share
from phalanx.twin.agenda import S
from phalanx.twin.assumed import DAY_S
from phalanx.twin.draw import ln
from phalanx.twin.scenario import Scenario
from phalanx.twin.spent import Progress
from phalanx.twin.times import times_of, whole_step_s


def rates(scenario: Scenario) -> dict[str, float]:
    """Return the failures of the job per second, by effect: planned ones as "planned", slow links and chips as
    "limp"."""
    assume, nodes = scenario.assumed, scenario.gpus / scenario.gpus_per_node
    quality = assume.quality(scenario.quality)
    units = {"gpu": scenario.gpus * quality, "node": nodes * quality, "job": 1.0}
    found: dict[str, float] = {}
    stays = 0.0
    for c in assume.components():
        effect = {"job": "worker", "switch": "node"}.get(c.effect, c.effect)
        found[effect] = found.get(effect, 0.0) + c.per_s * units[c.per]
        stays += c.per_s * units[c.per] * (1 - c.swap) * (c.effect in ("worker", "hang"))
    found["worker"] += stays * assume("spread.again_share")
    found["planned"] = assume.planned_per_gpu_s() * scenario.gpus
    per_node_day = assume("slow.link_per_1000_node_days") + assume("slow.chip_per_1000_node_days")
    found["limp"] = per_node_day / 1000 / DAY_S * nodes
    return found


def estimate(scenario: Scenario, interval_s: float = 0.0) -> float:
    """Estimate effective training time. `interval_s`: the interval that the control plane chose, where it chooses."""
    times, assume, rate = times_of(scenario), scenario.assumed, rates(scenario)
    every, stall = interval_s or scenario.interval_s, times.stall / S
    mean_slow = (assume("slow.factor_low") + assume("slow.factor_high")) / 2
    unexpected = sum(r for effect, r in rate.items() if effect not in ("planned", "limp"))
    if scenario.policy in ("restart", "hot"):
        low, high = assume("restart.manual_h_low"), assume("restart.manual_h_high")
        manual_s = 3600 * (high - low) / ln(high / low) * assume("restart.manual_share")
        stop = times.stop / S + manual_s
        if scenario.policy == "hot":
            stop += whole_step_s(scenario) / 2
            share = (1 - times.memory_share) / (1 + (unexpected + rate["planned"]) * stop)
        else:
            share = float(restart_share(1 / unexpected, stop + times.drain / S, stall, every))
            share /= 1 + rate["planned"] * stop
        slow_for = 60 * assume("slow.link_minutes")
        return share / (1 + rate["limp"] * slow_for * (mean_slow - 1) / mean_slow)
    replicas = scenario.gpus // scenario.replica_gpus
    progress = Progress(int(whole_step_s(scenario) * S), replicas, scenario.micro_batches, 0, active=replicas - 1)
    missing = 1 - progress.speed
    pass_s = scenario.pass_s or scenario.step_s / scenario.micro_batches
    step, decide, form, live = whole_step_s(scenario), times.decide / S, times.form / S, times.live / S
    join = decide + form + live
    # The broken replica joins again at the end of a step, and steps take longer without it. Devices are reset, or tried
    # twice and replaced. With spares, one starts in parallel with a rank that is late.
    heal = times.launch / S + times.build / S + decide + step / progress.speed / 2
    reset, swapped = _repairs(scenario)
    late_s = scenario.late_s if scenario.late_s >= 0 else Policy().late_ns / S
    if scenario.policy != "contained" or not scenario.spares:
        late_s = inf
    heal += reset * min(assume("repair.reset_s"), late_s) + swapped * min(3 * times.launch / S, late_s)
    lost = 0.0
    for effect, per_s in rate.items():
        if effect in ("planned", "limp"):
            swap = 2 * join + missing * (times.build / S + step / 2)  # one step without it, and one when it joins again
            slow = assume("contained.slow_detect_s") + times.launch / S + step / 2
            lost += per_s * (swap + (effect == "limp") * slow * (mean_slow - 1) / mean_slow)
            continue
        detect = times.detect[effect] / S
        waits = _beyond(detect + decide, step)
        stop = max(waits + decide + form, times.stop / S - step / 2)
        lost += per_s * (stop + pass_s + join + missing * max(0.0, heal - pass_s))
        unseen = assume("contained.corrupt_detect_s") if effect == "corrupt" else 0.0
        lost += per_s * (unseen + times.drain / S + (every or step) / 2 if unseen else 0.0)
    overhead = times.memory_share + stall / (stall + (every or step))
    return (1 - overhead) / (1 + lost)


def sensitivity(scenario: Scenario, interval_s: float = 0.0) -> list[tuple[str, float]]:
    """Double each assumption in turn and list the points of effective training time lost, the largest first. Doubling a
    factor doubles its excess over 1."""
    usual, found = estimate(scenario, interval_s), {}
    for name, value, _ in scenario.assumed.rows():
        if not name.startswith("component: "):
            more = value - 1 if "factor" in name else value
            twice = replace(scenario, assume={**scenario.assume, name: value + more})
            found[name] = 100 * (usual - estimate(twice, interval_s))
    return sorted(found.items(), key=lambda row: -row[1])


def _repairs(scenario: Scenario) -> tuple[float, float]:
    """Return the shares of failures that end with a device reset, and with another node because a device is bad."""
    rows = [c for c in scenario.assumed.components() if c.per != "job"]
    units = {"gpu": scenario.gpus, "node": scenario.gpus / scenario.gpus_per_node}
    total = sum(c.per_s * units[c.per] for c in rows)
    reset = sum(c.per_s * units[c.per] * (1 - c.swap) for c in rows if c.effect in ("worker", "hang"))
    swapped = sum(c.per_s * units[c.per] * c.swap for c in rows if c.effect in ("worker", "link", "corrupt"))
    return reset / total, swapped / total


def _beyond(time_s: float, step_s: float) -> float:
    """Return the mean time by which `time_s` exceeds the rest of a step, when a failure is equally likely anywhere in
    it."""
    if time_s >= step_s:
        return time_s - step_s / 2
    return time_s * time_s / (2 * step_s)
