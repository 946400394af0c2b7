"""The processes of control_load.py: the controller, aggregators, and generators that each simulate some thousand nodes.

A node is the real agent. Its workers are real members that do no work, and report at once what workers report. A
generation does one step, once the controller knows that all its replicas are in it. When a member breaks, its generator
notifies the others: the ranks of its replica park and all other replicas part, as they do when their groups break."""

import heapq
import json
import os
import socket
import sys
import time
from pathlib import Path

from phalanx.control import agent as machine
from phalanx.control import codec, messages
from phalanx.control.agent import Agent, Service
from phalanx.control.journaled import Plan
from phalanx.control.liveness import event_of
from phalanx.control.member import Member
from phalanx.control.messages import Command, Failure, Source
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from phalanx.runtime import controller
from phalanx.runtime.aggregator import COMMANDS, Aggregator
from phalanx.runtime.secret import READ, Identity, load_secret
from phalanx.runtime.transport import Link, Loop


def node_name(number: int) -> str:
    return f"node-{number:05d}"


def rack(number: int) -> str:
    return f"rack-{number // 16}"


# -- aggregators


class Stamping(Aggregator):
    """Stamps each report with the arrival of the first in its bundle, so that any later waiting counts."""

    def _gather(self, item, agent=None):
        if not self._reports.items:
            self._since_ns = time.monotonic_ns()
        super()._gather(item, agent)

    def _post_reports(self, items):
        return super()._post_reports([{**item, "at_ns": self._since_ns} for item in items])


def aggregate(secret, name, address):
    loop = Loop()
    served = Stamping(loop, load_secret(Path(secret), create=False), Identity("aggregator", name, 1), [address])
    print(json.dumps(served.server.address), flush=True)
    while True:
        loop.turn()


# -- nodes


class Node:
    """An agent and its workers."""

    def __init__(self, fleet, number, address):
        self.fleet, self.number, self.name, self.address = fleet, number, node_name(number), address
        self.incarnation, self.link = 0, None
        self.start()

    def start(self):
        self.incarnation += 1
        store = Service({"address": self.name})
        self.agent = Agent(self.name, rack(self.number), {"store": store}, host=self.name, incarnation=self.incarnation)
        self.members: dict[int, Member] = {}
        me = Identity("agent", self.name, self.incarnation)
        how = {"on_open": self.opened, "on_close": self.closed, "on_ack": self.agent.acknowledged, "seed": self.number}
        self.link = Link(self.fleet.loop, self.fleet.secret, me, [self.address], COMMANDS, self.commanded, **how)

    def die(self):
        self.link.close()
        self.link = None

    def opened(self, session):
        self.beat()
        self.agent.connected(time.monotonic_ns())
        self.act()

    def closed(self, session):
        self.agent.disconnected()

    def beat(self):
        if self.link:
            sent_ns = time.monotonic_ns()
            said = self.agent.beat(sent_ns)
            about = {"visit": self.link.visits, "sent_ns": sent_ns, "counter": said["step"]}
            self.link.tell({"type": "beat", **about, **said})
            self.fleet.beats += 1
            self.act()

    def act(self):
        """Carry out the agent's actions at once."""
        while self.link and (actions := self.agent.take()):
            for action in actions:
                if isinstance(action, machine.Post):
                    self.link.post({"type": "event", "event": action.event.to_dict()})
                    self.fleet.events += 1
                elif isinstance(action, machine.Spawn):
                    speaks = action.args["rank"] % self.fleet.replica_size == 0
                    self.members[action.number] = Member(action.number, 10**9, speaks)
                    self.agent.worker_said(time.monotonic_ns(), action.number, {"type": "up", "port": 1})
                elif isinstance(action, machine.End):
                    self.members.pop(action.number, None)
                    self.agent.ended(time.monotonic_ns(), action.number, Failure(signal="SIGKILL"))
                elif isinstance(action, machine.Send) and action.number in self.members:
                    self.tell(action.number, action.body)
                elif isinstance(action, machine.Alarm) and action.name == "gather":
                    self.fleet.later(action.at_ns, self.number, self.incarnation)
                elif isinstance(action, machine.Reboot):
                    self.die()
                    self.start()

    def flush(self, incarnation):
        if self.link and incarnation == self.incarnation:
            self.agent.fire(time.monotonic_ns(), "gather")
            self.act()

    def tell(self, worker, body):
        """Deliver a message to a worker, which obeys it at once."""
        m, kind = self.members[worker], body["type"]
        if kind == "build":
            if m.build(body["world"]):
                m.built()
            self.say(worker)
        elif kind == "halt" and m.halt(body["world"]):
            self.say(worker)
        elif kind == "form":
            self.enter(worker, m, body)
        elif kind == "serve" and m.may_serve(body["generation"]):
            m.settle(body["step"])
        elif kind in ("part", "pause") and m.part(body["generation"]):
            self.say(worker)

    def enter(self, worker, m, form):
        """Enter the groups at once and vote for the next step, since no state is moved and nothing is computed."""
        if m.form(form["generation"], form["world"], Source(**form["source"]) if form["source"] else None):
            if form["source"] is None:
                m.settle(form["step"])
            m.restored(form["step"])
            m.formed(form["step"])
            m.vote()
        self.say(worker)

    def say(self, worker, body=None):
        """Report where the worker stands."""
        if body := body or self.members[worker].standing():
            self.agent.worker_said(time.monotonic_ns(), worker, body)

    def commit(self, generation):
        """Commit the generation's one step, after all its ranks have voted."""
        for worker, m in self.members.items():
            if m.phase == "running" and m.generation == generation and m.prepared > m.step:
                m.commit(False)
                self.say(worker, {"type": "step", "generation": generation, "step": m.step - 1, "time_s": 5.0})
        self.act()

    @property
    def running(self):
        """Return the world and generation of its workers, if they train."""
        found = [(m.world, m.generation) for m in self.members.values() if m.phase == "running"]
        return found[0] if self.link and found else None

    def lose(self, world, generation):
        """Handle the loss of a member of that world: its members lose all their groups, the others their groups with
        it."""
        for worker, m in list(self.members.items()) if self.link else ():
            if m.world == world and m.phase != "parked":
                m.halt(world, {"text": "it has lost its peers"})
                self.say(worker)
            elif m.phase == "running" and m.generation == generation and m.part(generation):
                self.say(worker)
        self.act()

    def break_worker(self):
        worker = min(self.members)
        del self.members[worker]
        self.agent.ended(time.monotonic_ns(), worker, Failure(signal="SIGKILL"))
        self.act()

    def commanded(self, session, number, body):
        if body["type"] == "command":
            sent = {"nodes": [self.name]} if "nodes" in codec.hints(messages.KINDS[body["command"]["kind"]]) else {}
            self.agent.obey(time.monotonic_ns(), Command.from_dict({**sent, **body["command"]}))
            self.act()


