"""torch's groups form over the node's own rendezvous, and leave it at once when they must."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from phalanx.control.verdict import is_echo
from phalanx.gate.loop import Loop
from phalanx.gate.meeting import Meeting, serve
from phalanx.parallel import groups
from phalanx.parallel.groups import Door, break_connections
from phalanx.parallel.rendezvous import MeetingStore
from phalanx.runtime.wire import Conn
from tests.checkpoint.faults import wait_for


@pytest.fixture
def address():
    loop, over = Loop(), []
    meeting = Meeting(loop)

    def run():
        while not over:
            loop.turn(0.05)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield meeting.address
    over.append(True)
    thread.join()


def test_it_does_what_a_store_does(address):
    store = dist.PrefixStore("p", MeetingStore(address, ("gang", 1)))
    other = MeetingStore(address, ("gang", 1))
    store.set("k", b"\x00\xff")
    assert store.get("k") == b"\x00\xff" == other.get("p/k")
    other.wait(["p/k"])
    assert other.get("p/k") == b"\x00\xff" and other.get("p/k") == b"\x00\xff"
    assert store.add("n", 3) == 3 and other.add("p/n", 4) == 7 and store.get("n") == b"7"
    assert store.check(["k", "n"]) and not store.check(["k", "m"])
    assert store.compare_set("m", "", "x") == b"x" and store.compare_set("m", "y", "z") == b"x"
    assert store.num_keys() == 3 and store.delete_key("m") and not store.delete_key("m")
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match="timed out"):
        store.get("never")
    assert store.get("k") == b"\x00\xff", "the answer to the question before is not taken for this one's"


def test_its_python_half_outlives_all_references(address):
    """C++ holds only its own half, and would call a pure virtual function."""
    store = dist.PrefixStore("p", MeetingStore(address, ("gang", 1)))
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_groups_of_two_threads_form(address):
    """Gloo's own calls, through C++."""
    found = {}

    def form(rank):
        store = dist.PrefixStore("x", MeetingStore(address, ("gang", 1)))
        found[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=30))

    threads = [threading.Thread(target=form, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {group.size() for group in found.values()} == {2}


@pytest.mark.parametrize("end", ["door", "all"])
def test_a_wait_ends_when_connections_are_broken(address, end):
    caught, door = [], Door()

    def wait():
        try:
            MeetingStore(address, ("gang", 1)).get("never")
        except dist.DistError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    wait_for(lambda: (door.interrupt() if end == "door" else break_connections()) or caught)
    thread.join()
    assert isinstance(caught[0], dist.DistNetworkError)


class Late(MeetingStore):
    """A peer that has published where it listens, and does not connect."""

    def wait(self, keys, timeout=None):
        self.said.set()
        self.may.wait()
        super().wait(keys, timeout)


def test_forming_ends_although_a_peer_never_connects(address):
    """Gloo waits for it without a socket that could be shut. A survivor hung there and was killed, and its state was
    lost."""
    for meeting in range(1, 30):  # port numbers decide who connects to whom
        late, door, caught = Late(address, ("gang", meeting)), Door(), []
        late.said, late.may = threading.Event(), threading.Event()

        def publish(store=late):
            with contextlib.suppress(RuntimeError):  # its connections are in this process, and shut too
                dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=30))

        def form(door=door, scope=("gang", meeting), caught=caught):
            try:
                door.form(lambda: dist.ProcessGroupGloo(MeetingStore(address, scope), 0, 2, timedelta(seconds=30)))
            except dist.DistNetworkError as error:
                caught.append(error)

        peer, survivor = threading.Thread(target=publish), threading.Thread(target=form)
        peer.start()
        survivor.start()
        late.said.wait()
        survivor.join(0.3)
        waits = survivor.is_alive()
        door.interrupt()
        survivor.join(10)
        over = not survivor.is_alive()
        late.may.set()
        peer.join()
        if waits:
            assert over and is_echo("DistNetworkError", str(caught[0]))
            return
    raise AssertionError("nobody ever waited for a connection")


AS_NOBODY = """
import socket, sys
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect("\\0" + sys.argv[1])
    sock.settimeout(10)
    print(sock.recv(1))
"""


@pytest.mark.skipif(bool(os.geteuid()), reason="needs root, to become another user")
def test_another_user_of_the_machine_is_turned_away(address):
    done = subprocess.run(["/usr/bin/python3", "-c", AS_NOBODY, address], user=65534, capture_output=True, text=True)
    assert done.stdout.strip() == "b''" or "Reset" in done.stderr or "ConnectionResetError" in done.stderr, done


def test_a_rendezvous_that_is_gone_is_a_network_error():
    with pytest.raises(dist.DistNetworkError, match="cannot be reached"):
        MeetingStore("nowhere", ("gang", 1))


def test_a_meeting_that_is_over_is_an_error_and_reads_like_a_consequence(address):
    old = MeetingStore(address, ("gang", 1))
    old.set("k", "v")
    MeetingStore(address, ("gang", 2)).set("k", "v")
    with pytest.raises(dist.DistStoreError, match="a later meeting has begun") as caught:
        old.get("other")
    assert is_echo(type(caught.value).__name__, str(caught.value))


class Line:
    """A node's channel to its rendezvous."""

    def __init__(self):
        self.ours, theirs = socket.socketpair()
        conn = Conn(theirs)
        self.channel = SimpleNamespace(send=conn.send, recv=conn.recv, fileno=conn.fileno)
        self.node = Conn(self.ours)


def test_a_process_enters_the_meeting_alone_that_its_agent_has_sent_it_to():
    """A rank that is late, or wrong, can write no other generation's keys."""
    line = Line()
    thread = threading.Thread(target=serve, args=(line.channel, {}), daemon=True)
    thread.start()
    address = line.node.recv(30)["address"]
    line.node.send({"type": "allow", "pid": os.getpid(), "worker": 1, "scope": ["gang", 2]})
    MeetingStore(address, ("gang", 2)).set("k", "v")
    assert MeetingStore(address, ("gang", 2)).get("k") == b"v"
    for other in (("gang", 1), ("gang", 3), ("replica 0", 2)):
        with pytest.raises(dist.DistNetworkError):
            MeetingStore(address, other).get("k")
    line.node.send({"type": "allow", "pid": os.getpid(), "worker": 1, "scope": ["gang", 3]})
    with pytest.raises(dist.DistNetworkError):
        MeetingStore(address, ("gang", 2)).get("k")
    line.ours.close()
    thread.join(30)
    assert not thread.is_alive()


def test_a_thread_that_never_begins_ends_the_rank_and_not_the_wait(monkeypatch):
    """This happens in a process that is out of memory. Its peers waited 78 s for it in a run with faults."""
    monkeypatch.setattr(groups, "BEGIN_S", 0.05)
    monkeypatch.setattr(groups._thread, "start_new_thread", lambda run, args: 0)
    with pytest.raises(MemoryError, match="did not begin"):
        Door().form(lambda: None)
