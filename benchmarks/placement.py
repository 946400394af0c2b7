"""Placement of gangs: how many leaves their groups span, and what that costs a step. The cluster is a real Clos with
its holes, 847 hosts under 119 leaves of at most 8 (`--topology FILE`; not shipped: data/topo.csv of
alibaba/alibaba-lingjun-dataset-2023, columns host, dsw, psw, asw; hosts are taken to have 8 GPUs). Without the file a
cluster is drawn, whose figures are not judged.

A replica is a pipeline of nodes, tensor parallel inside a node: its spread is the number of leaves of its nodes. The
gang's own spread is the number of leaves of all its nodes, which data parallel groups cross.

Small cases, 200 drawn ones of 3 to 5 leaves with holes: ours against an exact solver, which minimises the spread of all
replicas and, among equals, the gang's. Large cases: 20 jobs of 64 to 4,096 GPUs, each on a cluster with 30 % of the
hosts in use, three times; ours against best fit (the leaf with the fewest free hosts first) and random hosts, all in
the order in which hosts are taken. The step is the planner's cost model of Llama 3 70B: a pipeline's sends and the
gradients' reduction see the network tier that they really cross, at the worst hop (fat tree of RoCE, leaves
oversubscribed 3 to 1).

Bars: spreads within 5 % of the exact solver over all small cases; on the large ones replicas spread no more than with
the others for every job and less in the mean, and the mean step is shorter than with both."""

from common import SMOKE, finish, machine, options  # isort: skip

import random
import statistics
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from phalanx.control.schedule.asks import Ask
from phalanx.control.schedule.cells import Cells
from phalanx.hardware import load
from phalanx.plan.cost.candidates import Candidates
from phalanx.plan.cost.evaluate import step_seconds
from phalanx.plan.cost.machine import Machine
from phalanx.plan.cost.profiles import default_profile
from phalanx.plan.known_models import published_shape
from phalanx.twin.replay import machines

SIZE = 8  # GPUs per host
# GPUs, and nodes per replica.
JOBS = ((64, 2), (64, 4), (96, 4), (128, 2), (128, 4), (192, 8), (256, 4), (256, 8), (320, 8), (384, 4), (512, 2),
        (512, 8), (640, 4), (768, 8), (1024, 4), (1024, 8), (1536, 8), (2048, 4), (3072, 8), (4096, 8))  # fmt: skip
BUSY, SEEDS, SMALL = 0.3, 1 if SMOKE else 3, 20 if SMOKE else 200
WITHIN = 1.05
Placed = list[list[int]]  # hosts by replica


# -- small cases


@cache
def exact(leaves: tuple[tuple[int, bool], ...], nodes: int, replicas: int) -> tuple[int, int]:
    """Return the least spread of the replicas, and of the gang. `leaves`: free hosts, and whether the gang is there."""
    if not replicas:
        return 0, 0
    best = (1 << 30, 0)
    for amounts in _ways(tuple(free for free, _ in leaves), nodes):
        after = sorted((free - n, used or n > 0) for (free, used), n in zip(leaves, amounts, strict=True))
        rest = exact(tuple(after), nodes, replicas - 1)
        new = sum(n > 0 and not used for (_, used), n in zip(leaves, amounts, strict=True))
        best = min(best, (sum(n > 0 for n in amounts) + rest[0], new + rest[1]))
    return best


@cache
def _ways(free: tuple[int, ...], nodes: int) -> tuple[tuple[int, ...], ...]:
    """List all ways to take `nodes` hosts from leaves."""
    if not free:
        return ((),) if not nodes else ()
    return tuple((n, *rest) for n in range(min(free[0], nodes) + 1) for rest in _ways(free[1:], nodes - n))


def small(cases: int) -> dict[str, float]:
    draw, ours, least = random.Random(0), [0, 0], [0, 0]
    while cases:
        free = [draw.randrange(1, 9) for _ in range(draw.randrange(3, 6))]
        nodes, replicas = draw.randrange(2, 6), draw.randrange(1, 5)
        if nodes * replicas > sum(free):
            continue
        cases -= 1
        cells = Cells(SIZE, ("leaf",), [(f"l{n // 8}",) for n in range(8 * len(free))])
        shut = [8 * leaf + n for leaf, count in enumerate(free) for n in draw.sample(range(8), 8 - count)]
        cells.take([(node, SIZE) for node in shut])
        found = spreads(cells, by_ours(cells, nodes, replicas))
        best = exact(tuple(sorted((count, False) for count in free)), nodes, replicas)
        for i, figure in enumerate((round(found[0] * replicas), found[1])):
            ours[i] += figure
            least[i] += best[i]
    return {"replicas": ours[0] / least[0], "gang": ours[1] / least[1]}


# -- placing


def by_ours(cells: Cells, nodes: int, replicas: int) -> Placed:
    found = cells.place(Ask("job", replicas=replicas, nodes=nodes, gpus=SIZE), replicas)
    assert found
    return [[node for node, _ in spots] for spots in found[0]]


def _cut(hosts: list[int], nodes: int, replicas: int) -> Placed:
    return [hosts[r * nodes : (r + 1) * nodes] for r in range(replicas)]


def by_best_fit(cells: Cells, nodes: int, replicas: int) -> Placed:
    leaves = [[n for n in leaf if cells.free[n] == SIZE] for leaf in cells.nodes_of[0]]
    return _cut([node for leaf in sorted(leaves, key=len) for node in leaf], nodes, replicas)


def by_chance(cells: Cells, nodes: int, replicas: int) -> Placed:
    free = [node for node in range(cells.num_nodes) if cells.free[node] == SIZE]
    return _cut(random.Random(nodes * replicas).sample(free, nodes * replicas), nodes, replicas)


