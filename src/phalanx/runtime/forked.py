"""A worker's first and last moments: what the forked child does before its entry function runs, the channel it is
given, and how it ends. This file knows nothing about the worker's task."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import mmap
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from phalanx.observe.progress import RECORD_BYTES, Progress
from phalanx.runtime import kernel
from phalanx.runtime.wire import Conn, Message


class Channel:
    """A worker's line to the process that spawned it."""

    def __init__(self, sock: socket.socket, progress: Progress):
        self.progress = progress
        self._conn = Conn(sock)
        self._sending = threading.Lock()  # frames of two threads must not mix

    def send(self, body: Message) -> None:
        with self._sending:
            self._conn.send(body)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is a message, or when the other side is gone."""
        return self._conn.fileno()

    def recv(self, timeout: float | None = None) -> Message | None:
        """Return the next message; None when the other side is gone. Raise TimeoutError."""
        return self._conn.recv(timeout)


def main(fds: list[int], *, slot: int, parent: int | None, close: list[int]) -> NoReturn:
    """Become a worker. `fds`: channel, progress board, log, and descriptors that it and everything that it starts hold.
    It ends with `parent`, if that is given."""
    code = 1
    try:
        if parent is not None:
            kernel.die_with_parent(parent)
        os.setpgid(0, 0)
        for fd in close:
            os.close(fd)
        channel_fd, board_fd, log_fd, *held = fds
        for fd in held:
            os.set_inheritable(fd, True)
        _redirect(log_fd)
        _set_signals()
        gc.enable()
        board = memoryview(mmap.mmap(board_fd, 0))
        os.close(board_fd)
        progress = Progress(board[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES])
        code = _run(Channel(socket.socket(fileno=channel_fd), progress))
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # No interpreter shutdown: it would run the zygote's exit handlers, and wait for threads that a
        # collective library may never end.
        os._exit(code)


def _redirect(log_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(null)
    os.close(log_fd)
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _set_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the launcher's to answer
    faulthandler.enable(2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)  # how the node asks where this worker stands


def _run(channel: Channel) -> int:
    start = channel.recv()
    if start is None:
        return 1
    take_title(_title(start))
    try:
        entry(start["entry"])(channel, start["args"])
    except SystemExit as e:
        if isinstance(e.code, int | None):
            return e.code or 0
        print(e.code, file=sys.stderr)
        return 1
    except BaseException as e:
        traceback.print_exc()
        with contextlib.suppress(OSError):  # nobody may be left to be told
            channel.send({"type": "error", "kind": type(e).__name__, "text": str(e)[:65536]})
        return 1
    return 0


def _title(start: Message) -> str:
    """Return a title such as "phalanx rank 3" or "phalanx keeper"."""
    if "rank" in start["args"]:
        return f"phalanx rank {start['args']['rank']}"
    room, module = f".{start['entry']}".partition(":")[0].split(".")[-2:]
    return f"phalanx {room if module == 'service' else module}"


def take_title(title: str) -> None:
    """Make this process recognisable in `ps` and `top`. The kernel keeps 15 characters. `ps aux` shows the arguments
    instead, which are the zygote's, so they are overwritten in place."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(title[:15])
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/stat") as file:
        first, end = map(int, file.read().rpartition(")")[2].split()[45:47])  # arg_start and arg_end: proc(5)
        if first:
            text = title.encode()[: end - first - 1]
            ctypes.memmove(first, text.ljust(end - first, b"\0"), end - first)


def entry(name: str) -> Callable[..., object]:
    """Return the function behind "package.module:function"."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)
