"""Control messages between machines, over TCP: a Server for hundreds of peers, and the Link that each peer holds to it.

Connections are `Secure`: both ends have proven the cluster's secret, and strangers are sent nothing. There are two
kinds of message. A told message is lost if there is no connection. A posted one is numbered, kept until the other end
acknowledges it, and sent again over the next connection. A server identifies a sender by its name and its incarnation
(one process) and delivers each number once; a link may deliver the same number again after it lost a connection.

A server acknowledges a message only when its handler asks for it, once the message is in the journal, so a server that
is killed at any moment loses nothing. Both ends refuse a peer with an older incarnation than they have seen, because
that process was believed dead and has been replaced. If a peer never acknowledges and its messages fill the outbox, the
server forgets its session and the peer must connect anew.
"""

from __future__ import annotations

import errno
import os
import random
import socket
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from phalanx.gate.loop import READ, WRITE, Loop
from phalanx.gate.porch import HANDSHAKE_S, Porch, dialled
from phalanx.gate.proof import Identity, Keys, Refused
from phalanx.runtime import kernel
from phalanx.runtime.secret import Secure, body_of
from phalanx.runtime.wire import Message, Schemas, WireError, check

OUTBOX_BYTES = 64 << 20  # posted but not acknowledged
WINDOW_BYTES = 1 << 20  # handed to a connection but not yet taken by the kernel
REACH_S = 1.0  # to connect, where there are other addresses to try
BACKOFF_S = (0.05, 5.0)  # between attempts to connect: first, and at most

#: Errors that a handler raises on a message that nobody expected a peer to send.
ODD = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError)

T = TypeVar("T")

_ENVELOPES: Schemas = {
    "resume": {"seq": int},  # everything I posted up to here was acknowledged
    "ack": {"seq": int},
    "post": {"seq": int, "body": dict},
    "tell": {"body": dict},
}


class Outbox:
    """Messages that were posted but not acknowledged."""

    def __init__(self) -> None:
        self.acked = self.last = self.size_bytes = 0
        self.frames: dict[int, bytes] = {}

    def post(self, body: Message) -> int:
        frame = body_of({"type": "post", "seq": self.last + 1, "body": body})
        if self.size_bytes + len(frame) > OUTBOX_BYTES:
            raise OverflowError(f"{len(self.frames)} messages wait for an end that acknowledges none")
        self.last += 1
        self.size_bytes += len(frame)
        self.frames[self.last] = frame
        return self.last

    def acknowledged(self, seq: int) -> None:
        if seq > self.last:
            raise WireError(f"message {seq} was acknowledged, and {self.last} was the last one posted")
        while self.acked < seq:
            self.acked += 1
            self.size_bytes -= len(self.frames.pop(self.acked))


class Session:
    """The exchange with one incarnation of a peer, across all its connections."""

    def __init__(
        self,
        peer: Identity,
        outbox: Outbox | None = None,
        received: int = 0,
        on_overflow: Callable[[], object] | None = None,
    ):
        self.peer, self.outbox, self._on_overflow = peer, outbox or Outbox(), on_overflow
        self.received = self.acked = received
        self.conn: Secure | None = None
        self._sent = self._ack_sent = 0  # over this connection

    def attach(self, conn: Secure) -> None:
        self.conn, self._sent, self._ack_sent = conn, self.outbox.acked, 0
        conn.push({"type": "resume", "seq": self.outbox.acked})
        self.pump()

    def post(self, body: Message) -> int:
        """Post a message and return its number, or 0 if the outbox was full, which ended the session."""
        try:
            number = self.outbox.post(body)
        except OverflowError:
            if self._on_overflow is None:
                raise
            self._on_overflow()
            return 0
        self.pump()
        return number

    def tell(self, body: Message, must: bool = False) -> bool:
        """Send a message if a connection can take it now, and return whether it did. With `must`, the message is lost
        only if the connection is, and may overtake posted ones."""
        waits = self.conn is None or self.conn.pending_bytes >= WINDOW_BYTES or self._sent < self.outbox.last
        if self.conn is None or (waits and not must):
            return False
        self.conn.push({"type": "tell", "body": body})
        return True

    def ack(self, seq: int) -> None:
        """Acknowledge this message and all before it: the peer need not send them again."""
        self.acked = max(self.acked, seq)
        self.pump()

    def pump(self) -> None:
        """Give the connection as much as it can take. An acknowledgement follows every message posted before it: an
        aggregator relies on this order."""
        while self.conn and self.conn.pending_bytes < WINDOW_BYTES:
            if self._sent < self.outbox.last:
                self._sent += 1
                self.conn.push_body(self.outbox.frames[self._sent])
            elif self._ack_sent < self.acked:
                self._ack_sent = self.acked
                self.conn.push({"type": "ack", "seq": self.acked})
            else:
                return

    def take(self, message: Message) -> tuple[int, Message] | None:
        """Process a frame. If it delivers a message, return the message's number (0 if it was told) and its body."""
        kind = check(message, _ENVELOPES)["type"]
        if kind == "tell":
            return 0, message["body"]
        seq = message["seq"]
        if kind == "ack":
            self.outbox.acknowledged(seq)
        elif kind == "resume":
            self.received, self.acked = max(self.received, seq), max(self.acked, seq)
        elif seq == self.received + 1:
            self.received = seq
            return seq, message["body"]
        elif seq > self.received:
            raise WireError(f"message {seq} came after {self.received}")
        return None


