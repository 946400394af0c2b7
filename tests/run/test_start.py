"""Which checkpoint a run continues. When this fails, a run begins anew where it should not, or with the weights of
another."""

from __future__ import annotations

import dataclasses
import json
import os
from types import SimpleNamespace

import pytest

from phalanx.checkpoint.catalog import OWNER, Catalog
from phalanx.core.checkpoint import file_name
from phalanx.core.errors import UserError
from phalanx.core.job import CheckpointConfig, Job, RunConfig, TrainConfig
from phalanx.core.lease import Lease, read
from phalanx.core.store import Busy, Folder, ObjectStore
from phalanx.run.start import AUTO, NEW, check_room, find_start, next_generation, take_place
from phalanx.run.training import _Run
from tests.checkpoint.conftest import second_reader_here  # noqa: F401
from tests.checkpoint.test_catalog import closed, flip, make

A, B = "aaaaaaaa", "bbbbbbbb"


@pytest.fixture
def job(tmp_path):
    return Job(name="mine", train=TrainConfig(steps=1000), run=RunConfig(dir=str(tmp_path / "runs")))


def with_dir(job, url):
    return dataclasses.replace(job, checkpoint=CheckpointConfig(dir=str(url)))


def save(store, step, lineage=A, generation=1, name="mine"):
    return make(store, step, lineage=lineage, generation=generation, job={"name": name})


def run_of(job, stamp, **saved):
    """The record of an earlier run, and the names of its checkpoints by step."""
    from pathlib import Path

    record = Path(job.run.dir) / f"{job.name}-{stamp}-0000"
    (record / "checkpoints").mkdir(parents=True)
    (record / "meta.json").write_text("{}")
    return record, Folder(record / "checkpoints")


def test_auto_takes_the_highest_good_step_of_the_jobs_runs(job):
    """A later run that was begun by mistake has not come as far."""
    _, first = run_of(job, "20260101T000000Z")
    _, later = run_of(job, "20260102T000000Z")
    far = [save(first, step) for step in (100, 200)]
    save(later, 20, B)
    start = find_start(AUTO, job, print)
    assert start.reader.name == far[1]
    flip(first.path / far[1] / file_name(0), 3)
    events = []
    start = start.next(f"{far[1]}/{file_name(0)}: damaged", events.append)
    assert start.reader.name == far[0] and [e["type"] for e in events] == ["checkpoint_quarantined"]


def test_a_run_that_continues_nothing_begins_with_the_weights_that_its_job_names(job, tmp_path):
    """And continues its own checkpoints once it has some."""
    imported = Folder(tmp_path / "imported")
    weights = save(imported, 0, lineage="", generation=0, name="quickstart")
    job = dataclasses.replace(job, checkpoint=CheckpointConfig(start=str(imported.path)))
    for asked in ("", NEW, AUTO):
        assert find_start(asked, job, print).reader.name == weights, asked
    _, own = run_of(job, "20260101T000000Z")
    mine = save(own, 10)
    assert find_start(AUTO, job, print).reader.name == mine
    assert find_start("", job, print).reader.name == weights
    nowhere = dataclasses.replace(job, checkpoint=CheckpointConfig(start=str(tmp_path / "none")))
    with pytest.raises(UserError, match=r"checkpoint\.start = .*no good checkpoint"):
        find_start("", nowhere, print)


def test_auto_takes_no_other_jobs_weights(job, tmp_path):
    shared = Folder(tmp_path / "shared")
    mine, _ = save(shared, 50), save(shared, 900, B, name="theirs")
    assert find_start(AUTO, with_dir(job, shared.url), print).reader.name == mine
    assert find_start(AUTO, with_dir(dataclasses.replace(job, name="nobodys"), shared.url), print) is None


def test_auto_prefers_the_lineage_that_owns_the_place(job, tmp_path):
    """After --resume new the older lineage is further, but was left behind."""
    shared = Folder(tmp_path / "shared")
    save(shared, 900, A)
    new = save(shared, 10, B)
    take_place(shared, job, B, "run", print).close()
    assert find_start(AUTO, with_dir(job, shared.url), print).reader.name == new


@pytest.mark.parametrize("bucket", [False, True])
def test_auto_does_not_begin_anew_where_checkpoints_are(job, tmp_path, bucket):
    store = ObjectStore(f"memory://{tmp_path.name}") if bucket else Folder(tmp_path / "c")
    made = [save(store, step) for step in (10, 20)]
    for name in made:
        Catalog(store).quarantine(name, "it looked odd")
    job = with_dir(job, store.url)
    with pytest.raises(UserError, match=r"(?s)none of them can be loaded: .*it looked odd.*--resume new"):
        find_start(AUTO, job, print)
    assert find_start(NEW, job, print) is None
    Catalog(store).release(made[1])
    assert find_start(AUTO, job, print).reader.name == made[1]


