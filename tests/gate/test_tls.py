"""TLS as the gates use it: what counts as loopback, and that no decrypted data stays unread."""

from __future__ import annotations

import socket
import ssl

import pytest

from phalanx.gate.tls import Certificate, Tls, client_context, is_loopback


def pair():
    """Return two ends after their handshake."""
    made = Certificate.make()
    ours, theirs = socket.socketpair()
    server, client = Tls(ours, made.context(), made.fingerprint), Tls(theirs, client_context(), None)
    for end in (server, client):
        end.setblocking(False)
    for _ in range(10):
        seen = [end.binding() for end in (client, server)]
    assert seen == [made.fingerprint] * 2, "both are bound to the same certificate"
    return server, client


def test_all_that_has_come_is_read():
    """A selector does not report data that is already decrypted: a reader that leaves some of it waits for ever."""
    server, client = pair()
    client.send(memoryview(bytes(10_000)))
    assert len(server.recv(100)) == 10_000
    with pytest.raises(BlockingIOError):
        server.recv(100)
    client.close()
    server.close()


def test_it_is_version_three_and_two_certificates_differ():
    server, client = pair()
    assert client.sock.version() == "TLSv1.3"
    assert Certificate.make().fingerprint != Certificate.make().fingerprint
    client.close()
    server.close()


@pytest.mark.parametrize("old", ["server", "client"])
def test_an_older_version_is_refused_at_either_end(old):
    made = Certificate.make()
    contexts = {"server": made.context(), "client": client_context.__wrapped__()}  # one that nobody else has
    for bound in ("minimum_version", "maximum_version"):
        setattr(contexts[old], bound, ssl.TLSVersion.TLSv1_2)
    ours, theirs = socket.socketpair()
    server, client = Tls(ours, contexts["server"], made.fingerprint), Tls(theirs, contexts["client"], None)
    for end in (server, client):
        end.setblocking(False)
    with pytest.raises(ConnectionResetError, match="unsupported protocol"):
        for _ in range(10):
            for end in (client, server):
                end.binding()
    client.close()
    server.close()


def test_no_session_can_be_resumed():
    """Every connection has new keys: those captured from one decrypt no other."""
    server, client = pair()
    server.send(memoryview(b"x"))  # tickets come before it
    assert client.recv(100) == b"x" and not client.sock.session.has_ticket
    client.close()
    server.close()


@pytest.mark.parametrize(
    "host, near",
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("fe80::1%eth0", False), ("node-1", False),
        ("127.evil.example", False),
    ],
)  # fmt: skip
def test_what_is_loopback(host, near):
    assert is_loopback(host) == near
