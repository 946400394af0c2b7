"""Story: an operator reads one line of steps, what broke and where the GPU-seconds went, whatever the record holds."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.observe.compare import compare
from phalanx.observe.goodput import NS, STATES, Painted, Running, segments, totals
from phalanx.observe.story import Story, find_runs
from phalanx.observe.words import describe
from tests.observe.records import Written

TIME = st.floats(-5, 60, allow_nan=False)
ROW = st.fixed_dictionaries(
    {
        "step": st.integers(0, 9),
        "time": TIME,
        "time_s": st.floats(0, 20) | st.none(),
        "data_wait_s": st.floats(0, 5) | st.none(),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    begin=TIME,
    end=TIME,
    ranks=st.integers(1, 9),
    rows=st.lists(ROW, max_size=8),
    abandoned=st.frozensets(st.integers(0, 7)),
    ready=TIME,
    windows=st.lists(st.tuples(TIME, TIME), max_size=4),
    present=st.lists(st.tuples(TIME, st.integers(-1, 12)), max_size=4),
    stalls=st.dictionaries(st.integers(0, 9), st.floats(0, 5)),
    over=st.booleans(),
)
def test_every_gpu_second_is_in_exactly_one_state(**run):
    """In any order of events and with jumping clocks, segments are contiguous and the states add up."""
    pieces = segments(Painted(**run))
    begin = round(max(0.0, run["begin"]) * NS)
    end = max(begin, round(max(0.0, run["end"]) * NS))
    at = begin
    for piece in pieces:
        assert piece.begin_ns == at < piece.end_ns and 0 <= piece.present <= run["ranks"] and piece.state in STATES
        at = piece.end_ns
    assert at == end
    sums = totals(pieces, run["ranks"])
    assert sum(sums.values()) == (end - begin) * run["ranks"] and min(sums.values()) >= 0


def shares(story):
    return {row["state"]: row["gpu_s"] for row in story.goodput()["states"]}


def test_a_quiet_run_is_productive_after_its_start(tmp_path):
    story = Story(Written(tmp_path, rates={"dollars_per_gpu_hour": 3600.0}).begin().steps(0, 40).end())
    spent = shares(story)
    assert spent["start"] == pytest.approx(2 * 1.9, abs=1e-4)
    assert spent["data"] == pytest.approx(2 * 40 * 0.01, abs=1e-4)
    assert spent["productive"] == pytest.approx(2 * 40 * 0.09, abs=1e-4) and spent["recovery"] == spent["out"] == 0
    good = story.goodput()
    assert good["dollars"] == pytest.approx(good["gpu_s"]) and good["gpu_s"] == pytest.approx(2 * good["wall_s"])
    assert story.incidents() == [] and story.done == 40 and not story.branches
    assert describe(story)["headline"].startswith("Done: 40 steps")


def broken(root):
    run = Written(root).begin().steps(0, 10)
    run.event("exit", 0.3, rank=1, signal="SIGKILL", code=None, service="", node="node-0")
    run.generation = 2
    run.form(10, replicas=1, rung=1, reason="the worker of rank 1 was killed by SIGKILL")
    run.steps(10, 15)
    run.generation = 3
    run.event("entered", generation=3, source="live", restore_s=0.02, rank=1)
    run.form(15, rung=-1, reason="replicas [1] join")
    return run.steps(15, 40)


def test_a_killed_worker_is_one_incident_with_its_phases_and_its_price(tmp_path):
    story = Story(broken(tmp_path).end(), price=3600.0)
    (one,) = story.incidents()
    assert (one.kind, one.subject, one.rung, one.lost_steps, one.open) == ("worker", "Rank 1 on node-0", 1, 0, False)
    assert one.phases() == pytest.approx(
        {"detect": 0.3, "decide": 0.05, "re-form": 0.05, "first step": 0.1, "heal": 0.55, "join": 0.15}, abs=1e-3
    )
    # The gang stood still from the last step to the next one, then one of two ranks was out until the join.
    assert one.lost_gpu_s == pytest.approx(shares(story)["recovery"] + shares(story)["out"], rel=0.05)
    assert one.dollars == pytest.approx(one.lost_gpu_s)
    text = one.verdict()
    assert "was killed by SIGKILL" in text and "live state of another replica" in text
    assert "Training went on 200 ms later, at full strength after 900 ms: for 50 ms all stood still" in text
    assert "No finished step was lost" in text
    assert [e["type"] for e in one.evidence] == ["exit", "control form", "control form"]


def test_abandoned_steps_are_a_branch_and_each_step_has_one_row(tmp_path):
    run = Written(tmp_path).begin().steps(0, 20)
    run.event("node", 0.2, node="node-0", what="died: it was killed")
    run.generation = 2
    run.form(12, rung=4, branch=True, last=20)
    run.steps(12, 40, loss=1.5)
    story = Story(run.end())
    assert [row["step"] for row in story.rows] == list(range(40)) and story.rows[12]["loss"] == pytest.approx(1.38)
    (branch,) = story.branches
    assert branch.step == 12 and branch.rows[0]["loss"] == pytest.approx(1.88)
    (one,) = story.incidents()
    assert one.lost_steps == 8 and "8 finished steps had to be done again" in one.verdict()
    assert shares(story)["rollback"] == pytest.approx(2 * 8 * 0.1)
    assert one.lost_gpu_s == pytest.approx(shares(story)["rollback"] + shares(story)["recovery"])


def test_steps_that_are_abandoned_twice_cost_each_incident_its_own(tmp_path):
    run = Written(tmp_path).begin().steps(0, 20)
    for end in (16, 40):
        run.event("node", 0.2, node="node-0", what="died: it was killed")
        run.generation += 1
        run.form(12, rung=4, branch=True, last=20)
        run.steps(12, end)
    story = Story(run.end())
    costs = [one.lost_gpu_s for one in story.incidents()]
    assert sum(costs) == pytest.approx(shares(story)["rollback"] + shares(story)["recovery"])
    assert costs[0] - costs[1] == pytest.approx(2 * (8 - 4) * 0.1, rel=1e-4)


def test_a_resumed_run_is_one_story(tmp_path):
    first = Written(tmp_path).begin().steps(0, 20)
    first.record.finish({"status": "stopped", "reason": "stopped"})
    second = Written(tmp_path)
    second.event("resume", url=str(first.path / "checkpoints"), name="step-000000016-x", step=16)
    story = Story(second.begin().steps(16, 40).end())
    assert [part.path for part in story.parts] == [first.path, second.path]
    assert [row["step"] for row in story.rows] == list(range(40)) and story.branches[0].step == 16
    assert len(find_runs(tmp_path)) == 2 and describe(story)["parts"] == [first.path.name, second.path.name]


def test_a_run_that_resumes_itself_or_a_stranger_ends_the_search(tmp_path):
    run = Written(tmp_path)
    run.event("resume", url=str(run.path / "checkpoints"), name="step-1", step=1)
    assert len(Story(run.begin().steps(0, 3).end()).parts) == 1


def test_a_live_run_is_read_as_it_grows(tmp_path):
    run = Written(tmp_path).begin().steps(0, 5)
    story = Story(run.path)
    assert story.done == 5 and not story.update()
    with open(run.path / "metrics.jsonl", "ab") as f:
        f.write(b'{"step": 5, "lo')
        f.flush()
        assert not story.update()
        f.write(b'ss": 1.0, "time": 1800000003.0}\nnot json\n[1]\n{"step": "5"}\n')
    assert story.update() and story.done == 6 and story.part.damaged == 3


@pytest.mark.parametrize("alive", [True, False])
def test_a_run_whose_process_is_gone_is_lost(tmp_path, alive):
    from phalanx.observe.provenance import provenance

    process = provenance()["process"]
    process["began"] = process["began"] if alive else "0"
    story = Story(Written(tmp_path, process=process).begin().steps(0, 5).path)
    assert story.part.state == ("running" if alive else "lost")
    assert describe(story)["headline"].startswith("Training: step 5 of 40" if alive else "Lost: no sign since")


def test_services_controllers_and_notices_stop_nobody(tmp_path):
    run = Written(tmp_path).begin().steps(0, 5)
    run.event("node", node="controller", what="died (-9)")
    run.event("node", 0.2, node="controller", what="started", pid=3)
    run.event("exit", rank=-1, service="keeper", code=1, signal="", node="node-0")
    for tries in (1, 2):
        run.event("checkpoint_failed", step=5, checkpoint="step-5", reason="disk full", tries=tries)
    story = Story(run.steps(5, 40).end())
    assert [(one.kind, one.stops, one.open) for one in story.incidents()] == [
        ("controller", False, False),
        ("service", False, True),
        ("checkpoint", False, False),
    ]
    assert story.goodput()["failures"] == 0 and len(story.incidents()[2].evidence) == 2
    assert "It was back after 200 ms; training did not wait" in story.incidents()[0].verdict()


def test_the_goodput_of_a_live_run_is_that_of_its_record(tmp_path):
    """Except for checkpoints. Repeated steps count once, and ranks that are out do not count."""
    run = broken(tmp_path)
    run.steps(30, 40)
    part = Story(run.end()).part
    live, shares = Running(part.began, 2), []
    for row in part.rows:
        present = 1 if 10 <= row["step"] < 15 else 2
        shares.append(live.add(row["step"], row["time_s"], row["data_wait_s"], present, row["time"]))
    assert shares[-1] == pytest.approx(Story(part.path).goodput()["ratio"], rel=1e-3)
    assert shares[39] > shares[40], "ten steps were abandoned"


def test_two_runs_of_different_code_are_not_called_equal(tmp_path):
    def run(name, **code):
        code = {"commit": "c0ffee", "diff": "", "untracked": [], **code}
        return Story(Written(tmp_path, name, code=code).begin().steps(0, 2).end())

    def code_of(one, other):
        return {row["field"]: row["values"] for row in compare(one, other)["meta"]}

    plain, one, same = run("plain"), run("one", diff="+ a = 1"), run("same", diff="+ a = 1")
    assert not code_of(one, same)
    assert [*code_of(plain, one)] == ["code.changed"] and code_of(plain, one)["code.changed"][0] is False
    assert [*code_of(one, run("two", diff="+ a = 2"))] == ["code.changed"]
    assert code_of(plain, run("three", untracked=["my.py"])) == {"code.untracked": [[], ["my.py"]]}


def test_a_loss_spike_names_its_samples(tmp_path):
    run = Written(tmp_path, steps=100).begin().steps(0, 80)
    run.steps(80, 81, loss=9.0)
    story = Story(run.steps(81, 100).end())
    (spike,) = story.spikes()
    assert spike["step"] == 80 and spike["samples"] == [320, 324] and spike["time"] == story.rows[80]["time"]


@pytest.mark.parametrize("first", [0, 20, 90])
def test_a_run_whose_loss_is_no_number_says_so(tmp_path, first):
    from phalanx.observe.provenance import provenance

    run = Written(tmp_path, steps=200, process=provenance()["process"]).begin().steps(0, first)
    story = Story(run.steps(first, 120, loss=math.nan).path)
    (spike,) = story.spikes()
    assert spike["step"] == first and spike["loss"] is None and spike["samples"][1] == 4 * (first + 1)
    assert (spike["usual"] is not None) == (first == 90)
    assert f"step 120 of 200, the loss is not finite since step {first}" in describe(story)["headline"]
    run.steps(120, 160)
    run.steps(160, 161, loss=9.0)
    story.update()
    assert [one["step"] for one in story.spikes()] == [first, 160], "judged by the finite ones before it"
    assert "not finite" not in describe(story)["headline"]


def test_a_step_that_was_skipped_is_an_incident_that_stops_nobody(tmp_path):
    run = Written(tmp_path).begin().steps(0, 5)
    run.event("step skipped", step=5, reason="the loss is nan", places=[[20, 22]])
    (one,) = Story(run.steps(5, 40).end()).incidents()
    assert one.kind == "numbers" and not one.stops and "Step 5 was skipped: the loss is nan" in one.verdict()


def test_two_runs_part_at_the_first_step_that_differs(tmp_path):
    one, same = Story(broken(tmp_path).end()), Story(Written(tmp_path, "job").begin().steps(0, 40).end())
    found = compare(one, same)
    assert found["part"] is None and found["same"] == 40 and "equal to the bit" in found["verdict"]
    run = Written(tmp_path, "other", libraries={"torch": "9"}).begin().steps(0, 25)
    found = compare(one, Story(run.steps(25, 30, loss=3.0).end()))
    assert found["part"]["step"] == found["same"] == 25 and found["part"]["field"] == "loss_bits"
    assert "They part at step 25: the same samples gave another loss" in found["verdict"]
    assert {"field": "name", "values": ["job", "other"]} in found["job"]
    assert any(row["field"].startswith("libraries") for row in found["meta"])


def test_a_record_without_anything_is_a_story(tmp_path):
    empty = tmp_path / "job-20260101T000000Z-0000"
    empty.mkdir()
    for text in ("{}", '{"started": "x", "rates": 3, "process": 1}', "[]", "\0"):
        (empty / "meta.json").write_text(text)
        (empty / "job.json").write_text(json.dumps({"job": {"layout": {"replica": "two", "x": 1}, "train": 5}}))
        about = describe(Story(empty))
        assert about["step"] == 0 and about["state"] in ("lost", "running") and about["headline"]
