"""Where a gate listens: at the addresses that it was given, and at no other."""

from __future__ import annotations

import socket
import time

import pytest

from phalanx.gate.loop import Loop
from phalanx.gate.porch import MAX_STRANGERS, Porch, listeners


def test_one_port_at_several_addresses_and_nowhere_else():
    loop, came = Loop(), []
    porch = Porch(loop, "127.0.0.1,127.0.0.3", 0, lambda channel: came.append(channel) or channel, lambda *_: None)
    port = porch.address[1]
    assert porch.address[0] == "127.0.0.1"
    for host in ("127.0.0.1", "127.0.0.3"):
        with socket.create_connection((host, port), 1):
            loop.turn(1.0)
    assert [channel.getsockname() for channel in came] == [("127.0.0.1", port), ("127.0.0.3", port)]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 1)
    porch.close()
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


def test_who_has_proven_nothing_makes_way_when_others_wait():
    """Long before its time is over: else a crowd keeps a member of the run out for as long as a handshake may take."""
    loop, came, refused = Loop(), [], []

    def refuse(stranger, reason):
        refused.append(reason)
        porch.leave(stranger)
        stranger.close()

    porch = Porch(loop, "127.0.0.1", 0, lambda channel: came.append(channel) or channel, refuse, handshake_s=1000.0)
    crowd = [socket.create_connection(porch.address) for _ in range(MAX_STRANGERS + 1)]
    deadline = time.monotonic() + 60
    while len(came) <= MAX_STRANGERS and time.monotonic() < deadline:
        assert len(porch.strangers) <= MAX_STRANGERS
        loop.turn(0.1)
    assert len(came) == len(crowd) and {*refused} == {"it has proven nothing while others waited"}
    porch.close()
    for sock in [*crowd, *came]:
        sock.close()
