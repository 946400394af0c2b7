"""Launch a job on a cluster of nodes that are processes of this machine: a controller, an agent per node and one per
spare, and everything below them. The job goes on when workers, agents or the controller die; what died is started
again, as a supervisor would.

Whatever happens to this process, nothing stays behind: agents end with their client, the controller with the pipe.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import selectors
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.control.policy import Policy
from phalanx.core.checkpoint import buddies
from phalanx.core.errors import RunFailed, UserError
from phalanx.core.job import Job
from phalanx.runtime import agent, controller
from phalanx.runtime.client import AgentClient
from phalanx.runtime.gang import Failure, tail_of
from phalanx.runtime.launch import START_LIMIT_S, HangLimit, environment
from phalanx.runtime.saving import BODIES as SAVING
from phalanx.runtime.saving import Saving, num_nodes
from phalanx.runtime.secret import load_secret
from phalanx.runtime.wire import Message

SERVICES = {number: name for name, number in agent.SERVICES.items()}
KEEPER = agent.SERVICES["keeper"]
POLL_S = 0.1
LEAVE_LIMIT_S = 60.0  # from the end of the run to the end of all workers
LOOK_S = 0.5
MORE_NODES, MOST_ADDED = "more-nodes", 64
SPARE_S = 60.0  # after which spares are started at the latest
HOLD_LIMIT_S = 300.0  # that nothing can be done, before the run is given up
SAME_ERRORS = 3  # of workers in one step, until it is the program that is wrong and not a machine
FATAL = ("UserError", "FloatingPointError", "DataLost")  # trying again does not help
LOOPBACK = "127.0.0.1"
S = 10**9


def launch(
    job: Job,
    *,
    worker_entry: str,
    store_entry: str,
    data_entry: str | None = None,
    keeper_entry: str | None = None,
    resume: dict[str, str] | None = None,
    start: int = 0,
    checkpoints: str = "",
    data_version: str = "",
    ledger: Callable[[int], str | None] | None = None,
    preload: list[str],
    run_dir: Path,
    on_event: Callable[[dict[str, Any]], None],
    stop: Callable[[], bool],
    gently: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """As `runtime.launch.launch` does, with `start` the step that `resume` is of. When `stop()` and `gently()`, the
    state is saved first, if that can be done in the grace period. `on_event` also hears what the
    controller decides ({"type": "form" | "started" | "note" | "ended", ...}) and {"type": "node", "node", "what"}."""
    cluster = Cluster(job, run_dir.absolute(), preload, on_event, stop)
    cluster.gently = gently
    cluster.saving.ledger = ledger or cluster.saving.ledger
    worker_args = {
        "job": cluster.job.to_dict(),
        "token": secrets.token_hex(16),
        "resume": resume,
        "checkpoints": checkpoints,
        "keeper": {"run": cluster.saving.run, "data_version": data_version, "token": cluster.saving.token},
    }
    services: dict[str, Any] = {"store": {"entry": store_entry, "args": {}}}
    if data_entry:
        services["data"] = {"entry": data_entry, "args": {"run_dir": str(cluster.run_dir)}}
    if keeper_entry:
        services["keeper"] = {"entry": keeper_entry, "args": cluster.keeper_args(checkpoints)}
    cluster.serving = {"worker": {"entry": worker_entry, "args": worker_args}, "services": services}
    try:
        return cluster.run(start)
    finally:
        cluster.close()


def policy_of(job: Job, save: bool) -> Policy:
    """Time-outs in terms of heartbeats, and what a batch can be divided among."""
    r, layout = job.recovery, job.layout
    counts = tuple(n for n in range(1, layout.replica + 1) if job.num_micro % (n * layout.shard) == 0)
    return Policy(
        min_replicas=r.min_replicas,
        counts=counts,
        wait_ns=int(r.wait_s * S),
        start_ns=S,
        park_ns=10 * S,
        resend_ns=S,
        deaths=r.deaths_per_node,
        burst_ns=2 * S,
        save=save,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a node is."""

    host: str = LOOPBACK
    interface: str = ""  # of torch's own connections; empty: loopback
    prefix: tuple[str, ...] = ()  # of the command that starts its agent

    @property
    def environment(self) -> dict[str, str]:
        return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), self.interface) if self.interface else {}


