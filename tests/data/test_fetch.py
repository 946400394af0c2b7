"""Chunks arrive whole, in spite of a store that fails; and what cannot be had is told by name, soon."""

import errno
import os
import random
import re
import subprocess
import threading
import time
from concurrent.futures import ALL_COMPLETED, wait
from dataclasses import replace

import numpy as np
import pytest

from phalanx.core.errors import UserError
from phalanx.core.manifest import MANIFEST, Field, manifest_name
from phalanx.core.store import Busy, Folder, open_store
from phalanx.data.address import open_set
from phalanx.data.cache import Cache
from phalanx.data.fetch import Corrupt, Fetcher, read_manifest
from phalanx.data.shard_file import version_of
from tests.data.sets import Remote, flip, ramp, threads_named, write_set


@pytest.fixture
def made(tmp_path):
    """A set of 3 shards of 4 chunks of 16 items."""
    store = Folder(tmp_path / "set")
    manifest, version = write_set(store, [("a", ramp(3 * 64 - 5))], vocab_size=200)
    return store, manifest, version


@pytest.fixture
def fetch(made):
    open_ = []

    def make(store=None, **more):
        open_.append(Fetcher(store or made[0], made[1], **({"start_jitter_s": 0.0} | more)))
        return open_[-1]

    yield make
    for fetcher in open_:
        fetcher.close()
    until = time.monotonic() + 10
    while (left := threads_named("phalanx-")) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left, "threads end on close"


def all_chunks(manifest):
    return [(0, s, c) for s in range(manifest.num_shards(0)) for c in range(manifest.num_chunks(0, s))]


def check_all(fetcher):
    fetcher.start(all_chunks(fetcher.manifest))
    for e, s, c in all_chunks(fetcher.manifest):
        first = (s * 4 + c) * 16
        assert fetcher.get((e, s, c)).tolist() == ramp(min(17, 187 - first), first).tolist()


def test_all_chunks(fetch):
    fetcher = fetch()
    check_all(fetcher)
    assert fetcher.counters.retries == fetcher.counters.hedges == fetcher.counters.corrupt == 0


def test_a_remote_store_is_asked_for_ranges_alone(fetch, made):
    """No list call, and no whole object: the stub has neither."""
    store = Remote(made[0])
    fetcher = fetch(store)
    check_all(fetcher)
    assert set(store.calls.values()) == {1}, "every footer and chunk is read once, however many threads need it"


def test_memory_stays_under_its_limit(fetch, made):
    store = Remote(made[0])
    fetcher = fetch(store, pool_bytes=100, threads=2)
    check_all(fetcher)
    check_all(fetcher)
    assert fetcher._pooled == sum(a.nbytes for a in fetcher._pool.values()) <= 100
    assert store.most_busy <= 2


# A store that fails now and then.


def test_reads_that_fail_are_retried(fetch, made):
    def fails_twice(name, start, count, data):
        if count <= 2:
            raise OSError("503 SlowDown")
        return data

    fetcher = fetch(Remote(made[0], fails_twice))
    check_all(fetcher)
    assert fetcher.counters.retries == 2 * (3 + 12) and fetcher.counters.corrupt == 0


def test_after_the_deadline_an_error_says_who_did_not_answer(fetch, made):
    def fails(*_):
        raise OSError("503 SlowDown")

    fetcher = fetch(Remote(made[0], fails), deadline_s=0.5)
    with pytest.raises(OSError, match=r"s3://stub has not answered for 0.5 s: 503 SlowDown"):
        fetcher.get((0, 0, 0))
    fetcher.store.on_read = None
    assert len(fetcher.get((0, 0, 0))) == 17, "whoever asks next tries again"


def test_a_read_that_hangs_ends_at_the_deadline(fetch, made):
    release = threading.Event()

    def hangs(name, start, count, data):
        release.wait(600)
        return data

    fetcher = fetch(Remote(made[0], hangs), deadline_s=0.3)
    with pytest.raises(OSError, match="no answer"):
        fetcher.get((0, 0, 0))
    release.set()


