"""The processes of control_load.py: the controller, aggregators, and generators that each are some thousand nodes.

A node is the real agent; its workers do no work: they are numbers, and say at once what workers say. A generation does
one step. When a member of the gang breaks, its generator tells the others, and all members park, as they would when
their groups break."""

import hashlib
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
from phalanx.control.fold import Plan
from phalanx.control.liveness import event_of
from phalanx.control.messages import Command, Failure
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
    """Each report says when it came, so that waiting anywhere after that counts; of many, the first."""

    def _gather(self, item, agent=None):
        super()._gather({**item, "at_ns": time.monotonic_ns()}, agent)

    def _many(self, group):
        return super()._many(group) | {"at_ns": min(item["at_ns"] for item, _ in group)}


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
        store = Service({"host": self.name, "port": 1})
        self.agent = Agent(self.name, rack(self.number), {"store": store}, incarnation=self.incarnation)
        self.generation, self.step, self.running = 0, 0, False
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
            said = self.agent.beat(time.monotonic_ns())
            self.link.tell({"type": "beat", "visit": self.link.visits, "counter": self.step, **said})
            self.fleet.beats += 1
            self.act()

    def act(self):
        """What the agent wants, at once."""
        while self.link and (actions := self.agent.take()):
            for action in actions:
                if isinstance(action, machine.Post):
                    self.link.post({"type": "event", "event": action.event.to_dict()})
                    self.fleet.events += 1
                elif isinstance(action, machine.Spawn):
                    self.agent.worker_said(time.monotonic_ns(), action.number, {"type": "up"})
                elif isinstance(action, machine.End):
                    self.agent.ended(time.monotonic_ns(), action.number, Failure(signal="SIGKILL"))
                elif isinstance(action, machine.Send):
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
        """A worker hears its agent."""
        kind = body["type"]
        if kind == "form" and body["generation"] >= self.generation:
            self.generation, self.step, self.running = body["generation"], body["step"], True
            # No work is done, so replicas have the same states.
            digest = self.fleet.digests[body["rank"] % len(self.fleet.digests)]
            about = {"generation": self.generation, "step": self.step, "digest": digest}
            self.say(worker, {"type": "ready", **about})
        elif kind == "start" and body["generation"] == self.generation and self.running:
            if self.agent.done < (self.generation, self.step + 1):
                self.say(worker, {"type": "step", "generation": self.generation, "step": self.step, "time_s": 5.0})
        elif kind in ("halt", "pause") and body["generation"] == self.generation:
            self.running = False
            self.say(worker, self.parked())

    def say(self, worker, body):
        self.agent.worker_said(time.monotonic_ns(), worker, body)

    def parked(self):
        step = max(self.step, self.agent.done[1]) if self.agent.done[0] == self.generation else self.step
        held = {"step": step, "prepared": step, "made": self.generation, "why": None}
        return {"type": "parked", "generation": self.generation, **held}

    def park(self):
        """Its groups are broken."""
        if self.link and self.running:
            self.running = False
            for worker in list(self.agent.mates):
                self.say(worker, self.parked())
            self.act()

    def break_worker(self):
        if self.link and self.running and self.agent.mates:
            self.agent.ended(time.monotonic_ns(), min(self.agent.mates), Failure(signal="SIGKILL"))
            self.act()
            return True
        return False

    def commanded(self, session, number, body):
        if body["type"] == "command":
            known = messages.KINDS[body["command"]["kind"]]
            absent = {"nodes": [self.name], "crew": {}, "places": {}, "sources": {}, "buddies": {}}
            filled = {k: v for k, v in absent.items() if k in codec.hints(known)}
            self.agent.obey(time.monotonic_ns(), Command.from_dict({**filled, **body["command"]}))
            self.act()


class Fleet:
    """Some thousand nodes in one process. `plan`: [seconds, kind, node], of all generators; kinds are worker, node,
    back and end."""

    def __init__(self, folder, index, count, secret, given):
        self.loop, self.secret = Loop(), load_secret(Path(secret), create=False)
        self.beats = self.events = 0
        self.beat_s, places = given["beat_s"], range(given["replica_size"])
        self.digests = [hashlib.blake2b(b"%d" % i, digest_size=16).hexdigest() for i in places]
        self.others = [f"{folder}/generator-{i}" for i in range(count)]
        self.bus = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.bus.bind(self.others[index])
        self.bus.setblocking(False)
        self.loop.watch(self.bus, READ, self.heard)
        self.nodes: dict[int, Node] = {}
        self.queue: list = []  # (when, what, number): beats and the plan
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
        if what == "worker":
            if node.break_worker():
                self.tell({"break": number})
        elif what == "node" and node.link:
            was_member = node.running
            node.die()
            if was_member:
                self.tell({"break": number})
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
        else:
            for node in self.nodes.values():
                node.park()


# -- the controller


class Measured(controller.Controller):
    """The real one, with a clock: from the moment at which it has read a report to that at which the commands that
    follow from it are durable, and handed to the sockets."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        # (what was heard, ms since it came to the aggregator, ms since it came here, ms of CPU since then)
        self.latencies: list = []
        self.reports = self.commands = 0

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
            self.reports += sum(len(item.get("numbers", "1")) for item in items)
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
        """To a word: what was counted since the last, after what it asks for."""
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
