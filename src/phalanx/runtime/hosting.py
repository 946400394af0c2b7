"""A process with a zygote and workers: one loop that handles signals, the zygote and the workers, and watches for
hangs. Subclasses decide how to respond: `started`, `heard`, `ended` and `hung`."""

from __future__ import annotations

import signal
import socket
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from phalanx.runtime import kernel
from phalanx.runtime.spawner import READ, Spawner, Stop, Worker
from phalanx.runtime.standstill import Watch
from phalanx.runtime.transport import Loop
from phalanx.runtime.wire import Message

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
BACKLOG_BYTES = 16 << 20  # beyond this backlog workers are not read either, and wait in send


class Host(ABC):
    spawner: Spawner | None = None  # None: what to preload is not known yet
    stopped: Stop | None = None  # what has ended it

    def __init__(self) -> None:
        self.loop, self.watch = Loop(), Watch()
        self._masks: dict[Any, int] = {}
        self._signals, self._wakeup = socket.socketpair()
        for end in (self._signals, self._wakeup):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno())
        for number in (*ENDING, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # what matters is the number in the socket
        kernel.adopt_orphans()

    def run(self) -> str:
        """Serve until something ends the process. Return what it was."""
        try:
            while True:
                self._register(self._signals, READ, self._on_signal)
                self.listen()
                behind = self.backlog_bytes > BACKLOG_BYTES
                if self.spawner:
                    self.spawner.listen(self._register, may_read=not behind)
                tick_s = self.watch.tick_s()
                self.loop.turn() if tick_s is None else self.loop.turn(tick_s)
                if behind:
                    self.watch.forgive()  # workers may stand still because their messages are not taken
                for event in self.watch.look(self.spawner.workers.values() if self.spawner else ()):
                    self.hung(event)
        except Stop as e:
            self.stopped = e
            return str(e)
        except Exception:
            return f"the process failed:\n{traceback.format_exc()}"
        finally:
            kernel.end_all_children(timeout=5.0)

    def _register(self, source: Any, mask: int, callback: Callable[[int], None]) -> None:
        if self._masks.get(source, 0) != mask:
            self.loop.watch(source, mask, callback)
            self._masks[source] = mask
            if not mask:
                del self._masks[source]

    def _on_signal(self, mask: int) -> None:
        for number in self._signals.recv(4096):
            if number in ENDING:
                raise Stop(f"the node process was ended by {kernel.signal_name(number)}")
        if self.spawner:
            self.spawner.reap()

    @abstractmethod
    def listen(self) -> None:
        """Register everything else that may send messages."""

    @property
    @abstractmethod
    def backlog_bytes(self) -> int:
        """Return how many bytes of messages nobody has taken yet."""

    @abstractmethod
    def started(self, w: Worker) -> None: ...

    @abstractmethod
    def heard(self, w: Worker, body: Message) -> None: ...

    @abstractmethod
    def ended(self, w: Worker, code: int, error: str) -> None: ...

    @abstractmethod
    def hung(self, event: Message) -> None: ...