def in_parts(say: Callable[[list[T]], object], items: list[T]) -> None:
    """Send items in one message, or in several if one cannot hold them all. Drop an item that is too large for any
    message: its sender would repeat it for ever, and everybody else would wait."""
    try:
        say(items)
    except WireError as error:
        if len(items) < 2:
            kernel.complain(f"dropped: {str(items)[1:101]}: {error}")
            return
        half = len(items) // 2
        in_parts(say, items[:half])
        in_parts(say, items[half:])


def key_of(peer: Identity) -> str:
    """Return a server's key for a session. A peer without an incarnation yet gets a key beside that of its name."""
    return peer.name if peer.incarnation else f"{peer.name} joins"


Handler = Callable[[Session, int, Message], object]
Hook = Callable[[Session], object]


class Server:
    """Listens on loopback by default; with `encrypt` None, on other addresses under TLS. It passes messages to
    `on_message(session, number, body)`, which acknowledges a number with `session.ack`. `on_open` and `on_close` are
    called as connections open and close. `roles` lists the roles that are admitted; an empty one admits all.
    `positions` is what `positions()` of an earlier process returned. If a handler raises one of ODD on a peer's
    message, the server ends that connection and notes it in the log. With `exact`, the error ends this process instead,
    because its state may be half changed."""

    def __init__(
        self,
        loop: Loop,
        secret: Keys,
        me: Identity,
        schemas: Schemas,
        on_message: Handler,
        on_open: Hook = lambda session: None,
        on_close: Hook = lambda session: None,
        host: str = "127.0.0.1",
        port: int = 0,
        roles: tuple[str, ...] = (),
        encrypt: bool | None = None,
        positions: dict[str, tuple[int, int]] | None = None,
        handshake_s: float = HANDSHAKE_S,
        exact: bool = False,
    ):
        self.me, self._exact = me, exact
        self.refused, self.trouble = 0, ""  # connections that this end ended for a reason; the last reason
        self.sessions: dict[str, Session] = {}
        for name, (incarnation, seq) in (positions or {}).items():
            self.sessions[name] = Session(Identity("", name, incarnation), received=seq)
        self._loop, self._secret, self._schemas, self._roles = loop, secret, schemas, roles
        self._on_message, self._on_open, self._on_close = on_message, on_open, on_close
        self._porch = Porch(loop, host, port, self._greet, self._drop, encrypt, handshake_s=handshake_s)
        self.address = self._porch.address

    def positions(self) -> dict[str, tuple[int, int]]:
        return {name: (s.peer.incarnation, s.acked) for name, s in self.sessions.items()}

    def forget(self, name: str) -> None:
        """Drop the session of a peer that will not come back."""
        session = self.sessions.pop(name, None)
        if session and session.conn:
            conn, session.conn = session.conn, None
            self._drop(conn)

    def close(self) -> None:
        self._porch.close()
        for conn in [*self._porch.strangers, *(s.conn for s in self.sessions.values() if s.conn)]:
            self._drop(conn)

    def _greet(self, channel: Any) -> Secure:
        return Secure(self._loop.watch, channel, self._secret, self.me, True, self._on_event)

    def _on_event(self, conn: Secure, mask: int) -> None:
        if conn.fileno() < 0:
            return  # it was dropped earlier in this round
        try:
            conn.flush()
            messages = conn.pull() if mask & READ else []
            if conn.peer:
                session = self._admit(conn)
                for message in messages:
                    taken = session.take(message)
                    if taken and session.conn is conn:
                        self._on_message(session, taken[0], check(taken[1], self._schemas))
                session.pump()
        except WireError as error:
            self._drop(conn, str(error))
        except ODD as error:
            if conn.peer and self._exact:
                raise
            reason = f"what {conn.peer.name if conn.peer else 'a stranger'} sent was not understood: {error!r}"
            if conn.peer and reason != self.trouble:
                kernel.complain(f"{reason}\n{traceback.format_exc()}")
            self._drop(conn, reason)
        if conn.eof:
            self._drop(conn)

    def _admit(self, conn: Secure) -> Session:
        """Return the session that a proven connection belongs to."""
        assert conn.peer
        session = self.sessions.get(key_of(conn.peer))
        if session and session.conn is conn:
            return session
        if self._roles and conn.peer.role not in self._roles:  # it may use somebody else's name
            raise Refused(f"{conn.peer.name} is a {conn.peer.role}: expected {' or '.join(self._roles)}")
        if session and conn.peer.incarnation < session.peer.incarnation:
            raise Refused(f"{conn.peer.name} has a later incarnation than {conn.peer.incarnation}")
        self._porch.leave(conn)
        if session and session.conn:
            self._drop(session.conn)
        if session is None or conn.peer.incarnation > session.peer.incarnation:
            forget = partial(self.forget, key_of(conn.peer))
            session = self.sessions[key_of(conn.peer)] = Session(conn.peer, on_overflow=forget)
        session.peer = conn.peer
        session.attach(conn)
        self._on_open(session)
        return session

    def _drop(self, conn: Secure, reason: str = "") -> None:
        if conn.fileno() < 0:
            return
        self._porch.leave(conn)
        if reason:
            self.refused, self.trouble = self.refused + 1, reason
        conn.close()
        session = self.sessions.get(key_of(conn.peer)) if conn.peer else None
        if session and session.conn is conn:
            session.conn = None
            self._on_close(session)


