"""Runs that need not import torch anew. What a machine's nodes are forked from (`runtime.nursery`) is itself forked
here, from one process that has imported the same: most of what a short run costs. All that comes after is as ever. The
commands that tests start find it by `sitecustomize`, which Python imports first.

A fork has the environment of its mother for the kernel. So that nobody who was left behind is overlooked, the token by
which tests find the processes of a command is written over the mother's."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path

PRELOAD = ["phalanx.train.worker:prepare"]
ADDRESS, TOKEN = "PHALANX_TESTS_WARM", "PHALANX_TOKEN"
NO_TOKEN = "-" * 32
MOST_BYTES = 1 << 20  # of an environment


@functools.cache
def start() -> dict[str, str]:
    """Begin to import, and say what commands must have in their environment to profit. It ends with the thread that
    calls this, which had better be the main one."""
    address = f"{tempfile.mkdtemp(prefix='phalanx-warm-')}/socket"
    root = Path(__file__).parent.parent.parent
    path = os.pathsep.join([str(root), *(p or os.getcwd() for p in sys.path)])
    subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.warm", address, str(os.getpid())],
        env={**os.environ, "PYTHONPATH": path, TOKEN: NO_TOKEN},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    return {ADDRESS: address, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), path])}


# -- in a command


def use() -> None:
    """From here on nurseries of this process are forked, if that is wanted."""
    from phalanx.runtime import nursery

    if ADDRESS in os.environ:
        nursery.subprocess = types.SimpleNamespace(**{**vars(subprocess), "Popen": popen})  # type: ignore[assignment]


class Forked:
    """As much of a Popen as a Nursery needs."""

    def __init__(self, pidfd: int):
        self._pidfd = pidfd

    def poll(self) -> int | None:
        return 0 if self._has_ended(0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._has_ended(timeout):
            raise subprocess.TimeoutExpired("a nursery", timeout or 0.0)
        return 0

    def kill(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _has_ended(self, timeout: float | None) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1e3))


def popen(command, *, env, stdout, pass_fds, **options):
    """In place of subprocess.Popen, for a Nursery."""
    preload = command[command.index("phalanx.runtime.zygote") + 3 :]
    try:
        if preload != PRELOAD:
            raise ConnectionError
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mother:
            mother.connect(os.environ[ADDRESS])
            socket.send_fds(mother, [json.dumps([env, os.getcwd()]).encode()], [pass_fds[0], stdout.fileno()])
            _, fds, _, _ = socket.recv_fds(mother, 16, 1)
        return Forked(fds[0])
    except OSError:  # not there yet, or no more
        return subprocess.Popen(command, env=env, stdout=stdout, pass_fds=pass_fds, **options)


# -- the mother


def serve(address: str, parent: int) -> None:
    from phalanx.runtime import kernel, zygote

    kernel.die_with_parent(parent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen(16)  # who asks now waits for the imports
    zygote.preload(PRELOAD)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they ended
    while True:
        asker, _ = listener.accept()
        packet, fds, _, _ = socket.recv_fds(asker, MOST_BYTES, 2)
        if len(fds) == 2 and not (pid := os.fork()):
            listener.close()
            asker.close()
            try:
                _become(*json.loads(packet), *fds)
            finally:
                os._exit(0)
        if len(fds) == 2:
            pidfd = os.pidfd_open(pid)
            socket.send_fds(asker, [b"{}"], [pidfd])
            os.close(pidfd)
        asker.close()
        for fd in fds:
            os.close(fd)


def _become(env: dict[str, str], folder: str, control: int, log: int) -> None:
    from phalanx.runtime import zygote

    os.setsid()
    os.chdir(folder)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    _show_token(env.get(TOKEN, NO_TOKEN))
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    zygote._settle(os.getppid())
    zygote.serve(socket.socket(fileno=control))


def _show_token(token: str) -> None:
    """In /proc/PID/environ, of this process and all that it forks."""
    with open("/proc/self/stat") as file:
        begin, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    place = ctypes.string_at(begin, end - begin).index(NO_TOKEN.encode())
    assert len(token) == len(NO_TOKEN)
    ctypes.memmove(begin + place, token.encode(), len(token))
