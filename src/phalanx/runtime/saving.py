"""The launcher's part in checkpoints: it hears from the keepers which ranks' files are written, has a checkpoint
committed when all are, watches what that costs, and announces the interval that follows from it. When ranks fail, it
has the newest snapshot that all of them have in memory written before the keepers end."""

from __future__ import annotations

import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.control.interval import Measured, durable_interval, memory_interval, mtbf_ns
from phalanx.core.job import Job
from phalanx.core.layout import Layout
from phalanx.runtime.wire import Message, Schemas, check

BODIES: Schemas = {
    "keeper": {"address": str, "port": int},
    "shard": {
        "checkpoint": str,
        "step": int,
        "generation": int,
        "rank": int,
        "size": int,
        "root": str,
        "drain_s": (int, float),
    },
    "committed": {"checkpoint": str, "step": int, "bytes": int, "commit_s": (int, float)},
    "checkpoint_failed": {"rank": int, "reason": str},
    "retained": {"step": int, "names": list},
    "retention_refused": {"checkpoint": str, "reason": str},
    "checkpoint_not_removed": {"checkpoint": str, "reason": str},
    "held": {"steps": dict},
}
OPEN_LIMIT = 8  # checkpoints under way, before the oldest is given up
SLOTS_TO_MEASURE = 50  # steps