def test_files_that_are_away_cost_nothing_when_they_are_back(job, tmp_path):
    store = Folder(tmp_path / "c")
    made = [save(store, step) for step in (10, 20, 30)]
    job, events = with_dir(job, store.url), []
    for name in made:
        os.rename(store.path / name / file_name(0), tmp_path / name)
    start = find_start(AUTO, job, events.append)
    while start:  # each is refused by the ranks
        name = start.reader.name
        start = start.next(f"{name}/{file_name(0)}: is missing", events.append)
    assert [e["type"] for e in events] == ["checkpoint_unreadable"] * 3
    for name in made:
        os.rename(tmp_path / name, store.path / name / file_name(0))
    assert find_start(AUTO, job, print).reader.name == made[2]


def test_auto_does_not_begin_anew_when_the_record_knows_of_checkpoints(job):
    """The whole folder is away, as when a disk is not mounted."""
    record, _ = run_of(job, "20260101T000000Z")
    assert find_start(AUTO, job, print) is None
    (record / "events.jsonl").write_text(json.dumps({"type": "checkpoint", "step": 10}) + "\n")
    with pytest.raises(UserError, match="they are not there"):
        find_start(AUTO, job, print)


def test_a_bucket_that_does_not_answer_for_a_minute_is_waited_for(job, tmp_path, monkeypatch):
    """At the beginning, and when the ranks load: no older checkpoint is taken for it."""
    store = ObjectStore(f"memory://{tmp_path.name}-silent")
    made = [save(store, step) for step in (10, 20)]
    job, waits, events, real = with_dir(job, store.url), [], [], ObjectStore.read
    silent = [0.0]

    def read(self, name):
        if silent[0] > 0:
            raise Busy(f"{name}: 503 Service Unavailable")
        return real(self, name)

    def sleep(seconds):
        silent[0] -= seconds

    monkeypatch.setattr(ObjectStore, "read", read)
    monkeypatch.setattr(ObjectStore, "read_tagged", lambda self, name: (read(self, name), "tag"))
    monkeypatch.setattr("time.sleep", sleep)
    silent[0] = 60.0
    start = find_start(AUTO, job, events.append, waits.append)
    assert start.reader.name == made[1] and waits and silent[0] <= 0 and not events
    silent[0] = 60.0
    again = start.next(f"Unreadable: {made[1]}/{file_name(0)}: it cannot be read: 503", events.append)
    assert again.reader.name == made[1] and {e["type"] for e in events} == {"checkpoint_waits"}
    silent[0] = 1e9
    with pytest.raises(UserError, match=r"(?s)cannot be read.*remedy"):
        find_start(AUTO, job, events.append, waits.append)
    with pytest.raises(UserError, match=r"(?s)checkpoint\.dir.*503.*remedy"):
        check_room(None, job, "")


def test_a_newer_checkpoint_that_is_away_is_missed_by_name(job, tmp_path):
    """It is the steps after it that would be trained again without a word."""
    record, store = run_of(job, "20260101T000000Z")
    made = [save(store, step) for step in (10, 20)]
    (record / "events.jsonl").write_text(
        "".join(json.dumps({"type": "checkpoint", "checkpoint": name}) + "\n" for name in made)
    )
    events = []
    assert find_start(AUTO, job, events.append).reader.name == made[1] and events == []
    os.rename(store.path / made[1], tmp_path / made[1])
    assert find_start(AUTO, job, events.append).reader.name == made[0]
    assert [(e["type"], e["checkpoint"]) for e in events] == [("checkpoint_unreadable", made[1])]
    assert record.name in events[0]["reason"]


def test_a_checkpoint_that_may_not_be_read_is_told_and_the_one_before_it_taken(job, tmp_path, monkeypatch):
    store = Folder(tmp_path / "c")
    made = [save(store, step) for step in (10, 20)]
    job, events = with_dir(job, store.url), []
    closed(store, monkeypatch, made[1])
    assert find_start(AUTO, job, events.append).reader.name == made[0]
    assert [(e["type"], e["checkpoint"]) for e in events] == [("checkpoint_unreadable", made[1])]
    closed(store, monkeypatch, made[0])
    with pytest.raises(UserError, match="none of them can be loaded"):
        find_start(AUTO, job, print)
    with pytest.raises(UserError, match=r"checkpoint\.dir.*step 20"):
        check_room(None, job, "")


