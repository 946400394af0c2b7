"""How the agents of a run are started. An adapter knows one engine: it lists the nodes, and starts `phalanx agent` on
one of them. `Local` runs all nodes on this machine, `Hand` leaves the starting to people; the others are in
`phalanx.engines`. All agents join in the same way."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.runtime import kernel
from phalanx.runtime.nursery import Nursery
from phalanx.runtime.secret import Secret, token_text, write_token

CLOSE_S = 5.0
TAIL_LINES = 4  # of an agent's log, for people
LOOPBACK = "127.0.0.1"
REFUSED = 2  # the exit code of an agent that may not join
GIVE_UP_S = 600.0  # of an agent without a controller


@dataclass(frozen=True, slots=True)
class Seat:
    """A node on which an agent can be started. `topology`: its place in the network, from the top, such as spine.leaf3;
    "": the agent may know."""

    name: str
    topology: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """An agent that is to be started."""

    seat: Seat
    join: Sequence[tuple[str, int]]
    secret: Secret
    run_dir: Path
    env: dict[str, str]  # for processes of this machine

    def command(self, python: str) -> list[str]:
        """Return the command that starts the agent, without its secret: `token` is written to its standard input, or a
        file holds it. The agent ends when its standard input does."""
        return [python, "-P", "-m", "phalanx.runtime.node", *self.options]

    @property
    def options(self) -> list[str]:
        join = ",".join(f"{host}:{port}" for host, port in self.join)
        options = ["--join", join, "--name", self.seat.name, "--attached"]
        return options + (["--topology", self.seat.topology] if self.seat.topology else [])

    @property
    def token(self) -> str:
        return token_text(self.secret, "agent", self.seat.name)

    @property
    def log(self) -> Path:
        """Return the file of the agent's own output."""
        return self.run_dir / "logs" / f"{self.seat.name}.log"


class Started(Protocol):
    """An agent that was started. `proves`: `close` can know that every process of the node is gone."""

    pid: int
    proves: bool
    running: dict[int, int]  # worker -> pid
    log: Path

    def fileno(self) -> int: ...  # readable when it has ended
    def let_go(self) -> None: ...  # tell it to end
    def close(self) -> bool: ...  # end everything; whether every process is known to be gone
    def how_it_ended(self) -> str: ...  # in words
    def was_refused(self) -> bool: ...  # it may not join, and asking again does not help


class Adapter(ABC):
    """The interface to one engine. It decides nothing about the run: `runtime.cluster` restarts what dies."""

    is_one_machine = False
    restarted = False  # the engine has started this run before

    @abstractmethod
    def seats(self, count: int) -> list[Seat]:
        """Return the nodes, in the order in which they are given ranks; those that the layout does not need are spares.
        `count`: how many are wanted, where nodes can be had at will; []: others start the agents."""

    @abstractmethod
    def address(self) -> str:
        """Return where the controller listens, as the nodes reach this host."""

    def prepare(self, preload: Sequence[str], env: dict[str, str], log: Path) -> None:  # noqa: B027
        """Begin to import what ranks need, where that can be done once for several nodes."""

    def is_preparing(self) -> bool:
        """Return whether it is better to start agents later."""
        return False

    @abstractmethod
    def start(self, call: Call) -> Started: ...

    def close(self) -> None:  # noqa: B027
        """Give back what the engine has lent."""

    def describe(self) -> str:
        """Return what would be asked of the engine, for people; "": nothing."""
        return ""

    def time_left_s(self, job: Job) -> float:
        """Return the time until the run must begin to leave, so that it is gone when the engine ends it."""
        return math.inf

    def run_again(self) -> str:
        """Ask the engine to start the run again, after its time was over. Return what it will do, in words; "":
        nothing."""
        return ""

    def reference(self) -> dict[str, str]:
        """Return how `engines.table` finds the run on the engine from another host: on, id."""
        return {}


