"""If one of these tests fails, users cannot trust an answer of the twin."""

import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.control import messages as say
from phalanx.core.errors import UserError
from phalanx.twin import draw, gang_job, scenario
from phalanx.twin.agenda import S
from phalanx.twin.assumed import Assumptions
from phalanx.twin.fleet import Fault
from phalanx.twin.gang_job import Job
from phalanx.twin.seeds import many, mttf_hours, one
from phalanx.twin.spent import Progress
from phalanx.twin.times import times_of
from tests.twin import soak, ticks

# One kind of failure, and stops of equal length: the slow implementation knows nothing else.
PLAIN = {
    "repair.sigma": 0.0, "restart.manual_share": 0.0, "spread.lemon_share": 0.0, "spread.again_share": 0.0,
    "correlated.rack_per_rack_year": 0.0, "correlated.hall_per_hall_year": 0.0, "correlated.storage_per_day": 0.0,
    "correlated.rollout_per_day": 0.0, "slow.link_per_1000_node_days": 0.0, "slow.chip_per_1000_node_days": 0.0,
    "checkpoint.memory_share": 0.0, "checkpoint.storage_gb_per_s": 1e9, "repair.reset_s": 0.0, "repair.swap_h": 0.001,
}  # fmt: skip
JOB = Path(__file__).parents[2] / "examples/llama3-8b.toml"
SMALL = scenario.Scenario("small", gpus=64, hardware="h100", step_s=5.0, replica_gpus=16, days=2.0, params=1e9)


def rate_of(case):
    """Return the failures per node and second, of all kinds."""
    assume, fleet_gpus = case.assumed, case.gpus
    per_s = sum(
        c.per_s * {"gpu": fleet_gpus, "node": fleet_gpus / 8, "job": 1}[c.per]
        * (1 if c.per == "job" else assume.quality(case.quality))
        for c in assume.components()
    )  # fmt: skip
    return (per_s + assume.planned_per_gpu_s() * fleet_gpus) / (case.gpus / 8)


def test_calibration_gives_back_the_counts():
    found = Assumptions()
    per_s = {"gpu": 16384, "node": 2048, "job": 1}
    expected = sum(c.per_s * per_s[c.per] for c in found.components()) * 54 * 86_400
    assert 400 < expected < 419  # the rest are follow-ups, or hit many at once
    assert sum(c["count"] for c in found._table["component"]) == pytest.approx(419)


def test_every_figure_has_a_source():
    for name, _, source in Assumptions().rows():
        assert source, name


def test_same_seed_same_digest_in_another_process():
    case = dataclasses.replace(SMALL, quality=500.0, days=1.0)
    code = (
        "import json,sys; from phalanx.twin.scenario import Scenario; from phalanx.twin.seeds import one;"
        "print(one(Scenario(**json.loads(sys.argv[1])), 3).digest)"
    )
    text = json.dumps(dataclasses.asdict(case))
    env = {**os.environ, "PYTHONHASHSEED": "99"}
    other = subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, check=True, env=env)
    assert other.stdout.strip() == one(case, 3).digest != one(case, 4).digest


def test_logarithms_and_exponentials_need_no_library():
    import math

    for x in (1e-300, 1e-9, 0.3, 0.999999, 1.0, 1.5, 7.0, 1e300):
        assert draw.ln(x) == pytest.approx(math.log(x), rel=1e-14, abs=1e-15)
    for x in (-300.0, -1.0, 0.0, 0.1, 3.0, 500.0):
        assert draw.exp(x) == pytest.approx(math.exp(x), rel=1e-13)
    found = draw.Draw(1)
    assert statistics.fmean(found.lognormal(10.0, 0.6) for _ in range(20_000)) == pytest.approx(10.0, rel=0.02)
    assert statistics.fmean(found.wait_ns(0.1) for _ in range(20_000)) == pytest.approx(10 * S, rel=0.03)


@pytest.mark.parametrize("policy", ["restart", "hot", "contained", "shrink"])
def test_the_waterfall_sums_to_the_time(policy):
    found = one(dataclasses.replace(SMALL, policy=policy, quality=300.0).checked(), 0)
    assert sum(found.waterfall.values()) == pytest.approx(1.0, abs=1e-12)
    assert found.interruptions > 5
    assert 0.1 < found.effective < 1


@pytest.fixture
def quick(monkeypatch):
    """Check the invariants now and then, as in large fleets: other tests check after every event."""
    monkeypatch.setattr(gang_job, "ALWAYS_CHECKED", 0)


