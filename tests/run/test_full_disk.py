"""A disk that is full when all steps are done. When this fails, a run of a month ends as a failed one because its
summary found no room."""

from __future__ import annotations

import resource
from types import SimpleNamespace

from phalanx.core.job import Job, RunConfig
from phalanx.observe.goodput import Running
from phalanx.observe.record import RunRecord
from phalanx.run import training


def test_a_run_is_done_although_its_summary_finds_no_room(tmp_path, monkeypatch):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    notes, finished = [], []

    def go(run, resume):
        run.listener.note("all steps are done")
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # from now on no file of this process can grow
        run.listener.note("lost")
        return {"status": "done"}

    monkeypatch.setattr(training._Run, "go", go)
    names = ("starting", "status", "facts", "measure", "step", "checkpoint", "validation")
    listener = SimpleNamespace(note=notes.append, finished=finished.append, **dict.fromkeys(names, print))
    try:
        summary = training.run_job(Job(run=RunConfig(dir=str(tmp_path / "runs"))), {}, listener)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (path,) = (tmp_path / "runs").iterdir()
    assert summary == {"status": "done"} and finished == [summary]
    assert "no summary could be written" in notes[-1] and str(path) in notes[-1] and "File too large" in notes[-1]
    assert [event["text"] for event in RunRecord.open(path).events()] == ["all steps are done"]


def test_the_user_is_told_what_a_full_disk_has_cost_once_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr("phalanx.observe.record.MOST_WAITING", 1)
    notes, record = [], RunRecord.create(tmp_path, "a", {})
    listener = SimpleNamespace(note=notes.append, step=lambda row: None, measure=lambda row: None)
    run = SimpleNamespace(
        record=record, listener=listener, data=SimpleNamespace(cursor=lambda step: step), validations=None,
        first_loss=0.0, num_steps=0, rows=[], form={"replicas": [0]}, job=Job(), goodput=Running(0.0, 1),
    )  # fmt: skip

    def step(number):
        row = {"step": number, "loss": 1.0, "record": "{}", "rank_times": None}
        row |= {"time_s": 0.1, "data_wait_s": 0.0}
        training._Run._on_row(run, row)

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        for number in range(3):
            step(number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not notes
    for number in range(3, 6):
        step(number)
    record.close()
    (event,) = record.events()
    assert event["type"] == "record dropped" and event["reason"] == f"{record.dropped} lines are lost"
    assert len(notes) == 1 and f"{record.dropped} lines of the record are lost" in notes[0] and record.dropped
