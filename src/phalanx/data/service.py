"""The data service: one process per node that fetches and verifies the samples of all its ranks and lays them out in
shared memory, some steps ahead. Ranks that work on the same micro-batches read the same bytes.

A rank connects to an abstract Unix socket, names its micro-batches and its first step, and gets the descriptor of its
lane: a ring of slots, one per step. From then on the service reports which steps are ready, and the rank which it is
done with. Nothing is left behind when either ends.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import selectors
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from phalanx.core import document
from phalanx.data.loader import AT_ONCE, Loader, Located
from phalanx.data.samples import places_of
from phalanx.data.selection import RunData

_WORD = struct.Struct("=Q")  # a message after the handshake: a number of steps


@dataclass(eq=False)
class Lane:
    """A ring of steps for the ranks that share these micro-batches."""

    places: np.ndarray  # in a step, counted from its first
    slots: int
    slot_bytes: int
    counts: int  # extents; a slot begins with the number of rows of each
    step: int  # the next to be filled
    awaited: int  # ranks that have yet to connect; until then nothing is overwritten
    fd: int = -1
    clients: dict[socket.socket, int] = field(default_factory=dict)  # client -> the steps that it is done with
    told: set[socket.socket] = field(default_factory=set)  # clients that have the descriptor and get reports
    _ahead: Located | None = None
    _ahead_from: int = 0

    def __post_init__(self) -> None:
        self.start = self.step
        self.fd = os.memfd_create("phalanx-data")
        os.ftruncate(self.fd, self.slots * self.slot_bytes)
        self.memory = mmap.mmap(self.fd, self.slots * self.slot_bytes)

    @property
    def has_room(self) -> bool:
        done = [self.start] if self.awaited > 0 else list(self.clients.values())
        return bool(self.clients) and self.step < min(done) + self.slots

    def holds(self, step: int) -> bool:
        """Return whether a rank that begins at `step` can join."""
        return bool(self.clients) and max(self.start, self.step - self.slots) <= step <= self.step

    def fill(self, loader: Loader, run: RunData) -> None:
        """Fill the slot of the next step."""
        n = len(self.places)
        done = self.step - self._ahead_from
        if self._ahead is None or (done + 1) * n > len(self._ahead):
            steps = self.step + np.arange(max(1, AT_ONCE // n))
            self._ahead, self._ahead_from, done = loader.locate(_places(steps, self.places, run)), self.step, 0
        located = self._ahead[done * n : (done + 1) * n]
        at = self.step % self.slots * self.slot_bytes
        counts = np.frombuffer(self.memory, np.int64, self.counts, at)
        rows = np.frombuffer(self.memory, loader.manifest.dtype, n * loader.width, at + counts.nbytes)
        loader.fill(located, rows.reshape(n, loader.width))
        counts[:] = np.bincount(located.extents, minlength=self.counts)
        self.step += 1

    def close(self) -> None:
        os.close(self.fd)  # the mapping is freed when nothing points into it any more


def _places(steps: np.ndarray, places: np.ndarray, run: RunData) -> np.ndarray:
    return (run.cursor(steps)[:, None] + places[None, :]).ravel()


class Service:
    def __init__(self, run: RunData, channel: Any):
        self.run, self.channel = run, channel
        self.loader = run.open(on_event=channel.send)
        m = self.loader.manifest
        self.about = {
            "fields": [[f.name, f.dtype, f.shape] for f in m.fields],
            "width": self.loader.width,
            "eos": m.eos,
            "sources": [e.source for e in m.extents],
        }
        self.lanes: list[Lane] = []
        self.changed = threading.Condition()
        self.failure: BaseException | None = None
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(f"\0phalanx-data-{secrets.token_hex(16)}")
        self.listener.listen(1024)
        self.address = self.listener.getsockname()[1:].decode()

    def serve(self) -> None:
        """Serve until the channel ends."""
        selector = selectors.DefaultSelector()
        selector.register(self.listener, selectors.EVENT_READ)
        selector.register(self.channel, selectors.EVENT_READ)
        threading.Thread(target=self._fill, daemon=True, name="phalanx-fill").start()
        self.channel.send({"type": "data", "address": self.address})
        while True:
            for key, _ in selector.select(1.0):
                if key.fileobj is self.channel:
                    return
                if key.fileobj is self.listener:
                    if client := self._accept():
                        selector.register(client, selectors.EVENT_READ)
                elif not self._hear(key.fileobj):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
            if self.failure:
                raise self.failure

    def _accept(self) -> socket.socket | None:
        client, _ = self.listener.accept()
        uid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if uid != os.getuid():
            client.close()
            return None
        client.settimeout(10.0)  # for a reply that is larger than the socket's buffer
        return client

    def _hear(self, client: socket.socket) -> bool:
        """Handle one message of a rank: its hello, its receipt of the descriptor, then how many steps it is done with.
        A rank that stops between two of them delays nobody. Return False if it is gone or sent nonsense."""
        with self.changed:
            lane = next((lane for lane in self.lanes if client in lane.clients), None)
            try:
                if lane is None:
                    self._welcome(client, json.loads(client.recv(1 << 20)))
                elif client not in lane.told:
                    _all_of(client.recv(1), 1)
                    client.send(_WORD.pack(lane.step))
                    lane.told.add(client)
                else:
                    lane.clients[client] = _WORD.unpack(_all_of(client.recv(_WORD.size), _WORD.size))[0]
            except (OSError, ValueError, KeyError, TypeError):
                self._drop(client)
                return False
            self.changed.notify()
        return True

    def _welcome(self, client: socket.socket, hello: dict[str, Any]) -> None:
        indices, step, peers = [int(i) for i in hello["indices"]], int(hello["step"]), int(hello["peers"])
        places = places_of(indices, self.run.micro_batch)
        lane = next((x for x in self.lanes if x.holds(step) and np.array_equal(x.places, places)), None)
        if lane is None:
            lane = self._new_lane(places, step, peers)
        lane.awaited -= 1
        lane.clients[client] = step
        reply = {"slots": lane.slots, "slot_bytes": lane.slot_bytes, **self.about}
        socket.send_fds(client, [json.dumps(reply).encode()], [lane.fd])

    def _drop(self, client: socket.socket) -> None:
        lane = next((lane for lane in self.lanes if client in lane.clients), None)
        if lane is None:
            return
        del lane.clients[client]
        lane.told.discard(client)
        if not lane.clients:
            self.lanes.remove(lane)
            lane.close()

    def _new_lane(self, places: np.ndarray, step: int, peers: int) -> Lane:
        extents = len(self.loader.manifest.extents)
        size = 8 * extents + len(places) * self.loader.width * self.loader.manifest.dtype.itemsize
        self.lanes.append(Lane(places, self.run.buffer_steps, -(-size // 4096) * 4096, extents, step, peers))
        return self.lanes[-1]

    def _fill(self) -> None:
        """Keep filling the lane that is furthest behind."""
        try:
            while True:
                with self.changed:
                    while not (open_lanes := [lane for lane in self.lanes if lane.has_room]):
                        self.changed.wait()
                lane = min(open_lanes, key=lambda lane: lane.step)
                lane.fill(self.loader, self.run)
                with self.changed:
                    for client in lane.told:
                        with contextlib.suppress(OSError):  # it is gone, which the next read reports
                            client.send(_WORD.pack(lane.step))
        except BaseException as error:
            self.failure = error


def _all_of(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise ConnectionError("the rank is gone")
    return data


def main(channel: Any, args: dict[str, Any]) -> None:
    Service(document.make(RunData, args["data"]), channel).serve()
