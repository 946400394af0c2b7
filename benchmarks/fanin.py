"""The cost of a step to the processes at the top of a fleet of 1,000, 12,500 and 125,000 nodes of 8 ranks: messages,
bytes and CPU. Nodes are links of this process; aggregators, relays, the keeper of the record and the controller are
real processes of this machine.

An aggregator serves 500 nodes, and is measured with as many real connections: each node sends one message a step. The
reports of 250 aggregators go through real relays of 16 each to the real keeper of the record (the process that the user
started). The controller has as many real aggregators, in processes of their own, each with one node, whose agent
reports once per heartbeat which step is done. A step takes one second. So the controller's plan has one node per
aggregator, 250 at "125,000": any other messages of a node end at its aggregator, and a plan of 125,000 nodes would need
as many real connections on this machine. control_load.py measures the cost of a large plan to the controller when nodes
fail.

Bytes are counted at the sockets, incoming, with frames and tags; over loopback there is no TLS. CPU is that of the
whole process.

Bar: at an aggregator one message per node and step, whatever the fleet; at the top, which is the record's keeper and
the controller, no more than 20 messages, 32 KiB and 50 ms of CPU (5% of a core) a step at any size.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from pathlib import Path

from common import SMOKE, finish, machine, options

from phalanx.control.journaled import Plan
from phalanx.control.messages import NodeJoined, StepsDone
from phalanx.control.policy import Policy, beat_ns
from phalanx.core.layout import Layout
from phalanx.observe.fold import block_of, fold_of, folded, in_blocks
from phalanx.observe.record import RunRecord
from phalanx.observe.steps import StepTable
from phalanx.runtime import controller as control
from phalanx.runtime.aggregator import COMMANDS, Aggregator
from phalanx.runtime.reports import Recorder, Relay
from phalanx.runtime.secret import Identity, load_secret
from phalanx.runtime.transport import Link, Loop, Server

RANKS, PER_AGGREGATOR, FAN_IN = 8, 20 if SMOKE else 500, 16
SIZES = (40, 100) if SMOKE else (1_000, 12_500, 125_000)
MOST = {"heard": 20, "bytes": 32 << 10, "cpu_s": 0.05}  # per step, at the top
STEPS = 3 if SMOKE else 30
STEP_S = 1.0 if not SMOKE else 0.2
LOOPBACK = "127.0.0.1"
FORK = multiprocessing.get_context("spawn")


def step_of(step: int, rank: int) -> dict:
    """Return a rank's report, as `train.worker` sends it."""
    phases = {"passes": 0.5, "reduce": 0.1, "optimizer": 0.1}
    whole = {"loss_sums": [3.0] * 16, "tokens": 4096, "data_digest": "0" * 16, "record": "x" * 300}
    return {
        "type": "step", "step": step, "generation": 1, "time_s": 0.9 + rank % 7 / 100, "grad_norm": 1.5, "lr": 1e-3,
        "data_wait_s": 0.01, "data_ready": 4, "served": {"text": 8}, "phases": phases,
        "whole": whole if rank % 64 == 0 else None,
    }  # fmt: skip


def node_fold(step: int, node: int) -> list[dict]:
    return folded(fold_of(rank, step_of(step, rank)) for rank in range(node * RANKS, (node + 1) * RANKS))


def aggregate_fold(step: int, aggregator: int, nodes: int) -> list[dict]:
    first = aggregator * PER_AGGREGATOR
    folds = (fold for node in range(first, min(first + PER_AGGREGATOR, nodes)) for fold in node_fold(step, node))
    return [in_blocks(fold, block_of(nodes * RANKS)) for fold in folded(folds)]


# -- real processes, which say where they listen and, when asked, what they have spent


def serve(pipe, loop, address, figures) -> None:
    pipe.send(address)
    loop.watch(pipe, 1, lambda mask: pipe.send({"cpu_s": time.process_time(), **figures()}) if pipe.recv() else 0)
    while True:
        loop.turn()


def keep_record(pipe, folder: str, world: int) -> None:
    loop, table = Loop(), StepTable(world, 1, 1, 1)
    record, rows = RunRecord.create(Path(folder), f"run-{world}", {}), [0]
    table.settle(1, 0, world)

    def take(item: dict) -> None:
        for row in table.add(item):
            record.ledger(row.pop("record"))
            record.metric(row)
            rows[0] += 1

    recorder = Recorder(loop, load_secret(Path(folder) / "secret"), LOOPBACK, 0, take)
    counted = count(recorder.server)
    serve(pipe, loop, recorder.server.address, lambda: {"messages": recorder.messages, "rows": rows[0], **counted})


class Counting:
    """A socket wrapper that counts the bytes passing through."""

    def __init__(self, sock, counted: dict) -> None:
        self._sock, self._counted = sock, counted

    def recv(self, size: int) -> bytes:
        data = self._sock.recv(size)
        self._counted["bytes"] += len(data)
        return data

    def send(self, data) -> int:
        size = self._sock.send(data)
        self._counted["sent_bytes"] += size
        return size

    def __getattr__(self, name: str):
        return getattr(self._sock, name)


