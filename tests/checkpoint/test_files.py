"""A checkpoint's files under faults: all damage is found and named, and never loaded. A disk that is full or slow, or a
bucket that answers badly, costs a checkpoint and not the run."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.checkpoint import files
from phalanx.checkpoint.catalog import QUARANTINED, Catalog
from phalanx.checkpoint.files import Reader
from phalanx.core.checkpoint import MANIFEST, BadCheckpoint, file_name
from phalanx.core.errors import UserError
from phalanx.core.store import Folder, ObjectStore, open_store
from tests.checkpoint import faults
from tests.data import s3

ENTRIES = faults.entries_of()
OLD, NEW = 7, 8
SHARD = file_name(1)


@pytest.fixture
def events():
    return []


# -- damage


def truncate(path, by):
    os.truncate(path, path.stat().st_size - by)


def swap_data(new, old):
    """Put the other step's data before its own tail."""
    own = faults.plans_of(ENTRIES)[1].own_bytes
    data = (old / SHARD).read_bytes()[:own] + (new / SHARD).read_bytes()[own:]
    (new / SHARD).write_bytes(data)


def swap_ranks(new, old):
    a, b = (new / file_name(rank) for rank in (0, 1))
    a.rename(new / "x")
    b.rename(a)
    (new / "x").rename(b)


HASH = r"have the xxh3 [0-9a-f]{32} instead of [0-9a-f]{32}"
ROOT = r"its tail has the blake3 [0-9a-f]{16}… instead of [0-9a-f]{16}…"
SIZE = r"has \d+ bytes or fewer instead of \d+"
# How the newer checkpoint is damaged, the file that is named, and the reason that is given.
DAMAGE = {
    "a flipped byte": (lambda new, old: faults.flip(new / SHARD, 5), SHARD, f"chunk 0, bytes 0 to 4096 {HASH}"),
    "a flipped byte of the tail": (lambda new, old: faults.flip(new / SHARD, -1 % 4200), SHARD, ROOT),
    "truncated": (lambda new, old: truncate(new / SHARD, 9), SHARD, SIZE),
    "truncated to half": (lambda new, old: truncate(new / SHARD, 3000), SHARD, SIZE),
    "empty": (lambda new, old: (new / SHARD).write_bytes(b""), SHARD, SIZE),
    "of another step": (lambda new, old: shutil.copy(old / SHARD, new / SHARD), SHARD, ROOT),
    "data of another step": (swap_data, SHARD, f"chunk 0, bytes 0 to 4096 {HASH}"),
    "of another rank": (swap_ranks, "rank-00000[01].bin", ROOT),
    "twice the same rank": (lambda new, old: shutil.copy(new / file_name(0), new / SHARD), SHARD, ROOT),
    "missing": (lambda new, old: (new / SHARD).unlink(), SHARD, "is missing"),
    "torn manifest": (lambda new, old: truncate(new / MANIFEST, 40), MANIFEST, "is torn or damaged"),
    "empty manifest": (lambda new, old: (new / MANIFEST).write_bytes(b""), MANIFEST, "is torn or damaged"),
    "flipped manifest": (lambda new, old: faults.flip(new / MANIFEST, 200), MANIFEST, "is torn or damaged"),
    "flipped hash": (lambda new, old: faults.flip(new / MANIFEST, 3), MANIFEST, "is torn or damaged"),
    "another's manifest": (lambda new, old: shutil.copy(old / MANIFEST, new / MANIFEST), MANIFEST, "is that of step-"),
}


