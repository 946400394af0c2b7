"""Records of runs that never happened, for tests. The writer is the one that real runs use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from phalanx.core.ledger import GENESIS, Record, bits
from phalanx.observe.readings import READINGS
from phalanx.observe.record import RunRecord

T0 = 1_800_000_000.0


SPENT = {"data": 0.01, "forward": 0.02, "backward": 0.03, "gaps": 0.004, "reduce": 0.01, "vote": 0.003}
SPENT |= {"optimizer": 0.005, "checkpoint": 0.001}
READ = {name: {"mean": 0.5, "min": 0.25, "min_rank": 1, "max": 0.75, "max_rank": 0} for name in READINGS}


class Written:
    """A run of two replicas with a step every 0.1 s."""

    def __init__(self, root: Path, name: str = "job", replicas: int = 2, steps: int = 40, **meta: Any):
        job = {"name": name, "train": {"steps": steps}, "layout": {"replica": replicas}}
        self.record = RunRecord.create(root, name, {"started": T0, **meta}, {"job": job, "origins": {}})
        self.path, self.now, self.head, self.generation = self.record.path, T0, GENESIS, 1
        self.replicas = replicas

    def event(self, kind: str, after: float = 0.0, **fields: Any) -> None:
        self.now += after
        self.record.event({"time": self.now, "type": kind, **fields})

    def form(self, step: int = 0, replicas: int | None = None, rung: int = -1, **more: Any) -> None:
        there = list(range(self.replicas if replicas is None else replicas))
        about = {"generation": self.generation, "replicas": there, "rung": rung, "branch": False, "last": step}
        self.event("control form", 0.05, **{**about, "step": step, "reason": "all are there", **more})
        self.event("control started", 0.05, generation=self.generation)
        self.event("first commit", 0.1, generation=self.generation, step=step + 1)

    def begin(self) -> Written:
        self.event("node", 0.0, node="node-0", what="started", pid=1)
        self.now += 1.8
        self.form()
        return self

    def steps(self, first: int, last: int, loss: float = 2.0, time_s: float = 0.1, **more: Any) -> Written:
        for step in range(first, last):
            self.now += time_s
            row = {"step": step, "loss": loss - 0.01 * step, "time_s": time_s, "cursor": 4 * (step + 1)}
            row |= {"data_wait_s": 0.01, "tokens_per_s": 1e3, "mfu": 0.4, "grad_norm": 1.0, "lr": 1e-3}
            row |= {"readings": READ, "phases": SPENT, "slowest": [[0.066, 1], [0.06, 0]]}
            row |= {"served": {"web": 3, "code": 1}}
            row |= {"expert_load": 1.25, "expert_layer": "layers.1.moe", "expert_idle": 0}
            row["held"] = {"memory": step // 4 * 4, "buddy": step // 8 * 8}
            self.record.metric({"time": self.now, "generation": self.generation, **row, **more})
            value = bits(row["loss"])
            line = Record(step, self.head, (4 * step, 4 * step + 4), "v", value, bits(1.0), {}, self.generation, "")
            self.head = line.hash()
            self.record.ledger(line.to_line())
        return self

    def end(self, **summary: Any) -> Path:
        self.event("ended", ok=True, reason="done", step=0)
        self.record.finish({"status": "done", **summary})
        return self.path
