"""Run on Ray. The run is a driver of the cluster, started by hand or by `ray job submit`. Each agent runs under an
actor, one per node. The nodes that the layout needs are in one placement group that spreads them; each spare is in a
group of its own, for which nothing waits. When a node is lost, Ray finds another one for its bundle, and the agent is
restarted there.

The topology of nodes comes from their labels: `--engine topology=LABEL,LABEL` names them, from the top."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.core.errors import RunFailed, UserError
from phalanx.core.job import Job
from phalanx.core.layout import num_nodes
from phalanx.engines.table import Where
from phalanx.runtime.launch import CLOSE_S, REFUSED, TAIL_LINES, Adapter, Call, Seat

READY_S = 300.0  # time for Ray to find enough free nodes for the layout
LOOK_S = 0.5
LABELS = "ray.io/availability-region,ray.io/availability-zone"
OPTIONS = ("address", "cpus", "gpus", "topology")


def adapter(where: Where, job: Job) -> OnRay:
    return OnRay(where.options, job)


def submission(where: Where, job: Job, arguments: Sequence[str]) -> None:
    """Refuse options that Ray does not have. The driver runs in this process: nothing is submitted."""
    if where.hosts:
        remedy = "leave it out: Ray takes nodes with the resources of a bundle"
        raise UserError("Ray chooses the nodes", field="--hosts", value=where.hosts, remedy=remedy)
    for key, value in where.options.items():
        if key not in OPTIONS:
            remedy = f"Ray's options are {', '.join(OPTIONS)}"
            raise UserError("there is no such option", field="--engine", value=f"{key}={value}", remedy=remedy)
        if key in ("cpus", "gpus") and not value.isdecimal():
            remedy = "how many of them a node has that an agent is started on"
            raise UserError("expected a number", field=f"--engine {key}", value=value, remedy=remedy)


class Below:
    """An actor that runs one command on its node. The command ends with the actor."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, arguments: list[str], token: str) -> tuple[int, str]:
        """Run the command to its end; return the exit code and the end of its output."""
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,  # it ends when this process does
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{token}\n".encode())
            self.process.stdin.flush()
        said = b""
        for line in self.process.stdout:
            said = (said + line)[-4096:]
        return self.process.wait(), said.decode(errors="replace")

    def let_go(self) -> None:
        if self.process and self.process.stdin:
            with contextlib.suppress(OSError):
                self.process.stdin.close()


class ActorAgent:
    """An agent under an actor (`runtime.launch.Started`). `Watcher` reports how it ended."""

    pid, proves = 0, False

    def __init__(self, ray: Any, actor: Any, log: Path):
        self._ray, self._actor, self.log = ray, actor, log
        self.running: dict[int, int] = {}
        self.code: int | None = None  # None: it is running, or its end is unknown
        self.end = ""
        self._reader, self._writer = os.pipe()
        self._closed = threading.Event()

    def fileno(self) -> int:
        return self._reader

    def ended(self, code: int | None, end: str) -> None:
        """Take the watcher's report."""
        self.code, self.end = code, end
        with contextlib.suppress(OSError), self.log.open("a") as out:
            out.write(end + "\n")
        os.close(self._writer)
        self._closed.set()

    def let_go(self) -> None:
        self._actor.let_go.remote()

    def close(self) -> bool:
        self.let_go()
        self._closed.wait(CLOSE_S)
        self._ray.kill(self._actor)
        if self._closed.wait(CLOSE_S):
            os.close(self._reader)
        return False  # an end on another host is never proven

    def how_it_ended(self) -> str:
        last = " ".join(self.end.splitlines()[-TAIL_LINES:])[-600:]
        return f"ended with code {self.code}: {last}" if self.code is not None else f"was lost with its actor: {last}"

    def was_refused(self) -> bool:
        return self.code == REFUSED


class Watcher(threading.Thread):
    """Waits for all agents in one thread."""

    def __init__(self, ray: Any):
        super().__init__(daemon=True, name="ray-watcher")
        self._ray, self._lock, self._agents = ray, threading.Lock(), dict[Any, ActorAgent]()
        self._over = threading.Event()

    def add(self, reference: Any, agent: ActorAgent) -> None:
        with self._lock:
            self._agents[reference] = agent

    def run(self) -> None:
        while not self._over.wait(0 if self._agents else LOOK_S):
            with self._lock:
                waiting = list(self._agents)
            done, _ = self._ray.wait(waiting, timeout=LOOK_S) if waiting else ((), ())
            for reference in done:
                with self._lock:
                    agent = self._agents.pop(reference)
                try:
                    agent.ended(*self._ray.get(reference))
                except self._ray.exceptions.RayError as error:
                    agent.ended(None, f"{type(error).__name__}: {str(error).splitlines()[0]}")

    def stop(self) -> None:
        self._over.set()
        self.join(CLOSE_S)


