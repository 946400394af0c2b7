"""A process on this machine that has imported what ranks need. All nodes of the machine are forked from it: imports
take seconds but are done once, and a restarted node is up at once.

A node is not bound to this process: it ends with its channel, which its starter holds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from phalanx.observe.progress import RECORD_BYTES
from phalanx.runtime.wire import Conn

ANSWER_S = 10.0  # for a fork
CLOSE_S = 5.0


class Nursery:
    def __init__(self, preload: Sequence[str], env: dict[str, str], log: Path):
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "phalanx.runtime.zygote", str(theirs.fileno()), str(os.getpid())]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [*command, *preload],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal reaches the starter only
            )
        theirs.close()
        self._is_ready = False
        self._count = 0
        self._statuses: dict[int, int] = {}  # of nodes that have ended

    def is_importing(self) -> bool:
        """Return False once nodes can be forked, or never will be: then each imports by itself, and reports what is
        wrong."""
        if self._is_ready or self._process.poll() is not None:
            return False
        said = self._hear(0.0)
        self._is_ready = said.get("type") == "ready" and said["threads"] == 1  # others do not survive a fork
        return not said

    def fork(self, entry: str, argv: Sequence[str], log: Path, held: int) -> tuple[int, int, int, Conn]:
        """Fork a process that runs `entry` with the arguments. Return its number here, its pid, its pidfd and its
        channel. It and everything that it starts hold the descriptor `held`. Raise OSError if it cannot be forked."""
        if not self._is_ready:
            raise ConnectionError("nothing was imported")
        self._count += 1
        number = self._count
        ours, theirs = socket.socketpair()
        channel = Conn(ours)
        board = os.memfd_create("phalanx-board")
        with theirs, log.open("ab") as out, open(board, "wb") as memory:
            memory.truncate(RECORD_BYTES)
            packet = json.dumps({"worker": number, "slot": 0, "bound": False}).encode()
            socket.send_fds(self._control, [packet], [theirs.fileno(), board, out.fileno(), held])
        channel.send({"entry": entry, "args": {"argv": list(argv)}}, ANSWER_S)
        deadline = time.monotonic() + ANSWER_S
        while (said := self._hear(deadline - time.monotonic())).get("worker") != number:
            if not said:
                channel.close()  # if it is forked after all, it ends at once
                self.close()
                raise TimeoutError("no node was forked")
        if said["type"] != "started":
            channel.close()
            raise ChildProcessError(said["error"])
        return number, int(said["pid"]), said["pidfd"], channel

    def status(self, number: int, timeout: float) -> int | None:
        """Return how a node has ended, as wait(2) reports it; None: that cannot be known."""
        deadline = time.monotonic() + timeout
        while number not in self._statuses and self._hear(deadline - time.monotonic()):
            pass
        return self._statuses.get(number)

    def close(self) -> None:
        self._is_ready = False
        self._control.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _hear(self, timeout: float) -> dict:
        """Return the next packet; {}: there is none in time, or there will never be one."""
        try:
            self._control.settimeout(max(timeout, 1e-6))
            packet, fds, _, _ = socket.recv_fds(self._control, 1 << 20, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return {}
        said = json.loads(packet or b"{}")
        if said.get("type") == "exit" and not said["error"]:
            self._statuses[said["worker"]] = said["status"]
        return {**said, "pidfd": fds[0]} if fds else said
