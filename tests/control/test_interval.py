"""The checkpoint interval: close to the optimum, never shorter than possible, and explained."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from phalanx.control import interval
from phalanx.control.interval import DAY_NS, Measured, durable_interval, explain, memory_interval, mtbf_ns

S = 10**9
times = st.integers(1, 10**15)


def total(steps, m):
    """Return how long a step takes on average, with failures that come at random, by Daly's complete model without the
    recovery, which does not depend on the interval."""
    work = steps * m.step_ns
    return m.mtbf_ns * math.expm1((work + m.cost_ns) / m.mtbf_ns) / work


@given(st.integers(10**6, 60 * S), st.integers(0, 60 * S), st.integers(60 * S, 10**16))
def test_no_other_interval_is_much_better(step_ns, cost_ns, mtbf):
    m = Measured(step_ns, cost_ns // 2, cost_ns - cost_ns // 2, 0, mtbf)
    assume(step_ns + cost_ns < 20 * mtbf)
    found = durable_interval(m).steps
    others = {max(1, round(found * factor)) for factor in (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.4, 2, 4, 10, 100)}
    others = {steps for steps in others if steps * step_ns + cost_ns < 600 * mtbf}
    best = min(total(steps, m) for steps in others | {found})
    assert total(found, m) - 1 <= 1.05 * (best - 1) + 1e-9  # whole steps alone may cost 4 %


@given(times, times, times, times, times)
def test_the_next_one_begins_when_the_last_is_durable(step_ns, stall, slowdown, drain, mtbf):
    i = durable_interval(Measured(step_ns, stall, slowdown, drain, mtbf))
    assert i.steps >= 1 and (i.steps - 1) * step_ns >= drain
    assert isinstance(i.steps, int)
    if i.binds == "formula":
        assert abs(i.steps * step_ns - i.daly_ns) <= step_ns // 2 + 1
    assert 0 <= i.cost_ppm <= 10**6 and 0 <= i.lost_ppm <= 10**6


@given(times, times, times, times)
def test_daly_in_whole_numbers_is_daly(step_ns, cost, mtbf, drain):
    i = durable_interval(Measured(step_ns, cost, 0, drain, mtbf))
    x = cost / (2 * mtbf)
    daly = math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(x) / 3 + x / 9) - cost if x < 1 else mtbf
    assert i.daly_ns == pytest.approx(daly, rel=1e-9, abs=4)
    assert i.young_ns == math.isqrt(2 * cost * mtbf)


@pytest.mark.parametrize("stall_s, young_s", [(0.1, 6), (1, 19)])
def test_a_million_gpus(stall_s, young_s):
    """research/reliability.md, 5.6: the Young interval at 1M GPUs."""
    mtbf = mtbf_ns(125_000)
    assert mtbf / 60e9 == pytest.approx(3.0, abs=0.05)
    m = Measured(S, int(stall_s * S), 0, 0, mtbf)
    assert durable_interval(m).young_ns / S == pytest.approx(young_s, abs=0.5)


def test_a_slow_drain_binds():
    i = durable_interval(Measured(S, S // 10, 0, 60 * S, mtbf_ns(125_000)))
    assert (i.steps, i.binds) == (61, "drain")
    assert i.lost_ns == (61 * S + S // 10) // 2 + 60 * S


def test_what_costs_nothing_is_done_in_every_step():
    i = memory_interval(S, 0, S // 2, mtbf_ns(2048))
    assert (i.steps, i.binds, i.cost_ppm) == (1, "step", 0)


def test_a_copy_that_outlasts_the_step_is_a_stall():
    short, long = (memory_interval(S, 0, copy, mtbf_ns(2048)) for copy in (S, 2 * S))
    assert short.steps == 1 and long.steps == memory_interval(S, S, 0, mtbf_ns(2048)).steps > 1


# -- failures


def test_the_prior_is_llama_3():
    assert round(419 / (54 * 16_384 / 8) * 1000, 2) == interval.FAILURES_PER_1000_NODE_DAYS
    assert mtbf_ns(16_384 // 8) / 3600e9 == pytest.approx(3.09, abs=0.01)


@given(st.integers(1, 10**6), st.integers(0, 10**4), st.integers(0, 10**6))
def test_what_the_run_has_seen_outweighs_the_prior(nodes, failures, node_days):
    found = mtbf_ns(nodes, failures=failures, node_ns=node_days * DAY_NS)
    prior = 1000 / 3.79
    assert found == pytest.approx((prior + node_days) * DAY_NS / (1 + failures) / nodes, rel=1e-6, abs=1)
    assert mtbf_ns(nodes, failures=failures + 1, node_ns=node_days * DAY_NS) < found
    assert mtbf_ns(nodes, failures=failures, node_ns=(node_days + 1) * DAY_NS) >= found


def test_many_observations_decide():
    seen = mtbf_ns(1, failures=10_000, node_ns=10_000 * 7 * DAY_NS)
    assert seen / DAY_NS == pytest.approx(7, rel=0.01)


# -- words


@pytest.mark.parametrize(
    "drain_s, bound", [(8, "binds    the formula"), (600, "binds    the drain: no next one before 1,201 steps")]
)
def test_explain_has_the_figures_and_what_binds(drain_s, bound):
    m = Measured(S // 2, S // 10, S // 50, drain_s * S, mtbf_ns(2048, failures=2, node_ns=4096 * DAY_NS))
    said = "\n".join(explain(m, 2048, failures=2, node_ns=4096 * DAY_NS))
    assert bound in said and f"every {durable_interval(m).steps:,} steps" in said
    for figure in (
        "C = 120 ms",
        "100 ms stall",
        "20 ms slowdown",
        "2 failures in 4,096.0 node-days",
        "3.79",
        "2407.21783",
    ):
        assert figure in said


def test_explain_does_not_cite_what_it_did_not_use():
    m = Measured(S, S, 0, 0, mtbf_ns(8, 6.5))
    assert "6.5 per 1000" in "\n".join(explain(m, 8, 6.5)) and "Llama" not in "\n".join(explain(m, 8, 6.5))
    assert "nodes" not in "\n".join(explain(m))
