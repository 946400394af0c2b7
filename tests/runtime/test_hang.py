"""Hangs are seen when they are there, not seen when they are not, and blamed on the right worker."""

from __future__ import annotations

import os
import signal
import time

import pytest

from phalanx.control.pace import Pace
from phalanx.control.policy import S
from phalanx.observe.progress import Phase, Reading
from phalanx.runtime import hang
from phalanx.runtime.bare import BareClient
from tests.runtime.conftest import WORKERS, Tree

WAITING = 'most recent call first):\n  File "/x/torch/distributed/distributed_c10d.py", line 3 in all_reduce\n'
BUSY = 'most recent call first):\n  File "/x/model.py", line 3 in forward\n'
# Code that a library of collectives has called does not wait for others.
CALLED_BACK = BUSY.replace("line 3 in forward", "line 9 in hook") + WAITING.partition("\n")[2]


def evidence(worker, stack=WAITING, state="S", step=5, micro=0, counter=9):
    return hang.Evidence(worker, Reading(counter, step, micro, Phase.forward, 0), state, stack)


@pytest.mark.parametrize(
    "cases, culprits, said",
    [
        ([evidence(0), evidence(1, stack="", state="T"), evidence(2, stack="")], [1], "is stopped"),
        ([evidence(0), evidence(1, stack="", state="D"), evidence(2, stack=BUSY)], [1], "state D"),
        (
            [evidence(0), evidence(1), evidence(2, stack=BUSY, step=6)],
            [2],
            "in forward (/x/model.py:3), while the others",
        ),
        ([evidence(0), evidence(1, stack=CALLED_BACK)], [1], "in hook (/x/model.py:9), while the others"),
        ([evidence(0), evidence(1, step=4), evidence(2)], [1], "is furthest behind"),
        ([evidence(0, micro=1), evidence(1, micro=1), evidence(2)], [2], "is furthest behind"),
        ([evidence(0), evidence(1)], [0, 1], "none is behind"),
        ([evidence(3, stack=BUSY)], [3], "stands still in forward"),
        ([evidence(0, stack=""), evidence(1, stack="", step=4)], [1], "is furthest behind"),
    ],
)
def test_judgement(cases, culprits, said):
    found, reason = hang.judge(cases)
    assert found == culprits
    assert said in reason


def test_waiting_is_read_from_the_source_where_the_library_has_no_python_frame(tmp_path):
    source = tmp_path / "reduce.py"
    source.write_text("import torch\n    work.wait()\n    x = x + 1\n")
    stack = 'most recent call first):\n  File "{}", line {} in reduce\n'
    assert evidence(0, stack=stack.format(source, 2)).waits
    assert not evidence(0, stack=stack.format(source, 3)).waits


def reading(phase, age_s, now_s=1000):
    return Reading(1, 0, 0, phase, int((now_s - age_s) * 1e9))


@pytest.mark.parametrize(
    "ages, since_s, stuck",
    [
        ({0: (Phase.forward, 11), 1: (Phase.reduce, 12)}, 0, {0, 1}),
        ({0: (Phase.forward, 9), 1: (Phase.reduce, 12)}, 0, set()),  # one still moves
        ({0: (Phase.forward, 1), 1: (Phase.reduce, 31)}, 0, {1}),  # far too late even so
        ({0: (Phase.idle, 99), 1: (Phase.done, 99), 2: (Phase.starting, 99)}, 0, set()),
        ({0: (Phase.idle, 99), 1: (Phase.backward, 11)}, 0, {1}),
        ({0: (Phase.forward, 99)}, 995, set()),  # the watch has just begun
        ({}, 0, set()),
    ],
)
def test_who_stands_still(ages, since_s, stuck):
    readings = {worker: reading(*facts) for worker, facts in ages.items()}
    assert hang.stuck(readings, int(1000e9), int(since_s * 1e9), int(10e9)) == stuck