class OnRay(Adapter):
    def __init__(self, options: dict[str, str], job: Job):
        self.options, self.job, self.need = options, job, num_nodes(job.layout)
        self._groups: list[Any] = []
        self._places: dict[str, tuple[Any, int]] = {}  # seat -> placement group, bundle
        self._watcher: Watcher | None = None
        self._is_ours = False  # True if this object connected to Ray

    def describe(self) -> str:
        bundle: dict[str, Any] = {**self._bundle([])}
        bundle.setdefault("CPU", "all of a node")
        asked = {"strategy": "STRICT_SPREAD", "bundles": self.need, "each": bundle}
        spares = {"groups": self.job.recovery.spares, "each": [bundle]}
        agent = "phalanx agent --join HOST:PORT --secret - --attached --name ray-N --topology LABELS"
        return "\n".join(
            [
                f"ray.init(address={self.options.get('address', 'auto')!r})",
                f"placement group of the gang: {json.dumps(asked)}",
                f"placement groups of the spares: {json.dumps(spares)}",
                f"an actor in each bundle runs: {agent}",
            ]
        )

    def _bundle(self, nodes: list[dict[str, Any]]) -> dict[str, float]:
        """Return what to reserve on a node: all its cores, and an accelerator per rank, unless the options say
        otherwise."""
        least = min((int(node["Resources"].get("CPU", 1)) for node in nodes), default=0)
        gpus = self.job.layout.ranks_per_node if self.job.run.device == "cuda" else 0
        found = {"CPU": float(self.options.get("cpus", least)), "GPU": float(self.options.get("gpus", gpus))}
        return {key: value for key, value in found.items() if value}

    @property
    def _ray(self) -> Any:
        """Connect to Ray if needed: a run that restarts from an older checkpoint connects again."""
        try:
            import ray
        except ImportError:
            remedy = "install phalanx[ray] here and on the nodes of the cluster"
            raise UserError("Ray is not installed", field="--on", value="ray", remedy=remedy) from None
        if not ray.is_initialized():
            address = self.options.get("address", "auto")
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, ValueError, RuntimeError) as error:
                remedy = "start one by `ray start --head`, or name it: --engine address=HOST:6379"
                text = f"no Ray cluster answers: {error}"
                raise UserError(text, field="--engine address", value=address, remedy=remedy) from None
            self._is_ours = True
        return ray

    def seats(self, count: int) -> list[Seat]:
        """Return the gang's seats in the order of their labels, then the spares."""
        if not self._places:
            self._reserve()
        return [Seat(name) for name in self._places]

    def _reserve(self) -> None:
        ray = self._ray
        from ray.util import placement_group

        bundle = self._bundle([node for node in ray.nodes() if node["Alive"]])
        gang = placement_group([bundle] * self.need, strategy="STRICT_SPREAD", name=f"phalanx {self.job.name}")
        self._groups.append(gang)
        if not gang.wait(READY_S):
            free = sum(node["Alive"] for node in ray.nodes())
            self.close()
            remedy = "`ray status` shows who has them; add nodes, lower layout.replica, or say --engine cpus=N"
            text = f"Ray did not find {self.need} nodes with {bundle} free in {READY_S:g} s; it has {free}"
            raise RunFailed(text, remedy=remedy)
        order = sorted(range(self.need), key=lambda index: (self._topology(gang, index), index))
        for number, index in enumerate(order):
            self._places[f"ray-{number}"] = (gang, index)
        for number in range(self.job.recovery.spares):
            spare = placement_group([bundle], name=f"phalanx {self.job.name}, spare {number}")
            self._groups.append(spare)
            self._places[f"ray-spare-{number}"] = (spare, 0)

    def _topology(self, group: Any, index: int) -> str:
        """Return the labels of the node that holds a bundle; "": it has none, or the bundle is on no node now."""
        from ray.util import placement_group_table

        node_id = placement_group_table(group)["bundles_to_node_id"].get(index, "")
        nodes = {node["NodeID"]: node for node in self._ray.nodes()}
        labels = nodes.get(node_id, {}).get("Labels", {})
        wanted = self.options.get("topology", LABELS).split(",")
        return ".".join(labels[key].replace(".", "-") for key in wanted if key in labels)

    def address(self) -> str:
        return str(self._ray.util.get_node_ip_address())

    def start(self, call: Call) -> ActorAgent:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, index = self._places[call.seat.name]
        bundle = group.bundle_specs[index]
        actor = (
            self._ray.remote(Below)
            .options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                max_concurrency=2,  # one to wait for the command, one to end it
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            )
            .remote()
        )
        there = replace(call, seat=replace(call.seat, topology=self._topology(group, index)))
        arguments = [*there.command("")[1:], "--secret", "-"]
        if self._watcher is None:
            self._watcher = Watcher(self._ray)
            self._watcher.start()
        agent = ActorAgent(self._ray, actor, call.log)
        self._watcher.add(actor.run.remote(arguments, call.token), agent)
        return agent

    def close(self) -> None:
        from ray.util import remove_placement_group

        if self._watcher:
            self._watcher.stop()
        for group in self._groups:
            remove_placement_group(group)
        self._groups, self._places = [], {}
        if self._is_ours:
            self._ray.shutdown()
            self._is_ours = False
