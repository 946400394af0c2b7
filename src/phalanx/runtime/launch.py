"""Launch a job on this machine: a store, a data service and keepers of checkpoints, then one worker per rank, watched
until all are done or one fails.

Which code the workers run is named by the caller; this module never imports it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phalanx.core.checkpoint import buddies
from phalanx.core.errors import RunFailed
from phalanx.core.job import Job
from phalanx.runtime.client import NodeClient
from phalanx.runtime.gang import Gang
from phalanx.runtime.saving import BODIES as SAVING
from phalanx.runtime.saving import Saving, num_nodes
from phalanx.runtime.wire import Message, Schemas, check

STORE, DATA, KEEPER = -1, -2, -3  # worker numbers of what is not a rank; node n's keeper is KEEPER - n
START_LIMIT_S = 300.0
EXIT_LIMIT_S = 10.0  # from the last "done" to the last exit
COMMIT_LIMIT_S = 60.0  # from the last "done" to the commit of the last checkpoint
FLUSH_LIMIT_S = 120.0  # to write what is in memory, after a failure
POLL_S = 0.1

BODIES: Schemas = {
    "store": {"host": str, "port": int},
    "data": {"address": str},
    "step": {"step": int, "time_s": (int, float)},
}


class HangLimit:
    """How long ranks may stand still: max(10 s, 20 x the median of the last 50 steps, each as long as its slowest
    rank took); 300 s before the first step is known, as compiling may come first."""

    def __init__(self, world_size: int, fixed_s: float = 0.0):
        self.world_size, self.fixed_s = world_size, fixed_s
        self.limit_s = fixed_s or START_LIMIT_S
        self._open: dict[int, list[float]] = {}
        self._slowest: deque[float] = deque(maxlen=50)

    def resize(self, world_size: int) -> None:
        """Another gang: what is known of the speed stays."""
        self.world_size = world_size
        self._open.clear()

    def add(self, step: int, time_s: float) -> bool:
        """One rank's step; True when the limit has changed by more than a tenth."""
        times = self._open.setdefault(step, [])
        times.append(time_s)
        if len(times) < self.world_size:
            return False
        self._slowest.append(max(self._open.pop(step)))
        limit_s = self.fixed_s or max(10.0, 20 * statistics.median(self._slowest))
        if abs(limit_s - self.limit_s) <= 0.1 * self.limit_s:
            return False
        self.limit_s = limit_s
        return True


def launch(
    job: Job,
    *,
    worker_entry: str,
    store_entry: str,
    data_entry: str | None = None,
    keeper_entry: str | None = None,
    resume: dict[str, str] | None = None,
    checkpoints: str = "",
    data_version: str = "",
    ledger: Callable[[int], str | None] | None = None,
    preload: list[str],
    run_dir: Path,
    on_event: Callable[[dict[str, Any]], None],
    stop: Callable[[], bool],
) -> dict[str, Any]:
    """Run the job to its end and return a summary; RunFailed when it fails, KeyboardInterrupt when `stop()`.

    With a keeper, checkpoints go to the folder or URL `checkpoints`; `ledger(step)` is the hash of the last step
    before; `resume` names where to begin: {"url", "name"}.

    `on_event` hears {"type": "started", "rank", "pid"}, {"type": "ready", "start_s"} once all ranks are,
    {"type": "message", "rank", "body"}, {"type": "hang", "rank", "reason", "progress"} and
    {"type": "exit", "rank", "code", "signal"}.
    """
    run_dir = run_dir.absolute()
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with NodeClient(preload, env=environment(), log=logs / "node.log") as client:
        launched = _Launch(job, Gang(client), on_event, stop)
        launched.saving.ledger = ledger or launched.saving.ledger
        launched.resume, launched.data_version = resume, data_version
        try:
            return launched.run(worker_entry, store_entry, data_entry, keeper_entry, checkpoints, run_dir)
        except RunFailed:
            launched.flush()
            launched.saving.tell_all()
            raise


