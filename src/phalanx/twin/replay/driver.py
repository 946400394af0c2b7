"""Run the replay: jobs arrive at their times, a policy decides, running jobs end. The policy `phalanx` is the gang
scheduler that runs real jobs (`control.schedule`); it does not know how long a job will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise

from phalanx.control.schedule import asks
from phalanx.control.schedule.asks import Ask, Rules, Tenant
from phalanx.control.schedule.cells import Cells
from phalanx.control.schedule.scheduler import Scheduler
from phalanx.core.errors import UserError
from phalanx.twin.replay.machines import Fleet
from phalanx.twin.replay.policies import POLICIES
from phalanx.twin.replay.pool import Pool, Taken
from phalanx.twin.replay.trace import Job

S = 10**9
PHALANX = "phalanx"
NAMES = (*POLICIES, PHALANX)
NEVER = 1 << 100


@dataclass(slots=True)
class Life:
    """The history of one job."""

    job: Job
    left_ns: int  # time that it still has to run
    first_ns: int = -1  # its first start
    end_ns: int = -1
    began_ns: int = -1  # its last start; -1: it is not running
    served_ns: int = 0
    stops: int = 0
    epoch: int = 0  # number of starts and stops; it invalidates ends that were called off
    taken: Taken = ()


@dataclass(slots=True)
class Figures:
    """Sums over time and jobs."""

    gpus: int
    busy: int = 0  # GPU-ns
    scattered: int = 0  # GPU-ns that are free on nodes in use
    hops: int = 0  # GPU-ns times neighbours in rank order on different nodes
    crossings: int = 0  # the part of `hops` between different leaves
    decisions: int = 0
    cpu_s: float = 0.0
    first_ns: int = 0
    last_ns: int = 0
    lives: list[Life] = field(default_factory=list)


class Replay:
    """`stop_ns`: the cost of a stop to a job, as additional running time."""

    def __init__(self, fleet: Fleet, jobs: list[Job], stop_ns: int):
        self.fleet, self.jobs, self.stop_ns = fleet, jobs, stop_ns
        self.now_ns = jobs[0].submit_ns if jobs else 0
        self.lives = {job.number: Life(job, job.duration_ns) for job in jobs}
        self.ends: list[tuple[int, int, int]] = []  # (time, job, epoch)
        self.figures = Figures(fleet.gpus, first_ns=self.now_ns, lives=list(self.lives.values()))
        self.used = 0  # GPUs
        self.leaf = [path[0] if path else "" for path in fleet.paths]

    # -- what a policy may do

    def start(self, job: Job, taken: Taken) -> None:
        life = self.lives[job.number]
        life.first_ns = self.now_ns if life.first_ns < 0 else life.first_ns
        life.began_ns, life.taken = self.now_ns, taken
        life.epoch += 1
        self.used += job.gpus
        self.figures.decisions += 1
        heappush(self.ends, (self.now_ns + life.left_ns, job.number, life.epoch))

    def halt(self, job: Job, cost_ns: int) -> Life:
        """Take a job off its GPUs; `cost_ns` is added to the time that it still has to run."""
        life = self.lives[job.number]
        ran = self.now_ns - life.began_ns
        life.served_ns += ran
        life.left_ns += cost_ns - ran
        self.figures.busy += job.gpus * ran
        nodes = [node for node, _ in life.taken]
        hops = len(nodes) - 1
        crossings = sum(self.leaf[a] != self.leaf[b] for a, b in pairwise(nodes))
        self.figures.hops += hops * job.gpus * ran
        self.figures.crossings += crossings * job.gpus * ran
        life.began_ns = -1
        life.epoch += 1
        self.used -= job.gpus
        return life

    def stop(self, job: Job) -> None:
        life = self.halt(job, self.stop_ns)
        life.stops += 1
        self.figures.decisions += 1
        self.freed(life)

    def freed(self, life: Life) -> None: ...

    def remaining_ns(self, job: Job) -> int:
        life = self.lives[job.number]
        return life.left_ns - (self.now_ns - life.began_ns if life.began_ns >= 0 else 0)

    def served_ns(self, job: Job) -> int:
        life = self.lives[job.number]
        return life.served_ns + (self.now_ns - life.began_ns if life.began_ns >= 0 else 0)

    # -- time

    def run(self, submit: Callable[[Job], None], ended: Callable[[Job], None], decide: Callable[[], int]) -> Figures:
        began, coming, again_ns = time.process_time(), 0, NEVER
        jobs, ends, lives = self.jobs, self.ends, self.lives
        while coming < len(jobs) or ends or again_ns < NEVER:
            next_ns = min(
                ends[0][0] if ends else NEVER, jobs[coming].submit_ns if coming < len(jobs) else NEVER, again_ns
            )
            self.figures.scattered += self.scattered() * (next_ns - self.now_ns)
            self.now_ns = next_ns
            while ends and ends[0][0] <= self.now_ns:
                _, number, epoch = heappop(ends)
                if lives[number].epoch == epoch:
                    life = self.halt(lives[number].job, 0)
                    life.end_ns = self.now_ns
                    ended(life.job)
            while coming < len(jobs) and jobs[coming].submit_ns <= self.now_ns:
                submit(jobs[coming])
                coming += 1
            again_ns = decide() or NEVER
        self.figures.cpu_s, self.figures.last_ns = time.process_time() - began, self.now_ns
        assert all(life.end_ns >= 0 for life in self.figures.lives), "a job never ran"
        return self.figures

    def scattered(self) -> int:
        """Return the GPUs that are free on nodes in use."""
        raise NotImplementedError


class _Classical(Replay):
    def __init__(self, fleet: Fleet, jobs: list[Job], stop_ns: int, policy: str):
        super().__init__(fleet, jobs, stop_ns)
        self.pool = Pool(len(fleet.names), fleet.node_gpus)
        self.policy = POLICIES[policy](self)

    def freed(self, life: Life) -> None:
        self.pool.give(life.taken)

    def scattered(self) -> int:
        return self.pool.total - self.pool.size * self.pool.whole

    def go(self) -> Figures:
        def ended(job: Job) -> None:
            self.freed(self.lives[job.number])
            self.policy.finish(self.now_ns, job)

        return self.run(
            lambda job: self.policy.submit(self.now_ns, job), ended, lambda: self.policy.decide(self.now_ns)
        )


class _Phalanx(Replay):
    def __init__(self, fleet: Fleet, jobs: list[Job], stop_ns: int):
        super().__init__(fleet, jobs, stop_ns)
        self.cells = Cells(fleet.node_gpus, fleet.levels, fleet.paths)
        tenants = [Tenant(name, quota=gpus) for name, gpus in fleet.vcs.items()]
        names = [str(n) for n in range(len(fleet.names))]
        self.scheduler = Scheduler(self.cells, names, Rules(restart_ns=stop_ns), tenants)
        self.timer_ns = 0

    def scattered(self) -> int:
        return self.cells.free_gpus - self.cells.size * self.cells.counts[-1][0][self.cells.size]

    def hear(self, event: asks.Event) -> None:
        todo = [event]
        while todo:
            for command in self.scheduler.apply(self.now_ns, todo.pop(0)):
                match command:
                    case asks.Start(job, replicas):
                        taken = tuple((int(node), gpus) for replica in replicas for node, gpus in replica)
                        self.start(self.lives[int(job)].job, taken)
                    case asks.Stop(job, grace_ns):
                        life = self.lives[int(job)]
                        if not grace_ns:  # it loses its work since its last start
                            life.left_ns += self.now_ns - life.began_ns
                        self.stop(life.job)
                        todo.append(asks.Stopped(job))
                    case asks.SetTimer(at_ns):
                        self.timer_ns = at_ns

    def go(self) -> Figures:
        def submit(job: Job) -> None:
            self.hear(asks.Submit(ask_of(job, self.fleet.node_gpus)))

        def decide() -> int:
            if self.timer_ns and self.timer_ns <= self.now_ns:
                self.timer_ns = 0
                self.hear(asks.Tick())
            return self.timer_ns

        return self.run(submit, lambda job: self.hear(asks.Ended(str(job.number))), decide)


def ask_of(job: Job, node_gpus: int) -> Ask:
    whole, rest = divmod(job.gpus, node_gpus)
    if whole:
        return Ask(str(job.number), job.vc, nodes=whole, gpus=node_gpus, rest=rest)
    return Ask(str(job.number), job.vc, gpus=rest)


def replay(fleet: Fleet, jobs: list[Job], policy: str, stop_s: float = 60.0) -> list[Figures]:
    """Replay a trace. With virtual clusters, the classical policies have a queue and nodes for each; `phalanx` has one
    cluster in which their GPUs are quotas that others may borrow."""
    for job in jobs:
        if job.gpus > fleet.gpus:
            raise UserError(
                f"the cluster has {fleet.gpus} (job {job.name}, line {job.line})", field="column gpus", value=job.gpus,
                remedy=f"give the cluster at least {max(j.gpus for j in jobs)} GPUs, or take the row out",
            )  # fmt: skip
    stop_ns = round(stop_s * S)
    if policy == PHALANX:
        return [_Phalanx(fleet, jobs, stop_ns).go()]
    if not fleet.vcs:
        return [_Classical(fleet, jobs, stop_ns, policy).go()]
    return [_Classical(part, own, stop_ns, policy).go() for part, own in _parts(fleet, jobs) if own]


def _parts(fleet: Fleet, jobs: list[Job]) -> list[tuple[Fleet, list[Job]]]:
    out, first = [], 0
    for name, gpus in fleet.vcs.items():
        own, last = [job for job in jobs if job.vc == name], first + gpus // fleet.node_gpus
        part = Fleet(fleet.node_gpus, fleet.names[first:last], fleet.levels, fleet.paths[first:last])
        first = last
        for job in own:
            if job.gpus > gpus:
                raise UserError(
                    f"its virtual cluster {name} has {gpus} (line {job.line})", field="column gpus", value=job.gpus,
                    remedy="give it more in the cluster file, or choose --policy phalanx, which lends GPUs",
                )  # fmt: skip
        out.append((part, own))
    others = next((job for job in jobs if job.vc not in fleet.vcs), None)
    if others:
        remedy = f"add [vc.{others.vc or 'NAME'}] to the cluster file"
        raise UserError(f"the cluster file has no such one (line {others.line})", field="column vc", value=others.vc,
                        remedy=remedy)  # fmt: skip
    return out
