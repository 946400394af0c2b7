"""A data set in a bucket reads like one in a folder, in spite of a network that fails. `make test-s3` runs this against
Ceph's gateway, `make test` against moto."""

import itertools
import os
import threading

import numpy as np
import pytest

from phalanx.core.errors import UserError
from phalanx.core.manifest import MANIFEST
from phalanx.core.store import open_store
from phalanx.data.cache import Cache
from phalanx.data.fetch import Corrupt, Fetcher, read_manifest
from phalanx.data.loader import DataLost
from tests.data import s3
from tests.data.sets import Memory, make_loader, ramp, write_set
from tests.system.command import TINY, phalanx, sets, train

EXTENTS = [("a", ramp(9 * 2048 + 77)), ("b", ramp(3000, 30_000))]
SHAPE = {"chunk_items": 512, "shard_chunks": 8, "vocab_size": 65536}
PLACES = range(150)


@pytest.fixture(scope="module")
def endpoint():
    with s3.server() as url:
        s3.make_bucket(url, "data-sets")
        yield url


@pytest.fixture
def proxy(endpoint, monkeypatch):
    proxy = s3.Proxy(endpoint)
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.SECRET)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def expected():
    store = Memory()
    manifest, _ = write_set(store, EXTENTS, **SHAPE)
    loader, _ = make_loader(store, manifest, seq_len=128)
    rows = loader.rows(PLACES)
    loader.close()
    return rows


def written(proxy, name):
    store = open_store(f"s3://data-sets/{name}")
    write_set(store, EXTENTS, **SHAPE)
    manifest, _ = read_manifest(store)
    proxy.requests.clear()
    return store, manifest


def load(store, manifest, **more):
    loader, events = make_loader(store, manifest, seq_len=128, **more)
    try:
        return loader.rows(PLACES), events, loader.fetcher.counters
    finally:
        loader.close()


def on_reads(kind, until=1):
    return lambda method, path, nth: kind if method == "GET" and "shard" in path and nth <= until else None


def test_a_bucket_serves_what_a_folder_does_and_is_never_listed(proxy, expected, tmp_path):
    store, manifest = written(proxy, "plain")
    cache = Cache(tmp_path, 10**7)
    rows, events, counters = load(store, manifest, cache=cache)
    assert np.array_equal(rows, expected) and not events
    assert counters.retries == counters.corrupt == 0
    assert all(
        method == "GET" and path.startswith("/data-sets/plain/shards/") and "?" not in path and span
        for method, path, span in proxy.requests
    )
    assert sum(proxy.requests.values()) - len(proxy.requests) <= counters.hedges, "every range once"
    proxy.requests.clear()
    assert np.array_equal(load(store, manifest, cache=cache)[0], expected) and not proxy.requests


@pytest.mark.parametrize(
    ("fault", "counter"),
    [("503", "retries"), ("drop", "retries"), ("truncate", "retries"), ("short", None), ("flip", "corrupt")],
)
def test_faults_of_the_network_change_nothing(proxy, expected, fault, counter):
    store, manifest = written(proxy, "faults")
    proxy.fault = on_reads(fault)
    rows, events, counters = load(store, manifest)
    assert np.array_equal(rows, expected) and not events
    ranges = len(proxy.requests)
    if counter:  # on a slow machine a hedged request may fail instead
        assert getattr(counters, counter) + counters.hedges >= ranges
    assert counters.retries + counters.corrupt + counters.hedges >= ranges


def test_latency_and_a_slow_tail(proxy, expected):
    store, manifest = written(proxy, "slow")
    turn, lock = iter(range(10**6)), threading.Lock()

    def slow(method, path, nth):
        with lock:
            return 600.0 if next(turn) % 12 == 11 and nth == 1 else 0.02

    proxy.fault = slow
    rows, events, counters = load(store, manifest)
    assert np.array_equal(rows, expected) and not events
    assert counters.hedges > 0 and counters.retries == 0, "nobody waited for the tail"


