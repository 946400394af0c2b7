"""The cache keeps to its limit and never costs more than speed."""

import contextlib
import errno
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from phalanx.data.cache import Cache
from phalanx.data.shard_file import fast_hash


def used(folder):
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # dropped by another process just now
            total += path.stat().st_size if path.is_file() else 0
    return total


def body(n, size=1000):
    return n.to_bytes(8, "little") * (size // 8)


def fill(folder, limit, first, count, most):
    cache = Cache(folder, limit)
    for n in range(first, first + count):
        data = body(n)
        cache.put(fast_hash(data), data)
        again = cache.get(fast_hash(data))
        assert again is None or again == data
        if n % 5 == 0:
            most.value = max(most.value, used(folder))


def test_what_is_put_is_got_and_survives_the_process(tmp_path):
    Cache(tmp_path / "a" / "b", 10**6).put(b"k" * 16, b"data")
    again = Cache(tmp_path / "a" / "b", 10**6)
    assert again.get(b"k" * 16) == b"data" and again.get(b"x" * 16) is None
    again.drop(b"k" * 16)
    again.drop(b"k" * 16)
    assert again.get(b"k" * 16) is None
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0, "others may not read a user's data"


def test_it_stays_under_its_limit_and_keeps_what_is_used(tmp_path):
    cache = Cache(tmp_path, 50_000)
    often = body(10**6)
    cache.put(fast_hash(often), often)
    for n in range(200):
        cache.put(fast_hash(body(n)), body(n))
        assert used(tmp_path) <= 50_000
        assert cache.get(fast_hash(often)) == often
    assert used(tmp_path) > 35_000
    assert cache.get(fast_hash(body(199))) and not cache.get(fast_hash(body(0)))
    cache.put(b"large", bytes(60_000))
    assert cache.get(b"large") is None and used(tmp_path) > 35_000


def test_two_processes_share_it(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    most = [spawn.Value("q", 0) for _ in range(2)]
    both = [spawn.Process(target=fill, args=(tmp_path, 60_000, 150 * k, 200, most[k])) for k in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(30)
        assert process.exitcode == 0
    assert 0 < max(m.value for m in most) <= 60_000 and used(tmp_path) <= 60_000


def test_threads_that_put_get_and_evict_at_once(tmp_path):
    cache, wrong = Cache(tmp_path, 20_000), []

    def work(k):
        try:
            for n in range(150):
                data = body(n % 40)
                cache.put(fast_hash(data), data)
                if cache.get(fast_hash(body((n + k) % 40))) not in (None, body((n + k) % 40)):
                    wrong.append(n)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and used(tmp_path) <= 20_000


def test_an_entry_that_is_dropped_while_it_is_read_is_read_to_its_end(tmp_path):
    cache = Cache(tmp_path, 10**8)
    cache.put(b"k" * 16, bytes(10**6))
    with open(cache._path(b"k" * 16), "rb") as f:
        first = f.read(1000)
        cache.drop(b"k" * 16)
        assert len(first + f.read()) == 10**6


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_broken_disk_costs_only_speed(tmp_path, monkeypatch, code):
    cache = Cache(tmp_path, 10**6)

    def full(*_, **__):
        raise OSError(code, os.strerror(code))

    for broken in ("write_bytes", "mkdir"):
        with monkeypatch.context() as m:
            m.setattr(Path, broken, full)
            cache.put(b"k" * 16, b"data")
        assert cache.get(b"k" * 16) is None and used(tmp_path) == 0


def test_what_a_killed_process_left_behind_is_dropped_in_its_turn(tmp_path):
    (tmp_path / "ab").mkdir()
    left = tmp_path / "ab" / ".cd.123.456"
    left.write_bytes(bytes(30_000))
    os.utime(left, (time.time() - 99, time.time() - 99))
    cache = Cache(tmp_path, 40_000)
    for n in range(10):
        cache.put(fast_hash(body(n)), body(n))
    assert not left.exists() and cache.get(fast_hash(body(9)))
