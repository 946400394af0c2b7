"""One level against two: all-reduce, reduce-scatter and all-gather of 4 KB to 16 MB on two nodes of 2 to 4 ranks. The
table also shows what collectives.replica and collectives.shard = "auto" would choose, and the size from which two
levels are better, measured and by the alpha-beta formula. Then, for orientation: steps of the engine by prefetch depth
and bucket size.

A node is a network namespace; the two are joined by a link with its rate limited (and delayed, where the kernel can).
That takes root and iproute2; without them all ranks share one loopback, and nothing is judged.

Bar: at every size on separated nodes, what auto chooses takes at most 1.15 times the better one's time, or the
difference is within noise (the 95 % interval of the ratio over the rounds includes 1)."""

from common import SMOKE, bootstrap, finish, machine, options  # isort: skip  (first: it makes tests/ importable)

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from statistics import median

from phalanx.core.job import CollectivesConfig
from phalanx.core.shape import ModelConfig
from phalanx.parallel.algorithms import choose
from tests.cases import make_job
from tests.pool import Pool

SIZES = [2**k for k in range(12, 25, 2)]
LINK_SIZES, KINDS = [2**12, 2**22], ("inside", "across")
OPERATIONS = {"all-reduce": ("replica", "sum"), "reduce-scatter": ("shard", "sum"), "all-gather": ("shard", "gather")}
PER_NODE = (2, 3, 4)
ROUNDS = 9
MBIT, DELAY_US = 300, 200
LIMIT = 1.15
MODEL = ModelConfig(vocab_size=257, dim=256, num_layers=4, num_heads=8, num_kv_heads=4, ffn_dim=688)
STEPS = 12
VARIANTS = [((1, 4, 1), "prefetch", (0, 1, 2)), ((4, 1, 1), "bucket_mb", (0.25, 1.0, 5.0, 25.0))]
if SMOKE:
    SIZES, LINK_SIZES, PER_NODE, ROUNDS = [2**12, 2**18], [2**12, 2**18], (2,), 1
    MODEL = ModelConfig(vocab_size=32, dim=32, num_layers=2, num_heads=4, num_kv_heads=4, ffn_dim=64)
    STEPS, VARIANTS = 1, [((1, 4, 1), "prefetch", (0, 1)), ((4, 1, 1), "bucket_mb", (0.25, 1.0))]


