"""The ranks' part of benchmarks/collectives.py: as a program, the collectives in one or two levels; in pool workers,
steps of the engine."""

import dataclasses
import json
import os
import socket
import statistics
import sys
import time

import torch
import torch.distributed as dist

from phalanx.core.job import CollectivesConfig
from phalanx.core.layout import Layout
from phalanx.parallel.device import Device
from phalanx.parallel.groups import Groups, form_cross
from phalanx.parallel.tiers import TieredAllGather, TieredReduceScatter

LEVELS = {name: CollectivesConfig(replica=name, shard=name) for name in ("flat", "hierarchical")}


def open_store(host: str, port: int, serve: bool) -> dist.Store:
    """Open the store on this address only: torch by default would listen on all of them."""
    if not serve:
        return dist.TCPStore(host, port, is_master=False)
    with socket.create_server((host, port)) as listener:
        fd = os.dup(listener.fileno())
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)


class Bench:
    """Runs the product's own collectives, in both ways, over the same ranks."""

    def __init__(self, rank: int, ranks: int, per_node: int, store: dist.Store):
        device = Device(torch.device("cpu"), "gloo")
        shard, replica = (Layout(**{axis: ranks, "ranks_per_node": per_node}) for axis in ("shard", "replica"))
        self.groups = Groups.form(store, 0, shard, shard.coord(rank), device, collectives=LEVELS["hierarchical"])
        self.world, self.rank, self.ranks = self.groups.shard, rank, ranks
        tiers = {"flat": {}, "hierarchical": self.groups.tiers}
        self.cross = {
            name: form_cross(store, generation, replica, replica.coord(rank), device, LEVELS[name])
            for generation, name in enumerate(LEVELS, 1)
        }
        self.scatter = {name: TieredReduceScatter(t) for name, t in tiers.items()}
        self.gather = {name: TieredAllGather(t) for name, t in tiers.items()}
        (peers,) = self.groups.tiers.values()
        self.way = peers._ways["hierarchical"]

    def operations(self, size_bytes: int):
        numel = size_bytes // 4 // self.ranks * self.ranks
        whole, part = torch.ones(numel), torch.ones(numel // self.ranks)
        mine = whole[self.rank * part.numel() :][: part.numel()]
        for name in LEVELS:
            yield "all-reduce", name, lambda n=name: self.cross[n].sum_(whole)
            yield "reduce-scatter", name, lambda n=name: self.scatter[n](part, whole, self.world, dist.ReduceOp.SUM)
            yield "all-gather", name, lambda n=name: self.gather[n](whole, mine, self.world)

    def stage(self, which: int, size_bytes: int):
        """Return an all-gather over one stage alone: 0 inside the nodes, 1 across them."""
        group = self.way.group(which)
        whole = torch.ones(size_bytes // 4 // group.size() * group.size())
        part = whole[: whole.numel() // group.size()].clone()
        return lambda: group._allgather_base(whole, part).wait()

    def time(self, run, times: int) -> float:
        """Return the seconds per call of the slowest rank."""
        dist.barrier(self.world)
        start = time.perf_counter()
        for _ in range(times):
            run()
        taken = torch.tensor([(time.perf_counter() - start) / times], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX, group=self.world)
        return float(taken)


def repeats(size_bytes: int) -> int:
    return 10 if size_bytes < 2**17 else 4 if size_bytes < 2**21 else 1


def main(args) -> None:
    torch.set_num_threads(1)
    store = open_store(*args["store"], serve=args["rank"] == 0)
    bench = Bench(args["rank"], args["ranks"], args["per_node"], store)
    links = {}
    for which, name in enumerate(("inside", "across")):
        for size_bytes in args["link_sizes"]:
            run = bench.stage(which, size_bytes)
            seconds = [bench.time(run, repeats(size_bytes)) for _ in range(args["rounds"] + 1)]
            links[f"{name} {size_bytes}"] = statistics.median(seconds[1:])
    rows = []
    for size_bytes in args["sizes"]:
        taken: dict = {}
        for turn in range(args["rounds"] + 1):
            operations = list(bench.operations(size_bytes))
            for kind, name, run in operations if turn % 2 else operations[::-1]:
                seconds = bench.time(run, repeats(size_bytes))
                if turn:
                    taken.setdefault(kind, {}).setdefault(name, []).append(seconds)
        rows += [{"size_bytes": size_bytes, "kind": kind, **t} for kind, t in taken.items()]
    dist.barrier(bench.world)
    if args["rank"] == 0:
        print(json.dumps({"rows": rows, "links": links}), flush=True)
    dist.barrier(bench.world)
    os._exit(0)  # the others may have exited already; there is nothing to save


def steps(args):
    """Time steps of several variants of one job in turns, on the same ranks, groups and batches."""
    from phalanx.train.engine import Engine
    from phalanx.train.state import State
    from tests.cases import connect

    rank = connect(args)
    engines = []
    for options in args["variants"]:
        job = dataclasses.replace(rank.job, train=dataclasses.replace(rank.job.train, **options))
        state = State.create(job, rank.family, rank.coord, rank.device)
        engines.append(Engine(job, rank.family, rank.coord, rank.groups, state, rank.device))
    taken: list[list[float]] = [[] for _ in engines]
    for step in range(args["steps"] + 1):
        batches = rank.batches(step)
        turn = list(enumerate(engines))
        for k, engine in turn if step % 2 else turn[::-1]:
            if rank.job.layout.shard > 1:
                dist.barrier()
            start = time.perf_counter()
            engine.step(batches)
            if step:
                taken[k].append(time.perf_counter() - start)
    for engine in engines:
        engine.close()
    rank.close()
    return taken


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