def test_a_slow_read_gets_a_rival(fetch, made):
    release = threading.Event()

    def slow_first(name, start, count, data):
        if start and start < 128 and count == 1:
            release.wait(600)
        return data

    fetcher = fetch(Remote(made[0], slow_first))
    fetcher._latency.extend([0.01] * 50)  # what reads have taken
    check_all(fetcher)
    assert not release.is_set() and fetcher.counters.hedges >= 9
    release.set()


def test_a_rival_that_answers_counts_though_the_first_failed_with_it(fetch, made, monkeypatch):
    def first_fails(name, start, count, data):
        if count == 1:
            time.sleep(0.1)
            raise OSError("reset")
        return data

    def wait_for_both(futures, timeout, return_when):
        return wait(futures, None if len(futures) == 2 else timeout, ALL_COMPLETED)

    monkeypatch.setattr("phalanx.data.fetch.wait", wait_for_both)
    fetcher = fetch(Remote(made[0], first_fails), threads=1)
    fetcher._latency.extend([0.001] * 50)
    assert len(fetcher.get((0, 0, 0))) == 17
    assert fetcher.counters.hedges == 2 and fetcher.counters.retries == 0


@pytest.mark.parametrize("error", [PermissionError("403 AccessDenied"), PermissionError("there is no such bucket")])
def test_a_store_that_refuses_is_not_asked_again(fetch, made, error):
    def refuses(*_):
        raise error

    store = Remote(made[0], refuses)
    with pytest.raises(UserError, match=str(error)):
        fetch(store).get((0, 0, 0))
    assert sum(store.calls.values()) == 1


def test_the_first_reads_are_spread_and_the_users_random_numbers_untouched(fetch, made):
    random.seed(1)
    state, times = random.getstate(), []
    fetcher = fetch(Remote(made[0], lambda n, s, c, data: times.append(time.monotonic()) or data), start_jitter_s=0.6)
    began = time.monotonic()
    fetcher.start([(0, s, 0) for s in range(3)])
    for s in range(3):
        fetcher.get((0, s, 0))
    assert len({round(t - began, 3) for t in times}) > 3 and times[0] - began < 0.6
    assert random.getstate() == state
    began = time.monotonic()
    time.sleep(max(0.0, 0.6 - (began - times[0])))
    fetcher.get((0, 0, 1))
    assert times[-1] - began < 0.9, "once started, reads do not wait"


def test_close_ends_what_is_under_way(fetch, made):
    def fails(*_):
        raise OSError("503")

    fetcher = fetch(Remote(made[0], fails), deadline_s=600)
    fetcher.start(all_chunks(made[1]))
    threading.Timer(0.2, fetcher.close).start()
    with pytest.raises(OSError, match="was closed"):
        fetcher.get((0, 0, 0))


# Wrong bytes.


def test_one_bad_answer_heals_silently(fetch, made):
    def wrong_once(name, start, count, data):
        return bytes([data[0] ^ 1]) + data[1:] if count == 1 else data[:5] if count == 2 else data

    fetcher = fetch(Remote(made[0], wrong_once))
    check_all(fetcher)
    assert fetcher.counters.corrupt == 2 * (3 + 12)


def test_a_missing_answer_heals_silently(fetch, made):
    def missing_once(name, start, count, data):
        if count == 1:
            raise FileNotFoundError(name)
        return data

    check_all(fetch(Remote(made[0], missing_once)))


def both_hashes(text, kind):
    found = re.findall(kind + r" ([0-9a-f]+)", text)
    return len(found) == 2 and found[0] != found[1]


def test_a_flipped_byte_is_named(fetch, made):
    store, manifest, _ = made
    flip(store.path / manifest.shard_name(0, 1), 2 * 16 * 2 + 5)
    fetcher = fetch()
    for chunk in set(all_chunks(manifest)) - {(0, 1, 2)}:
        fetcher.get(chunk)
    with pytest.raises(Corrupt, match=r"shard shards/a-000-000001-\w+.shard, chunk 2: its bytes") as caught:
        fetcher.get((0, 1, 2))
    assert both_hashes(str(caught.value), "xxh3")
    assert caught.value.facts["chunk"] == 2 and caught.value.facts["expected"] and caught.value.facts["got"]