@pytest.mark.parametrize("name", list(DAMAGE))
def test_damage_is_named_and_the_older_checkpoint_is_loaded(tmp_path, events, name):
    store = Folder(tmp_path)
    old, new = (faults.make(store, step, ENTRIES) for step in (OLD, NEW))
    damage, file, said = DAMAGE[name]
    damage(tmp_path / new, tmp_path / old)
    there = sorted(p.name for p in (tmp_path / new).iterdir())
    got = faults.load_newest(Catalog(store), events.append)
    assert got == (old, faults.state_of(ENTRIES, OLD))
    (event,) = events
    condemned = name != "missing"  # it may come back
    kind = "checkpoint_quarantined" if condemned else "checkpoint_unreadable"
    assert (event["type"], event["checkpoint"]) == (kind, new)
    assert re.search(f"{new}/{file}: {said}", event["reason"]), event["reason"]
    left = [*there, QUARANTINED] if condemned else there
    assert sorted(p.name for p in (tmp_path / new).iterdir()) == sorted(left), "nothing is deleted"
    # A condemned checkpoint is not tried again, and reading every byte of it finds the same.
    assert faults.load_newest(Catalog(store), events.append) == got and len(events) == 1 + (not condemned)
    assert [bool(wrong) for _, wrong in Catalog(store).verify(Catalog(store).newest_first())] == [True, False]


