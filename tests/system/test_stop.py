"""A run that is stopped: exit code 130, nothing running afterwards, and a record that says how far it
came. A command that is killed outright leaves no process either."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.system.command import TINY, Command, sets

STARTING = {"data.max_mb": 16}  # slow enough to be met while it reads


def has_handler(command: Command) -> bool:
    status = Path(f"/proc/{command.process.pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def has_file(command: Command, pattern: str) -> bool:
    return any((command.directory / "runs").glob(f"*/{pattern}"))


def stopped(directory, *numbers, moment):
    command = Command(directory, *sets(TINY | ({} if moment == "steps" else STARTING)))
    reached = {
        "first moment": lambda: has_handler(command),
        "reading": lambda: any((command.directory / "runs").glob(".data/*")),
        "starting": lambda: has_file(command, "logs/node-0.log"),
        "steps": lambda: len(command.rows()) > 1,
    }
    command.wait_until(reached[moment])
    command.signal(*numbers)
    return command.end()


SCENARIOS = {
    "term, first moment": lambda d: stopped(d, signal.SIGTERM, moment="first moment"),
    "int, reading": lambda d: stopped(d, signal.SIGINT, moment="reading"),
    "term, starting": lambda d: stopped(d, signal.SIGTERM, moment="starting"),
    "hup, starting": lambda d: stopped(d, signal.SIGHUP, moment="starting"),
    "int": lambda d: stopped(d, signal.SIGINT, moment="steps"),
    "term": lambda d: stopped(d, signal.SIGTERM, moment="steps"),
    "int held down": lambda d: stopped(d, *[signal.SIGINT] * 20, moment="steps"),
    "kill": lambda d: stopped(d, signal.SIGKILL, moment="steps"),
}


@pytest.mark.parametrize("name", [name for name in SCENARIOS if name != "kill"])
def test_a_stop_is_orderly_at_any_moment(outcomes, name):
    ended = outcomes(name)
    ended.check_clean()
    assert ended.code == 130, ended.err
    if name == "term, first moment":
        assert ended.runs == []
        return
    steps = len(ended.rows)
    assert ended.err == f"stopped after {steps} of {TINY['train.steps']} steps\n"
    assert ended.summary["status"] == "stopped" and ended.summary["steps"] == steps
    assert steps > 1 if "," not in name else steps == 0


@pytest.mark.parametrize("name", ["kill"])
def test_nothing_outlives_a_command_that_is_killed(outcomes, name):
    ended = outcomes(name)
    assert ended.code == -signal.SIGKILL
    assert ended.left == {}
    assert ended.summary is None, "a run without a summary is one that crashed"
    assert ended.rows