def environment() -> dict[str, str]:
    """Of the ranks, where the user has not said otherwise."""
    wanted = {
        "GLOO_SOCKET_IFNAME": "lo",  # one machine: nothing listens outside it
        "NCCL_SOCKET_IFNAME": "lo",
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin at barriers starve the other ranks
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


class _Launch:
    def __init__(self, job: Job, gang: Gang, on_event: Callable[[dict[str, Any]], None], stop: Callable[[], bool]):
        self.job, self.gang, self.on_event, self.stop = job, gang, on_event, stop
        self.ranks = set(range(job.layout.world_size))
        self.limit = HangLimit(job.layout.world_size, job.run.hang_timeout_s)
        self.store: Message | None = None
        self.data: Message | None = None
        self.ready: set[int] = set()
        self.results: dict[int, Message] = {}
        self.start = time.monotonic()
        self.start_s = 0.0
        self.resume: dict[str, str] | None = None
        self.data_version = ""
        self.saving = Saving(job, self._to_keeper, self._to_ranks, lambda event: self.on_event({"rank": -1, **event}))

    def _to_keeper(self, node: int, message: Message) -> None:
        self.gang.client.send(KEEPER - node, message)

    def _to_ranks(self, message: Message) -> None:
        for rank in self.ranks - self.gang.ended - self.results.keys():
            self.gang.client.send(rank, message)

    def run(
        self,
        worker_entry: str,
        store_entry: str,
        data_entry: str | None,
        keeper_entry: str | None,
        checkpoints: str,
        run_dir: Path,
    ) -> dict[str, Any]:
        logs = run_dir / "logs"
        self.gang.spawn(STORE, "the store", store_entry, {}, logs / "store.log")
        if data_entry:
            self.gang.spawn(DATA, "the data service", data_entry, {"run_dir": str(run_dir)}, logs / "data.log")
        else:
            self.data = {}
        if keeper_entry:
            self._spawn_keepers(keeper_entry, checkpoints, logs)
        while self.store is None or self.data is None or len(self.saving.keepers) < self.num_keepers:
            self._turn()
            self._check_start("the store" if self.store is None else "the data service or a keeper")
        self._pair_keepers()
        self.gang.client.watch(self.limit.limit_s)
        for rank in sorted(self.ranks):
            args = {
                "job": self.job.to_dict(),
                "rank": rank,
                "local_rank": rank,  # all on this host, whatever nodes the layout assumes
                "local_ranks": len(self.ranks),
                "form": {
                    "generation": 0,
                    "step": 0,  # or that of `resume`
                    "replicas": list(range(self.job.layout.replica)),
                    "store": f"{self.store['host']}:{self.store['port']}",
                },
                "data": {k: v for k, v in self.data.items() if k != "type"},
                "run_dir": str(run_dir),
                "resume": self.resume,
                "keeper": self._keeper_of(rank),
            }
            self.gang.spawn(rank, f"rank {rank}", worker_entry, args, logs / f"rank-{rank:05d}.log")
        while not self.ranks <= self.ready:
            self._turn()
            missing = sorted(self.ranks - self.ready)
            if missing:
                self._check_start(f"rank {missing[0]}")
        self.start_s = time.monotonic() - self.start
        self.on_event({"type": "ready", "start_s": self.start_s})
        while not self.ranks <= self.results.keys():
            self._turn()
        deadline = time.monotonic() + EXIT_LIMIT_S
        while not self.ranks <= self.gang.ended and time.monotonic() < deadline:
            self._turn()
        self._wait_for_commit()
        return {
            "world_size": len(self.ranks),
            "start_s": self.start_s,
            "wall_s": time.monotonic() - self.start,
            "hang_timeout_s": self.limit.limit_s,
            "done": [self.results[rank] for rank in sorted(self.ranks)],
        }

    # -- checkpoints

    num_keepers = 0

    def _spawn_keepers(self, entry: str, url: str, logs: Path) -> None:
        c, layout = self.job.checkpoint, self.job.layout
        self.num_keepers = num_nodes(layout)
        per_node = layout.ranks_per_node or layout.world_size
        for node in range(self.num_keepers):
            args = {
                "url": url,
                "ranks": min(per_node, layout.world_size - node * per_node),
                "keep_last": c.keep_last,
                "keep_every": c.keep_every,
                "token": self.saving.token,
                "has_buddy": self.num_keepers > 1,
            }
            number = KEEPER - node
            self.gang.spared.add(number)
            self.gang.spawn(number, f"the keeper of node {node}", entry, args, logs / f"keeper-{node}.log")

    def _pair_keepers(self) -> None:
        """Each with a buddy on another node."""
        for node, other in enumerate(buddies([str(node) for node in range(self.num_keepers)])):
            if other is not None:
                port = self.saving.keepers[other]["port"]
                self._to_keeper(node, {"type": "buddy", "host": "127.0.0.1", "port": port})

    def _keeper_of(self, rank: int) -> dict[str, Any] | None:
        if not self.num_keepers:
            return None
        address = self.saving.keepers[self.job.layout.node(rank)]["address"]
        return {"address": address, "run": self.saving.run, "generation": 0, "data_version": self.data_version}

    def _wait_for_commit(self) -> None:
        """Of the checkpoint after the last step, whose files are written."""
        deadline = time.monotonic() + COMMIT_LIMIT_S
        last = self.job.train.steps
        while self.num_keepers and last not in self.saving.finished | self.saving.failed:
            if time.monotonic() > deadline:
                return
            self._turn()

    def flush(self) -> None:
        """The ranks are gone, their snapshots are not: what is newer than the last checkpoint is written out."""
        saving, client = self.saving, self.gang.client
        keepers = {KEEPER - node: node for node in saving.keepers}
        if not keepers or not keepers.keys() <= client.running.keys():
            return
        for node in keepers.values():
            self._to_keeper(node, {"type": "held"})
        deadline, step, asked = time.monotonic() + FLUSH_LIMIT_S, 0, False
        while time.monotonic() < deadline and step not in saving.failed:
            event = client.events(POLL_S)
            if event and event["type"] in ("node_lost", "exit") and event.get("worker", KEEPER) in keepers:
                return
            if event and event["type"] == "message" and event["worker"] in keepers:
                saving.on_keeper(keepers[event["worker"]], event["body"])
                saving.commit_what_is_written(at_once=True)
            if len(saving.held) == len(keepers) and not asked:
                asked, step = True, saving.newest_common()
                for node in keepers.values() if step else ():
                    self._to_keeper(node, {"type": "drain", "step": step})
            if asked and (not step or step in saving.committed):
                return

    def _check_start(self, name: str) -> None:
        limit_s = max(START_LIMIT_S, self.job.run.hang_timeout_s)
        if time.monotonic() - self.start > limit_s:
            raise RunFailed(f"{name} was not ready after {limit_s:.0f} s", remedy="see the logs of the run")

    def _turn(self) -> None:
        """One event, or a moment without one."""
        if self.stop():
            raise KeyboardInterrupt
        event = self.gang.next(POLL_S)
        if event is None:
            return
        kind, rank = event["type"], event["worker"]
        if kind == "started":
            self._tell({"type": "started", "rank": rank, "pid": event["pid"]})
        elif kind == "exit":
            self._tell({"type": "exit", "rank": rank, "code": event["code"], "signal": event["signal"]})
        elif kind == "message":
            self._on_message(rank, event["body"])
        elif kind == "hang":
            self._tell({"type": "hang", "rank": rank, "reason": event["reason"], "progress": event["progress"]})

    def _on_message(self, rank: int, body: Message) -> None:
        kind = body.get("type")
        if kind in BODIES:
            check(body, BODIES)
        if kind == "store" and rank == STORE:
            self.store = body
            return
        if kind == "data" and rank == DATA:
            self.data = body
            return
        if kind in SAVING and rank <= KEEPER:
            self.saving.on_keeper(KEEPER - rank, body)
            return
        if kind == "ready":
            self.ready.add(rank)
            return
        if kind == "step":
            self.saving.on_step(body["step"], body["time_s"], body.get("snapshot"))
            if self.limit.add(body["step"], body["time_s"]):
                self.gang.client.watch(self.limit.limit_s)
        elif kind == "done":
            self.results[rank] = body
        self._tell({"type": "message", "rank": rank, "body": body})
        if kind == "step":
            self.saving.commit_what_is_written()

    def _tell(self, event: dict[str, Any]) -> None:
        """Of ranks everything, of the others what they have to say."""
        if event["rank"] >= 0 or event["type"] == "message":
            self.on_event(event)
