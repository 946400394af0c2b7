"""The processes of control_load.py: the controller, aggregators, and generators that each are some thousand nodes.

Nodes obey the protocol of control.messages without doing any work: workers are numbers, states a step. When a member
of the gang breaks, its generator tells the others, and all members park, as they would when their groups break."""

import gc
import heapq
import json
import os
import random
import socket
import sys
import time
from pathlib import Path

from phalanx.runtime.aggregator import COMMANDS, DEAD, ITEMS, PASSED, SEEN, SUSPECT, Aggregator, Roster
from phalanx.runtime.journal import Journal
from phalanx.runtime.secret import READ, Identity, load_secret
from phalanx.runtime.transport import Link, Loop, Server
from phalanx.runtime.wire import check

BEAT_S = 5.0
DIGEST = "0123456789abcdef" * 2


def node_name(number: int) -> str:
    return f"node-{number:05d}"


# -- aggregators


class Stamping(Aggregator):
    """Each report says when it came, so that waiting anywhere after that counts."""

    def _gather(self, item, agent=None):
        super()._gather({**item, "at_ns": time.monotonic_ns()}, agent)


def aggregate(secret, name, controller):
    loop = Loop()
    served = Stamping(loop, load_secret(Path(secret), create=False), Identity("aggregator", name, 1), [controller])
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
        self.workers, self.generation, self.step, self.running, self.welcome = {}, 0, 0, False, False
        me = Identity("agent", self.name, self.incarnation)
        how = {"on_open": self.opened, "seed": self.number}
        self.link = Link(self.fleet.loop, self.fleet.secret, me, [self.address], COMMANDS, self.commanded, **how)

    def die(self):
        self.link.close()
        self.link = None

    def opened(self, session):
        self.beat()
        if not self.welcome:
            self.post("NodeJoined", domain=f"rack-{self.number // 16}")

    def beat(self):
        if self.link:
            at = {"generation": self.generation, "step": self.step, "counter": self.step, "step_ns": 5 * 10**9}
            self.link.tell({"type": "beat", "visit": self.link.visits, **at})
            self.fleet.beats += 1

    def post(self, kind, **fields):
        event = {"kind": kind, "node": self.name, "incarnation": self.incarnation, **fields}
        self.link.post({"type": "event", "event": event})
        self.fleet.events += 1

    def park(self):
        if self.link and self.running:
            self.running = False
            self.post("Parked", generation=self.generation, workers=self.alive(), **self.held())

    def held(self):
        return {"step": self.step, "prepared": self.step, "made": self.generation}

    def alive(self):
        return sorted(self.workers.values())

    def break_worker(self):
        if self.link and self.running:
            rank = min(self.workers)
            worker = self.workers.pop(rank)
            self.post("WorkerDied", worker=worker, reason="signal 9")
            return True
        return False

    def commanded(self, session, number, body):
        command = body["command"]
        getattr(self, "do_" + command["kind"], lambda command: None)(command)

    def do_Welcome(self, command):
        self.welcome = True

    def do_Launch(self, command):
        new = {int(rank): worker for rank, worker in command["workers"].items()}
        self.workers.update(new)
        self.post("WorkersUp", workers=sorted(new.values()))

    def do_Kill(self, command):
        for worker in command["workers"]:
            self.workers = {r: w for r, w in self.workers.items() if w != worker}
            self.post("WorkerDied", worker=worker, reason="killed")

    def do_Form(self, command):
        crew = command["crew"]
        if command["generation"] <= self.generation or not crew:
            return
        self.generation, self.step, self.running = command["generation"], command["step"], True
        digests = {str(worker): DIGEST for worker in crew.values()}
        self.post("Ready", generation=self.generation, step=self.step, digests=digests)

    def do_Start(self, command):
        self.step += 1

    def do_Halt(self, command):
        self.generation = max(self.generation, command["generation"])
        self.running = False
        if self.workers:
            self.post("Parked", generation=self.generation, workers=self.alive(), **self.held())

    do_Pause = do_Halt

    def do_Ask(self, command):
        self.post("Held", generation=command["generation"], copies=[])

    def do_Fence(self, command):
        if command["incarnation"] == self.incarnation:
            self.die()
            self.start()


class Fleet:
    """Some thousand nodes in one process. `plan`: [seconds, kind, node], of all generators; kinds are worker, node,
    back and end."""

    def __init__(self, folder, index, count, secret, mine, addresses):
        self.loop, self.secret = Loop(), load_secret(Path(secret), create=False)
        self.beats = self.events = 0
        self.others = [f"{folder}/generator-{i}" for i in range(count)]
        self.bus = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.bus.bind(self.others[index])
        self.bus.setblocking(False)
        self.loop.watch(self.bus, READ, self.heard)
        self.nodes: dict[int, Node] = {}
        self.queue: list = []  # (when, what, number): beats and the plan
        for i, (number, address) in enumerate(zip(mine, addresses, strict=True)):
            # Spread over some seconds, or thousands of handshakes are all that happens.
            heapq.heappush(self.queue, (time.monotonic() + 8 * i / len(mine), "begin", number, tuple(address)))

    def run(self):
        while True:
            now = time.monotonic()
            while self.queue and self.queue[0][0] <= now:
                when, what, number, more = heapq.heappop(self.queue)
                if what == "begin":
                    self.nodes[number] = Node(self, number, more)
                    heapq.heappush(self.queue, (when + BEAT_S, "beat", number, None))
                elif what == "beat":
                    self.nodes[number].beat()
                    heapq.heappush(self.queue, (when + BEAT_S, "beat", number, None))
                else:
                    self.act(what, number)
            self.loop.turn(min(0.5, max(0.0, self.queue[0][0] - time.monotonic())) if self.queue else 0.5)

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
        elif "count" in message:
            answer = {
                "beats": self.beats,
                "events": self.events,
                "alive": sum(n.link is not None for n in self.nodes.values()),
            }
            self.bus.sendto(json.dumps(answer).encode(), message["count"])
        else:
            for node in self.nodes.values():
                node.park()