def test_the_limit_follows_from_the_slowest_ranks():
    pace = Pace()
    assert pace.limit_ns == 300 * S
    assert pace.step(1, 1 * S) and pace.limit_ns == 20 * S
    assert pace.step(1, 3 * S) and pace.limit_ns == 60 * S, "20 times the slower of the two"
    assert not pace.step(2, int(3.1 * S)), "less than a tenth of a change"
    for step in range(3, 60):
        pace.step(step, S // 5)
    assert pace.limit_ns == 10 * S
    large = Pace(beat_ns=S // 2)
    assert large.step(1, 31 * S) and large.limit_ns == 61 * S, "a large fleet cannot wait for 20 long steps"
    fixed = Pace(fixed_ns=4 * S)
    assert not fixed.step(1, 100 * S) and fixed.limit_ns == 4 * S


def test_a_stopped_worker_is_found_and_reported_once(tree):
    for worker in range(3):
        tree.spawn(worker, "stand", how="wait")
        tree.until("message", worker)
    os.kill(tree.pids[1], signal.SIGSTOP)
    tree.client.watch(0.2)
    event = tree.until("hang")
    assert event["workers"] == [1] and event["final"]
    assert "is stopped" in event["reason"]
    assert event["progress"] == {"phase": "forward", "step": 3, "micro": 0, "counter": 1}
    assert tree.client.events(0.8) is None, "the same hang was reported again"
    tree.client.kill(1)  # even a stopped process ends
    assert tree.until("exit", 1)["signal"] == "SIGKILL"


def test_one_that_was_stopped_between_two_steps_is_blamed_for_those_that_wait_for_it(tree):
    for worker, phase in enumerate(("forward", "idle")):
        tree.spawn(worker, "stand", how="wait", phase=phase)
        tree.until("message", worker)
    os.kill(tree.pids[1], signal.SIGSTOP)
    tree.client.watch(0.2)
    event = tree.until("hang")
    assert event["workers"] == [1] and event["final"]
    assert "is stopped" in event["reason"]
    tree.client.kill(1)


def test_the_busy_one_is_blamed_with_its_stack(tree):
    for worker, how in enumerate(("wait", "busy", "wait")):
        tree.spawn(worker, "stand", how=how)
        tree.until("message", worker)
    tree.client.watch(0.2)
    event = tree.until("hang")
    assert event["workers"] == [1]
    assert "busy_doing_something_else" in event["reason"]
    tree.client.kill(1)
    tail = tree.until("exit", 1)["tail"]
    assert "in busy_doing_something_else" in tail and "in stand" in tail


def test_those_that_wait_are_told_at_once_and_blamed_only_much_later(tree):
    """The worker that they wait for may be on another node, whose watch finds it."""
    for worker in range(2):
        tree.spawn(worker, "stand", how="wait")
        tree.until("message", worker)
    start = time.monotonic()
    tree.client.watch(0.3)
    first, last = tree.until("hang"), tree.until("hang")
    assert not first["final"] and last["final"] and first["workers"] == last["workers"] == [0, 1]
    assert time.monotonic() - start > 0.5


def test_no_false_alarm_and_a_lone_straggler_comes_later(tree):
    tree.spawn(0, "stand", how="move")
    tree.spawn(1, "stand", how="wait", phase="idle")
    tree.until("message")
    tree.until("message")
    tree.client.watch(0.5)
    assert tree.client.events(1.5) is None
    tree.spawn(2, "stand", how="busy")
    start = time.monotonic()
    event = tree.until("hang")
    assert event["workers"] == [2]
    assert time.monotonic() - start > 3 * 0.5


def test_watching_can_be_switched_off(tree):
    tree.spawn(0, "stand", how="busy")
    tree.until("message")
    tree.client.watch(0.2)
    tree.client.watch(0)
    assert tree.client.events(0.8) is None
    tree.client.watch(5)
    assert tree.client.events(0.5) is None
    tree.client.watch(0.6)
    start = time.monotonic()
    assert tree.until("hang")["worker"] == 0
    assert time.monotonic() - start > 0.9, "blamed for the time before the watch"


def test_torch_survives_the_fork_and_a_hang_in_a_collective_is_judged(tmp_path):
    """The zygote has imported torch. Workers compute with threads and reduce over gloo; then one stays away."""
    with BareClient(["torch", "torch.distributed", WORKERS]) as client:
        tree = Tree(client, tmp_path)
        for rank in range(2):
            tree.spawn(rank, "torch_rank", rank=rank, file=str(tmp_path / "store"))
        for _ in range(2):
            body = tree.until("message", timeout=60)["body"]
            assert body == {"type": "reduced", "total": [3.0] * 4, "x": 512.0}
        for rank in range(2):
            client.send(rank, {})
        client.watch(0.5)
        event = tree.until("hang")
        assert event["workers"] == [1], event
        assert "while the others wait in a collective" in event["reason"]
