"""A data set depends on its inputs alone: not on the number of workers, nor on how often it was killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.core import lease
from phalanx.core import store as stores
from phalanx.core.errors import RunFailed, UserError
from phalanx.core.manifest import MANIFEST, Field, manifest_name
from phalanx.core.store import Folder, ObjectStore, open_store
from phalanx.data import documents, workers
from phalanx.data.build import BUILDING, _writer, build, write_records
from phalanx.data.fetch import Fetcher, read_manifest
from phalanx.data.target import Target
from phalanx.data.tokenizer import Bytes, make_tokenizer, tokenizer_of
from phalanx.data.verify import verify
from tests.data.sets import make_loader
from tests.data.texts import lines, train_bpe, words, write_all_kinds

SMALL = {"chunk_items": 256, "shard_chunks": 8}  # 4 KiB of byte tokens in a shard


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(documents, "PART_BYTES", 2000)


@pytest.fixture
def texts(tmp_path):
    (tmp_path / "in").mkdir()
    for i in range(6):
        (tmp_path / "in" / f"{i}.jsonl").write_bytes(lines([words(100 * i + k, 60) for k in range(10)]))
    return tmp_path / "in"


def files(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def items(out):
    """Return all items of a data set, verified."""
    store = open_store(str(out))
    manifest, version = read_manifest(store)
    assert verify(store, manifest, version) == []
    fetcher = Fetcher(store, manifest)
    found = []
    for e in range(len(manifest.extents)):
        for s in range(manifest.num_shards(e)):
            for c in range(manifest.num_chunks(e, s)):
                found.append(fetcher.get((e, s, c))[: manifest.chunk_items])
    fetcher.close()
    return np.concatenate(found)


def test_every_document_is_there_and_ends(tmp_path):
    texts = write_all_kinds(tmp_path / "in")
    manifest, version = build([("a", str(tmp_path / "in"))], tmp_path / "out", Bytes(), workers=1, **SMALL)
    want = [i for t in texts * 4 for i in [*t.encode(), 256]]
    assert items(tmp_path / "out").tolist() == want
    assert manifest.extents[0].items == len(want) and len(manifest.roots) > 2
    assert read_manifest(Folder(tmp_path / "out"), version)[1] == version
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted([manifest_name(version), MANIFEST, "shards"])


@pytest.mark.parametrize("max_bytes", [None, 9001])
def test_the_number_of_workers_makes_no_difference(tmp_path, texts, max_bytes):
    tokenizer = make_tokenizer(str(train_bpe(tmp_path / "t.json")))
    (tmp_path / "b.txt").write_text(words(7, 3000))
    inputs = [("a", str(texts)), ("b", str(tmp_path / "b.txt"))]
    made = []
    for count in (1, 2, 3):
        out = tmp_path / f"out{count}"
        build(inputs, out, tokenizer, workers=count, max_bytes=max_bytes, **SMALL)
        made.append(files(out))
    assert made[0] == made[1] == made[2]
    manifest, _ = read_manifest(Folder(tmp_path / "out1"))
    assert manifest.sources == ["a", "b"]
    decoded = tokenizer_of(Folder(tmp_path / "out1"), manifest).decode(items(tmp_path / "out1"))
    whole = "".join(
        t.data.decode()
        for part in documents.plan(inputs, "text", False)
        for t, _ in documents.read(part, "text", False)
    )
    if max_bytes is None:
        assert decoded == whole
    else:
        assert 2 * max_bytes - 8 < len(decoded.encode()) <= 2 * max_bytes


def test_the_size_limit_is_kept(tmp_path):
    (tmp_path / "t").write_bytes(b"a" * 5000)
    manifest, _ = build([("t", str(tmp_path / "t"))], tmp_path / "out", Bytes(), workers=1, max_bytes=1000)
    assert manifest.total_items == 1001


SCRIPT = """
import sys
from phalanx.data import documents
from phalanx.data.build import build
from phalanx.data.tokenizer import Bytes
documents.PART_BYTES = 2000
def slow(progress):
    import time; time.sleep(0.01)
build([("a", sys.argv[1]), ("b", sys.argv[1])], sys.argv[2], Bytes(), workers=int(sys.argv[3]), chunk_items=256,
      shard_chunks=8, append=len(sys.argv) > 4, on_progress=slow)
