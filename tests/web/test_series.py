"""Series: a spike is in the picture at every zoom, and a line is never drawn where nothing was measured."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.observe.story import Story
from phalanx.observe.words import describe
from phalanx.web.series import Columns
from phalanx.web.shelf import segments
from tests.observe.records import Written


def columns(times, losses):
    out = Columns()
    out.load({"time": np.array(times), "step": np.arange(len(times)), "loss": np.array(losses)})
    return out


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(0, 10), st.floats(-5, 5) | st.just(float("nan"))), min_size=1, max_size=80),
    points=st.integers(1, 30),
)
def test_the_envelope_of_a_chart_is_that_of_its_rows(rows, points):
    times = np.cumsum([gap for gap, _ in rows])
    losses = np.array([loss for _, loss in rows])
    found = columns(times, losses).query(-1, 1e9, points)
    assert len(found["time"]) <= max(points, 1) and found["step"][-1] == len(rows) - 1
    if np.isnan(losses).all():
        assert "loss" not in found["series"]
        return
    loss = found["series"]["loss"]
    known = lambda values: [v for v in values if v is not None]  # noqa: E731
    assert np.isclose(min(known(loss["min"])), np.nanmin(losses), rtol=1e-6, atol=1e-9)
    assert np.isclose(max(known(loss["max"])), np.nanmax(losses), rtol=1e-6, atol=1e-9)


def test_a_pause_breaks_the_line():
    times = [*range(10), *range(60, 70)]
    assert columns(times, np.zeros(20)).query(0, 100, 100)["breaks"] == [10]


def test_a_step_that_took_long_is_no_pause():
    times, out = np.array([*range(10), *range(60, 70)], float), Columns()
    took = np.where(times == 60, 50.0, 1.0)
    out.load({"time": times, "step": np.arange(20), "time_s": took})
    assert out.query(0, 100, 100)["breaks"] == []
    out.load({"time": times, "step": np.arange(20), "time_s": np.ones(20)})
    assert out.query(0, 100, 100)["breaks"] == [10]


def test_part_of_a_run_reaches_both_edges():
    found = columns(np.arange(1000.0), np.arange(1000.0)).query(500, 600, 50)
    assert found["step"][0] <= 502 and found["step"][-1] == 601 and len(found["time"]) <= 50


def test_a_clock_that_jumps_back_does_not_fold_the_axis():
    assert columns([0, 5, 3, 6], np.zeros(4)).query(0, 10, 10)["time"] == [0, 5, 5, 6]


def test_a_long_history_has_the_envelope_of_its_rows():
    rng = np.random.default_rng(0)
    losses = rng.random(40_000)
    losses[[12_345, 39_999]] = 7.0, 9.0
    losses[777] = -5.0
    long = columns(np.arange(40_000.0), losses)
    for points in (10, 100):
        for begin, end in ((0, 1e9), (10_000, 39_000)):
            found, rows = long.query(begin, end, points), losses[max(0, begin - 64) : int(min(end, 40_000)) + 2]
            loss = found["series"]["loss"]
            assert len(found["time"]) <= points and max(loss["max"]) in (losses.max(), rows.max())
            assert min(loss["min"]) <= losses[begin : int(min(end, 40_000))].min()
    assert max(long.query(0, 1e9, 10)["series"]["loss"]["max"]) == 9.0


def test_columns_of_a_story_go_back_with_it(tmp_path):
    run = Written(tmp_path, steps=400).begin().steps(0, 300)
    story, grown = Story(run.path), Columns()
    grown.update(story)
    run.steps(130, 320, loss=9.0)
    story.update()
    grown.update(story)
    fresh = Columns()
    fresh.update(Story(run.path))
    for points in (2, 1000):
        assert grown.query(0, 1e12, points) == fresh.query(0, 1e12, points)


def test_a_reader_that_forgets_what_is_long_over_says_the_same(tmp_path):
    run = Written(tmp_path, steps=400).begin().steps(0, 200)
    run.event("exit", rank=1, signal="SIGKILL", node="node-1", service="")
    run.form(step=150, rung=4, branch=True, last=200)
    run.steps(150, 300)
    slim, whole = Story(run.path), Story(run.path)
    slim.slim(250)
    run.steps(290, 320).end()  # later than what was forgotten
    for story in (slim, whole):
        story.update()
    slim.slim(250)
    assert "phases" not in slim.rows[0] and "phases" in slim.rows[-100]
    assert describe(slim) == describe(whole) and segments(slim) == segments(whole)
    assert slim.rows[1]["served"] is slim.rows[0]["served"], "what is equal is kept once"
