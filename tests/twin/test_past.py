"""If one of these tests fails, users get wrong answers about the cost of another policy for their run."""

import json

import pytest

from phalanx.cli.history import past_of
from phalanx.core.errors import UserError
from phalanx.observe.record import RunRecord
from phalanx.twin.past import Durations, Mishap, Past, replay

TOOK = Durations(decide=0.01, form=0.2, launch=0.5, build=1.0, live=0.1, start=20.0, interval=10.0)
PAST = Past("a run", replicas=4, replica_size=1, ranks_per_node=1, spares=1, steps=400, step_s=0.25, micro_batches=4,
            length_s=110.0, took=TOOK)  # fmt: skip


def with_faults(*mishaps):
    return Past(**{**PAST.__dict__, "mishaps": mishaps})


def test_without_failures_every_policy_takes_as_long_as_the_steps():
    for policy in ("contained", "shrink", "hot", "restart"):
        assert replay(PAST, policy).seconds == pytest.approx(100.0, abs=0.2), policy


def test_a_restart_costs_its_start_and_the_work_since_the_checkpoint():
    past = with_faults(Mishap(58.0, "worker", 2))
    found = replay(past, "restart")
    # 8 s since the checkpoint at 50 s, and the current step.
    assert found.seconds == pytest.approx(100 + 20 + 8, abs=0.5)
    assert found.waterfall["restart"] * found.seconds == pytest.approx(20, abs=0.2)


def test_a_contained_failure_costs_little_and_a_spare_takes_the_place():
    past = with_faults(Mishap(30.0, "worker", 2), Mishap(60.0, "node", 1, back_s=30.0))
    found = replay(past, "contained", check=True)
    assert 100 < found.seconds < 104
    assert [(form.replicas, form.rung) for form in found.forms] == [
        ((0, 1, 3), 1), ((0, 1, 2, 3), -1), ((0, 2, 3), 2), ((0, 1, 2, 3), -1)
    ]  # fmt: skip
    alone = replay(past, "shrink", check=True)
    assert alone.forms[2].rung == 3 and alone.waterfall["degraded"] > 2 * found.waterfall["degraded"]


def test_a_node_has_several_replicas():
    past = Past(**{**PAST.__dict__, "ranks_per_node": 2, "mishaps": (Mishap(30.0, "node", 0, back_s=5.0),)})
    found = replay(past, "contained", check=True)
    assert [form.replicas for form in found.forms] == [(2, 3), (0, 1, 2, 3)]
    past = Past(**{**past.__dict__, "mishaps": (Mishap(30.0, "worker", 1),)})
    assert [form.replicas for form in replay(past, "contained", check=True).forms] == [(0, 2, 3), (0, 1, 2, 3)]


def test_the_control_plane_is_checked_in_a_replay(planted_bug):
    with pytest.raises(AssertionError):
        replay(with_faults(Mishap(30.0, "worker", 2)), "contained", check=True)


def record(root, events, steps=40, step_s=0.5):
    job = {"layout": {"replica": 2, "shard": 1, "ranks_per_node": 1}, "train": {"global_batch": 8, "micro_batch": 2}}
    run = RunRecord.create(root, "job", {}, {"job": job})
    for rank in (0, 1):
        run._append("events", {"time": 90.0, "type": "node", "node": f"node-{rank}", "what": "joined"})
        run._append(
            "events", {"time": 95.0, "type": "started", "rank": rank, "worker": rank + 1, "node": f"node-{rank}"}
        )
    first = {"generation": 1, "replicas": [0, 1], "rung": -1, "reason": "all are there", "step": 0}
    run._append("events", {"time": 99.0, "type": "control form", **first})
    run._append("events", {"time": 100.0, "type": "ready", "start_s": 10.0})
    run._append("events", {"time": 100.0, "type": "control started", "generation": 1})
    for event in events:
        run._append("events", event)
    for step in range(steps):
        late = 2.0 if step >= 20 else 0.0
        row = {"time": 100 + step_s * (step + 1) + late, "step": step, "time_s": step_s, "generation": 1}
        run._append("metrics", row)
    run.close()
    return run.path


KILLED = [
    {"time": 110.1, "type": "exit", "rank": 1, "worker": 2, "service": "", "signal": "SIGKILL", "node": "node-1"},
    {"time": 110.3, "type": "control form", "generation": 2, "replicas": [0], "rung": 1, "reason": "", "step": 20},
    {"time": 110.4, "type": "control started", "generation": 2},
    {"time": 110.9, "type": "started", "rank": 1, "worker": 3, "service": "", "node": "node-1"},
    {"time": 111.0, "type": "first commit", "generation": 2, "step": 21},
    {
        "time": 111.5,
        "type": "control form",
        "generation": 3,
        "replicas": [0, 1],
        "reason": "replicas [1] join",
        "step": 21,
    },
    {"time": 111.9, "type": "control started", "generation": 3},
    {"time": 112.0, "type": "entered", "generation": 3, "source": "live", "restore_s": 0.07},
]


def test_a_record_says_what_failed_and_how_long_things_took(tmp_path):
    past = past_of(record(tmp_path, KILLED))
    assert past.steps == 40 and past.step_s == 0.5 and past.micro_batches == 2
    assert past.length_s == pytest.approx(22.0) and past.effective == pytest.approx(20 / 22)
    (mishap,) = past.mishaps
    assert (mishap.kind, mishap.rank) == ("worker", 1)
    assert mishap.at_s == pytest.approx(10.1) and mishap.launch_s == pytest.approx(0.8)
    assert past.took.decide == pytest.approx(0.2) and past.took.form == pytest.approx(0.25)
    assert past.took.build == pytest.approx(0.6) and past.took.live == 0.07 and past.took.start == 10.0


def test_a_hang_is_one_failure(tmp_path):
    hang = {"time": 110.0, "type": "hang", "rank": 1, "worker": 2, "reason": "is stopped", "final": True}
    (mishap,) = past_of(record(tmp_path, [hang, *KILLED])).mishaps
    assert mishap.kind == "hang" and mishap.detect_s == pytest.approx(0.0, abs=0.51)


def test_the_command_plays_a_run_again(tmp_path, capsys):
    from phalanx.cli.simulate import simulate

    def call(**more):
        options = {"seeds": 1, "what_if": None, "gpus": 0, "hardware": "", "days": None, "html": None}
        simulate(str(folder), **{**options, "as_json": True, **more})

    folder = record(tmp_path, KILLED)
    call()
    said = json.loads(capsys.readouterr().out)
    assert said["interruptions"] == 1 and sum(said["waterfall"].values()) == pytest.approx(1.0)
    seconds = {each["policy"]: each["seconds"] for each in said["policies"]}
    assert 20 < seconds["contained"] < seconds["restart"]
    call(as_json=False)
    assert "rank 1 died" in capsys.readouterr().out
    with pytest.raises(UserError, match="every policy is shown"):
        call(what_if=["spares=2%"])
    with pytest.raises(UserError, match="has trained"):
        folder = record(tmp_path, [], steps=1)
        call()
