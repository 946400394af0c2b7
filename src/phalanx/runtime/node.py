"""The node process: one per host. It owns the shared memory, the zygote and the workers' channels, relays
messages, reports deaths and hangs, and takes everything down when it ends or when its client does.

One thread, one selector, nothing that blocks: a slow client holds back the workers' messages, not the node.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import signal
import socket
import sys
import traceback
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

from phalanx.observe.progress import RECORD_BYTES, Progress
from phalanx.runtime import kernel
from phalanx.runtime.watch import Watch
from phalanx.runtime.wire import Conn, Message, Schemas, WireError, check

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SLOTS = 256  # workers on one node at a time
CLIENT_BACKLOG_BYTES = 16 << 20  # unread by the client: workers are not read either, and wait in send
WORKER_BACKLOG_BYTES = 128 << 20  # unread by a worker: it is given up
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE

COMMANDS: Schemas = {
    "spawn": {"worker": int, "entry": str, "args": dict, "log": str},
    "send": {"worker": int, "body": dict},
    "kill": {"worker": int},
    "watch": {"timeout_s": (int, float)},
}
REPORTS: Schemas = {
    "ready": {"threads": int},
    "failed": {"text": str},
    "started": {"worker": int, "pid": int},
    "exit": {"worker": int, "status": int, "error": str},
}


class Stop(Exception):
    """The end of the node, and what the client is told about it."""


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
        """With everything that it started."""
        self.doomed = True
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class Node:
    """What is heard of workers goes to the client as it is; an agent, which is a Node, does more with it."""

    commands = COMMANDS

    def __init__(self, client: Conn, lifeline: int, preload: list[str]):
        kernel.adopt_orphans()
        self.client = client
        self.watch = Watch()
        self.workers: dict[int, Worker] = {}
        self.board_fd = os.memfd_create("phalanx-board")
        os.ftruncate(self.board_fd, SLOTS * RECORD_BYTES)
        self.board = memoryview(mmap.mmap(self.board_fd, SLOTS * RECORD_BYTES))
        self.requests: deque[tuple[Worker, socket.socket]] = deque()  # to be forked; their end of the channel
        self.selector = selectors.DefaultSelector()
        self.signals, self._wakeup = socket.socketpair()
        self.signals.setblocking(False)
        self._wakeup.setblocking(False)
        signal.set_wakeup_fd(self._wakeup.fileno())
        for number in (*ENDING, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # what matters is the number in the socket
        self.zygote, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.zygote.setblocking(False)
        for fd in (theirs.fileno(), lifeline):
            os.set_inheritable(fd, True)
        args = [sys.executable, "-P", "-m", "phalanx.runtime.zygote", str(theirs.fileno()), str(os.getpid()), *preload]
        self.zygote_pid = os.posix_spawn(sys.executable, args, os.environ)
        self.zygote_status: int | None = None
        theirs.close()

    def run(self) -> str:
        """Serve until something ends the node; returns what it was."""
        try:
            while True:
                self._listen()
                self._wait(self.watch.tick_s())
                if self.client.pending_bytes > CLIENT_BACKLOG_BYTES:
                    self.watch.forgive()  # workers may stand still because their messages are not taken
                for event in self.watch.look(self.workers.values()):
                    self.hung(event)
        except Stop as e:
            return str(e)
        except Exception:
            return f"the node process failed:\n{traceback.format_exc()}"
        finally:
            kernel.end_all_children(timeout=5.0)

    # -- who speaks

    def _listen(self) -> None:
        """Read from everybody who may speak, write to everybody who is owed something."""
        self._register(self.signals, READ, self._on_signal)
        self._register(self.client, READ | (WRITE if self.client.pending_bytes else 0), self._on_client)
        self._register(self.zygote, READ | (WRITE if self.requests else 0), self._on_zygote)
        may_read = READ if self.client.pending_bytes <= CLIENT_BACKLOG_BYTES else 0
        for w in self.workers.values():
            mask = (may_read if w.pid and not w.conn.eof else 0) | (WRITE if w.conn.pending_bytes else 0)
            self._register(w.conn, mask, partial(self._on_worker, w))

    def _wait(self, timeout_s: float | None) -> None:
        for key, mask in self.selector.select(timeout_s):
            key.data(mask)

    def _register(self, source: Any, mask: int, callback: Any) -> None:
        key = self.selector.get_map().get(source)
        if key is None:
            if mask:
                self.selector.register(source, mask, callback)
        elif not mask:
            self.selector.unregister(source)
        elif mask != key.events:
            self.selector.modify(source, mask, callback)

    def _on_signal(self, mask: int) -> None:
        for number in self.signals.recv(4096):
            if number in ENDING:
                raise Stop(f"the node process was ended by {kernel.signal_name(number)}")
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # the zygote, or what a worker left behind
                if ended[0] == self.zygote_pid:
                    self.zygote_status = ended[1]  # the end of its socket follows, after what it had to say
        except ChildProcessError:
            pass

    def _on_client(self, mask: int) -> None:
        self.client.flush()
        for message in self.client.pull() if mask & READ else ():
            command = check(message, self.commands)
            getattr(self, "do_" + command.pop("type"))(**command)
        if self.client.eof:
            raise Stop

    def _on_zygote(self, mask: int) -> None:
        self._pass_requests()
        if not mask & READ:
            return
        try:
            packet = self.zygote.recv(1 << 20)
        except ConnectionError:
            return  # it left requests unread; the kernel says so once, before what it had sent
        if not packet:
            if self.zygote_status is None:
                os.kill(self.zygote_pid, signal.SIGKILL)  # it is ending: this only bounds the wait
                self.zygote_status = os.waitpid(self.zygote_pid, 0)[1]
            raise Stop(f"the zygote ended ({_how(self.zygote_status)})")
        report = check(json.loads(packet), REPORTS)
        getattr(self, "on_" + report.pop("type"))(**report)

    def _on_worker(self, w: Worker, mask: int, drain: bool = False) -> None:
        if self.workers.get(w.number) is not w:
            return  # it ended earlier in this round
        w.conn.flush()
        try:
            for body in w.conn.pull(drain) if mask & READ else ():
                self.heard(w, body)
        except WireError as e:
            w.error = f"it sent a malformed message: {e}"
            w.kill()

    # -- what the client asks for

    def do_spawn(self, worker: int, entry: str, args: dict[str, Any], log: str) -> None:
        free = set(range(SLOTS)) - {w.slot for w in self.workers.values()}
        if worker in self.workers or not free:
            raise WireError(f"spawn.worker = {worker}: it is running" if free else f"more than {SLOTS} workers")
        slot = min(free)
        record = self.board[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]
        record[:] = bytes(RECORD_BYTES)
        log_fd = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        ours, theirs = socket.socketpair()
        w = self.workers[worker] = Worker(worker, slot, Progress(record), Conn(ours), log_fd)
        w.conn.push({"entry": entry, "args": args})
        self.requests.append((w, theirs))
        self._pass_requests()

    def do_send(self, worker: int, body: Message) -> None:
        w = self.workers.get(worker)
        if w is None:
            return  # it ended, as the client is about to read
        w.conn.push(body)
        if w.conn.pending_bytes > WORKER_BACKLOG_BYTES:
            w.error = f"it left {w.conn.pending_bytes >> 20} MiB unread in its channel"
            w.kill()

    def do_kill(self, worker: int) -> None:
        if worker in self.workers:
            self.workers[worker].kill()

    def do_watch(self, timeout_s: float) -> None:
        self.watch.set(timeout_s)

    def _pass_requests(self) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):  # later; or never, as reading will tell
            while self.requests:
                w, theirs = self.requests[0]
                packet = json.dumps({"worker": w.number, "slot": w.slot}).encode()
                socket.send_fds(self.zygote, [packet], [theirs.fileno(), self.board_fd, w.log])
                self.requests.popleft()
                theirs.close()

    # -- what the zygote reports

    def on_ready(self, threads: int) -> None:
        if threads > 1:
            raise Stop(f"a preloaded module has started {threads - 1} threads: workers forked from it could hang")

    def on_failed(self, text: str) -> None:
        raise Stop(f"a module could not be preloaded:\n{text}")

    def on_started(self, worker: int, pid: int) -> None:
        w = self.workers[worker]
        w.pid = pid
        self.client.push({"type": "started", "worker": worker, "pid": pid})
        if w.doomed:
            w.kill()

    def on_exit(self, worker: int, status: int, error: str) -> None:
        w = self.workers[worker]
        self._on_worker(w, READ, drain=True)  # its last words come before its death
        w.kill()  # whatever it leaves behind
        self._register(w.conn, 0, None)
        w.conn.close()
        os.close(w.log)
        del self.workers[worker]
        code = os.waitstatus_to_exitcode(status) if not error else 1
        self.ended(
            w,
            {
                "type": "exit",
                "worker": worker,
                "code": code if code >= 0 else None,
                "signal": kernel.signal_name(-code) if code < 0 else None,
                "error": error or w.error,
                "progress": w.progress.read().to_dict(),
            },
        )

    # -- what is heard of workers

    def heard(self, w: Worker, body: Message) -> None:
        self.client.push({"type": "message", "worker": w.number, "body": body})

    def ended(self, w: Worker, event: Message) -> None:
        """It is gone, and is not among the workers any more."""
        self.client.push(event)

    def hung(self, event: Message) -> None:
        self.client.push(event)


def _how(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {kernel.signal_name(-code)}" if code < 0 else f"exit code {code}"


def main(argv: list[str], kind: type[Node] = Node) -> None:
    client_fd, lifeline = int(argv[0]), int(argv[1])
    for fd in (client_fd, lifeline):
        os.set_inheritable(fd, False)
    client = Conn(socket.socket(fileno=client_fd))
    reason = kind(client, lifeline, argv[2:]).run()
    if reason:
        print(reason, file=sys.stderr)
        with contextlib.suppress(OSError):  # nobody may be left to be told
            client.send({"type": "node_lost", "reason": reason}, timeout=1.0)


if __name__ == "__main__":
    main(sys.argv[1:])
