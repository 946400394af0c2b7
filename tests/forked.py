"""Run short `phalanx` commands in processes of their own, forked by the product's own zygote from one that has already
imported what they need: importing is most of the cost of such a command. Tests of imports, terminals and signals start
the real command."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from phalanx.runtime.nursery import Nursery
from phalanx.runtime.wire import Conn
from tests import warm

_LOCK = threading.Lock()
PRELOAD = ["phalanx.cli.commands", "phalanx.run.training", "phalanx.plan.planner", "tests.forked"]


@functools.cache
def start() -> Nursery:
    """Start importing. The server ends with the calling thread, which should be the main one."""
    path = os.pathsep.join(p or os.getcwd() for p in sys.path)
    return Nursery(PRELOAD, {**os.environ, "PYTHONPATH": path}, Path(os.devnull))


def _fork(argv: list[str]) -> tuple[Nursery, int, int, Conn]:
    null = os.open(os.devnull, os.O_RDONLY)
    try:
        for attempt in range(2):
            nursery = start()
            while nursery.is_importing():
                time.sleep(0.01)
            try:
                number, _, pidfd, channel = nursery.fork("tests.forked:main", argv, Path(os.devnull), null)
                return nursery, number, pidfd, channel
            except OSError:
                if attempt:
                    raise
                start.cache_clear()  # the server is gone
    finally:
        os.close(null)
    raise AssertionError


def phalanx(
    *args: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a command. `env` replaces this process's variables."""
    command = ["phalanx", *map(str, args)]
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
        about = {"out": out.name, "err": err.name, "cwd": str(cwd or Path.cwd())}
        about["env"] = {**warm.start(), **(env or os.environ)}
        with _LOCK:
            nursery, number, pidfd, channel = _fork([json.dumps(about), *command])
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(timeout * 1e3):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        with _LOCK:
            status = nursery.status(number, timeout)
        os.close(pidfd)
        channel.close()
        assert status is not None
        said = [Path(file.name).read_bytes().decode() for file in (out, err)]
    return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), *said)


def main(channel: object, args: dict) -> None:
    from phalanx.cli.main import run

    about, *sys.argv = args["argv"]
    about = json.loads(about)
    for name, number in (("out", 1), ("err", 2)):
        os.dup2(os.open(about[name], os.O_WRONLY), number)
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(fd, "w"), "utf-8", write_through=True) for fd in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(about["cwd"])
    os.environ.clear()
    os.environ.update(about["env"])
    warm.use()
    code: object = 1
    try:
        run()
    except SystemExit as leaving:
        code = leaving.code
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    sys.exit(code)  # type: ignore[arg-type]