def test_the_item_between_chunks_is_covered_by_both(fetch, made):
    store, manifest, _ = made
    flip(store.path / manifest.shard_name(0, 0), 2 * 16 * 2)
    fetcher = fetch()
    for chunk in (1, 2):
        with pytest.raises(Corrupt):
            fetcher.get((0, 0, chunk))
    assert len(fetcher.get((0, 0, 0))) == len(fetcher.get((0, 0, 3))) == 17


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, 150), "footer is not the one that was written"),
        (lambda path: os.truncate(path, 3), "footer is not the one that was written"),
        (lambda path: os.truncate(path, 0), "footer is not the one that was written"),
        (lambda path: path.unlink(), "the file is missing"),
        (lambda path: flip(path, path.stat().st_size - 1), "footer is not the one that was written"),
        (lambda path: os.replace(next(path.parent.glob("a-000-000000-*")), path), "footer is not the one"),
    ],
)
def test_a_damaged_shard_is_named(fetch, made, damage, message, remote):
    store, manifest, _ = made
    damage(store.path / manifest.shard_name(0, 1))
    fetcher = fetch(Remote(store) if remote else store)
    with pytest.raises(Corrupt, match=r"shard shards/a-000-000001-\w+.shard: .*" + message) as caught:
        fetcher.get((0, 1, 0))
    assert "missing" in message or both_hashes(str(caught.value), "blake3")


def test_a_shard_that_is_repaired_is_read_again(fetch, made):
    store, manifest, _ = made
    path = store.path / manifest.shard_name(0, 0)
    good = path.read_bytes()
    flip(path, 0)
    fetcher = fetch()
    with pytest.raises(Corrupt):
        fetcher.get((0, 0, 0))
    store.write(manifest.shard_name(0, 0), good)
    assert len(fetcher.get((0, 0, 0))) == 17


def test_a_disk_that_cannot_read_is_corrupt_but_a_lack_of_descriptors_is_not(fetch, made, monkeypatch):
    for code, kind in ((errno.EIO, Corrupt), (errno.EMFILE, OSError)):

        def broken(*_, code=code):
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as m:
            m.setattr(os, "pread", broken)
            with pytest.raises(kind, match=os.strerror(code)):
                fetch().get((0, 0, 0))