"""


def start(texts, out, count, *more):
    return subprocess.Popen([sys.executable, "-c", SCRIPT, texts, out, str(count), *more], start_new_session=True)


def children(pid):
    try:
        found = [f.read_text() for f in Path(f"/proc/{pid}/task").glob("*/children")]
    except FileNotFoundError:
        return []
    return [int(p) for p in " ".join(found).split()]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("count", [1, 2])
def test_a_killed_build_goes_on(tmp_path, texts, count):
    inputs = [("a", str(texts)), ("b", str(texts))]
    want, _ = build(inputs, tmp_path / "want", Bytes(), workers=1, **SMALL)
    out, rng, kills, seen = tmp_path / "out", random.Random(count), 0, set()
    state = lambda: next(out.rglob("state.json"), None)  # noqa: E731
    while kills < 4:
        build_process = start(texts, out, count)
        before = state() and state().read_bytes()
        while build_process.poll() is None and ((now := state()) is None or now.read_bytes() == before):
            time.sleep(0.005)  # until another shard is finished
        time.sleep(rng.uniform(0, 0.1))
        workers_of_it = children(build_process.pid)
        build_process.kill()
        if build_process.wait() == 0:
            break
        kills += 1
        seen.add(len(list((out / "shards").glob("*"))))
        until = time.monotonic() + 10
        while any(map(alive, workers_of_it)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(alive, workers_of_it)), "a worker outlives the build"
    assert kills >= 2 and len(seen) >= 2 and not (out / MANIFEST).exists()
    times = {p.name: p.stat().st_mtime_ns for p in (out / "shards").glob("*.shard")}
    assert start(texts, out, count).wait() == 0
    assert sorted(files(out)) == sorted(files(tmp_path / "want"))
    assert files(out) == files(tmp_path / "want")
    redone = [name for name, t in times.items() if (out / "shards" / name).stat().st_mtime_ns != t]
    assert len(redone) <= 1, "finished shards are not done again"
    assert read_manifest(Folder(out))[0].encode() == want.encode()


class Stop(Exception):
    pass


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("max_bytes", [None, 15_001])
def test_a_build_may_be_interrupted_anywhere(tmp_path, texts, count, max_bytes):
    """A callback interrupts it at every place in turn. Each call gets a little further, and none leaves a process
    behind."""
    _, want = build([("a", str(texts))], tmp_path / "want", Bytes(), workers=1, max_bytes=max_bytes, **SMALL)
    calls = 0

    def on_progress(progress):
        nonlocal calls
        calls += 1
        assert progress.done_bytes <= progress.total_bytes
        if calls == 9:
            raise Stop

    before = children(os.getpid())
    for _ in range(30):
        calls = 0
        try:
            options = {"workers": count, "max_bytes": max_bytes, "on_progress": on_progress, **SMALL}
            _, version = build([("a", str(texts))], tmp_path / "out", Bytes(), **options)
            break
        except Stop:
            assert children(os.getpid()) == before
            assert not (tmp_path / "out" / MANIFEST).exists()
    assert version == want and not (tmp_path / "out" / ".staging").exists()
    assert files(tmp_path / "out") == files(tmp_path / "want")


def test_finished_parts_are_not_done_again(tmp_path, texts, monkeypatch):
    done, real = [], workers.tokenize

    def tokenize(job, tokenizer, index, *more):
        if len(done) == 5:
            raise Stop
        done.append(index)
        real(job, tokenizer, index, *more)

    monkeypatch.setattr(workers, "tokenize", tokenize)
    with pytest.raises(Stop):
        build([("a", str(texts))], tmp_path / "out", Bytes(), workers=1, chunk_items=4096)
    first = list(done)
    done[:] = [-1] * 6
    build([("a", str(texts))], tmp_path / "out", Bytes(), workers=1, chunk_items=4096)
    assert first == [0, 1, 2, 3, 4] and done[6] == 5


def test_half_a_part_is_noticed(tmp_path, texts):
    def stop(progress):
        if progress.done_bytes > 6000:
            raise Stop

    _, want = build([("a", str(texts))], tmp_path / "want", Bytes(), workers=1, chunk_items=4096)
    with pytest.raises(Stop):
        build([("a", str(texts))], tmp_path / "out", Bytes(), workers=1, chunk_items=4096, on_progress=stop)
    for n, part in enumerate(sorted((tmp_path / "out").rglob("*.ids"))):
        part.write_bytes(part.read_bytes()[: 100 * n])
    assert build([("a", str(texts))], tmp_path / "out", Bytes(), workers=1, chunk_items=4096)[1] == want


def test_what_a_kill_left_half_moved_is_removed(tmp_path, texts):
    left = [tmp_path / "out" / "shards" / ".a-000-000000.shard.1.1.tmp", tmp_path / "out" / ".manifest.jsonl.1.1.tmp"]
    left[0].parent.mkdir(parents=True)
    for path in left:
        path.write_bytes(b"half")
    build([("a", str(texts))], tmp_path / "out", Bytes(), workers=1, **SMALL)
    assert not [path for path in left if path.exists()]


def test_other_inputs_start_afresh(tmp_path, texts):
    def stop(progress):
        if progress.done_bytes > 6000:
            raise Stop

    with pytest.raises(Stop):
        build([("a", str(texts))], tmp_path / "out", Bytes(), workers=1, on_progress=stop, **SMALL)
    (texts / "0.jsonl").write_bytes(lines(["quite different"]))
    _, version = build([("a", str(texts))], tmp_path / "out", Bytes(), workers=1, **SMALL)
    assert version == build([("a", str(texts))], tmp_path / "want", Bytes(), workers=1, **SMALL)[1]


def test_append_extends_and_changes_nothing(tmp_path, texts):
    out = tmp_path / "out"
    old, old_version = build([("a", str(texts))], out, Bytes(), workers=1, **SMALL)
    before = files(out)
    (tmp_path / "more").write_text(words(5, 900))
    new, version = build([("b", str(tmp_path / "more")), ("a", str(texts))], out, Bytes(), workers=1, append=True)
    after = files(out)
    assert {k: v for k, v in after.items() if k in before and k != MANIFEST} == {
        k: v for k, v in before.items() if k != MANIFEST
    }
    assert new.extends(old) and new.parent == old_version and new.chunk_items == old.chunk_items
    assert [e.source for e in new.extents] == ["a", "b", "a"]
    assert (
        read_manifest(Folder(out))[1] == version and read_manifest(Folder(out), old_version)[0].encode() == old.encode()
    )
    items(out)


def test_append_that_was_killed_at_the_very_end_adds_once(tmp_path, texts, monkeypatch):
    out = tmp_path / "out"
    build([("a", str(texts))], out, Bytes(), workers=1, **SMALL)

    def die(folder):
        raise Stop

    with monkeypatch.context() as m, pytest.raises(Stop):
        m.setattr("phalanx.data.build._remove", die)
        build([("b", str(texts))], out, Bytes(), workers=1, append=True)
    manifest, _ = build([("b", str(texts))], out, Bytes(), workers=1, append=True)
    assert [e.source for e in manifest.extents] == ["a", "b"] and not (out / ".staging").exists()


def test_append_with_something_else_is_refused(tmp_path, texts):
    out, inputs = tmp_path / "out", [("a", str(texts))]
    with pytest.raises(UserError, match="there is no data set"):
        build(inputs, out, Bytes(), workers=1, append=True)
    build(inputs, out, Bytes(), workers=1, **SMALL)
    before = files(out)
    with pytest.raises(UserError, match=r"fields|tokenizer"):
        build(inputs, out, make_tokenizer(str(train_bpe(tmp_path / "t.json"))), workers=1, append=True)
    with pytest.raises(UserError, match="chunk_items is 256, and this would be 128"):
        build(inputs, out, Bytes(), workers=1, append=True, chunk_items=128)
    assert files(out) == before


def test_a_data_set_is_never_overwritten_but_may_be_built_again(tmp_path, texts):
    out, inputs = tmp_path / "out", [("a", str(texts))]
    _, version = build(inputs, out, Bytes(), workers=1, **SMALL)
    before = files(out)
    shard = next((out / "shards").glob("*000001-*.shard"))
    shard.write_bytes(b"damaged")
    assert build(inputs, out, Bytes(), workers=1)[1] == version
    assert files(out) == before  # and it is repaired
    (texts / "5.jsonl").write_bytes(lines(["other"]))
    for inputs in ([("a", str(texts))], [("b", str(texts))]):
        with pytest.raises(UserError, match="--append"):
            build(inputs, out, Bytes(), workers=1)
        assert {k: v for k, v in files(out).items() if ".staging" not in k} == before


def test_a_set_that_grew_under_one_label_is_mended_by_its_commands(tmp_path, texts):
    """Each command is given again, without --append."""
    out = tmp_path / "out"
    (tmp_path / "more").write_text(words(5, 3000))
    inputs = [[("a", str(texts))], [("a", str(tmp_path / "more"))], [("a", str(tmp_path / "more")), ("b", str(texts))]]
    for n, each in enumerate(inputs):
        _, version = build(each, out, Bytes(), workers=1, append=n > 0, **SMALL)
    before = files(out)
    for shard in (out / "shards").iterdir():
        shard.write_bytes(b"damaged")
    for each in inputs:
        assert build(each, out, Bytes(), workers=1)[1] == version
    assert files(out) == before
    (tmp_path / "more").write_text(words(6, 3000))
    with pytest.raises(UserError, match="would differ"):
        build(inputs[1], out, Bytes(), workers=1)
    assert files(out) == before


def test_a_rebuild_mends_what_lies_beside_the_shards(tmp_path, texts):
    tokenizer, inputs, out = make_tokenizer(str(train_bpe(tmp_path / "t.json"))), [("a", str(texts))], tmp_path / "out"
    _, version = build(inputs, out, tokenizer, workers=1, **SMALL)
    before = files(out)
    (out / "tokenizer.json").write_bytes(b"damaged")
    (out / manifest_name(version)).write_bytes(b"damaged")
    assert build(inputs, out, tokenizer, workers=1)[1] == version and files(out) == before


def test_a_damaged_manifest_is_not_appended_to(tmp_path, texts):
    out = tmp_path / "out"
    build([("a", str(texts))], out, Bytes(), workers=1, **SMALL)
    root = bytearray((out / MANIFEST).read_bytes())
    root[-5] = ord("0") if root[-5] != ord("0") else ord("1")
    (out / MANIFEST).write_bytes(root)
    before = files(out)
    for append in (True, False):
        with pytest.raises(UserError, match=r"(?s)--out.*manifest\.jsonl is damaged.*remedy: a whole copy lies"):
            build([("b", str(texts))], out, Bytes(), workers=1, append=append)
    assert files(out) == before


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("existed", [False, True])
def test_what_is_refused_leaves_nothing(tmp_path, texts, count, existed):
    (texts / "5.jsonl").write_bytes(lines([words(1, 10)] * 20) + b"{\n")
    out = tmp_path / "deep" / "out"
    if existed:
        out.mkdir(parents=True)
    with pytest.raises(UserError, match="line 21"):
        build([("a", str(texts))], out, Bytes(), workers=count, **SMALL)
    assert list(out.iterdir()) == [] if existed else not (tmp_path / "deep").exists()
    build([("a", str(texts / "1.jsonl"))], out, Bytes(), workers=1, **SMALL)
    before = files(out)
    with pytest.raises(UserError, match="line 21"):
        build([("a", str(texts))], out, Bytes(), workers=count, append=True)
    with pytest.raises(UserError, match="would differ"):
        build([("a", str(texts / "2.jsonl"))], out, Bytes(), workers=count)
    assert files(out) == before


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt])
def test_an_import_that_stops_leaves_nothing(tmp_path, error):
    def batches():
        yield {"x": np.arange(1000)}
        raise error

    with pytest.raises(error):
        write_records(tmp_path / "out", "r", (Field("x", "<i8"),), batches(), chunk_items=8, shard_chunks=4)
    assert not (tmp_path / "out").exists()


def test_what_was_left_out_is_told_also_by_a_build_that_goes_on(tmp_path, texts):
    for i in range(6):
        (texts / f"{i}.jsonl").write_bytes(lines(["", words(i, 300), "", words(i, 300)]))
    (texts / "none.txt").write_bytes(b"")
    (texts / "link").symlink_to(tmp_path)
    want = [f"left out: 12 empty documents, 1 empty file, the linked folder {texts.resolve() / 'link'}"]
    told, calls = [], 0

    def stop(progress):
        nonlocal calls
        calls += 1
        if calls == 9:
            raise Stop

    for _ in range(30):
        calls = 0
        try:
            build(
                [("a", str(texts))], tmp_path / "o", Bytes(), workers=1, on_progress=stop, on_note=told.append, **SMALL
            )
            break
        except Stop:
            assert told == []
    assert told == want
    told.clear()
    build([("a", str(texts))], tmp_path / "two", Bytes(), workers=2, on_note=told.append, **SMALL)
    assert told == want
    told.clear()
    options = {"workers": 1, "max_bytes": 2000, "on_note": told.append, **SMALL}
    build([("a", str(texts / "0.jsonl")), ("b", str(texts / "1.jsonl"))], tmp_path / "cut", Bytes(), **options)
    size = (texts / "0.jsonl").stat().st_size
    assert told[0] == f"cut by --max-mb: the first 0.002 MB of text of a are used; its files hold {size / 1e6:.1f} MB"
    assert "text of b" in told[1] and told[2].startswith("left out: ") and len(told) == 3
    told.clear()
    (tmp_path / "a.txt").write_text("all of it")
    build([("a", str(tmp_path / "a.txt"))], tmp_path / "whole", Bytes(), workers=1, max_bytes=10, on_note=told.append)
    assert told == []


@pytest.mark.parametrize("count", [1, 2])
def test_a_full_disk_is_named_and_the_build_goes_on(tmp_path, texts, count):
    """A limit on the size of files stands for a full disk."""
    import resource

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))

    out = tmp_path / "out"
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, texts, out, str(count)], preexec_fn=limited, capture_output=True, text=True
    )
    said = process.stderr.splitlines()
    assert f"UserError: --out = '{out}': cannot be written: File too large ({out}/.staging" in process.stderr, said
    assert "on a disk with space left; the build then goes on" in said[-1]
    assert start(texts, out, count).wait() == 0


def test_two_builds_do_not_meet(tmp_path, texts):
    def on_progress(progress):
        with pytest.raises(UserError, match="another build"):
            build([("a", str(texts))], tmp_path / "out", Bytes(), workers=1, **SMALL)
        raise Stop

    with pytest.raises(Stop):
        build([("a", str(texts))], tmp_path / "out", Bytes(), workers=1, on_progress=on_progress, **SMALL)


@pytest.mark.parametrize("count", [1, 2])
def test_a_build_tells_of_characters_that_it_replaced(tmp_path, count):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud800b"}\n' * 3)
    notes = []
    build([("a", str(tmp_path / "a.jsonl"))], tmp_path / "out", Bytes(), workers=count, on_note=notes.append)
    assert [note for note in notes if "3 characters were replaced" in note]


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_a_build_that_comes_to_nothing_takes_nothing_of_another_with_it(tmp_path, texts, where):
    """Two builds have staging folders of their own, so that neither sees the other's; one is believed to be dead."""
    out = tmp_path / "out" if where == "folder" else ObjectStore(f"memory://{tmp_path.name}")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "0.txt").write_text(words(9, 9000))
    built = []

    def on_progress(progress):
        if progress.done_bytes == progress.total_bytes and not built:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(lease, "_is_held", lambda body: False)
                built.append(build([("a", str(texts))], out, Bytes(), workers=1, staging=tmp_path / "s2", **SMALL))

    with pytest.raises(UserError, match="somebody else has written to it meanwhile"):
        build(
            [("a", str(tmp_path / "b"))],
            out,
            Bytes(),
            workers=1,
            staging=tmp_path / "s1",
            on_progress=on_progress,
            **SMALL,
        )
    store = Folder(out) if where == "folder" else out
    ((manifest, version),) = built
    assert verify(store, manifest, version) == []
    assert read_manifest(store)[1] == version
    if where == "folder":  # what the loser made is gone
        assert len([*(out / "shards").iterdir()]) == sum(manifest.num_shards(e) for e in range(len(manifest.extents)))