class Fleet:
    """Some thousand nodes in one process. `plan`: [seconds, kind, node], for all generators; kinds are worker, node,
    back and end."""

    def __init__(self, folder, index, count, secret, given):
        self.loop, self.secret = Loop(), load_secret(Path(secret), create=False)
        self.beats = self.events = 0
        self.beat_s, self.replica_size = given["beat_s"], given["replica_size"]
        self.others = [f"{folder}/generator-{i}" for i in range(count)]
        self.bus = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.bus.bind(self.others[index])
        self.bus.setblocking(False)
        self.loop.watch(self.bus, READ, self.heard)
        self.nodes: dict[int, Node] = {}
        self.queue: list = []  # (time, kind, number): beats and the plan
        for i, (number, address) in enumerate(zip(given["nodes"], given["addresses"], strict=True)):
            begin = time.monotonic() + given["connect_s"] * i / len(given["nodes"])
            heapq.heappush(self.queue, (begin, "begin", number, tuple(address)))

    def run(self):
        while True:
            now = time.monotonic()
            while self.queue and self.queue[0][0] <= now:
                when, what, number, more = heapq.heappop(self.queue)
                if what == "begin":
                    self.nodes[number] = Node(self, number, more)
                    heapq.heappush(self.queue, (when + self.beat_s, "beat", number, None))
                elif what == "beat":
                    self.nodes[number].beat()
                    heapq.heappush(self.queue, (when + self.beat_s, "beat", number, None))
                elif what == "flush":
                    self.nodes[number].flush(more)
                else:
                    self.act(what, number)
            self.loop.turn(min(0.5, max(0.0, self.queue[0][0] - time.monotonic())) if self.queue else 0.5)

    def later(self, at_ns, number, incarnation):
        heapq.heappush(self.queue, (at_ns / 1e9, "flush", number, incarnation))

    def act(self, what, number):
        node = self.nodes[number]
        running = node.running
        if what == "worker" and running:
            node.break_worker()
            self.tell({"lost": running})
        elif what == "node" and node.link:
            node.die()
            if running:
                self.tell({"lost": running})
        elif what == "back" and node.link is None:
            node.start()

    def tell(self, message):
        for other in self.others:
            self.bus.sendto(json.dumps(message).encode(), other)

    def heard(self, mask):
        message = json.loads(self.bus.recv(1 << 16))
        if "plan" in message:
            for at, what, number in message["plan"]:
                if number in self.nodes:
                    heapq.heappush(self.queue, (at, what, number, None))
        elif "beat_s" in message:
            self.beat_s = message["beat_s"]
        elif "count" in message:
            connected = sum(node.link is not None and node.link.session is not None for node in self.nodes.values())
            answer = {"beats": self.beats, "events": self.events, "connected": connected}
            self.bus.sendto(json.dumps(answer).encode(), message["count"])
        elif "commit" in message:
            for node in self.nodes.values():
                node.commit(message["commit"])
        else:
            for node in self.nodes.values():
                node.lose(*message["lost"])


