"""A run whose processes are killed without warning continues from its last checkpoint, and ends with exactly the
weights of an undisturbed run."""

from __future__ import annotations

import json
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.checkpoint.faults import PATIENCE_S, Again, committed, resumed_from, slow_disk
from tests.system.command import TINY, Command, sets

STEPS = 60
JOB = TINY | {
    "layout.shard": 2,
    "layout.tp": 1,
    "train.micro_batch": 1,
    "train.steps": STEPS,
    "optimizer.lr": 0.01,  # so that one step more or less shows in the weights
    "checkpoint.every_steps": 6,
    "checkpoint.memory_every_steps": 2,
}
VICTIMS = ("rank 0", "rank 1", "keeper-0", "launcher")


def killed(directory: Path, whom: str, reached, values=(), env=None, delay_s=0.0) -> dict:
    """Kill somebody in an attempt that has `reached` a point. Return what came of it."""
    before = newest(directory)
    command = Again(directory, "--resume", "auto", *sets(JOB | dict(values)), env=env)
    command.wait_until(lambda: reached(command), PATIENCE_S)
    time.sleep(delay_s)
    at_death = newest(directory)
    command.signal(signal.SIGKILL, pid=command.pid_of(whom))
    ended = command.end(PATIENCE_S)
    point = {"who": whom, "steps": len(ended.rows), "resumed": resumed_from(command), "before": before}
    assert ended.left == {} and ended.shared == [], point
    assert newest(directory) >= at_death, "what was committed stays"
    if whom == "launcher":
        assert ended.code == -9
    else:
        ended.check_clean()
        name = "the keeper of node-0" if whom.startswith("keeper") else whom
        assert ended.code == 1 and f"{name} was killed by SIGKILL" in ended.err, (point, ended.err)
    return point | {"left": newest(directory), "out": ended.out}


def newest(directory: Path) -> int:
    return max(committed(directory), default=0)


def at_random(directory: Path, rng: random.Random) -> dict:
    """Kill somebody at some moment: while it starts, or some steps later."""
    whom, after = rng.choice(VICTIMS), rng.randrange(0, 12)
    after = min(after, max(0, STEPS - newest(directory) - 15))  # it takes some more steps before the signal arrives
    return killed(
        directory,
        whom,
        lambda c: len(c.rows()) >= after and c.pid_of(whom) and (after or c.events("started")),
        delay_s=rng.random() * 0.05,
    )


def chain(directory: Path, seed: int, kills: int, first=None) -> dict:
    """Run, kill somebody, continue, and so on; then run to the end."""
    rng = random.Random(seed)
    story = [first(directory)] if first else []
    while len(story) < kills + bool(first) and newest(directory) <= STEPS - 15:  # or it might end before the signal
        story.append(at_random(directory, rng))
    before = newest(directory)
    command = Again(directory, "--resume", "auto", *sets(JOB))
    ended = command.end(PATIENCE_S)
    assert ended.code == 0, (story, ended.err)
    ended.check_clean()
    story.append({"who": "nobody", "resumed": resumed_from(command), "before": before})
    return {"story": story, "digests": ended.summary["digests"]}


def of_memory(directory: Path) -> dict:
    """Kill a rank when there are only snapshots in memory, one of each step."""
    values = {"checkpoint.every_steps": 100_000, "checkpoint.memory_every_steps": 1}
    return killed(directory, "rank 1", lambda c: len(c.rows()) >= 10, values)


def in_a_drain(directory: Path) -> dict:
    """Kill a rank while the checkpoint of step 6 is on its way to a slow disk."""
    values = {"checkpoint.every_steps": 6, "checkpoint.memory_every_steps": 6}
    there = "runs/*/checkpoints/step-000000006-*/*.bin"
    return killed(directory, "rank 0", lambda c: any(directory.glob(there)), values, slow_disk(directory))


SLOW_COPY = """
import time
from phalanx.checkpoint.memory import Slot
from phalanx.model.dense import DENSE as FAMILY
def seal(self, header, real=Slot.seal):
    time.sleep(0.25 if header["rank"] == 1 else 0)
    real(self, header)
Slot.seal = seal
"""


def slow_copy(directory: Path) -> dict:
    """Do as `of_memory`, but the rank that dies takes longer for its snapshots than the others do for a step."""
    directory.mkdir(exist_ok=True)
    (directory / "slow_copy.py").write_text(SLOW_COPY)
    values = {"checkpoint.every_steps": 100_000, "checkpoint.memory_every_steps": 1}
    values |= {"model.family": f"{directory / 'slow_copy.py'}:FAMILY"}
    return {"story": [killed(directory, "rank 1", lambda c: len(c.rows()) >= 10, values, delay_s=0.05)]}


SCENARIOS = {
    "slow copy": slow_copy,
    "of memory": partial(chain, seed=7, kills=0, first=of_memory),
    "in a drain": partial(chain, seed=9, kills=0, first=in_a_drain),
    **{f"seed {seed}": partial(chain, seed=seed, kills=3) for seed in (3, 4, 5, 12, 18, 22)},
}
FAST, SLOW = ["of memory", "in a drain"], [name for name in SCENARIOS if name.startswith("seed")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run in which nobody is killed, and nothing is saved."""
    ended = Command(tmp_path_factory.mktemp("whole") / "run", *sets(JOB | {"checkpoint.every_steps": -1})).end(
        PATIENCE_S
    )
    assert ended.code == 0, ended.err
    assert not (ended.runs[0] / "checkpoints").exists()
    return ended.summary["digests"]


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_killed_runs_end_as_if_nobody_had_been_killed(outcomes, whole, name):
    out = outcomes(name)
    print(json.dumps([{k: v for k, v in point.items() if k != "out"} for point in out["story"]]))
    assert out["digests"] == whole
    for point in out["story"]:
        assert point["resumed"] == point["before"], "each attempt goes on from the newest checkpoint"


@pytest.mark.parametrize("name", ["of memory", pytest.param("slow copy", marks=pytest.mark.slow)])
def test_what_is_in_memory_is_written_when_a_rank_dies(outcomes, name):
    point = outcomes(name)["story"][0]
    assert point["steps"] >= 10
    assert point["left"] >= point["steps"] - 2, "the steps of two snapshots at most are lost"


@pytest.mark.parametrize("name", ["in a drain"])
def test_a_checkpoint_that_is_being_written_is_finished_when_a_rank_dies(outcomes, name):
    point = outcomes(name)["story"][0]
    assert point["left"] >= 6 and "FAILED" not in point["out"], point
