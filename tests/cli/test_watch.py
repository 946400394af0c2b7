"""`phalanx top` and `phalanx logs`: a run in the terminal, with lines of many ranks shown once."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from phalanx.cli.commands import app
from phalanx.cli.watch import BARS, sparkline
from phalanx.core.errors import UserError
from phalanx.observe.logs import describe, folded
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
    assert lines[:2] == ["-- all 8 ranks; numbers differ", "loaded in 1.0 s"]
    assert lines[2:4] == ["-- all 8 ranks", "step 1   (16 times)"]
    assert lines[4:] == ["-- rank 5", "\\x1b[31mcaught fire"]
    assert "not a rank" not in " ".join(lines)
    found = json.loads(ask("logs", "--dir", root, "--grep", "fire", "--json"))
    assert [line["who"] for line in found["lines"]] == ["rank 5"]
    assert ask("logs", "--dir", root, "--rank", 5).splitlines()[0] == "-- rank 5"
    assert "written nothing with 'water'" in ask("logs", "--dir", root, "--grep", "water")
    with pytest.raises(UserError, match="--rank = 99"):
        ask("logs", "--dir", root, "--rank", 99)


@pytest.fixture
def written(tmp_path):
    """Return what `phalanx logs` prints for these logs, given one text per rank."""

    def fold(*logs):
        for rank, text in enumerate(logs):
            (tmp_path / "node-0").mkdir(exist_ok=True)
            (tmp_path / "node-0" / f"rank-{rank:05d}.log").write_text(text)
        return folded(tmp_path)

    return fold


def told(found):
    return [(line["who"], line["text"], line["count"]) for line in found["lines"]]


def test_a_rank_that_differs_in_a_number_is_named(written):
    found = written(*["checksum 1234\n"] * 5, "checksum 9999\n", *["checksum 1234\n"] * 2)
    assert told(found) == [("7 of 8 ranks; rank 5 differs", "checksum 1234", 7), ("rank 5", "checksum 9999", 1)]


def test_the_first_line_in_which_a_rank_differs_is_shown(written):
    logs = [[f"step {step}: loss {9 - step}" for step in range(8)] for _ in range(8)]
    for rank in (2, 3):
        logs[rank][4:] = [f"step {step}: loss 77" for step in range(4, 8)]
    logs[6].append("step 8: loss 1")  # it is only ahead of the others
    assert told(written(*("\n".join(lines) for lines in logs))) == [
        ("6 of 8 ranks; ranks 2-3 differ", "step 0: loss 9", 49),
        ("2 of 8 ranks: 2-3", "step 4: loss 77", 2),
    ]


def test_what_is_read_of_many_logs_is_bounded_and_what_is_cut_is_said(written, monkeypatch):
    monkeypatch.setattr("phalanx.observe.logs.MOST_IN_ALL", 4096)
    assert written("x 1\n", "x 1\n")["cut"] == ""
    found = written(*["line 1\n" * 1000] * 5)
    assert "the last 1 logs are not read" in found["cut"] and "the last 1,024 bytes" in found["cut"]
    assert found["lines"][0]["on"] == 4 and found["lines"][0]["count"] <= 4 * 1024 / 7
    monkeypatch.setattr("phalanx.observe.logs.MOST_TEXTS", 2)
    assert "too many different lines" in written("a 1\na 2\na 3\n")["cut"]


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
