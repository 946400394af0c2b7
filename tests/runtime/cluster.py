"""A cluster of real processes on this machine: a controller that aggregates, agents that join, and toy workers. The
test process keeps the record."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import IO

from phalanx.control.journaled import Plan
from phalanx.control.messages import Event
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from phalanx.observe import fold
from phalanx.runtime import inventory, kernel
from phalanx.runtime.controller import ask, read_address, write_plan, write_spec
from phalanx.runtime.launch import AgentProcess, Call, Local, Seat
from phalanx.runtime.reports import Recorder
from phalanx.runtime.secret import load_secret
from phalanx.runtime.transport import Loop

S = 10**9
BEAT_S = 0.5
LONG_S = 60.0  # the machine may be busy
TOYS = "tests.runtime.toys"
QUICK = dict(
    gather_ns=20 * S, park_ns=4 * S, pause_ns=8 * S, form_ns=4 * S, launch_ns=6 * S, ask_ns=2 * S, resend_ns=S // 2,
    deaths=9, save=False, wait_ns=8 * S,
)  # fmt: skip


class Controller:
    """The controller's process and the lines that it prints."""

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
        """Wait until it listens, or has ended."""
        path, process = folder / "controller.json", self.process
        wait_for(lambda: process.poll() or (path.exists() and json.loads(path.read_text())["pid"] == process.pid))

    def read(self) -> None:
        """Read the lines that have come."""
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
    def __init__(
        self, folder: Path, layout: Layout, policy: Policy | None = None, steps: int = 10**6, options=None, **worker
    ):
        """`options`: parts of what agents serve: services, entry, hang_s, halt_s, leave_s."""
        self.folder, self.control, self.log = folder, folder / "control", folder / "controller.log"
        self.secret = load_secret(folder / "secret")
        (folder / "votes").mkdir()
        self.worker = {"folder": str(folder / "votes"), "replica_size": layout.replica_size, "steps": steps, **worker}
        write_plan(self.control, Plan(layout, steps, 0, 0, policy or Policy(**QUICK)))
        self.write_spec(**(options or {}))
        self.adapter = Local()
        self.nodes: dict[str, AgentProcess] = {}
        self.lost: set[str] = set()
        self.session = uuid.uuid4().hex
        self.events: list[dict] = []  # what was recorded
        self.controllers: list[Controller] = []
        self.loop = Loop()
        self.recorder = Recorder(self.loop, self.secret, "127.0.0.1", 0, self.events.append)
        self.start_controller()

    def start_controller(self) -> None:
        with self.log.open("ab") as log:
            host, port = self.recorder.server.address
            more = ["--aggregate", "--recorder", f"{host}:{port}"]
            self.controllers.append(Controller(self.control, self.secret.path, *more, log=log))
        self.controller.wait_up(self.control)

    @property
    def controller(self) -> Controller:
        return self.controllers[-1]

    def write_spec(self, services: dict | None = None, entry: str = "trainee", hang_s: float = 0, **limits) -> None:
        known = {key: {"entry": f"{TOYS}:{key}", "args": {}} for key in ("store", "data", "keeper")}
        spec = {
            "version": inventory.version(),
            "beat_s": BEAT_S,
            "hang_s": hang_s,
            "preload": [TOYS],
            "env": {},
            "networks": [],
            "worker": {"entry": f"{TOYS}:{entry}", "args": self.worker},
            "services": {**known, **(services or {})},
            "limits": limits,
        }
        write_spec(self.control, spec)

    def prepare(self, *more: str) -> None:
        """Have nodes forked from one process, which has imported what their workers need."""
        self.adapter.prepare([TOYS, *more], {"PHALANX_SESSION": f"{self.session}-all-"}, self.folder / "zygote.log")
        wait_for(lambda: not self.adapter.is_preparing())

    def start_node(self, name: str) -> AgentProcess:
        (self.folder / "logs").mkdir(exist_ok=True)
        env = {"PHALANX_SESSION": f"{self.session}-{name}-"}
        join = read_address(self.control)["aggregators"]
        self.nodes[name] = self.adapter.start(Call(Seat(name), join, self.secret, self.folder, env))
        return self.nodes[name]

    def pump(self) -> None:
        self.controller.read()
        self.loop.turn(0.0)
        self.lost |= {name for name, node in self.nodes.items() if has_ended(node)}

    def until(self, what, timeout: float = LONG_S):
        """Wait until `what` returns something true, and return it; `what` may look at everything that was heard."""

        def look():
            self.pump()
            return what()

        try:
            return wait_for(look, timeout)
        except AssertionError:
            last = "\n".join(map(str, self.events[-12:]))
            raise AssertionError(f"{self.controller.lines[-8:]}\n{last}\n{self.log.read_text()[-4000:]}") from None

    def lines(self, kind: str) -> list[dict]:
        return [line for c in self.controllers for line in c.lines if line["type"] == kind]

    def running(self, generation: int) -> dict:
        """Wait until a generation has committed a step on all its ranks; return its Form."""

        def look():
            form = next((line for line in self.lines("form") if line["generation"] == generation), None)
            told = [event["ranks"] for event in self.of("step") if event["generation"] == generation]
            done = fold.size(fold.union([span for ranks in told for span in ranks]))
            return form if form and done >= len(form["replicas"]) * self.worker["replica_size"] else None

        return self.until(look)

    def full(self, replicas: int) -> dict:
        """Wait until this many replicas train together; return the Form."""

        def look():
            forms = [line for line in self.lines("form") if len(line["replicas"]) == replicas]
            return forms[-1] if forms and forms[-1] == self.lines("form")[-1] else None

        return self.running(self.until(look)["generation"])

    def steps(self, generation: int = 0) -> int:
        """Return the last step that was committed, in a generation or in all."""
        done = [event["step"] + 1 for event in self.of("step") if generation in (0, event["generation"])]
        return max(done, default=0)

    def trained(self, generation: int = 0) -> int:
        """Return the last step that a rank has voted for, which is known even while nobody keeps the record."""
        votes = [path.name.split("-") for path in (self.folder / "votes").glob("[0-9]*-*-*")]
        return max((int(step) for at, step, _ in votes if generation in (0, int(at))), default=0)

    def of(self, kind: str, *names: str) -> list[dict]:
        """Return the events of a kind, of some nodes or of all."""
        return [e for e in self.events if e["type"] == kind and (not names or e["node"] in names)]

    def bodies(self, kind: str) -> list[dict]:
        """Return the messages of a kind from workers, with the workers' numbers."""
        said = [(event["worker"], event["body"]) for event in self.of("message")]
        return [{**body, "worker": worker} for worker, body in said if body.get("type") == kind]

    def facts(self) -> dict[int, dict]:
        """Return the facts of the workers that live, by rank."""
        exits = {event["worker"] for event in self.of("exit")}
        alive = {name for name in self.nodes if name not in self.lost}
        return {f["rank"]: f for f in self.bodies("born") if f["worker"] not in exits and f["node"] in alive}

    def pids(self) -> dict[int, int]:
        return {rank: f["pid"] for rank, f in self.facts().items()}

    def worlds(self, rank: int) -> list[int]:
        """Return the worlds that a rank was in, one after the other."""
        workers = {f["worker"] for f in self.bodies("born") if f["rank"] == rank}
        return [b["world"] for b in self.bodies("in_world") if b["worker"] in workers]

    def service_pids(self, node: str, service: str) -> list[int]:
        return [event["pid"] for event in self.of("started", node) if event["service"] == service]

    def ask(self, event: Event) -> dict:
        return ask(self.control, self.secret, {"type": "ask", "event": event.to_dict()}, LONG_S)

    def status(self) -> dict:
        return ask(self.control, self.secret, {"type": "status"}, LONG_S)

    def close(self) -> None:
        for node in self.nodes.values():
            if not has_ended(node):
                os.kill(node.pid, signal.SIGCONT)
            node.close()
        self.adapter.close()
        for controller in self.controllers:
            controller.close()
        self.recorder.close()


def has_ended(node: AgentProcess) -> bool:
    return kernel.stat(node.pid)[0] in ("", "Z")


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
