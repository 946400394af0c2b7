"""Real workers, led by the real Gang, without agents and sockets between: nodes are names, each with some ranks."""

import time
from pathlib import Path

from phalanx.control.gang import Gang
from phalanx.control.messages import (
    Durable,
    Form,
    Halt,
    Kill,
    Launch,
    Leave,
    Missing,
    NodeJoined,
    Note,
    Parked,
    Pause,
    Ready,
    Save,
    SetTimer,
    Start,
    StepsDone,
    TimerFired,
    WorkerDied,
    WorkersUp,
)
from phalanx.control.policy import Policy
from phalanx.data import source
from phalanx.runtime.client import NodeClient

STORE, DATA = -1, -2
S = 10**9
POLICY = dict(gather_ns=60 * S, park_ns=8 * S, form_ns=20 * S, launch_ns=30 * S, resend_ns=1 * S, save=False)


class Conductor:
    def __init__(self, job, folder, spares=0, preload=(), entry="", die=None, **policy):
        self.job, self.folder, self.entry = job, Path(folder), entry
        source.prepare(job, self.folder, lambda size: None)
        self.client = NodeClient(list(preload), env={"GLOO_SOCKET_IFNAME": "lo"}, log=self.folder / "node.log")
        self.messages, self.forms, self.notes, self.died, self.committed = [], [], [], [], []
        self.pids, self.done, self.where, self.timers, self.die = {}, {}, {}, {}, die or {}
        self.client.spawn(STORE, "phalanx.parallel.groups:serve_store", {}, self.folder / "store.log")
        self.client.spawn(DATA, "phalanx.data.service:main", {"run_dir": str(self.folder)}, self.folder / "data.log")
        self.store = self.data = None
        self.incarnations = {}  # of nodes that came back
        self.until(lambda: self.store and self.data)
        layout = job.layout
        self.gang = Gang.of(layout, job.train.steps, Policy(**{**POLICY, **policy}))
        count = layout.world_size // (layout.ranks_per_node or layout.world_size) + spares
        for i in range(count):
            self.join(f"n{i}")

    def join(self, name):
        self.tell(NodeJoined(*self.at(name), name, f"{self.store['host']}:{self.store['port']}"))

    def at(self, name):
        return name, self.incarnations.get(name, 1)

    def close(self):
        self.client.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # -- the gang

    def tell(self, event):
        for command in self.gang.apply(time.monotonic_ns(), event):
            self.obey(command)

    def obey(self, command):
        kind = type(command)
        if kind is SetTimer:
            self.timers[command.timer] = command.at_ns
        elif kind is Note:
            self.notes.append(command.text)
        elif kind is Launch:
            for rank, worker in command.workers.items():
                if worker not in self.where:
                    self.launch(command.node, rank, worker)
        elif kind is Kill:
            for worker in command.workers:
                self.client.kill(worker)
        elif kind is Form:
            if not self.forms or self.forms[-1].generation < command.generation:
                self.forms.append(command)
            for rank, worker in command.crew.items():
                s = command.sources.get(rank)
                from_ = {"kind": s.kind, "node": s.node, "number": s.number, "made": s.made} if s else None
                common = {"generation": command.generation, "step": command.step, "store": command.store}
                self.send(worker, type="form", rank=rank, replicas=list(command.replicas), source=from_, **common)
            for s in command.sources.values():
                if s.kind == "live" and s.number not in command.crew.values():
                    self.send(
                        s.number, type="serve", generation=command.generation, step=command.step, store=command.store
                    )
        elif kind in (Start, Halt, Pause, Save, Leave):
            for worker, (node, _) in list(self.where.items()):
                if node in command.nodes and worker in self.client.running:
                    more = {k: getattr(command, k) for k in ("generation", "step", "reason") if hasattr(command, k)}
                    self.send(worker, type=kind.__name__.lower(), **more)

    def send(self, worker, **body):
        self.client.send(worker, body)

    def launch(self, node, rank, worker):
        ranks_here = self.job.layout.ranks_per_node or self.job.layout.world_size
        args = {
            "job": self.job.to_dict(),
            "rank": rank,
            "worker": worker,
            "node": node,
            "local_rank": rank % ranks_here,
            "local_ranks": ranks_here,
            "token": "secret",
            "host": "127.0.0.1",
            "data": {"address": self.data["address"]},
            "die": self.die.get(worker),
        }
        self.where[worker] = (node, rank)
        self.client.spawn(worker, self.entry, args, self.folder / f"rank-{rank}.log")

    # -- what happens

    def until(self, ready, timeout=90):
        deadline = time.monotonic() + timeout
        while not ready():
            assert time.monotonic() < deadline, self.explain()
            now = time.monotonic_ns()
            for name, at in list(self.timers.items()):
                if at <= now:
                    del self.timers[name]
                    self.tell(TimerFired(name))
            event = self.client.events(0.05)
            if event:
                self.heard(event)

    def explain(self):
        logs = "\n".join(f"{p.name}: {p.read_text()[-3000:]}" for p in sorted(self.folder.glob("rank-*.log")))
        return f"{self.gang.phase} {self.gang.waiting} {self.notes}\n{logs}"

    def heard(self, event):
        kind, worker = event["type"], event.get("worker")
        assert kind != "node_lost", event
        if kind == "started":
            self.pids[worker] = event["pid"]
        elif kind == "exit" and worker in self.where:
            node, _ = self.where[worker]
            if worker not in self.done:
                self.died.append(worker)
            self.tell(WorkerDied(*self.at(node), worker, str(event["signal"] or event["code"])))
        elif kind == "message":
            body = event["body"]
            getattr(self, "on_" + body["type"], lambda *_: None)(worker, body)

    def on_store(self, worker, body):
        self.store = body

    def on_data(self, worker, body):
        self.data = body

    def on_up(self, worker, body):
        self.tell(WorkersUp(*self.at(self.where[worker][0]), (worker,)))

    def on_parked(self, worker, body):
        held = (body["step"], body["prepared"], body["made"])
        self.tell(Parked(*self.at(self.where[worker][0]), body["generation"], (worker,), *held))

    def on_ready(self, worker, body):
        self.tell(Ready(*self.at(self.where[worker][0]), body["generation"], body["step"], {worker: body["digest"]}))

    def on_missing(self, worker, body):
        self.notes.append(body["reason"])
        self.tell(Missing(*self.at(self.where[worker][0]), body["generation"], worker, body["reason"]))

    def on_committed(self, worker, body):
        self.committed.append((body["generation"], body["step"], worker))
        self.tell(StepsDone(body["generation"], body["step"]))

    def on_durable(self, worker, body):
        self.tell(Durable(body["step"], body["generation"]))

    def on_error(self, worker, body):
        self.notes.append(f"worker {worker}: {body['kind']}: {body['text']}")

    def on_step(self, worker, body):
        self.messages.append((worker, body))

    def on_done(self, worker, body):
        self.done[worker] = body

    def finish(self, timeout=120):
        """To the end; the digests by rank."""
        self.until(lambda: self.gang.phase == "ended", timeout)
        crew = self.gang.form.crew
        self.until(lambda: set(crew.values()) <= self.done.keys(), 30)
        return {rank: self.done[worker]["digest"] for rank, worker in crew.items()}
