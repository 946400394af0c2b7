"""The client's end of `runtime.bare`: start it, and hear what becomes of its workers.

If this process ends, that one ends, the zygote with it, and the workers with the zygote: nothing stays behind.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Self

from phalanx.runtime import kernel
from phalanx.runtime.wire import Conn, Message, Schemas, WireError, check

SEND_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0

EVENTS: Schemas = {
    "started": {"worker": int, "pid": int, "service": str},
    "message": {"worker": int, "body": dict},
    "exit": {"worker": int, "code": (int, type(None)), "signal": (str, type(None)), "service": str},
    "hang": {"worker": int, "workers": list, "reason": str, "progress": dict, "final": bool},
    "node_lost": {"reason": str},
}


class BareClient:
    """A process of `runtime.bare`. `preload`: modules that the zygote imports before it forks; `env`: added to the
    environment of all processes; `log`: where this process and the zygote write, else standard error."""

    def __init__(self, preload: list[str], env: dict[str, str] | None = None, log: Path | None = None):
        self.session = uuid.uuid4().hex
        self.running: dict[int, int] = {}  # worker -> pid
        self._lost: Message | None = None
        ours, theirs = socket.socketpair()
        # Every process of the tree holds the writing end; the reading end ends when the last of them is gone.
        self._lifeline, held = os.pipe()
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        stderr = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "phalanx.runtime.bare", str(theirs.fileno()), *preload],
            env={**os.environ, **(env or {}), "PYTHONPATH": path, "PHALANX_SESSION": self.session},
            stdin=subprocess.DEVNULL,
            stdout=stderr if stderr is not None else subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[theirs.fileno(), held],
            start_new_session=True,  # Ctrl-C in the terminal reaches this process only
        )
        theirs.close()
        os.close(held)
        if stderr is not None:
            os.close(stderr)
        self._conn = Conn(ours)

    def spawn(self, worker: int, entry: str, args: dict[str, Any], log: Path) -> None:
        """Fork a process that calls the function behind "package.module:function" with (channel, args)."""
        self.command(type="spawn", worker=worker, entry=entry, args=args, log=str(Path(log).absolute()))

    def send(self, worker: int, body: Message) -> None:
        self.command(type="send", worker=worker, body=body)

    def kill(self, worker: int) -> None:
        """Send SIGKILL to a worker and to everything that it started. Its exit event follows."""
        self.command(type="kill", worker=worker)

    def watch(self, timeout_s: float) -> None:
        """Report a hang when workers stand still for this long in a phase that should move; 0: never."""
        self.command(type="watch", timeout_s=timeout_s)

    def command(self, **command: Any) -> None:
        if self._lost:
            return  # the event that reports it is all that the caller can get now
        try:
            self._conn.send(command, SEND_TIMEOUT_S)
        except TimeoutError:
            self._lost = {"type": "node_lost", "reason": f"the node took no message for {SEND_TIMEOUT_S:.0f} s"}
        except OSError:
            pass  # it is gone; its last messages can still be read, and then its end

    def events(self, timeout: float | None = None) -> Message | None:
        """Return the next event, or None after `timeout` seconds. Once the node is lost, that is the only event."""
        if self._lost:
            return self._lost
        try:
            event = self._conn.recv(timeout)
            if event is not None:
                check(event, EVENTS)
        except TimeoutError:
            return None
        except WireError as e:
            event = {"type": "node_lost", "reason": f"the node sent a malformed message: {e}"}
        if event is None:
            event = {"type": "node_lost", "reason": f"the node process {self._how_it_ended()}"}
        if event["type"] == "node_lost":
            self._lost = event
        elif event["type"] == "started":
            self.running[event["worker"]] = event["pid"]
        elif event["type"] == "exit":
            self.running.pop(event["worker"], None)
        return event

    def fileno(self) -> int:
        return self._conn.fileno()

    def close(self) -> bool:
        """End everything. Return whether every process of the tree is known to be gone."""
        if self._lifeline < 0:
            return True
        self._conn.close()  # the node takes it as its order to leave
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        try:
            self.process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._sweep()
        poll = select.poll()
        poll.register(self._lifeline, select.POLLIN)
        gone = bool(poll.poll(max(100.0, (deadline - time.monotonic()) * 1e3)))
        os.close(self._lifeline)
        self._lifeline = -1
        return gone

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sweep(self) -> None:
        """End what workers had started, in case the node could not. (The workers themselves end with their node.)"""
        for pid in filter(None, self.running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.running.clear()

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {kernel.signal_name(-code)}" if code < 0 else f"ended with code {code}"