def a_target(out, staging):
    """Run one build of 5,000 records up to its commit; return it, and what it is to commit."""
    staging.mkdir()
    target = Target(out, (Field("x", "<u2"),), ["a"], append=False, **SMALL)
    writer = _writer(target, staging, target.put(0))
    writer.add(np.arange(5000, dtype="<u2").view(target.empty.dtype))
    roots = writer.finish()
    return target, target.manifest([writer.items], roots)


def test_a_manifest_names_no_shards_that_another_build_removed(tmp_path):
    """The same command runs twice, since the first was believed to be dead. The second finds the first one's shards and
    leaves them as they are; then the first is refused, and removes what it made."""
    out = Folder(tmp_path / "out")
    first, _ = a_target(out, tmp_path / "1")
    second, manifest = a_target(out, tmp_path / "2")
    first.undo(is_lost=False)
    with pytest.raises(UserError, match=r"3 of its 3 new shards are gone"):
        second.commit(manifest)
    with pytest.raises(FileNotFoundError):
        out.read(MANIFEST)
    third, manifest = a_target(out, tmp_path / "3")
    assert verify(out, *third.commit(manifest)) == []


def test_a_build_that_lost_its_lease_removes_nothing(tmp_path):
    """The new holder may have found these shards, and be about to name them."""
    out = Folder(tmp_path / "out")

    def arrays():
        yield np.arange(5000, dtype="<u2").view([("x", "<u2")])
        taken = json.loads((out.path / BUILDING).read_bytes())
        out.write(BUILDING, json.dumps({**taken, "token": "another's"}).encode())
        raise UserError("it is refused")

    with pytest.raises(UserError, match="it is refused"):
        write_records(out, "a", (Field("x", "<u2"),), arrays(), staging=tmp_path / "s", **SMALL)
    assert len([*(out.path / "shards").iterdir()]) == 2, "those that were whole"


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_a_shard_that_is_there_is_not_put_again(tmp_path, where, monkeypatch):
    out = Folder(tmp_path / "out") if where == "folder" else ObjectStore(f"memory://{tmp_path.name}")
    target, manifest = a_target(out, tmp_path / "1")
    names = [manifest.shard_name(0, shard) for shard in range(3)]
    out.write(names[0], b"damaged")
    written, write = [], out.write

    def watched(name, data, overwrite=True):
        written.append((name, overwrite))
        write(name, data, overwrite)

    monkeypatch.setattr(out, "write", watched)
    monkeypatch.setattr(stores, "ONE_REQUEST_BYTES", 0)  # a bucket takes them in parts
    out.remove(names[1])
    a_target(out, tmp_path / "2")
    assert written == [(names[0], True), (names[1], False)], "what is whole stays, what is damaged is mended"
    assert verify(out, *target.commit(manifest)) == []
    assert not [*tmp_path.glob("*/*.partial")], "what was not needed is not left either"


