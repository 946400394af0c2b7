"""Listening sockets, and the connections that have not yet proven who they are. Their number is limited: while the
porch is full, new connections wait in the kernel's queue, and any that has proven nothing for a moment is dropped. A
crowd of strangers therefore costs only a few descriptors, and cannot keep a member of the run out."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from phalanx.gate.loop import READ, Loop
from phalanx.gate.tls import Certificate, Tls, client_context, is_loopback

HANDSHAKE_S = 5.0
MAX_STRANGERS = 64  # at a time
PORT_TRIES = 16  # to find a port that is free at several addresses
MOMENT_S = 0.25  # enough for a handshake; a slower stranger is dropped when the porch is full
DEAD_S = 6  # until a connection whose other host does not answer counts as dead


class Porch:
    """Accepts connections and holds them until they have proven themselves.

    `host` is one address, or several separated by commas, which share a port; `address` is the first. `greet(channel)`
    returns the stranger behind a new connection, and `refuse(stranger, reason)` ends it. With `encrypt` None,
    everything but loopback is encrypted. If no certificate is given, the porch makes one."""

    def __init__(
        self,
        loop: Loop,
        host: str,
        port: int,
        greet: Callable[[Any], Any],
        refuse: Callable[[Any, str], object],
        encrypt: bool | None = None,
        certificate: Certificate | None = None,
        handshake_s: float = HANDSHAKE_S,
    ):
        self.strangers: dict[Any, float] = {}  # when each arrived, oldest first
        self._loop, self._greet, self._refuse, self._handshake_s = loop, greet, refuse, handshake_s
        self._encrypt, self._paused, self._has_timer = encrypt, False, False
        self._tls = None
        hosts = host.split(",")
        if any(must_encrypt(encrypt, each) for each in hosts):
            certificate = certificate or Certificate.make()
            self._tls = (certificate.context(), certificate.fingerprint)
        self._listeners = listeners(hosts, port)
        self.address: tuple[str, int] = self._listeners[0].getsockname()[:2]
        self._watch()

    def leave(self, stranger: Any) -> bool:
        """Remove a stranger that has proven itself or is gone. Return whether it was here."""
        was = self.strangers.pop(stranger, None) is not None
        if was:
            self._resume()
        return was

    def close(self) -> None:
        for listener in self._listeners:
            self._loop.watch(listener, 0)
            listener.close()

    def _watch(self) -> None:
        for listener in self._listeners:
            self._loop.watch(listener, READ, partial(self._accept, listener))

    def _accept(self, listener: socket.socket, mask: int) -> None:
        for _ in range(MAX_STRANGERS - len(self.strangers)):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    break
                continue  # this one has already gone
            try:
                tune(sock)
                stranger = self._greet(self._channel(sock))
            except OSError:
                sock.close()
                continue
            self.strangers[stranger] = time.monotonic()
            self._set_timer()
        self._paused = True  # the others wait in the kernel's queue
        for each in self._listeners:
            self._loop.watch(each, 0)
        self._loop.after(MOMENT_S, self._make_room)

    def _channel(self, sock: socket.socket) -> Any:
        if must_encrypt(self._encrypt, sock.getsockname()[0]):
            if self._tls is None:
                raise ConnectionError("it did not come over loopback, where this end listens")
            return Tls(sock, *self._tls)
        return sock

    def _make_room(self) -> None:
        now = time.monotonic()
        for stranger in [stranger for stranger, since in self.strangers.items() if now >= since + MOMENT_S]:
            self._refuse(stranger, "it has proven nothing while others waited")
        self._resume()

    def _resume(self) -> None:
        if self._paused and self._listeners[0].fileno() >= 0:
            self._paused = False
            self._watch()

    def _set_timer(self) -> None:
        """Keep one timer for all strangers, so that thousands who come and go leave no timers behind."""
        if self.strangers and not self._has_timer:
            self._has_timer = True
            oldest = next(iter(self.strangers.values()))
            self._loop.after(oldest + self._handshake_s - time.monotonic(), self._expire)

    def _expire(self) -> None:
        self._has_timer, began = False, time.monotonic() - self._handshake_s
        for stranger in [stranger for stranger, since in self.strangers.items() if since <= began]:
            self._refuse(stranger, "it has proven nothing in time")
        self._set_timer()


def listeners(hosts: list[str], port: int) -> list[socket.socket]:
    """Return a listening socket for each address, all on one port. Port 0 picks one that is free at all of them."""
    for tries_left in range(PORT_TRIES if not port else 1)[::-1]:
        made = list[socket.socket]()
        try:
            for host in hosts:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                at = port or (made[0].getsockname()[1] if made else 0)
                made.append(socket.create_server((host, at), family=family, backlog=1024))
                made[-1].setblocking(False)
            return made
        except OSError as error:
            for each in made:
                each.close()
            if error.errno != errno.EADDRINUSE or not tries_left:
                raise
    raise AssertionError


def must_encrypt(wanted: bool | None, server: str) -> bool:
    """Return whether to encrypt a connection. `server` is the address that accepted it, or that it was made to."""
    return not is_loopback(server) if wanted is None else wanted


def dialled(sock: socket.socket, encrypt: bool | None = None) -> Any:
    """Return the client's end of a new connection."""
    tune(sock)
    return Tls(sock, client_context(), None) if must_encrypt(encrypt, sock.getpeername()[0]) else sock


def tune(sock: socket.socket) -> None:
    """Send small messages at once, and detect a host that vanished silently."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", DEAD_S // 3), ("TCP_KEEPINTVL", DEAD_S // 3), ("TCP_KEEPCNT", 2)):
        sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_S * 1000)
