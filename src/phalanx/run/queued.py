"""A queue of jobs for the nodes of this machine. The gang scheduler (`control.schedule`) decides, and each job is its
own `phalanx train`. Every event is journaled before it is acted on, so the queue may be killed at any moment: the next
one replays the journal, finds the runs that are still alive, and continues. Nodes are processes, too (`queue_nodes`):
when one dies, the queue ends its jobs there, and tells the scheduler.

Users communicate with it through files in its folder: requests in inbox/, its state in state.json.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.control import codec
from phalanx.control.schedule import asks
from phalanx.control.schedule.asks import Ask, Rules, S
from phalanx.control.schedule.cells import Cells
from phalanx.control.schedule.explain import why
from phalanx.control.schedule.gangs import ENDED, LEAVING, RUNNING, Gang
from phalanx.control.schedule.scheduler import Scheduler
from phalanx.core.errors import RunFailed, UserError
from phalanx.core.job import Job
from phalanx.observe.record import run_folders
from phalanx.run.follow import head_of
from phalanx.run.queue_nodes import Nodes, write_whole
from phalanx.runtime import controller, kernel
from phalanx.runtime.cluster import LOST_NODES
from phalanx.runtime.journal import Entry, Journal, JournalError
from phalanx.runtime.secret import load_secret

POLL_S = 0.5
MOST_CRASHES = 3  # crashes of a job's own process without a summary
INBOX, JOBS, NODES, STATE = "inbox", "jobs", "nodes", "state.json"


def ask_of(name: str, job: Job, node_gpus: int, tenant: str, priority: int) -> Ask:
    """Return a job's request to the scheduler: all replicas of its layout, and at least recovery.min_replicas."""
    size, least = job.layout.replica_size, job.recovery.min_replicas
    whole, rest = divmod(size, node_gpus)
    elastic = job.recovery.on and least < job.layout.replica
    fewest = least if elastic else 0
    if whole:
        return Ask(name, tenant, priority, job.layout.replica, fewest, nodes=whole, gpus=node_gpus, rest=rest)
    return Ask(name, tenant, priority, job.layout.replica, fewest, gpus=rest)


def ranks_on(gang: Gang, node: int, running: Sequence[int]) -> list[int]:
    """List a gang's ranks on a node. `running`: the replicas of its run, whose numbers may differ."""
    size, out = gang.ask.replica_gpus, list[int]()
    numbers = sorted([*gang.replicas, *gang.shrinking])
    ours = running if len(running) == len(numbers) else numbers
    for number, at in zip(numbers, sorted(ours), strict=True):
        rank = at * size
        for spot, gpus in gang.replicas.get(number) or gang.shrinking[number]:
            out += range(rank, rank + gpus) if spot == node else ()
            rank += gpus
    return out