def test_a_file_that_nobody_asked_for_does_no_harm(tmp_path, events):
    store = Folder(tmp_path)
    name = faults.make(store, NEW, ENTRIES)
    shutil.copy(tmp_path / name / SHARD, tmp_path / name / file_name(2))
    shutil.copy(tmp_path / name / SHARD, tmp_path / name / f"{SHARD}.copy")
    assert faults.load_newest(Catalog(store), events.append) == (name, faults.state_of(ENTRIES, NEW))
    assert events == [] and Reader(store, name).verify() == []


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Make a checkpoint whose files can each be damaged and restored."""
    root = tmp_path_factory.mktemp("one")
    name = faults.make(Folder(root), NEW, faults.entries_of(rows=70))
    return root, name, {p.name: p.read_bytes() for p in (root / name).iterdir()}


@given(st.data())
@settings(max_examples=150)
def test_no_bit_can_change_unseen(one, data):
    """No bytes can be lost either, or added to a manifest."""
    root, name, whole = one
    file = data.draw(st.sampled_from(sorted(whole)))
    how = data.draw(st.sampled_from(["flip", "cut", "zero"]))
    at = data.draw(st.integers(0, len(whole[file]) - 1))
    path, damaged = root / name / file, bytearray(whole[file])
    if how == "flip":
        damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del damaged[at:]
    else:
        damaged[at:] = bytes(len(damaged) - at)
    try:
        path.write_bytes(damaged)
        wrong = next(iter(Catalog(Folder(root)).verify(Catalog(Folder(root)).newest_first())))[1]
        assert (damaged == whole[file]) == (wrong == [])
        assert all(f"{name}/{file}: " in fault.text for fault in wrong)
        try:
            assert faults.contents(Reader(Folder(root), name)) == faults.state_of(faults.entries_of(rows=70), NEW)
        except BadCheckpoint as error:
            assert f"{name}/{file}: " in str(error)
    finally:
        path.write_bytes(whole[file])


# -- nothing is written twice


@pytest.fixture(params=["folder", "bucket"])
def store(request, tmp_path):
    return Folder(tmp_path / "c") if request.param == "folder" else ObjectStore(f"memory://{tmp_path}")


def test_a_name_is_committed_once(store):
    name = faults.make(store, NEW, ENTRIES)
    before = store.read(f"{name}/{MANIFEST}")
    other = faults.manifest_of(ENTRIES, NEW, cursor=99)
    with pytest.raises(FileExistsError):
        files.commit(store, other)
    assert store.read(f"{name}/{MANIFEST}") == before
    if store.is_local:
        assert sorted(p.name for p in (store.path / name).iterdir()) == [MANIFEST, file_name(0), file_name(1)]


def test_of_two_that_commit_at_once_one_does(store):
    files.make_folder(store, faults.manifest_of(ENTRIES, NEW).name)
    results, start = [], threading.Barrier(8)

    def commit(cursor):
        start.wait()
        try:
            files.commit(store, faults.manifest_of(ENTRIES, NEW, cursor=cursor))
            results.append(cursor)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=commit, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = results
    assert files.read_manifest(store, faults.manifest_of(ENTRIES, NEW).name).cursor == winner


def test_a_rank_file_is_not_written_over(tmp_path):
    name = faults.make(Folder(tmp_path), NEW, ENTRIES)
    before = (tmp_path / name / SHARD).read_bytes()
    with pytest.raises(FileExistsError):
        files.write_file(Folder(tmp_path), f"{name}/{SHARD}", memoryview(bytes(4096)), b"tail")
    assert (tmp_path / name / SHARD).read_bytes() == before


# -- a disk that is full, slow, or not to be written to


def save(keeper, step, entries=ENTRIES):
    """Save as the launcher has it done, and return the messages that came of it."""
    seen = len(keeper.channel.sent)
    faults.adopt(keeper, entries, step)
    for rank, held in keeper.ranks.items():
        keeper._drain(rank, held.slots[0])
    said = keeper.channel.sent[seen:]
    if len([m for m in said if m["type"] == "shard"]) == len(keeper.ranks):
        keeper._commit(faults.order_of(said, step))
    return keeper.channel.sent[seen:]


def kinds(messages):
    return [m["type"] for m in messages if m["type"] != "checkpoints_removed"]


@pytest.fixture
def disk(tmp_path):
    with faults.small_disk(tmp_path / "disk", size_kb=512) as path:
        if path is None:
            pytest.skip("no file system can be mounted here")
        yield path


def test_a_full_disk_costs_that_checkpoint_only(disk):
    entries = faults.entries_of(rows=300)  # 3 pages a rank
    with faults.a_keeper(disk, keep=(1, 0)) as keeper:
        assert kinds(save(keeper, OLD, entries)) == ["shard", "shard", "committed"]
        filler = faults.fill_disk(disk, leave_bytes=6 * 4096)  # enough for one of the two
        said = save(keeper, NEW, entries)
        assert "checkpoint_failed" in kinds(said) and "committed" not in kinds(said)
        failed = next(m for m in said if m["type"] == "checkpoint_failed")
        assert "No space left on device" in failed["reason"] and str(disk) in failed["reason"]
        assert failed["checkpoint"] == f"step-{NEW:09d}-aa"
        written = {f"rank-{m['rank']:06d}.bin" for m in said if m["type"] == "shard"}
        assert {p.name for p in (disk / failed["checkpoint"]).iterdir()} == written, "what is half is removed"
        assert faults.load_newest(Catalog(keeper.store)) == (f"step-{OLD:09d}-aa", faults.state_of(entries, OLD))
        filler.unlink()
        assert "committed" in kinds(save(keeper, NEW + 1, entries))
        assert faults.load_newest(Catalog(keeper.store))[1] == faults.state_of(entries, NEW + 1)


def test_a_half_file_that_could_not_be_removed_does_not_stay(tmp_path, monkeypatch):
    """The disk fails in the middle of a file and then refuses writes for a while. Afterwards the file is written
    anew."""

    def half(path, own, tail):
        path.write_bytes(own[:100])
        raise OSError(errno.EIO, "Input/output error")

    def refused(name):
        raise OSError(errno.EROFS, "Read-only file system")

    with faults.a_keeper(tmp_path) as keeper:
        with monkeypatch.context() as broken:
            broken.setattr(files, "_write_local", half)
            broken.setattr(keeper.store, "remove", refused)
            for _ in range(2):
                assert kinds(save(keeper, NEW)) == ["checkpoint_failed"] * 2
        assert kinds(save(keeper, NEW)) == ["shard", "shard", "committed"]
        assert faults.load_newest(Catalog(keeper.store))[1] == faults.state_of(ENTRIES, NEW)


def test_a_disk_that_is_full_at_the_commit(disk):
    with faults.a_keeper(disk) as keeper:
        save(keeper, OLD)
        faults.adopt(keeper, ENTRIES, NEW)
        for rank, held in keeper.ranks.items():
            keeper._drain(rank, held.slots[0])
        faults.fill_disk(disk)
        keeper._commit(faults.order_of(keeper.channel.of("shard")[2:], NEW))
        (failed,) = keeper.channel.of("checkpoint_failed")
        assert "could not be committed" in failed["reason"] and "No space left" in failed["reason"]
        assert faults.load_newest(Catalog(keeper.store))[0] == f"step-{OLD:09d}-aa"
        left = {p.name for p in (disk / f"step-{NEW:09d}-aa").iterdir()}
        assert left == {file_name(0), file_name(1)}, "no half manifest stays"


def test_a_slow_disk_holds_up_nobody_who_trains(tmp_path, monkeypatch):
    """While the slow disk writes one snapshot, the rank fills the other slot."""
    real, disk = os.pwrite, threading.Event()

    def slow(*args):
        disk.wait(600)
        return real(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    plans = faults.plans_of(ENTRIES)
    with faults.a_keeper(tmp_path, serve=True) as keeper:
        lines = faults.lines_to(keeper, ENTRIES)
        for rank, line in enumerate(lines):
            faults.fill(line.slots[0], ENTRIES, plans[rank], rank, NEW)
            line.done(0, True, faults.about(NEW))
        for rank, line in enumerate(lines):
            line.wait_free(1)
            faults.fill(line.slots[1], ENTRIES, plans[rank], rank, NEW + 1)
            line.done(1, False, faults.about(NEW))
            line.wait_free(1)  # this one is not written
        assert not keeper.channel.of("shard")
        assert all(0 in line.busy for line in lines)
        disk.set()
        for line in lines:
            line.wait_free(0)
        assert len(keeper.channel.of("shard")) == 2
        for line in lines:
            line.close()


def test_a_folder_that_may_not_be_written_to_is_refused(tmp_path):
    with faults.small_disk(tmp_path / "disk", read_only=True) as path:
        if path is None:
            if os.getuid() == 0:
                pytest.skip("root may write anywhere")
            path = tmp_path / "disk"
            path.chmod(0o555)
        refused = pytest.raises(UserError, match=r"checkpoint\.dir = .*no checkpoint can be written there")
        with faults.a_keeper(path / "checkpoints", serve=True) as keeper, refused:
            faults.lines_to(keeper, ENTRIES)


# -- a bucket


@pytest.fixture(scope="module")
def server():
    with s3.server() as url:
        s3.make_bucket(url, "checkpoints")
        yield url


class Proxy(s3.Proxy):
    """Can also lose the answer to a request that was carried out: "lost"."""

    def _answer(self, request, status, headers, data, said=None):
        if self.lose(request):
            request.close_connection = True
            request.connection.shutdown(socket.SHUT_RDWR)
            return
        super()._answer(request, status, headers, data, said)

    def lose(self, request):
        return False


@pytest.fixture
def bucket(server, monkeypatch, tmp_path):
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.SECRET)
    proxy = Proxy(server)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    try:
        yield f"s3://checkpoints/{tmp_path.name}", proxy
    finally:
        proxy.close()


@pytest.mark.parametrize("fault", ["503", "drop"])
def test_a_bucket_that_fails_now_and_then_is_asked_again(bucket, fault):
    """A save and a load go through it while the first request of every kind fails."""
    url, proxy = bucket
    with faults.a_keeper(url) as keeper:
        assert kinds(save(keeper, OLD)) == ["shard", "shard", "committed"]
        conditional = f"{NEW:09d}-aa/{MANIFEST}"  # see the next test
        proxy.requests.clear()
        proxy.fault = lambda method, path, nth: fault if nth == 1 and conditional not in path else None
        assert kinds(save(keeper, NEW)) == ["shard", "shard", "committed"]
    proxy.requests.clear()
    proxy.fault = lambda method, path, nth: fault if nth == 1 else None
    got = faults.load_newest(Catalog(open_store(url)))
    assert got == (f"step-{NEW:09d}-aa", faults.state_of(ENTRIES, NEW))
    assert {nth for (_, path, _), nth in proxy.requests.items() if ".bin" in path} == {2}


@pytest.mark.parametrize("fault", ["503", "drop", "lost"])
def test_the_commit_is_made_or_not_made_whatever_is_answered(bucket, fault):
    """The keeper reports what a reader sees."""
    url, proxy = bucket
    manifest = f"{NEW:09d}-aa/{MANIFEST}"
    with faults.a_keeper(url) as keeper:
        save(keeper, OLD)
        if fault == "lost":
            lost = []
            proxy.lose = lambda r: r.command == "PUT" and manifest in r.path and not lost and not lost.append(1)
        else:
            proxy.fault = lambda method, path, nth: fault if method == "PUT" and manifest in path and nth == 1 else None
        said = kinds(save(keeper, NEW))
    assert said in (["shard", "shard", "committed"], ["shard", "shard", "checkpoint_failed"])
    got = faults.load_newest(Catalog(open_store(url)))
    step = NEW if "committed" in said else OLD
    assert got == (f"step-{step:09d}-aa", faults.state_of(ENTRIES, step))


def test_a_bucket_that_refuses_costs_that_checkpoint_only(bucket):
    url, proxy = bucket
    with faults.a_keeper(url) as keeper:
        save(keeper, OLD)
        proxy.fault = lambda method, path, nth: "403" if method == "PUT" and SHARD in path else None
        said = save(keeper, NEW)
        assert kinds(said) == ["shard", "checkpoint_failed"]
        assert f"step-{NEW:09d}-aa/{SHARD}" in said[1]["reason"] and url in said[1]["reason"]
        proxy.fault = lambda *_: None
        catalog = Catalog(open_store(url))
        assert faults.load_newest(catalog)[0] == f"step-{OLD:09d}-aa"
        assert [f.status for f in catalog.all()] == ["incomplete", "good"], "what was begun can be found and removed"
        assert kinds(save(keeper, NEW + 1)) == ["shard", "shard", "committed"]


def test_a_bucket_commits_a_name_once(bucket):
    url, _ = bucket
    store = open_store(url)
    name = faults.make(store, NEW, ENTRIES)
    with pytest.raises(FileExistsError):
        files.commit(store, faults.manifest_of(ENTRIES, NEW, cursor=99))
    assert files.read_manifest(store, name).cursor == 0


@pytest.mark.parametrize("fault", ["flip", "truncate", "short"])
def test_what_arrives_from_a_bucket_damaged_is_not_used(bucket, fault):
    """One damaged answer cannot be told from damaged data, so both are refused."""
    url, proxy = bucket
    store = open_store(url)
    name = faults.make(store, NEW, ENTRIES)
    proxy.requests.clear()
    proxy.fault = lambda method, path, nth: fault if method == "GET" and SHARD in path and nth == 1 else None
    if fault == "truncate":  # that is noticed at once, and the request is repeated
        assert faults.contents(Reader(store, name)) == faults.state_of(ENTRIES, NEW)
        return
    with pytest.raises(BadCheckpoint, match=SHARD):
        faults.contents(Reader(store, name))
    proxy.fault = lambda *_: None
    assert faults.contents(Reader(store, name)) == faults.state_of(ENTRIES, NEW)


def test_files_are_where_they_are_said_to_be(tmp_path):
    """The names that other tests damage are the real ones."""
    name = faults.make(Folder(tmp_path), NEW, ENTRIES)
    assert {p.name for p in Path(tmp_path / name).iterdir()} == {MANIFEST, file_name(0), SHARD}
