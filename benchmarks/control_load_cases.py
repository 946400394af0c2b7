"""The processes of control_load.py: the controller, aggregators, and generators that each are some thousand nodes.

Nodes obey the protocol of control.messages without doing any work: workers are numbers, states a step. When a member
of the gang breaks, its generator tells the others, and all members park, as they would when their groups break."""

import hashlib
import heapq
import json
import os
import socket
import sys
import time
from pathlib import Path

from phalanx.control import messages
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from phalanx.runtime import controller
from phalanx.runtime.aggregator import COMMANDS, Aggregator, event_of
from phalanx.runtime.secret import READ, Identity, load_secret
from phalanx.runtime.transport import Link, Loop

LAYOUT = Layout(replica=50, pp=10, shard=25, tp=8, ranks_per_node=8)  # 100,000 ranks on 12,500 nodes
BEAT_S = 5.0
DIGESTS = [hashlib.blake2b(b"%d" % i, digest_size=16).hexdigest() for i in range(LAYOUT.replica_size)]


def node_name(number: int) -> str:
    return f"node-{number:05d}"


def rack(number: int) -> str:
    return f"rack-{number // 16}"


def step_aside():
    """In a fleet the controller has a machine of its own: who shares its core here runs when it does not."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


# -- aggregators


class Stamping(Aggregator):
    """Each report says when it came, so that waiting anywhere after that counts; of many, the first."""

    def _gather(self, item, agent=None):
        super()._gather({**item, "at_ns": time.monotonic_ns()}, agent)

    def _many(self, group):
        return super()._many(group) | {"at_ns": min(item["at_ns"] for item, _ in group)}


def aggregate(secret, name, address):
    step_aside()
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
            self.post("NodeJoined", domain=rack(self.number))

    def beat(self):
        if self.link:
            at = {"generation": self.generation, "step": self.step, "counter": self.step, "step_ns": 5 * 10**9}
            self.link.tell({"type": "beat", "visit": self.link.visits, **at})
            self.fleet.beats += 1

    def post(self, kind, **fields):
        who = {} if kind == "StepsDone" else {"node": self.name, "incarnation": self.incarnation}
        self.link.post({"type": "event", "event": getattr(messages, kind)(**who, **fields).to_dict()})
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
        # No step is ever done, so replicas have the same states.
        digests = {str(worker): DIGESTS[int(rank) % len(DIGESTS)] for rank, worker in crew.items()}
        self.post("Ready", generation=self.generation, step=self.step, digests=digests)

    def do_Start(self, command):
        if command["generation"] == self.generation and self.running:
            self.post("StepsDone", generation=self.generation, step=self.step)

    def do_Halt(self, command):
        if command["generation"] == self.generation and self.workers:
            self.running = False
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
        self.beat_s = BEAT_S
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
                    heapq.heappush(self.queue, (when + self.beat_s, "beat", number, None))
                elif what == "beat":
                    self.nodes[number].beat()
                    heapq.heappush(self.queue, (when + self.beat_s, "beat", number, None))
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


def control(folder, secret, core):
    os.sched_setaffinity(0, {core})
    controller.write_plan(Path(folder), LAYOUT, 10**9, policy=Policy(save=False))
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
            "stepped": gang.stepped,
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
        step_aside()
        folder, index, count, secret = args
        said = json.loads(sys.stdin.readline())
        fleet = Fleet(folder, int(index), int(count), secret, said["nodes"], said["addresses"])
        print("ready", flush=True)
        fleet.run()
    else:
        folder, secret, core = args
        control(folder, secret, int(core))


if __name__ == "__main__":
    main()
