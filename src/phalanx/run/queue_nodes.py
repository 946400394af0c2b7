"""The nodes of a queue, simulated on this machine: each is a process, its agent, which writes heartbeats. A node whose
agent has ended, or is silent for three beats, is dead. The agent is restarted after a while, as the init of a real node
would do.

An agent outlives a queue that is killed, and the next queue finds it by its record. It removes the record when it
leaves in order, so a record without a process reveals an unnoticed death.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.control.liveness import DEAD, Liveness
from phalanx.core.store import sync_folder
from phalanx.runtime import kernel

BEAT_S = 5.0  # a node is dead after three silent beats, or more if its own gaps were longer (`Liveness`)
RETURN_S = 5.0  # an agent is restarted after this
BEGIN_S = 30.0  # time for an agent to send its first beat
ALONE_S = 600.0  # an agent without a queue leaves after this
LEAVE_S = 5.0
TAKEN = 3  # exit code of an agent that finds its node taken
QUEUE = "queue.json"


@dataclass(slots=True)
class Agent:
    """The process of a node, as far as the queue knows. `count`: the number of its last beat that was read."""

    pid: int = 0
    began: str = ""
    count: int = -1
    heard_ns: int = 0
    process: subprocess.Popen[bytes] | None = None  # set if this queue started it
    again_at: float = 0.0  # when to start it, if there is no process
    why: str = ""  # why it is dead; "": it is alive or starting


class Nodes:
    """Supervises the agents of all nodes."""

    def __init__(self, folder: Path, names: Sequence[str], beat_s: float = BEAT_S, return_s: float = RETURN_S):
        self.folder, self.beat_s, self.return_s = folder, beat_s, return_s
        folder.mkdir(exist_ok=True)
        self.liveness = Liveness(round(beat_s * 1e9))
        self._looked_ns = time.monotonic_ns()
        write_whole(folder / QUEUE, _self())
        self.agents = {name: self._find(name) for name in names}

    def _find(self, name: str) -> Agent:
        """Return the agent that an earlier queue started, if it is still running."""
        said = _read(self.folder / f"{name}.json")
        if not said or said["boot"] != _boot():
            return Agent()  # there was none, or it ended with the machine
        agent = Agent(said["pid"], said["began"], heard_ns=self._looked_ns)
        self.liveness.expect(name, agent.pid, self._looked_ns)
        return agent

    def look(self) -> None:
        """Read heartbeats, notice deaths, and start agents that are due."""
        now_ns = time.monotonic_ns()
        stood_still = now_ns - self._looked_ns > self.beat_s * 1e9  # this process was stopped, and missed the beats
        self._looked_ns = now_ns
        for name, agent in self.agents.items():
            if agent.pid:
                if stood_still:
                    self.liveness.expect(name, agent.pid, now_ns)
                self._hear(name, agent, now_ns)
            elif time.monotonic() >= agent.again_at:
                self._start(name, agent, now_ns)
        for edge in list(self.liveness.tick(now_ns)):
            agent = self.agents[edge.node]
            if edge.edge == DEAD and agent.pid == edge.incarnation:
                self._lose(edge.node, agent, f"no heartbeat for {(now_ns - agent.heard_ns) / 1e9:.0f} s")

    def is_up(self, name: str) -> bool:
        return self.agents[name].count >= 0

    def why_down(self, name: str) -> str:
        """Return why a node is dead; "": it is alive, or has just started."""
        return self.agents[name].why

    def close(self) -> None:
        """End all agents in order. One that has just started leaves when it finds no queue."""
        (self.folder / QUEUE).unlink(missing_ok=True)
        for agent in self.agents.values():
            if agent.pid and kernel.began(agent.pid) == agent.began:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(agent.pid, signal.SIGTERM)
        deadline = time.monotonic() + LEAVE_S
        for agent in self.agents.values():
            while agent.pid and self._code(agent) is None and time.monotonic() < deadline:
                time.sleep(0.01)
            if agent.pid and self._code(agent) is None:
                os.kill(agent.pid, signal.SIGKILL)

    def _start(self, name: str, agent: Agent, now_ns: int) -> None:
        (self.folder / f"{name}.beat").unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "phalanx.run.queue_nodes", str(self.folder), name]
        command += ["--beat-s", str(self.beat_s)]
        try:
            agent.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        except OSError:  # the process limit is reached
            agent.again_at = time.monotonic() + self.return_s
            return
        agent.pid, agent.began = agent.process.pid, kernel.began(agent.process.pid)
        agent.count, agent.heard_ns = -1, now_ns
        self.liveness.expect(name, agent.pid, now_ns + round(max(0.0, BEGIN_S - self.beat_s) * 1e9))

    def _hear(self, name: str, agent: Agent, now_ns: int) -> None:
        if agent.process is not None and agent.process.poll() == TAKEN:
            # An agent started just before a queue was killed holds the node: its record exists now, or soon.
            self.agents[name] = self._find(name)
            return
        if (code := self._code(agent)) is not None:
            self._lose(name, agent, f"its agent {code}")
            return
        with contextlib.suppress(OSError, ValueError):
            count = int((self.folder / f"{name}.beat").read_text())
            if agent.count < 0:
                self.liveness.expect(name, agent.pid, now_ns)  # it has started: from now on silence counts
            if count != agent.count:
                agent.count, agent.heard_ns, agent.why = count, now_ns, ""
                for _ in self.liveness.beat(name, agent.pid, 1, now_ns):
                    pass

    def _lose(self, name: str, agent: Agent, why: str) -> None:
        """Kill what remains of a dead node's agent, and schedule its restart."""
        self.liveness.forget(name)
        if self._code(agent) is None:
            os.kill(agent.pid, signal.SIGKILL)
        if agent.process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.process.wait(LEAVE_S)
        self.agents[name] = Agent(again_at=time.monotonic() + self.return_s, why=why)

    @staticmethod
    def _code(agent: Agent) -> str | None:
        """Describe how its process ended; None: it is running."""
        if agent.process is not None:
            code = agent.process.poll()
            if code is None:
                return None
            return f"was killed by {kernel.signal_name(-code)}" if code < 0 else f"ended with code {code}"
        return None if kernel.began(agent.pid) == agent.began else "has ended"


def _read(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text())
        return said if isinstance(said["pid"], int) and {"began", "boot"} <= said.keys() else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _self() -> dict[str, Any]:
    return {"pid": os.getpid(), "began": kernel.began(os.getpid()), "boot": _boot()}


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def write_whole(path: Path, value: Any) -> None:
    """Write JSON atomically and durably."""
    near = path.with_name(f".{path.name}.{os.getpid()}")
    with near.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(near, path)
    sync_folder(path.parent)


# -- the agent


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m phalanx.run.queue_nodes")
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--beat-s", type=float, default=BEAT_S)
    args = parser.parse_args(argv)
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: told.set())
    record, beat = args.folder / f"{args.name}.json", args.folder / f"{args.name}.beat"
    with (args.folder / f"{args.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return TAKEN
        write_whole(record, _self())
        count, heard_at = 0, time.monotonic()
        while not told.is_set() and time.monotonic() - heard_at < ALONE_S:
            count += 1
            beat.write_text(str(count))
            if not (args.folder / QUEUE).exists():
                break
            queue = _read(args.folder / QUEUE)
            if queue and kernel.began(queue["pid"]) == queue["began"]:
                heard_at = time.monotonic()
            told.wait(args.beat_s)
        record.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