def test_a_shard_that_a_manifest_names_is_not_replaced_by_another(tmp_path):
    """In the first format a shard's name does not depend on its content. The other build was believed to be dead."""
    out = Folder(tmp_path / "out")
    target, manifest = a_target(out, tmp_path / "1")
    first = replace(manifest, format=1)
    for shard in range(3):
        out.write(first.shard_name(0, shard), out.read(manifest.shard_name(0, shard)))
    target.base = first
    target.commit(first)
    added = [Target(out, (Field("x", "<u2"),), ["a"], append=True, **SMALL) for _ in range(2)]
    staging = tmp_path / "s"
    staging.mkdir()

    def put(target, seed):
        writer = _writer(target, staging, target.put(0))
        try:
            writer.add(np.full(1000, seed, "<u2").view(target.empty.dtype))
            return target.manifest([1000], writer.finish())
        finally:
            writer.abort()

    manifest, version = added[0].commit(put(added[0], 1))
    with pytest.raises(UserError, match="somebody else has written to it meanwhile"):
        put(added[1], 2)
    assert verify(out, manifest, version) == []


TWICE = """
import sys
from phalanx.data.build import build
from phalanx.data.tokenizer import Bytes
waits = []
sizes = dict(chunk_items=256, shard_chunks=8)
print(build([("a", sys.argv[1])], sys.argv[2], Bytes(), workers=1, on_wait=waits.append, **sizes)[1])
"""


