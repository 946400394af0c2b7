"""The wire between client, node and workers: JSON objects behind a 4-byte big-endian length, over Unix
stream sockets. Never pickle: a peer can at worst send a wrong object, and `check` refuses that at the edge."""

from __future__ import annotations

import json
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from phalanx.core.errors import WireError

LIMIT_BYTES = 64 << 20
_SLACK_BYTES = 64 << 10  # a relayed body travels in an envelope
_LENGTH = struct.Struct(">I")

Message = dict[str, Any]
Schemas = dict[str, dict[str, type | tuple[type, ...]]]


def check(message: object, schemas: Schemas) -> Message:
    """Return the message, if it has a known type and all its fields with the right types."""
    kind = message.get("type") if isinstance(message, dict) else None
    if not isinstance(message, dict) or not isinstance(kind, str) or kind not in schemas:
        raise WireError(f"unknown message {str(message)[:200]!r}; expected a type of {sorted(schemas)}")
    for name, wanted in schemas[kind].items():
        if not isinstance(message.get(name), wanted):
            raise WireError(f"{kind}.{name} = {str(message.get(name))[:200]!r}: expected {wanted}")
    return message


def encode(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > LIMIT_BYTES + _SLACK_BYTES:
        raise WireError(f"message of {len(body)} bytes is over the limit of {LIMIT_BYTES}")
    return _LENGTH.pack(len(body)) + body


class Conn:
    """Framed messages over one stream socket. `push`, `flush` and `pull` never block and suit a selector; `send` and
    `recv` are for an end that has nothing to do but wait."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(False)
        self.sock = sock
        self.eof = False  # the peer is gone, and all that it sent was taken in
        self._in = bytearray()
        self._out = bytearray()
        self._inbox: deque[Message] = deque()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def pending_bytes(self) -> int:
        return len(self._out)

    def push(self, message: Message) -> None:
        self._out += encode(message)
        self.flush()

    def flush(self) -> None:
        """Write what the kernel takes now. A peer that is gone takes everything: reading will tell."""
        try:
            self._write()
        except BlockingIOError:
            pass
        except OSError:
            self._out = bytearray()  # the old one cannot shrink while the error's traceback holds a part of it

    def pull(self, drain: bool = False) -> list[Message]:
        """Return the messages completed by one read, or with `drain`, by as many reads as there is something to
        read."""
        messages: list[Message] = []
        while not self.eof:
            try:
                data = self.sock.recv(1 << 18)
            except BlockingIOError:
                break
            except OSError:  # reset, or nothing was heard of the other host for too long
                data = b""
            self.eof = not data
            self._in += data
            messages += self._frames()
            if not drain:
                break
        return messages

    def send(self, message: Message, timeout: float | None = None) -> None:
        """Wait until the kernel has taken everything. Raise TimeoutError; BrokenPipeError when the peer is gone."""
        self._out += encode(message)
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._out:
            try:
                self._write()
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)

    def recv(self, timeout: float | None = None) -> Message | None:
        """Return the next message; None when the peer is gone. Raise TimeoutError."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._inbox and not self.eof:
            self._wait(select.POLLIN, deadline)
            self._inbox.extend(self.pull())
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        self.sock.close()

    def _frames(self) -> Iterator[Message]:
        while len(self._in) >= _LENGTH.size:
            size = _LENGTH.unpack_from(self._in)[0]
            if size > LIMIT_BYTES + _SLACK_BYTES:
                raise WireError(f"message of {size} bytes is over the limit of {LIMIT_BYTES}")
            end = _LENGTH.size + size
            if len(self._in) < end:
                return
            body = bytes(self._in[_LENGTH.size : end])
            del self._in[:end]
            yield _decode(body)

    def _write(self) -> None:
        while self._out:
            with memoryview(self._out) as view:
                sent = self.sock.send(view[: 1 << 20])
            del self._out[:sent]

    def _wait(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        poll.register(self.sock, event)
        left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
        if not poll.poll(left_ms):
            raise TimeoutError("the peer did not answer in time")


def _decode(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except ValueError as e:
        raise WireError(f"a message is not JSON: {e}") from None
    if not isinstance(message, dict):
        raise WireError(f"a message is a JSON {type(message).__name__}, not an object")
    return message