# -- the controller


class Measured(controller.Controller):
    """The real controller with a clock: from reading a report until the resulting commands are durable and handed to
    the sockets."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        # (event, ms since the aggregator got it, ms since it came here, ms of CPU since then)
        self.latencies: list = []
        self.reports = self.commands = self.begun = 0
        self.bus = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def begin_step(self, folder):
        """Begin a step in place of the ranks, which see for themselves that all have voted."""
        gen = self.gang.gen
        if gen.form and gen.number > self.begun and not gen.waiting:
            self.begun = gen.number
            for other in sorted(Path(folder).glob("generator-*")):
                self.bus.sendto(json.dumps({"commit": gen.number}).encode(), str(other))

    def _take(self, kind, body, session=None, number=0):
        self._cpu_ns = time.process_time_ns()
        super()._take(kind, body, session, number)

    def _write_down(self, urgent=False):
        for heard in self._unwritten:
            heard.cpu_ns = self._cpu_ns
        super()._write_down(urgent)

    def _settle(self):
        waiting = [heard for _, heard in self._waiting]
        super()._settle()
        done = waiting[: len(waiting) - len(self._waiting)]
        now, used = self.now_ns(), time.process_time_ns()
        for heard in done:
            items = heard.entry.get("items", [])
            self.reports += sum(len(item.get("said", "1")) for item in items)
            self.commands += sum(len(command.to) for command in heard.commands)
            if items and any(command.to for command in heard.commands):
                event = event_of(items[-1]) or {"kind": "Seen"}
                came = time.monotonic_ns() - min(item["at_ns"] for item in items)
                about = (came, now - heard.time_ns, used - heard.cpu_ns)
                self.latencies.append((event["kind"].removeprefix("Many"), *(ns / 1e6 for ns in about)))


def control(folder, secret, core, layout):
    os.sched_setaffinity(0, {core})
    controller.write_plan(Path(folder), Plan(layout, 10**9, 0, 0, Policy(save=False)))
    measured = Measured(Path(folder), load_secret(Path(secret)), printer=controller.Printer(os.open(os.devnull, 1)))
    controller.tidy(measured)
    print(json.dumps(measured.server.address), flush=True)

    def answer(mask):
        """Answer a request with the counts since the last one."""
        word = os.read(0, 4096).decode().strip()
        if not word:
            os._exit(0)
        gang, began = measured.gang, time.perf_counter()
        state = len(measured.state.to_bytes()) if word == "snapshot" else 0
        latencies, measured.latencies = measured.latencies, []
        counted = {
            "snapshot_mb": state / 1e6,
            "snapshot_s": time.perf_counter() - began,
            "cpu_s": time.process_time(),
            "now_s": time.monotonic(),
            "entries": measured.journal.number,
            "reports": measured.reports,
            "commands": measured.commands,
            "phase": gang.phase,
            "nodes": len(gang.members.nodes),
            "stepped": gang.gen.stepped,
            "generation": gang.generation,
            "latencies": latencies,
        }
        print(json.dumps(counted), flush=True)

    measured.loop.watch(0, READ, answer)
    while True:
        measured.loop.turn()
        measured.begin_step(folder)


def main():
    what, *args = sys.argv[1:]
    if what == "aggregate":
        secret, name, host, port = args
        aggregate(secret, name, (host, int(port)))
    elif what == "generate":
        folder, index, count, secret = args
        fleet = Fleet(folder, int(index), int(count), secret, json.loads(sys.stdin.readline()))
        print("ready", flush=True)
        fleet.run()
    else:
        folder, secret, core, layout = args
        control(folder, secret, int(core), Layout(**json.loads(layout)))


if __name__ == "__main__":
    main()