def test_a_wrong_cache_entry_heals_silently(fetch, made, tmp_path):
    cache = Cache(tmp_path / "cache", 10**6)
    check_all(fetch(Remote(made[0]), cache=cache))
    entries = [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert len(entries) == 3 + 12, "footers too"
    for n, entry in enumerate(entries):
        flip(entry, 0) if n % 2 else os.truncate(entry, n)
    store = Remote(made[0])
    check_all(fetch(store, cache=cache))
    assert sum(store.calls.values()) == 15
    store = Remote(made[0])
    fetcher = fetch(store, cache=cache)
    check_all(fetcher)
    assert not store.calls and fetcher.counters.bytes_from_cache > 0 and fetcher.counters.corrupt == 0


def test_a_full_disk_costs_only_speed(fetch, made, tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache", 10**6)
    monkeypatch.setattr(type(tmp_path), "write_bytes", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    check_all(fetch(Remote(made[0]), cache=cache))


# Ids and manifests.


def test_ids_out_of_range_are_named_before_use(fetch):
    fetcher = fetch(max_id=100)
    assert fetcher.get((0, 0, 0)).max() < 100
    with pytest.raises(
        UserError, match=r"token 100 at item 36 of shards/a-000-000001-\w+.shard, but the model knows"
    ) as e:
        fetcher.get((0, 1, 2))
    assert "model.vocab_size = 100" in str(e.value) and "at least 200" in str(e.value)


def test_the_shortest_way_verifies_as_well(fetch, made, monkeypatch):
    store, manifest, _ = made
    room = np.empty(17, manifest.dtype)
    flip(store.path / manifest.shard_name(0, 1), 2 * 16 * 2 + 5)
    fetcher = fetch(max_id=150)
    read = fetcher.reader(room)
    assert read((0, 0, 1)) and room.tolist() == ramp(17, 16).tolist()
    assert fetcher.counters.bytes_read == room.nbytes + manifest.footer_bytes(0, 0)
    assert not read((0, 1, 2)), "a flipped byte"
    assert not read((0, 2, 3)), "the short last chunk"
    with pytest.raises(UserError, match=r"token 150 at item 22 of shards/a-000-000002-\w+.shard"):
        read((0, 2, 1))
    monkeypatch.setattr("phalanx.data.fetch.OPEN_FILES", 2)
    assert all(read((0, s, 0)) and room[0] == s * 64 for s in (0, 1, 2, 0)), "however many shards it goes through"
    os.truncate(store.path / manifest.shard_name(0, 0), 100)
    assert not read((0, 0, 3)), "cut off while it is open"
    assert not fetch(Remote(store)).reader(room)((0, 0, 0)), "there is none to a remote store"


def test_negative_ids_are_out_of_range(tmp_path):
    manifest, _ = write_set(
        Folder(tmp_path), [("a", np.array([1, -1, 2], "<i4"))], fields=(Field("tokens", "<i4"),), vocab_size=3
    )
    fetcher = Fetcher(Folder(tmp_path), manifest, max_id=3)
    with pytest.raises(UserError, match="token -1 at item 1"):
        fetcher.get((0, 0, 0))
    fetcher.close()


def test_manifests_by_name_and_by_version(made):
    store, manifest, version = made
    assert read_manifest(store)[1] == read_manifest(store, version)[1] == version
    tampered = manifest.encode().replace(b'"vocab_size": 200', b'"vocab_size": 201')
    store.write(manifest_name(version), tampered)
    with pytest.raises(UserError, match=f"its hash is [0-9a-f]{{64}}, not {version}"):
        read_manifest(store, version)
    store.write(MANIFEST, b"{}")
    with pytest.raises(UserError, match="not a manifest"):
        read_manifest(store)
    (store.path / MANIFEST).unlink()
    for given in ("", "1234"):
        with pytest.raises(UserError, match=r"there is no data set there \(manifest.jsonl is missing\)"):
            read_manifest(store, given)


def test_a_version_that_is_not_there_is_answered_with_those_that_are(made):
    store, manifest, version = made
    newer = replace(manifest, parent=version)
    named = version_of(newer.encode())
    for name in (MANIFEST, manifest_name(named)):
        store.write(name, newer.encode())
    with pytest.raises(UserError) as refused:
        read_manifest(store, "1234", version_field="data.stages.1.version")
    assert "data.stages.1.version = '1234'" in str(refused.value)
    assert f"name one of {named[:16]}, {version[:16]}; the first is the newest" in refused.value.remedy


def test_a_damaged_copy_of_the_newest_version_is_mended_from_the_manifest(made):
    store, _, version = made
    store.write(manifest_name(version), b"")
    with pytest.raises(UserError, match=r"(?s)is damaged.*copy manifest.jsonl over it"):
        read_manifest(store, version)
    assert read_manifest(store)[1] == version  # its name says that it is whole


@pytest.mark.parametrize("damage", [b"", b"junk\n", b"{}", None])
def test_a_damaged_manifest_is_refused_and_its_copy_named(made, damage):
    """Whatever lies in manifest.jsonl was written under the name of its hash as well."""
    store, manifest, version = made
    store.write(MANIFEST, manifest.encode().replace(b'_size": 200', b'_size": 201') if damage is None else damage)
    with pytest.raises(UserError, match=r"manifest\.jsonl is damaged") as refused:
        read_manifest(store)
    command = refused.value.remedy.partition("beside it: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert read_manifest(store)[1] == version
    (store.path / manifest_name(version)).unlink()
    store.write(MANIFEST, b"")
    with pytest.raises(UserError, match="no whole copy lies beside it"):
        read_manifest(store)
    with pytest.raises(UserError, match="copy manifest-<the first 16 d"):
        read_manifest(Remote(store))


def test_the_newest_of_several_copies_is_named(made):
    store, manifest, version = made
    newer = replace(manifest, parent=version)
    store.write(manifest_name(version_of(newer.encode())), newer.encode())
    store.write(manifest_name(version), manifest.encode())  # later, but it is the other's parent
    store.write(manifest_name("0" * 16), b"junk")
    store.write(MANIFEST, b"")
    with pytest.raises(UserError, match=f"cp .*{manifest_name(version_of(newer.encode()))}"):
        read_manifest(store)


@pytest.mark.parametrize(
    "url, said",
    [("gs://b/x", "GOOGLE_SERVICE_ACCOUNT"), ("az://b/x", "AZURE_STORAGE_ACCOUNT_KEY"), ("s3://b/x", "AWS_")],
)
def test_a_store_that_lets_nobody_in_is_told_with_its_own_credentials(url, said):
    class Denying:
        def read(self, name):
            raise PermissionError("no credentials were found (AWS_ACCESS_KEY_ID and others): 403")

    Denying.url = url
    with pytest.raises(UserError, match=f"(?s)403.*{said}") as refused:
        read_manifest(Denying())
    assert url.startswith("s3") or "AWS" not in str(refused.value)


def test_addresses_that_are_none_are_refused_in_the_words_of_the_user(monkeypatch):
    for url, said in [("", "it is empty"), ("ftp://x", "no store 'ftp'")]:
        with pytest.raises(UserError, match=f"--out = '{url}': .*{said}") as refused:
            open_set(url, "--out")
        assert "memory" not in str(refused.value)
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        open_set("az://b/x", "URL")


def test_a_manifest_that_is_damaged_on_its_way_is_read_again(made):
    _, manifest, version = made
    answers = [b"", manifest.encode()[:-9], manifest.encode()]

    class Flaky:
        url = "s3://stub"

        def read(self, name):
            return answers.pop(0)

    assert read_manifest(Flaky(), version)[1] == version


# Stores.


def test_a_folder_writes_all_or_nothing(tmp_path, monkeypatch):
    store = Folder(tmp_path)
    store.write("x/a", b"old")
    with monkeypatch.context() as m:
        m.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(OSError):
            store.write("x/a", b"new")
    assert store.read("x/a") == b"old" and os.listdir(tmp_path / "x") == ["a"]
    with pytest.raises(FileExistsError):
        store.write("x/a", b"new", overwrite=False)
    assert store.read("x/a") == b"old" and os.listdir(tmp_path / "x") == ["a"]
    store.write("x/b", b"1", overwrite=False)
    (tmp_path / "file").write_bytes(b"new")
    with pytest.raises(FileExistsError):
        store.write("x/b", tmp_path / "file", overwrite=False)
    assert (tmp_path / "file").read_bytes() == b"new", "what was not taken stays where it was"
    (tmp_path / "staged").write_bytes(b"moved")
    store.write("x/a", tmp_path / "staged")
    assert store.read("x/a") == b"moved" and not (tmp_path / "staged").exists()


def test_a_file_from_another_disk_is_copied(tmp_path, monkeypatch):
    def other_disk(*_):
        raise OSError(errno.EXDEV, "cross-device link")

    (tmp_path / "staged").write_bytes(b"moved")
    monkeypatch.setattr(os, "rename", other_disk)
    Folder(tmp_path / "set").write("a", tmp_path / "staged")
    assert (tmp_path / "set" / "a").read_bytes() == b"moved" and not (tmp_path / "staged").exists()


def test_descriptors_are_few_and_closed(tmp_path):
    store = Folder(tmp_path, open_files=3)
    for n in range(20):
        store.write(str(n), b"x" * n)
    before = len(os.listdir("/proc/self/fd"))
    for n in range(20):
        assert store.read_range(str(n), 0, 99) == b"x" * n
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    del store
    assert len(os.listdir("/proc/self/fd")) <= before


def test_addresses(tmp_path):
    assert open_store(f"file://{tmp_path}/a%20b").url == f"{tmp_path}/a b"
    open_store("memory:///x").write("a", b"1")
    assert open_store("memory:///x").read("a") == b"1"
    with pytest.raises(UserError, match="there is no store 'ftp'"):
        open_store("ftp://x/y")


def test_a_bucket_that_is_busy_for_a_minute_does_not_refuse_a_start(made, monkeypatch):
    store, _, version = made
    busy, read = [60.0], store.read

    def sleep(seconds):
        busy[0] -= seconds

    def refused(name):
        if busy[0] > 0:
            raise Busy(f"{name}: 503")
        return read(name)

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr(store, "read", refused)
    assert read_manifest(store)[1] == version
    busy[0] = 1e9
    with pytest.raises(UserError, match=r"(?s)cannot be read: .*503.*remedy"):
        read_manifest(store)