def test_restart_agrees_with_ticks(quick):
    """The fast implementation must agree with the slow one, which simulates every GPU in every tick."""
    case = dataclasses.replace(SMALL, policy="restart", quality=2500.0, spares=1.0, interval_s=600.0, stall_s=10.0,
                               stop_s=300.0, assume=PLAIN, days=4.0).checked()  # fmt: skip
    fast = many(case, 8).effective
    slow = statistics.fmean(ticks.restart(8, rate_of(case), 300.0, 600.0, 10.0, 4.0, seed) for seed in range(8))
    assert 0.3 < slow < 0.9
    assert fast == pytest.approx(slow, abs=0.03)


def test_contained_agrees_with_ticks(quick):
    """A micro-batch is a thousandth of a step here, so a missing replica costs only its own share."""
    assume = {**PLAIN, "contained.launch_s": 200.0, "contained.engine_s": 100.0}
    case = dataclasses.replace(SMALL, quality=5000.0, spares=1.0, stop_s=60.0, detect_s=0.0, stall_s=0.0, step_s=5.0,
                               micro_batches=1000, pass_s=0.005, assume=assume, days=3.0)  # fmt: skip
    fast = many(case.checked(), 8).effective
    rate = rate_of(case)
    slow = statistics.fmean(ticks.contained(8, 2, rate, 62.0, 310.0, 3.0, seed) for seed in range(8))
    assert 0.4 < slow < 0.95
    assert fast == pytest.approx(slow, abs=0.03)


def test_mttf_falls_with_the_size_of_the_job():
    base = scenario.load("llama3-16k").changed("quality=rsc1")
    assert mttf_hours(base, 4000) == pytest.approx(1.8, rel=0.08)
    assert mttf_hours(base.changed("gpus=131072"), 4000) == pytest.approx(0.23, rel=0.08)


def test_invariants_hold_through_small_fleets():
    kinds = set()
    for seed in range(12):
        kinds |= {what for _, what, _ in soak.run(seed).incidents}
    assert len(kinds) > 10, kinds


def test_a_planted_bug_is_caught(planted_bug):
    with pytest.raises(AssertionError):
        for seed in range(5):
            soak.run(seed)


@pytest.mark.parametrize("gpus", [64, 16384])
def test_a_bug_in_the_control_plane_stops_a_run_of_any_user(planted_bug, gpus):
    """Small fleets are checked after every event, large ones now and then and at the end."""
    case = dataclasses.replace(SMALL, gpus=gpus, policy="shrink", quality=100.0, days=0.05, spares=0.0)
    with pytest.raises(AssertionError):
        many(case.checked(), 4)


def test_a_failure_is_contained_and_healed_by_a_spare():
    job = Job(dataclasses.replace(SMALL, spares=0.5, quality=1e-6).checked(), 0, check=True)
    job.agenda.after(100 * S, job.strike, Fault("host", "node", (0,), True, 3600 * S))
    job.agenda.run(300 * S)
    assert job.gang.phase == "running" and len(job.gang.gen.worlds) == 4
    assert job.gang.members.nodes["n000000"].dead
    assert job.gang.generation == 3  # once without it, and once with it again
    job.progress.advance(300 * S)
    spent = job.progress.spent
    assert spent["detect"] + spent["restart"] < 30 * S and spent["degraded"] > 0


def test_without_spares_the_gang_shrinks_until_the_repair():
    job = Job(dataclasses.replace(SMALL, policy="shrink", quality=1e-6).checked(), 0, check=True)
    job.agenda.after(100 * S, job.strike, Fault("host", "node", (0,), True, 3600 * S))
    job.agenda.run(2000 * S)
    assert len(job.gang.gen.worlds) == 3
    job.agenda.run(5000 * S)
    assert len(job.gang.gen.worlds) == 4


def test_a_job_that_stops_as_a_whole_goes_back_to_its_checkpoint():
    case = dataclasses.replace(SMALL, policy="restart", quality=1e-6, interval_s=600.0, stall_s=0.0, stop_s=100.0)
    job = Job(
        dataclasses.replace(case, spares=0.5, assume={"repair.sigma": 0.0, "restart.manual_share": 0.0}).checked(), 0
    )
    job.agenda.after(1000 * S, job.strike, Fault("GPU", "worker", (3,), False, 0))
    job.run(2000 * S)
    assert job.progress.spent["lost"] == pytest.approx(400 * S, rel=0.02)
    assert job.progress.spent["detect"] + job.progress.spent["restart"] == pytest.approx(100 * S, rel=0.01)


