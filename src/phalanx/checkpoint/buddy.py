"""Copies of snapshots on a buddy node: one TCP connection per snapshot, a token first, then the sealed slot as it is.
What arrives is verified chunk by chunk before it replaces an older copy."""

from __future__ import annotations

import contextlib
import hmac
import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from phalanx.checkpoint.memory import SLOTS, Slot
from phalanx.core.checkpoint import BadCheckpoint

_LENGTH = struct.Struct(">I")
HELLO_BYTES = 1 << 16
TIMEOUT_S = 60.0


Held = tuple[Slot, Any]  # and the layout that it was made in, as JSON


class BuddyServer:
    """Keeps the newest copies of every rank that was pushed here, and hands them out; so it does with what `own` says
    that this node has itself of a rank. On loopback unless told otherwise."""

    def __init__(self, token: str, host: str = "127.0.0.1", own: Callable[[int], list[Held]] = lambda rank: []):
        self.token, self.copies, self._own = token, dict[int, list[Slot]](), own
        self.layouts: dict[int, Any] = {}  # of the copies
        self.most = SLOTS  # copies of a rank
        self._lock = threading.Lock()
        self._taking: dict[int, threading.Lock] = {}  # by rank: both of its slots may be on their way at once
        self._server = socket.create_server((host, 0))
        self.port: int = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True, name="phalanx-buddy").start()

    def _accept(self) -> None:
        while True:
            try:
                conn, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(conn,), daemon=True).start()

    def _serve(self, conn: socket.socket) -> None:
        with conn, contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            conn.settimeout(TIMEOUT_S)
            hello = receive(conn)
            if not hmac.compare_digest(str(hello["token"]), self.token):
                return
            rank = int(hello["rank"])
            if hello["type"] == "push":
                with self._lock:
                    taking = self._taking.setdefault(rank, threading.Lock())
                if not self.most:
                    return
                with taking:
                    self.layouts[rank] = hello.get("layout")
                    self._take(conn, rank, int(hello["image_bytes"]), int(hello["own_bytes"]))
            else:
                self._give(conn, rank, hello.get("at"))

    def _take(self, conn: socket.socket, rank: int, image_bytes: int, own_bytes: int) -> None:
        slot = self._room(rank, image_bytes, own_bytes)
        slot.break_seal()
        fill(conn, memoryview(slot.memory))
        error = ""
        try:
            if slot.header() is None:
                raise BadCheckpoint("the seal does not hold")
            slot.verify()
        except BadCheckpoint as bad:
            slot.break_seal()
            error = str(bad)
        with self._lock:
            copies = self.copies.setdefault(rank, [])
            if slot in copies:
                copies.remove(slot)
            copies.append(slot)  # the newest last
        send(conn, {"error": error})

    def _room(self, rank: int, image_bytes: int, own_bytes: int) -> Slot:
        """Where the oldest copy is, once there are two."""
        with self._lock:
            copies = self.copies.setdefault(rank, [])
            if copies and copies[0].image_bytes != image_bytes:
                copies.clear()
            return Slot(image_bytes, own_bytes) if len(copies) < self.most else copies[0]

    def _give(self, conn: socket.socket, rank: int, at: list[int] | None) -> None:
        """`at`: a step and its generation; else the newest."""
        with self._lock:
            kept: list[Held] = [(slot, self.layouts.get(rank)) for slot in self.copies.get(rank, [])]
        whole = [held for held in kept + self._own(rank) if (h := held[0].header()) and at in (None, _at(h))]
        if not whole:
            send(conn, {"error": f"there is no whole copy of rank {rank} here"})
            return
        slot, layout = max(whole, key=lambda held: _step(held[0]))
        send(conn, {"error": "", "image_bytes": slot.image_bytes, "own_bytes": slot.own_bytes, "layout": layout})
        conn.sendall(slot.memory)

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # or whoever waits in accept() takes one more
        self._server.close()


def _at(header: dict[str, Any]) -> list[int]:
    return [header["step"], header["generation"]]


def _step(slot: Slot) -> int:
    header = slot.header()
    return header["step"] if header else -1


def push(address: tuple[str, int], token: str, rank: int, slot: Slot, layout: Any = None) -> None:
    with socket.create_connection(address, TIMEOUT_S) as conn:
        about = {"image_bytes": slot.image_bytes, "own_bytes": slot.own_bytes, "layout": layout}
        send(conn, {"type": "push", "token": token, "rank": rank, **about})
        conn.sendall(slot.memory)
        error = receive(conn)["error"]
    if error:
        raise BadCheckpoint(f"the copy at the buddy node is damaged: {error}")


def fetch(address: tuple[str, int], token: str, rank: int, at: tuple[int, int] | None = None) -> Held:
    """A rank's copy of a step and its generation, or its newest; verified."""
    with socket.create_connection(address, TIMEOUT_S) as conn:
        send(conn, {"type": "get", "token": token, "rank": rank, "at": at})
        reply = receive(conn)
        if reply["error"]:
            raise BadCheckpoint(reply["error"])
        slot = Slot(int(reply["image_bytes"]), int(reply["own_bytes"]))
        fill(conn, memoryview(slot.memory))
    if slot.header() is None:
        raise BadCheckpoint(f"the copy of rank {rank} came without a seal that holds")
    slot.verify()
    return slot, reply["layout"]


def fill(conn: socket.socket, room: memoryview) -> None:
    done = 0
    while done < len(room):
        got = conn.recv_into(room[done:])
        if not got:
            raise ConnectionError("the connection ended in the middle of a transfer")
        done += got


def send(conn: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    conn.sendall(_LENGTH.pack(len(body)) + body)


def receive(conn: socket.socket, limit: int = HELLO_BYTES) -> dict[str, Any]:
    head = bytearray(_LENGTH.size)
    fill(conn, memoryview(head))
    (size,) = _LENGTH.unpack(head)
    if size > limit:
        raise ValueError(f"a message of {size} bytes")
    body = bytearray(size)
    fill(conn, memoryview(body))
    return json.loads(bytes(body))
