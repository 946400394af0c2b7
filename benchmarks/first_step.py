"""From `phalanx train` to the first step, by phase: on this machine, and on four hosts made of namespaces that are
entered by ssh (root, iproute2, util-linux, openssh-server; data on S3). It also counts the messages and bytes that 100
and 1,000 agents cost the controller in each phase, through a real aggregator. The phases: agents join; their services
are up, and they are welcome; their ranks are up and built, once the ten of a replica have met; and a generation is
formed, once the ranks of a place in all replicas have met. Agents and members are the real machines, and meet through
real hubs; no process is started, and nothing is computed.

Bar: every phase is reported; in each the controller receives at most 3x the messages with 1,000 agents that it receives
with 100, and an agent sends at most 1.5x (one that waits for an answer asks again). The aggregator's ping, one a second
whatever the number of agents, is not a message of a phase: fanin.py counts it. Bytes are printed and not judged: every
node has something of its own to report.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import control_load_cases as cases
from common import SMOKE, finish, machine, options
from fanin import LOOPBACK, Child, count, serve

from phalanx.chaos.hosts import why_not
from phalanx.control.journaled import Plan
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from phalanx.gate.hub import Hub
from phalanx.runtime import controller as control
from phalanx.runtime import inventory
from phalanx.runtime.joining import Joiner
from phalanx.runtime.secret import load_secret
from phalanx.runtime.transport import Loop
from tests.hosts.fleet import JOB, NETWORKS, SSHD, TRAINERS, Fleet, Training

COUNTS = (20, 40) if SMOKE else (100, 1_000)
MOST_TIMES = 3  # limit on the ratio of messages with ten times the agents
MOST_SAID = 1.5  # limit on the ratio of an agent's messages: one that waits for an answer asks again after a second
REPLICA_SIZE = 10
ADDRESS = "x" * 200  # as long as the value that Gloo sets for a rank
BEAT_S = 2.0
LIMIT_S = 300.0
HEADS = ("agents", "messages", "seconds", "kB in", "kB out", "CPU s", "each says")
PHASES = ("data", "controller", "agents join", "services", "ranks up and built", "groups", "first step")


def phases_of(events: list[dict], began: float) -> dict[str, float]:
    """Return the seconds of each phase, from the start of the command. Only as many nodes count as the layout needs."""
    nodes = next(e for e in events if e["type"] == "listening")["nodes"]
    times = {
        "data": next(e["time"] for e in events if e["type"] == "node" and e["node"] == "controller"),
        "controller": next(e["time"] for e in events if e["type"] == "listening"),
        "agents join": sorted(e["time"] for e in events if e["type"] == "node" and e["what"] == "joined")[nodes - 1],
        "services": [e["time"] for e in events if e["type"] == "control note" and "takes place" in e["text"]][
            nodes - 1
        ],
        "ranks up and built": next(e["time"] for e in events if e["type"] == "control form"),
        "groups": next(e["time"] for e in events if e["type"] == "control started"),
        "first step": next(e["time"] for e in events if e["type"] == "first commit"),
    }
    marks = [began, *(times[name] for name in PHASES)]
    return {name: max(0.0, b - a) for name, a, b in zip(PHASES, marks, marks[1:], strict=False)}


def on_this_machine(folder: str) -> dict[str, float]:
    values = JOB | {"data.source": "python-stdlib", "data.max_mb": 0.1, "train.steps": 3, "checkpoint.every_steps": -1}
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    began = time.time()
    command = [sys.executable, "-P", "-m", "phalanx.cli.main", "train", *sets, "--set", "recovery.spares=1"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (events,) = Path(folder).glob("runs/quickstart-2*/events.jsonl")
    return phases_of([json.loads(line) for line in events.read_text().splitlines()], began)


def on_four_hosts(folder: str) -> dict[str, float]:
    with Fleet() as fleet:
        values = {"train.steps": 3, "run.networks": json.dumps(NETWORKS)}
        began = time.time()
        run = Training(fleet, Path(folder), "timed", "--on", "ssh", "--hosts", ",".join(TRAINERS), **values)
        run.end()
        return phases_of(run.read("events.jsonl"), began)


def lead(pipe, folder: str, nodes: int) -> None:
    place, secret = Path(folder) / f"control-{nodes}", load_secret(Path(folder) / "secret")
    layout = Layout(replica=nodes // REPLICA_SIZE, shard=REPLICA_SIZE, ranks_per_node=1)
    late = dict.fromkeys(
        ("gather_ns", "launch_ns", "form_ns", "resend_ns"), int(LIMIT_S * 1e9)
    )  # one machine simulates all hosts
    control.write_plan(place, Plan(layout, 10, 0, 0, Policy(save=False, **late)))
    control.write_spec(place, {"version": "x", "filler": "y" * 20_000})
    quiet = control.Printer((Path(folder) / "lines").open("w").fileno())
    made = control.Controller(place, secret, LOOPBACK, aggregate=True, printer=quiet)
    counted = count(made.server)
    figures = lambda: {**counted, "running": made.gang.phase == "running"}  # noqa: E731
    serve(pipe, made.loop, made.aggregator.server.address, figures)


class Asking(Joiner):
    def __init__(self, fleet, name: str, address, about: dict, on_served):
        self.fleet = fleet
        super().__init__(fleet.loop, fleet.secret, name, [address], about, on_served, give_up_s=LIMIT_S)

    def _ask(self) -> None:
        self.fleet.joins += self._link.session is not None  # nothing is sent before
        super()._ask()


class Node(cases.Node):
    """Meets its peers before it reports that it is built or has formed, as ranks do. Each rank is on its own node."""

    def __init__(self, fleet, number: int, address):
        self.hub, self.meetings = Hub(self.told, self.meet), {}
        super().__init__(fleet, number, address)

    @property
    def is_built(self) -> bool:
        return bool(self.members) and all(m.phase not in ("new", "building") for m in self.members.values())

    def meet(self, item: list) -> None:
        self.fleet.met += 1
        self.link.tell({"type": "store", "items": [item]}, must=True)

    def commanded(self, session, number: int, body: dict) -> None:
        if body["type"] == "store":
            for item in body["items"]:
                self.hub.hear(item)
        command = partial(super().commanded, session, number, body)
        if body.get("command", {}).get("kind") == "Launch" and not self.fleet.launches:
            self.fleet.held.append(command)
        else:
            command()

    def tell(self, worker: int, body: dict) -> None:
        """Let a worker set its own key, and continue when it has those of the others."""
        if body["type"] == "build":
            self.rank = body["rank"]
            room, me, size = "ranks", self.rank % REPLICA_SIZE, REPLICA_SIZE
            scope = (f"replica {body['replica']}", body["world"])
        elif body["type"] == "form":
            room, me, size = f"rails{self.rank % REPLICA_SIZE}", self.rank // REPLICA_SIZE, self.fleet.replicas
            scope = ("gang", body["generation"])
        else:
            super().tell(worker, body)
            return
        self.meetings[scope] = (set(range(size)), worker, body)
        self.hub.take(worker, ["set", *scope, f"{room}/{me}", ADDRESS])
        for other in range(size):
            self.hub.take(worker, ["want", *scope, f"{room}/{other}"])

    def told(self, who, item: list) -> None:
        kind, what, number, *fields = item
        if kind == "over":
            return
        missing, worker, body = self.meetings[what, number]
        missing.discard(int(fields[0].rpartition("/")[2]))
        if not missing and not body.get("met"):
            body["met"] = True
            super().tell(worker, body)
            self.act()


class Crowd:
    """State that the nodes share."""

    def __init__(self, secret, nodes: int):
        self.loop, self.secret, self.replica_size, self.replicas = Loop(), secret, REPLICA_SIZE, nodes // REPLICA_SIZE
        self.beats = self.events = self.met = self.joins = 0
        self.nodes: dict[int, Node] = {}
        self.launches, self.held = False, []  # ranks start once all nodes are welcome: phases are counted separately

    def launch(self) -> None:
        self.launches = True
        for command in self.held:
            command()

    def later(self, at_ns: int, number: int, incarnation: int) -> None:
        after_s = max(0, at_ns - time.monotonic_ns()) / 1e9
        self.loop.after(after_s, lambda: self.nodes[number].flush(incarnation))

    def beat(self) -> None:
        self.loop.after(BEAT_S, self.beat)
        for node in self.nodes.values():
            node.beat()

    def until(self, what) -> None:
        limit = time.monotonic() + LIMIT_S
        while not what():
            if time.monotonic() > limit:
                raise TimeoutError(f"{len(self.nodes)} agents have not come so far in {LIMIT_S} s")
            self.loop.turn(0.1)


def count_phases(folder: str, nodes: int) -> dict[str, dict[str, float]]:
    """Count by phase, for `nodes` agents that come at once: messages to the controller, and messages from each
    agent."""
    secret, here = load_secret(Path(folder) / "secret"), inventory.about(LOOPBACK)
    child, fleet, served, found = Child(lead, folder, nodes), Crowd(secret, nodes), set[int](), {}
    at = tuple(child.address)
    before, since = {**child.figures(), "said": 0}, time.monotonic()

    def end(phase: str) -> None:
        nonlocal before, since
        after, now = {**child.figures(), "said": fleet.joins + fleet.events + fleet.met}, time.monotonic()
        keys = ("heard", "pings", "bytes", "sent_bytes", "cpu_s", "said")
        found[phase] = {key: after[key] - before[key] for key in keys}
        found[phase]["heard"] -= found[phase]["pings"]
        found[phase]["seconds"] = now - since
        before, since = after, now

    for i in range(nodes):
        about = {"life": str(i), "version": "x", "about": here | {"address": f"h{i}"}}
        Asking(fleet, cases.node_name(i), at, about, partial(lambda i, incarnation, spec: served.add(i), i))
        fleet.loop.turn(0.0)
    fleet.until(lambda: len(served) == nodes)
    end("agents join")
    for i in range(nodes):
        fleet.nodes[i] = Node(fleet, i, at)
        fleet.loop.turn(0.0)
    fleet.loop.after(BEAT_S, fleet.beat)
    fleet.until(lambda: all(node.agent.welcome for node in fleet.nodes.values()))
    end("services")
    fleet.launch()
    fleet.until(lambda: all(node.is_built for node in fleet.nodes.values()))
    end("ranks up and built")
    fleet.until(lambda: child.figures()["running"])
    end("groups")
    child.close()
    return found


def main() -> None:
    options(__doc__).parse_args()
    print(machine())
    tables: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        load_secret(Path(folder) / "secret")
        if not SMOKE:
            tables["this machine"] = on_this_machine(folder)
            missing = why_not() or ("" if SSHD else "sshd is not installed")
            if missing:
                print(f"no hosts: {missing}")
            else:
                tables["four hosts"] = on_four_hosts(folder)
        counted = {nodes: count_phases(folder, nodes) for nodes in COUNTS}
    if tables:
        print(f"{'seconds':20}" + "".join(f"{place:>14}" for place in tables))
        for name in PHASES:
            print(f"{name:20}" + "".join(f"{table[name]:14.2f}" for table in tables.values()))
        print(f"{'all':20}" + "".join(f"{sum(table.values()):14.2f}" for table in tables.values()))
    print(f"{'at the controller':20}" + "".join(f"{head:>10}" for head in HEADS))
    ok = len(tables) == 2
    for phase in counted[COUNTS[0]]:
        few, many = (counted[nodes][phase] for nodes in COUNTS)
        for nodes, found in zip(COUNTS, (few, many), strict=True):
            print(
                f"{phase:20}{nodes:10}{found['heard']:10}{found['seconds']:10.1f}{found['bytes'] / 1e3:10.0f}"
                f"{found['sent_bytes'] / 1e3:10.0f}{found['cpu_s']:10.2f}{found['said'] / nodes:10.1f}"
            )
        grows = many["heard"] > MOST_TIMES * few["heard"]
        says_more = many["said"] / COUNTS[1] > MOST_SAID * few["said"] / COUNTS[0]
        if grows:
            print(f"{phase}: messages grow with the agents")
        if says_more:
            print(f"{phase}: an agent says more in a larger fleet")
        ok = ok and not grows and not says_more
    finish(
        "first_step", ok, phases={p: {k: round(v, 2) for k, v in t.items()} for p, t in tables.items()}, counted=counted
    )


if __name__ == "__main__":
    main()
