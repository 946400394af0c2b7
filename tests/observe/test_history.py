"""SQL over a run: answers come from the steps that count, and a query cannot reach anything outside the run."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from phalanx.cli.commands import app
from phalanx.core.errors import UserError
from phalanx.observe import history
from phalanx.observe.story import Story
from tests.observe.records import Written
from tests.observe.test_story import broken


def test_the_answer_is_that_of_the_record(tmp_path):
    path = broken(tmp_path).end()
    story, sql = Story(path), "SELECT count(*) AS n, max(loss) AS most, sum(phases_reduce) AS reduce FROM steps"
    out = CliRunner().invoke(app, ["runs", "query", str(path), sql, "--json"])
    reduce = sum(row["phases"]["reduce"] for row in story.rows)
    assert json.loads(out.output) == [{"n": 40, "most": story.rows[0]["loss"], "reduce": pytest.approx(reduce)}]
    _, rows = history.query(story, "SELECT state, gpu_s FROM states")
    assert dict(rows) == {row["state"]: row["gpu_s"] for row in story.goodput()["states"]}
    _, rows = history.query(story, "SELECT kind, verdict, detect_s FROM incidents")
    (one,) = story.incidents()
    assert rows == [(one.kind, one.verdict(), one.phases()["detect"])]
    _, rows = history.query(story, "SELECT count(*) FROM events WHERE type = 'exit'")
    assert rows == [(1,)]


def test_steps_that_were_abandoned_are_not_counted_and_new_ones_are_seen(tmp_path):
    run = Written(tmp_path).begin().steps(0, 10).steps(6, 8, loss=1.0)
    ask = lambda: history.query(Story(run.path), "SELECT count(*), round(min(loss), 2) FROM steps")[1]  # noqa: E731
    assert ask() == [(8, 0.93)]
    (first,) = run.path.glob("history/*.parquet")
    run.steps(8, 12)
    assert ask() == [(12, 0.93)] and not first.exists(), "the file of the shorter record is gone"
    (second,) = run.path.glob("history/*.parquet")
    written = second.stat().st_mtime_ns
    assert ask() == [(12, 0.93)] and second.stat().st_mtime_ns == written, "an unchanged record is not written again"


def test_a_record_that_nobody_may_write_to_is_read(tmp_path):
    story = Story(Written(tmp_path).begin().steps(0, 5).end())
    (story.path / "history").write_text("in the way")
    assert history.query(story, "SELECT count(*) FROM steps")[1] == [(5,)]


@pytest.mark.parametrize(
    "sql",
    ["SELECT * FROM read_text('/etc/hostname')", "COPY steps TO '/tmp/stolen.csv'", "SELECT nothing FROM steps", "DROP",
     "SET enable_external_access = true"],
)  # fmt: skip
def test_what_is_not_of_the_run_is_refused(tmp_path, sql):
    story = Story(Written(tmp_path).begin().steps(0, 5).end())
    with pytest.raises(UserError, match="tables: steps"):
        history.query(story, sql)
