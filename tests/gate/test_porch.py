"""Where a gate listens: at the addresses that it was given, and at no other."""

from __future__ import annotations

import os
import resource
import socket
import time

import pytest

from phalanx.gate import porch
from phalanx.gate.loop import Loop
from phalanx.gate.porch import Porch, listeners, must_encrypt


def test_one_port_at_several_addresses_and_nowhere_else():
    loop, came = Loop(), []
    made = Porch(loop, "127.0.0.1,127.0.0.3", 0, lambda channel: came.append(channel) or channel, lambda *_: None)
    port = made.address[1]
    assert made.address[0] == "127.0.0.1"
    for host in ("127.0.0.1", "127.0.0.3"):
        with socket.create_connection((host, port), 1):
            loop.turn(1.0)
    assert [channel.getsockname() for channel in came] == [("127.0.0.1", port), ("127.0.0.3", port)]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 1)
    made.close()
    for channel in came:
        channel.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.3", port), 1)


def test_a_port_that_is_taken_at_one_of_them_is_not_half_listened_at():
    with socket.create_server(("127.0.0.3", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listeners(["127.0.0.1", "127.0.0.3"], port)
        socket.create_server(("127.0.0.1", port)).close()  # what was opened there is closed


@pytest.mark.parametrize(
    "wanted, server, must",
    [
        (None, "127.0.0.1", False), (None, "::1", False), (None, "10.0.0.1", True), (None, "fd00::1", True),
        (True, "127.0.0.1", True), (False, "10.0.0.1", False),
    ],
)  # fmt: skip
def test_what_leaves_the_machine_is_encrypted_without_being_asked_for(wanted, server, must):
    assert must_encrypt(wanted, server) == must


class Crowd:
    """Connections to a porch, of which nobody ever proves anything."""

    def __init__(self, count, handshake_s):
        self.loop, self.came, self.refused, self.most = Loop(), [], [], 0
        self.porch = Porch(self.loop, "127.0.0.1", 0, self._greet, self._refuse, handshake_s=handshake_s)
        self.socks = [socket.create_connection(self.porch.address) for _ in range(count)]

    def _greet(self, channel):
        self.came.append(channel)
        return channel

    def _refuse(self, stranger, reason):
        self.refused.append(reason)
        self.porch.leave(stranger)
        stranger.close()

    def until(self, happened):
        deadline = time.monotonic() + 15
        while not happened():
            assert time.monotonic() < deadline, "it did not happen"
            self.loop.turn(0.05)
            self.most = max(self.most, len(self.porch.strangers))

    def close(self):
        self.porch.close()
        for sock in [*self.socks, *self.came]:
            sock.close()


@pytest.fixture
def crowd():
    made = []

    def gather(count, handshake_s=1000.0):
        made.append(Crowd(count, handshake_s))
        return made[-1]

    yield gather
    for each in made:
        each.close()


def test_there_are_never_more_than_64_strangers(crowd):
    """With no bound a crowd takes all descriptors of the process. The number is that of docs/security.md."""
    many = crowd(100)
    many.until(lambda: len(many.came) == 100)
    assert many.most == 64


def test_strangers_that_are_gone_leave_nothing_behind(crowd):
    """Each left a timer, and with it what was known of it, until its time would have been over."""
    many = crowd(50)
    many.until(lambda: len(many.came) == 50)
    for channel in many.came:
        many.porch.leave(channel)
    assert len(many.loop._timers) == 1


def test_who_has_proven_nothing_makes_way_when_others_wait(crowd):
    """Long before its time is over: else a crowd keeps a member of the run out for as long as a handshake may take."""
    many = crowd(65)
    many.until(lambda: len(many.came) == 65)
    assert {*many.refused} == {"it has proven nothing while others waited"}


def test_while_nobody_else_waits_a_stranger_has_its_time(crowd, monkeypatch):
    monkeypatch.setattr(porch, "MOMENT_S", 0.01)
    few = crowd(3, handshake_s=0.3)
    few.until(lambda: len(few.refused) == 3)
    assert {*few.refused} == {"it has proven nothing in time"} and not few.porch.strangers


def test_who_comes_when_no_file_can_be_opened_waits(crowd):
    few, limits = crowd(2), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(last := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (last, limits[1]))
    try:
        for _ in range(3):
            few.loop.turn(0.05)
        assert few.came == []
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    few.until(lambda: len(few.came) == 2)


def test_a_stranger_that_cannot_be_taken_in_ends_alone(crowd):
    """Its host is gone already when it is greeted."""
    few, greet = crowd(2), Crowd._greet
    few.porch._greet = lambda channel: greet(few, channel) if few.came else few.came.append(channel) or _fail()
    few.until(lambda: len(few.came) == 2)
    assert len(few.porch.strangers) == 1


def _fail():
    raise ConnectionResetError
