"""The catalog: the newest good checkpoint is found, a damaged one is not loaded twice, and the last good one stays."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.checkpoint import second
from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.files import Reader, root_of, write_whole
from phalanx.checkpoint.index import CATALOG
from phalanx.core.checkpoint import (
    MANIFEST,
    BadCheckpoint,
    Entry,
    Manifest,
    Plan,
    Unreadable,
    checkpoint_name,
    file_name,
)
from phalanx.core.errors import UserError
from phalanx.core.held import Held
from phalanx.core.layout import Layout
from phalanx.core.store import Folder, ObjectStore, open_store
from tests.data import s3

LAYOUT = Layout(shard=2)
SHM = "/dev/shm" if Path("/dev/shm").is_dir() else None
WEEK_AGO = time.time() - 7 * 86400


def make(store, step, mark="aa", layout=LAYOUT, rows=6, **more):
    """A committed checkpoint; returns its name."""
    shapes = {"weights/w": (rows, 5), "exp_avg/w": (rows, 5), "exp_avg_sq/w": (rows, 5)}
    entries = [Entry(Held(name, shape), "float32") for name, shape in shapes.items()]
    random = np.random.default_rng(step)
    plans = [Plan.of(entries, layout, layout.coord(rank)) for rank in range(layout.world_size)]
    images = ((memoryview(random.bytes(plan.own_bytes)), b"rng") for plan in plans)
    name = checkpoint_name(step, mark, more.get("generation", 0), more.get("lineage", ""))
    manifest = Manifest(name, step, layout, entries, [], updates=step, **more)
    done = write_whole(store, manifest, images)
    Catalog(store).added(done)
    return done.name


def flip(path, at=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def age(folder):
    for path in (*folder.iterdir(), folder):
        os.utime(path, (WEEK_AGO, WEEK_AGO))


@pytest.fixture
def events():
    return []


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "checkpoints")


@pytest.fixture(params=["folder", "bucket"])
def store(request, tmp_path):
    return Folder(tmp_path / "c") if request.param == "folder" else ObjectStore(f"memory://{tmp_path}")


def names(catalog, status="good"):
    return [f.name for f in catalog.all() if f.status == status]


# -- what there is


def test_the_newest_comes_first(store):
    made = [make(store, step) for step in (3, 100, 20)]
    found = Catalog(store).newest_first()
    assert [(f.name, f.step, f.status) for f in found] == [(made[i], s, "good") for i, s in ((1, 100), (2, 20), (0, 3))]
    assert found[0].manifest.size_bytes == Reader(store, made[1]).manifest.size_bytes > 0


def test_a_second_attempt_at_a_step_is_newer(store):
    first = make(store, 5, "zz")
    time.sleep(0.02)
    second = make(store, 5, "aa")
    assert names(Catalog(store)) == [second, first]


def test_there_may_be_none_yet(store):
    assert Catalog(store).newest_first() == [] and Catalog(store).newest_good() is None
    assert Catalog(store).retain(1) == [] and Catalog(store).scrub() == {}


def test_only_a_manifest_makes_a_checkpoint(folder):
    good = make(folder, 5)
    torn = make(folder, 6)
    (folder.path / torn / MANIFEST).unlink()
    (folder.path / "step-note.txt").touch()
    (folder.path / "step-000000009-file").touch()
    (folder.path / "other").mkdir()
    catalog = Catalog(folder)
    assert [f.name for f in catalog.newest_first()] == [good] and names(catalog, "incomplete") == [torn]
    assert catalog.newest_good().name == good


def test_a_bucket_knows_what_was_begun_before_it_was_committed(tmp_path):
    store = ObjectStore(f"memory://{tmp_path.name}-begun")
    Catalog(store).begun(checkpoint_name(8, "aa"), 2)
    assert Catalog(store).newest_first() == [] and names(Catalog(store), "incomplete") == [checkpoint_name(8, "aa")]
    written = store.read(CATALOG)
    make(store, 8, "aa")
    assert names(Catalog(store)) == [checkpoint_name(8, "aa")] and store.read(CATALOG) == written


def test_a_catalog_that_names_nothing_is_not_believed(tmp_path):
    """Or a run would begin from its start, and the next checkpoint would hide those before it for good."""
    store = ObjectStore(f"memory://{tmp_path.name}-emptied")
    made = [make(store, step) for step in (8, 9)]
    store.write(CATALOG, b'{"format": 1, "checkpoints": {}}')
    assert names(Catalog(store)) == made[::-1]
    made.append(make(store, 10))
    assert names(Catalog(store)) == made[::-1]


def test_what_may_not_be_read_is_neither_loaded_nor_removed_nor_in_the_way(folder, events, monkeypatch):
    """A checkpoint that another user has copied there, or a disk that answers with errors for some of its files."""
    made = [make(folder, step) for step in (10, 20, 30)]
    closed(folder, monkeypatch, made[2])
    catalog = Catalog(folder)
    assert names(catalog, "unreadable") == [made[2]] and names(catalog) == [made[1], made[0]]
    ((name, faults),) = catalog.verify(f for f in catalog.to_try() if f.status == "unreadable")
    assert name == made[2] and [fault.damage for fault in faults] == [False]
    assert catalog.try_open(made[2], events.append) is None
    assert [e["type"] for e in events] == ["checkpoint_unreadable"]
    assert catalog.retain(1, on_event=events.append) == [made[0]]
    assert len(os.listdir(folder.path)) == 2


def closed(folder, monkeypatch, *closed_names):
    """Those of a folder may not be read any more."""
    for operation in ("read", "size", "open"):
        real = getattr(Folder, operation)

        def refused(self, name, *args, real=real):
            if name.split("/")[0] in closed_names:
                raise PermissionError(errno.EACCES, "Permission denied", name)
            return real(self, name, *args)

        monkeypatch.setattr(Folder, operation, refused)


def test_a_damaged_catalog_is_not_an_empty_one(tmp_path):
    """Or a run would begin from its start, and say nothing."""
    store = ObjectStore(f"memory://{tmp_path.name}-damaged")
    name = make(store, 8)
    store.write(CATALOG, b"{")
    with pytest.raises(UserError, match="phalanx checkpoint reindex"):
        Catalog(store).newest_good()
    assert [*Catalog(store).index.rebuild()] == [name] and Catalog(store).newest_good().name == name


def test_a_catalog_that_is_gone_hides_nothing(tmp_path):
    store = ObjectStore(f"memory://{tmp_path.name}-gone")
    old = make(store, 8)
    store.remove(CATALOG)
    assert names(Catalog(store)) == [old], "the bucket is listed"
    new = make(store, 9)
    assert names(Catalog(store)) == [new, old] and old in store.read(CATALOG).decode()


def test_writers_of_one_catalog_lose_none_of_their_names(tmp_path):
    store = ObjectStore(f"memory://{tmp_path.name}-many")
    wanted = [checkpoint_name(n, f"w{w}") for w in range(4) for n in range(10)]

    def write(w):
        for name in wanted[w * 10 : w * 10 + 10]:
            Catalog(store).begun(name, 2)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert sorted(Catalog(store).index.names()) == sorted(wanted)


# -- what is damaged


def test_a_quarantined_one_is_not_loaded_and_not_deleted(store, events):
    old, new = make(store, 1), make(store, 2)
    catalog = Catalog(store)
    assert catalog.quarantine(new, "looks odd") and catalog.quarantine(new, "later")
    for each in (catalog, Catalog(store)):
        assert each.newest_good(events.append).name == old
        found = each.newest_first()[0]
        assert (found.name, found.status, found.quarantine["reason"]) == (new, "quarantined", "looks odd")
        with pytest.raises(BadCheckpoint, match="looks odd"):
            each.open(new)
    assert Reader(store, new).verify() == [] and events == []
    assert catalog.open(old).name == old


def test_a_bad_manifest_is_told_once_and_the_next_older_is_taken(folder, events):
    made = [make(folder, step) for step in (1, 2, 3)]
    flip(folder.path / made[2] / MANIFEST, 70)
    (folder.path / made[1] / MANIFEST).write_bytes(b"")
    assert Catalog(folder).newest_good(events.append).name == made[0]
    assert [(e["type"], e["checkpoint"]) for e in events] == [("checkpoint_quarantined", n) for n in (made[2], made[1])]
    assert "torn or damaged" in events[0]["reason"]
    assert Catalog(folder).newest_good(events.append).name == made[0] and len(events) == 2


def test_what_was_removed_is_not_quarantined(folder, events):
    """Or an empty folder would come back."""
    made = [make(folder, step) for step in (1, 2)]
    shutil.rmtree(folder.path / made[1])
    assert not Catalog(folder).judge(made[1], "is missing", events.append)
    assert not (folder.path / made[1]).exists() and events == []


def spoil(store, name, rank=0, at=3):
    data = bytearray(store.read(f"{name}/{file_name(rank)}"))
    data[at] ^= 1
    store.write(f"{name}/{file_name(rank)}", bytes(data))


def test_damage_that_a_loader_finds_makes_it_fall_back(store, events):
    made = [make(store, step) for step in (1, 2)]
    for name in made:
        spoil(store, name)
    catalog = Catalog(store)
    assert not catalog.judge(made[1], f"{made[1]}/rank-000000.bin: ...", events.append)
    assert catalog.newest_good().name == made[0]
    assert not catalog.judge(made[0], "too", events.append) and catalog.newest_good() is None
    assert [e["checkpoint"] for e in events] == made[::-1] and Catalog(store).newest_good() is None
    assert {e["type"] for e in events} == {"checkpoint_quarantined"}


def test_what_cannot_be_read_is_not_damaged(folder, events, tmp_path):
    """A mount that is away takes no checkpoint with it: nothing is condemned, and all is well when it is back."""
    made = [make(folder, step) for step in (1, 2, 3)]
    for name in made:
        os.rename(folder.path / name / file_name(1), tmp_path / name)
    catalog = Catalog(folder)
    for name in reversed(made):
        with pytest.raises(Unreadable, match="is missing"):
            Reader(folder, name).file(1)
        assert not catalog.judge(name, f"{name}/{file_name(1)}: is missing", events.append)
    assert catalog.newest_good() is None, "not again by this process"
    assert [e["type"] for e in events] == ["checkpoint_unreadable"] * 3
    assert Catalog(folder).retain(1, on_event=events.append) == []
    for name in made:
        os.rename(tmp_path / name, folder.path / name / file_name(1))
    assert names(Catalog(folder)) == made[::-1] and Catalog(folder).newest_good().name == made[2]
    assert Catalog(folder).scrub() == {name: [] for name in made}


def rewrite(store, name, change):
    """The manifest, as another version of this program would write it."""
    body = json.loads(store.read(f"{name}/{MANIFEST}").partition(b"\n")[2])
    change(body)
    data = json.dumps(body).encode()
    store.write(f"{name}/{MANIFEST}", root_of(data).encode() + b"\n" + data)


def test_a_newer_minor_version_may_say_more_of_a_tensor(folder):
    name = make(folder, 1)
    before = Reader(folder, name).manifest
    rewrite(folder, name, lambda body: [row.insert(-1, "more") for row in body["entries"]])
    assert Reader(folder, name).manifest == before
    rewrite(folder, name, lambda body: [row.__delitem__(slice(3, -1)) for row in body["entries"]])
    assert Reader(folder, name).manifest == before, "and one that says less is read as ever"


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(entries=[{"name": "w"}]),
        lambda body: body.pop("layout"),
        lambda body: body["entries"][0].__setitem__(-1, "float5"),
        lambda body: body.update(entries=7),
    ],
    ids=["other entries", "no layout", "another type", "no entries"],
)
def test_an_intact_manifest_that_is_not_understood_is_not_condemned(folder, events, change):
    """Or a run of an older version would put all checkpoints into quarantine, one after the other."""
    names = [make(folder, step) for step in (1, 2)]
    for name in names:
        rewrite(folder, name, change)
    catalog = Catalog(folder)
    assert catalog.newest_good(events.append) is None
    assert [event["type"] for event in events] == ["checkpoint_unreadable"] * 2
    assert "is not damaged, but this version of Phalanx cannot read it" in events[0]["reason"]
    assert [found.status for found in catalog.all()] == ["good"] * 2


def test_a_failing_disk_is_not_damage(folder, events, monkeypatch):
    name = make(folder, 1)

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Folder, "read_into", fail)
    ((_, wrong),) = Catalog(folder).verify(Catalog(folder).good())
    assert wrong and not any(fault.damage for fault in wrong) and "Input/output error" in wrong[0].text
    assert not Catalog(folder).judge(name, "EIO", events.append) and events[0]["type"] == "checkpoint_unreadable"
    assert names(Catalog(folder)) == [name]


@pytest.mark.real_second_reader
def test_only_what_a_second_process_finds_damaged_too_is_condemned(folder, events):
    deceived, damaged = make(folder, 1), make(folder, 2)
    flip(folder.path / damaged / file_name(0), 10)
    catalog = Catalog(folder)
    said = "chunk 0, bytes 0 to 9 have the xxh3 aa instead of bb"
    assert not catalog.judge(damaged, f"{damaged}/{file_name(0)}: {said}", events.append)
    assert [e["type"] for e in events] == ["checkpoint_quarantined"] and "xxh3" in events[0]["reason"]
    assert catalog.judge(deceived, f"{deceived}/{file_name(0)}: {said}", events.append), "it is tried again"
    assert not catalog.judge(deceived, f"{deceived}/{file_name(0)}: {said}", events.append), "and not for ever"
    assert events[1]["type"] == "checkpoint_unreadable" and names(Catalog(folder)) == [deceived]
    # It reads the files that are named, and no others.
    assert second.look(folder, damaged, f"{damaged}/{file_name(1)}") == []


@pytest.mark.real_second_reader
def test_a_second_reader_that_hangs_condemns_nothing(folder, events, monkeypatch):
    """Else a mount that does not answer holds up `--resume auto` for ever."""
    name = make(folder, 1)
    (folder.path / name / file_name(0)).unlink()
    os.mkfifo(folder.path / name / file_name(0))  # who opens it waits for a writer
    monkeypatch.setattr(second, "QUIET_S", 0.5)
    assert not Catalog(folder).judge(name, f"{name}/{file_name(0)}: no bytes", events.append)
    assert [e["type"] for e in events] == ["checkpoint_unreadable"] and "nothing was read for" in events[0]["reason"]
    assert names(Catalog(folder)) == [name]


def test_a_lock_that_is_never_let_go_is_named(folder, monkeypatch):
    folder.path.mkdir(exist_ok=True)
    monkeypatch.setattr("phalanx.core.store.LOCK_S", 0.05)
    held = os.open(folder.path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(TimeoutError, match=f"{folder.path}: another process has held its lock.*lsof"):
        folder.replace("owner.json", b"mine", "")
    os.close(held)
    folder.replace("owner.json", b"mine", "")


def test_a_checkpoint_is_released_when_all_its_bytes_are_right(store):
    good, bad = make(store, 1), make(store, 2)
    spoil(store, bad)
    catalog = Catalog(store)
    for name in (good, bad):
        catalog.quarantine(name, "looked odd")
    assert catalog.release(good) == [] and catalog.release(bad)[0].damage
    assert names(Catalog(store)) == [good] and names(Catalog(store), "quarantined") == [bad]


def test_a_later_generation_goes_before_a_higher_step(store):
    """A writer that was fenced off may add a checkpoint late: what has gone on without it is not undone."""
    first = make(store, 40, "aa", generation=2, lineage="0badcafe")
    went_on = make(store, 50, "bb", generation=3, lineage="0badcafe")
    stale = make(store, 60, "cc", generation=2, lineage="0badcafe")
    assert names(Catalog(store)) == [went_on, stale, first]
    assert Catalog(store).newest_good().name == went_on
    assert Catalog(store).retain(1, lineage="0badcafe") == [stale, first]


def test_a_manifest_under_the_name_of_another_generation_is_refused(folder):
    name = make(folder, 40, "aa", generation=2, lineage="0badcafe")
    os.rename(folder.path / name, folder.path / name.replace("g0002", "g0009"))
    with pytest.raises(BadCheckpoint, match="is that of"):
        Reader(folder, name.replace("g0002", "g0009"))


def test_retention_stays_inside_its_lineage(store):
    theirs = [make(store, step, generation=1, lineage="aaaaaaaa") for step in (1, 2, 3)]
    mine = [make(store, step, generation=1, lineage="bbbbbbbb") for step in (10, 20, 30)]
    imported = make(store, 5)
    assert sorted(Catalog(store).retain(1, lineage="bbbbbbbb")) == mine[:2]
    assert sorted(names(Catalog(store))) == sorted([*theirs, mine[2], imported])


def test_what_cannot_be_written_down_is_still_not_loaded_again(folder, events, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("read-only")

    made = [make(folder, step) for step in (1, 2)]
    spoil(folder, made[1])
    monkeypatch.setattr(Folder, "write", refuse)
    catalog = Catalog(folder)
    assert not catalog.judge(made[1], "damage", events.append) and catalog.newest_good().name == made[0]
    assert catalog.newest_good().name == made[0] and "could not be written down" in events[0]["reason"]


def test_a_scrub_quarantines_what_is_damaged_and_nothing_else(folder, events):
    made = [make(folder, step) for step in (1, 2, 3, 4)]
    flip(folder.path / made[0] / file_name(1), 10)
    os.truncate(folder.path / made[1] / file_name(0), 100)
    flip(folder.path / made[2] / MANIFEST, 100)
    progress = []
    report = Catalog(folder).scrub(lambda *p: progress.append(p), events.append)
    assert {name: bool(wrong) for name, wrong in report.items()} == {n: n != made[3] for n in made}
    assert f"{made[0]}/{file_name(1)}" in report[made[0]][0].text and "xxh3" in report[made[0]][0].text
    assert names(Catalog(folder)) == [made[3]] and len(events) == 3
    assert progress[0][0] == 0 < progress[-1][0] <= progress[-1][1]
    assert Catalog(folder).scrub() == {made[3]: []}


def test_a_checkpoint_that_is_removed_during_a_scrub_does_not_come_back(folder, events):
    made = [make(folder, step) for step in (1, 2)]

    def on_progress(done, total):
        shutil.rmtree(folder.path / made[0], ignore_errors=True)

    assert Catalog(folder).scrub(on_progress, events.append) == {made[1]: []}
    assert not (folder.path / made[0]).exists() and events == []


# -- what may go


def test_retention_keeps_the_newest_and_the_multiples(store):
    made = {step: make(store, step) for step in (10, 15, 20, 25, 30, 35)}
    assert Catalog(store).retain(2, 20) == [made[25], made[15], made[10]]
    assert names(Catalog(store)) == [made[35], made[30], made[20]]
    assert all(Reader(store, name).verify() == [] for name in names(Catalog(store)))
    assert Catalog(store).retain(2, 20) == []
    assert Catalog(store).retain(1) == [made[30], made[20]]
    for gone in (10, 30):
        for file in (MANIFEST, file_name(0), file_name(1)):
            with pytest.raises(FileNotFoundError):
                store.size(f"{made[gone]}/{file}")
    if isinstance(store, Folder):
        assert [p.name for p in store.path.iterdir()] == [made[35]]


def test_a_quarantined_one_is_never_deleted(store):
    made = [make(store, step) for step in (1, 2, 3)]
    Catalog(store).quarantine(made[0], "odd")
    for _ in range(3):
        Catalog(store).retain(1)
    assert names(Catalog(store)) == [made[2]] and names(Catalog(store), "quarantined") == [made[0]]
    assert Reader(store, made[0]).verify() == []


def test_a_quarantined_one_whose_manifest_was_moved_away_is_not_deleted_either(folder):
    names = [make(folder, step) for step in (1, 2)]
    Catalog(folder).quarantine(names[0], "odd")
    (folder.path / names[0] / MANIFEST).unlink()
    age(folder.path / names[0])
    assert Catalog(folder).retain(1) == [] and (folder.path / names[0] / file_name(0)).exists()


def test_leftovers_of_a_crash_go_and_what_may_be_under_way_stays(folder):
    left, fresh = make(folder, 1), make(folder, 2)
    good = make(folder, 3)
    under_way = make(folder, 4)
    for name in (left, fresh, under_way):
        (folder.path / name / MANIFEST).unlink()
    age(folder.path / left)
    age(folder.path / under_way)
    age(folder.path / fresh)
    os.utime(folder.path / fresh / file_name(1))  # somebody writes to it
    assert Catalog(folder).retain(1) == [left]
    assert {p.name for p in folder.path.iterdir()} == {fresh, good, under_way}


def test_leftovers_in_a_bucket_are_known_by_the_catalog(tmp_path):
    store = ObjectStore(f"memory://{tmp_path.name}-left")
    left, _ = make(store, 1), make(store, 2)
    store.remove(f"{left}/{MANIFEST}")
    assert Catalog(store).retain(1) == []
    known = json.loads(store.read(CATALOG))
    known["checkpoints"][left]["since"] = WEEK_AGO
    store.write(CATALOG, json.dumps(known).encode())
    assert Catalog(store).retain(1) == [left] and left not in store.read(CATALOG).decode()
    with pytest.raises(FileNotFoundError):
        store.size(f"{left}/{file_name(0)}")


@pytest.mark.parametrize("stop", ["sync_folder", "shutil.rmtree"])
def test_a_crash_in_a_removal_leaves_no_half_checkpoint(folder, monkeypatch, stop):
    """It is gone or it is whole, and the next retention removes what is left."""

    class Crash(BaseException):
        pass

    def crash(*_):
        raise Crash

    old, new = make(folder, 1), make(folder, 2)
    with monkeypatch.context() as patched:
        patched.setattr(f"phalanx.checkpoint.catalog.{stop}", crash)
        with pytest.raises(Crash):
            Catalog(folder).retain(1)
    assert names(Catalog(folder)) == [new] and (folder.path / old).exists()
    age(folder.path / old)
    assert Catalog(folder).retain(1) == [old] and not (folder.path / old).exists()


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda path: flip(path / MANIFEST, 70), "damaged"),
        (lambda path: (path / file_name(1)).unlink(), "No such file"),
        (lambda path: (path / file_name(1)).write_bytes((path / file_name(1)).read_bytes()[:-1]), "bytes instead of"),
    ],
)
@pytest.mark.parametrize("which", [1, 2])
def test_nothing_is_removed_before_the_newest_are_seen_to_be_whole(folder, events, damage, said, which):
    made = [make(folder, step) for step in (1, 2, 3)]
    damage(folder.path / made[which])
    assert Catalog(folder).retain(2, on_event=events.append) == []
    assert [(e["type"], e["checkpoint"]) for e in events] == [("retention_refused", made[which])]
    assert said in events[0]["reason"] and Reader(folder, made[0]).verify() == []


def test_a_link_to_a_checkpoint_elsewhere_is_left_alone(folder, tmp_path, events):
    elsewhere = Folder(tmp_path / "elsewhere")
    linked = make(elsewhere, 1)
    make(folder, 2)
    (folder.path / linked).symlink_to(elsewhere.path / linked)
    assert Catalog(folder).retain(1, on_event=events.append) == []
    assert Reader(elsewhere, linked).verify() == [] and events[0]["type"] == "checkpoint_not_removed"


def is_whole(store, name):
    try:
        return not Reader(store, name).verify()
    except (BadCheckpoint, FileNotFoundError):
        return False


OPERATIONS = st.one_of(
    st.tuples(st.just("commit"), st.integers(0, 4)),
    st.tuples(st.just("crash"), st.integers(0, 4)),
    st.tuples(st.sampled_from(["quarantine", "manifest", "cut", "missing"]), st.integers(0, 9)),
    st.tuples(st.just("retain"), st.integers(1, 3), st.sampled_from([0, 2, 3, 5])),
    st.tuples(st.sampled_from(["scrub", "load"]), st.just(0)),
)


@settings(max_examples=150)
@given(st.lists(OPERATIONS, min_size=3, max_size=25))
def test_retention_never_removes_the_last_good_one(operations):
    with tempfile.TemporaryDirectory(dir=SHM) as temporary:
        store, step = Folder(Path(temporary) / "c"), 0
        store.path.mkdir()
        for number, (kind, value, *more) in enumerate(operations):
            catalog = Catalog(store)
            everything = catalog.all()
            if kind in ("commit", "crash"):
                step += value
                name = make(store, step, f"m{number}", rows=3)
                if kind == "crash":
                    (store.path / name / MANIFEST).unlink()
                    age(store.path / name)
            elif kind == "scrub":
                catalog.scrub()
            elif kind == "load":
                catalog.newest_good()
            elif kind == "retain":
                retain(store, catalog, value, more[0])
            elif everything:
                damage(store, catalog, everything[value % len(everything)].name, kind)


def retain(store, catalog, keep_last, keep_every):
    good = {f.name: f.step for f in catalog.good() if is_whole(store, f.name)}
    before = {f.name: f.status for f in catalog.all()}
    removed = set(catalog.retain(keep_last, keep_every))
    left = {name for name in good if is_whole(store, name)}
    assert left == set(good) - removed
    assert bool(left) == bool(good)
    newest = sorted(good, key=lambda name: good[name])[-keep_last:]
    assert len(left) >= min(len(good), keep_last) and {good[n] for n in newest} <= {good[n] for n in left}
    assert not keep_every or {name for name, step in good.items() if step % keep_every == 0} <= left
    assert {f.name for f in catalog.all()} == set(before) - removed


def damage(store, catalog, name, kind):
    if kind == "quarantine":
        catalog.quarantine(name, "odd")
        return
    path = store.path / name / (MANIFEST if kind == "manifest" else file_name(1))
    if path.exists():
        if kind == "missing":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1])


def test_in_a_real_bucket(monkeypatch, events):
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with s3.server() as url:
        s3.make_bucket(url, "checkpoints")
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.SECRET)
        store = open_store("s3://checkpoints/run")
        made = [make(store, step) for step in (1, 2, 3, 4)]
        proxy = s3.Proxy(url)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        try:
            watched = open_store("s3://checkpoints/run")
            catalog = Catalog(watched)
            assert catalog.newest_good().name == made[3]
            data = watched.read(f"{made[3]}/{file_name(1)}")
            watched.write(f"{made[3]}/{file_name(1)}", bytes([data[0] ^ 1]) + data[1:])
            assert [bool(wrong) for wrong in catalog.scrub(on_event=events.append).values()] == [True, *[False] * 3]
            assert catalog.newest_good().name == made[2] and len(events) == 1
            assert catalog.retain(2) == [made[0]] and catalog.retain(2) == []
            assert names(Catalog(watched)) == [made[2], made[1]] and names(Catalog(watched), "quarantined") == [made[3]]
            assert not [path for _, path, _ in proxy.requests if "list-type" in path]
        finally:
            proxy.close()
