"""A run can be stopped at any moment. The exit code is 130, nothing is left running, the record shows how far it came,
and every step that was trained is saved. A second signal does not wait for that. A command that is killed outright
leaves no process either."""

from __future__ import annotations

import re
import shlex
import signal
from pathlib import Path

import pytest

from tests.checkpoint.faults import PATIENCE_S, Again, resumed_from, slow_disk
from tests.system.command import TINY, Command, sets

STARTING = {"data.max_mb": 16}  # slow enough to be stopped while it reads
LAST = {"train.steps": 30, "checkpoint.every_steps": 1000}
NOTHING = ("term, first moment", "int, reading", "term, starting", "hup, starting")


def has_handler(command: Command) -> bool:
    status = Path(f"/proc/{command.process.pid}/status").read_text()
    caught = int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def has_file(command: Command, pattern: str) -> bool:
    return any((command.directory / "runs").glob(f"*/{pattern}"))


def stopped(directory, *numbers, moment, **more):
    values = TINY | ({} if moment in ("steps", "saving", "last save") else STARTING) | more
    slow = {"env": slow_disk(directory)} if moment in ("saving", "last save") else {}
    command = Command(directory, *sets(values), **slow)
    reached = {
        "first moment": lambda: has_handler(command),
        "reading": lambda: any((command.directory / "runs").glob(".data/*")),
        "starting": lambda: has_file(command, "logs/node-0.log"),
        "steps": lambda: len(command.rows()) > 1,
        "saving": lambda: begun(command) and not made(command),
        "last save": lambda: len(command.rows()) == 30 and begun(command) and not made(command),
        "never": lambda: command.process.poll() is not None,
    }
    command.wait_until(reached[moment], PATIENCE_S)
    if moment != "never":
        if len(numbers) > 1:  # as left by a keeper that is killed while it writes
            (next((command.directory / "runs").glob("*/checkpoints")) / ".catalog.json.1.2.tmp").write_text("{")
        command.signal(*numbers)
    ended = command.end(PATIENCE_S)
    ended.saved = made(command)
    return ended


def begun(command: Command) -> list[int]:
    return [int(p.name.split("-")[1]) for p in command.directory.glob("runs/*/checkpoints/step-*")]


def made(command: Command) -> list[int]:
    """Return the steps that have a checkpoint."""
    return sorted(
        int(p.parent.name.split("-")[1]) for p in command.directory.glob("runs/*/checkpoints/*/manifest.json")
    )


SCENARIOS = {
    "term, first moment": lambda d: stopped(d, signal.SIGTERM, moment="first moment"),
    "int, reading": lambda d: stopped(d, signal.SIGINT, moment="reading"),
    "term, starting": lambda d: stopped(d, signal.SIGTERM, moment="starting"),
    "hup, starting": lambda d: stopped(d, signal.SIGHUP, moment="starting"),
    "int": lambda d: stopped(d, signal.SIGINT, moment="steps"),
    "term": lambda d: stopped(d, signal.SIGTERM, moment="steps"),
    "int, saving": lambda d: stopped(d, signal.SIGINT, moment="saving"),
    "int, last save": lambda d: stopped(d, signal.SIGINT, moment="last save", **LAST),
    "limit": lambda d: stopped(d, moment="never", **{"run.time_limit_s": 10}),
    "int held down": lambda d: stopped(d, *[signal.SIGINT] * 20, moment="steps"),
    "kill": lambda d: stopped(d, signal.SIGKILL, moment="steps"),
}


