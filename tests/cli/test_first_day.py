"""The twenty mistakes of a first day: each gets one message that says what is wrong and what to do, exit code 2, and no
traceback. When this fails, somebody's first hour with Phalanx ends in a search engine."""

import sys

import pytest

from phalanx.cli.main import run
from phalanx.core.errors import RunFailed

SMALL = ("--set", "data.max_mb=0.1")

# The typed command, and what its answer must contain. "{here}" is the folder in which it is typed.
MISTAKES = {
    "a job file that is not there": (["train", "jbo.toml"], ["job file = 'jbo.toml'", "remedy: ", "job.toml"]),
    "a folder for a job file": (["train", "."], ["job file = '.'", "cannot be read", "job.toml"]),
    "JSON for TOML": (["train", "job.json"], ["not a TOML file", "remedy: correct the line"]),
    "a misspelt field": (["train", "--set", "train.stesp=3"], ["there is no such field", "did you mean train.steps?"]),
    "a field of another section": (["train", "--set", "train.lr=0.1"], ["did you mean optimizer.lr?"]),
    "a section of another project": (["train", "--set", "training.steps=3"], ["there is no such section", "[train]"]),
    "text for a number": (["train", "--set", "train.steps=many"], ["train.steps = 'many'", "Give an integer >= 1"]),
    "a setting without a value": (["train", "--set", "train.steps"], ["write section.field=value"]),
    "a section for a field": (["train", "--set", "train=3"], ["[train] is a section", "--set train.FIELD=VALUE"]),
    "a program for text": (
        ["train", "--set", "data.source=program"],
        ["is binary: it has a zero byte", "phalanx data build --force"],
    ),
    "a device with its number": (
        ["train", "--set", "run.device=cuda:0"],
        ["run.device = 'cuda:0'", "a kind of device, without a number", 'write "cuda"', "CUDA_VISIBLE_DEVICES"],
    ),
    "a device that is not here": (
        ["train", "--set", "run.device=cuda"],
        ["run.device = 'cuda'", "this host has no such device", 'set run.device = "auto" or "cpu"'],
    ),
    "a preset of another project": (["train", "--set", "model.preset=gpt2"], ["no such preset", "The presets are"]),
    "a batch that does not divide, and a head count neither": (
        ["train", "--set", "train.global_batch=7", "--set", "model.num_heads=3"],
        ["things are wrong:", "train.global_batch = 7", "model.num_heads = 3", "remedy: choose model.dim"],
    ),
    "ranks that do not multiply": (["train", "--set", "layout.ranks=8"], ["the degrees give", "set layout.ranks = 4"]),
    "data that is not there": (["train", "--set", "data.source=corpus"], ["there is no file or folder", "remedy: "]),
    "a vocabulary too small for the data": (
        ["train", *SMALL, "--set", "model.vocab_size=100"],
        ["model.vocab_size = 100", "set model.vocab_size to at least 257"],
    ),
    "a model that does not fit": (
        ["train", "--set", "model.preset=llama3-405b", "--set", "run.device=cpu"],
        ["405.9 billion parameters", "this host has", "choose a smaller model.preset"],
    ),
    "a checkpoint that is not there": (["train", "--resume", "nowhere"], ["--resume = 'nowhere'", "checkpoint ls"]),
    "a family without its name": (["train", "--set", "model.family=my.py"], ["names no NAME", "path/to/file.py:NAME"]),
    "a share of everything held out": (
        ["train", "--set", "validation.held_out=1.0"],
        ["validation.held_out = 1.0", "must be less than 1"],
    ),
    "generating from no checkpoint": (["generate", "nowhere"], ["there is no such folder", "name the record of a run"]),
    "a run that is not there": (["logs", "nowhere"], ["there is no such run", "name the folder of a run"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_a_message_with_its_remedy(tmp_path, monkeypatch, capsys, name):
    typed, said = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text('name = "mine"\n')
    (tmp_path / "program").write_bytes(b"\x7fELF\0")
    (tmp_path / "job.json").write_text('{"name": "mine"}\n')
    monkeypatch.setattr(sys, "argv", ["phalanx", *typed])
    with pytest.raises(SystemExit) as left:
        run()
    told = capsys.readouterr().err
    assert left.value.code == 2, told
    assert told.startswith("error: ") and "Traceback" not in told
    for part in said:
        assert part in told
    assert not list(tmp_path.glob("runs/*-20*")), "a run that was refused leaves no record"


def test_help_shows_examples_and_commands_in_the_order_of_use(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["phalanx", "-h"])
    with pytest.raises(SystemExit):
        run()
    told = capsys.readouterr().out
    places = [told.index(f"\n  {name} ") for name in ("demo", "train", "runs", "data", "plan", "chaos")]
    assert places == sorted(places) and "phalanx train job.toml" in told


def test_the_log_of_a_rank_does_not_steer_the_terminal(monkeypatch, capsys):
    def fail():
        raise RunFailed("rank 3 failed", rank=3, log_tail="\x1b]0;owned\x07\tone\n\x1b[2Jtwo")

    monkeypatch.setattr("phalanx.cli.commands.app", fail)
    with pytest.raises(SystemExit) as left:
        run()
    told = capsys.readouterr().err
    assert left.value.code == 1 and "\x1b" not in told and "\x07" not in told
    assert "  | \\x1b]0;owned\\x07\tone\n  | \\x1b[2Jtwo" in told
