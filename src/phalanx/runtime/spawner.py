"""The processes of one host: a zygote that forks workers, a channel to each of them, and the memory in which they
record their progress. Nothing here blocks; `listen` registers what a loop is to wait for."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from phalanx.observe.progress import RECORD_BYTES, Progress
from phalanx.runtime import kernel
from phalanx.runtime.wire import Conn, Message, Schemas, WireError, check

SLOTS = 256  # workers on one host at a time
WORKER_BACKLOG_BYTES = 128 << 20  # a worker that leaves more than this unread is killed
TAIL_BYTES, TAIL_LINES, TAIL_CHARS = 1 << 16, 15, 4000  # of a log: bytes to read, lines and characters to report
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

#: Reports from the zygote.
REPORTS: Schemas = {
    "ready": {"threads": int},
    "failed": {"text": str},
    "started": {"worker": int, "pid": int},
    "exit": {"worker": int, "status": int, "error": str},
}


class Stop(Exception):
    """The end of the host's processes, with the reason."""


class Owner(Protocol):
    """The receiver of reports about the workers."""

    def started(self, w: Worker) -> None: ...
    def heard(self, w: Worker, body: Message) -> None: ...
    def ended(self, w: Worker, code: int, error: str) -> None: ...  # a negative code is a signal


@dataclass
class Worker:
    number: int
    slot: int
    progress: Progress
    conn: Conn
    log: int  # file descriptor
    pid: int = 0  # 0: not forked yet
    doomed: bool = False
    error: str = ""

    def kill(self) -> None:
        """Kill the worker, with everything that it started."""
        self.doomed = True
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def tail(self) -> str:
        """Return the last lines of its log."""
        size = os.fstat(self.log).st_size
        text = os.pread(self.log, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
        return "\n".join(text.splitlines()[-TAIL_LINES:])[-TAIL_CHARS:]


@dataclass(frozen=True)
class Warm:
    """A zygote that was forked with everything imported, and its environment."""

    pid: int
    socket: socket.socket
    env: dict[str, str]


class Spawner:
    def __init__(self, owner: Owner, preload: list[str], warm: Warm | None = None):
        """`preload`: modules that the zygote imports. All processes inherit the descriptors that are inheritable here.
        `warm`: a zygote that runs already, and has imported them."""
        self.owner = owner
        self.workers: dict[int, Worker] = {}
        self.board_fd = os.memfd_create("phalanx-board")
        os.ftruncate(self.board_fd, SLOTS * RECORD_BYTES)
        self.board = memoryview(mmap.mmap(self.board_fd, SLOTS * RECORD_BYTES))
        self._requests: deque[tuple[Worker, socket.socket]] = deque()  # to be forked; their end of the channel
        self._zygote_status: int | None = None
        if warm:
            self.zygote_pid, self._zygote = warm.pid, warm.socket
            self._zygote.send(json.dumps({"env": dict(os.environ.items() - warm.env.items())}).encode())
        else:
            self._zygote, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            os.set_inheritable(theirs.fileno(), True)
            args = [sys.executable, "-P", "-m", "phalanx.runtime.zygote", str(theirs.fileno()), str(os.getpid())]
            self.zygote_pid = os.posix_spawn(sys.executable, [*args, *preload], os.environ)
            theirs.close()
        self._zygote.setblocking(False)

    def listen(self, register: Callable[[Any, int, Callable[[int], None]], None], may_read: bool) -> None:
        """Register every channel that may bring something, or has something left to send. `may_read`: read from the
        workers, too."""
        register(self._zygote, READ | (WRITE if self._requests else 0), self._on_zygote)
        for w in self.workers.values():
            mask = READ if may_read and w.pid and not w.conn.eof else 0
            register(w.conn, mask | (WRITE if w.conn.pending_bytes else 0), partial(self._on_worker, w))
        self._register = register

    def reap(self) -> None:
        """Reap the children that have ended, after SIGCHLD: the zygote, or what a worker left behind."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.zygote_pid:
                    self._zygote_status = ended[1]  # the end of its socket follows, after its last reports
        except ChildProcessError:
            pass

    # -- what is asked for

    def spawn(self, number: int, entry: str, args: dict[str, Any], log: str) -> None:
        """Fork a process that calls the function behind "package.module:function" with (channel, args)."""
        free = set(range(SLOTS)) - {w.slot for w in self.workers.values()}
        if number in self.workers or not free:
            raise WireError(f"worker {number} is running" if free else f"more than {SLOTS} workers")
        slot = min(free)
        record = self.board[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]
        record[:] = bytes(RECORD_BYTES)
        log_fd = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        ours, theirs = socket.socketpair()
        w = self.workers[number] = Worker(number, slot, Progress(record), Conn(ours), log_fd)
        w.conn.push({"entry": entry, "args": args})
        self._requests.append((w, theirs))
        self._pass_requests()

    def send(self, number: int, body: Message) -> None:
        w = self.workers.get(number)
        if w is None:
            return  # it has ended
        w.conn.push(body)
        if w.conn.pending_bytes > WORKER_BACKLOG_BYTES:
            w.error = f"it left {w.conn.pending_bytes >> 20} MiB unread in its channel"
            w.kill()

    def kill(self, number: int) -> None:
        if number in self.workers:
            self.workers[number].kill()

    def _pass_requests(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # later; or never, as reading will tell
            while self._requests:
                w, theirs = self._requests[0]
                packet = json.dumps({"worker": w.number, "slot": w.slot, "bound": True}).encode()
                socket.send_fds(self._zygote, [packet], [theirs.fileno(), self.board_fd, w.log])
                self._requests.popleft()
                theirs.close()

    # -- what is heard

    def _on_worker(self, w: Worker, mask: int, drain: bool = False) -> None:
        if self.workers.get(w.number) is not w:
            return  # it ended earlier in this round
        w.conn.flush()
        try:
            for body in w.conn.pull(drain) if mask & READ else ():
                self.owner.heard(w, body)
        except WireError as e:
            w.error = f"it sent a malformed message: {e}"
            w.kill()

    def _on_zygote(self, mask: int) -> None:
        self._pass_requests()
        if not mask & READ:
            return
        try:
            packet = self._zygote.recv(1 << 20)
        except ConnectionError:
            return  # it left requests unread; the kernel reports that once, before what it had sent
        if not packet:
            if self._zygote_status is None:
                os.kill(self.zygote_pid, signal.SIGKILL)  # it is ending: this only bounds the wait
                self._zygote_status = os.waitpid(self.zygote_pid, 0)[1]
            raise Stop(f"the zygote ended ({kernel.how(self._zygote_status)})")
        report = check(json.loads(packet), REPORTS)
        kind = report.pop("type")
        if kind == "ready" and report["threads"] > 1:
            raise Stop(
                f"a preloaded module has started {report['threads'] - 1} threads: workers could hang after a fork"
            )
        if kind == "failed":
            raise Stop(f"a module could not be preloaded:\n{report['text']}")
        if kind == "started":
            self._on_started(**report)
        elif kind == "exit":
            self._on_exit(**report)

    def _on_started(self, worker: int, pid: int) -> None:
        w = self.workers[worker]
        w.pid = pid
        self.owner.started(w)
        if w.doomed:
            w.kill()

    def _on_exit(self, worker: int, status: int, error: str) -> None:
        w = self.workers[worker]
        self._on_worker(w, READ, drain=True)  # its last messages come before its death
        w.kill()  # all that it leaves behind
        self._register(w.conn, 0, lambda mask: None)
        w.conn.close()
        del self.workers[worker]
        code = os.waitstatus_to_exitcode(status) if not error else 1
        self.owner.ended(w, code, error or w.error)
        os.close(w.log)
