"""The zygote: a process that has imported what workers need (by name: this module knows no torch), has
touched no device, runs no thread and no tensor op, and forks a worker in milliseconds when the node asks.

Its socket keeps packet boundaries (SOCK_SEQPACKET), so that a request and its file descriptors travel as one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from typing import Any

from phalanx.runtime import forked, kernel

PACKET_BYTES = 64 << 10


def main(argv: list[str]) -> None:
    control = socket.socket(fileno=int(argv[0]))
    _settle(int(argv[1]))
    try:
        preload(argv[2:])
    except BaseException:
        _send(control, type="failed", text=traceback.format_exc()[-PACKET_BYTES // 4 :])
        return
    serve(control)


def fork_off(close: list[int]) -> tuple[int, socket.socket]:
    """Fork a zygote from a process that has imported everything itself, before it does anything else. Return the
    zygote's pid, and the socket to speak with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    me = os.getpid()
    if pid := os.fork():
        theirs.close()
        return pid, ours
    try:
        for fd in (*close, ours.detach()):
            os.close(fd)
        faulthandler.unregister(signal.SIGUSR1)  # or workers could not register it again
        _settle(me)
        forked.take_title("phalanx zygote")
        serve(theirs)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _settle(parent: int) -> None:
    kernel.die_with_parent(parent)
    kernel.allow_files()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a worker that is asked for its stack too early must not die of it


def preload(modules: list[str]) -> None:
    """Import modules; for "module:function", call the function too."""
    # OpenBLAS starts its threads when numpy is imported, and threads do not survive a fork. Workers get the
    # variable back as it was: libraries that read it later, after the fork, may use threads.
    before = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    gc.disable()  # saves a fifth of the time of imports; workers switch it on again
    for name in modules:
        if ":" in name:
            forked.entry(name)()
        else:
            importlib.import_module(name)
    if before is None:
        del os.environ["OPENBLAS_NUM_THREADS"]
    else:
        os.environ["OPENBLAS_NUM_THREADS"] = before
    gc.collect()
    gc.freeze()  # the collector then leaves the shared pages of workers alone


def serve(control: socket.socket) -> None:
    """Fork on request and report each child's end, until the node closes the socket."""
    me = os.getpid()
    _send(control, type="ready", threads=len(os.listdir("/proc/self/task")))
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    children: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, worker)
    while True:
        for key, _ in selector.select():
            if key.fd != control.fileno():
                pid, number = children.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _send(control, type="exit", worker=number, status=os.waitpid(pid, 0)[1], error="")
                continue
            packet, fds, _, _ = socket.recv_fds(control, PACKET_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
            if not packet:
                return  # the workers go with this process
            request = json.loads(packet)
            if "env" in request:
                os.environ.update(request["env"])
                continue
            try:
                pid = os.fork()
            except OSError as e:
                _send(control, type="exit", worker=request["worker"], status=-1, error=f"fork failed: {e}")
            else:
                if pid == 0:
                    parent = me if request["bound"] else None
                    close = [control.fileno(), selector.fileno(), *children]
                    forked.main(fds, slot=request["slot"], parent=parent, close=close)
                _own_group(pid)
                pidfd = os.pidfd_open(pid)
                children[pidfd] = (pid, request["worker"])
                selector.register(pidfd, selectors.EVENT_READ)
                _send(control, pidfd, type="started", worker=request["worker"], pid=pid)
            for fd in fds:
                os.close(fd)


def _own_group(pid: int) -> None:
    """Make a process group that can be killed as one. Parent and child both do it, so it exists whichever is first."""
    with contextlib.suppress(OSError):  # it may have ended already
        os.setpgid(pid, pid)


def _send(control: socket.socket, *fds: int, **packet: Any) -> None:
    socket.send_fds(control, [json.dumps(packet).encode()], fds)


if __name__ == "__main__":
    main(sys.argv[1:])
