"""Start runs on an engine as a user does, by `phalanx train` with --on, and read their records."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

PHALANX = [sys.executable, "-P", "-m", "phalanx.cli.main"]
JOB = {
    "model.dim": 16, "model.num_layers": 1, "model.num_heads": 2, "model.num_kv_heads": 2, "model.ffn_dim": 32,
    "layout.replica": 2, "layout.shard": 1, "layout.tp": 1, "layout.ranks_per_node": 1,
    "train.seq_len": 32, "train.global_batch": 30, "train.micro_batch": 1, "train.reduction": "exact",
    "data.max_mb": 0.1, "checkpoint.every_steps": 100_000,
    "recovery.on": "true", "recovery.beat_s": 0.5, "recovery.restart_s": 1.0, "run.hang_timeout_s": 30.0,
}  # fmt: skip


PATIENCE_S = 1800.0  # without any change means a hang; the speed of the machine does not matter


def until(what, told=lambda: "", changes=lambda: None):
    """Wait until `what()` is true, as long as `changes()` keeps changing."""
    seen, deadline = changes(), time.monotonic() + PATIENCE_S
    while not (found := what()):
        if time.monotonic() > deadline:
            before, seen, deadline = seen, changes(), time.monotonic() + PATIENCE_S
            assert seen != before, f"it did not happen, and nothing has changed for {PATIENCE_S:g} s\n{told()}"
        time.sleep(0.2)
    return found


class Training:
    """`phalanx train` in its own working folder. `before`: a command that runs it."""

    def __init__(self, folder: Path, name: str, *args: str, env: dict[str, str], before=(), **values: object):
        self.folder, self.name = folder, name
        folder.mkdir(exist_ok=True)
        values = JOB | {"name": name, "checkpoint.dir": str(folder / f"{name}-checkpoints")} | values
        sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
        self.log = folder / f"{name}.log"
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*before, *PHALANX, "train", *sets, *args],
                env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip

    @property
    def records(self) -> list[Path]:
        """Return the records, the oldest first."""
        return sorted((self.folder / "runs").glob(f"{self.name}-2*"))

    def read(self, file: str, record: int = -1) -> list[dict]:
        path = self.records[record] / file if self.records else Path("/nowhere")
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def events(self, kind: str, record: int = -1) -> list[dict]:
        return [event for event in self.read("events.jsonl", record) if event["type"] == kind]

    def summary(self, record: int = -1) -> dict:
        return json.loads((self.records[record] / "summary.json").read_text())

    def steps(self, record: int = -1) -> int:
        return len(self.read("metrics.jsonl", record))

    def ledger(self, record: int = -1) -> dict[int, tuple]:
        return {r["step"]: (r["samples"], r["loss_bits"], r["norm_bits"]) for r in self.read("ledger.jsonl", record)}

    def at_work(self) -> dict[int, str]:
        """Map each rank to its node."""
        return {e["rank"]: e["node"] for e in self.events("started") if e["rank"] >= 0}

    def ready_nodes(self) -> set[str]:
        """Return the nodes whose services are up."""
        return {e["node"] for e in self.events("started") if e["service"] == "keeper"}

    def is_whole(self) -> bool:
        forms, started = self.events("control form"), self.events("control started")
        whole = forms and len(forms[-1]["replicas"]) == max(len(form["replicas"]) for form in forms)
        return bool(whole and started and started[-1]["generation"] == forms[-1]["generation"])

    def told(self) -> str:
        return f"{self.log.read_text()[-3000:]}\n{self.read('events.jsonl')[-8:]}"

    def until(self, what):
        """Wait for `what()`, as long as the command that shows the run is alive."""

        def look():
            found = what()
            assert found or self.process.poll() is None, self.told()
            return found

        return until(look, self.told, self._size)

    def _size(self) -> int:
        """Return the size of all output so far."""
        files = [self.log, *(path for record in self.records for path in record.glob("*.jsonl"))]
        return sum(path.stat().st_size for path in files)

    def end(self) -> int:
        until(lambda: self.process.poll() is not None, self.told, self._size)
        return self.process.returncode


def run_here(folder: Path, name: str, env: dict[str, str], **values: object) -> Training:
    """Run the same job undisturbed, with one replica on this machine: the exact reduction gives it the same bits."""
    run = Training(folder, name, env=env, **values | {"layout.replica": 1, "recovery.spares": 0})
    assert run.end() == 0, run.told()
    return run
