"""Real workers of real nodes, led by the real gang in this process: no controller and no network in between."""

import dataclasses
import time
from pathlib import Path

from phalanx.control import agent as machine
from phalanx.control.agent import SERVICES, Agent, Service
from phalanx.control.gang import Gang
from phalanx.control.messages import EVERYONE, Build, Failure, Form, NodeDead, Note, SetTimer, TimerFired
from phalanx.control.policy import Policy
from phalanx.data import source
from phalanx.data.selection import RunData
from phalanx.runtime.bare import BareClient

S = 10**9
POLICY = dict(gather_ns=60 * S, park_ns=8 * S, form_ns=20 * S, launch_ns=30 * S, resend_ns=1 * S, save=False)
ENV = {"GLOO_SOCKET_IFNAME": "lo"}
ENTRIES = {"store": "phalanx.gate.meeting:serve", "data": "phalanx.data.service:main"}


class Conductor:
    """Leads the run. All nodes share one zygote, store and data service; each has an agent of its own. `client` is
    shared with other conductors, so that nothing is imported again."""

    def __init__(self, job, folder, preload=(), entry="", die=None, client=None, **policy):
        self.job, self.folder, self.entry, self.die = job, Path(folder), entry, die or {}
        source.prepare(job, self.folder, lambda size: None)
        data = dataclasses.asdict(RunData.read(self.folder))
        self.is_owner, self.alive = client is None, set()
        self.client = client or BareClient(list(preload), env=ENV, log=self.folder / "node.log")
        self.forms, self.notes, self.died, self.committed = [], [], [], []
        self.builds = []  # replica and world
        self.pids, self.done, self.timers, self.said = {}, {}, {}, {}
        for name, function in ENTRIES.items():
            args = {"data": data, "alone": True}
            self.spawn(SERVICES[name], function, args, self.folder / f"{name}.log")
        self.agents, self.homes = {}, {}
        self.until(lambda: len(self.said) == len(ENTRIES))
        layout = job.layout
        self.gang = Gang.of(layout, job.train.steps, Policy(**{**POLICY, **policy}))
        for i in range(layout.world_size // (layout.ranks_per_node or layout.world_size)):
            self.join(f"n{i}")

    def join(self, name, incarnation=1):
        services = {key: Service(said) for key, said in self.said.items()}
        agent = self.agents[name] = Agent(name, name, services, host="127.0.0.1", incarnation=incarnation)
        agent.connected(time.monotonic_ns())
        self.act(agent)

    def burn(self, name):
        """Destroy a node, with all that is on it."""
        workers = [worker for worker, home in self.homes.items() if home is self.agents[name]]
        for worker in workers:
            self.client.kill(worker)
        agent = self.agents.pop(name)
        self.until(lambda: {*workers} <= {*self.died})
        self.tell(NodeDead(name, agent.incarnation, "its power supply burnt"))

    def spawn(self, number, entry, args, log):
        self.alive.add(number)
        self.client.spawn(number, entry, args, log)

    def close(self):
        if self.is_owner:
            self.client.close()
            return
        for number in self.alive:
            self.client.kill(number)
        while self.alive:
            event = self.client.events(60)
            assert event and event["type"] != "node_lost", event
            self.forget(event)

    def forget(self, event):
        if event["type"] == "exit":
            self.alive.discard(event["worker"])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # -- the gang and the agents

    def tell(self, event):
        for command in self.gang.apply(time.monotonic_ns(), event):
            if isinstance(command, SetTimer):
                self.timers[command.timer] = command.at_ns
            elif isinstance(command, Note):
                self.notes.append(command.text)
            else:
                self.note(command)
                for node in list(self.agents) if command.to == EVERYONE else command.to:
                    self.obey(node, command)

    def note(self, command):
        if isinstance(command, Form) and (not self.forms or self.forms[-1].generation < command.generation):
            self.forms.append(command)
        elif isinstance(command, Build) and (command.replica, command.world) not in self.builds:
            self.builds.append((command.replica, command.world))

    @property
    def crew(self):
        """Return the worker of each rank that takes part."""
        return {rank: w for r in self.gang.form.replicas for rank, w in self.gang.worlds.replicas[r].crew.items()}

    def obey(self, node, command):
        if node in self.agents:
            self.agents[node].obey(time.monotonic_ns(), command)
            self.act(self.agents[node])

    def act(self, agent):
        for action in agent.take():
            if isinstance(action, machine.Post):
                self.tell(action.event)
                agent.acknowledged(agent.posted)
            elif isinstance(action, machine.Spawn):
                self.homes[action.number] = agent
                args = {**action.args, "job": self.job.to_dict(), "host": "127.0.0.1"}
                args |= {"peers": {"key": "5e" * 32}, "shared": True, "rails": []}
                args |= {
                    "die": self.die.get(action.number),
                    "resume": None,
                    "ledger": "",
                    "facts": {"data_version": "1"},
                }
                self.spawn(action.number, self.entry, args, self.folder / f"rank-{args['rank']}.log")
            elif isinstance(action, machine.Send):
                self.client.send(action.number, action.body)
            elif isinstance(action, machine.End):
                self.client.kill(action.number)

    # -- what happens

    def until(self, ready, timeout=120):
        deadline = time.monotonic() + timeout
        while not ready():
            assert time.monotonic() < deadline, self.explain()
            now = time.monotonic_ns()
            for name, at in list(self.timers.items()):
                if at <= now:
                    del self.timers[name]
                    self.tell(TimerFired(name))
            for agent in list(self.agents.values()):
                for name, at in list(agent.alarms.items()):
                    if at <= now and name != "lease":
                        agent.fire(now, name)
                agent.beat(now)
                self.act(agent)
            event = self.client.events(0.01)
            if event:
                self.heard(event)

    def explain(self):
        logs = "\n".join(f"{p.name}: {p.read_text()[-3000:]}" for p in sorted(self.folder.glob("rank-*.log")))
        return f"{self.gang.phase} {self.gang.gen.waiting} {self.notes}\n{logs}"

    def heard(self, event):
        kind, worker = event["type"], event.get("worker")
        assert kind != "node_lost", event
        self.forget(event)
        agent, now = self.homes.get(worker), time.monotonic_ns()
        if kind == "started":
            self.pids[worker] = event["pid"]
        elif kind == "exit" and agent:
            if worker not in self.done:
                self.died.append(worker)
            agent.ended(now, worker, Failure(signal=event["signal"] or "", code=event["code"] or 0))
        elif kind == "message" and agent:
            body = event["body"]
            agent.worker_said(now, worker, body)
            if body["type"] == "step":
                self.committed.append((body["generation"], body["step"], worker))
            elif body["type"] == "done":
                self.done[worker] = body
        elif kind == "message":
            name = next(name for name, number in SERVICES.items() if number == worker)
            self.said.setdefault(name, {k: v for k, v in event["body"].items() if k != "type"})
        if agent and self.agents.get(agent.name) is agent:
            self.act(agent)

    def finish(self, timeout=120):
        """Run to the end; return the digests by rank."""
        self.until(lambda: self.gang.phase == "ended", timeout)
        crew = self.crew
        self.until(lambda: set(crew.values()) <= self.done.keys(), 60)
        return {rank: self.done[worker]["digest"] for rank, worker in crew.items()}
