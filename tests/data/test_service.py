"""The data service as a process of a node, with ranks that read from it."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from phalanx.core.job import DataConfig, Job, TrainConfig
from phalanx.data.build import build
from phalanx.data.feed import Feed
from phalanx.data.samples import places_of
from phalanx.data.selection import RunData
from phalanx.data.tokenizer import Bytes
from phalanx.runtime.bare import BareClient

SEQ, BATCH, MICRO = 32, 12, 2


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    root = tmp_path_factory.mktemp("service")
    (root / "text").mkdir()
    rng = np.random.default_rng(0)
    for i in range(40):
        (root / "text" / f"{i:02d}.txt").write_bytes(rng.integers(32, 127, 4000, np.uint8).tobytes())
    build([("a", str(root / "text"))], root / "set", Bytes(), workers=1, chunk_items=256, shard_chunks=16)
    job = Job(
        train=TrainConfig(seq_len=SEQ, global_batch=BATCH, micro_batch=MICRO),
        data=DataConfig(source=str(root / "set")),
    )
    RunData.plan(job, str(root / "set")).write(root)
    return root


class Running:
    def __init__(self, run_dir, log):
        self.client = BareClient(["phalanx.data.service"])
        self.client.spawn(0, "phalanx.data.service:main", {"data": dataclasses.asdict(RunData.read(run_dir))}, log)
        self.address = self.wait("message")["body"]["address"]

    def wait(self, kind):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            event = self.client.events(1.0)
            if event and event["type"] == kind:
                return event
        raise AssertionError(f"no {kind}")


@pytest.fixture
def service(run_dir, tmp_path):
    running = Running(run_dir, tmp_path / "log")
    yield running
    running.client.close()


def wanted(run_dir, indices, step):
    loader = RunData.read(run_dir).open()
    rows = loader.rows((places_of(indices, MICRO) + step * BATCH).tolist())
    loader.close()
    return rows


def test_every_rank_gets_its_own_samples_and_peers_share_them(service, run_dir):
    feeds = {0: [Feed(service.address, [0, 3], 0, 2) for _ in range(2)], 1: [Feed(service.address, [1, 4], 0)]}
    for step in range(20):  # round the ring several times
        for lane, indices in ((0, [0, 3]), (1, [1, 4])):
            for feed in feeds[lane]:
                got = feed.take(step)
                assert np.array_equal(got.rows, wanted(run_dir, indices, step))
                assert got.served == {"a": 4} and got.ready >= 1
                feed.release(step)


def test_it_reads_ahead_but_no_further_than_its_buffer(service):
    feed = Feed(service.address, [0], 0)
    feed.take(0)
    time.sleep(0.5)
    held = feed.take(0)
    assert held.ready == 4
    before = held.rows.copy()
    time.sleep(0.3)
    assert np.array_equal(held.rows, before)  # what is not released is not overwritten
    feed.release(0)
    feed.take(1)
    time.sleep(0.5)
    assert feed.take(1).ready == 4


def test_a_peer_that_comes_late_misses_nothing(service, run_dir):
    first = Feed(service.address, [0], 0, 2)
    for step in range(4):  # as many as the ring holds
        first.take(step)
        first.release(step)
    time.sleep(0.5)
    first._drain(block=False)
    assert first._ready == 4  # no slot is overwritten before the peer has connected
    late = Feed(service.address, [0], 0, 2)
    for step in range(12):
        if step >= 4:
            assert np.array_equal(first.take(step).rows, wanted(run_dir, [0], step))
            first.release(step)
        assert np.array_equal(late.take(step).rows, wanted(run_dir, [0], step))
        late.release(step)


def test_a_rank_starts_at_any_step_and_a_new_one_takes_the_place_of_a_dead_one(service, run_dir):
    feed = Feed(service.address, [2], 1_000_000)
    assert np.array_equal(feed.take(1_000_000).rows, wanted(run_dir, [2], 1_000_000))
    feed.close()
    again = Feed(service.address, [2], 7)
    assert np.array_equal(again.take(7).rows, wanted(run_dir, [2], 7))


def test_its_end_is_told_to_the_ranks(service):
    feed = Feed(service.address, [0], 0)
    feed.take(0)
    os.kill(service.client.running[0], signal.SIGKILL)
    with pytest.raises(ConnectionError, match="the data service closed the connection"):
        for step in range(100):
            feed.take(step)
            feed.release(step)


def test_shared_memory_is_read_only_for_ranks(service):
    feed = Feed(service.address, [0], 0)
    with pytest.raises(ValueError, match="read-only"):
        feed.take(0).rows[0, 0] = 1


STRANGER = """
import os, socket, sys
os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
s.connect("\\0" + sys.argv[1])
s.send(b'{"indices": [0], "step": 0, "peers": 1}')
print(len(s.recv(100)))
"""


def test_ps_says_what_the_process_is(service):
    shown = subprocess.run(["ps", "-o", "args=", "-p", str(service.client.running[0])], capture_output=True, text=True)
    assert shown.stdout.strip() == "phalanx data"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become somebody else")
def test_another_user_is_turned_away(service):
    done = subprocess.run([sys.executable, "-c", STRANGER, service.address], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() in ("", "0") and (done.returncode == 0 or "Error: [Errno" in done.stderr), done
    assert Feed(service.address, [0], 0).take(0).rows.shape == (2, SEQ + 1)


def test_nonsense_is_turned_away(service):
    import socket

    for words in (b"{}", b"\xff\xfe", json.dumps({"indices": "x", "step": 0, "peers": 1}).encode()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.connect("\0" + service.address)
            s.send(words)
            s.settimeout(5)
            assert s.recv(100) == b""
    assert Feed(service.address, [0], 0).take(0).rows.shape == (2, SEQ + 1)


def test_a_rank_that_dies_while_it_is_welcomed_costs_the_others_nothing(service):
    """It used to end the service, and with it every rank of the node."""
    import socket

    other = Feed(service.address, [0], 0)
    for _ in range(3):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.connect("\0" + service.address)
            s.send(json.dumps({"indices": [0], "step": 0, "peers": 1}).encode())
            s.settimeout(30)
            assert s.recv(1, socket.MSG_PEEK)  # the answer is there, and is never read
    assert Feed(service.address, [1], 0).take(0).rows.shape == other.take(0).rows.shape


def test_a_rank_that_stops_while_it_is_welcomed_holds_up_nobody(service, run_dir):
    """The service used to wait 10 s for it, feed no rank meanwhile, and then close its connection."""
    import socket

    hello = json.dumps({"indices": [0], "step": 0, "peers": 1}).encode()
    silent, halfway = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
    with silent, halfway:
        for s in (silent, halfway):
            s.settimeout(30)
            s.connect("\0" + service.address)
        halfway.send(hello)
        other = Feed(service.address, [1], 0)
        for step in range(20):
            assert np.array_equal(other.take(step).rows, wanted(run_dir, [1], step))
            other.release(step)
        silent.send(hello)
        for s in (silent, halfway):
            assert b"slots" in s.recv(1 << 16)
            s.send(b"+")
            assert len(s.recv(8)) == 8
