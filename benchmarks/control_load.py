"""The control plane under the reports of 100,000 GPUs: 12,500 nodes and 20 spares, each with its own loopback
connection to one of 25 aggregators, which connect to a controller that is pinned to one core. Every connection is
authenticated. The journal, the control machine and the agents are the real ones; the nodes live in a few processes, and
their workers do no work.

Each node sends a heartbeat with its step report every 5 s. Ten times a minute something fails, in turns: a worker,
which its agent reports at once, and a node, which falls silent and comes back as a spare half a minute later. When a
member breaks, its replica parks and is rebuilt; the others part from it and form anew twice: without it, and with it.

Latency ends when the resulting commands are durable and handed to the sockets. It begins once when the controller has
read the report, and once when the report reached its aggregator, including all waiting in between (on two cores that 30
processes share). Then the rates are multiplied until the controller's core is full, and heartbeats doubled.

Bar: controller < 0.5 core; p99 of all decisions < 100 ms since the controller has read their cause."""

from common import SMOKE, finish, machine, options  # isort: skip

import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from phalanx.core.layout import Layout

CPU_BAR, P99_BAR_MS = 0.5, 100.0
CASES = Path(__file__).with_name("control_load_cases.py")
LAYOUT = Layout(replica=50, pp=10, shard=25, tp=8, ranks_per_node=8)  # 100,000 ranks on 12,500 nodes
SPARES, AGGREGATORS, GENERATORS = 20, 25, 4
BEAT_S = 5.0
CONNECT_S = 8.0  # the nodes connect over this time, or thousands of handshakes would dominate
SECONDS, STEADY_S, SETTLE_S, LOOK_S = 60.0, 10.0, 5.0, 0.5  # lengths of windows, and pauses between them
FAILURES_PER_MINUTE, BACK_S = 10, 30.0
RAMP, RAMP_S = (2, 4, 8), 15.0
if SMOKE:
    LAYOUT = Layout(replica=2, pp=2, shard=5, tp=8, ranks_per_node=8)
    SPARES, AGGREGATORS, GENERATORS, BEAT_S = 2, 2, 2, 0.2
    CONNECT_S, SECONDS, STEADY_S, SETTLE_S, LOOK_S = 0.5, 1.5, 0.6, 0.1, 0.05
    FAILURES_PER_MINUTE, BACK_S, RAMP, RAMP_S = 120, 0.5, (2,), 0.6
NODES = LAYOUT.world_size // LAYOUT.ranks_per_node
FULL = 0.9  # share of the controller's core that counts as full