def test_work_done_while_corruption_is_unnoticed_is_lost_and_nobody_waits():
    """Checkpoints are 100 s apart; corruption after 1050 s is found 600 s later, so the run goes back to 1000 s."""
    assume = {"contained.corrupt_detect_s": 600.0, "checkpoint.memory_share": 0.0, "checkpoint.storage_gb_per_s": 1e9}
    case = dataclasses.replace(SMALL, quality=1e-6, interval_s=100.0, stall_s=0.0, assume=assume).checked()
    script = [(1050 * S, Fault("GPU", "corrupt", (3,), True, 3600 * S))]
    job = Job(case, check=True, script=script)
    job.run(3000 * S)
    spent = job.progress.spent
    assert spent["lost"] == pytest.approx(650 * S, abs=2 * job.progress.step_ns)
    assert spent["detect"] < S and job.interruptions == 1
    job = Job(dataclasses.replace(case, assume={**assume, "contained.corrupt_detect_s": 0.0}), script=script)
    job.run(3000 * S)
    assert job.progress.spent["lost"] < 2 * job.progress.step_ns


@pytest.mark.parametrize("policy", ["restart", "hot", "contained"])
def test_a_slow_spare_slows_nobody(policy):
    case = dataclasses.replace(SMALL, policy=policy, spares=0.5, quality=1e-6).checked()
    job = Job(case, script=[(100 * S, Fault("link", "limp", (8,), False, 1000 * S, 1.3))])
    job.run(2000 * S)
    assert job.progress.spent["straggler"] == 0


def test_each_slow_phase_of_a_node_ends_by_itself():
    """From 100 s to 300 s steps take 1.5 times, from 200 s to 1200 s 1.25 times as long."""
    case = dataclasses.replace(SMALL, policy="hot", quality=1e-6).checked()
    script = [(100 * S, Fault("link", "limp", (0,), False, 200 * S, 1.5)),
              (200 * S, Fault("link", "limp", (0,), False, 1000 * S, 1.25))]  # fmt: skip
    job = Job(case, script=script)
    job.run(2000 * S)
    assert job.progress.spent["straggler"] == pytest.approx((200 / 3 + 900 / 5) * S, rel=1e-6)


def test_work_that_was_spoiled_once_is_not_lost_again():
    """The run goes back to 1000 s of work both times: it loses 250 s, then the 300 s since, without a checkpoint in
    between."""
    assume = {"contained.corrupt_detect_s": 200.0, "checkpoint.memory_share": 0.0, "checkpoint.storage_gb_per_s": 1e9}
    case = dataclasses.replace(SMALL, quality=1e-6, interval_s=1000.0, stall_s=0.0, spares=0.5, assume=assume).checked()
    script = [(at * S, Fault("GPU", "corrupt", (node,), True, 10**14)) for at, node in ((1050, 3), (1350, 5))]
    job = Job(case, check=True, script=script)
    job.run(1999 * S)
    assert job.progress.spent["lost"] == pytest.approx(550 * S, abs=4 * job.progress.step_ns)


def test_a_rank_has_whole_micro_batches():
    """With one replica of 488 missing, a step of one micro-batch takes two passes."""
    assert Progress(S, 488, 1, S, active=487).speed == 0.5
    assert Progress(S, 488, 8, S, active=487).speed == pytest.approx(8 / 9)
    assert Progress(S, 488, 8, S, active=488).speed == 1.0


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("spars=2%", ["spars", "spares"]),
        ("spares=x", ["spares=x", "2%"]),
        ("policy=hope", ["hope", "contained"]),
        ("replica_gpus=100", ["100", "divisor"]),
        ("repair.nothing=3", ["repair.nothing", "repair.swap_h"]),
        ("quality=mars", ["mars", "rsc1"]),
        ("spares", ["spares", "name=value"]),
    ],
)
def test_a_mistake_is_named_with_its_remedy(text, names):
    with pytest.raises(UserError) as error:
        scenario.load("llama3-16k-contained").changed(text)
    for name in names:
        assert name in str(error.value)


def test_every_shipped_scenario_loads():
    for name, about in scenario.shipped().items():
        assert about and scenario.load(name).about == about


def test_what_forming_takes_is_an_assumption_that_can_be_changed():
    case = scenario.load("1m-gpus")
    assert times_of(case).form == pytest.approx(1.64 * S, rel=0.01)
    assert times_of(case).form - times_of(case.changed("form=0")).form == pytest.approx(S)
    assert times_of(scenario.load("sharp-16k")).form < times_of(scenario.load("llama3-16k-contained")).form
    assert any(name == "contained.form_base_s" and "assumed" in source for name, _, source in case.assumed.rows())


