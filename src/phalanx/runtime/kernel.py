"""The few Linux facilities that the standard library lacks: who dies with whom, and what /proc knows."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time

MOST_FILES = 1 << 20
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def signal_name(number: int) -> str:
    """Return the name of a signal. Real-time signals have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def how(status: int) -> str:
    """Describe how a process ended, by its wait status."""
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"


def complain(text: object) -> None:
    """Write to the log, which may be on a full disk."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def die_with_parent(parent: int) -> None:
    """Have SIGKILL sent to this process when `parent` ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def allow_files() -> None:
    """Let this process, and what it starts, open as many files as it may: Gloo aborts when it cannot accept a
    connection, and strangers can bring that about."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = MOST_FILES if most == resource.RLIM_INFINITY else min(most, MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))


def adopt_orphans() -> None:
    """Make descendants whose parent ends children of this process, so that it can end and reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def stat(pid: int) -> tuple[str, int]:
    """Return (state letter, parent) of a process; ("", 0) when there is none."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    except OSError:
        return "", 0
    return fields[0], int(fields[1])


def began(pid: int) -> str:
    """Return when a process began, in ticks since the machine's start; "": it is not there. No other process has the
    same pid and time."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def children() -> list[int]:
    me = os.getpid()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and stat(int(name))[1] == me]


def end_all_children(timeout: float) -> None:
    """Send SIGKILL to every child and reap it; with `adopt_orphans`, to every descendant."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for pid in children():
            os.kill(pid, signal.SIGKILL)  # a zombie takes it too, and no child's pid is reused before it is reaped
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)