# The same moment with another signal, or another save: they differ little from those that run by default.
SLOW = ("term, starting", "hup, starting", "term", "int, saving")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in SCENARIOS if n != "kill"]
)
def test_a_stop_is_orderly_at_any_moment(outcomes, name):
    ended = outcomes(name)
    ended.check_clean()
    assert ended.code == 130, ended.err
    if name == "term, first moment":
        assert ended.runs == []
        return
    assert ended.err.endswith("--resume auto\n") and "\n  continue with: phalanx train --set " in ended.err
    steps, of = len(ended.rows), 30 if name == "int, last save" else TINY["train.steps"]
    why = "stopped by run.time_limit_s" if name == "limit" else "stopped"
    assert ended.err.startswith(f"{why} after step {steps} of {of}; "), ended.err
    assert ended.summary["status"] == "stopped" and ended.summary["steps"] == steps
    assert name == "limit" or bool(steps) == (name not in NOTHING)  # a slow machine may not have got to a step by then
    if name == "int held down":  # nothing more was waited for
        return
    assert ended.saved[-1:] == [steps] * bool(steps) and ended.summary["durable"] == steps
    assert (f"saved up to step {steps}: " if steps else "nothing of it is saved") in ended.err


@pytest.mark.parametrize("name", ["int", "int, last save"])
def test_the_printed_command_continues_with_what_is_saved(outcomes, name):
    ended = outcomes(name)
    program, *args = shlex.split(ended.err.rpartition("continue with: ")[2])
    assert program == "phalanx" and args[0] == "train"
    command = Again(ended.runs[0].parent.parent, *args[1:])
    if name == "int":
        command.wait_until(command.rows, PATIENCE_S)
        command.signal(signal.SIGINT)
    again = command.end(PATIENCE_S)
    again.check_clean()
    steps = ended.summary["durable"]
    if name == "int":
        assert again.code == 130 and resumed_from(command) == again.rows[0]["step"] == steps > 0, again.err
        assert again.summary["durable"] == steps + len(again.rows)
    else:  # nothing is left to train
        assert again.code == 0 and steps == 30 and again.rows == [], again.err
        assert "nothing is left to do" in again.out + again.err


@pytest.mark.parametrize("name", ["int"])
def test_a_run_that_is_stopped_while_it_starts_again_has_what_it_continues(outcomes, name):
    """The run has a folder of its own, in which nothing is saved yet."""
    command = Again(outcomes(name).runs[0].parent.parent, *sets(TINY), "--resume", "auto")
    command.wait_until(lambda: command.runs and (command.runs[0] / "logs" / "node-0.log").exists(), PATIENCE_S)
    command.signal(signal.SIGINT)
    again = command.end(PATIENCE_S)
    again.check_clean()
    steps = resumed_from(command)
    assert again.code == 130 and again.rows == [] and steps > 0
    assert again.err.startswith(f"stopped after step {steps} of {TINY['train.steps']}; saved up to step {steps}: ")
    assert again.err.endswith("--resume auto\n") and again.summary["durable"] == steps


def test_a_run_that_waits_for_a_node_saves_what_is_in_memory(tmp_path):
    """Its only node is given up at the first death of a rank; what both ranks had in memory is still there."""
    memory = {"checkpoint.every_steps": 100_000, "checkpoint.memory_every_steps": 1}
    alone = {"recovery.on": "true", "recovery.deaths_per_node": 1, "recovery.grace_s": 4}
    command = Command(tmp_path, *sets(TINY | alone | memory))
    command.wait_until(lambda: len(command.rows()) > 5, PATIENCE_S)
    command.signal(signal.SIGKILL, pid=next(e["pid"] for e in command.events("started") if e["rank"] == 1))
    command.wait_until(lambda: any(e["rung"] == 6 for e in command.events("control note")), PATIENCE_S)
    command.signal(signal.SIGINT)
    ended = command.end(PATIENCE_S)
    ended.check_clean()
    durable, steps = ended.summary["durable"], ended.summary["steps"]
    assert ended.code == 130 and durable >= max(5, steps - 2), ended.err  # the last may not have been taken by both
    assert f"saved up to step {durable}: " in ended.err and made(command) == [durable]
    assert ended.err.endswith("--resume auto\n")


@pytest.mark.parametrize("name", ["kill"])
def test_nothing_outlives_a_command_that_is_killed(outcomes, name):
    ended = outcomes(name)
    assert ended.code == -signal.SIGKILL
    assert ended.left == {}
    assert ended.summary is None, "a run without a summary is one that crashed"
    assert ended.rows