class Link:
    """A connection to one of several addresses. The link tries them in turn until one answers, and again whenever the
    connection ends; the pauses grow up to `retry_s`, and `seed` spreads those of many links. It acknowledges a message
    as soon as `on_message` returns; `on_ack` gets the highest number that the other end has acknowledged. `known` holds
    the latest incarnations of servers, by name; several links of one process may share it."""

    def __init__(
        self,
        loop: Loop,
        secret: Keys,
        me: Identity,
        addresses: list[tuple[str, int]],
        schemas: Schemas,
        on_message: Handler,
        on_open: Hook = lambda session: None,
        on_close: Hook = lambda session: None,
        on_ack: Callable[[int], object] = lambda number: None,
        encrypt: bool | None = None,
        seed: int = 0,
        handshake_s: float = HANDSHAKE_S,
        retry_s: float = BACKOFF_S[1],
        known: dict[str, int] | None = None,
    ):
        self.me, self.addresses, self.outbox = me, addresses, Outbox()
        self.session: Session | None = None  # while there is a connection
        self.visits = 0  # connections so far
        self.local_address = ""  # of this end, on the last connection
        self.trouble = ""  # why the last connection ended
        self._loop, self._secret, self._schemas, self._encrypt = loop, secret, schemas, encrypt
        self._on_message, self._on_open, self._on_close, self._on_ack = on_message, on_open, on_close, on_ack
        self._handshake_s, self._retry_s = handshake_s, min(retry_s, BACKOFF_S[1])
        self._dice = random.Random(seed)  # noqa: S311  (it spreads load, it keeps no secret)
        self._incarnations: dict[str, int] = {} if known is None else known  # of servers, by name
        self._attempts = self._failures = 0
        self._closed = False
        self._sock: socket.socket | None = None
        self._conn: Secure | None = None
        self._connect()

    def post(self, body: Message) -> int:
        """Post a message and return its number."""
        return self.session.post(body) if self.session else self.outbox.post(body)

    def tell(self, body: Message, must: bool = False) -> bool:
        return self.session is not None and self.session.tell(body, must)

    def flush(self, timeout_s: float) -> None:
        """Turn the loop until everything posted is acknowledged, or raise TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while self.outbox.acked < self.outbox.last:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"{self.outbox.last - self.outbox.acked} messages were not acknowledged in {timeout_s:g} s by "
                    f"{self.addresses}; last: {self.trouble or 'no answer'}"
                )
            self._loop.turn(left)

    def drop(self, reason: str) -> None:
        """End the connection, and try the next address."""
        self._end(reason)

    def close(self) -> None:
        self._closed = True
        self._end("it was closed here")

    @property
    def _address(self) -> tuple[str, int]:
        return self.addresses[(self._attempts - 1) % len(self.addresses)]

    def _connect(self) -> None:
        if self._closed:
            return
        self._attempts += 1
        host, port = self._address
        self._sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._sock.setblocking(False)
        self._loop.after(self._handshake_s, partial(self._expire, self._sock))
        if len(self.addresses) > 1:
            self._loop.after(REACH_S, partial(self._pass_over, self._sock))
        try:
            code = self._sock.connect_ex((host, port))
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            self.local_address = self._sock.getsockname()[0]
            self._loop.watch(self._sock, WRITE, self._connected)
        except OSError as error:
            self._end(f"{self._address}: {error}")

    def _expire(self, sock: socket.socket) -> None:
        if sock is self._sock and not self.session:
            self._end(f"{self._address} did not answer in {self._handshake_s:g} s")

    def _pass_over(self, sock: socket.socket) -> None:
        """Give up early on an address that is cut off: after a full wait, this end would count as dead."""
        if sock is self._sock and self._conn is None:
            self._end(f"{self._address} did not answer in {REACH_S:g} s, and there are other addresses")

    def _connected(self, mask: int) -> None:
        assert self._sock
        self._loop.watch(self._sock, 0)
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        try:
            if code:
                raise OSError(code, os.strerror(code))
            channel = dialled(self._sock, self._encrypt)
            self._conn = Secure(self._loop.watch, channel, self._secret, self.me, False, self._on_event)
        except (OSError, WireError) as error:
            self._end(f"{self._address}: {error}")

    def _on_event(self, conn: Secure, mask: int) -> None:
        if conn.fileno() < 0:
            return
        try:
            conn.flush()
            acked = self.outbox.acked
            for message in conn.pull() if mask & READ else ():
                session = self._admit(conn)
                taken = session.take(message)
                if taken:
                    self._on_message(session, taken[0], check(taken[1], self._schemas))
                    session.ack(taken[0])
            if self.session:
                self.session.pump()
            if self.outbox.acked > acked:
                self._on_ack(self.outbox.acked)
        except WireError as error:
            self._end(f"{self._address}: {error}")
        if conn.eof:
            hint = "" if self.session else "; is there a later incarnation of this end?"
            if not conn.peer:
                hint = " before any proof; is the cluster's secret the same there?"
            self._end(f"{self._address}: it ended the connection{hint}")

    def _admit(self, conn: Secure) -> Session:
        """Return the session, starting it at the server's first message, which shows that it has admitted this end."""
        assert conn.peer
        if self.session:
            return self.session
        if conn.peer.incarnation < self._incarnations.get(conn.peer.name, 0):
            raise Refused(f"{conn.peer.name} was replaced: this one has incarnation {conn.peer.incarnation}")
        self._incarnations[conn.peer.name] = conn.peer.incarnation
        session = Session(conn.peer, self.outbox)  # the server says where to resume
        self.session, self._failures, self.trouble = session, 0, ""
        self.visits += 1
        session.attach(conn)
        self._on_open(session)
        return session

    def _end(self, reason: str) -> None:
        session, self.session = self.session, None
        sock, self._sock = self._sock, None
        conn, self._conn = self._conn, None
        if conn:
            conn.close()
        elif sock:
            self._loop.watch(sock, 0)
            sock.close()
        if conn or sock:
            pause = min(self._retry_s, BACKOFF_S[0] * 2 ** min(self._failures, 30)) * self._dice.uniform(0.5, 1.0)
            self._failures, self.trouble = self._failures + 1, reason
            self._loop.after(pause, self._connect)
        if session:
            session.conn = None
            self._on_close(session)
