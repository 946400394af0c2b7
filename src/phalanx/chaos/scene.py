"""Follow the record of a live run: its processes, and the generation that they are in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.chaos.hosts import Switch

Event = dict[str, Any]

GONE = ("died", "is silent")  # how the record reports the end of a node; other words leave it alive


@dataclass
class Scene:
    """The known state of the run. `look` reads the events added since the last call."""

    folder: Path
    door: Path = Path()  # folder for orders to processes
    network: Switch | None = None
    beat_s: float = 5.0
    workers: dict[int, Event] = field(default_factory=dict)  # by rank: pid, node, worker
    services: dict[tuple[str, str], int] = field(default_factory=dict)  # node, name -> pid
    agents: dict[str, int] = field(default_factory=dict)  # node -> pid; the controller is one of them
    forms: list[Event] = field(default_factory=list)
    step: int = 0  # last committed step, as far as is known
    generation: int = 0  # the last generation that committed a step
    events: list[Event] = field(default_factory=list)
    rows: list[Event] = field(default_factory=list)  # rows of the metrics
    _at: int = 0
    _metrics_at: int = 0

    def look(self) -> list[Event]:
        new = []
        self._at, lines = _lines(self.folder / "events.jsonl", self._at)
        for event in lines:
            new.append(event)
            self._take(event)
        self._metrics_at, rows = _lines(self.folder / "metrics.jsonl", self._metrics_at)
        for row in rows:
            self.step = row["step"] + 1
        self.rows += rows
        self.events += new
        return new

    def _take(self, event: Event) -> None:
        kind = event["type"]
        if kind == "started" and event["worker"] >= 0:
            self.workers[event["rank"]] = event
        elif kind == "started":
            self.services[event["node"], event["service"]] = event["pid"]
        elif kind == "exit":
            if self.workers.get(event["rank"], {}).get("worker") == event["worker"]:
                del self.workers[event["rank"]]
        elif kind == "node":
            if "pid" in event:
                self.agents[event["node"]] = event["pid"]
            elif event["what"].startswith(GONE):
                self.agents.pop(event["node"], None)
                gone = [rank for rank, w in self.workers.items() if w["node"] == event["node"]]
                for rank in gone:
                    del self.workers[rank]
                self.services = {key: pid for key, pid in self.services.items() if key[0] != event["node"]}
        elif kind == "control form":
            self.forms.append(event)
        elif kind == "first commit":
            self.generation = event["generation"]


def _lines(path: Path, at: int) -> tuple[int, list[Event]]:
    try:
        with path.open("rb") as file:
            file.seek(at)
            data = file.read()
    except FileNotFoundError:
        return at, []
    whole = data.rpartition(b"\n")[0] + b"\n" if b"\n" in data else b""
    return at + len(whole), [json.loads(line) for line in whole.splitlines()]
