"""What a run says is saved when it ends, and what it does when its place is another's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.checkpoint.catalog import Catalog
from phalanx.core.errors import TimeUp
from phalanx.core.store import open_store
from phalanx.run.start import AUTO, find_start
from phalanx.run.training import _Run
from tests.run.test_start import A, job, run_of, save  # noqa: F401


@pytest.fixture
def run(job, tmp_path):  # noqa: F811
    """One that continues step 40 of an earlier run, in a folder of its own."""
    _, earlier = run_of(job, "20260101T000000Z")
    save(earlier, 40)
    run = object.__new__(_Run)
    run.start, run.lineage, run.launched, run.durable = find_start(AUTO, job, print), A, True, None
    run.job, run.place, run.num_steps, run.figures = job, str(tmp_path / "own"), 0, dict
    run.stop = SimpleNamespace(asked=True, why="stopped", is_time_up=False)
    run.summary = {}
    run.record = SimpleNamespace(finish=run.summary.update, path=tmp_path / "record")
    return run


def stopped(run):
    return str(run.end(KeyboardInterrupt())), run.summary["durable"]


@pytest.mark.parametrize("launched", [False, True])
def test_a_run_that_is_stopped_in_its_start_has_what_it_continues(run, launched):
    run.launched = launched
    text, durable = stopped(run)
    assert text.startswith("stopped after step 40 of 1000; saved up to step 40: ") and durable == 40
    assert run.start.place["url"] in text


def test_what_the_run_has_saved_itself_is_newer(run):
    save(open_store(run.place), 50, generation=2)
    run.num_steps = 12
    text, durable = stopped(run)
    assert f"after step 52 of 1000; saved up to step 50: {run.place}" in text and durable == 50


@pytest.mark.parametrize("said", [None, -1, 50])
def test_a_place_that_cannot_be_read_is_not_empty(run, monkeypatch, said):
    """What the controller knows is enough; else nobody knows."""

    def unreachable(self):
        raise OSError("503 Slow Down")

    monkeypatch.setattr(Catalog, "good", unreachable)
    run.durable = said
    text, durable = stopped(run)
    if said is None:
        assert "what is saved could not be read: 503 Slow Down" in text and durable is None
    else:
        assert f"saved up to step {max(said, 40)}: " in text and durable == max(said, 40)


def test_a_run_that_has_saved_nothing_new_is_not_started_again_for_want_of_time(run):
    run.stop.is_time_up, run.num_steps = True, 12
    assert not isinstance(run.end(KeyboardInterrupt()), TimeUp)
    save(open_store(run.place), 50, generation=2)
    assert isinstance(run.end(KeyboardInterrupt()), TimeUp)
