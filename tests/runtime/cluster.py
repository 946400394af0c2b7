"""A cluster of real processes on this machine: a controller that aggregates, nodes, and toy workers."""

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

from phalanx.control.fold import Plan
from phalanx.control.messages import Event
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from phalanx.runtime.client import NodeClient
from phalanx.runtime.controller import ask, read_address, write_plan
from phalanx.runtime.secret import load_secret

S = 10**9
BEAT_S = 0.5
LONG_S = 60.0  # a machine may be busy
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

    def wait_up(self, folder: Path) -> None:
        """Until it listens, or has ended."""
        path, process = folder / "controller.json", self.process
        wait_for(lambda: process.poll() or (path.exists() and json.loads(path.read_text())["pid"] == process.pid))

    def read(self) -> None:
        """The lines that have come."""
        poll = select.poll()  # this process may have more descriptors than select() takes
        poll.register(self.process.stdout, select.POLLIN)
        while poll.poll(0) and (data := os.read(self.process.stdout.fileno(), 1 << 16)):
            *whole, self._rest = (self._rest + data).split(b"\n")
            self.lines += [json.loads(line) for line in whole]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.process.stdout.close()
        if self.process.stderr:
            self.process.stderr.close()


class Cluster:
    def __init__(self, folder: Path, layout: Layout, policy: Policy | None = None, steps: int = 10**6, **worker):
        self.folder, self.control, self.log = folder, folder / "control", folder / "controller.log"
        self.secret = load_secret(folder / "secret")
        (folder / "votes").mkdir()
        self.worker = {"folder": str(folder / "votes"), "replica_size": layout.replica_size, "steps": steps, **worker}
        write_plan(self.control, Plan(layout, steps, 0, 0, policy or Policy(**QUICK)))
        self.nodes: dict[str, NodeClient] = {}
        self.events: dict[str, list[dict]] = {}
        self.controllers: list[Controller] = []
        self.start_controller()

    def start_controller(self) -> None:
        with self.log.open("ab") as log:
            self.controllers.append(Controller(self.control, self.secret.path, "--aggregate", log=log))
        self.controller.wait_up(self.control)

    @property
    def controller(self) -> Controller:
        return self.controllers[-1]

    def start_node(self, name: str, services: dict | None = None, entry: str = "trainee", **options) -> NodeClient:
        self.events.setdefault(name, [])
        node = self.nodes[name] = NodeClient([TOYS], log=self.folder / f"{name}.log")
        known = {key: {"entry": f"{TOYS}:{key}", "args": {}} for key in ("store", "data", "keeper")}
        node.serve(
            **{
                "name": name,
                "domain": f"rack of {name}",
                "secret": str(self.secret.path),
                "aggregators": read_address(self.control)["aggregators"],
                "beat_s": BEAT_S,
                "hang_s": 0,
                "dir": str(self.folder / name),
                "logs": str(self.folder / name / "logs"),
                "host": "127.0.0.1",
                "worker": {"entry": f"{TOYS}:{entry}", "args": self.worker},
                "services": {**known, **(services or {})},
                **options,
            }
        )
        return node

    def pump(self) -> None:
        self.controller.read()
        for name, node in self.nodes.items():
            while (event := node.events(0)) is not None:
                self.events[name].append(event)
                if event["type"] == "node_lost":
                    break

    def until(self, what, timeout: float = LONG_S):
        """What `what` returns once it is true; it may look at everything that was heard."""

        def look():
            self.pump()
            return what()

        try:
            return wait_for(look, timeout)
        except AssertionError:
            last = {name: events[-4:] for name, events in self.events.items()}
            raise AssertionError(f"{self.controller.lines[-8:]}\n{last}\n{self.log.read_text()[-4000:]}") from None

    def lines(self, kind: str) -> list[dict]:
        return [line for c in self.controllers for line in c.lines if line["type"] == kind]

    def running(self, generation: int) -> dict:
        """Until that generation has committed a step everywhere that it runs; its Form."""

        def look():
            form = next((line for line in self.lines("form") if line["generation"] == generation), None)
            done = {body["worker"] for body in self.bodies("step") if body["generation"] == generation}
            return form if form and len(done) >= len(form["replicas"]) * self.worker["replica_size"] else None

        return self.until(look)

    def full(self, replicas: int) -> dict:
        """Until as many replicas train together; the Form."""

        def look():
            forms = [line for line in self.lines("form") if len(line["replicas"]) == replicas]
            return forms[-1] if forms and forms[-1] == self.lines("form")[-1] else None

        return self.running(self.until(look)["generation"])

    def steps(self, generation: int = 0) -> int:
        """The last that was committed, in a generation or in all."""
        done = [b["step"] + 1 for b in self.bodies("step") if generation in (0, b["generation"])]
        return max(done, default=0)

    def of(self, kind: str, *names: str) -> list[dict]:
        """Events of some nodes, or of all."""
        found = [event for name, events in self.events.items() if not names or name in names for event in events]
        return [event for event in found if event["type"] == kind]

    def bodies(self, kind: str) -> list[dict]:
        """What workers said, with their numbers."""
        said = [(event["worker"], event["body"]) for event in self.of("message")]
        return [{**body, "worker": worker} for worker, body in said if body.get("type") == kind]

    def facts(self) -> dict[int, dict]:
        """Of the workers that live, by rank."""
        exits = {event["worker"] for event in self.of("exit")}
        alive = {name for name, node in self.nodes.items() if node._lost is None}
        return {f["rank"]: f for f in self.bodies("facts") if f["worker"] not in exits and f["node"] in alive}

    def pids(self) -> dict[int, int]:
        return {rank: f["pid"] for rank, f in self.facts().items()}

    def worlds(self, rank: int) -> list[int]:
        """That this rank was in, one after the other."""
        workers = {f["worker"] for f in self.bodies("facts") if f["rank"] == rank}
        return [b["world"] for b in self.bodies("in_world") if b["worker"] in workers]

    def service_pids(self, node: str, service: str) -> list[int]:
        return [event["pid"] for event in self.of("started", node) if event["service"] == service]

    def ask(self, event: Event) -> dict:
        return ask(self.control, self.secret, {"type": "ask", "event": event.to_dict()}, LONG_S)

    def status(self) -> dict:
        return ask(self.control, self.secret, {"type": "status"}, LONG_S)

    def close(self) -> None:
        for node in self.nodes.values():
            if node.process.poll() is None:
                os.kill(node.process.pid, signal.SIGCONT)
            node.close()
        for controller in self.controllers:
            controller.close()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    os.kill(pid, number)


def wait_for(what, timeout: float = LONG_S):
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen in time")