class Nodes:
    """Two namespaces and the link between them, if they can be created."""

    def __init__(self):
        self.names, self.shaping = [], ""

    def __enter__(self):
        if os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc"):
            try:
                self._make()
            except (subprocess.CalledProcessError, OSError) as error:
                print(f"no namespaces: {getattr(error, 'stderr', '') or error}".strip())
                self._remove()
        return self

    def __exit__(self, *_):
        self._remove()

    @property
    def separated(self) -> bool:
        return bool(self.names)

    def command(self, node: int) -> list[str]:
        return ["ip", "netns", "exec", self.names[node]] if self.separated else []

    def host(self, node: int) -> str:
        return f"10.211.0.{node + 1}" if self.separated else "127.0.0.1"

    def _make(self):
        wanted = [f"phalanx{os.getpid()}{letter}" for letter in "ab"]
        for name in wanted:
            _run("ip", "netns", "add", name)
            self.names.append(name)
        a, b = wanted
        _run("ip", "link", "add", "node", "netns", a, "type", "veth", "peer", "name", "node", "netns", b)
        for node, name in enumerate(wanted):
            _run("ip", "-n", name, "addr", "add", f"{self.host(node)}/30", "dev", "node")
            _run("ip", "-n", name, "link", "set", "node", "mtu", "9000", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            self._shape(name)

    def _shape(self, name):
        root = ("tc", "-n", name, "qdisc", "add", "dev", "node", "root")
        try:
            _run(*root, "netem", "delay", f"{DELAY_US}us", "rate", f"{MBIT}mbit", "limit", "100000")
            self.shaping = f"{MBIT} Mbit/s and {DELAY_US} us each way (netem)"
        except subprocess.CalledProcessError:
            _run(*root, "tbf", "rate", f"{MBIT}mbit", "burst", "64kb", "latency", "100ms")
            self.shaping = f"{MBIT} Mbit/s (tbf; this kernel has no netem, so no delay)"

    def _remove(self):
        while self.names:
            subprocess.run(["ip", "netns", "del", self.names.pop()], check=False, capture_output=True)


def _run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


def measure(nodes: Nodes, per_node: int) -> dict:
    ranks = 2 * per_node
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    env = os.environ | {
        "GLOO_SOCKET_IFNAME": "node" if nodes.separated else "lo",  # a node reaches its own address over loopback
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONPATH": str(Path(__file__).parent.parent),
    }
    args = dict(ranks=ranks, per_node=per_node, store=[nodes.host(0), port], sizes=SIZES, link_sizes=LINK_SIZES)
    children = []
    try:
        for rank in range(ranks):
            program = [sys.executable, str(Path(__file__).with_name("collectives_cases.py"))]
            command = [*nodes.command(rank // per_node), *program, json.dumps(args | dict(rank=rank, rounds=ROUNDS))]
            children.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        return json.loads(children[0].communicate(timeout=900)[0].splitlines()[-1])
    finally:
        for child in children:
            child.kill()
            child.wait()


def costs(kind: str, ranks: int, per_node: int, links: dict) -> dict[str, tuple[float, float]]:
    """Return the seconds per message and per byte, by the alpha-beta formulas for rings. The costs inside a node and
    across come from all-gathers over one stage alone. With two levels the ranks of a node share its link; with one
    level a single ring crosses it, and it sets the pace."""
    g, k, n = per_node, ranks // per_node, ranks
    step, byte = {}, {}
    for name, width in zip(KINDS, (g, k), strict=True):
        small, large = (links[f"{name} {size}"] for size in LINK_SIZES)
        step[name] = small / (width - 1)
        byte[name] = max(0.0, large - small) / (LINK_SIZES[1] - LINK_SIZES[0]) * width / (width - 1)
    alone = byte["across"] / g  # all g columns shared the link in that measurement
    once = {
        "flat": ((n - 1) * max(step.values()), (n - 1) / n * max(alone, byte["inside"])),
        "hierarchical": (
            (g - 1) * step["inside"] + (k - 1) * step["across"],
            (g - 1) / g * byte["inside"] + (k - 1) / k * byte["across"] / g,
        ),
    }
    return {name: (2 * a, 2 * b) if kind == "all-reduce" else (a, b) for name, (a, b) in once.items()}


def predicted_crossover(cost: dict[str, tuple[float, float]]) -> float:
    """Return the bytes from which two levels are faster; 0: always, infinite: never."""
    (flat_s, flat_byte), (two_s, two_byte) = cost["flat"], cost["hierarchical"]
    return max(0.0, (two_s - flat_s) / (flat_byte - two_byte)) if two_byte < flat_byte else float("inf")


def measured_crossover(rows) -> float:
    """Return the smallest measured size from which on two levels are never more than a twentieth slower."""
    sizes = [row["size_bytes"] for row in rows]
    slower = [row["size_bytes"] for row in rows if median(row["hierarchical"]) > 1.05 * median(row["flat"])]
    return min((size for size in sizes if not slower or size > max(slower)), default=float("inf"))


def shown(size: float) -> str:
    if size in (0, float("inf")):
        return "always" if size == 0 else "never"
    return f"{size / 1024:.0f} KB" if size < 2**20 else f"{size / 2**20:.1f} MB"


def show_collectives(nodes: Nodes) -> tuple[bool, dict]:
    ok, figures = True, {}
    for per_node in PER_NODE:
        answer = measure(nodes, per_node)
        links = [f"{shown(size)} {answer['links'][f'{k} {size}'] * 1e3:.2f} ms" for k in KINDS for size in LINK_SIZES]
        print(f"\n2 nodes x {per_node} ranks; all-gather inside {', '.join(links[:2])}; across {', '.join(links[2:])}")
        head = f"{'':16}{'size':>8}{'flat ms':>10}{'hier. ms':>10}{'flat / hier.':>14}{'95 %':>12}"
        print(f"{head}  {'auto':14}{'over the better':>16}")
        for kind, (axis, op) in OPERATIONS.items():
            rows = [row for row in answer["rows"] if row["kind"] == kind]
            good = [show_row(row, per_node, axis, op) for row in rows]
            ok &= all(good)
            found = measured_crossover(rows)
            formula = predicted_crossover(costs(kind, 2 * per_node, per_node, answer["links"]))
            print(
                f"{kind:16}two levels are better from: measured {shown(found)}, alpha-beta {shown(formula)}", flush=True
            )
            ratios = {
                shown(row["size_bytes"]): round(median(row["flat"]) / median(row["hierarchical"]), 2) for row in rows
            }
            name = f"2x{per_node} {kind}"
            figures[name] = {"from": shown(found), "alpha_beta": shown(formula), "flat_over_hierarchical": ratios}
    return ok, figures


def show_row(row: dict, per_node: int, axis: str, op: str) -> bool:
    places = [list(range(per_node)), list(range(per_node, 2 * per_node))]
    auto = choose(CollectivesConfig(), "gloo", axis, op, places, row["size_bytes"])
    flat, two = median(row["flat"]), median(row["hierarchical"])
    ratio, low, high = bootstrap([f / h for f, h in zip(row["flat"], row["hierarchical"], strict=True)])
    over = median(row[auto]) / min(flat, two)
    good = over <= LIMIT or low <= 1 <= high
    figures = f"{flat * 1e3:10.2f}{two * 1e3:10.2f}{ratio:14.2f}{f'{low:.2f}-{high:.2f}':>12}"
    verdict = "" if good else "  TOO SLOW"
    print(f"{row['kind']:16}{shown(row['size_bytes']):>8}{figures}  {auto:14}{over:16.2f}{verdict}")
    return good


def show_steps() -> dict:
    print(f"\nsteps of the engine, {MODEL.num_params / 1e6:.1f}M parameters, fp32, 4 ranks on one loopback, in turns")
    figures = {}
    with Pool(4) as pool:
        for layout, field, values in VARIANTS:
            job = make_job(layout, model=MODEL, precision="fp32", seq_len=64, steps=100, global_batch=8)
            variants = [{field: value} for value in values]
            answers = pool.run("benchmarks.collectives_cases:steps", job, variants=variants, steps=STEPS, timeout=600)
            for k, value in enumerate(values):
                slowest = [max(a[k][s] for a in answers) for s in range(STEPS)]
                middle, low, high = bootstrap(slowest)
                name = f"replica {layout[0]} x shard {layout[1]}, train.{field} = {value}"
                print(f"{name:48}{middle * 1e3:8.0f} ms   95 % {low * 1e3:.0f}-{high * 1e3:.0f}", flush=True)
                figures[f"{field}={value}"] = round(middle * 1e3)
    return figures


def main():
    options(__doc__).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces are removed
    print(machine())
    with Nodes() as nodes:
        where = f"separated: namespaces, {nodes.shaping}" if nodes.separated else "NOT separated: all on one loopback"
        print(f"nodes {where}; median of {ROUNDS} rounds in turns")
        ok, figures = show_collectives(nodes)
        separated = nodes.separated
    steps = show_steps()
    finish("collectives", ok or not separated, separated=separated, collectives=figures, step_ms=steps)


if __name__ == "__main__":
    main()
