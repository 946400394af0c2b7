"""Connections over which members of a run hand state to each other. Both ends prove that they know the key that the
members share, and what leaves the machine is encrypted. A proven connection is a `Stream`: messages and bulk data, in
any order that its two ends agree on.

A `Gate` lets members in: one thread does all handshakes without blocking, then each member gets a thread of its own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from phalanx.core.errors import WireError
from phalanx.gate.loop import READ, WRITE, Loop
from phalanx.gate.porch import Porch, dialled
from phalanx.gate.proof import KEY_BYTES, Identity, Proof, Refused, Secret
from phalanx.gate.tls import Certificate, binding_of

PATIENCE_S = 30.0  # for a handshake
REACH_S = 3.0  # to connect, while the host has other addresses
ATTEMPTS, PAUSE_S = 6, 0.2  # if a gate ends the connection: strangers may crowd it
TIMEOUT_S = 60.0  # for each piece of a transfer
PIECE_BYTES = 64 << 20
MESSAGE_BYTES = 1 << 16
MOST_MEMBERS = 512  # served by one gate at a time
MEMBER = Identity("peer", "peer", 1)  # the same for all members
_LENGTH = struct.Struct(">I")


class Stream:
    """A proven connection. Each piece of a transfer may take TIMEOUT_S. `rest`: bytes that were already read from
    it."""

    def __init__(self, sock: Any, rest: bytearray):
        self.sock = getattr(sock, "sock", sock)  # the TLS socket itself, which can block
        self.sock.settimeout(TIMEOUT_S)
        self._rest = rest

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        self.sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, limit: int = MESSAGE_BYTES) -> dict[str, Any]:
        head = bytearray(_LENGTH.size)
        self.fill(memoryview(head))
        (size,) = _LENGTH.unpack(head)
        if size > limit:
            raise WireError(f"a message of {size} bytes")
        body = bytearray(size)
        self.fill(memoryview(body))
        return json.loads(bytes(body))

    def sendall(self, data: Any) -> None:
        with memoryview(data) as view:
            for at in range(0, len(view), PIECE_BYTES):
                self.sock.sendall(view[at : at + PIECE_BYTES])

    def fill(self, room: memoryview) -> None:
        done = min(len(room), len(self._rest))
        room[:done] = self._rest[:done]
        del self._rest[:done]
        while done < len(room):
            got = self.sock.recv_into(room[done : done + PIECE_BYTES])
            if not got:
                raise ConnectionError("the connection ended in the middle of a transfer")
            done += got

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Peers:
    """How to reach and admit members. `key`: the secret that all members share. `host`: the address to listen at, or
    several with commas between them. `certificate`: for gates that listen beyond loopback; "": each makes its own.
    `encrypt`: None encrypts only what leaves the machine."""

    key: str = field(repr=False)
    host: str = "127.0.0.1"
    certificate: str = field(default="", repr=False)
    encrypt: bool | None = None

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.key)) != KEY_BYTES:
            raise ValueError(f"the key of the peers has {len(self.key) // 2} bytes: expected {KEY_BYTES}")

    @property
    def secret(self) -> Secret:
        return Secret(Path(), bytes.fromhex(self.key))

    def listen(self, serve: Callable[[Stream], object]) -> Gate:
        return Gate(self, serve)

    def dial(self, address: tuple[str, int]) -> Stream:
        """Connect to a member at its first reachable address. Raises OSError if none is reachable, or if the other end
        cannot prove that it is a member."""
        for attempt in range(ATTEMPTS):
            sock = _reach(*address)
            try:
                return self._proven(sock)
            except (WireError, OSError) as error:
                sock.close()
                if isinstance(error, WireError) or attempt == ATTEMPTS - 1:
                    raise ConnectionError(f"{address[0]}:{address[1]} has not proven itself: {error}") from None
            time.sleep(PAUSE_S)
        raise AssertionError("unreachable")

    def _proven(self, sock: socket.socket) -> Stream:
        deadline = time.monotonic() + PATIENCE_S
        channel: Any = dialled(sock, self.encrypt)
        channel.setblocking(True)
        plain = getattr(channel, "sock", channel)
        plain.settimeout(PATIENCE_S)
        proof = Proof(self.secret, MEMBER, False, binding_of(channel) or b"")
        plain.sendall(proof.begin())
        while proof.peer is None:
            plain.settimeout(max(0.01, deadline - time.monotonic()))
            data = plain.recv(4096)
            if not data:
                raise ConnectionError("it ended the connection before any proof; is the key the same there?")
            if answer := proof.receive(data):
                plain.sendall(answer)
        return Stream(channel, proof.rest)


def _reach(hosts: str, port: int) -> socket.socket:
    """Connect to the first of the comma-separated addresses that answers. Raises the OSError of the last one."""
    *others, last = hosts.split(",")
    for host in others:
        with contextlib.suppress(OSError):
            return socket.create_connection((host, port), REACH_S)
    return socket.create_connection((last, port), PATIENCE_S)


def _present(hosts: str) -> str:
    """Drop the addresses that this host no longer has, unless it has lost all of them."""
    found = []
    for host in hosts.split(","):
        try:
            socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                continue
        found.append(host)
    return ",".join(found) or hosts


class Gate:
    """Accepts members, and calls `serve` for each in a thread of its own. `serve` may raise OSError, or ValueError,
    KeyError and TypeError for what the member sent. The connection ends when it returns or raises."""

    def __init__(self, peers: Peers, serve: Callable[[Stream], object]):
        self._secret, self._serve = peers.secret, serve
        self._loop, self._members = Loop(), threading.BoundedSemaphore(MOST_MEMBERS)
        self._closing, self._wake = socket.socketpair()
        self._over = False
        certificate = Certificate(peers.certificate) if peers.certificate else None
        self._porch = Porch(
            self._loop, _present(peers.host), 0, self._greet, self._refuse, peers.encrypt, certificate, PATIENCE_S
        )
        self.port: int = self._porch.address[1]
        self._loop.watch(self._closing, READ, lambda mask: self._end())
        threading.Thread(target=self._run, daemon=True, name="phalanx-gate").start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"x")

    def _run(self) -> None:
        while not self._over:
            self._loop.turn()

    def _end(self) -> None:
        self._over = True
        self._porch.close()
        for stranger in list(self._porch.strangers):
            self._refuse(stranger, "")
        self._closing.close()

    def _greet(self, channel: Any) -> _Stranger:
        stranger = _Stranger(channel)
        channel.setblocking(False)
        self._loop.watch(stranger, READ, lambda mask: self._on_event(stranger))
        return stranger

    def _refuse(self, stranger: _Stranger, reason: str) -> None:
        if stranger.fileno() >= 0:
            self._loop.watch(stranger, 0)
            self._porch.leave(stranger)
            stranger.channel.close()

    def _on_event(self, stranger: _Stranger) -> None:
        try:
            if stranger.advance(self._secret):
                self._admit(stranger)
            else:
                self._loop.watch(stranger, READ | (WRITE if stranger.out else 0), lambda mask: self._on_event(stranger))
        except (OSError, ValueError) as error:  # WireError is a ValueError; no stranger may end this thread
            self._refuse(stranger, str(error))

    def _admit(self, stranger: _Stranger) -> None:
        self._loop.watch(stranger, 0)
        self._porch.leave(stranger)
        assert stranger.proof
        stream = Stream(stranger.channel, stranger.proof.rest)
        if not self._members.acquire(blocking=False):
            stream.close()
            return
        try:
            threading.Thread(target=self._attend, args=(stream,), daemon=True).start()
        except RuntimeError:  # no more threads: the member had better ask elsewhere
            self._members.release()
            stream.close()

    def _attend(self, stream: Stream) -> None:
        try:
            with stream, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self._serve(stream)
        finally:
            self._members.release()


class _Stranger:
    """A connection that has proven nothing yet."""

    def __init__(self, channel: Any):
        self.channel, self.out = channel, b""
        self.proof: Proof | None = None

    def fileno(self) -> int:
        return self.channel.fileno()

    def advance(self, secret: Secret) -> bool:
        """Continue the handshake without blocking, and return whether the proof is complete. Raises OSError or
        Refused."""
        if self.proof is None:
            binding = binding_of(self.channel)
            if binding is None:
                return False
            self.proof = Proof(secret, MEMBER, True, binding)
        with contextlib.suppress(BlockingIOError):
            self._flush()
            data = self.channel.recv(4096)
            if not data:
                raise Refused("it is gone")
            self.out += self.proof.receive(data)
            self._flush()
        return self.proof.peer is not None

    def _flush(self) -> None:
        while self.out:
            self.out = self.out[self.channel.send(memoryview(self.out)) :]
