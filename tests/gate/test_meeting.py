"""Who may connect to a node's rendezvous, and that nonsense ends only its own connection."""

from __future__ import annotations

import json
import os
import socket
import struct
import time

import pytest

from phalanx.gate.loop import Loop
from phalanx.gate.meeting import MESSAGE_BYTES, Meeting, framed


class Door:
    def __init__(self, **options):
        self.loop = Loop()
        self.meeting = Meeting(self.loop, **options)
        self.socks = []

    def knock(self, *messages):
        """Connect and send messages; bytes are sent as they are."""
        self.socks.append(socket.socket(socket.AF_UNIX))
        self.socks[-1].connect("\0" + self.meeting.address)
        for message in messages:
            self.socks[-1].sendall(message if isinstance(message, bytes) else framed(message))
        self.socks[-1].setblocking(False)
        return self.socks[-1]

    def heard(self, sock):
        """Return the next bytes that arrive; b"": the connection was ended."""
        deadline = time.monotonic() + 20
        while True:
            assert time.monotonic() < deadline, "it was neither answered nor sent away"
            self.loop.turn(0.02)
            try:
                return sock.recv(1 << 16)
            except BlockingIOError:
                pass
            except ConnectionError:
                return b""


@pytest.fixture
def door():
    made = []

    def make(**options):
        made.append(Door(**options))
        return made[-1]

    yield make
    for each in made:
        for sock in each.socks:
            sock.close()


SCOPE = {"scope": ["gang", 1]}
ASKED = [SCOPE, {"op": "set", "key": "k", "value": "eA=="}, {"op": "get", "key": "k"}]


def is_served(door):
    return json.loads(door.heard(door.knock(*ASKED))[4:]) == {"values": {"k": "eA=="}}


def test_another_user_of_the_machine_is_sent_away(door, monkeypatch):
    one, uid = door(), os.getuid()
    assert is_served(one)
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    assert one.heard(one.knock(*ASKED)) == b""


def test_a_process_is_let_in_where_it_was_sent_and_nowhere_else(door):
    asked = []
    one = door(may=lambda pid, scope: asked.append((pid, scope)) or scope == ("gang", 1))
    assert is_served(one)
    assert one.heard(one.knock({"scope": ["gang", 2]}, *ASKED[1:])) == b""
    assert asked == [(os.getpid(), ("gang", 1)), (os.getpid(), ("gang", 2))]


def test_a_connection_stays_in_its_scope(door):
    """It cannot name another scope later, even one that it may enter."""
    one = door()
    assert one.heard(one.knock(SCOPE, {"scope": ["gang", 2]})) == b""


NONSENSE = {
    "announces more than a message": struct.pack(">I", MESSAGE_BYTES + 1),
    "sends no JSON": framed(SCOPE) + struct.pack(">I", 2) + b"{{",
    "sends a list": framed([1]),
    "names no scope": framed({"scope": 1}),
    "has no operation": framed(SCOPE) + framed({}),
    "sets a number": framed(SCOPE) + framed({"op": "set", "key": 1, "value": "x"}),
    "calls without arguments": framed(SCOPE) + framed({"op": "add", "args": []}),
    "calls with a number for a key": framed(SCOPE) + framed({"op": "check", "args": [1]}),
    "calls what is not there": framed(SCOPE) + framed({"op": "eval", "args": ["k"]}),
}


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_ends_its_connection_alone(door, data):
    one = door()
    assert one.heard(one.knock(data)) == b""
    assert is_served(one)
