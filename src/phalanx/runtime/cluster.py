"""Start a run's processes: a controller, and agents that join it, on this machine or wherever an adapter starts them
(`runtime.launch`). It decides nothing about the run. It restarts processes that die, as a supervisor would, tells the
controller which nodes are proven dead, and receives the items for the record.

If this process ends, so do the agents and the controller, because they end with their standard input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from phalanx.control import codec
from phalanx.control.journaled import Plan
from phalanx.control.messages import NodeDead, Stop
from phalanx.control.policy import Policy, S, beat_ns
from phalanx.core.errors import RunFailed, UserError
from phalanx.core.job import Job
from phalanx.core.layout import num_nodes
from phalanx.gate.proof import KEY_BYTES
from phalanx.gate.tls import Certificate, is_loopback
from phalanx.observe import fold
from phalanx.runtime import controller, inventory, kernel, log_tail
from phalanx.runtime.joining import WAITING
from phalanx.runtime.journal import Fenced, JournalError
from phalanx.runtime.journal_server import JournalServer, Kept
from phalanx.runtime.launch import Adapter, AgentProcess, Call, Local, Seat, Started
from phalanx.runtime.reports import Recorder
from phalanx.runtime.secret import READ, Identity, Secret, copy_secret, load_secret
from phalanx.runtime.transport import ODD, Link, Loop
from phalanx.runtime.wire import Message

POLL_S = 0.1
LOOK_S = 0.5
MORE_NODES, MOST_ADDED = "more-nodes", 64
LOST_NODES = "lost-nodes"  # a file: how often each node was lost, as known to a program that serves many runs
STOP = "stop"  # the file by which a user ends a run that would otherwise be handed over
SPARE_S = 60.0  # the latest that spares are started
CONTROLLER_S = 30.0  # for the controller to start
MOST_DEATHS = 8  # in SOON_S: of the controller, or of a node process before the run has begun
SOON_S = 30.0
FAR_S = 30.0  # at most, between two attempts to start an agent on a lost host
SILENT_S = 10.0  # after which a controller without a sign of life is killed and restarted
TROUBLED, WELL = "waits: ", "can write again"  # texts about a controller that cannot write its journal, or can again
LAST_WORDS_S = 5.0  # from an orderly stop to the last message of all agents
LEAVE_LIMIT_S = 60.0  # from the end of the run to the last message of all ranks
LOG_BYTES = 64 << 10  # of an agent's log, read at a time
SILENCE_BEATS = 12  # nodes that fall silent within this many beats do so "at once"


@dataclasses.dataclass(frozen=True, slots=True)
class Entries:
    """The code that the processes run, as "package.module:function", or "" if there is no such service."""

    worker: str
    store: str
    data: str = ""
    keeper: str = ""
    preload: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """A journal that several controllers of a run share. `kept` is the run to continue, or None to begin one. With
    `standby`, other controllers are waiting, and SIGTERM hands the run over to them."""

    journal: JournalServer
    kept: Kept | None = None
    standby: bool = False


class Superseded(RunFailed):
    """Another controller acts, or may act: the run continues without this process. `is_final`: it was asked to
    leave."""

    is_final = False


@dataclasses.dataclass(frozen=True, slots=True)
class Begin:
    """The starting point of a run: a step, the generation in which it was made, the ledger's head, and the place of the
    checkpoint ({"url", "name"}, or None for initial weights)."""

    step: int = 0
    generation: int = 0
    ledger: str = ""
    place: dict[str, str] | None = None


def policy_of(job: Job, save: bool, nodes: int) -> Policy:
    """Return the recovery policy of a job. `nodes` includes the spares."""
    r, layout = job.recovery, job.layout
    return Policy(
        recover=r.on,
        min_replicas=r.min_replicas if r.on else layout.replica,
        wait_ns=int(r.wait_s * S),
        start_ns=S,
        hold_ns=int(r.hold_s * S),
        park_ns=10 * S if r.on else 2 * S,
        resend_ns=S,
        deaths=r.deaths_per_node,
        burst_ns=2 * S,
        silence_ns=SILENCE_BEATS * int(beat_s(job, nodes) * S),
        save=save,
        buddies=layout.replica == 1 and nodes > 1,
        failures=round(job.checkpoint.failures * 1000),
    )


def beat_s(job: Job, nodes: int) -> float:
    failures = round(job.checkpoint.failures * 1000)
    return job.recovery.beat_s or beat_ns(nodes, failures) / S


def environment() -> dict[str, str]:
    """Return environment variables for the ranks, used unless their host sets them."""
    return {
        "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin at barriers starve the other ranks
        # A communicator that fails must not take its process down: we abort it, and the rank forms a new one.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }


def check_free(hosts: list[str], port: int) -> None:
    for host in hosts:
        try:
            socket.create_server((host, port)).close()
        except OSError as error:
            remedy = "name another port, or none; `ss -ltnp` shows who has it"
            text = f"nothing can listen there: {error.strerror}"
            raise UserError(text, field="--listen", value=f"{host}:{port}", remedy=remedy) from None


def listen_at(listen: str, adapter: Adapter) -> tuple[str, int]:
    """Return where the controller listens: at `listen` (HOST[:PORT]), or where nodes reach this host. Port 0: any."""
    if not listen:
        return adapter.address(), 0
    host, _, port = listen.rpartition(":") if ":" in listen else (listen, "", "0")
    if not port.isdigit():
        raise UserError("expected HOST or HOST:PORT", field="--listen", value=listen, remedy="10.0.0.1:7700")
    return inventory.resolve(host, "--listen"), int(port)


class Cluster:
    """The processes of a run.

    `on_event` receives {"type": "started" | "exit", "rank", "pid", ...}, {"type": "hang", "rank", "reason", ...},
    {"type": "ready", "start_s"} once all ranks are ready, {"type": "message", "rank", "body"}, folded items of ranks
    (`observe.fold`), {"type": "node", "node", "what"}, and the controller's decisions. The run ends when `stop()` is
    true; with `gently()`, its state is saved first, and with `hands_over()`, others continue it. `unrecorded()` returns
    the generations and steps that are not all in the record: where others may continue the run, nodes keep theirs."""

    def __init__(
        self,
        job: Job,
        run_dir: Path,
        entries: Entries,
        on_event: Callable[[dict[str, Any]], None],
        stop: Callable[[], bool],
        gently: Callable[[], bool] = lambda: False,
        *,
        checkpoints: str = "",
        facts: dict[str, Any] | None = None,
        run: str = "",
        data: dict[str, Any] | None = None,
        validation: Sequence[dict[str, Any]] = (),
        adapter: Adapter | None = None,
        listen: str = "",
        secret: Path | None = None,
        shared: Shared | None = None,
        hands_over: Callable[[], bool] = lambda: False,
        unrecorded: Callable[[], Collection[tuple[int, int]]] = tuple,
    ):
        self.shared, self.hands_over, self.unrecorded = shared, hands_over, unrecorded
        self._given = secret  # the file of a secret that others already know
        self.job, self.run_dir, self.entries, self.on_event = job, run_dir.absolute(), entries, on_event
        self.stop, self.gently = stop, gently
        self.folder = self.run_dir / "control"
        self.checkpoints, self.facts, self.mark = checkpoints, facts or {}, run or secrets.token_hex(8)
        self.data, self.validation, self.adapter = data or {}, list(validation), adapter or Local()
        self.host, self.port = listen_at(listen, self.adapter)
        self.loop = Loop()
        self.nodes_up: dict[str, Started] = {}
        self.incarnations: dict[str, int] = {}
        self.results: list[Message] = []  # the last reports of ranks, folded
        self.form: Message = {}  # of the latest generation
        self.ended: Message = {}
        self._left: set[str] = set()  # nodes that have reported that they leave
        self.start_s = 0.0
        self.added = 0  # nodes added since the run began
        self.seats = self._find_seats()
        self._began = time.monotonic()
        self._look_at = 0.0
        self._leave_by = float("inf")
        self._again: dict[str, float] = {}  # a process to start -> when
        self._controller: subprocess.Popen[bytes] | None = None
        self._lines = b""
        self._heard_at = 0.0  # the last sign of life of the controller
        self._trouble: tuple[float, str] = (0.0, "")  # since when, and why, the controller cannot write its journal
        self._deaths: dict[str, list[float]] = {}  # a process -> the times of its latest deaths
        self._lost: dict[str, int] = {}  # node -> how often it was reported lost
        self._failures: dict[str, int] = {}  # node -> how often it ended since it joined
        self._read_upto: dict[str, int] = {}  # node -> the offset read in its agent's log
        self._told_waiting: set[tuple[str, str]] = set()  # a node, and the reason why it has not joined
        self._first_commit = 0  # the last generation that committed a step
        self._link: Link | None = None
        self._recorder: Recorder | None = None
        self.session = secrets.token_hex(16)  # in the environment of all processes of this machine

    def _find_seats(self) -> dict[str, Seat]:
        """Return the places where agents are started from here, by name."""
        wanted = num_nodes(self.job.layout) + self.job.recovery.spares + self.added
        return {seat.name: seat for seat in self.adapter.seats(wanted)}

    @property
    def num_nodes(self) -> int:
        return max(len(self.seats), num_nodes(self.job.layout) + self.job.recovery.spares)

    # -- from the first process to the last

    def run(self, begin: Begin) -> dict[str, Any]:
        """Run to the end, and return {"ended": how, "start_s", "wall_s", "done": the last report of each rank}. Raise
        KeyboardInterrupt on `stop()`, and RunFailed if the controller cannot be started."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.secret = secret = self._load_secret()
        self._write_down(begin)
        if self.port:
            check_free(self._addresses(), self.port)
        unrecorded = self.unrecorded if self.shared else tuple
        self._recorder = Recorder(self.loop, secret, self.host, 0, self._heard, unrecorded)
        (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        env = {**environment(), **os.environ, "PHALANX_SESSION": self.session}
        self.adapter.prepare(self.entries.preload, env, self.run_dir / "logs" / "zygote.log")
        self._start_controller()
        deadline = time.monotonic() + CONTROLLER_S
        while not (address := controller.read_address(self.folder))["aggregators"]:
            if time.monotonic() > deadline or self.stop():
                remedy = f"see {self.run_dir / 'logs' / 'controller.log'}"
                raise KeyboardInterrupt if self.stop() else RunFailed("the controller did not start", remedy=remedy)
            time.sleep(0.01)
        if self.shared:
            self.shared.journal.rest()
        port = int(address["aggregators"][0][1])
        self.join = [(host, port) for host in self._addresses()]
        join = ",".join(f"{host}:{port}" for host, port in self.join)
        self.on_event({"type": "listening", "join": join, "nodes": num_nodes(self.job.layout)})
        while self.adapter.is_preparing():
            if self.stop():
                raise KeyboardInterrupt
            self.loop.turn(POLL_S / 10)
        me = Identity("user", f"launcher-{secrets.token_hex(8)}", 1)
        at = [(address["host"], address["port"])]
        self._link = Link(self.loop, secret, me, at, controller.ANSWERS, lambda *_: None)
        first = num_nodes(self.job.layout)
        names = list(self.seats)
        for name in names[:first]:
            self._start_node(name)
        self._again |= dict.fromkeys(names[first:], self._began + SPARE_S)  # or once the others are ready
        while not self.ended:
            self._turn()
        if self.stop():
            self._hear_last_words()
            raise KeyboardInterrupt
        deadline = time.monotonic() + (LEAVE_LIMIT_S if self.ended["ok"] else 0.0)
        while self._crew - self._done().keys() and time.monotonic() < deadline:
            self._turn()
        found = self._done()
        done = [found[rank] for rank in sorted(self._crew & found.keys())]
        wall_s = time.monotonic() - self._began
        return {"ended": self.ended, "start_s": self.start_s, "wall_s": wall_s, "done": done}

    def _load_secret(self) -> Secret:
        path = self.folder / "secret"
        return copy_secret(self._given, path) if self._given else load_secret(path)

    def _write_down(self, begin: Begin) -> None:
        """Write what the controller starts from. If several share a journal, the one that begins the run decides it."""
        policy = policy_of(self.job, bool(self.entries.keeper), self.num_nodes)
        homes = tuple(self.seats)[: num_nodes(self.job.layout)]
        plan = Plan(self.job.layout, self.job.train.steps, begin.step, begin.generation, policy, homes)
        spec = self._spec(begin)
        if self.shared and self.shared.kept:
            plan, spec = codec.decode(Plan, self.shared.kept.plan, "plan"), self.shared.kept.spec
        elif self.shared:
            try:
                self.shared.journal.begin(self.job.name, codec.encode(plan), spec)
            except Fenced as error:
                raise Superseded(str(error)) from None
            except JournalError as error:
                raise RunFailed(str(error)) from None
        controller.write_plan(self.folder, plan)
        controller.write_spec(self.folder, spec)

    def _hear_last_words(self) -> None:
        """Wait for every agent to report that it leaves. That comes last, so its ranks' items are recorded by then."""
        deadline = time.monotonic() + LAST_WORDS_S
        while self.nodes_up.keys() - self._left and time.monotonic() < deadline:
            self.loop.turn(POLL_S)

    def _addresses(self) -> list[str]:
        """Return the addresses by which other hosts reach this one: with several networks, one in each."""
        more = [address for network in self.job.run.networks for address in inventory.inside(network).values()]
        return list(dict.fromkeys([self.host, *more]))

    @property
    def _crew(self) -> set[int]:
        size = self.job.layout.replica_size
        return {int(r) * size + i for r in self.form.get("replicas", ()) for i in range(size)}

    def _done(self) -> dict[int, Message]:
        """Return the digest of each rank, and the memory that it has used."""
        return {
            rank: {"digest": digest, "memory_bytes": said["memory_bytes"]}
            for said in self.results
            for digest, ranks in said["digests"]
            for rank in fold.members(ranks)
        }

    def _spec(self, begin: Begin) -> dict[str, Any]:
        """Return the description of the run that all nodes get."""
        e, c, layout, peers = self.entries, self.job.checkpoint, self.job.layout, self._peers()
        worker_args = {
            "job": self.job.to_dict(),
            "peers": peers,
            "resume": begin.place,
            "ledger": begin.ledger,
            "checkpoints": self.checkpoints,
            "facts": self.facts,
            "validation": self.validation,
            "keeper": {"run": self.mark},
        }
        services: dict[str, Any] = {"store": {"entry": e.store, "args": {}}}
        if e.data:
            services["data"] = {"entry": e.data, "args": {"data": self.data}}
        if e.keeper:
            args = {
                "url": self.checkpoints,
                "ranks": layout.ranks_per_node or layout.world_size,
                "keep_last": c.keep_last,
                "keep_every": c.keep_every,
                "last": self.job.train.steps,
                "peers": peers,
                "run": self.mark,
                "has_buddy": policy_of(self.job, True, self.num_nodes).buddies,
            }
            services["keeper"] = {"entry": e.keeper, "args": args}
        return {
            "version": inventory.version(),
            "beat_s": beat_s(self.job, self.num_nodes),
            "hang_s": self.job.run.hang_timeout_s,
            "preload": list(e.preload),
            "env": environment(),
            "networks": list(self.job.run.networks),
            "worker": {"entry": e.worker, "args": worker_args},
            "services": services,
            "limits": {},
        }

    def _peers(self) -> dict[str, str]:
        """Return what ranks and keepers share to hand state to each other. None of it is known outside the run."""
        beyond = not is_loopback(self.host)
        return {"key": secrets.token_hex(KEY_BYTES), "certificate": Certificate.make().pem if beyond else ""}

    def close(self) -> None:
        if self._link:
            self._link.close()
        for agent in self.nodes_up.values():
            agent.let_go()
        for agent in self.nodes_up.values():
            self.loop.watch(agent, 0)
            agent.close()
        self.nodes_up.clear()
        self.adapter.close()
        if self._recorder:
            self._recorder.close()
        if self._controller:
            self._controller.kill()
            self._controller.wait()
            assert self._controller.stdout and self._controller.stdin
            self._controller.stdout.close()
            self._controller.stdin.close()
            self._controller = None

    def _start_controller(self) -> None:
        logs = self.run_dir / "logs"
        command = [sys.executable, "-P", "-m", "phalanx.runtime.controller", "--dir", str(self.folder)]
        command += ["--secret", str(self.folder / "secret"), "--aggregate", "--attached"]
        command += ["--host", ",".join(self._addresses())]
        command += ["--beat-s", str(beat_s(self.job, self.num_nodes)), "--join-port", str(self.port)]
        assert self._recorder
        command += ["--recorder", f"{self.host}:{self._recorder.server.address[1]}"]  # aggregators may be elsewhere
        if self.shared:
            command += ["--journal", self.shared.journal.url, "--holder", self.shared.journal.holder]
        path = os.pathsep.join(p or os.getcwd() for p in sys.path)
        with (logs / "controller.log").open("ab") as log:
            self._controller = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # it ends when this process does
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        assert self._controller.stdout
        os.set_blocking(self._controller.stdout.fileno(), False)
        self._heard_at = time.monotonic() + CONTROLLER_S - SILENT_S
        self.loop.watch(self._controller.stdout, READ, lambda mask: self._on_controller())
        self._tell_node("controller", "started", pid=self._controller.pid)

    def _start_node(self, name: str) -> None:
        env = {"PHALANX_SESSION": self.session}
        log = self.run_dir / "logs" / f"{name}.log"
        self._read_upto[name] = log.stat().st_size if log.exists() else 0  # an earlier process may have written to it
        agent = self.adapter.start(Call(self.seats[name], self.join, self.secret, self.run_dir, env))
        self.nodes_up[name] = agent
        self.loop.watch(agent, READ, lambda mask: self._lose_node(name))
        self._tell_node(name, "started", **({"pid": agent.pid} if agent.proves else {}))

    # -- events

    def _turn(self) -> None:
        now = time.monotonic()
        if self.stop():
            self._stop(now)
        if now > self._look_at:
            self._look_at = now + LOOK_S
            self._add_nodes()
            self._end_lost()
            if not self.start_s:
                self._tell_waiting()
        for name in [w for w, at in self._again.items() if at <= now]:
            del self._again[name]
            if name == "controller":
                self._start_controller()
            else:
                self._start_node(name)
        self.loop.turn(POLL_S)
        if self._controller and time.monotonic() - self._heard_at > SILENT_S and self._controller.poll() is None:
            self._tell_node("controller", f"is silent for {SILENT_S:g} s, and is ended")
            self._heard_at = time.monotonic()
            self._controller.kill()
        since, why = self._trouble
        if why and time.monotonic() - since > self.job.recovery.hold_s:
            raise RunFailed(f"the controller cannot continue: {why}", remedy="make room, or name another run.dir")

    def _stop(self, now: float) -> None:
        """Stop the run at once, or gently once the state is saved and all have left, or nobody is left to save it. If
        others continue the run, hand it over instead."""
        if self.hands_over() and not (self.folder / STOP).exists() and not self.ended:
            handed = Superseded("the run is handed over")
            handed.is_final = True
            raise handed
        leaving = self._leave_by < float("inf")
        deserted = leaving and self.seats and not self.nodes_up and not self._left
        trains = self.start_s or self._first_commit  # either may arrive first
        if not self.gently() or not trains or now > self._leave_by or deserted:
            raise KeyboardInterrupt
        if not leaving:
            grace_s = min(self.job.recovery.grace_s, 86_400.0)
            self._leave_by = now + grace_s + 5.0
            self._ask(Stop(int(grace_s * S)))
            self._tell_node("controller", f"is asked to save and stop within {grace_s:g} s")

    def _ask(self, event: NodeDead | Stop) -> None:
        """Post an event for the controller, which gets it as soon as there is one."""
        assert self._link
        self._link.post({"type": "ask", "event": event.to_dict()})

    def _add_nodes(self) -> None:
        """Start the nodes that `phalanx nodes add` asks for by a number in a file."""
        try:
            wanted = int((self.folder / MORE_NODES).read_text())
        except (OSError, ValueError):
            return
        while self.added < min(wanted, MOST_ADDED):
            self.added += 1
            before, self.seats = self.seats, self._find_seats()
            for name in self.seats.keys() - before:
                self._start_node(name)

    def _tell_waiting(self) -> None:
        """Report, before the first step, why nodes have not joined. They say so only in their logs, on this host."""
        for name, agent in self.nodes_up.items():
            if name in self.incarnations:
                continue
            with contextlib.suppress(OSError), agent.log.open("rb") as file:
                file.seek(self._read_upto.get(name, 0))
                *lines, rest = file.read(LOG_BYTES).split(b"\n")
                self._read_upto[name] = file.tell() - len(rest)
                for line in dict.fromkeys(each.decode(errors="replace") for each in lines):
                    if line.startswith(WAITING) and (name, line) not in self._told_waiting:
                        self._told_waiting.add((name, line))
                        self._tell_node(name, line)

    def _end_lost(self) -> None:
        """Kill the agents of nodes that were reported lost."""
        try:
            said = json.loads((self.folder / LOST_NODES).read_text())
        except (OSError, ValueError):
            return
        for name, times in said.items():
            agent = self.nodes_up.get(name)
            if times > self._lost.get(name, 0) and isinstance(agent, AgentProcess):
                self._tell_node(name, "is said to be lost, and is ended")
                agent.kill()
            self._lost[name] = times

    def _on_controller(self) -> None:
        assert self._controller and self._controller.stdout
        data = self._controller.stdout.read()
        if data:
            self._heard_at = time.monotonic()
            *lines, self._lines = (self._lines + data).split(b"\n")
            for line in lines:
                self._decided(json.loads(line))
        elif data == b"":
            self.loop.watch(self._controller.stdout, 0)
            self._controller.stdout.close()
            code = self._controller.wait()
            self._lines = b""
            how = f"was killed by {kernel.signal_name(-code)}" if code < 0 else f"ended with code {code}"
            self._tell_node("controller", f"died: {how}")
            if code == controller.FENCED and not self.ended:
                said = (self.run_dir / "logs" / "controller.log").read_text(errors="replace").splitlines()
                raise Superseded(said[-1] if said else "another controller acts")
            self._restart("controller", self.job.recovery.restart_s / 10, f"the controller {how}")

    def _decided(self, said: Message) -> None:
        kind = said["type"]
        if kind == "alive":
            return
        if kind == "trouble":
            since, before = self._trouble
            self._trouble = (since if before else time.monotonic(), said["text"])
            if bool(before) != bool(said["text"]):  # the text changes all the time, with the number of waiting entries
                self._tell_node("controller", f"{TROUBLED}{said['text']}" if said["text"] else WELL)
            return
        if kind == "report":
            self.on_event({"rank": -1, **said["body"], "type": said["about"]})
            return
        if kind == "form":
            self.form = said
        elif kind == "joined":
            self.incarnations[said["node"]] = said["incarnation"]
            self._failures.pop(said["node"], None)
            self._tell_node(said["node"], "joined", incarnation=said["incarnation"], **said["about"])
            return
        elif kind == "started":
            if not self.start_s:
                self.start_s = time.monotonic() - self._began
                self._again = dict.fromkeys(self._again, 0.0)
                self.on_event({"type": "ready", "start_s": self.start_s})
        elif kind == "ended":
            self.ended = said
        self.on_event(said)

    def _heard(self, item: Message) -> None:
        """Record an item of a node or of ranks. Neither a nonsensical item nor a full disk may end the run."""
        try:
            self._hear(item)
        except OSError as error:
            self._tell_node(str(item.get("node", "")), f"said what could not be written down: {error}")
        except ODD as error:
            text = f"said what was not understood, and is not recorded: {error!r}"
            self._tell_node(str(item.get("node", "")), text)

    def _hear(self, item: Message) -> None:
        kind, agent = item["type"], self.nodes_up.get(item.get("node", ""))
        if kind == "log":
            log_tail.write(self.run_dir / "logs", item["node"], item)
        elif kind == "message":
            self._hear_message(item)
        elif kind in ("started", "exit", "hang"):
            if agent and kind == "started" and item["worker"] >= 0:
                agent.running[item["worker"]] = item["pid"]
            elif agent and kind == "exit":
                agent.running.pop(item["worker"], None)
            self.on_event(item)
        elif kind == "step" and item["generation"] > self._first_commit:
            self._first_commit = item["generation"]
            told = {"generation": item["generation"], "step": item["step"] + 1}
            self.on_event({"type": "first commit", **told})
            self.on_event(item)
        elif kind == "done":
            self.results.append(item)
        elif kind == "left":
            self._left.add(item["node"])
        elif kind != "booted":
            self.on_event(item)

    def _hear_message(self, item: Message) -> None:
        if item["service"] == "keeper":
            self.on_event({"rank": -1, **item["body"]})
        else:
            rank = item["rank"] if item["worker"] >= 0 else item["worker"]
            self.on_event({"type": "message", "rank": rank, "body": item["body"]})

    def _lose_node(self, name: str) -> None:
        """Handle the end of a node's process. Its death is proven once the last process of its tree is gone too."""
        agent = self.nodes_up.pop(name)
        self.loop.watch(agent, 0)
        reason = agent.how_it_ended()
        gone = agent.close()
        self._tell_node(name, f"died: {reason}")
        if gone and name in self.incarnations:
            self._ask(NodeDead(name, self.incarnations[name], "its processes have ended"))
        if agent.was_refused() and not self.ended and not self.start_s:
            raise RunFailed(f"node {name} {reason}", remedy=f"see {agent.log}")
        if not self.ended and (agent.proves or self._leave_by == float("inf")):  # of other hosts many leave at once
            self._restart(name, self.job.recovery.restart_s, f"{name} {reason}")
            failures = self._failures[name] = self._failures.get(name, 0) + 1
            if not agent.proves and self.start_s:  # it may be away for long
                late_s = min(self.job.recovery.restart_s * 2 ** min(failures - 1, 30), FAR_S)
                self._again[name] = max(self._again[name], time.monotonic() + late_s)

    def _restart(self, name: str, after_s: float, why: str) -> None:
        """Restart a process after a pause that grows. A controller that does not stay up, or a node that dies before
        the first step, gets only a few attempts."""
        now = time.monotonic()
        deaths = self._deaths[name] = [at for at in self._deaths.get(name, []) if at > now - SOON_S] + [now]
        if len(deaths) >= MOST_DEATHS and (name == "controller" or not self.start_s):
            log = self.run_dir / "logs" / f"{name}.log"
            raise RunFailed(f"{why}, {len(deaths)} times in {SOON_S:g} s", remedy=f"see {log}")
        self._again[name] = now + min(after_s * 2 ** (len(deaths) - 1), SOON_S / MOST_DEATHS)

    def _tell_node(self, name: str, what: str, **more: Any) -> None:
        self.on_event({"type": "node", "node": name, "what": what, **more})
