"""How many steps lie between two checkpoints: the interval that minimises checkpoint cost plus expected lost work.

    Young (1974)    T = sqrt(2 C M)                                     C: what one costs the training, M: MTBF
    Daly (2006)     T = sqrt(2 C M) (1 + sqrt(x) / 3 + x / 9) - C       x = C / 2M < 1; else T = M

Daly's formula is always used. It equals Young's where C is small against M, and is 5 % less at C = M / 100. As C =
sqrt(2 C M) sqrt(x), it is sqrt(2 C M) - 2C / 3 + sqrt(2 C M) C / 18M, which needs no fractions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.control.policy import DAY_NS, FAILURES_PER_MILLION_NODE_DAYS

FAILURES_PER_1000_NODE_DAYS = FAILURES_PER_MILLION_NODE_DAYS / 1000


@dataclass(frozen=True, slots=True)
class Measured:
    """The measured costs of one checkpoint, and the pace and MTBF of the gang."""

    step_ns: int  # without checkpoints
    stall_ns: int  # time that training stood still
    slowdown_ns: int  # extra time of steps while it was written
    drain_ns: int  # until it was durable
    mtbf_ns: int

    @property
    def cost_ns(self) -> int:
        return self.stall_ns + self.slowdown_ns


@dataclass(frozen=True, slots=True)
class Interval:
    steps: int
    young_ns: int
    daly_ns: int  # before rounding to whole steps
    binds: str  # formula | drain | step
    lost_ns: int  # per failure, expected
    cost_ppm: int  # of the time, for checkpoints
    lost_ppm: int  # of the time, for what failures undo


def durable_interval(m: Measured) -> Interval:
    """Choose the interval of durable checkpoints. The next one cannot begin before the last is durable."""
    return _interval(m.step_ns, m.cost_ns, m.drain_ns, m.mtbf_ns, -(-m.drain_ns // m.step_ns) + 1)


def memory_interval(step_ns: int, stall_ns: int, copy_ns: int, mtbf_ns: int) -> Interval:
    """Choose the interval of snapshots in memory. The copy runs beside the next step and must be done before its
    update, which waits for the rest of it. That wait is a stall too, so no interval is too short."""
    return _interval(step_ns, stall_ns + max(0, copy_ns - step_ns), copy_ns, mtbf_ns, 1)


def _interval(step_ns: int, cost_ns: int, drain_ns: int, mtbf_ns: int, floor: int) -> Interval:
    assert step_ns > 0 and mtbf_ns > 0 and min(cost_ns, drain_ns) >= 0, (step_ns, cost_ns, drain_ns, mtbf_ns)
    young = math.isqrt(2 * cost_ns * mtbf_ns)
    daly = young - 2 * cost_ns // 3 + young * cost_ns // (18 * mtbf_ns) if cost_ns < 2 * mtbf_ns else mtbf_ns
    wanted = (2 * daly + step_ns) // (2 * step_ns)  # to the nearest
    steps = max(wanted, floor)
    binds = "formula" if steps == wanted else "drain" if floor > 1 else "step"
    period = steps * step_ns + cost_ns
    # A failure comes anywhere in a period; until the last checkpoint is durable, the one before it counts.
    lost = period // 2 + drain_ns
    return Interval(steps, young, daly, binds, lost, 10**6 * cost_ns // period, min(10**6, 10**6 * lost // mtbf_ns))


def mtbf_ns(
    nodes: int,
    failures_per_1000_node_days: float = FAILURES_PER_1000_NODE_DAYS,
    failures: int = 0,
    node_ns: int = 0,
) -> int:
    """Estimate the MTBF of the whole gang, after it has seen `failures` in `node_ns` (nodes times time). The prior on
    the rate is a Gamma that weighs as much as one failure in the time that one takes on average. The result is one over
    the mean of the posterior: (prior time + node_ns) / (1 + failures)."""
    prior_ns = 1000 * DAY_NS * 10**6 // max(1, round(failures_per_1000_node_days * 10**6))
    return max(1, (prior_ns + node_ns) // ((1 + failures) * nodes))


def explain(
    m: Measured,
    nodes: int = 0,
    failures_per_1000_node_days: float = FAILURES_PER_1000_NODE_DAYS,
    failures: int = 0,
    node_ns: int = 0,
) -> list[str]:
    """Explain an interval, in lines of text. Without `nodes`, the origin of the MTBF is left out."""
    i = durable_interval(m)
    floor = -(-m.drain_ns // m.step_ns) + 1
    mtbf = [f"  MTBF     M = {time_text(m.mtbf_ns)}"]
    if nodes:
        known = failures_per_1000_node_days == FAILURES_PER_1000_NODE_DAYS
        source = " (Llama 3, arXiv:2407.21783)" if known else ""
        mtbf = [
            f"{mtbf[0]} of {nodes:,} nodes: {failures:,} failures in {node_ns / DAY_NS:,.1f} node-days,",
            f"           and {failures_per_1000_node_days:g} per 1000 node-days{source} with the weight of one failure",
        ]
    binds = {
        "formula": "the formula",
        "drain": f"the drain: no next one before {floor:,} steps; shorter with faster storage, or more of it",
        "step": "the step: no more than one in each",
    }[i.binds]
    cost, lost = i.cost_ppm / 10**4, i.lost_ppm / 10**4
    return [
        f"a checkpoint every {i.steps:,} steps, {time_text(i.steps * m.step_ns)} of training",
        f"  cost     C = {time_text(m.cost_ns)}: {time_text(m.stall_ns)} stall + {time_text(m.slowdown_ns)} slowdown",
        *mtbf,
        f"  formula  sqrt(2 C M) = {time_text(i.young_ns)} (Young), {time_text(i.daly_ns)} with Daly's correction",
        f"  step     {time_text(m.step_ns)}, so {max(1, round(i.daly_ns / m.step_ns)):,} steps",
        f"  drain    {time_text(m.drain_ns)} until it is durable, so at least {floor:,} steps",
        f"  binds    {binds}",
        f"  lost     {time_text(i.lost_ns)} per failure, expected: half an interval and the drain",
        f"  share    of the time {cost:.3g} % for checkpoints, {lost:.3g} % for what failures undo",
    ]


def time_text(ns: int) -> str:
    for unit, size in (("d", DAY_NS), ("h", 3600 * 10**9), ("min", 60 * 10**9), ("s", 10**9), ("ms", 10**6)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:,.0f} {unit}"
    return f"{ns / 1000:.3g} us" if ns else "0 s"