def test_a_folder_with_another_runs_checkpoints_is_not_taken_without_a_word(job, tmp_path):
    store = Folder(tmp_path / "c")
    save(store, 10)
    job = with_dir(job, store.url)
    with pytest.raises(UserError, match=r"(?s)checkpoint\.dir.*step 10.*--resume new"):
        check_room(None, job, "")
    check_room(None, job, NEW)
    check_room(find_start(AUTO, job, print), job, AUTO)
    save(store, 20)
    with pytest.raises(UserError, match="begins at 10"):
        check_room(find_start(f"{store.url}/{Catalog(store).good()[1].name}", job, print), job, "path")


def test_a_stale_writers_late_checkpoint_is_not_in_the_way(job, tmp_path):
    store = Folder(tmp_path / "c")
    went_on = save(store, 50, generation=4)
    save(store, 60, generation=2)
    job = with_dir(job, store.url)
    start = find_start(AUTO, job, print)
    assert start.reader.name == went_on
    check_room(start, job, AUTO)
    assert next_generation(store, start) == 4


def test_what_a_run_writes_comes_after_all_that_is_there(job, tmp_path):
    """Also after what it did not continue because it was damaged."""
    store = Folder(tmp_path / "c")
    good, bad = save(store, 50, generation=2), save(store, 60, generation=5)
    Catalog(store).quarantine(bad, "odd")
    start = find_start(AUTO, with_dir(job, store.url), print)
    assert start.reader.name == good and next_generation(store, start) == 5


def holder(store):
    return read(store, OWNER)["token"]


def test_two_runs_do_not_write_to_one_place(job, tmp_path):
    store = Folder(tmp_path / "c")
    first = take_place(store, job, A, "one", print)
    with pytest.raises(UserError, match=r"(?s)a run of 'mine' writes its checkpoints there.*name another folder"):
        take_place(store, job, B, "two", print)
    first.close()
    second = take_place(store, job, B, "two", print)
    assert holder(store) == second.token
    second.close()


def test_a_controller_that_takes_a_run_over_takes_its_place_too(job, tmp_path):
    store = Folder(tmp_path / "c")
    first = take_place(store, job, A, "one", print)
    second = take_place(store, job, A, "one", print)
    assert holder(store) == second.token
    first.close()
    assert holder(store) == second.token, "who was replaced changes nothing any more"
    second.close()


def test_a_dead_runs_place_is_free_at_once_and_a_silent_ones_after_its_term(job, tmp_path):
    store = Folder(tmp_path / "c")
    dead = {"held": True, "token": "x", "term_s": 60.0, "host": "here", "pid": 1 << 22, "born": 1}
    here = Lease(store, OWNER, {})._body["machine"]
    store.write(OWNER, json.dumps({**dead, "machine": here}).encode())
    take_place(store, job, A, "one", print).close()
    waited = []
    store.write(OWNER, json.dumps({**dead, "machine": "another", "term_s": 0.6}).encode())
    take_place(store, job, A, "two", waited.append).close()
    assert len(waited) == 1 and "for a sign of it" in waited[0]


@pytest.mark.parametrize("url", ["s3://no-such-bucket-here/x", "/proc/version/x"])
def test_a_place_that_cannot_be_reached_is_an_error_of_one_sentence(job, url, monkeypatch):
    for name, value in {"ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b", "ENDPOINT_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    from phalanx.core import store as stores

    monkeypatch.setattr(stores, "_client", lambda url, retries, timeout_s: _impatient(url))
    job = with_dir(job, url)
    with pytest.raises(UserError, match="--resume"):
        find_start(AUTO, job, print)
    with pytest.raises(UserError, match=r"checkpoint\.dir"):
        take_place(stores.open_store(url), job, A, "one", print)


def _impatient(url):
    from datetime import timedelta

    from obstore.store import from_url

    retry = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
    return from_url(url, client_options={"allow_http": True, "connect_timeout": "1s"}, retry_config=retry)


@pytest.mark.parametrize(
    ("asked", "named"),
    [(AUTO, "--resume = 'auto'"), ("runs/one", "--resume = 'runs/one'"), (NEW, "checkpoint.start = 'runs/base'")],
)
def test_when_none_is_left_the_error_names_what_was_asked_for(job, asked, named):
    run = object.__new__(_Run)
    run.job = dataclasses.replace(job, checkpoint=CheckpointConfig(start="runs/base"))
    run.start, run.running = SimpleNamespace(next=lambda reason, on_event: None), {}
    with pytest.raises(UserError, match=f"^{named}: no good checkpoint is left"):
        run._fall_back("rank-000001.bin: is cut", asked)
