"""From `phalanx train` to the first step, by phase: on this machine, and on four hosts made of namespaces that are
entered by ssh (root, iproute2, util-linux, openssh-server; data on S3). And the messages that 100 and 1,000 agents cost
the controller while they join, through a real aggregator.

Bar: every phase is told; with 1,000 nodes the controller hears at most 3x the messages of 100 while they join, and each
agent sends a constant number.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from common import SMOKE, finish, machine, options
from fanin import LOOPBACK, Child, count_bytes, serve

from phalanx.chaos.hosts import why_not
from phalanx.control.journaled import Plan
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from phalanx.runtime import controller as control
from phalanx.runtime import inventory
from phalanx.runtime.joining import Joiner
from phalanx.runtime.secret import load_secret
from phalanx.runtime.transport import Loop
from tests.hosts.fleet import JOB, NETWORKS, SSHD, TRAINERS, Fleet, Training

COUNTS = (10, 40) if SMOKE else (100, 1_000)
PHASES = ("data", "controller", "agents join", "services", "ranks up and built", "groups", "first step")


def phases_of(events: list[dict], began: float) -> dict[str, float]:
    """Seconds of each, from when the command was started. Nodes are counted as far as the layout needs them."""
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
    control.write_plan(place, Plan(Layout(replica=nodes, ranks_per_node=1), 10, 0, 0, Policy(save=False)))
    control.write_spec(place, {"version": "x", "filler": "y" * 20_000})
    quiet = control.Printer((Path(folder) / "lines").open("w").fileno())
    made = control.Controller(place, secret, LOOPBACK, aggregate=True, printer=quiet)
    counted = count_bytes(made.server)
    serve(pipe, made.loop, made.aggregator.server.address, lambda: dict(counted))


def joins(folder: str, nodes: int) -> dict[str, float]:
    """So many agents join at once."""
    child, loop, served = Child(lead, folder, nodes), Loop(), set()
    secret = load_secret(Path(folder) / "secret")
    here = inventory.about(LOOPBACK)
    before, began = child.figures(), time.monotonic()
    for i in range(nodes):
        about = {"life": str(i), "version": "x", "about": here | {"address": f"h{i}"}}
        heard = partial(lambda i, incarnation, spec: served.add(i), i)
        Joiner(loop, secret, f"n{i}", [tuple(child.address)], about, heard, give_up_s=120)
        loop.turn(0.0)
    while len(served) < nodes:
        loop.turn(0.1)
    after = child.figures()
    child.close()
    found = {key: after[key] - before[key] for key in ("heard", "bytes", "cpu_s")}
    return {**found, "seconds": time.monotonic() - began}


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
        counted = {nodes: joins(folder, nodes) for nodes in COUNTS}
    if tables:
        print(f"{'seconds':20}" + "".join(f"{place:>14}" for place in tables))
        for name in PHASES:
            print(f"{name:20}" + "".join(f"{table[name]:14.2f}" for table in tables.values()))
        print(f"{'all':20}" + "".join(f"{sum(table.values()):14.2f}" for table in tables.values()))
    for nodes, found in counted.items():
        print(
            f"{nodes} agents join: {found['heard']} messages at the controller, {found['bytes'] / 1e3:.0f} kB, "
            f"{found['cpu_s']:.2f} s of CPU, {found['seconds']:.1f} s"
        )
    few, many = (counted[nodes]["heard"] for nodes in COUNTS)
    ok = len(tables) == 2 and many <= 3 * few
    finish(
        "first_step", ok, phases={p: {k: round(v, 2) for k, v in t.items()} for p, t in tables.items()}, joins=counted
    )


if __name__ == "__main__":
    main()
