"""Start a run's processes on this machine: a controller, a node process per node and one per spare, and everything
below them. It decides nothing about the run: it starts again what dies, as a supervisor would, tells the controller
which nodes are proven dead, and passes on what is said.

If this process ends, nothing stays behind: nodes end with their client, the controller with its pipe.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.control.agent import SERVICES
from phalanx.control.fold import Plan
from phalanx.control.messages import NodeDead, Stop
from phalanx.control.policy import Policy, S, beat_ns
from phalanx.core.errors import RunFailed, UserError
from phalanx.core.job import Job
from phalanx.core.layout import num_nodes
from phalanx.gate.proof import KEY_BYTES
from phalanx.gate.tls import Certificate, is_loopback
from phalanx.runtime import controller
from phalanx.runtime.client import NodeClient
from phalanx.runtime.secret import READ, Identity, load_secret, write_token
from phalanx.runtime.transport import Link, Loop
from phalanx.runtime.wire import Message

POLL_S = 0.1
LOOK_S = 0.5
MORE_NODES, MOST_ADDED = "more-nodes", 64
SPARE_S = 60.0  # after which spares are started at the latest
CONTROLLER_S = 30.0  # for the controller to start
MOST_DEATHS = 8  # of the controller, or of a node process before the run has begun, one soon after the other
SOON_S = 30.0
SILENT_S = 10.0  # a controller that gives no sign of life for so long is ended and started again
LEAVE_LIMIT_S = 60.0  # from the end of the run to the last word of all ranks
SILENCE_BEATS = 12  # in which nodes fall silent "at once"
LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True, slots=True)
class Entries:
    """Which code the processes run, as "package.module:function"; "": there is no such service."""

    worker: str
    store: str
    data: str = ""
    keeper: str = ""
    preload: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Begin:
    """What the run begins from: a step, the generation in which it was made, the ledger's head, and where the
    checkpoint is ({"url", "name"}; None: first weights)."""

    step: int = 0
    generation: int = 0
    ledger: str = ""
    place: dict[str, str] | None = None


def policy_of(job: Job, save: bool) -> Policy:
    """What the job asks of its recovery."""
    r, layout = job.recovery, job.layout
    return Policy(
        recover=r.on,
        min_replicas=r.min_replicas if r.on else layout.replica,
        wait_ns=int(r.wait_s * S),
        start_ns=S,
        hold_ns=int(r.hold_s * S),
        park_ns=10 * S if r.on else 2 * S,
        resend_ns=S,
        deaths=r.deaths_per_node,
        burst_ns=2 * S,
        silence_ns=SILENCE_BEATS * int(beat_s(job) * S),
        save=save,
        buddies=layout.replica == 1 and num_nodes(layout) + r.spares > 1,
        failures=round(job.checkpoint.failures * 1000),
    )


def beat_s(job: Job) -> float:
    failures = round(job.checkpoint.failures * 1000)
    return job.recovery.beat_s or beat_ns(num_nodes(job.layout) + job.recovery.spares, failures) / S


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
    """Read where the controller and the nodes listen."""
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


def environment() -> dict[str, str]:
    """Variables of the ranks, where the user has not said otherwise."""
    wanted = {
        "GLOO_SOCKET_IFNAME": "lo",  # one machine: nothing listens outside it
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin at barriers starve the other ranks
        # A communicator that fails must not take its process down: we abort it, and the rank forms a new one.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


class Cluster:
    """`on_event` hears {"type": "started" | "exit", "rank", "pid", ...}, {"type": "hang", "rank", "reason", ...},
    {"type": "ready", "start_s"} once all ranks are, {"type": "message", "rank", "body"}, {"type": "node", "node",
    "what"}, and what the controller decides. When `stop()`, the run ends; when `gently()`, its state is saved first."""

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        entries: Entries,
        on_event: Callable[[dict[str, Any]], None],
        stop: Callable[[], bool],
        gently: Callable[[], bool] = lambda: False,
        *,
        checkpoints: str = "",
        facts: dict[str, Any] | None = None,
        run: str = "",
    ):
        if not job.run.threads and job.train.reduction != "exact":  # all nodes share the cores of this machine
            threads = max(1, len(os.sched_getaffinity(0)) // job.layout.world_size)
            job = dataclasses.replace(job, run=dataclasses.replace(job.run, threads=threads))
        self.job, self.run_dir, self.entries, self.on_event = job, run_dir.absolute(), entries, on_event
        self.stop, self.gently = stop, gently
        self.folder = self.run_dir / "control"
        self.checkpoints, self.facts, self.mark = checkpoints, facts or {}, run or secrets.token_hex(8)
        self.host, self.places = places_of(job.run.hosts)
        self.loop = Loop()
        self.nodes_up: dict[str, NodeClient] = {}
        self.incarnations: dict[str, int] = {}
        self.ranks: dict[int, int] = {}  # worker -> rank
        self.results: dict[int, Message] = {}
        self.form: Message = {}  # of the generation that was formed last
        self.ended: Message = {}
        self.start_s = 0.0
        self.added = 0  # nodes, since the run began
        self._began = time.monotonic()
        self._look_at = 0.0
        self._leave_by = float("inf")
        self._again: dict[str, float] = {}  # what died -> when it is started again
        self._controller: subprocess.Popen[bytes] | None = None
        self._lines = b""
        self._heard_at = 0.0  # the last sign of life of the controller
        self._trouble: tuple[float, str] = (0.0, "")  # since when, and why, the controller cannot write its journal
        self._deaths: dict[str, list[float]] = {}  # what died -> when, of the latest
        self._first_commit = 0  # the last generation that had one
        self._link: Link | None = None

    @property
    def nodes(self) -> list[str]:
        return [f"node-{i}" for i in range(num_nodes(self.job.layout) + self.job.recovery.spares + self.added)]

    # -- from the first process to the last

    def run(self, begin: Begin) -> dict[str, Any]:
        """To the end of the run: {"ended": how, "start_s", "wall_s", "done": what each rank said last}.
        KeyboardInterrupt when `stop()`; RunFailed when the controller cannot be started."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        secret = load_secret(self.folder / "secret")
        policy = policy_of(self.job, bool(self.entries.keeper))
        plan = Plan(self.job.layout, self.job.train.steps, begin.step, begin.generation, policy)
        controller.write_plan(self.folder, plan)
        self.serving = self._serving(begin)
        self._start_controller()
        deadline = time.monotonic() + CONTROLLER_S
        while not (address := controller.read_address(self.folder))["aggregators"]:
            if time.monotonic() > deadline or self.stop():
                remedy = f"see {self.run_dir / 'logs' / 'controller.log'}"
                raise KeyboardInterrupt if self.stop() else RunFailed("the controller did not start", remedy=remedy)
            time.sleep(0.01)
        self.addresses = address["aggregators"]
        me = Identity("user", f"launcher-{secrets.token_hex(8)}", 1)
        at = [(address["host"], address["port"])]
        self._link = Link(self.loop, secret, me, at, controller.ANSWERS, lambda *_: None)
        first = num_nodes(self.job.layout)
        for name in self.nodes[:first]:
            self._start_node(name)
        self._again |= dict.fromkeys(self.nodes[first:], self._began + SPARE_S)  # or once the others are ready
        while not self.ended:
            self._turn()
        if self.stop():
            raise KeyboardInterrupt
        deadline = time.monotonic() + (LEAVE_LIMIT_S if self.ended["ok"] else 0.0)
        while not self._crew <= self.results.keys() and time.monotonic() < deadline:
            self._turn()
        done = [self.results[rank] for rank in sorted(self._crew & self.results.keys())]
        wall_s = time.monotonic() - self._began
        return {"ended": self.ended, "start_s": self.start_s, "wall_s": wall_s, "done": done}

    @property
    def _crew(self) -> set[int]:
        size = self.job.layout.replica_size
        return {int(r) * size + i for r in self.form.get("replicas", ()) for i in range(size)}

    def _serving(self, begin: Begin) -> dict[str, Any]:
        """What all nodes are told of the run."""
        e, c, layout, peers = self.entries, self.job.checkpoint, self.job.layout, self._peers()
        worker_args = {
            "job": self.job.to_dict(),
            "peers": peers,
            "resume": begin.place,
            "ledger": begin.ledger,
            "checkpoints": self.checkpoints,
            "facts": self.facts,
            "keeper": {"run": self.mark},
        }
        services: dict[str, Any] = {"store": {"entry": e.store, "args": {}}}
        if e.data:
            services["data"] = {"entry": e.data, "args": {"run_dir": str(self.run_dir)}}
        if e.keeper:
            args = {
                "url": self.checkpoints,
                "ranks": layout.ranks_per_node or layout.world_size,
                "keep_last": c.keep_last,
                "keep_every": c.keep_every,
                "peers": peers,
                "run": self.mark,
                "has_buddy": policy_of(self.job, True).buddies,
            }
            services["keeper"] = {"entry": e.keeper, "args": args}
        return {"worker": {"entry": e.worker, "args": worker_args}, "services": services}

    def _peers(self) -> dict[str, str]:
        """What ranks and keepers share to hand state to each other; none of it is known outside the run."""
        beyond = not all(is_loopback(place.host) for place in self.places)
        return {"key": secrets.token_hex(KEY_BYTES), "certificate": Certificate.make().pem if beyond else ""}

    def close(self) -> None:
        if self._link:
            self._link.close()
        for client in self.nodes_up.values():
            client.close()
        self.nodes_up.clear()
        if self._controller:
            self._controller.kill()
            self._controller.wait()
            assert self._controller.stdout and self._controller.stdin
            self._controller.stdout.close()
            self._controller.stdin.close()
            self._controller = None

    def _place(self, name: str) -> Place:
        """Nodes beyond those that the file names are like the last of them."""
        return self.places[min(self.nodes.index(name), len(self.places) - 1)]

    def _start_controller(self) -> None:
        logs = self.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "phalanx.runtime.controller", "--dir", str(self.folder)]
        command += ["--secret", str(self.folder / "secret"), "--aggregate", "--attached", "--host", self.host]
        command += ["--beat-s", str(beat_s(self.job))]
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
        self._heard_at = time.monotonic() + CONTROLLER_S - SILENT_S
        self.loop.watch(self._controller.stdout, READ, lambda mask: self._on_controller())
        self._tell_node("controller", "started", pid=self._controller.pid)

    def _start_node(self, name: str) -> None:
        logs, place = self.run_dir / "logs", self._place(name)
        client = self.nodes_up[name] = NodeClient(
            list(self.entries.preload),
            env=environment() | place.environment,
            log=logs / f"{name}.log",
            prefix=place.prefix,
        )
        self.loop.watch(client, READ, lambda mask: self._on_node(name))
        client.serve(
            name=name,
            domain=name,
            secret=str(write_token(self.folder / name / "token", load_secret(self.folder / "secret"), "agent", name)),
            aggregators=self.addresses,
            beat_s=beat_s(self.job),
            hang_s=self.job.run.hang_timeout_s,
            dir=str(self.folder / name),
            logs=str(logs / name),
            host=place.host,
            **self.serving,
        )
        self._tell_node(name, "started", pid=client.process.pid)

    # -- what is heard

    def _turn(self) -> None:
        now = time.monotonic()
        if self.stop():
            self._stop(now)
        if now > self._look_at:
            self._look_at = now + LOOK_S
            self._add_nodes()
        for name in [w for w, at in self._again.items() if at <= now]:
            del self._again[name]
            if name == "controller":
                self._start_controller()
            else:
                self._start_node(name)
        self.loop.turn(POLL_S)
        if self._controller and time.monotonic() - self._heard_at > SILENT_S and self._controller.poll() is None:
            self._tell_node("controller", f"is silent for {SILENT_S:g} s, and is ended")
            self._heard_at = time.monotonic()
            self._controller.kill()
        since, why = self._trouble
        if why and time.monotonic() - since > self.job.recovery.hold_s:
            raise RunFailed(f"the controller cannot go on: {why}", remedy="make room, or name another run.dir")

    def _stop(self, now: float) -> None:
        """At once, or when the state is saved and all have left."""
        if not self.gently() or not self.start_s or now > self._leave_by:
            raise KeyboardInterrupt
        if self._leave_by == float("inf"):
            grace_s = min(self.job.recovery.grace_s, 86_400.0)
            self._leave_by = now + grace_s + 5.0
            self._ask(Stop(int(grace_s * S)))
            self._tell_node("controller", f"is asked to save and stop within {grace_s:g} s")

    def _ask(self, event: NodeDead | Stop) -> None:
        """It is heard as soon as there is a controller."""
        assert self._link
        self._link.post({"type": "ask", "event": event.to_dict()})

    def _add_nodes(self) -> None:
        """`phalanx nodes add` asks for them by a number in a file."""
        try:
            wanted = int((self.folder / MORE_NODES).read_text())
        except (OSError, ValueError):
            return
        while self.added < min(wanted, MOST_ADDED):
            self.added += 1
            self._start_node(self.nodes[-1])

    def _on_controller(self) -> None:
        assert self._controller and self._controller.stdout
        data = self._controller.stdout.read()
        if data:
            self._heard_at = time.monotonic()
            *lines, self._lines = (self._lines + data).split(b"\n")
            for line in lines:
                self._decided(json.loads(line))
        elif data == b"":
            self.loop.watch(self._controller.stdout, 0)
            self._controller.stdout.close()
            code = self._controller.wait()
            self._lines = b""
            self._tell_node("controller", f"died ({code})")
            self._restart("controller", self.job.recovery.restart_s / 10, f"the controller ended with code {code}")

    def _decided(self, said: Message) -> None:
        kind = said["type"]
        if kind == "alive":
            return
        if kind == "trouble":
            since = self._trouble[0] if self._trouble[1] else time.monotonic()
            self._trouble = (since, said["text"])
            self._tell_node("controller", said["text"] or "can write again")
            return
        if kind == "report":
            self.on_event({"rank": -1, **said["body"], "type": said["about"]})
            return
        if kind == "form":
            self.form = said
        elif kind == "started":
            for name in list(self.nodes_up):  # what ranks reported before is here already
                while name in self.nodes_up and self._take(name):
                    pass
            if not self.start_s:
                self.start_s = time.monotonic() - self._began
                self._again = dict.fromkeys(self._again, 0.0)
                self.on_event({"type": "ready", "start_s": self.start_s})
        elif kind == "ended":
            self.ended = said
        self.on_event(said)

    def _on_node(self, name: str) -> None:
        self._take(name)
        while name in self.nodes_up and self.nodes_up[name].unread:
            self._take(name)

    def _take(self, name: str) -> bool:
        """One event of a node."""
        client = self.nodes_up[name]
        event = client.events(0)
        if event is None:
            return False
        kind, worker = event["type"], event.get("worker", 0)
        if kind == "node_lost":
            self._lose_node(name, event["reason"])
            return False
        rank = self.ranks.get(worker, -1)
        about = {"worker": worker, "node": name}
        if kind == "booted":
            self.incarnations[name] = event["incarnation"]
        elif kind == "launched":
            self.ranks[worker] = event["rank"]
        elif kind in ("started", "exit"):
            told: Message = {key: event[key] for key in ("pid", "code", "signal", "service") if key in event}
            self.on_event({"type": kind, "rank": rank, **told, **about})
        elif kind == "message":
            self._on_message(worker, rank, event["body"])
        elif kind == "hang":
            said = {key: event[key] for key in ("reason", "progress", "final")}
            self.on_event({"type": "hang", "rank": rank, **said, **about})
        return True

    def _lose_node(self, name: str, reason: str) -> None:
        """Its process has ended. Once the last process of its tree is gone too, that is proven."""
        client = self.nodes_up.pop(name)
        self.loop.watch(client, 0)
        gone = client.close()
        self._tell_node(name, f"died: {reason}")
        if gone and name in self.incarnations:
            self._ask(NodeDead(name, self.incarnations[name], "its processes have ended"))
        if not self.ended:
            self._restart(name, self.job.recovery.restart_s, f"{name} ended: {reason}")

    def _restart(self, name: str, after_s: float, why: str) -> None:
        """Start it again after a while, which grows. A controller that does not stay up, or a node that dies before the
        first step, is not worth many attempts."""
        now = time.monotonic()
        deaths = self._deaths[name] = [at for at in self._deaths.get(name, []) if at > now - SOON_S] + [now]
        if len(deaths) >= MOST_DEATHS and (name == "controller" or not self.start_s):
            log = self.run_dir / "logs" / f"{name}.log"
            raise RunFailed(f"{why}, {len(deaths)} times in {SOON_S:g} s", remedy=f"see {log}")
        self._again[name] = now + min(after_s * 2 ** (len(deaths) - 1), SOON_S / MOST_DEATHS)

    def _on_message(self, worker: int, rank: int, body: Message) -> None:
        kind = body.get("type")
        if worker == SERVICES["keeper"]:
            self.on_event({"rank": -1, **body})
            return
        if kind == "step" and body["generation"] > self._first_commit:
            self._first_commit = body["generation"]
            told = {"generation": body["generation"], "step": body["step"] + 1}
            self.on_event({"type": "first commit", **told})
        elif kind == "done":
            self.results[rank] = body
        self.on_event({"type": "message", "rank": rank if worker >= 0 else worker, "body": body})

    def _tell_node(self, name: str, what: str, **more: Any) -> None:
        self.on_event({"type": "node", "node": name, "what": what, **more})
