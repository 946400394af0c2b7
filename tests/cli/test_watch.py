"""`phalanx top` and `phalanx logs`: a run in the terminal, with lines of many ranks shown once."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from phalanx.cli.commands import app
from phalanx.cli.watch import BARS, sparkline
from phalanx.core.errors import UserError
from phalanx.observe.logs import describe
from tests.observe.test_story import broken


def ask(*words):
    out = CliRunner().invoke(app, list(map(str, words)))
    if isinstance(out.exception, UserError):
        raise out.exception
    return out.output


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    run = broken(root)
    for node in range(2):
        folder = run.path / "logs" / f"node-{node}"
        folder.mkdir()
        for rank in range(4 * node, 4 * node + 4):
            odd = "\x1b[31mcaught fire\n" if rank == 5 else ""
            (folder / f"rank-{rank:05d}.log").write_text(f"loaded in 1.{rank} s\n{odd}step 1\nstep 2\n")
    (run.path / "logs" / "node-0" / "store.log").write_text("not a rank\n")
    run.end()
    return root


def test_top_tells_the_story(root):
    text = " ".join(ask("top", "--dir", root).split())
    assert "Done: 40 steps" in text and "productive" in text and "Rank 1 on node-0 was killed" in text
    about = json.loads(ask("top", "last", "--dir", root, "--json"))
    assert about["step"] == 40 and about["incidents"][0]["kind"] == "worker"


def test_equal_lines_are_shown_once_and_the_odd_rank_is_named(root):
    lines = ask("logs", "--dir", root).splitlines()
    assert lines[0] == "-- all 8 ranks" and lines[1] == "loaded in 1.0 s" and lines[2] == "step 1   (16 times)"
    assert lines[3:] == ["-- rank 5", "\\x1b[31mcaught fire"]
    assert "not a rank" not in " ".join(lines)
    found = json.loads(ask("logs", "--dir", root, "--grep", "fire", "--json"))
    assert [line["who"] for line in found["lines"]] == ["rank 5"]
    assert ask("logs", "--dir", root, "--rank", 5).splitlines()[0] == "-- rank 5"
    assert "written nothing with 'water'" in ask("logs", "--dir", root, "--grep", "water")
    with pytest.raises(UserError, match="--rank = 99"):
        ask("logs", "--dir", root, "--rank", 99)


def test_ranks_in_words():
    everyone = list(range(8192))
    assert describe(everyone, everyone) == "all 8,192 ranks"
    assert describe(sorted(set(everyone) - {77}), everyone) == "8,191 of 8,192 ranks; not rank 77"
    assert describe([1, 2, 3, 9], everyone) == "4 of 8,192 ranks: 1-3, 9"


def test_a_spike_stays_in_a_sparkline():
    values = [1.0] * 1000
    values[417] = 9.0
    line = sparkline(values, 40)
    assert len(line) == 40 and line.count(BARS[-1]) == 1