def spreads(cells: Cells, placed: Placed) -> tuple[float, int, int]:
    """Return the mean number of leaves of a replica, that of the whole gang, and that of the widest replica."""
    of = cells.domain[0]
    each = [len({of[node] for node in hosts}) for hosts in placed]
    return statistics.mean(each), len({of[node] for hosts in placed for node in hosts}), max(each)


# -- the step


def tier(cells: Cells, a: int, b: int) -> int:
    """Return the lowest level whose domain has both: 0 is a leaf."""
    return next(level for level, of in enumerate(cells.domain) if of[a] == of[b])


class Steps:
    """Computes the planner's seconds per step, by the tiers that pipelines and reductions cross."""

    def __init__(self) -> None:
        catalogue = load()
        self.cluster = lambda gpus: catalogue.cluster("h100", gpus, fabric="fat-tree-roce:3")
        self.profile = default_profile(catalogue.chip("h100"))
        self.shape = published_shape("llama3-70b", 8192)
        self.tiers = self.cluster(65_536).fabric.tiers

    def seconds(self, cells: Cells, placed: Placed) -> float:
        """Return the seconds per step. Every replica waits for the slowest, so the worst hop of any pipeline, and of
        any reduction, counts."""
        nodes, replicas = len(placed[0]), len(placed)
        hops = [tier(cells, a, b) for hosts in placed for a, b in pairwise(hosts)]
        sums = [tier(cells, a, b) for two in pairwise(placed) for a, b in zip(*two, strict=True)]
        choice = Candidates.of(tp=8, pp=nodes, replica=replicas, recompute="selective")
        gpus = 8 * nodes * replicas

        def terms(level: int) -> dict[str, float]:
            seen, base = self.tiers[min(level, len(self.tiers) - 1)], Machine.of(self.cluster(gpus))
            flat = replace(base, tier_factor=np.full_like(base.tier_factor, seen.bytes_per_s_factor),
                           tier_latency_s=np.full_like(base.tier_latency_s, seen.latency_s))  # fmt: skip
            found = step_seconds(self.shape, flat, choice, 16 * replicas, self.profile)
            return {name: float(np.ravel(each)[0]) for name, each in found.items()}

        pipe, summed = terms(max(hops, default=0)), terms(max(sums, default=0))
        return sum(pipe.values()) - pipe["dp"] + summed["dp"]


# -- large cases


def drawn() -> machines.Fleet:
    return machines.regular(847, SIZE, leaf_nodes=8)


def large(fleet: machines.Fleet) -> list[dict[str, float]]:
    steps, rows = Steps(), []
    policies = {"ours": by_ours, "best fit": by_best_fit, "random": by_chance}
    for gpus, nodes in JOBS[:4] if SMOKE else JOBS:
        row: dict[str, float] = {"gpus": gpus, "nodes": nodes}
        for name, policy in policies.items():
            found, seconds = [], []
            for seed in range(SEEDS):
                cells = Cells(SIZE, fleet.levels, fleet.paths)
                busy = random.Random(seed).sample(range(cells.num_nodes), int(BUSY * cells.num_nodes))
                cells.take([(node, SIZE) for node in busy])
                placed = policy(cells, nodes, gpus // SIZE // nodes)
                found.append(spreads(cells, placed))
                seconds.append(steps.seconds(cells, placed))
            row |= {
                f"{name} spread": statistics.mean(mean for mean, _, _ in found),
                f"{name} leaves": statistics.mean(leaves for _, leaves, _ in found),
                f"{name} s": statistics.mean(seconds),
            }
        shown = "  ".join(f"{row[n + ' spread']:6.2f} {row[n + ' leaves']:6.1f} {row[n + ' s']:7.3f}" for n in policies)
        print(f"{gpus:>5} GPUs, replicas of {nodes}  {shown}", flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--topology", type=Path)
    asked = parser.parse_args()
    print(machine())
    real = bool(asked.topology) and not SMOKE
    fleet = machines.read(asked.topology) if real else drawn()
    ratios = small(SMALL)
    print(f"{SMALL} small cases: spread of replicas {ratios['replicas']:.3f}, of gangs {ratios['gang']:.3f} of exact")
    print(f"{len(fleet.names)} hosts, {BUSY:.0%} in use; leaves of a replica, leaves of the gang, step in seconds:")
    print(f"{'':26}{'ours':^23}{'best fit':^23}{'random':^23}")
    rows = large(fleet)
    mean = {key: statistics.mean(row[key] for row in rows) for key in rows[0] if key not in ("gpus", "nodes")}
    others = ("best fit", "random")
    faster = {name: mean[f"{name} s"] / mean["ours s"] for name in others}
    print(f"a step in the mean: best fit {faster['best fit']:.3f} x ours, random {faster['random']:.3f} x ours")
    ok = real and len(fleet.names) == 847 and max(ratios.values()) <= WITHIN
    for name in others:
        ok = ok and all(row["ours spread"] <= row[f"{name} spread"] for row in rows)
        ok = ok and mean["ours spread"] < mean[f"{name} spread"] and mean["ours s"] < mean[f"{name} s"]
    finish("placement", ok, real_topology=real, small_cases=SMALL, of_exact={k: round(v, 4) for k, v in ratios.items()},
           bar=WITHIN, jobs=len(rows), mean={k: round(v, 4) for k, v in mean.items()},
           step_over_ours={k: round(v, 4) for k, v in faster.items()})  # fmt: skip


if __name__ == "__main__":
    main()