def count(server: Server) -> dict:
    """Count the messages to a server, and the bytes at its sockets. Over loopback there is no TLS."""
    counted = {"heard": 0, "pings": 0, "bytes": 0, "sent_bytes": 0}
    hear, greet = server._on_message, server._porch._greet

    def heard(session, number, body) -> None:
        counted["heard"] += 1
        counted["pings"] += body["type"] == "ping"
        hear(session, number, body)

    server._on_message = heard
    server._porch._greet = lambda channel: greet(Counting(channel, counted))
    return counted


def relay(pipe, folder: str, upstream, number: int) -> None:
    loop, me = Loop(), Identity("aggregator", f"relay-{number}", 1)
    made = Relay(loop, load_secret(Path(folder) / "secret"), me, tuple(upstream), LOOPBACK)
    serve(pipe, loop, made.server.address, dict)


def aggregate(pipe, folder: str, controller, recorder) -> None:
    loop, me = Loop(), Identity("aggregator", "measured", 1)
    secret = load_secret(Path(folder) / "secret")
    made = Aggregator(loop, secret, me, [tuple(controller)], LOOPBACK, recorder=tuple(recorder), beat_s=5.0)
    made._learn({"version": "x"}, [], PER_AGGREGATOR * RANKS)
    counted = count(made.server)
    serve(pipe, loop, made.server.address, lambda: dict(counted))


def lead(pipe, folder: str, nodes: int) -> None:
    secret, place = load_secret(Path(folder) / "secret"), Path(folder) / f"control-{nodes}"
    control.write_plan(place, Plan(Layout(replica=nodes, ranks_per_node=1), 10**9, 0, 0, Policy(save=False)))
    made = control.Controller(place, secret, LOOPBACK, printer=control.Printer(os.open("/dev/null", os.O_WRONLY)))
    control.tidy(made)
    counted = count(made.server)
    serve(pipe, made.loop, made.server.address, lambda: dict(counted))


class Child:
    def __init__(self, target, *args) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        self.address = self.pipe.recv()

    def figures(self) -> dict:
        self.pipe.send(True)
        return self.pipe.recv()

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def spent(child: Child, do, steps: int) -> dict:
    """Return the cost of `do` to a process, per step."""
    before = child.figures()
    do()
    after = child.figures()
    return {key: (after[key] - before[key]) / steps for key in before}


def link(loop: Loop, secret, role: str, name: str, address, schemas=None) -> Link:
    return Link(loop, secret, Identity(role, name, 1), [tuple(address)], schemas or {}, lambda *_: None)


def open_all(loop: Loop, links: list[Link]) -> None:
    while any(each.session is None for each in links):
        loop.turn(0.1)


def settle(loop: Loop, links: list[Link]) -> None:
    while any(each.outbox.acked < each.outbox.last for each in links):
        loop.turn(0.1)


# -- the three places


def at_an_aggregator(folder: str, secret) -> dict:
    """Measure an aggregator with its full number of nodes; the size of the rest of the fleet does not matter."""
    record = Child(keep_record, folder, PER_AGGREGATOR * RANKS)
    leader = Child(lead, folder, 1)
    child, loop = Child(aggregate, folder, leader.address, record.address), Loop()
    links = [link(loop, secret, "agent", f"n{i}", child.address, COMMANDS) for i in range(PER_AGGREGATOR)]
    open_all(loop, links)

    def steps() -> None:
        for step in range(STEPS):
            said = [node_fold(step, node) for node in range(PER_AGGREGATOR)]
            began = time.monotonic()
            for each, items in zip(links, said, strict=True):
                each.tell({"type": "said", "upto": step + 1, "items": items})
            while time.monotonic() < began + min(STEP_S, 0.3):
                loop.turn(0.05)

    up = record.figures()["messages"]
    found = spent(child, steps, STEPS)
    deadline = time.monotonic() + 10
    while record.figures()["rows"] < STEPS and time.monotonic() < deadline:
        loop.turn(0.1)
    figures = record.figures()
    for each in (child, record, leader):
        each.close()
    assert figures["rows"] == STEPS, figures
    return {**found, "up": (figures["messages"] - up) / STEPS}