def test_two_builds_of_one_data_set_wait_for_each_other(tmp_path, texts):
    out = tmp_path / "out"
    command = [sys.executable, "-c", TWICE, str(texts), str(out)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0] == read_manifest(Folder(out))[1] + "\n"
    assert sorted(p.name for p in out.iterdir()) == sorted([manifest_name(said[0][0].strip()), MANIFEST, "shards"])


def test_a_mistake_in_a_worker_is_told_as_one(tmp_path, texts):
    (texts / "3.jsonl").write_bytes(lines([words(1, 10)] * 20) + b"{\n")
    with pytest.raises(UserError, match=r"3\.jsonl, line 21"):
        build([("a", str(texts))], tmp_path / "out", Bytes(), workers=2, **SMALL)


def test_a_worker_that_dies_is_told(tmp_path, texts):
    def on_progress(progress):
        for pid in children(os.getpid()):
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(RunFailed, match=r"(?s)SIGKILL.*remedy"):
        build([("a", str(texts))], tmp_path / "out", Bytes(), workers=2, on_progress=on_progress, **SMALL)


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_no_text_is_refused(tmp_path, content):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"SRC = '.*a\.jsonl': there is no text"):
        build([("a", str(tmp_path / "a.jsonl"))], tmp_path / "out", Bytes(), workers=1)
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_a_data_set_inside_its_input_is_not_read(tmp_path, texts):
    build([("a", str(texts))], texts / "out", Bytes(), workers=1, **SMALL)
    _, version = build([("a", str(texts))], tmp_path / "out", Bytes(), workers=1, left_out=[texts / "out"], **SMALL)
    assert read_manifest(Folder(texts / "out"))[1] == version
    with pytest.raises(UserError, match="its own input"):
        build([("a", str(texts))], texts, Bytes(), workers=1)