def test_a_rack_that_loses_power_takes_all_its_nodes():
    case = scenario.load("nvl72-32k")
    assert case.assumed("correlated.rack_nodes") * case.gpus_per_node == 72


def test_no_scenario_is_bent_towards_its_published_figure():
    """The wait for late ranks was once tuned here after the result was known."""
    assert scenario.load("100k-contained").late_s == -1


def test_the_command_prints_json(capsys):
    from phalanx.cli.simulate import simulate

    simulate("llama3-16k", seeds=1, what_if=["interval=60min"], gpus=0, hardware="", days=3.0, html=None, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert 0.5 < said["effective_training_time"] < 1 and said["interruptions"] > 5
    assert sum(said["waterfall"].values()) == pytest.approx(1.0)
    assert said["what_if"][0]["effective_training_time"] < said["effective_training_time"]


def test_the_page_needs_nothing_else(tmp_path):
    from phalanx.cli.simulate import simulate

    page = tmp_path / "out.html"
    simulate("llama3-16k", seeds=2, what_if=None, gpus=0, hardware="", days=2.0, html=page, as_json=False)
    text = page.read_text()
    assert "effective training time" in text and "http" not in text.replace("http-equiv", "")


def test_the_page_counts_all_failures_and_says_how_many_it_shows(monkeypatch):
    from phalanx.twin.report import page

    monkeypatch.setattr(gang_job, "KEPT_INCIDENTS", 5)
    found = many(dataclasses.replace(SMALL, quality=1000.0, days=0.5), 1)
    total = sum(found.outcomes[0].causes.values())
    assert total >= found.interruptions > 5 == len(found.outcomes[0].incidents)
    text = page([found])
    assert f"the first 5 of {total:,} failures" in text
    assert sum(map(int, re.findall(r"<tr><td>[^<]+</td><td>([0-9]+)</td></tr>", text))) == total


def test_the_bar_moves_within_a_seed_and_changes_nothing(monkeypatch, capsys):
    from phalanx.cli.simulate import _tell

    case, told = dataclasses.replace(SMALL, quality=500.0, days=1.0), []
    found = many(case, 2, lambda of, done, seeds: told.append((done, seeds)))
    assert len(told) > 100 and sorted(told) == told and told[-1] == (2, 2)
    assert found.outcomes[0].digest == one(case, 0).digest
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    _tell(case, 1.25, 2)
    assert "1/2 seeds, day 0.25 of 1" in capsys.readouterr().err


def test_the_gang_is_told_nothing_that_an_agent_would_not_say():
    job = Job(dataclasses.replace(SMALL, quality=2000.0, days=0.2).checked(), 1)
    heard, honest = set(), job.gang.apply
    job.gang.apply = lambda now, event: heard.add(type(event)) or honest(now, event)
    job.run()
    assert {say.WorkerDied, say.Parked, say.Built, say.Parted, say.Formed, say.NodeDead} <= heard


def test_a_job_that_never_ends_says_so(capsys, monkeypatch):
    from phalanx.cli import simulate

    case = dataclasses.replace(SMALL, policy="restart", stop_s=1e9, quality=1e4, days=1.0, site="world-average")
    monkeypatch.setattr(simulate, "_find", lambda *_: (case.checked(), 1000))
    options = {"what_if": None, "gpus": 0, "hardware": "", "days": None, "html": None, "seeds": 1}
    simulate.simulate("job.toml", as_json=True, **options)
    said = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert said["effective_training_time"] == 0
    assert said["days_to_end"]["mean"] is said["ends"]["mean"] is said["dollars_to_end"] is None
    simulate.simulate("job.toml", as_json=False, **options)
    text = capsys.readouterr().out
    assert text.count("never") == 7 and "inf" not in text


def test_a_job_file_says_when_it_ends_and_what_it_costs(capsys):
    from phalanx.cli.simulate import simulate

    options = {"seeds": 1, "what_if": None, "days": None, "html": None, "alternatives": False, "intervals": False}
    simulate(str(JOB), gpus=64, hardware="h100", as_json=True, **options)
    said = json.loads(capsys.readouterr().out)
    days = said["days_to_end"]
    assert 0 < days["p5"] <= days["mean"] <= days["p95"] and said["ends"]["p5"] <= said["ends"]["p95"]
    per_hour = said["dollars_to_end"] / (days["mean"] * 24 * said["gpus"])
    assert 0.5 < per_hour < 20  # dollars per GPU-hour
    assert said["spares"]["nodes"] >= said["spares"]["used_p95"] >= 0
