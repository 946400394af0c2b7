"""The client's end of a node: start it, spawn workers, exchange messages, hear of deaths and hangs.

Whatever happens to this process, to the node or to any worker, nothing stays behind: the node ends when its
client does, the zygote with the node, the workers with the zygote.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.runtime import kernel
from phalanx.runtime.wire import Conn, Message, Schemas, WireError, check

SEND_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 5.0

EVENTS: Schemas = {
    "started": {"worker": int, "pid": int},
    "message": {"worker": int, "body": dict},
    "exit": {"worker": int, "code": (int, type(None)), "signal": (str, type(None)), "error": str, "progress": dict},
    "hang": {"worker": int, "workers": list, "reason": str, "progress": dict, "log_tail": str, "waits": bool},
    "node_lost": {"reason": str},
}


class NodeClient:
    """One node process and its workers. `preload`: modules that the zygote imports before it forks;
    `env`: added to the environment of all; `log`: where the node and the zygote write, else standard error; `prefix`:
    the command that starts it, where it is not this machine's own."""

    module, schemas = "phalanx.runtime.node", EVENTS

    def __init__(
        self,
        preload: list[str],
        env: dict[str, str] | None = None,
        log: Path | None = None,
        prefix: Sequence[str] = (),
    ):
        self.session = uuid.uuid4().hex
        self.running: dict[int, int] = {}  # worker -> pid, 0 until it has started
        self._lost: Message | None = None
        ours, theirs = socket.socketpair()
        # Every process of the tree holds the writing end; the reading end ends when the last of them is gone.
        self._lifeline, held = os.pipe()
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        stderr = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-P", "-m", self.module, str(theirs.fileno()), str(held), *preload],
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
        if worker in self.running:
            raise ValueError(f"worker {worker} is running")
        log = Path(log).absolute()
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()  # what cannot be written is better known here than in the node
        self._command(type="spawn", worker=worker, entry=entry, args=args, log=str(log))
        self.running[worker] = 0

    def send(self, worker: int, body: Message) -> None:
        self._command(type="send", worker=worker, body=body)

    def kill(self, worker: int) -> None:
        """SIGKILL, also for what the worker started. Its exit event follows."""
        self._command(type="kill", worker=worker)

    def watch(self, timeout_s: float) -> None:
        """Report a hang when workers stand still for this long in a phase that should move; 0: never."""
        self._command(type="watch", timeout_s=timeout_s)

    def events(self, timeout: float | None = None) -> Message | None:
        """The next event, or None after `timeout` seconds. Once the node is lost, that is the only event."""
        if self._lost:
            return self._lost
        try:
            event = self._conn.recv(timeout)
            if event is not None:
                check(event, self.schemas)
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
        """Readable when there is an event that is not in `unread` yet."""
        return self._conn.fileno()

    @property
    def unread(self) -> bool:
        return self._conn.has_messages

    def close(self) -> None:
        """End everything. Nothing of the tree is left when this returns."""
        if self._lifeline < 0:
            return
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
        poll.poll(max(100.0, (deadline - time.monotonic()) * 1e3))
        os.close(self._lifeline)
        self._lifeline = -1

    def __enter__(self) -> NodeClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _sweep(self) -> None:
        """The workers end with their node; what they had started ends here if the node could not see to it."""
        for pid in filter(None, self.running.values()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.running.clear()

    def _command(self, **command: Any) -> None:
        if self._lost:
            return  # the event that says so is all that the caller can get any more
        try:
            self._conn.send(command, SEND_TIMEOUT_S)
        except TimeoutError:
            self._lost = {"type": "node_lost", "reason": f"the node took no message for {SEND_TIMEOUT_S:.0f} s"}
        except OSError:
            pass  # it is gone; what it still said can be read, and then its end

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"was killed by {kernel.signal_name(-code)}" if code < 0 else f"ended with code {code}"


class AgentClient(NodeClient):
    """A node whose workers come and go as the controller says. They are heard of here, and not spawned."""

    module = "phalanx.runtime.agent"
    schemas = {**EVENTS, "left": {"reason": str}, "released": {}, "launched": {"worker": int, "rank": int}}

    def serve(self, **options: Any) -> None:
        """See SERVE in `agent`."""
        self._command(type="serve", **options)
