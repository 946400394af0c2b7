"""The rendezvous process of a node: the node's hub behind an abstract Unix socket. The kernel identifies the process
and the user at the other end. Other users are turned away, and a process may enter only the meetings that the agent has
sent its worker to. Keys from ranks of other nodes arrive through the agent's control link, so nothing listens on the
network.

A connection is for one scope, which it names first. It then sets and gets keys, waiting for one answer at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from phalanx.core.errors import WireError
from phalanx.gate.hub import Hub, Item
from phalanx.gate.loop import READ, WRITE, Loop

MESSAGE_BYTES = 4 << 20
Scope = tuple[str, int]  # what meets, and the number of that meeting
_LENGTH = struct.Struct(">I")


class Meeting:
    """The door to a hub. `relay(item)` sends an item to the next hub; None: there is none. `may(pid, scope)` says
    whether a process may enter. Clients are answered with {"values"} (the key they asked for, and all others of its
    room that they do not have yet), {"result"} or {"error"}."""

    def __init__(
        self,
        loop: Loop,
        relay: Callable[[Item], object] | None = None,
        may: Callable[[int, Scope], bool] = lambda pid, scope: True,
    ):
        self._loop, self._may, self.hub = loop, may, Hub(self._answer, relay)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0phalanx-meeting-{secrets.token_hex(16)}")
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self.address = self._listener.getsockname()[1:].decode()
        loop.watch(self._listener, READ, self._accept)

    def _accept(self, mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                if uid != os.getuid():
                    sock.close()
                    continue
                sock.setblocking(False)
                client = _Client(sock, pid)
                self._loop.watch(sock, READ, partial(self._hear, client))

    def _hear(self, client: _Client, mask: int) -> None:
        try:
            self._flush(client)
            for message in client.pull():
                self._obey(client, message)
        except (OSError, WireError, ValueError, KeyError, TypeError, IndexError):
            self._end(client)

    def _obey(self, client: _Client, message: dict[str, Any]) -> None:
        if client.scope is None:
            what, number = message["scope"]
            client.scope = (str(what), int(number))
            if not self._may(client.pid, client.scope):
                raise WireError(f"process {client.pid} was not sent to {client.scope}")
            return
        op, scope = message["op"], client.scope
        if op == "set":
            self.hub.take(client, ["set", *scope, message["key"], message["value"]])
        elif op == "get":
            self.hub.take(client, ["want", *scope, message["key"]])
        else:
            self.hub.take(client, ["call", *scope, 0, op, message["args"]])

    def _answer(self, client: _Client, item: Item) -> None:
        kind = item[0]
        if kind == "have":
            room = self.hub.room(item[1], item[3])
            news = {key: value for key, value in room.items() if key not in client.told or key == item[3]}
            client.told |= news.keys()
            client.push({"values": news})
        elif kind == "result" and item[4] is not None:
            client.push({"result": item[4]})
        else:
            what = "a later meeting has begun" if kind == "over" else "the controller was lost"
            client.push({"error": f"{what}: connection closed"})
        with contextlib.suppress(OSError):
            self._flush(client)

    def _flush(self, client: _Client) -> None:
        if client.sock.fileno() >= 0:
            client.flush()
            mask = READ | (WRITE if client.out else 0)
            self._loop.watch(client.sock, mask, partial(self._hear, client))

    def _end(self, client: _Client) -> None:
        if client.sock.fileno() >= 0:
            self.hub.lose(client)
            self._loop.watch(client.sock, 0)
            client.sock.close()


class _Client:
    def __init__(self, sock: socket.socket, pid: int):
        self.sock, self.pid = sock, pid
        self.scope: Scope | None = None
        self.told: set[str] = set()  # keys that were sent to it
        self.out, self._in = bytearray(), bytearray()

    def push(self, message: dict[str, Any]) -> None:
        self.out += framed(message)

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.out:
                del self.out[: self.sock.send(self.out)]

    def pull(self) -> list[dict[str, Any]]:
        try:
            data = self.sock.recv(1 << 18)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionError("it is gone")
        self._in += data
        found = []
        while len(self._in) >= _LENGTH.size:
            size = _LENGTH.unpack_from(self._in)[0]
            if size > MESSAGE_BYTES:
                raise WireError(f"a message of {size} bytes")
            if len(self._in) < _LENGTH.size + size:
                break
            found.append(json.loads(self._in[_LENGTH.size : _LENGTH.size + size]))
            del self._in[: _LENGTH.size + size]
        return found


def framed(message: dict[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def serve(channel: Any, args: dict[str, Any]) -> None:
    """Serve until the channel ends. `alone`: no other node takes part, nothing is relayed, and every process may
    enter."""
    loop, items, over = Loop(), list[Item](), False
    allowed: dict[tuple[int, str], int] = {}  # process, what meets -> the number of the meeting

    def send() -> None:
        channel.send({"type": "relay", "items": items.copy()})
        items.clear()

    def relay(item: Item) -> None:
        if not items:
            loop.after(0.0, send)  # together with all other items of this round
        items.append(item)

    def may(pid: int, scope: Scope) -> bool:
        obey(READ)  # the agent allows a process before it tells the worker
        return allowed.get((pid, scope[0])) == scope[1]

    meeting = Meeting(loop) if args.get("alone") else Meeting(loop, relay, may)
    channel.send({"type": "store", "address": meeting.address})

    def obey(mask: int) -> None:
        nonlocal over
        with contextlib.suppress(TimeoutError):
            while (order := channel.recv(0)) is not None:
                if order["type"] == "resync":
                    meeting.hub.resync()
                elif order["type"] == "allow":
                    what, number = order["scope"]
                    allowed[order.get("pid", 0), what] = number
                for item in order.get("items", ()):
                    meeting.hub.hear(item)
            over = True

    loop.watch(channel, READ, obey)
    while not over:
        loop.turn()
