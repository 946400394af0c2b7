"""A cluster of real processes on this machine: a controller that aggregates, agents, and toy workers."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from phalanx.runtime.client import AgentClient
from phalanx.runtime.controller import ask, read_address, write_plan
from phalanx.runtime.secret import load_secret

S = 10**9
BEAT_S = 0.5
TOYS = "tests.runtime.toys"
QUICK = dict(
    gather_ns=20 * S, park_ns=4 * S, pause_ns=8 * S, form_ns=4 * S, launch_ns=6 * S, ask_ns=2 * S, resend_ns=S // 2,
    deaths=9, save=False, wait_ns=8 * S,
)  # fmt: skip


class Controller:
    """The process, its lines, and its end."""

    def __init__(self, folder: Path, secret: Path, *more: str, log: IO[bytes] | None = None):
        command = ["--dir", str(folder), "--secret", str(secret), "--beat-s", str(BEAT_S), *more]
        self.lines: list[dict] = []
        self._rest = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phalanx.runtime.controller", *command],
            stdout=subprocess.PIPE,
            stderr=log or subprocess.PIPE,
        )

    def read(self, timeout: float = 0.0) -> list[dict]:
        """The lines that have come."""
        stdout, new = self.process.stdout, []
        poll = select.poll()  # this process may have more descriptors than select() takes
        poll.register(stdout, select.POLLIN)
        while poll.poll(timeout * 1e3):
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                break
            *whole, self._rest = (self._rest + data).split(b"\n")
            new += [json.loads(line) for line in whole]
            timeout = 0.0
        self.lines += new
        return new

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        if self.process.stderr:
            self.process.stderr.close()


class Cluster:
    def __init__(self, folder: Path, layout: Layout, policy: Policy | None = None, steps: int = 10**6, **worker):
        self.folder, self.control = folder, folder / "control"
        self.secret = load_secret(folder / "secret")
        (folder / "votes").mkdir()
        self.worker = {"folder": str(folder / "votes"), "replica_size": layout.replica_size, "steps": steps, **worker}
        write_plan(self.control, layout, steps, 0, policy or Policy(**QUICK))
        self.agents: dict[str, AgentClient] = {}
        self.events: dict[str, list[dict]] = {}
        self.controllers: list[Controller] = []
        self.start_controller()

    def start_controller(self) -> None:
        started = time.time()
        self.controllers.append(Controller(self.control, self.secret.path, "--aggregate"))
        path = self.control / "controller.json"
        wait_for(lambda: path.exists() and json.loads(path.read_text())["pid"] == self.controller.process.pid)
        assert time.time() - started < 10

    @property
    def controller(self) -> Controller:
        return self.controllers[-1]

    def start_agent(self, name: str, services: dict | None = None, entry: str = "trainee", **options) -> AgentClient:
        self.events.setdefault(name, [])
        agent = self.agents[name] = AgentClient([TOYS], log=self.folder / f"{name}.log")
        known = {key: {"entry": f"{TOYS}:{key}", "args": {}} for key in ("store", "data", "keeper")}
        agent.serve(
            **{
                "name": name,
                "domain": f"rack of {name}",
                "secret": str(self.secret.path),
                "aggregators": read_address(self.control)["aggregators"],
                "beat_s": BEAT_S,
                "dir": str(self.folder / name),
                "logs": str(self.folder / name / "logs"),
                "worker": {"entry": f"{TOYS}:{entry}", "args": self.worker},
                "services": {**known, **(services or {})},
                **options,
            }
        )
        return agent

    def pump(self) -> None:
        self.controller.read()
        for name, agent in self.agents.items():
            while (event := agent.events(0)) is not None:
                self.events[name].append(event)
                if event["type"] == "node_lost":
                    break

    def until(self, what, timeout: float = 15.0):
        """What `what` returns once it is true; it may look at everything that was heard."""

        def look():
            self.pump()
            return what()

        try:
            return wait_for(look, timeout)
        except AssertionError:
            raise AssertionError(f"{self.controller.lines[-8:]}\n{self.last_events()}") from None

    def last_events(self):
        return {name: events[-4:] for name, events in self.events.items()}

    def lines(self, kind: str) -> list[dict]:
        return [line for c in self.controllers for line in c.lines if line["type"] == kind]

    def running(self, generation: int, timeout: float = 15.0) -> dict:
        """Until that generation has committed a step everywhere that it runs; its Form."""

        def look():
            form = next((line for line in self.lines("form") if line["generation"] == generation), None)
            crew = {body["rank"] for body in self.facts() if form and self.in_form(body, form)}
            done = {body["worker"] for body in self.bodies("committed") if body["generation"] == generation}
            return form if form and crew and len(done) >= len(form["replicas"]) * self.worker["replica_size"] else None

        return self.until(look, timeout)

    def in_form(self, body, form) -> bool:
        return body["rank"] // self.worker["replica_size"] in form["replicas"]

    def bodies(self, kind: str) -> list[dict]:
        """What workers said, with their numbers."""
        said = [(e["worker"], e["body"]) for events in self.events.values() for e in events if e["type"] == "message"]
        return [{**body, "worker": worker} for worker, body in said if body.get("type") == kind]

    def facts(self) -> list[dict]:
        """Of the workers that live."""
        exits = {e["worker"] for events in self.events.values() for e in events if e["type"] == "exit"}
        alive = {name for name, agent in self.agents.items() if agent._lost is None}
        return [f for f in self.bodies("facts") if f["worker"] not in exits and f["node"] in alive]

    def pids(self) -> dict[int, int]:
        """Of the workers that live, by rank."""
        return {f["rank"]: f["pid"] for f in self.facts()}

    def ask(self, **event) -> dict:
        return ask(self.control, self.secret, {"type": "ask", "event": event}, 5.0)

    def status(self) -> dict:
        return ask(self.control, self.secret, {"type": "status"}, 5.0)

    def close(self) -> None:
        for agent in self.agents.values():
            if agent.process.poll() is None:
                os.kill(agent.process.pid, signal.SIGCONT)
            agent.close()
        for controller in self.controllers:
            controller.close()


def wait_for(what, timeout: float = 10.0):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen in time")
