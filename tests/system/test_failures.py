"""A run that fails prints one message within seconds, with the rank, how it ended and its last log lines. The exit code
is 1, the record says the same, and everything else is gone."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.system.command import TINY, Command, sets

FAULTY = Path(__file__).with_name("faulty.py")

SAID = {
    "killed": ["rank 1 was killed by SIGKILL in ", " of step ", "out-of-memory killer", "remedy: "],
    "stopped": ["rank 1 hangs in ", "it is stopped, by SIGSTOP or by a debugger", "remedy: find out what stopped it"],
    "sleep": [
        "rank 1 hangs in forward of step 2: it stands still in sleep_for_ever",
        "while the others wait in a collective",
        "last log lines of rank 1:",
        "faulty.py",
        "remedy: see where it stands",
    ],
    "backward": [
        "rank 1 failed in backward of step 2 with ArithmeticError: the true cause",
        "last log lines of rank 1:",
        "  |     raise ArithmeticError",
    ],
    "memory": [
        "rank 0 failed in forward of step 1 with RuntimeError",
        "DefaultCPUAllocator",
        "1125899906842624 bytes",
        "  |     torch.empty(1 << 50",
        "remedy: lower train.micro_batch",
    ],
    "nan": [
        " failed in ",
        "with FloatingPointError: step 1: the loss is nan",
        "train.max_skips = 0",
        "lower optimizer.lr",
    ],
    "full disk": ["cannot ", "runs/quickstart-", "remedy: make room"],
}


def signalled(directory, number):
    """Send a signal to rank 1 from outside, once the run is training."""
    command = Command(directory, *sets(TINY | {"run.hang_timeout_s": 2.0}))
    command.wait_until(command.rows)
    command.signal(number, pid=next(e["pid"] for e in command.events("started") if e["rank"] == 1))
    return command.end()


def faulty(directory, more=(), **fault):
    options = {f"model.options.{name}": value for name, value in fault.items()}
    family = {"model.family": f"{FAULTY}:FAULTY", "run.hang_timeout_s": 2.0}
    command = Command(directory, *sets(TINY | family | options | dict(more)))
    command.wait_until(lambda: command.events("ready"))
    command.signal(0)  # time is measured from here: the fault is a step or two away
    return command.end()


SCENARIOS = {
    "killed": partial(signalled, number=signal.SIGKILL),
    "stopped": partial(signalled, number=signal.SIGSTOP),
    "sleep": partial(faulty, what="sleep", rank=1, step=2),
    "backward": partial(faulty, what="backward", rank=1, step=2),
    "memory": partial(faulty, what="memory", rank=0, step=1),
    "nan": partial(faulty, what="not a number", rank=0, step=1, more={"train.max_skips": 0}),
    # The limit is on memory files too, so there is no room for snapshots.
    "full disk": lambda directory: Command(
        directory,
        *sets(TINY | {"data.max_mb": 0.02, "checkpoint.every_steps": -1, "recovery.hold_s": 2.0}),
        limit_kb=64,
    ).end(),
}


SLOW = ("memory", "nan")  # errors of a worker, as "backward" is


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SCENARIOS]
)
def test_a_failed_run_names_the_rank_and_the_cause(outcomes, name):
    ended = outcomes(name)
    ended.check_clean()
    assert ended.code == 1, ended.err
    assert ended.err.startswith("error: ")
    for part in SAID[name]:
        assert part in ended.err
    assert ended.summary["status"] == "failed"
    assert ended.summary["reason"] in ended.err
    assert (
        0 <= ended.summary["steps"] - len(ended.rows) <= ended.summary.get("dropped", 0)
    )  # no room: lines are counted


@pytest.mark.parametrize("name", ["killed"])
def test_the_record_keeps_how_each_rank_ended(outcomes, name):
    events = [json.loads(line) for line in (outcomes(name).runs[0] / "events.jsonl").read_text().splitlines()]
    ends = {e["rank"]: e for e in events if e["type"] == "exit"}
    assert ends[1]["signal"] == "SIGKILL"
    assert all(not os.path.exists(f"/proc/{e['pid']}") for e in events if e["type"] == "started")
