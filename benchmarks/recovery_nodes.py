"""A whole node is lost while a spare stands by, and the controller is killed: how much the training notices.

The quickstart's layout (two replicas of two ranks, two nodes and a spare), run by `phalanx train`. First every process
of a node is killed, ROUNDS times, each time after the dead node has come back as a spare: seconds from the kill to the
next committed step, with the processes of the survivors compared before and after. Then the controller is killed, as
often, in turns with undisturbed stretches of the same length: the time of every step while it is gone and until it has
caught up, against that of the undisturbed steps.

Bar: every node is replaced by the spare and no survivor's process changes; no step is lost or redone for a controller's
death, and none takes longer than the 99th percentile of the undisturbed ones, give or take what as many undisturbed
steps exceed it by chance (counted, and a binomial bound of 1 % taken)."""

from common import SMOKE, finish, machine, options  # isort: skip

import contextlib
import itertools
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from math import comb
from pathlib import Path

from phalanx.chaos.faults import tree_of
from phalanx.chaos.scene import Scene

ROUNDS, STRETCH_S = (1, 1.0) if SMOKE else (5, 4.0)
CALM_S = 0.2 if SMOKE else 3.0  # quiet time before a kill
PATIENCE_S = 300.0 if SMOKE else 60.0


class Run:
    def __init__(self, folder: Path):
        values = {"train.steps": 100_000, "train.global_batch": 4, "train.micro_batch": 2, "run.dir": folder}
        values |= {"checkpoint.every_steps": 100_000, "recovery.restart_s": 1, "recovery.deaths_per_node": 1000}
        sets = [part for name, value in values.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "phalanx.cli.main", "train", *sets]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not (found := list(folder.glob("quickstart-*"))):
            time.sleep(0.05)
        self.scene = Scene(found[0])

    def until(self, happened):
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.process.poll() is None and time.monotonic() < deadline, self.scene.events[-5:]
            self.scene.look()
            time.sleep(0.002)

    def wait(self, seconds):
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def until_full(self):
        """Wait until all nodes are present and both replicas are in the gang: the healed one joins a while after the
        loss."""
        scene = self.scene
        self.until(lambda: len(scene.agents) == len(scene.workers) == 4 and len(scene.forms[-1]["replicas"]) == 2)
        self.wait(CALM_S)

    def pids(self):
        return {rank: w["pid"] for rank, w in self.scene.workers.items()}

    def lose_node(self):
        """Wait until all nodes are present, and kill one that has a place."""
        scene = self.scene
        self.until_full()
        before, generation, seen = self.pids(), scene.generation, len(scene.forms)
        name = scene.workers[0]["node"]
        lost = {rank for rank, w in scene.workers.items() if w["node"] == name}
        killed = time.time()
        for pid in tree_of(scene.agents[name]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.until(lambda: scene.generation > generation)
        at = {e["type"]: e["time"] for e in reversed(scene.events) if e["time"] > killed}
        self.until(lambda: len(scene.workers) == 4)
        after, form = self.pids(), scene.forms[seen]
        kept = all(after[rank] == pid for rank, pid in before.items() if rank not in lost)
        marks = [killed, at["node"], at["control form"], at["control started"], at["first commit"]]
        parts = [b - a for a, b in itertools.pairwise(marks)]
        return {"seconds": marks[-1] - killed, "parts": parts, "kept": kept, "replicas": len(form["replicas"])}

    def steps(self, disturb):
        """Return the step times of a stretch."""
        scene = self.scene
        first, seen = len(scene.rows), len(scene.forms)
        disturb()
        self.wait(STRETCH_S)
        self.until(lambda: len(scene.rows) > first + 1)  # a busy machine may be slow
        rows = scene.rows[first:]
        numbers = [row["step"] for row in rows]
        whole = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        return [row["time_s"] for row in rows], whole and len(scene.forms) == seen

    def kill_controller(self):
        os.kill(self.scene.agents["controller"], signal.SIGKILL)

    def stop(self):
        self.process.terminate()  # SIGINT may be ignored in a background benchmark
        self.process.wait(60)


def main():
    options(__doc__).parse_args()
    print(f"a lost node and a killed controller; {machine()}")
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="phalanx-nodes-", dir=memory if memory.exists() else None))
    try:
        run = Run(folder)
        try:
            lost = [run.lose_node() for _ in range(ROUNDS)]
            run.until_full()
            plain, killed, whole = [], [], True
            for _ in range(ROUNDS):
                plain += run.steps(lambda: None)[0]
                times, same = run.steps(run.kill_controller)
                killed += times
                whole = whole and same
                run.until(lambda: "controller" in run.scene.agents)
        finally:
            run.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{'node lost':>10}{'detect':>9}{'decide':>9}{'re-form':>9}{'redo':>9}{'total s':>9}  survivors' processes")
    for i, row in enumerate(lost, 1):
        cells = "".join(f"{part:9.2f}" for part in row["parts"])
        print(f"{i:10}{cells}{row['seconds']:9.2f}  {'the same' if row['kept'] else 'CHANGED'}")
    bound = statistics.quantiles(plain, n=100)[98]
    over = sum(time_s > bound for time_s in killed)
    n = len(killed)
    chance = sum(comb(n, k) * 0.01**k * 0.99 ** (n - k) for k in range(over, n + 1))  # the chance of as many or more
    print(f"\n{'steps':24}{'count':>7}{'median ms':>11}{'p99 ms':>9}{'longest ms':>12}")
    for name, times in {"undisturbed": plain, "controller killed": killed}.items():
        cells = f"{statistics.median(times) * 1e3:11.1f}{statistics.quantiles(times, n=100)[98] * 1e3:9.1f}"
        print(f"{name:24}{len(times):7}{cells}{max(times) * 1e3:12.1f}")
    print(f"{over} of {n} steps took longer than the undisturbed p99; by chance as many with probability {chance:.2f}")
    kept = all(row["kept"] for row in lost)
    finish(
        "recovery_nodes",
        kept and whole and chance > 0.01,
        node_loss_s=round(statistics.median(row["seconds"] for row in lost), 2),
        node_loss_range_s=[round(f(row["seconds"] for row in lost), 2) for f in (min, max)],
        survivors_kept=kept,
        steps_lost_with_controller=0 if whole else None,
        p99_ms={
            "undisturbed": round(bound * 1e3, 1),
            "killed": round(statistics.quantiles(killed, n=100)[98] * 1e3, 1),
        },
        over_p99=over,
        of=n,
    )


if __name__ == "__main__":
    main()
