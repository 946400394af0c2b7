"""Where a run's agents come from: processes of this machine, other hosts by ssh, or anybody who starts `phalanx agent`
there. All of them join by the same door."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.core.errors import UserError
from phalanx.runtime import kernel
from phalanx.runtime.secret import Secret, token_text, write_token

LOCAL, SSH, HAND = "local", "ssh", "hand"
CLOSE_S = 5.0
TAIL_LINES = 4  # of an agent's log, for people
SSH_COMMAND = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")


@dataclass(frozen=True, slots=True)
class Where:
    """`hosts`: by name, the command that runs another one there, if not the usual; none: nodes of this machine."""

    on: str = LOCAL
    hosts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    listen: str = ""  # HOST or HOST:PORT of the controller; "": found out
    python: str = sys.executable  # on the other hosts

    @property
    def is_one_machine(self) -> bool:
        return self.on == LOCAL


def hosts_of(text: str) -> dict[str, tuple[str, ...]]:
    """`a,b,c`, or a file with a host per line: its name and, if it is not `ssh NAME`, the command that runs another
    one there."""
    path = Path(text)
    lines = path.read_text().splitlines() if path.is_file() else text.split(",")
    found: dict[str, tuple[str, ...]] = {}
    for line in lines:
        name, *prefix = shlex.split(line, comments=True) or [""]
        if name in found:
            raise UserError(f"{name} is named twice", field="--hosts", value=text, remedy="name each host once")
        if name:
            found[name] = tuple(prefix)
    if not found or any("/" in name for name in found):
        remedy = "write a,b,c, or the path of a file with a host per line"
        raise UserError("it names no hosts", field="--hosts", value=text, remedy=remedy)
    return found


class AgentProcess:
    """`phalanx agent`, started here. It ends with this process, and everything below it does.

    `proves`: the process is of this machine, and all that it starts holds the writing end of a pipe: at its end the
    last of them is gone. Of an ssh client nothing is known but its own end. `token`: written to its standard input."""

    def __init__(self, command: Sequence[str], token: str, log: Path, env: dict[str, str], proves: bool):
        self._lifeline, held = os.pipe()
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=[held] if proves else [],
                start_new_session=True,  # Ctrl-C in the terminal reaches this process only
            )
        os.close(held)
        self.log, self.proves = log, proves
        self.running: dict[int, int] = {}  # worker -> pid
        assert self.process.stdin
        if token:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(f"{token}\n".encode())
                self.process.stdin.flush()
        self._pidfd = os.pidfd_open(self.process.pid)

    @property
    def pid(self) -> int:
        return self.process.pid

    def fileno(self) -> int:
        """Readable when it has ended."""
        return self._pidfd

    def let_go(self) -> None:
        """Tell it to end."""
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def close(self) -> bool:
        """End everything. Returns whether every process is known to be gone."""
        if self._lifeline < 0:
            return True
        self.let_go()
        deadline = time.monotonic() + CLOSE_S
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.proves:
            for pid in filter(None, self.running.values()):  # what workers had started may be left
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        poll = select.poll()
        poll.register(self._lifeline, select.POLLIN)
        gone = bool(poll.poll(max(100.0, (deadline - time.monotonic()) * 1e3)))
        for fd in (self._lifeline, self._pidfd):
            os.close(fd)
        self._lifeline = -1
        return gone and self.proves

    def how_it_ended(self) -> str:
        code = self.process.wait(CLOSE_S)
        how = f"was killed by {kernel.signal_name(-code)}" if code < 0 else f"ended with code {code}"
        lines = self.log.read_text(errors="replace").splitlines()
        return f"{how}: {' '.join(map(str.strip, lines[-TAIL_LINES:]))[-600:]}" if lines and code > 0 else how


def start_agent(
    where: Where, name: str, join: Sequence[tuple[str, int]], secret: Secret, run_dir: Path, env: dict[str, str]
) -> AgentProcess:
    logs, address = run_dir / "logs", ",".join(f"{host}:{port}" for host, port in join)
    command = [where.python, "-P", "-m", "phalanx.runtime.node", "--join", address, "--name", name, "--attached"]
    prefix = where.hosts.get(name, ())
    if where.is_one_machine:
        folder = run_dir / "control" / name
        token = write_token(folder / "token", secret, "agent", name)
        command += ["--secret", str(token), "--dir", str(folder), "--logs", str(logs / name), "--shared"]
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        whole = {**os.environ, **env, "PYTHONPATH": path}
        return AgentProcess([*prefix, *command], "", logs / f"{name}.log", whole, proves=True)
    there = shlex.join([*command, "--secret", "-"])
    start = [*prefix, there] if prefix else [*SSH_COMMAND, name, there]
    return AgentProcess(start, token_text(secret, "agent", name), logs / f"{name}.log", dict(os.environ), proves=False)
