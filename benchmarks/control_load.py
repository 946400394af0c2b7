"""The control plane under the reports of 100,000 GPUs: 12,500 nodes and 20 spares, each with a connection of its own
over loopback to one of 25 aggregators, and those to a controller that is pinned to one core. Every connection is
authenticated; the journal, the control machine and the agents are the real ones; the nodes live in a few processes, and
their workers do no work.

Each node sends a heartbeat with its step report every 5 s. Ten times a minute something fails: by turns a worker, which
its agent reports at once, and a node, which falls silent and comes back as a spare half a minute later. When a member
breaks the whole gang parks, and re-forms: all nodes report twice per generation, within a second or so.

Latency is from a report to the moment when the commands that follow from it are durable and handed to the sockets:
once since the controller has read it, once since it came to its aggregator, with all waiting in between (on two cores
that 30 processes share). Then the rates are multiplied, until the controller's core is full, and heartbeats doubled.

Bar: controller < 0.5 core; p99 of all decisions < 100 ms since the controller has read their cause."""

from common import finish, machine  # isort: skip

import argparse
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
from pathlib import Path

from control_load_cases import BEAT_S, LAYOUT

CPU_BAR, P99_BAR_MS = 0.5, 100.0
CASES = Path(__file__).with_name("control_load_cases.py")
NODES = LAYOUT.world_size // LAYOUT.ranks_per_node
SPARES, AGGREGATORS, GENERATORS = 20, 25, 4
FAILURES_PER_MINUTE, BACK_S = 10, 30.0
RAMP = (2, 4, 8)
FULL = 0.9  # of the controller's core


class Fleet:
    """All processes."""

    def __init__(self, folder: Path, stack: ExitStack, replicas: int, spares: int, aggregators: int):
        self.folder, self.stack = folder, stack
        self.members = LAYOUT.replica_size * replicas // LAYOUT.ranks_per_node
        self.size = self.members + spares
        self.bus = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self.bus.bind(str(folder / "driver"))
        secret = folder / "secret"
        self.controller = self.spawn("control", folder, secret, min(os.sched_getaffinity(0)), replicas)
        host, port = json.loads(self.controller.stdout.readline())
        self.aggregators = [self.spawn("aggregate", secret, f"rack-{i}", host, port) for i in range(aggregators)]
        addresses = [json.loads(a.stdout.readline()) for a in self.aggregators]
        self.generators = [self.spawn("generate", folder, i, GENERATORS, secret) for i in range(GENERATORS)]
        for i, generator in enumerate(self.generators):
            mine = list(range(i, self.size, GENERATORS))
            where = [addresses[number * aggregators // self.size] for number in mine]
            generator.stdin.write(json.dumps({"nodes": mine, "addresses": where}) + "\n")
            generator.stdin.flush()
            generator.stdout.readline()  # it listens

    def spawn(self, *args):
        command = [sys.executable, "-P", CASES, *map(str, args)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
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
        """By the generators, together."""
        self.tell({"count": str(self.folder / "driver")})
        answers = [json.loads(self.bus.recv(4096)) for _ in range(GENERATORS)]
        return {key: sum(a[key] for a in answers) for key in answers[0]}

    def until(self, happened, seconds, what):
        deadline = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: {self.ask()} {self.counted()}")
            time.sleep(0.5)

    def journal_bytes(self):
        return sum(f.stat().st_size for f in self.folder.glob("journal.db*"))

    def window(self, seconds, failures_per_minute=0):
        """What happens in some seconds, per second."""
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
            "edges": [here for kind, _, here, _ in said if kind not in ("Parked", "Ready", "WorkersUp")],
            "latencies": said,
        }

    def plan(self, seconds, per_minute):
        dice, plan, count = random.Random(1), [], round(seconds * per_minute / 60)
        for i in range(count):
            at, number = time.monotonic() + (i + 0.5) * seconds / count, dice.randrange(self.members)
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
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0, help="of the window with ten failures a minute")
    parser.add_argument("--no-ramp", action="store_true", help="leave out where it would break")
    parser.add_argument("--smoke", action="store_true", help="a small fleet, for some seconds: that it runs at all")
    args = parser.parse_args()
    replicas, spares, aggregators = (2, 2, 2) if args.smoke else (LAYOUT.replica, SPARES, AGGREGATORS)
    args.no_ramp |= args.smoke
    args.seconds = 6.0 if args.smoke else args.seconds
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (NODES + SPARES) // GENERATORS + 100
    if hard < wanted:
        sys.exit(f"{hard} open files are allowed per process, and {wanted} are needed: raise `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    print(
        f"{machine()}\n{replicas} replicas of {LAYOUT.replica_size:,} ranks and {spares} spare nodes, each node with a "
        f"socket; {aggregators} aggregators\n"
    )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="control-load-")))
        fleet = Fleet(folder, stack, replicas, spares, aggregators)
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
        steady = fleet.window(3 if args.smoke else 10)
        row("heartbeats alone", steady)
        rate = 30 if args.smoke else FAILURES_PER_MINUTE
        load = fleet.window(args.seconds, rate)
        row(f"{rate} failures a minute", load)
        broke = f"not at {RAMP[-1]}x" if not args.no_ramp else "not tried"
        for factor in () if args.no_ramp else RAMP:
            w = fleet.window(15, FAILURES_PER_MINUTE * factor)
            row(f"{FAILURES_PER_MINUTE * factor} failures a minute", w)
            if w["controller"] > FULL:
                broke = f"at {factor}x"
                break
        doubled = None
        if not args.no_ramp:
            time.sleep(5)
            fleet.tell({"beat_s": BEAT_S / 2})
            time.sleep(BEAT_S)
            doubled = fleet.window(10)
            row("heartbeats doubled", doubled)
    beat_us = 1e6 * steady["aggregators"] / steady["beats"]
    generation_s = (load["controller"] - steady["controller"]) * args.seconds / max(1, load["generations"])
    p50, p99 = quantile(load["here"], 0.5), quantile(load["here"], 0.99)
    slow = sorted({kind for kind, _, here, _ in load["latencies"] if here > P99_BAR_MS})
    print(
        f"\ncpu: p99 of what the controller used from reading to sending; the rest is waiting, for a disk or a core"
        f"\nedges: p99 of decisions on failures and joins alone; whole: p99 since the report came to its aggregator"
        f"\na heartbeat costs its aggregator {beat_us:.0f} us: a core is enough for {BEAT_S * 1e6 / beat_us:,.0f} nodes"
        f"\na generation costs the controller {generation_s:.1f} s of CPU: {60 / generation_s:.0f} a minute fill it"
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
        not args.smoke and load["controller"] < CPU_BAR and p99 < P99_BAR_MS and load["decisions"] > 0,
        nodes=fleet.size,
        ranks=replicas * LAYOUT.replica_size,
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