class Queue:
    def __init__(self, folder: Path, nodes: int, node_gpus: int, rules: Rules | None = None):
        self.folder, self.nodes, self.node_gpus = folder.absolute(), nodes, node_gpus
        self.rules = rules or Rules(burn_ns=10 * S, look_ns=5 * S)
        for name in (INBOX, JOBS):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        try:
            self.journal = Journal(self.folder / "journal")
        except JournalError as error:
            raise RunFailed(str(error), remedy="is another `phalanx queue start` at work there?") from None
        self.scheduler = self.journal.recover(self._fresh, self._fold)
        self.agents = Nodes(self.folder / NODES, self.scheduler.names)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.told: dict[str, float] = {}  # job -> when it was asked to stop
        self.scaled: dict[str, int] = {}  # job -> number of replicas requested from its controller
        self.crashes: dict[str, int] = {}
        self.timer_ns = self.scheduler.timer_ns
        self.changed = True
        for gang in list(self.scheduler.gangs.values()):
            if gang.state in (RUNNING, LEAVING) and not self._alive(gang.job):
                self._hear_end(gang)

    def _fresh(self, data: bytes | None) -> Scheduler:
        cells = Cells(self.node_gpus, ("machine",), [("this",)] * self.nodes)
        return Scheduler(cells, [f"n{n}" for n in range(self.nodes)], self.rules)

    def _fold(self, scheduler: Scheduler, entry: Entry) -> None:
        scheduler.apply(entry.time_ns, codec.decode(getattr(asks, entry.kind), entry.body, entry.kind))

    # -- the loop

    def serve(self, stop: Callable[[], bool]) -> None:
        while not stop():
            self.turn()
            time.sleep(POLL_S)
        self.close()

    def close(self) -> None:
        """Leave in order: jobs continue, and the next queue restarts the nodes."""
        self.agents.close()
        self.journal.close()

    def turn(self) -> None:
        self._look_at_nodes()
        for path in sorted((self.folder / INBOX).glob("*.json")):
            self._take(path)
        for gang in list(self.scheduler.gangs.values()):
            if gang.state in (RUNNING, LEAVING):
                self._look_at(gang)
        if self.timer_ns and time.time_ns() >= self.timer_ns:
            self.timer_ns = 0
            self.tell(asks.Tick())
        if self.changed:
            self.changed = False
            self._publish()

    def tell(self, event: asks.Event) -> None:
        """Journal an event, and carry out the resulting commands."""
        todo, self.changed = [event], True
        while todo:
            said = todo.pop(0)
            now_ns = max(time.time_ns(), self.scheduler.now_ns)
            self.journal.wait(self.journal.append(type(said).__name__, codec.encode(said), now_ns))
            for command in self.scheduler.apply(now_ns, said):
                self._obey(command)

    def _take(self, path: Path) -> None:
        """Read a user's request. An invalid file is put aside."""
        try:
            body = json.loads(path.read_text())
            event = codec.decode(getattr(asks, body["kind"]), body["event"], "event")
            node = getattr(event, "node", "n0")
            if not isinstance(event, asks.Event) or node not in self.scheduler.index:
                raise ValueError(f"there is no node {node}")
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            print(f"{path.name} is no request: {error}", file=sys.stderr, flush=True)
            path.rename(path.with_suffix(".refused"))
            return
        self.tell(event)
        path.unlink()

    # -- nodes

    def _look_at_nodes(self) -> None:
        """Report which nodes have died and which are back, except nodes that an operator has declared down."""
        self.agents.look()
        for name, number in self.scheduler.index.items():
            ward = self.scheduler.wards.wards.get(number)
            down, why = bool(ward and ward.down), self.agents.why_down(name)
            if why and not down:
                for job in list(self.scheduler.at[number]):
                    self._fence(self.scheduler.gangs[job], number)
                self.tell(asks.NodeDown(name, why))
            elif down and ward and ward.why != asks.BY_HAND and self.agents.is_up(name):
                self.tell(asks.NodeUp(name))

    def _fence(self, gang: Gang, node: int) -> None:
        """Make a run end its agents on a dead node, before anyone assumes that nothing runs there."""
        run = self._run_of(gang.job)
        if run is None:
            return  # it has no run yet
        said = self._status_of(run) or {"nodes": {}, "replicas": []}
        size = gang.ask.replica_gpus
        places = {rank // min(size, self.node_gpus) for rank in ranks_on(gang, node, said["replicas"])}
        standing = {about["place"]: name for name, about in said["nodes"].items()}
        path = run / "control" / LOST_NODES
        times = json.loads(path.read_text()) if path.is_file() else {}
        for name in (standing.get(place, f"node-{place}") for place in sorted(places)):
            times[name] = times.get(name, 0) + 1
        write_whole(path, times)

    def _status_of(self, run: Path) -> dict[str, Any] | None:
        try:
            secret = load_secret(run / "control" / "secret", create=False)
            return controller.ask(run / "control", secret, {"type": "status"}, 5.0)
        except (OSError, UserError, ValueError):
            return None  # it is not up yet, or is busy

    # -- what the scheduler wants

    def _obey(self, command: asks.Command) -> None:
        match command:
            case asks.Start(job):
                self._start(job)
            case asks.Stop(job, grace_ns):
                self._stop(job, grace_ns)
            case asks.SetTimer(at_ns):
                self.timer_ns = at_ns

    def _start(self, job: str) -> None:
        if self._alive(job):
            return
        home = self.folder / JOBS / job
        with (home / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "phalanx.cli.main", "train", str(home / "job.toml"), "--resume", "auto",
                 *self._sets(home)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=home,
            )  # fmt: skip
        self.processes[job] = process
        self.scaled[job] = 0
        write_whole(home / "process.json", {"pid": process.pid, "began": kernel.began(process.pid)})

    def _sets(self, home: Path) -> list[str]:
        sets = json.loads((home / "sets.json").read_text())
        own = [f"run.dir={home / 'runs'}", f"checkpoint.dir={home / 'checkpoints'}"]
        return [part for each in [*sets, *own] for part in ("--set", each)]

    def _stop(self, job: str, grace_ns: int) -> None:
        """Ask a job to save and end, and to end at once after the grace period (0: at the next turn)."""
        self.told.setdefault(job, time.monotonic() - (self.rules.grace_ns - grace_ns) / S)
        if pid := self._alive(job):
            os.kill(pid, signal.SIGTERM)

    # -- what becomes of it

    def _alive(self, job: str) -> int:
        """Return the process of a job; 0: it has none."""
        process = self.processes.get(job)
        if process is not None:
            return process.pid if process.poll() is None else 0
        home = self.folder / JOBS / job
        try:
            said = json.loads((home / "process.json").read_text())
            if said["began"] and kernel.began(int(said["pid"])) == said["began"]:
                return int(said["pid"])
        except (OSError, ValueError, KeyError):
            pass
        # It may have been started just before the queue was killed.
        return next((pid for run in sorted((home / "runs").glob("*")) if (pid := head_of(run).pid)), 0)

    def _look_at(self, gang: Gang) -> None:
        pid = self._alive(gang.job)
        if not pid:
            self._hear_end(gang)
        elif gang.state == LEAVING:
            since = self.told.setdefault(gang.job, time.monotonic())
            if time.monotonic() - since > self.rules.grace_ns / S:
                self.told[gang.job] = time.monotonic()
                os.kill(pid, signal.SIGTERM)  # a second signal ends it at once
        elif gang.state == RUNNING and gang.ask.least:
            self._scale(gang)

    def _scale(self, gang: Gang) -> None:
        """Bring a run to the number of replicas that the scheduler has decided."""
        wanted = len(gang.replicas)
        if self.scaled.get(gang.job) == wanted and not gang.shrinking:
            return
        run = self._run_of(gang.job)
        if run is None:
            return
        try:
            secret = load_secret(run / "control" / "secret", create=False)
            if self.scaled.get(gang.job) != wanted:
                event = {"kind": "Scale", "replicas": wanted}
                answer = controller.ask(run / "control", secret, {"type": "ask", "event": event}, 5.0)
                if answer["type"] == "refused":
                    return
                self.scaled[gang.job] = wanted
        except (OSError, UserError, ValueError):
            return  # it is not up yet, or is busy: at the next turn
        said = self._status_of(run)
        if said and gang.shrinking and 0 < len(said["replicas"]) <= wanted:
            self.tell(asks.Shrunk(gang.job))

    def _run_of(self, job: str) -> Path | None:
        runs = self.folder / JOBS / job / "runs"
        going = [path for path in (runs.iterdir() if runs.is_dir() else ()) if head_of(path).pid]
        return going[0] if going and (going[0] / "control" / "controller.json").is_file() else None

    def _hear_end(self, gang: Gang) -> None:
        job, process = gang.job, self.processes.pop(gang.job, None)
        told = self.told.pop(job, None)
        status = "done" if process and process.returncode == 0 else self._status(job)
        if status == "done":
            self.tell(asks.Ended(job))
        elif gang.state == LEAVING:
            self.tell(asks.Stopped(job))
        elif status == "failed" or (process and process.returncode == 2):
            self.tell(asks.Ended(job, ok=False))
        elif self.crashes.get(job, 0) < MOST_CRASHES and not told:
            self.crashes[job] = self.crashes.get(job, 0) + 1
            self._start(job)  # it was killed, and continues from its last checkpoint
        else:
            self.tell(asks.Ended(job, ok=False))

    def _status(self, job: str) -> str:
        """Return how the newest run of a job ended, from its summary; "": it left none."""
        home = self.folder / JOBS / job
        name = json.loads((home / "name.json").read_text())
        for run in run_folders(home / "runs", name)[:1]:
            try:
                return str(json.loads((run / "summary.json").read_text())["status"])
            except (OSError, ValueError, KeyError):
                return ""
        return ""

    # -- what users see

    def _publish(self) -> None:
        now_ns, scheduler = max(time.time_ns(), self.scheduler.now_ns), self.scheduler
        jobs = {}
        for gang in scheduler.gangs.values():
            said = {"state": gang.state, "tenant": gang.ask.tenant, "priority": gang.ask.priority, "stops": gang.stops}
            if gang.state == ENDED:
                said["state"] = gang.notes[-1][1] if gang.notes else ENDED
            nodes = sorted({scheduler.names[n] for n, _ in gang.spots()})
            replicas = f"{len(gang.replicas)}/{gang.ask.replicas}"
            jobs[gang.job] = {**said, "nodes": nodes, "replicas": replicas, "why": why(scheduler, gang.job, now_ns)}
        nodes_said = {n: scheduler.wards.said(i, now_ns) for n, i in scheduler.index.items()}
        write_whole(self.folder / STATE, {"pid": os.getpid(), "at_ns": now_ns, "nodes": nodes_said, "jobs": jobs})
