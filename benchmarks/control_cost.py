"""The cost of one failure to the control plane: CPU time of the pure machines from a worker's death to full strength,
in gangs of 1,000 to 1,000,000 ranks whose replicas have 128 or 2,048, and the cost of all nodes joining. Events come as
agents send them and aggregators merge them, each once and none late.

Bar: a failure costs at most 6 ms + 5 us per replica; 125,000 nodes join in at most 5 s.
"""

from __future__ import annotations

import argparse
import gc
import time

from common import finish

from phalanx.control import messages as say
from phalanx.control.gang import Gang
from phalanx.control.messages import Event, Failure
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout

PER_NODE = 8
FIXED_S, EACH_S, JOIN_S = 6e-3, 5e-6, 5.0
MS = 10**6


class Fleet:
    """All agents of a gang, as far as the controller can see them."""

    def __init__(self, ranks: int, size: int):
        self.size, self.nodes, self.replicas = size, ranks // PER_NODE, ranks // size
        layout = Layout(replica=self.replicas, shard=size, ranks_per_node=PER_NODE)
        self.gang = Gang.of(layout, 10**6, Policy(save=False))
        self.now_ns, self.cpu_ns = 0, 0
        self.copy = (0, 0, 1)

    def hear(self, event: Event) -> list[say.Command]:
        self.now_ns += MS // 1000
        began_ns = time.thread_time_ns()
        commands = self.gang.apply(self.now_ns, event)
        self.cpu_ns += time.thread_time_ns() - began_ns
        return commands

    def spent(self) -> float:
        """Return the CPU time of the machines since the last call."""
        was, self.cpu_ns = self.cpu_ns, 0
        return was / 1e9

    def join(self) -> None:
        for node in range(self.nodes):
            self.hear(say.NodeJoined(f"n{node:06}", 1, "d", f"n{node}:1"))

    def come_up(self, workers: dict[int, str]) -> None:
        at: dict[str, list[int]] = {}
        for worker, node in workers.items():
            at.setdefault(node, []).append(worker)
        for node, numbers in at.items():
            self.hear(say.WorkersUp(node, 1, tuple(numbers), tuple(numbers)))

    def start(self) -> None:
        workers = self.gang.members.workers
        self.come_up({worker: found.node for worker, found in workers.items()})
        for replica in range(self.replicas):
            self.build(replica)
        self.form()

    def build(self, replica: int) -> None:
        found = self.gang.worlds.replicas[replica]
        for node, crew in self.gang.worlds.crews(replica, found.waiting).items():
            self.hear(say.Built((node,), (1,), (tuple(crew.values()),), found.world))

    def form(self) -> None:
        """Let all replicas enter the generation and do a step."""
        form = self.gang.form
        assert form and self.gang.phase == "forming", self.gang.phase
        self.hear(say.Formed(form.replicas, form.worlds, form.generation))
        step = form.step + 1
        self.hear(say.StepsDone(form.generation, step))
        self.copy = (step, step, form.generation)

    def part(self, but: int = -1) -> None:
        worlds = {r: world for r, world in self.gang.gen.worlds.items() if r != but}
        self.hear(say.Parted(tuple(worlds), tuple(worlds.values()), self.gang.generation, *self.copy, but >= 0))

    def fail(self, broken: int) -> None:
        """Kill a worker, let the others continue without its replica, and let it come back and join."""
        gang, self.now_ns = self.gang, self.now_ns + 10**12
        found = gang.worlds.replicas[broken]
        crews = gang.worlds.crews(broken, set(found.crew.values()))
        node, crew = next(iter(crews.items()))
        rank, worker = next(iter(crew.items()))
        self.hear(say.WorkerDied(node, 1, worker, Failure(signal="SIGKILL")))
        for name, there in crews.items():
            left = tuple(w for w in there.values() if w != worker)
            self.hear(say.Parked((name,), (1,), (left,), found.world, *self.copy))
        self.part(but=broken)
        self.form()
        self.come_up({gang.members.worker_at(rank): node})
        self.build(broken)
        assert gang.gen.pausing, gang.phase
        self.part()
        self.form()
        assert len(gang.gen.worlds) == self.replicas


def measure(ranks: int, size: int, failures: int) -> dict[str, float]:
    fleet = Fleet(ranks, size)
    gc.collect()
    gc.freeze()
    gc.disable()  # the controller does the same, and collects when it is idle
    fleet.spent()
    fleet.join()
    join_s = fleet.spent()
    fleet.start()
    start_s = fleet.spent()
    costs = []
    for nth in range(failures):
        fleet.fail(nth * fleet.replicas // failures)
        costs.append(fleet.spent())
    gc.enable()
    gc.unfreeze()
    cost_s = sorted(costs)[len(costs) // 2]
    bar_s = FIXED_S + EACH_S * fleet.replicas
    return {"ranks": ranks, "size": size, "replicas": fleet.replicas, "nodes": fleet.nodes, "join_s": join_s,
            "start_s": start_s, "failure_s": cost_s, "bar_s": bar_s}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    sizes = [(1024, 128)] if args.smoke else [(n, s) for s in (128, 2048) for n in (1024, 16_384, 102_400, 999_424)]
    sizes = [(max(n // s * s, 2 * s), s) for n, s in sizes]
    rows = [measure(ranks, size, 3 if args.smoke else 5) for ranks, size in sizes]
    if not args.smoke:
        rows.append(measure(1_000_000 // 128 * 128, 128, 5))
    print("  ranks     of a replica  replicas  nodes    join s  start s  failure ms  bar ms")
    for r in rows:
        print(f"{r['ranks']:9,} {r['size']:13,} {r['replicas']:9,} {r['nodes']:8,} {r['join_s']:8.2f} "
              f"{r['start_s']:8.2f} {1e3 * r['failure_s']:11.1f} {1e3 * r['bar_s']:7.1f}")  # fmt: skip
    most = max(rows, key=lambda r: r["nodes"])
    ok = all(r["failure_s"] <= r["bar_s"] for r in rows) and most["join_s"] <= JOIN_S
    finish("control_cost", ok, rows=rows, join_s=most["join_s"], join_nodes=most["nodes"])


if __name__ == "__main__":
    main()