def places_of(path: str) -> tuple[str, list[Place]]:
    """Where the controller listens, and the nodes do."""
    if not path:
        return LOOPBACK, [Place()]
    try:
        said = json.loads(Path(path).read_bytes())
        nodes = [Place(str(n["host"]), str(n["interface"]), tuple(map(str, n["prefix"]))) for n in said["nodes"]]
        if not nodes:
            raise ValueError("it names no nodes")
        return str(said["host"]), nodes
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = '{"host": "10.0.0.1", "nodes": [{"host": "10.0.0.2", "interface": "eth0", "prefix": []}, ...]}'
        raise UserError(f"cannot be used: {error!r}", field="run.hosts", value=path, remedy=f"write {remedy}") from None


class Cluster:
    def __init__(
        self,
        job: Job,
        run_dir: Path,
        preload: list[str],
        on_event: Callable[[dict[str, Any]], None],
        stop: Callable[[], bool],
    ):
        if not job.run.threads and job.train.reduction != "exact":  # all nodes share the cores of this machine
            threads = max(1, len(os.sched_getaffinity(0)) // job.layout.world_size)
            job = dataclasses.replace(job, run=dataclasses.replace(job.run, threads=threads))
        self.job, self.run_dir, self.preload, self.on_event, self.stop = job, run_dir, preload, on_event, stop
        self.gently: Callable[[], bool] = lambda: False
        self.folder = run_dir / "control"
        self.host, self.places = places_of(job.run.hosts)
        self.serving: dict[str, Any] = {}
        self.limit = HangLimit(job.layout.world_size, job.run.hang_timeout_s)
        self.saving = Saving(job, self._to_keeper, self._to_ranks, lambda event: self.on_event({"rank": -1, **event}))
        self.agents: dict[str, AgentClient] = {}
        self.ranks: dict[int, int] = {}  # worker -> rank
        self.results: dict[int, Message] = {}
        self.errors: Counter[str] = Counter()
        self.failures: dict[int, Failure] = {}
        self.form: Message = {}  # of the generation that was formed last
        self.start_s = 0.0
        self.ended = ""
        self._selector = selectors.DefaultSelector()
        self.added = 0  # nodes, since the run began
        self._leave_by = float("inf")
        self._look_at = 0.0
        self._again: dict[str, float] = {}  # what died -> when it is started again
        self._controller: subprocess.Popen[bytes] | None = None
        self._lines = b""
        self._first_commit = 0  # the last generation that had one
        self._held_since = 0.0
        self._hold = ""
        self._began = time.monotonic()

    @property
    def nodes(self) -> list[str]:
        return [f"node-{i}" for i in range(num_nodes(self.job.layout) + self.job.recovery.spares + self.added)]

    @property
    def _has_buddies(self) -> bool:
        """Other replicas are the copies, where there are some."""
        return self.job.layout.replica == 1 and len(self.nodes) > 1

    def _pair_keepers(self) -> None:
        """Each with a buddy, of those that are there."""
        there = sorted(self.saving.keepers)
        for at, other in zip(there, buddies([str(node) for node in there]), strict=True):
            if other is not None:
                peer = there[other]
                where = {"host": self._place(self.nodes[peer]).host, "port": self.saving.keepers[peer]["port"]}
                self._to_keeper(at, {"type": "buddy", **where})

    def keeper_args(self, url: str) -> dict[str, Any]:
        c, layout = self.job.checkpoint, self.job.layout
        return {
            "url": url,
            "ranks": layout.ranks_per_node or layout.world_size,
            "keep_last": c.keep_last,
            "keep_every": c.keep_every,
            "token": self.saving.token,
            "has_buddy": self._has_buddies,
        }

    # -- from the first process to the last

    def run(self, start: int) -> dict[str, Any]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        load_secret(self.folder / "secret")
        save = "keeper" in self.serving["services"]
        controller.write_plan(self.folder, self.job.layout, self.job.train.steps, start, policy_of(self.job, save))
        self._start_controller()
        deadline = time.monotonic() + 30.0
        while not (addresses := controller.read_address(self.folder)["aggregators"]):
            if time.monotonic() > deadline:
                raise RunFailed(
                    "the controller did not start", remedy=f"see {self.run_dir / 'logs' / 'controller.log'}"
                )
            time.sleep(0.01)
        self.addresses = addresses
        first = num_nodes(self.job.layout)
        for name in self.nodes[:first]:
            self._start_agent(name)
        self._again |= dict.fromkeys(self.nodes[first:], self._began + SPARE_S)  # or once the others are ready
        while not self.ended:
            self._turn()
            if not self.start_s and time.monotonic() - self._began > START_LIMIT_S:
                raise RunFailed(
                    f"the ranks were not ready after {START_LIMIT_S:.0f} s", remedy="see the logs of the run"
                )
        if self.stop():
            self.saving.tell_all()
            raise KeyboardInterrupt
        crew = [int(r) * self.job.layout.replica_size for r in self.form["replicas"]]
        wanted = {first + i for first in crew for i in range(self.job.layout.replica_size)}
        deadline = time.monotonic() + LEAVE_LIMIT_S
        while not wanted <= self.results.keys() and time.monotonic() < deadline:
            self._turn()
        self.saving.tell_all()
        return {
            "world_size": self.job.layout.world_size,
            "start_s": self.start_s,
            "wall_s": time.monotonic() - self._began,
            "hang_timeout_s": self.limit.limit_s,
            "done": [self.results[rank] for rank in sorted(wanted & self.results.keys())],
        }

    def close(self) -> None:
        for client in self.agents.values():
            client.close()
        self.agents.clear()
        if self._controller:
            self._controller.kill()
            self._controller.wait()
            assert self._controller.stdout and self._controller.stdin
            self._controller.stdout.close()
            self._controller.stdin.close()
            self._controller = None
        self._selector.close()

    def _place(self, name: str) -> Place:
        """Nodes beyond those that the file names are like the last of them."""
        return self.places[min(self._number(name), len(self.places) - 1)]

    def _start_controller(self) -> None:
        logs = self.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "phalanx.runtime.controller", "--dir", str(self.folder)]
        command += [
            "--secret",
            str(self.folder / "secret"),
            "--aggregate",
            "--attached",
            "--host",
            self.host,
            "--beat-s",
            str(self.job.recovery.beat_s),
        ]
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        with (logs / "controller.log").open("ab") as log:
            self._controller = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # it ends when this process does
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        assert self._controller.stdout
        os.set_blocking(self._controller.stdout.fileno(), False)
        self._selector.register(self._controller.stdout, selectors.EVENT_READ, self._on_controller)
        self._tell_node("controller", "started", pid=self._controller.pid)

    def _start_agent(self, name: str) -> None:
        logs = self.run_dir / "logs"
        place = self._place(name)
        client = self.agents[name] = AgentClient(
            self.preload, env=environment() | place.environment, log=logs / f"{name}.log", prefix=place.prefix
        )
        self._selector.register(client, selectors.EVENT_READ, lambda: self._on_agent(name))
        client.serve(
            name=name,
            domain=name,
            secret=str(self.folder / "secret"),
            aggregators=self.addresses,
            beat_s=self.job.recovery.beat_s,
            dir=str(self.folder / name),
            logs=str(logs / name),
            host=place.host,
            **self.serving,
        )
        client.watch(self.limit.limit_s)
        self._tell_node(name, "started", pid=client.process.pid)

    # -- what is heard

    def _turn(self) -> None:
        now = time.monotonic()
        if self.stop():
            self._stop(now)
        if now > self._look_at:
            self._look_at = now + LOOK_S
            self._add_nodes()
        for what in [w for w, at in self._again.items() if at <= now]:
            del self._again[what]
            if what == "controller":
                self._start_controller()
            else:
                self._start_agent(what)
        for key, _ in self._selector.select(POLL_S):
            key.data()
        if self._hold and not self._again and time.monotonic() - self._held_since > HOLD_LIMIT_S:
            raise self._failed(f"the run cannot go on: {self._hold}")

    def _stop(self, now: float) -> None:
        """At once, or when the state is saved and all have left."""
        if not self.gently() or not self.start_s or now > self._leave_by:
            raise KeyboardInterrupt
        if self._leave_by == float("inf"):
            grace_s = min(self.job.recovery.grace_s, 86_400.0)
            self._leave_by = now + grace_s + 5.0
            event = {"kind": "Stop", "grace_ns": int(grace_s * S)}
            secret = load_secret(self.folder / "secret", create=False)
            try:
                controller.ask(self.folder, secret, {"type": "ask", "event": event}, timeout_s=5.0)
            except (TimeoutError, OSError):
                reason = "the controller does not answer; leaving without saving"
                self.on_event({"type": "checkpoint_failed", "rank": -1, "reason": reason})
                raise KeyboardInterrupt from None
            self._tell_node("controller", f"is asked to save and stop within {grace_s:g} s")

    def _add_nodes(self) -> None:
        """`phalanx nodes add` asks for them by a number in a file."""
        try:
            wanted = int((self.folder / MORE_NODES).read_text())
        except (OSError, ValueError):
            return
        while self.added < min(wanted, MOST_ADDED):
            self.added += 1
            self._start_agent(self.nodes[-1])

    def _on_controller(self) -> None:
        assert self._controller and self._controller.stdout
        data = self._controller.stdout.read()
        if data:
            *lines, self._lines = (self._lines + data).split(b"\n")
            for line in lines:
                self._decided(json.loads(line))
        elif data == b"":
            self._selector.unregister(self._controller.stdout)
            self._controller.stdout.close()
            code = self._controller.wait()
            self._lines = b""
            self._tell_node("controller", f"died ({code})")
            self._again["controller"] = time.monotonic() + self.job.recovery.restart_s / 10

    def _decided(self, said: Message) -> None:
        kind = said["type"]
        if kind == "form":
            self.form, self._hold = said, ""
            self.saving.failures += said["rung"] >= 1
            self.limit.resize(self._crew_size)
            self.saving.sizes[said["generation"]] = self._crew_size
        elif kind == "started":
            for name in list(self.agents):  # what ranks reported before is here already
                self._drain(name)
            if not self.start_s:
                self.start_s = time.monotonic() - self._began
                self._again = dict.fromkeys(self._again, 0.0)
                self.on_event({"type": "ready", "start_s": self.start_s})
            if self.saving.announced:
                self._to_ranks(self.saving.announced)
        elif kind == "note" and said.get("rung") == 6:
            self._hold, self._held_since = said["text"], time.monotonic()
        elif kind == "ended":
            self.ended = said.get("reason") or "the run is over"
        self.on_event(said)

    @property
    def _crew_size(self) -> int:
        return len(self.form["replicas"]) * self.job.layout.replica_size

    def _drain(self, name: str) -> None:
        while name in self.agents and self._take(name):
            pass

    def _on_agent(self, name: str) -> None:
        self._take(name)
        while name in self.agents and self.agents[name].unread:
            self._take(name)

    def _take(self, name: str) -> bool:
        """One event of an agent."""
        client = self.agents[name]
        event = client.events(0)
        if event is None:
            return False
        kind, worker = event["type"], event.get("worker", 0)
        if kind == "node_lost":
            self._selector.unregister(client)
            client.close()
            del self.agents[name]
            self.saving.keepers.pop(self._number(name), None)
            if self._has_buddies:
                self._pair_keepers()
            self._tell_node(name, f"died: {event['reason']}")
            if not self.ended:
                self._again[name] = time.monotonic() + self.job.recovery.restart_s
            return False
        rank = self.ranks.get(worker, -1)
        if kind == "launched":
            self.ranks[worker] = event["rank"]
        elif kind == "started":
            about = {"pid": event["pid"], "worker": worker, "node": name, "service": SERVICES.get(worker, "")}
            self.on_event({"type": "started", "rank": rank, **about})
        elif kind == "message":
            self._on_message(name, worker, rank, event["body"])
        elif kind == "hang":
            about = {"reason": event["reason"], "progress": event["progress"], "worker": worker, "node": name}
            self.on_event({"type": "hang", "rank": rank, **about})
        elif kind == "exit" and worker >= 0:
            about = {"code": event["code"], "signal": event["signal"], "worker": worker, "node": name}
            self.on_event({"type": "exit", "rank": rank, **about})
            if worker in self.failures:
                self._judge(worker, rank, event)
        return True

    def _on_message(self, name: str, worker: int, rank: int, body: Message) -> None:
        kind = body.get("type")
        if worker == KEEPER:
            if kind in SAVING:
                self.saving.on_keeper(self._number(name), body)
            if kind == "keeper" and self._has_buddies:
                self._pair_keepers()
            return
        if kind == "error":
            failure = self.failures[worker] = Failure(worker)
            failure.kind, failure.text = str(body.get("kind")), str(body.get("text"))
        elif kind == "step":
            self.saving.on_step(body["step"], body["time_s"], body.get("snapshot"))
            if self.limit.add(body["step"], body["time_s"]):
                for client in self.agents.values():
                    client.watch(self.limit.limit_s)
        elif kind == "committed":
            self._committed(body)
        elif kind == "done":
            self.results[rank] = body
        self.on_event({"type": "message", "rank": rank if worker >= 0 else worker, "body": body})
        if kind == "step":
            self.saving.commit_what_is_written()

    def _committed(self, body: Message) -> None:
        if body["generation"] > self._first_commit:
            self._first_commit = body["generation"]
            self.on_event({"type": "first commit", "generation": body["generation"], "step": body["step"]})

    def _judge(self, worker: int, rank: int, event: Message) -> None:
        """A worker has raised an error of its own: is that a reason to give up?"""
        failure = self.failures.pop(worker)
        failure.code, failure.signal, failure.progress = event["code"], event["signal"], event["progress"]
        self.errors[f"{event['progress']['step']} {failure.kind}: {failure.text}"] += 1
        if failure.kind in FATAL or max(self.errors.values()) >= SAME_ERRORS:
            log = next(self.run_dir.glob(f"logs/*/rank-{rank:05d}.log"), Path())
            reason = failure.sentence(f"rank {rank}")
            raise RunFailed(reason, rank=rank, log_tail=tail_of(log), remedy=failure.remedy())

    def _failed(self, text: str) -> RunFailed:
        return RunFailed(text, remedy="see events.jsonl of the run for what failed, and the logs of its nodes")

    def _tell_node(self, name: str, what: str, **more: Any) -> None:
        self.on_event({"type": "node", "node": name, "what": what, **more})

    # -- what is said

    def _number(self, name: str) -> int:
        return self.nodes.index(name)

    def _to_keeper(self, node: int, message: Message) -> None:
        if client := self.agents.get(self.nodes[node]):
            client.send(KEEPER, message)

    def _to_ranks(self, message: Message) -> None:
        for client in self.agents.values():
            for worker in [w for w in client.running if w >= 0]:
                client.send(worker, message)