def at_the_record(folder: str, secret, nodes: int) -> dict:
    aggregators = -(-nodes // PER_AGGREGATOR)
    record, loop = Child(keep_record, folder, nodes * RANKS), Loop()
    parents = [record.address]
    relays: list[Child] = []
    if aggregators > FAN_IN:
        relays = [Child(relay, folder, record.address, i) for i in range(min(FAN_IN, -(-aggregators // FAN_IN)))]
        parents = [each.address for each in relays]
    at = [parents[i % len(parents)] for i in range(aggregators)]
    links = [link(loop, secret, "aggregator", f"g{i}", address) for i, address in enumerate(at)]
    open_all(loop, links)

    def steps() -> None:
        for step in range(STEPS):
            for i, each in enumerate(links):
                each.post({"type": "said", "items": shifted(made[i], step)})
            settle(loop, links)

    made = [aggregate_fold(0, i, nodes) for i in range(aggregators)]
    found = spent(record, steps, STEPS)
    assert record.figures()["rows"] == STEPS, record.figures()
    for each in (*relays, record):
        each.close()
    return {**found, "aggregators": aggregators, "relays": len(relays)}


def shifted(items: list[dict], step: int) -> list[dict]:
    return [{**item, "step": step} for item in items]


def aggregators_with_a_node(pipe, folder: str, controller, first: int, end: int, beat_s: float) -> None:
    """Run aggregators with one node each; their other nodes would send nothing to the controller."""
    loop, secret, done = Loop(), load_secret(Path(folder) / "secret"), [0]
    agents: list[Link] = []
    for i in range(first, end):
        me = Identity("aggregator", f"g{i}", 1)
        made = Aggregator(loop, secret, me, [tuple(controller)], LOOPBACK, seed=i, beat_s=beat_s)
        agents.append(link(loop, secret, "agent", f"n{i}", made.server.address, COMMANDS))
    open_all(loop, agents)
    for i, each in zip(range(first, end), agents, strict=True):
        each.tell(beat_of(0))
        each.post({"type": "event", "event": NodeJoined(f"n{i}", 1, "d", "h:1").to_dict()})

    def beat() -> None:
        done[0] += 1
        loop.after(beat_s, beat)
        for each in agents:
            each.tell(beat_of(done[0]))
            each.post({"type": "event", "event": StepsDone(0, done[0]).to_dict()})

    loop.after(beat_s, beat)
    serve(pipe, loop, [], dict)


def beat_of(step: int) -> dict:
    about = {"visit": 1, "sent_ns": time.monotonic_ns(), "generation": 0}
    return {"type": "beat", **about, "step": step, "counter": step, "step_ns": 10**9}


def at_the_controller(folder: str, secret, nodes: int) -> dict:
    aggregators, beat_s = -(-nodes // PER_AGGREGATOR), beat_ns(nodes, 3790) / 1e9
    child = Child(lead, folder, aggregators)
    half = aggregators // 2
    both = [
        Child(aggregators_with_a_node, folder, child.address, first, end, beat_s)
        for first, end in ((0, half), (half, aggregators))
        if end > first
    ]
    seconds = 2 if SMOKE else 60
    time.sleep(1 if SMOKE else max(20.0, 2 * beat_s))  # each has learnt when its next ping is due
    found = spent(child, lambda: time.sleep(seconds), round(seconds / STEP_S))
    for each in (*both, child):
        each.close()
    return found


def main() -> None:
    options(__doc__).parse_args()
    print(machine())
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        secret = load_secret(Path(folder) / "secret")
        leaf = at_an_aggregator(folder, secret)
        each = {key: leaf[key] / PER_AGGREGATOR for key in ("heard", "bytes", "cpu_s")}
        print(f"an aggregator, per node and step: {each['heard']:.2f} messages, {each['bytes']:.0f} bytes, ", end="")
        print(f"{each['cpu_s'] * 1e6:.0f} us of CPU; {leaf['up']:.1f} messages upwards a step")
        head = f"{'nodes':>8}{'aggregators':>12}{'relays':>7}"
        print(
            f"{head}{'record: msg':>12}{'bytes':>9}{'CPU ms':>8}{'control: msg':>14}{'bytes':>9}{'CPU ms':>8}   a step"
        )
        for nodes in SIZES:
            top, leads = at_the_record(folder, secret, nodes), at_the_controller(folder, secret, nodes)
            rows[nodes] = (top, leads)
            print(
                f"{nodes:8}{top['aggregators']:12}{top['relays']:7}{top['heard']:12.1f}{top['bytes']:9.0f}"
                f"{top['cpu_s'] * 1e3:8.2f}{leads['heard']:14.1f}{leads['bytes']:9.0f}{leads['cpu_s'] * 1e3:8.2f}",
                flush=True,
            )
    most = {
        f"{place}_{key}": round(max(found[i][key] for found in rows.values()), 4)
        for i, place in enumerate(("record", "controller"))
        for key in ("heard", "bytes", "cpu_s")
    }
    for place in ("record", "controller"):
        worst = {key: most[f"{place}_{key}"] for key in MOST}
        over = [key for key in MOST if worst[key] > MOST[key]]
        print(
            f"{place}, at most a step: {worst['heard']:.1f} messages, {worst['bytes']:.0f} bytes, "
            f"{worst['cpu_s'] * 1e3:.1f} ms of CPU: {f'over the bar in {over}' if over else 'within the bar'}"
        )
    ok = each["heard"] <= 1.01 and all(
        most[f"{place}_{key}"] <= MOST[key] for place in ("record", "controller") for key in MOST
    )
    finish("fanin", ok, per_node={key: round(value, 6) for key, value in each.items()}, most=most)


if __name__ == "__main__":
    main()
