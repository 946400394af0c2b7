"""The wire: whole messages from pieces of any size, and nothing else."""

from __future__ import annotations

import json
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.runtime.wire import LIMIT_BYTES, Conn, WireError, check, encode

messages = st.lists(st.dictionaries(st.text(max_size=5), st.integers() | st.text() | st.none(), max_size=4), max_size=6)


@settings(max_examples=60, deadline=None)
@given(messages, st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_any_cut_gives_the_same_messages(sent, cuts):
    ours, theirs = socket.socketpair()
    conn, got = Conn(ours), []
    data = b"".join(map(encode, sent))
    i = 0
    while data:
        size = cuts[i % len(cuts)]
        theirs.send(data[:size])
        data, i = data[size:], i + 1
        got += conn.pull()
    theirs.close()
    got += conn.pull(drain=True)
    assert got == sent and conn.eof
    ours.close()


def test_draining_reads_to_the_end():
    ours, theirs = socket.socketpair()
    theirs.send(encode({"last": "words"}))
    theirs.close()
    conn = Conn(ours)
    assert conn.pull(drain=True) == [{"last": "words"}] and conn.eof
    ours.close()


def test_push_never_blocks_and_send_waits():
    a, b = map(Conn, socket.socketpair())
    big = {"x": "y" * 5_000_000}
    a.push(big)
    assert a.pending_bytes > 0
    reader = threading.Thread(target=lambda: [got.append(b.recv(5)) for _ in range(2)])
    got: list = []
    reader.start()
    a.send({"last": 1}, timeout=5)
    reader.join(5)
    assert got == [big, {"last": 1}] and a.pending_bytes == 0
    with pytest.raises(TimeoutError):
        a.recv(timeout=0.01)
    with pytest.raises(TimeoutError):
        a.send(big, timeout=0.05)
    b.close()
    assert a.recv(1) is None
    with pytest.raises(BrokenPipeError):
        a.send({})
    a.close()


@pytest.mark.parametrize(
    "data, said",
    [
        ((LIMIT_BYTES * 2).to_bytes(4, "big"), "over the limit"),
        (b"\x00\x00\x00\x02[]", "JSON list"),
        (b"\x00\x00\x00\x02{x", "not JSON"),
        (b"\x00\x00\x00\x02\xff\xff", "not JSON"),
    ],
)
def test_what_is_not_a_message_is_refused(data, said):
    ours, theirs = socket.socketpair()
    theirs.send(data)
    with pytest.raises(WireError, match=said):
        Conn(ours).pull()
    ours.close(), theirs.close()


def test_fields_are_checked_by_name():
    schemas = {"kill": {"worker": int}}
    assert check({"type": "kill", "worker": 3}, schemas)["worker"] == 3
    with pytest.raises(WireError, match=r"kill\.worker = '3'"):
        check({"type": "kill", "worker": "3"}, schemas)
    for wrong in ({"type": "nap"}, {"type": ["kill"]}, {}, [], None, json.loads("3")):
        with pytest.raises(WireError, match="unknown message"):
            check(wrong, schemas)


class Wrapped:
    """A socket whose `send` is a Python function, as with TLS: its frame holds the data that was to be sent."""

    def __init__(self, sock):
        self._sock = sock

    def __getattr__(self, name):
        return getattr(self._sock, name)

    def send(self, data):
        return self._sock.send(data)


def test_a_peer_that_is_gone_in_the_middle_of_a_write_ends_nothing_else():
    """The buffer once could not be emptied while the error was handled, and the process died of that."""
    ours, theirs = socket.socketpair()
    conn = Conn(Wrapped(ours))
    theirs.close()
    conn.push({"never": "read"})
    assert not conn.pending_bytes and conn.pull() == [] and conn.eof
    ours.close()