def test_a_bad_label_is_refused(tmp_path, texts):
    with pytest.raises(UserError, match="is not a name of letters"):
        build([("a/b", str(texts))], tmp_path / "out", Bytes(), workers=1)


def test_a_remote_store_gets_the_same(tmp_path, texts):
    _, want = build([("a", str(texts))], tmp_path / "want", Bytes(), workers=1, **SMALL)
    url = "memory:///built"
    assert build([("a", str(texts))], url, Bytes(), workers=1, staging=tmp_path / "staging", **SMALL)[1] == want
    assert items(url).tolist() == items(tmp_path / "want").tolist() and not (tmp_path / "staging").exists()


def test_records_go_through_the_loader(tmp_path):
    rng = np.random.default_rng(0)
    patches = rng.standard_normal((100, 4, 12)).astype(np.float32)
    target = np.arange(100, dtype=np.int64)
    fields = (Field("patches", "<f4", (4, 12)), Field("target", "<i8"))
    batches = [{"patches": patches[a:b], "target": target[a:b]} for a, b in ((0, 33), (33, 34), (34, 100))]
    manifest, _ = write_records(tmp_path / "out", "images", fields, batches, chunk_items=8, shard_chunks=4)
    assert manifest.total_items == 100 and len(manifest.roots) == 4
    loader, events = make_loader(Folder(tmp_path / "out"), manifest)
    rows = loader.rows(range(100))[:, 0]
    assert sorted(rows["target"].tolist()) == list(range(100)) and not events
    assert np.array_equal(rows["patches"], patches[rows["target"]])
    loader.fetcher.close()


@pytest.mark.parametrize(
    "batch, said",
    [
        ({"x": np.zeros((2, 3), "f4")}, "has the fields"),
        ({"x": np.zeros((2, 4), "f4"), "y": np.zeros(2)}, "'x' of a batch is"),
        ({"x": np.zeros((2, 3), "f4"), "y": np.zeros(2, "c8")}, "'y' of a batch is"),
    ],
)
def test_records_that_do_not_fit_are_refused(tmp_path, batch, said):
    fields = (Field("x", "<f4", (3,)), Field("y", "<f4"))
    with pytest.raises(ValueError, match=said):
        write_records(tmp_path / "out", "r", fields, [batch])
    assert not (tmp_path / "out" / MANIFEST).exists()
