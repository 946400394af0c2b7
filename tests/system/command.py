"""The real `phalanx` command in a process of its own, and everything that it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from tests import forked, warm
from tests.runtime.conftest import alive_with, wait_gone

PHALANX = Path(sys.executable).with_name("phalanx")
# One layer, two ranks that wait for each other in every pass: just enough for a failure.
TINY = {
    "model.dim": 16,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.ffn_dim": 32,
    "layout.replica": 1,
    "layout.shard": 1,
    "layout.tp": 2,
    "layout.ranks_per_node": 0,
    "recovery.on": "false",
    "recovery.spares": 0,
    "train.reduction": "fast",
    "train.seq_len": 32,
    "train.global_batch": 2,
    "train.micro_batch": 2,
    "train.steps": 100_000,
    "data.max_mb": 0.1,
}
GONE_S = 30.0


def sets(values: dict[str, object]) -> list[str]:
    return [part for name, value in values.items() for part in ("--set", f"{name}={value}")]


@dataclass
class Ended:
    code: int
    out: str
    err: str
    left: dict[int, str]  # processes that outlived the command
    scratch: list[str]  # files in its temporary directory
    shared: list[str]  # named shared memory of its ranks
    runs: list[Path]  # the folders of its runs
    rows: list[dict] = field(default_factory=list)
    summary: dict | None = None

    def check_clean(self) -> None:
        """Check that nothing is left: no traceback of ours, no process (and with it no port), no shared memory, no
        half-written file."""
        lines = (self.out + self.err).splitlines()
        assert not [line for line in lines if line.startswith("Traceback")], self.err
        assert self.left == {}
        assert self.scratch == [] and self.shared == []
        assert [f for run in self.runs for f in run.rglob("*") if f.suffix in (".tmp", ".partial")] == []


class Command:
    """`phalanx train` in a directory of its own, in which it keeps its records under runs/."""

    def __init__(self, directory: Path, *args: object, limit_kb: int = 0, env: dict[str, str] | None = None):
        self.directory, self.token = directory, uuid.uuid4().hex
        self.scratch = directory / "scratch"
        self.scratch.mkdir(parents=True)
        given = {"PHALANX_TOKEN": self.token, "TMPDIR": str(self.scratch)}
        limit = f"ulimit -f {limit_kb} && " if limit_kb else ""  # no file may grow beyond this, as on a full disk
        self.process = subprocess.Popen(
            ["bash", "-c", f'{limit}exec "$@"', "bash", PHALANX, "train", *map(str, args)],
            cwd=directory,
            env={**os.environ, **({} if limit_kb else warm.start()), **given, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def runs(self) -> list[Path]:
        return sorted((self.directory / "runs").glob("[!.]*"))

    def rows(self) -> list[dict]:
        file = self.runs[0] / "metrics.jsonl" if self.runs else None
        text = file.read_text() if file and file.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def wait_until(self, happened, timeout: float = 240.0) -> None:
        deadline = time.monotonic() + timeout
        while not happened() and self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if not happened():
            self.process.kill()
            raise AssertionError(f"it did not come so far: {self.end()}")

    def events(self, kind: str = "") -> list[dict]:
        file = self.runs[0] / "events.jsonl" if self.runs else None
        lines = file.read_text().splitlines(keepends=True) if file and file.exists() else []
        said = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in said if kind in ("", event["type"])]

    def signal(self, *numbers: int, pid: int | None = None) -> None:
        for number in numbers:
            os.kill(pid or self.process.pid, number)
            time.sleep(0.003 if len(numbers) > 1 else 0)

    def end(self, timeout: float = 240.0) -> Ended:
        try:
            out, err = self.process.communicate(timeout=timeout)
            left = wait_gone(self.token, GONE_S)
        finally:
            for pid in alive_with(self.token):  # of this command only: nobody else has the token
                os.kill(pid, 9)
        runs, pids = self.runs, [str(e["pid"]) for e in self.events("started")]
        summary = runs[0] / "summary.json" if runs else None
        return Ended(
            self.process.returncode,
            out,
            err,
            left,
            [p.name for p in self.scratch.iterdir() if not p.name.startswith("torchinductor_")],  # torch's own cache
            [name for name in os.listdir("/dev/shm") if any(pid in name for pid in pids)],
            runs,
            self.rows(),
            json.loads(summary.read_text()) if summary and summary.exists() else None,
        )


def train(directory: Path, *args: object, **env: str) -> Ended:
    return Command(directory, *args, env=env).end()


def phalanx(directory: Path, *args: object) -> subprocess.CompletedProcess[str]:
    """Run any other command."""
    return forked.phalanx(*args, cwd=directory)