class AgentProcess(ABC):
    """An agent that is a process of this machine, or whose client is one. When it is let go, or its starter ends, it
    ends with everything below it.

    `proves`: everything that it starts holds the writing end of a pipe, which closes when the last of them is gone. For
    an ssh client, only its own end is known.
    """

    pid: int
    _pidfd: int

    def __init__(self, log: Path, proves: bool):
        self.log, self.proves = log, proves
        self.running: dict[int, int] = {}  # worker -> pid
        self._lifeline, self._held = os.pipe()

    def fileno(self) -> int:
        """Return a descriptor that is readable when the agent has ended."""
        return self._pidfd

    @abstractmethod
    def let_go(self) -> None:
        """Tell it to end."""

    def kill(self) -> None:
        """End it at once, and with it everything below it."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    @abstractmethod
    def _code(self) -> int | None:
        """Return the exit code of a process that has ended, negative for a signal; None if that cannot be known."""

    def close(self) -> bool:
        """End everything. Return whether every process is known to be gone."""
        if self._lifeline < 0:
            return True
        self.let_go()
        deadline = time.monotonic() + CLOSE_S
        if not _readable(self._pidfd, CLOSE_S):
            self.kill()
        self._code()
        if self.proves:
            for pid in filter(None, self.running.values()):  # what workers had started may be left
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        gone = _readable(self._lifeline, max(0.1, deadline - time.monotonic()))
        for fd in (self._lifeline, self._pidfd):
            os.close(fd)
        self._lifeline = -1
        return gone and self.proves

    def how_it_ended(self) -> str:
        code = self._code()
        if code is None:
            return "ended"
        how = f"was killed by {kernel.signal_name(-code)}" if code < 0 else f"ended with code {code}"
        lines = self.log.read_text(errors="replace").splitlines()
        return f"{how}: {' '.join(map(str.strip, lines[-TAIL_LINES:]))[-600:]}" if lines and code > 0 else how

    def was_refused(self) -> bool:
        return self._code() == REFUSED


def _readable(fd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout * 1e3))


class StartedAgent(AgentProcess):
    """An agent that a command starts. It ends when its standard input does. `token`: written to its standard input."""

    def __init__(self, command: Sequence[str], token: str, log: Path, env: dict[str, str], proves: bool):
        super().__init__(log, proves)
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                pass_fds=[self._held] if proves else [],
                start_new_session=True,  # Ctrl-C in the terminal reaches this process only
            )
        os.close(self._held)
        self.pid = self.process.pid
        assert self.process.stdin
        if token:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(f"{token}\n".encode())
                self.process.stdin.flush()
        self._pidfd = os.pidfd_open(self.process.pid)

    def let_go(self) -> None:
        assert self.process.stdin
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def _code(self) -> int | None:
        return self.process.wait(CLOSE_S)


class ForkedAgent(AgentProcess):
    """A node that is forked from the process that has imported what ranks need."""

    def __init__(self, nursery: Nursery, argv: Sequence[str], log: Path):
        super().__init__(log, proves=True)
        self._nursery = nursery
        self._ended: int | None = None
        try:
            entry = "phalanx.runtime.node:main_forked"
            self._number, self.pid, self._pidfd, self._channel = nursery.fork(entry, argv, log, self._held)
        except OSError:
            os.close(self._lifeline)
            raise
        finally:
            os.close(self._held)

    def let_go(self) -> None:
        self._channel.close()

    def _code(self) -> int | None:
        if self._ended is None:
            status = self._nursery.status(self._number, CLOSE_S)
            self._ended = self._last_word() if status is None else os.waitstatus_to_exitcode(status)
        return self._ended

    def _last_word(self) -> int | None:
        """Return the exit code that the node reported itself, in case the process that it was forked from ended
        first."""
        try:
            said = self._channel.recv(0.0)
        except (OSError, ValueError):  # nothing, or it was let go
            return None
        return said["code"] if said else None


class Local(Adapter):
    """Run all nodes as processes of this machine. `hosts`: the names of the nodes, if others are wanted, each with a
    command that runs another command in the namespace of that node."""

    is_one_machine = True

    def __init__(self, hosts: dict[str, tuple[str, ...]] | None = None):
        self.hosts = hosts or {}
        self._nursery: Nursery | None = None

    def prepare(self, preload: Sequence[str], env: dict[str, str], log: Path) -> None:
        if not self.hosts:
            self._nursery = Nursery(preload, self._environment(env), log)

    def is_preparing(self) -> bool:
        return self._nursery is not None and self._nursery.is_importing()

    def close(self) -> None:
        if self._nursery:
            self._nursery.close()

    def seats(self, count: int) -> list[Seat]:
        return [Seat(name) for name in self.hosts or (f"node-{i}" for i in range(count))]

    def address(self) -> str:
        return LOOPBACK

    def start(self, call: Call) -> AgentProcess:
        name, logs = call.seat.name, call.run_dir / "logs"
        folder = call.run_dir / "control" / name
        token = write_token(folder / "token", call.secret, "agent", name)
        options = ["--secret", str(token), "--dir", str(folder), "--logs", str(logs / name), "--shared"]
        if self._nursery:
            with contextlib.suppress(OSError):  # it is gone: the node imports by itself
                return ForkedAgent(self._nursery, [*call.options, *options], call.log)
        command = [*self.hosts.get(name, ()), *call.command(sys.executable), *options]
        return StartedAgent(command, "", call.log, self._environment(call.env), proves=True)

    @staticmethod
    def _environment(env: dict[str, str]) -> dict[str, str]:
        return {**os.environ, **env, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)}


class Hand(Adapter):
    """People, or a scheduler, start `phalanx agent` on each node."""

    def seats(self, count: int) -> list[Seat]:
        return []

    def address(self) -> str:
        remedy = "name the address of this host that the others reach, as 10.0.0.1:7700"
        raise UserError("it is not known where agents join", field="--listen", value="", remedy=remedy)

    def start(self, call: Call) -> Started:
        raise AssertionError("nobody is asked to start one")