class Fleet:
    """All processes of the benchmark."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder, self.stack = folder, stack
        self.size = NODES + SPARES
        self.bus = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self.bus.bind(str(folder / "driver"))
        secret = folder / "secret"
        core = min(os.sched_getaffinity(0))
        self.controller = self.spawn("control", folder, secret, core, json.dumps(asdict(LAYOUT)))
        host, port = json.loads(self.controller.stdout.readline())
        self.aggregators = [self.spawn("aggregate", secret, f"rack-{i}", host, port) for i in range(AGGREGATORS)]
        addresses = [json.loads(a.stdout.readline()) for a in self.aggregators]
        self.generators = [self.spawn("generate", folder, i, GENERATORS, secret) for i in range(GENERATORS)]
        for i, generator in enumerate(self.generators):
            mine = list(range(i, self.size, GENERATORS))
            where = [addresses[number * AGGREGATORS // self.size] for number in mine]
            given = {"nodes": mine, "addresses": where, "beat_s": BEAT_S, "connect_s": CONNECT_S}
            generator.stdin.write(json.dumps(given | {"replica_size": LAYOUT.replica_size}) + "\n")
            generator.stdin.flush()
            generator.stdout.readline()  # it is listening

    def spawn(self, *args):
        command = [sys.executable, "-P", CASES, *map(str, args)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if args[0] != "control" and not SMOKE:
            # In a fleet the controller has its own machine: other processes on its core here run only when it does not.
            os.sched_setscheduler(process.pid, os.SCHED_IDLE, os.sched_param(0))
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def ask(self, word="count"):
        self.controller.stdin.write(word + "\n")
        self.controller.stdin.flush()
        return json.loads(self.controller.stdout.readline())

    def tell(self, message):
        for i in range(GENERATORS):
            self.bus.sendto(json.dumps(message).encode(), str(self.folder / f"generator-{i}"))

    def counted(self):
        """Return the sum of the generators' counts."""
        self.tell({"count": str(self.folder / "driver")})
        answers = [json.loads(self.bus.recv(4096)) for _ in range(GENERATORS)]
        return {key: sum(a[key] for a in answers) for key in answers[0]}

    def until(self, happened, seconds, what):
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: {self.ask()} {self.counted()}")
            time.sleep(LOOK_S)

    def journal_bytes(self):
        return sum(f.stat().st_size for f in self.folder.glob("journal.db*"))

    def window(self, seconds, failures_per_minute=0):
        """Measure a window of `seconds`, with rates per second."""
        self.plan(seconds, failures_per_minute)
        before, nodes, size = self.ask(), self.counted(), self.journal_bytes()
        cpu = [cpu_s(self.aggregators), cpu_s(self.generators)]
        time.sleep(seconds)
        after, later = self.ask(), self.counted()
        wall = after["now_s"] - before["now_s"]
        said = after["latencies"]
        return {
            "controller": (after["cpu_s"] - before["cpu_s"]) / wall,
            "aggregators": (cpu_s(self.aggregators) - cpu[0]) / wall,
            "generators": (cpu_s(self.generators) - cpu[1]) / wall,
            "beats": (later["beats"] - nodes["beats"]) / wall,
            "reports": (after["reports"] - before["reports"]) / wall,
            "generations": after["generation"] - before["generation"],
            "mb_per_hour": (self.journal_bytes() - size) / wall * 3600 / 1e6,
            "decisions": len(said),
            "here": [here for _, _, here, _ in said],
            "whole": [whole for _, whole, _, _ in said],
            "cpu": [cpu for _, _, _, cpu in said],
            "edges": [
                here for kind, _, here, _ in said if kind not in ("Parked", "Parted", "Built", "Formed", "WorkersUp")
            ],
            "latencies": said,
        }

    def plan(self, seconds, per_minute):
        dice, plan, count = random.Random(1), [], round(seconds * per_minute / 60)
        for i in range(count):
            at, number = time.monotonic() + (i + 0.5) * seconds / count, dice.randrange(NODES)
            plan.append([at, "node" if i % 2 else "worker", number])
            if i % 2:
                plan.append([at + BACK_S, "back", number])
        for at in range(0, len(plan), 50):
            self.tell({"plan": plan[at : at + 50]})


def cpu_s(processes) -> float:
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def quantile(values, q):
    return sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else 0.0


def row(name, w):
    p50, p99 = quantile(w["here"], 0.5), quantile(w["here"], 0.99)
    print(
        f"{name:24}{w['beats']:9,.0f}{w['reports']:10,.0f}{w['generations']:6}{w['controller']:12.3f}"
        f"{w['aggregators']:12.2f}{w['generators']:9.2f}{w['decisions']:8}{p50:8.0f}{p99:8.0f}"
        f"{quantile(w['cpu'], 0.99):8.0f}{quantile(w['edges'], 0.99):9.0f}{quantile(w['whole'], 0.99):9.0f}"
        f"{w['mb_per_hour'] / 1e3:9.2f}",
        flush=True,
    )