def num_nodes(layout: Layout) -> int:
    return -(-layout.world_size // layout.ranks_per_node) if layout.ranks_per_node else 1


@dataclass
class Draining:
    step: int
    generation: int
    files: dict[int, tuple[int, str]] = field(default_factory=dict)
    drain_s: float = 0.0
    node: int = -1  # whose keeper commits it
    ordered: bool = False


class Saving:
    """`send(node, message)` reaches a node's keeper, `announce(message)` all ranks, `tell(event)` the run record."""

    def __init__(
        self,
        job: Job,
        send: Callable[[int, Message], None],
        announce: Callable[[Message], None],
        tell: Callable[[dict[str, Any]], None],
    ):
        self.job, self.send, self.announce, self.tell = job, send, announce, tell
        self.run, self.token = secrets.token_hex(8), secrets.token_hex(16)
        self.failures = 0  # that the run has seen
        self.sizes: dict[int, int] = {}  # generation -> ranks, where that is not the layout's
        self.announced: Message = {}  # the interval, last
        self.keepers: dict[int, Message] = {}  # node -> what it said of itself
        self.held: dict[int, Message] = {}
        self.ledger: Callable[[int], str | None] = lambda step: ""  # of the last step before; None: not there yet
        self.committed: set[int] = set()  # steps
        self.finished: set[int] = set()  # steps whose checkpoint is committed and older ones removed
        self.failed: set[int] = set()  # steps
        self._open: dict[str, Draining] = {}
        self._times: dict[int, float] = {}  # step -> its slowest rank's
        self._usual: deque[float] = deque(maxlen=SLOTS_TO_MEASURE)
        self._stalls: dict[int, float] = {}  # step of a snapshot -> the longest stall
        self._untold: dict[int, dict[str, Any]] = {}  # committed, but what they cost is not known yet
        self._version = 0
        self._began = time.monotonic()

    # -- what is heard

    def on_keeper(self, node: int, body: Message) -> None:
        check(body, BODIES)
        getattr(self, "_on_" + body["type"])(node, body)

    def _on_keeper(self, node: int, body: Message) -> None:
        self.keepers[node] = body

    def _on_held(self, node: int, body: Message) -> None:
        self.held[node] = body

    def _on_shard(self, node: int, body: Message) -> None:
        name = body["checkpoint"]
        open_ = self._open.setdefault(name, Draining(body["step"], body["generation"]))
        open_.files[body["rank"]] = (body["size"], body["root"])
        open_.node = node if open_.node < 0 else min(node, open_.node)
        open_.drain_s = max(open_.drain_s, body["drain_s"])
        while len(self._open) > OPEN_LIMIT:
            del self._open[next(iter(self._open))]
        self.commit_what_is_written()

    def commit_what_is_written(self, at_once: bool = False) -> None:
        """Once all ranks have reported the step too, so that its place in the ledger is known; unless `at_once`."""
        for name, open_ in self._open.items():
            if open_.ordered or len(open_.files) < self.sizes.get(open_.generation, self.job.layout.world_size):
                continue
            head = self.ledger(open_.step)
            if head is None and not at_once:
                continue
            open_.ordered = True
            files = [open_.files[rank] for rank in range(len(open_.files))]
            about = {"step": open_.step, "generation": open_.generation, "ledger": head or ""}
            cursor = open_.step * self.job.train.global_batch
            self.send(open_.node, {"type": "commit", "checkpoint": name, "files": files, "cursor": cursor, **about})

    def _on_committed(self, node: int, body: Message) -> None:
        step, name = body["step"], body["checkpoint"]
        self.committed.add(step)
        open_ = self._open.pop(name, None)
        drain_s = body["commit_s"] + (open_.drain_s if open_ else 0.0)
        self._untold[step] = {"checkpoint": name, "drain_s": drain_s, "bytes": body["bytes"]}
        if step >= self.job.train.steps:
            self.tell_all()

    def tell_all(self) -> None:
        """Also of checkpoints whose cost nobody will report any more."""
        for step in list(self._untold):
            self._tell_of(step)

    def _tell_of(self, step: int) -> None:
        about = self._untold.pop(step)
        stall_s = self._stalls.get(step, 0.0)
        slowdown_s = self._slowdown(step, stall_s, about["drain_s"])
        self.tell({"type": "checkpoint", "step": step, "stall_s": stall_s, "slowdown_s": slowdown_s, **about})
        if self._usual and step in self._stalls:
            self._derive(stall_s, slowdown_s, about["drain_s"])

    def _on_checkpoint_failed(self, node: int, body: Message) -> None:
        step = str(body.get("checkpoint")).split("-")[1:2]
        self.failed |= {int(text) for text in step if text.isdigit()}
        self.tell({**body, "node": node})

    def _on_retained(self, node: int, body: Message) -> None:
        self.finished.add(body["step"])
        if body["names"]:
            self.tell({"type": "checkpoints_removed", "names": body["names"]})

    def _on_retention_refused(self, node: int, body: Message) -> None:
        self.tell(body)

    _on_checkpoint_not_removed = _on_retention_refused

    def on_step(self, step: int, time_s: float, snapshot: Any) -> None:
        """One rank's report of a step."""
        self._times[step] = max(time_s, self._times.get(step, 0.0))
        if isinstance(snapshot, dict):
            of = int(snapshot["step"])
            self._stalls[of] = max(float(snapshot["stall_s"]), self._stalls.get(of, 0.0))
        for of in [of for of in self._untold if of + 1 < step]:  # by now every rank has reported what it waited
            self._tell_of(of)
        for old in [s for s in self._times if s < step - SLOTS_TO_MEASURE]:
            took = self._times.pop(old)
            if not self._open:
                self._usual.append(took)
        if not self._usual and step >= 5 and len(self._times) > 4:
            self._usual.extend(sorted(self._times.values())[: len(self._times) // 2])
        for old in [s for s in self._stalls if s < step - 10_000]:
            del self._stalls[old]

    def _slowdown(self, step: int, stall_s: float, drain_s: float) -> float:
        """By how much the steps since the snapshot were longer than usual, the stall left out; no longer than the
        drain took, as other steps are longer than usual too."""
        if not self._usual:
            return 0.0
        usual, total, left = statistics.median(self._usual), 0.0, drain_s + stall_s
        for later in sorted(s for s in self._times if s >= step):
            total += max(0.0, self._times[later] - usual)
            left -= self._times[later]
            if left <= 0:
                break
        return min(max(0.0, total - stall_s), drain_s)

    # -- what follows

    def _derive(self, stall_s: float, slowdown_s: float, drain_s: float) -> None:
        layout = self.job.layout
        step_ns = int(statistics.median(self._usual) * 1e9)
        nodes = num_nodes(layout)
        seen = int((time.monotonic() - self._began) * 1e9) * nodes
        mtbf = mtbf_ns(nodes, self.job.checkpoint.failures, self.failures, seen)
        stall_ns, slowdown_ns, drain_ns = (max(1, int(s * 1e9)) for s in (stall_s, slowdown_s, drain_s))
        measured = Measured(step_ns, stall_ns, slowdown_ns, drain_ns, mtbf)
        durable, memory = durable_interval(measured), memory_interval(step_ns, stall_ns, stall_ns, mtbf)
        steps, memory_steps = durable.steps, min(durable.steps, memory.steps)
        self._version += 1
        self.announced = {"type": "interval", "version": self._version, "steps": steps, "memory_steps": memory_steps}
        self.announce(self.announced)
        figures = {
            "step_ns": step_ns,
            "stall_ns": stall_ns,
            "slowdown_ns": slowdown_ns,
            "drain_ns": drain_ns,
            "mtbf_ns": mtbf,
            "nodes": nodes,
            "node_ns": seen,
            "failures": self.failures,
            "failures_per_1000_node_days": self.job.checkpoint.failures,
        }
        self.tell({"type": "checkpoint_interval", "steps": steps, "memory_steps": memory_steps, "measured": figures})

    def newest_common(self) -> int:
        """The newest step of which every rank has a whole snapshot in memory, and that is not durable; 0: none."""
        steps: list[set[int]] = []
        for body in self.held.values():
            steps += [set(map(int, held)) for held in body["steps"].values()]
        if len(steps) < self.job.layout.world_size:
            return 0
        common = set.intersection(*steps)
        newest = max(common, default=0)
        return newest if newest > max(self.committed, default=0) else 0
