"""Only members of the run exchange state: a client that cannot prove the key gets nothing and leaves nothing, and a
crowd of strangers does not keep a member out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from phalanx.gate import peers as gate_peers
from phalanx.gate.peers import MEMBER, Peers
from phalanx.gate.proof import Proof, Secret
from phalanx.gate.tls import Certificate
from tests.checkpoint.faults import wait_for

KEY, OTHER = "5e" * 32, "ab" * 32
BULK = random.Random(1).randbytes(3 << 20)


def echo(stream):
    """Answer a message, and the bytes after it, with the same."""
    asked = stream.receive()
    room = bytearray(asked["size"])
    stream.fill(memoryview(room))
    stream.send({"size": len(room)})
    stream.sendall(room)


def ask(peers, port, host="127.0.0.1"):
    with peers.dial((host, port)) as stream:
        stream.send({"size": len(BULK)})
        stream.sendall(BULK)
        room = bytearray(stream.receive()["size"])
        stream.fill(memoryview(room))
    return bytes(room)


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def peers(request):
    return Peers(KEY, encrypt=request.param)


@pytest.fixture
def gate(peers):
    gate = peers.listen(echo)
    yield gate
    gate.close()


def test_members_hand_each_other_bulk(peers, gate):
    assert all(ask(peers, gate.port) == BULK for _ in range(3))


def test_a_member_is_reached_by_any_of_its_networks(peers):
    gate = dataclasses.replace(peers, host="127.0.0.1,127.0.0.2").listen(echo)
    try:
        for hosts in ("127.0.0.1", "127.0.0.2", "127.0.0.3,127.0.0.2", "127.0.0.2,127.0.0.3"):
            assert ask(peers, gate.port, hosts) == BULK
        with pytest.raises(ConnectionRefusedError):
            ask(peers, gate.port, "127.0.0.3,127.0.0.4")
    finally:
        gate.close()


def test_a_gate_opens_though_another_network_has_lost_its_address(peers):
    gate = dataclasses.replace(peers, host="198.51.100.1,127.0.0.1").listen(echo)
    try:
        assert ask(peers, gate.port) == BULK
    finally:
        gate.close()
    with pytest.raises(OSError, match="assign"):
        dataclasses.replace(peers, host="198.51.100.1,198.51.100.2").listen(echo)


def test_what_passes_cannot_be_read_under_tls():
    """Neither the key nor the bulk is on the wire."""
    for encrypt in (False, True):
        peers, seen = Peers(KEY, encrypt=encrypt), []
        gate = peers.listen(echo)
        with socket.create_server(("127.0.0.1", 0)) as tap:
            threading.Thread(target=relay, args=(tap, gate.port, seen), daemon=True).start()
            assert ask(peers, tap.getsockname()[1]) == BULK
        wire = b"".join(seen)
        assert len(wire) > len(BULK) and bytes.fromhex(KEY) not in wire and KEY.encode() not in wire
        assert (BULK[1000:1100] in wire) != encrypt
        gate.close()


def relay(tap, port, seen):
    """Relay one connection, and record all that passes on it."""
    ours, theirs = tap.accept()[0], socket.create_connection(("127.0.0.1", port))

    def carry(source, sink):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen.append(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    for pair in ((ours, theirs), (theirs, ours)):
        threading.Thread(target=carry, args=pair, daemon=True).start()


def test_who_has_another_key_gets_nothing(peers, gate, monkeypatch):
    monkeypatch.setattr(gate_peers, "PAUSE_S", 0.01)
    with pytest.raises(ConnectionError, match=r"has not proven itself.*is the key the same there"):
        ask(Peers(OTHER, encrypt=peers.encrypt), gate.port)
    assert ask(peers, gate.port) == BULK


def test_a_gate_that_cannot_prove_itself_is_told_nothing(peers):
    """It may listen where a member used to."""
    heard = []
    false = Peers(OTHER, encrypt=peers.encrypt).listen(lambda stream: heard.append(stream.receive()))
    with pytest.raises(ConnectionError, match="has not proven itself"):
        ask(peers, false.port)
    assert heard == []
    false.close()


def test_what_was_recorded_opens_nothing(gate, peers):
    """Everything that a member has sent is sent again."""
    if peers.encrypt:
        pytest.skip("it cannot be recorded")
    secret, sent = Secret(Path(), bytes.fromhex(KEY)), []
    with socket.create_connection(("127.0.0.1", gate.port)) as conn:
        proof = Proof(secret, MEMBER, False)
        sent.append(proof.begin())
        conn.sendall(sent[-1])
        while proof.peer is None:
            if answer := proof.receive(conn.recv(4096)):
                sent.append(answer)
                conn.sendall(answer)
        sent.append(struct.pack(">I", 10) + b'{"size":0}')
        conn.sendall(sent[-1])
        assert conn.recv(4096), "what was recorded is no use at all"
    with socket.create_connection(("127.0.0.1", gate.port)) as conn:
        conn.settimeout(30)
        conn.sendall(sent[0])
        assert b"challenge" in conn.recv(4096)
        got = b""
        with contextlib.suppress(ConnectionError):
            conn.sendall(sent[1] + sent[2])
            got = conn.recv(4096)
        assert got == b""


def test_who_stands_between_is_found_out(monkeypatch):
    """A man in the middle has a certificate of its own, and passes on all that it reads."""
    monkeypatch.setattr(gate_peers, "PAUSE_S", 0.01)
    peers, heard = Peers(KEY, encrypt=True), []
    gate = peers.listen(lambda stream: heard.append(stream.receive()))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=between, args=(listener, gate.port), daemon=True).start()
        with pytest.raises(ConnectionError, match="has not proven itself"):
            ask(peers, listener.getsockname()[1])
    assert heard == []
    gate.close()


def between(listener, port):
    own = Certificate.make().context()
    dial = gate_peers.dialled
    with contextlib.suppress(OSError):
        while True:
            ours = own.wrap_socket(listener.accept()[0], server_side=True)
            theirs = dial(socket.create_connection(("127.0.0.1", port)), True).sock
            theirs.do_handshake()
            for source, sink in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=carry_all, args=(source, sink), daemon=True).start()


def carry_all(source, sink):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_RDWR)


def hello(lone):
    """Send a stranger's hello: one of its fields is a lone surrogate, which JSON allows and UTF-8 does not."""
    said = {"type": "hello", "nonce": "00", "role": "peer", "name": "peer", "incarnation": 1, "proof": ""}
    body = json.dumps(said | {lone: "\ud800"}).encode()
    return struct.pack(">I", len(body)) + body