def main():
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the window with ten failures a minute")
    parser.add_argument("--no-ramp", action="store_true", help="leave out where it would break")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (NODES + SPARES) // GENERATORS + 100
    if hard < wanted:
        sys.exit(f"{hard} open files are allowed per process, and {wanted} are needed: raise `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    print(
        f"{machine()}\n{LAYOUT.replica} replicas of {LAYOUT.replica_size:,} ranks and {SPARES} spare nodes, "
        f"each node with a socket; {AGGREGATORS} aggregators\n"
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="control-load-")))
        fleet = Fleet(folder, stack)
        began = time.monotonic()
        fleet.until(lambda: fleet.counted()["connected"] == fleet.size, 120, "not all nodes are connected")
        fleet.until(lambda: fleet.ask()["nodes"] == fleet.size, 60, "not all nodes have joined")
        joined_s = time.monotonic() - began
        began = time.monotonic()
        fleet.until(lambda: fleet.ask()["stepped"], 180, "the gang did not start")
        print(f"connected and joined in {joined_s:.0f} s, staffed and started in {time.monotonic() - began:.0f} s")
        snapshot = fleet.ask("snapshot")
        print(f"a snapshot of the state: {snapshot['snapshot_mb']:.1f} MB, {snapshot['snapshot_s']:.2f} s\n")
        print(
            f"{'':24}{'beats/s':>9}{'reports/s':>10}{'gens':>6}{'controller':>12}{'aggregators':>12}{'nodes':>9}"
            f"{'decided':>8}{'p50 ms':>8}{'p99 ms':>8}{'cpu ms':>8}{'edges':>9}{'whole':>9}{'GB/h':>9}"
        )
        steady = fleet.window(STEADY_S)
        row("heartbeats alone", steady)
        load = fleet.window(args.seconds, FAILURES_PER_MINUTE)
        row(f"{FAILURES_PER_MINUTE} failures a minute", load)
        broke = f"not at {RAMP[-1]}x" if not args.no_ramp else "not tried"
        for factor in () if args.no_ramp else RAMP:
            w = fleet.window(RAMP_S, FAILURES_PER_MINUTE * factor)
            row(f"{FAILURES_PER_MINUTE * factor} failures a minute", w)
            if w["controller"] > FULL:
                broke = f"at {factor}x"
                break
        doubled = None
        if not args.no_ramp:
            time.sleep(SETTLE_S)
            fleet.tell({"beat_s": BEAT_S / 2})
            time.sleep(min(BEAT_S, SETTLE_S))
            doubled = fleet.window(STEADY_S)
            row("heartbeats doubled", doubled)
    beat_us = 1e6 * max(steady["aggregators"], 1e-3) / max(steady["beats"], 1)  # a smoke run may see none
    generation_s = (load["controller"] - steady["controller"]) * args.seconds / max(1, load["generations"])
    per_minute = 60 / max(generation_s, 1e-3)
    p50, p99 = quantile(load["here"], 0.5), quantile(load["here"], 0.99)
    slow = sorted({kind for kind, _, here, _ in load["latencies"] if here > P99_BAR_MS})
    print(
        f"\ncpu: p99 of what the controller used from reading to sending; the rest is waiting, for a disk or a core"
        f"\nedges: p99 of decisions on failures and joins alone; whole: p99 since the report came to its aggregator"
        f"\na heartbeat costs its aggregator {beat_us:.0f} us: a core is enough for {BEAT_S * 1e6 / beat_us:,.0f} nodes"
        f"\na generation costs the controller {generation_s:.1f} s of CPU: {per_minute:.0f} a minute fill it"
        f"\nby failures it was full {broke}, as a gang breaks only when it runs"
        f"\ndecisions over {P99_BAR_MS:.0f} ms followed from: {', '.join(slow) or 'nothing'}"
    )
    for kind in sorted({kind for kind, *_ in load["latencies"]}):
        took = [here for of, _, here, _ in load["latencies"] if of == kind]
        print(
            f"  {len(took):4} decisions after {kind}: median {quantile(took, 0.5):.0f} ms, longest {max(took):.0f} ms"
        )
    finish(
        "control_load",
        load["controller"] < CPU_BAR and p99 < P99_BAR_MS and load["decisions"] > 0,
        nodes=fleet.size,
        ranks=LAYOUT.world_size,
        beats_per_s=round(load["beats"]),
        controller_cores=round(load["controller"], 3),
        controller_steady_cores=round(steady["controller"], 4),
        aggregator_cores=round(load["aggregators"], 2),
        p50_ms=round(p50, 1),
        p99_ms=round(p99, 1),
        p99_cpu_ms=round(quantile(load["cpu"], 0.99), 1),
        edge_p50_ms=round(quantile(load["edges"], 0.5), 1),
        edge_p99_ms=round(quantile(load["edges"], 0.99), 1),
        whole_p99_ms=round(quantile(load["whole"], 0.99), 1),
        generations=load["generations"],
        generation_cpu_s=round(generation_s, 2),
        decisions=load["decisions"],
        journal_gb_per_hour=round(load["mb_per_hour"] / 1e3, 2),
        journal_steady_mb_per_hour=round(steady["mb_per_hour"], 1),
        snapshot_mb=round(snapshot["snapshot_mb"], 1),
        snapshot_s=round(snapshot["snapshot_s"], 2),
        full=broke,
        doubled_aggregator_cores=round(doubled["aggregators"], 2) if doubled else None,
    )


if __name__ == "__main__":
    main()
