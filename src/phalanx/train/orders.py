"""Receive the node's commands in a thread of their own, because the trainer may be waiting for peers that are gone."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

from phalanx.parallel.groups import Door, break_connections


class Halted(RuntimeError):
    """The node has ended the world of this replica."""


class Commands:
    """The latest command of each kind, and a queue of those that are obeyed one after the other."""

    def __init__(self, channel: Any):
        self.world = self.generation = -1  # those that the worker is in, or is entering
        self.door: Door | None = None  # to the other replicas
        self.interfaces: dict[str, str] = {}  # in use: by the replica's groups ("world"), and by those across ("cross")
        self.halted = self.left = -1  # worlds
        self.parting = self.pausing = -1  # generations
        self.interval = (0, 0, 0)  # version, steps between durable checkpoints, and between snapshots in memory
        self.profile: tuple[int, int, list[int]] = (0, 0, [])  # steps, from and until, and the ranks to trace
        self._interruptible = False
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._channel = channel
        threading.Thread(target=self._listen, daemon=True, name="phalanx-commands").start()

    def next(self) -> dict[str, Any] | None:
        """Wait for the next command; None: the node is gone."""
        return self._queue.get()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Run work that is in vain when the world ends: Halted is then raised in the middle of it."""
        with self._lock:
            self._interruptible = True
        try:
            yield
        finally:
            with self._lock:
                self._interruptible = False

    def _halt(self, world: int) -> None:
        self.halted = max(self.halted, world)
        if self.halted < self.world:
            return
        if door := self.door:
            door.interrupt()
        break_connections()
        threading.Thread(target=self._insist, args=(world,), daemon=True).start()
        with self._lock:
            if self._interruptible:
                main = ctypes.c_ulong(threading.main_thread().ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(Halted))

    def _part(self, generation: int) -> None:
        """Continue the pass; stop waiting for other replicas."""
        self.parting = max(self.parting, generation)
        door = self.door
        if door and self.parting >= self.generation:
            door.interrupt()

    def _lose_link(self, interface: str) -> None:
        """Break the groups that use the interface: a lost link closes no connection by itself."""
        at = (self.world, self.generation)

        def insist() -> None:
            for _ in range(20):
                if (self.world, self.generation) != at or interface not in self.interfaces.values():
                    return
                break_connections()
                time.sleep(0.25)

        threading.Thread(target=insist, daemon=True).start()

    def _insist(self, world: int) -> None:
        """Break connections again for a while: a group may be connecting just now, and wait on a later connection."""
        for _ in range(20):
            time.sleep(0.25)
            if self.left >= world or self.world > world:
                return
            break_connections()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._channel.recv()) is not None:
                kind = message.get("type")
                if kind == "pause":
                    self.pausing = max(self.pausing, int(message["generation"]))
                elif kind == "link":
                    if not message["up"] and message["interface"] in self.interfaces.values():
                        self._lose_link(message["interface"])
                elif kind == "interval":
                    self.interval = (int(message["version"]), int(message["steps"]), int(message["memory_steps"]))
                elif kind == "profile":
                    self.profile = (int(message["first"]), int(message["last"]), list(message["ranks"]))
                else:
                    if kind == "halt":
                        self._halt(int(message["world"]))
                    elif kind == "part":
                        self._part(int(message["generation"]))
                    self._queue.put(message)
        self._queue.put(None)
