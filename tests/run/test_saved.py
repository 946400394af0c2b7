"""What a run says is saved when it ends, what it does when its place is another's, and how it is stopped while it looks
for what to continue."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from types import SimpleNamespace

import pytest

from phalanx.checkpoint import second
from phalanx.checkpoint.catalog import OWNER, Catalog
from phalanx.core.checkpoint import file_name
from phalanx.core.errors import RunFailed, TimeUp
from phalanx.core.store import open_store
from phalanx.run import training
from phalanx.run.start import AUTO, find_start, take_place
from phalanx.run.stop import Stop
from phalanx.run.training import _Damaged, _Run, run_job
from tests.run.test_start import A, B, job, run_of, save  # noqa: F401


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


# -- a place that another run has taken over


@pytest.fixture
def lost(run, tmp_path):
    """It was silent for longer than its term."""
    store = open_store(run.place)
    run.mark, run.lease = "one", take_place(store, run.job, A, "one", print)
    run.stop = SimpleNamespace(asked=False)
    store.write(OWNER, store.read(OWNER).replace(run.lease.token.encode(), b"gone").replace(b"true", b"false"))
    yield run, store
    run.lease.close()


def take(run, store, name):
    other = take_place(store, run.job, B, name, print)
    run.lease._renew()
    other.close()


def test_a_run_that_has_lost_its_place_ends(lost):
    run, store = lost
    running = SimpleNamespace(ended={})
    assert run._is_stopped(running) is False
    take(run, store, "two")
    with pytest.raises(RunFailed, match=r"(?s)belongs to another run now \(process \d+ on .*--resume auto"):
        run._is_stopped(running)
    assert run._is_stopped(SimpleNamespace(ended={"ok": True})) is False, "all is saved, and it leaves"


def test_a_run_whose_place_its_own_next_controller_has_taken_is_ended_by_the_journal(lost):
    run, store = lost
    take(run, store, "one")
    assert run.lease.is_lost and run._is_stopped(SimpleNamespace(ended={})) is False


def test_the_best_checkpoint_of_the_next_owner_keeps_its_protection(lost):
    run, store = lost
    written = []
    event = {"type": "validation", "step": 5, "loss": 1.0, "perplexity": 2.0, "sets": {}}
    run.validations = SimpleNamespace(add=lambda said, size: event, remember=lambda: written.append(event))
    run.form, run.record = {"replicas": [0]}, SimpleNamespace(event=print)
    run.listener = SimpleNamespace(note=print, validation=print)
    run._on_validation({})
    take(run, store, "two")
    run._on_validation({})
    assert len(written) == 1


# -- a stop while it looks for what to continue


def stopped_meanwhile(*_):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(1.0)
    raise AssertionError("it was not stopped")


def test_a_stop_while_it_looks_for_checkpoints_is_heard_at_once(job, monkeypatch):  # noqa: F811
    monkeypatch.setattr(training, "find_start", stopped_meanwhile)
    with pytest.raises(KeyboardInterrupt):
        run_job(job, {}, SimpleNamespace(note=print))


def test_a_stop_while_it_looks_for_an_older_checkpoint_is_heard_at_once(run, monkeypatch):
    def damaged():
        raise _Damaged("rank-000001.bin: is cut")

    run.listener = SimpleNamespace(starting=print, note=print)
    run.noticed, run.kept, run.starter = [], None, SimpleNamespace(let_go=print)
    run._build_source = run._prepare_validation = lambda: None
    run._launch, run._fall_back = damaged, stopped_meanwhile
    monkeypatch.setattr(_Run, "saves", False)
    with Stop() as run.stop, pytest.raises(KeyboardInterrupt):
        run.go(AUTO)


def test_the_second_reader_hears_no_ctrl_c_and_ends_with_the_command(job, monkeypatch):  # noqa: F811
    _, store = run_of(job, "20260101T000000Z")
    name = save(store, 40)
    (store.path / name / file_name(0)).unlink()
    os.mkfifo(store.path / name / file_name(0))  # who opens it waits for a writer
    started, groups = [], []

    class Recorded(subprocess.Popen):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            started.append(self)
            groups.append(os.getpgid(self.pid))
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    with Stop() as stop, pytest.raises(KeyboardInterrupt), stop.at_once():
        second.look(store, name)
    assert groups != [os.getpgid(0)] and started[0].poll() == -signal.SIGKILL