# -- the controller


class Controller:
    """Journals what aggregators report, lets the machine decide, and sends commands when they are durable."""

    def __init__(self, folder, secret, machine):
        self.loop, self.roster, self.machine = Loop(), Roster(), machine
        self.journal = Journal(Path(folder) / "journal.db", snapshot_every=1 << 60)
        self.loop.watch(self.journal, READ, lambda mask: self.settle())
        self.waiting: list = []  # (entry, commands, when the reports came, who is told that they were heard)
        self.latencies: list[tuple[int, int]] = []  # when a decision was out, and how long that took
        self.reports = self.commands = 0
        self.timers: dict[str, int] = {}
        me = Identity("controller", "controller", self.journal.term)
        self.server = Server(self.loop, load_secret(Path(secret)), me, PASSED, self.heard, on_open=self.opened)

    def opened(self, session):
        session.post({"type": "expect", "nodes": self.roster.expected(session.peer.name)})

    def heard(self, session, number, body):
        if body["type"] == "summary":
            step = body["steps"][1]
            if step > self.machine.done:
                self.machine.done = step
                self.decide([{"kind": "StepsDone", "generation": step[0], "step": step[1]}], [0])
            return
        events, times = [], []
        for item in body["items"]:
            if self.roster.take(session.peer.name, check(item, ITEMS)):
                self.reports += 1
                event = item["event"] if item["type"] == "event" else self.event_of(item)
                if event:
                    events.append(event)
                    times.append(item["at_ns"])
        self.decide(events, times, (session, number))

    def event_of(self, edge):
        kind = {SEEN: "", SUSPECT: "NodeSuspect", DEAD: "NodeDead"}.get(edge["edge"], "NodeClear")
        about = {"kind": kind, "node": edge["node"], "incarnation": edge["incarnation"]}
        return kind and {**about, **({"proof": ""} if edge["edge"] == DEAD else {})}

    def decide(self, events, times, heard=None):
        now = time.monotonic_ns()
        if events:
            self.journal.append("events", {"events": events}, now)
        out, came = [], []
        for event, at in zip(events, times, strict=True):
            commands = self.machine.apply(event, now)
            self.reports += 1
            for command in commands:
                self.journal.append("decision", self.machine.brief(command), now)
            if commands:
                out += commands
                came.append(at)
        self.waiting.append((self.journal.number, out, came, heard))

    def settle(self):
        durable = self.journal.settled()
        while self.waiting and self.waiting[0][0] <= durable:
            _, commands, came, heard = self.waiting.pop(0)
            if commands:
                self.send(commands)
                now = time.monotonic_ns()
                self.latencies += [(now, now - at) for at in came if at]
            if heard:
                heard[0].ack(heard[1])

    def send(self, commands):
        """One message to each aggregator."""
        orders: dict[str, list] = {}
        for command in commands:
            for home, order in self.machine.orders(command, self.roster):
                orders.setdefault(home, []).append(order)
                self.commands += len(order["nodes"])
        for home, items in orders.items():
            session = self.server.sessions.get(home)
            if session:
                session.post({"type": "commands", "items": items})


def control(folder, secret, core, machine):
    os.sched_setaffinity(0, {core})
    gc.disable()
    controller = Controller(folder, secret, machine)
    print(json.dumps(controller.server.address), flush=True)
    asked = os.dup(0)
    os.set_blocking(asked, False)

    def answer(mask):
        """A line is a question, and its answer what was counted until now."""
        data = os.read(asked, 4096)
        if not data:
            os._exit(0)
        for _ in range(data.count(b"\n")):
            latencies, controller.latencies = controller.latencies, []
            print(
                json.dumps(
                    {
                        "cpu_s": time.process_time(),
                        "now_s": time.monotonic(),
                        "entries": controller.journal.number,
                        "reports": controller.reports,
                        "commands": controller.commands,
                        "phase": machine.phase,
                        "generation": machine.generation,
                        "latencies": latencies,
                    }
                ),
                flush=True,
            )

    controller.loop.watch(asked, READ, answer)
    while True:
        controller.loop.turn()


def main():
    what, *args = sys.argv[1:]
    if what == "aggregate":
        secret, name, host, port = args
        aggregate(secret, name, (host, int(port)))
    elif what == "generate":
        folder, index, count, secret = args
        said = json.loads(sys.stdin.readline())
        Fleet(folder, int(index), int(count), secret, said["nodes"], said["addresses"]).run()
    else:
        folder, secret, core = args
        sys.path.insert(0, "/tmp/p2")
        from standin import Machine

        control(folder, secret, int(core), Machine(12500, 8))


if __name__ == "__main__":
    main()
