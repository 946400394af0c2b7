"""Replay a real run in the twin: its failures at their real times, with its own durations, under another policy. This
tells what the same failures would have cost a job that restarts, or one with or without spares."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.control.messages import Form
from phalanx.twin.agenda import S
from phalanx.twin.assumed import DAY_S
from phalanx.twin.fleet import Fault
from phalanx.twin.gang_job import Job, policy_of
from phalanx.twin.scenario import POLICIES, Scenario
from phalanx.twin.spent import Progress
from phalanx.twin.times import Times, times_of

EXACT = {"repair.sigma": 0.0, "restart.manual_share": 0.0}  # use the durations of the run instead of drawn ones
LONGEST_S = 10 * 365 * DAY_S


@dataclass(frozen=True, slots=True)
class Mishap:
    """A failure of the run. `at_s`: when it was noticed, counted from the start of training."""

    at_s: float
    kind: str  # worker, hang or node
    rank: int  # the rank that failed, or one on the failed node
    detect_s: float = 0.0  # from the failure until it was noticed
    back_s: float = LONGEST_S  # for a node: until it was back
    launch_s: float = 0.0  # until a process replaced it on a node that was present; 0: not known


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of a run in seconds. None: the run shows none, so the assumption is used."""

    decide: float | None = None  # from the report to the Form
    form: float | None = None  # from the Form until all have formed their groups
    launch: float | None = None  # start a worker in place of a dead one
    build: float | None = None  # build its world, until it may join
    live: float | None = None  # load state from a peer
    start: float | None = None  # from the start of the run until it trained
    stall: float = 0.0  # per checkpoint
    drain: float = 0.0
    interval: float = 0.0  # between checkpoints; 0: there were none


@dataclass(frozen=True)
class Past:
    name: str
    replicas: int
    replica_size: int
    ranks_per_node: int
    spares: int  # nodes
    steps: int  # committed steps
    step_s: float  # at full strength, undisturbed
    micro_batches: int
    length_s: float  # from the start of the first step to the end of the last
    mishaps: tuple[Mishap, ...] = ()
    took: Durations = field(default_factory=Durations)
    deaths: int = 10**9  # deaths on one node before it is replaced

    @property
    def ranks(self) -> int:
        return self.replicas * self.replica_size

    @property
    def effective(self) -> float:
        """Return the share of the recorded time that its steps would have taken at full strength."""
        return min(1.0, self.steps * self.step_s / self.length_s)

    def scenario(self, policy: str) -> Scenario:
        nodes = -(-self.ranks // self.ranks_per_node)
        return Scenario(
            name=self.name,
            about=f"the failures of {self.name}, {POLICIES[policy]}",
            gpus=nodes * self.ranks_per_node,
            hardware="h100",  # a placeholder: nodes and durations are those of the run
            node_gpus=self.ranks_per_node,
            replica_gpus=self.replica_size,
            step_s=self.step_s,
            micro_batches=self.micro_batches,
            policy=policy,
            spares=self.spares / nodes,
            days=LONGEST_S / DAY_S,
            interval_s=self.took.interval or self.steps * self.step_s,
            assume=EXACT,
        )

    def times(self, policy: str) -> Times:
        took, assumed = self.took, times_of(self.scenario(policy))

        def known(value: float | None, otherwise: int) -> int:
            return otherwise if value is None else int(value * S)

        decide, form = known(took.decide, assumed.decide), known(took.form, assumed.form)
        launch, build = known(took.launch, assumed.launch), known(took.build, assumed.build)
        live = known(took.live, assumed.live)
        stop = {"restart": known(took.start, assumed.stop), "hot": launch + build + form + live}.get(policy, 0)
        detect = {kind: self._detect(kind) for kind in ("worker", "hang", "node")}
        return Times(
            detect=detect, decide=decide, launch=launch, build=build, form=max(0, form - decide), live=live,
            memory=2 * live, durable=int(took.drain * S), drain=int(took.drain * S), stop=stop,
            stall=int(took.stall * S), memory_share=0.0,
        )  # fmt: skip

    def _detect(self, kind: str) -> int:
        found = [m.detect_s for m in self.mishaps if m.kind == kind]
        return int(S * sum(found) / len(found)) if found else 0

    def script(self, times: Times) -> list[tuple[int, Fault]]:
        return [
            (max(0, int(m.at_s * S) - times.detect[m.kind]),
             Fault(m.kind, m.kind, rank=m.rank, repair_ns=int(m.back_s * S), launch_ns=int(m.launch_s * S),
                   proof="its processes have ended"))
            for m in self.mishaps
        ]  # fmt: skip


@dataclass(frozen=True)
class Replay:
    policy: str
    seconds: float  # time to train the same number of steps
    waterfall: dict[str, float]
    forms: tuple[Form, ...]  # the decisions of the control plane

    @property
    def effective(self) -> float:
        return self.waterfall["productive"]

    def to_json(self) -> dict[str, Any]:
        return {
            "policy": self.policy, "seconds": self.seconds, "effective_training_time": self.effective,
            "waterfall": self.waterfall,
        }  # fmt: skip


def replay(past: Past, policy: str, check: bool = False) -> Replay:
    """Apply the failures of a run to a twin of its cluster, and train as many steps."""
    scenario, times = past.scenario(policy).checked(), past.times(policy)
    rules = replace(policy_of(scenario), deaths=past.deaths)
    job = Job(scenario, 0, check, script=past.script(times), times=times, policy=rules)
    target_ns = past.steps * job.progress.step_ns
    end_ns = finish(job, target_ns)
    job.progress.advance(end_ns)
    spent = job.progress.spent
    return Replay(policy, end_ns / S, {part: ns / end_ns for part, ns in spent.items()}, tuple(job.forms))


def finish(job: Job, target_ns: int) -> int:
    """Run until the work reaches `target_ns`, and return the time at which it did."""

    def after(now_ns: int) -> Progress:
        found = copy.copy(job.progress)
        found.spent = dict(found.spent)
        found.advance(now_ns)
        return found

    queue, last_ns = job.agenda.queue, int(LONGEST_S * S)
    while queue and queue[0][0] < last_ns and after(queue[0][0]).work_ns < target_ns:
        job.agenda.run(queue[0][0])
    low, high = job.agenda.now, min(queue[0][0] if queue else last_ns, last_ns)
    while low < high:
        middle = (low + high) // 2
        if after(middle).work_ns >= target_ns:
            high = middle
        else:
            low = middle + 1
    return high