def test_corruption_is_found_named_and_replaced(proxy, expected):
    store, manifest = written(proxy, "corrupt")
    name = manifest.shard_name(0, 1)
    proxy.fault = lambda method, path, nth: "flip" if path.endswith(name) and nth <= 3 * 3 and method == "GET" else None
    fetcher = Fetcher(store, manifest, start_jitter_s=0.0)
    with pytest.raises(Corrupt, match=name):
        fetcher.get((0, 1, 2))
    fetcher.close()
    # Damage in the store: one byte of a chunk, then half a shard, then nearly all of it.
    proxy.fault = lambda *_: None
    good = store.read(name)
    for bad, reason in (
        (good[:5000] + bytes([good[5000] ^ 1]) + good[5001:], "its bytes are not"),
        (good[: len(good) // 2], "its footer is not"),
        (good[:10], "its footer is not"),
    ):
        store.write(name, bad)
        rows, events, _ = load(store, manifest)
        found = [e for e in events if e["type"] == "data_quarantine"]
        assert found and {e["shard"] for e in found} == {name} and all(reason in e["reason"] for e in found)
        changed = {e["place"] for e in events if e["type"] == "data_substitute"}
        assert changed == set(np.flatnonzero((rows != expected).any(axis=1)).tolist())
    with pytest.raises(DataLost, match=name):
        load(store, manifest, quarantine_limit=0)


def test_a_missing_shard(proxy):
    store, manifest = written(proxy, "missing")
    proxy.fault = lambda method, path, nth: None
    lost = open_store("s3://data-sets/nowhere")
    fetcher = Fetcher(lost, manifest, start_jitter_s=0.0)
    with pytest.raises(Corrupt, match="the file is missing"):
        fetcher.get((0, 0, 0))
    fetcher.close()
    with pytest.raises(FileNotFoundError):
        lost.size("x")
    assert store.size(manifest.shard_name(0, 0)) == manifest.shard_bytes(0, 0)


def test_a_gateway_that_is_down_for_a_moment_does_not_stop_a_start_or_a_build(proxy):
    store, _ = written(proxy, "start")
    proxy.fault = lambda method, path, nth: "503" if nth <= 2 else None
    assert read_manifest(store)[0].chunk_items == 512
    store.write("again", b"data")
    assert store.read("again") == b"data"


def refused(call, match):
    with pytest.raises(UserError, match=match) as caught:
        call()
    assert len(str(caught.value)) < 800
    return str(caught.value)


def test_wrong_credentials_and_addresses_are_told_at_once(proxy, monkeypatch):
    store, manifest = written(proxy, "refuse")
    assert "NoSuchBucket" in refused(lambda: read_manifest(open_store("s3://no-such-bucket/x")), "no such bucket")
    refused(lambda: read_manifest(open_store("s3://data-sets/nothing")), "there is no data set there")
    if os.environ.get("PHALANX_TEST_S3") == "radosgw":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        denied = open_store("s3://data-sets/refuse")
    else:  # moto lets everyone in
        proxy.fault, denied = lambda *_: "403", store
    refused(lambda: read_manifest(denied), "cannot be read: .*403")
    fetcher = Fetcher(denied, manifest, start_jitter_s=0.0)
    refused(lambda: fetcher.get((0, 0, 0)), "it may not be read: .*403")
    fetcher.close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3.free_port()}")
    refused(lambda: read_manifest(open_store("s3://data-sets/x")), "check the address")


def test_objects_appear_whole_or_not_at_all(proxy, tmp_path):
    store = open_store("s3://data-sets/writes")
    store.write(MANIFEST, b"0" * 100_000)
    seen, stop = set(), threading.Event()

    def read():
        while not stop.is_set():
            seen.add(store.read(MANIFEST))

    reader = threading.Thread(target=read)
    reader.start()
    for n in range(1, 10):
        store.write(MANIFEST, str(n).encode() * 100_000)
    stop.set()
    reader.join()
    assert seen <= {str(n).encode() * 100_000 for n in range(10)}

    won = []

    def claim(n):
        try:
            store.write("claim", str(n).encode(), overwrite=False)
            won.append(n)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=claim, args=(n,)) for n in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(won) == 1 and store.read("claim") == str(won[0]).encode()

    staged, data = tmp_path / "staged", os.urandom(11 << 20)
    staged.write_bytes(data)
    proxy.fault = lambda method, path, nth: "503" if method == "PUT" and nth == 1 else None
    store.write("large", staged)
    assert not staged.exists() and store.size("large") == len(data)
    assert bytes(store.read_range("large", 6 << 20, (6 << 20) + 99)) == data[6 << 20 : (6 << 20) + 99]
    assert bytes(store.read_range("large", len(data) - 5, len(data) + 5)) == data[-5:]
    assert bytes(store.read_range("large", len(data) + 5, len(data) + 9)) == b""


def test_built_from_the_command_line_trained_on_and_found_again(proxy, tmp_path, monkeypatch):
    """From `data build` to `data where`, with every third read answered by 503."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_bytes(bytes(range(32, 127)) * 400)
    url = "s3://data-sets/command"
    built = phalanx(tmp_path, "data", "build", f"a={tmp_path / 'a.txt'}", "--out", url, "--tokenizer", "byte")
    assert built.returncode == 0, built.stderr
    proxy.requests.clear()
    counter = itertools.count()
    proxy.fault = lambda method, path, nth: "503" if method == "GET" and next(counter) % 3 == 0 else None
    ended = train(tmp_path / "run", *sets(TINY | {"data.source": url, "train.steps": 5, "layout.tp": 1}))
    ended.check_clean()
    assert ended.code == 0, ended.err
    assert next(counter) > 3 and (tmp_path / "cache" / "phalanx" / "chunks").is_dir()
    told = phalanx(tmp_path / "run", "data", "where", "--step", 3)
    assert told.returncode == 0 and told.stdout.rstrip().endswith("these are the bytes that the ranks trained on"), told
    proxy.fault = lambda method, path, nth: None
    verified = phalanx(tmp_path, "data", "verify", url)
    assert verified.returncode == 0 and "good: all chunks" in verified.stdout, verified
