"""A user's mistake gives one message with the field, the value and the remedy, and exit code 2. There is no traceback,
no record of a run that never was, and no process left."""

from __future__ import annotations

import os
from functools import partial

import pytest

from tests.system.command import TINY, sets, train

# name: (settings, expected message). "{here}" is the directory of the run.
AT_ONCE = {
    "ranks": (
        {"layout.ranks": 6},
        ["layout.ranks = 6", "replica 2 x shard 1 x tp 2 = 4 ranks", "remedy: set layout.ranks = 4"],
    ),
    "heads": (
        {"layout.tp": 3, "train.seq_len": 258},
        ["layout.tp = 3", "num_heads (4) is not a multiple of layout.tp", "remedy"],
    ),
    "batch": (
        {"train.global_batch": 6, "train.micro_batch": 4},
        ["train.global_batch = 6", "not a multiple of train.micro_batch (4)", "remedy"],
    ),
    "batch over ranks": (
        {"train.global_batch": 4, "train.micro_batch": 4},
        ["train.global_batch = 4", "do not divide evenly", "remedy"],
    ),
    "sequence": ({"train.seq_len": 255}, ["layout.tp = 2", "train.seq_len (255)", "remedy"]),
    "no corpus": ({"data.source": "not/there"}, ["data.source = 'not/there'", "there is no file or folder", "remedy"]),
    "empty corpus": ({"data.source": "empty"}, ["data.source = '{here}/empty'", "no text", "remedy: name a"]),
    "pipe": ({"data.source": "pipe"}, ["data.source = '{here}/pipe'", "neither a file nor a folder", "remedy"]),
    "short corpus": (
        {"data.source": "short"},
        ["train.seq_len = 256", "source short has 6 tokens; one sample takes 257", "remedy: name more text"],
    ),
    "typo": ({"train.stepz": 3}, ["train.stepz = 3", "no such field", "did you mean train.steps?"]),
    "preset": ({"model.preset": "gpt5"}, ["model.preset = 'gpt5'", "no such preset", "The presets are tiny"]),
    "vocabulary": ({"model.vocab_size": 256}, ["model.vocab_size = 256", "need a vocabulary of 257", "remedy: set"]),
    "too large": (
        {"model.preset": "llama3-405b", "run.device": "cpu"},
        ["126 layers of width 16384", "405.9 billion parameters", "need 12,09", "GiB; this host has", "remedy: choose"],
    ),
    "too many ranks": (
        {"layout.replica": 200, "train.global_batch": 400, "train.micro_batch": 1},
        ["layout = 'replica 200 x shard 1 x tp 2 = 400 ranks'", "at most 253 ranks", "remedy: lower"],
    ),
    "too many nodes": (
        {"layout.replica": 100, "train.global_batch": 200, "train.micro_batch": 1},
        ["layout.ranks_per_node = 2", "101 nodes", "one host plays at most 32", "remedy: raise"],
    ),
    "too few replicas": (
        {"recovery.min_replicas": 3},
        ["recovery.min_replicas = 3", "the layout has 2", "remedy: lower"],
    ),
    "run.dir": ({"run.dir": "short/runs"}, ["run.dir = 'short/runs'", "Not a directory", "remedy: name a folder"]),
    "no job file": ({}, ["job file = 'qiuckstart.toml'", "cannot be read", "remedy"]),
}

# These are the user's mistakes too, though only a worker can find them.
FROM_A_WORKER = {
    "device": (
        {"run.device": "mps"},
        ["run.device = 'mps'", "no such device on this host", 'remedy: set run.device = "auto"'],
    ),
    "import": (
        {"model.family": "broken.py:FAMILY"},
        ["broken.py:FAMILY'", "ModuleNotFoundError: No module named 'no_such_module' (line 2)", "remedy: correct"],
    ),
    "name": (
        {"model.family": "other.py:FAMILY"},
        ["other.py:FAMILY'", "FAMILY is not there", "remedy: ", "other.py has DENSE, MINE"],
    ),
    "style": (
        {"model.family": "other.py:MINE"},
        ["layer 'norm' has the split style 'column' but is a RMSNorm", "remedy: give that style to a Linear"],
    ),
}
OTHER = """
import dataclasses
from phalanx.model.dense import DENSE
MINE = dataclasses.replace(DENSE, split=DENSE.split | {"norm": "column"})
"""


def run(directory, name, values):
    (directory / "empty").mkdir()
    (directory / "short").write_text("short")
    (directory / "broken.py").write_text("\nimport no_such_module\n")
    (directory / "other.py").write_text(OTHER)
    os.mkfifo(directory / "pipe")
    args = ["qiuckstart.toml"] if name == "no job file" else []
    return train(directory, *args, *sets(values)), directory


SCENARIOS = {name: partial(run, name=name, values=values) for name, (values, _) in AT_ONCE.items()}
SCENARIOS |= {name: partial(run, name=name, values=TINY | values) for name, (values, _) in FROM_A_WORKER.items()}


@pytest.mark.parametrize("name", list(AT_ONCE))
def test_refused_before_anything_starts(outcomes, name):
    ended, directory = outcomes(name)
    ended.check_clean()
    assert ended.code == 2, ended.err
    for part in AT_ONCE[name][1]:
        assert part.replace("{here}", str(directory)) in ended.err
    most = 1 + 2 * ended.err.count("remedy: ")
    assert ended.err.startswith("error: ") and len(ended.err.splitlines()) <= most, "each mistake, and its remedy"
    assert not [*(directory / "runs").glob("[!.]*")], "a run that never was left a record"


SLOW = list(FROM_A_WORKER)[2:]  # found by the same code


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in FROM_A_WORKER]
)
def test_a_mistake_that_a_worker_finds_is_told_like_any_other(outcomes, name):
    ended, _ = outcomes(name)
    ended.check_clean()
    assert ended.code == 2, ended.err
    for part in FROM_A_WORKER[name][1]:
        assert part in ended.err
    assert len(ended.err.splitlines()) <= 3, "not a crash: no log of a rank"
    assert ended.summary["status"] == "failed" and ended.summary["steps"] == 0
    assert ended.summary["reason"] in ended.err