MALFORMED = {
    "speaks HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "speaks TLS badly": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "sends noise": random.Random(0).randbytes(5000),
    "announces 4 GiB": b"\xff\xff\xff\xff",
    "announces more than a hello": struct.pack(">I", 513),
    "sends a pickle": struct.pack(">I", 23) + pickle.dumps(print)[:23].ljust(23),
    "sends a list": struct.pack(">I", 3) + b"[1]",
    "has a name that cannot be encoded": hello("name"),
    "has a role that cannot be encoded": hello("role"),
    "comes with an answer": struct.pack(">I", 30) + b'{"type":"answer","proof":"00"}',
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_frame_ends_its_connection_alone(peers, monkeypatch, data):
    if peers.encrypt:
        monkeypatch.setattr(gate_peers, "PATIENCE_S", 0.5)  # some of them look like half a record
    gate = peers.listen(echo)
    monkeypatch.undo()
    with socket.create_connection(("127.0.0.1", gate.port)) as stranger:
        stranger.settimeout(10)  # without TLS it is ended long before its deadline
        stranger.sendall(data)
        got = b""
        with contextlib.suppress(ConnectionError):
            got = stranger.recv(4096)
        assert got == b"" or (peers.encrypt and got[:1] == b"\x15"), "it was sent more than an alert of TLS"
    assert ask(peers, gate.port) == BULK
    gate.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_member_that_sends_nonsense_ends_its_connection_alone(peers, gate):
    for said in ({}, {"size": -1}, {"size": "x"}, [1]):
        with peers.dial(("127.0.0.1", gate.port)) as stream:
            stream.send(said)
            with contextlib.suppress(ConnectionError):
                assert stream.sock.recv(1) == b""
    assert ask(peers, gate.port) == BULK


def test_a_member_that_announces_too_much_is_ended_before_it_has_come(peers, gate):
    """Otherwise it could fill the memory of a keeper or a rank."""
    with peers.dial(("127.0.0.1", gate.port)) as stream:
        stream.sock.sendall(struct.pack(">I", (1 << 16) + 1))
        stream.sock.settimeout(10)
        got = None
        with contextlib.suppress(TimeoutError):
            try:
                got = stream.sock.recv(1)
            except ConnectionError:
                got = b""
        assert got == b"", "it is waited for"
    assert ask(peers, gate.port) == BULK


SERVER = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from phalanx.gate.peers import Peers
from tests.gate.test_peers import KEY, echo
gate = Peers(KEY, encrypt=sys.argv[1] == "True").listen(echo)
print(gate.port, flush=True)
sys.stdin.read()
"""


def test_a_thousand_half_open_connections_do_not_keep_a_member_out(peers, monkeypatch):
    """The process may have 256 descriptors; some of the strangers send half a hello."""
    monkeypatch.setattr(gate_peers, "PATIENCE_S", 15.0)  # of the member, which tries as often as it may
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(peers.encrypt)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        port = int(process.stdout.readline())
        crowd = []
        try:
            for i in range(1000):
                crowd.append(socket.socket())
                crowd[-1].setblocking(False)
                crowd[-1].connect_ex(("127.0.0.1", port))
                if i % 2:
                    with contextlib.suppress(OSError):
                        crowd[-1].send(b"\x00\x00\x01\x00{")
            most = max(len(os.listdir(f"/proc/{process.pid}/fd")) for _ in range(200))
            assert most < 100, "they are let in without a bound"
            assert ask(peers, port) == BULK
            assert process.poll() is None
        finally:
            for stranger in crowd:
                stranger.close()
        assert ask(peers, port) == BULK
        process.stdin.close()


def test_a_silent_stranger_is_ended_in_time(peers, monkeypatch):
    monkeypatch.setattr(gate_peers, "PATIENCE_S", 0.2)
    gate = peers.listen(echo)
    with socket.create_connection(("127.0.0.1", gate.port)) as stranger:
        stranger.settimeout(20)
        got = None
        with contextlib.suppress(TimeoutError):
            got = stranger.recv(1)
        assert got == b"", "it is kept for ever"
    gate.close()


def test_a_gate_serves_no_more_members_at_a_time_than_it_has_threads_for(peers, monkeypatch):
    monkeypatch.setattr(gate_peers, "MOST_MEMBERS", 1)
    may_end = threading.Event()
    gate = peers.listen(lambda stream: may_end.wait(60) and echo(stream))
    with peers.dial(("127.0.0.1", gate.port)), peers.dial(("127.0.0.1", gate.port)) as second:
        second.sock.settimeout(20)
        got = None
        with contextlib.suppress(TimeoutError):
            got = second.sock.recv(1)
        assert got == b"", "it is served too"
    may_end.set()

    def is_served():
        try:
            return ask(peers, gate.port) == BULK
        except OSError:
            return False  # the first one's thread has not ended yet

    wait_for(is_served)
    gate.close()


def test_a_gate_that_is_closed_listens_no_more(peers):
    gate = peers.listen(echo)
    gate.close()

    def is_refused():
        try:
            socket.create_connection(("127.0.0.1", gate.port), 1).close()
        except OSError:
            return True
        return False

    wait_for(is_refused)


def test_the_key_is_shown_nowhere():
    peers = Peers(KEY, certificate=Certificate.make().pem)
    assert KEY not in repr(peers) and "PRIVATE" not in repr(peers)
    with pytest.raises(ValueError, match="has 3 bytes: expected 32"):
        Peers("abcdef")


def test_a_transfer_may_take_longer_than_a_handshake(peers, monkeypatch):
    """The deadline applies to strangers only."""
    monkeypatch.setattr(gate_peers, "PATIENCE_S", 0.2)

    def slow(stream):
        time.sleep(0.6)
        echo(stream)

    gate = peers.listen(slow)
    assert ask(peers, gate.port) == BULK
    gate.close()
