"""Ten real training jobs share eight nodes of one machine through `phalanx queue`. A gang of higher priority makes
others shrink, the next one makes them save and leave, the queue and a run's controller are killed, a node dies. All
come back, and end with the bits of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from pathlib import Path
from random import Random

import pytest

from phalanx.chaos import faults
from phalanx.chaos.scene import Scene
from phalanx.core.ledger import Record
from tests.runtime.conftest import alive_with, wait_gone
from tests.system.command import PHALANX, TINY, Command, sets

PATIENCE_S = 1800.0  # the machine may be busy; nothing is judged by time
STEPS, SHORT = 1200, 30  # enough steps that the first jobs still run when the others come
ELASTIC = TINY | {
    "layout.replica": 4,
    "layout.tp": 1,
    "recovery.on": "true",
    "recovery.min_replicas": 2,
    "train.reduction": "exact",
    "train.global_batch": 8,
    "train.steps": STEPS,
    "run.threads": 1,
}
GANG = ELASTIC | {"recovery.min_replicas": 4}
ALONE = ELASTIC | {"layout.replica": 1, "recovery.min_replicas": 1, "train.steps": SHORT}


class Served:
    """A queue in a process of its own, which can be killed and restarted."""

    def __init__(self, folder: Path):
        self.folder, self.token = folder, uuid.uuid4().hex
        folder.mkdir()
        (folder / "job.toml").write_text('name = "shared"\n')
        self.start()
        self.wait(lambda: (folder / "queue" / "state.json").is_file())

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [PHALANX, "queue", "start", "--nodes", "8"], cwd=self.folder, stdout=log, stderr=log,
                env={**os.environ, "PHALANX_TOKEN": self.token},
            )  # fmt: skip

    def ask(self, *words: object) -> str:
        done = subprocess.run([PHALANX, *map(str, words)], cwd=self.folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def submit(self, values: dict[str, object], priority: int = 0) -> str:
        return self.ask("queue", "submit", "job.toml", "--priority", priority, *sets(values))

    def jobs(self) -> dict[str, dict]:
        return json.loads((self.folder / "queue" / "state.json").read_text())["jobs"]

    def nodes(self) -> dict[str, str]:
        return json.loads((self.folder / "queue" / "state.json").read_text())["nodes"]

    def kill_node(self, name: str) -> None:
        os.kill(json.loads((self.folder / "queue" / "nodes" / f"{name}.json").read_text())["pid"], signal.SIGKILL)

    def wait(self, happened) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.process.poll() is None, (self.folder / "log").read_text()
            said = self.ask("queue", "ps") if time.monotonic() > deadline else ""
            assert not said, f"it did not come so far:\n{said}"
            time.sleep(0.1)

    def runs(self, job: str) -> list[Path]:
        return sorted((self.folder / "queue" / "jobs" / job / "runs").glob("[!.]*"), key=lambda p: p.stat().st_ctime)

    def steps(self, job: str) -> dict[int, tuple]:
        """Return what was committed, over all runs of a job; a later record of a step replaces an abandoned one."""
        return {step: said for run in self.runs(job) for step, said in ledger(run).items()}

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()
        left = wait_gone(self.token, 30)
        for pid in alive_with(self.token):
            os.kill(pid, signal.SIGKILL)
        assert left == {}


def ledger(run: Path) -> dict[int, tuple]:
    file = run / "ledger.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    records = [Record.from_line(line) for line in lines if line.endswith("\n")]
    return {r.step: (r.samples, r.data_version, r.loss_bits, r.norm_bits) for r in records}


def digests(run: Path) -> set[tuple[str, str]]:
    said = json.loads((run / "summary.json").read_text())["digests"]
    return {(d["weights"], d["optimizer"]) for d in said if d}


@pytest.mark.slow
def test_ten_jobs_share_eight_nodes_and_end_with_the_bits_of_undisturbed_runs(tmp_path):
    queue = Served(tmp_path / "served")
    try:
        elastic = [queue.submit(ELASTIC) for _ in range(2)]
        queue.wait(lambda: all(len(queue.steps(job)) > 5 for job in elastic))

        # Higher priority: the others give up replicas, and train on.
        first = queue.submit(GANG | {"train.steps": 100_000}, priority=1)
        queue.wait(lambda: queue.jobs()[first]["state"] == "running")
        assert [queue.jobs()[job]["replicas"] for job in elastic] == ["2/4", "2/4"]
        assert [queue.jobs()[job]["stops"] for job in elastic] == [0, 0]
        before = [len(queue.steps(job)) for job in elastic]
        queue.wait(lambda: all(len(queue.steps(j)) > n + 2 for j, n in zip(elastic, before, strict=True)))

        # More of it: the others save, and leave.
        second = queue.submit(GANG | {"train.steps": SHORT}, priority=1)
        queue.wait(lambda: queue.jobs()[second]["state"] == "running")
        assert [queue.jobs()[job]["state"] for job in elastic] == ["waiting", "waiting"]
        assert all(len(queue.steps(job)) < STEPS for job in elastic), "they were done before they were stopped"
        alone = [queue.submit(ALONE) for _ in range(6)]

        # The queue is killed: the jobs continue, and the next queue finds them.
        queue.wait(lambda: queue.steps(first))
        queue.process.kill()
        queue.process.wait()
        seen = len(queue.steps(first))
        queue.start()
        queue.wait(lambda: len(queue.steps(first)) > seen)
        assert len(queue.runs(first)) == 1, "it was started a second time"
        assert queue.jobs()[first]["state"] == "running"
        queue.ask("queue", "cancel", first)

        # A run loses its controller, and then a node with all that it has there. Nobody tells the queue of the node.
        queue.wait(lambda: queue.jobs()[elastic[0]]["state"] == "running")
        known = len(queue.steps(elastic[0]))
        queue.wait(lambda: len(queue.steps(elastic[0])) > known + 5)
        scene = Scene(queue.runs(elastic[0])[-1])
        scene.look()
        faults.controller(scene, Random(0), lambda *_: None)
        known = len(queue.steps(elastic[0]))
        queue.wait(lambda: len(queue.steps(elastic[0])) > known + 2)
        lost = queue.jobs()[elastic[0]]["nodes"][-1]
        queue.kill_node(lost)
        queue.wait(lambda: any(f"node {lost} is down (its agent" in line for line in queue.jobs()[elastic[0]]["why"]))
        assert f"node {lost} is down (its agent" in queue.ask("why", elastic[0])
        queue.wait(lambda: any("said to be lost" in event.get("what", "") for event in scene.look()))
        queue.wait(lambda: queue.nodes()[lost] == "up")

        names = [*elastic, first, second, *alone]
        queue.wait(lambda: all(queue.jobs()[name]["state"] in ("done", "failed", "cancelled") for name in names))
        states = {name: queue.jobs()[name]["state"] for name in names}
        assert states == dict.fromkeys(names, "done") | {first: "cancelled"}
        assert all(queue.jobs()[job]["stops"] >= 1 and len(queue.runs(job)) >= 2 for job in elastic)
    finally:
        queue.end()

    for jobs, values in ((elastic, ELASTIC), (alone, ALONE)):
        clean = Command(tmp_path / f"clean-{values['layout.replica']}", *sets(values)).end(PATIENCE_S)
        assert clean.code == 0, clean.err
        (run,) = clean.runs
        wanted = ledger(run)
        assert len(wanted) == values["train.steps"]
        for job in jobs:
            assert queue.steps(job) == wanted, f"{job} took another way"
            assert digests(queue.runs(job)[-1]) == digests(run), f"{job} has other weights"
