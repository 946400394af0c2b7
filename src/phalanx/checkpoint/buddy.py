"""Copies of snapshots on a buddy node: one proven connection per snapshot (`gate.peers`), which carries the sealed slot
as it is. What arrives is verified chunk by chunk; if it is damaged, its seal is broken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from phalanx.checkpoint.memory import SLOTS, Slot
from phalanx.core.checkpoint import BadCheckpoint
from phalanx.gate.peers import Peers, Stream

Held = tuple[Slot, Any]  # a snapshot, and the layout that it was made in, as JSON


class BuddyServer:
    """Keeps the newest copies of every rank that was pushed here. It hands out these, and the snapshots that this node
    has itself, which `own` returns by rank."""

    def __init__(self, peers: Peers, own: Callable[[int], list[Held]] = lambda rank: []):
        self.copies, self._own = dict[int, list[Slot]](), own
        self.layouts: dict[int, Any] = {}  # of the copies, by rank
        self.most = SLOTS  # copies kept of each rank
        self._lock = threading.Lock()
        self._taking: dict[int, threading.Lock] = {}  # by rank: two of its slots may be on their way at once
        self._gate = peers.listen(self._serve)
        self.port = self._gate.port

    def _serve(self, conn: Stream) -> None:
        hello = conn.receive()
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

    def _take(self, conn: Stream, rank: int, image_bytes: int, own_bytes: int) -> None:
        slot = self._room(rank, image_bytes, own_bytes)
        slot.break_seal()
        conn.fill(memoryview(slot.memory))
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
        conn.send({"error": error})

    def _room(self, rank: int, image_bytes: int, own_bytes: int) -> Slot:
        """Return a new slot, or that of the oldest copy once there are `most`."""
        with self._lock:
            copies = self.copies.setdefault(rank, [])
            if copies and copies[0].image_bytes != image_bytes:
                copies.clear()
            return Slot(image_bytes, own_bytes) if len(copies) < self.most else copies[0]

    def _give(self, conn: Stream, rank: int, at: list[int] | None) -> None:
        """Send a copy of a rank. `at`: a step and its generation; None: the newest."""
        with self._lock:
            kept: list[Held] = [(slot, self.layouts.get(rank)) for slot in self.copies.get(rank, [])]
        whole = [held for held in kept + self._own(rank) if (h := held[0].header()) and at in (None, _at(h))]
        if not whole:
            conn.send({"error": f"there is no whole copy of rank {rank} here"})
            return
        slot, layout = max(whole, key=lambda held: _step(held[0]))
        conn.send({"error": "", "image_bytes": slot.image_bytes, "own_bytes": slot.own_bytes, "layout": layout})
        conn.sendall(slot.memory)

    def close(self) -> None:
        self._gate.close()


def _at(header: dict[str, Any]) -> list[int]:
    return [header["step"], header["generation"]]


def _step(slot: Slot) -> int:
    header = slot.header()
    return header["step"] if header else -1


def push(peers: Peers, address: tuple[str, int], rank: int, slot: Slot, layout: Any = None) -> None:
    with peers.dial(address) as conn:
        about = {"image_bytes": slot.image_bytes, "own_bytes": slot.own_bytes, "layout": layout}
        conn.send({"type": "push", "rank": rank, **about})
        conn.sendall(slot.memory)
        error = conn.receive()["error"]
    if error:
        raise BadCheckpoint(f"the copy at the buddy node is damaged: {error}")


def fetch(peers: Peers, address: tuple[str, int], rank: int, at: tuple[int, int] | None = None) -> Held:
    """Fetch and verify a rank's copy of a step and its generation, or its newest."""
    with peers.dial(address) as conn:
        conn.send({"type": "get", "rank": rank, "at": at})
        reply = conn.receive()
        if reply["error"]:
            raise BadCheckpoint(reply["error"])
        slot = Slot(int(reply["image_bytes"]), int(reply["own_bytes"]))
        conn.fill(memoryview(slot.memory))
    if slot.header() is None:
        raise BadCheckpoint(f"the copy of rank {rank} came without a seal that holds")
    slot.verify()
    return slot, reply["layout"]
