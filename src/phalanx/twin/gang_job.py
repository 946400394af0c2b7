"""Simulate a job in the fleet. The real `Gang` of the control plane gets the failures and decides; its commands take
simulated time and are answered. Agents answer in ideal bundles: all nodes of a replica at once, with nothing lost or
late.

A gang with replicas has every rank, as in production, unless the scenario asks for fewer. A job that stops as a whole
has one replica. With warm nodes (hot) each rank stands for a node; in a job that restarts (restart) it stands for a
block of nodes, since there the scheduler hands out nodes.
"""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any

from phalanx.control import invariants
from phalanx.control import messages as say
from phalanx.control.gang import Gang
from phalanx.control.messages import Command, Event, Failure
from phalanx.control.policy import DAY_NS, Policy
from phalanx.core.layout import Layout
from phalanx.twin.agenda import Agenda, S
from phalanx.twin.draw import Draw
from phalanx.twin.fleet import Fault, Fleet
from phalanx.twin.scenario import Scenario
from phalanx.twin.spent import Progress
from phalanx.twin.times import Times, times_of, whole_step_s

MOST_BLOCKS = 64  # ranks of a gang that restarts as a whole
NEVER_NS = 10**18
KEPT_INCIDENTS = 1000  # incidents kept with their times; all are counted
PARTS_TOLD = 100  # progress reports per run
RETUNE = 64  # failures between two updates of the checkpoint interval
ALWAYS_CHECKED = 4096  # fleets up to this many GPUs have their control plane checked after every event
CHECKED = 0.25  # events per GPU between two checks of a larger fleet, since a check takes time for every GPU
SICK_NS = 3600 * S  # a bad node without a replacement is taken out after this
DIED = Failure(signal="SIGKILL")


def policy_of(scenario: Scenario) -> Policy:
    """Return the control plane's own policy, with an operator who never gives up. No message is resent, since none is
    lost."""
    late_ns = int(scenario.late_s * S) if scenario.late_s >= 0 else Policy().late_ns
    return Policy(
        hold_ns=NEVER_NS, resend_ns=NEVER_NS, form_ns=NEVER_NS, launch_ns=NEVER_NS, park_ns=600 * S, save=False,
        late_ns=late_ns, attempts=10**9, strikes=10**9, errors=10**9, buddies=scenario.policy == "hot",
    )  # fmt: skip


class Job:
    """The simulated job. `check`: check the invariants of the control plane after every event, as small fleets always
    do. `script`: faults that happen, instead of drawn ones. `times`, `policy`: durations and rules of a real run,
    instead of the scenario's."""

    def __init__(
        self,
        scenario: Scenario,
        seed: int = 0,
        check: bool = False,
        script: Iterable[tuple[int, Fault]] | None = None,
        times: Times | None = None,
        policy: Policy | None = None,
    ):
        self.scenario, self.events = scenario, 0
        self.check_every = 1 if check or scenario.gpus <= ALWAYS_CHECKED else int(CHECKED * scenario.gpus)
        self.agenda, self.draw = Agenda(), Draw(2 * seed + 1)
        self.times, self.assume = times or times_of(scenario), scenario.assumed
        self.digest = blake2b(digest_size=8)
        self.interruptions = self.failures = self.planned = self.last_cause = 0
        self.causes: Counter[str] = Counter()
        self.incidents: list[tuple[float, str, str]] = []  # time in seconds, what failed, what was decided
        self.forms: list[say.Form] = []  # for a script: all decisions
        self.scripted = script is not None
        self.fleet = Fleet(scenario, self.agenda, Draw(2 * seed), self.strike, script)
        nodes = self.fleet.job_nodes
        self.fewest_spares = self.fleet.nodes - nodes
        self.contained = scenario.policy in ("contained", "shrink")
        self.block = -(-nodes // MOST_BLOCKS) if scenario.policy == "restart" else 1
        if self.contained:
            replicas = scenario.gpus // scenario.replica_gpus
            ranks = scenario.ranks_per_node or self.fleet.per_node
            size = scenario.replica_gpus * ranks // self.fleet.per_node
            layout = Layout(replica=replicas, shard=size, ranks_per_node=ranks)
        else:
            replicas, layout = 1, Layout(shard=-(-nodes // self.block), ranks_per_node=1)
        self.gang = Gang.of(layout, 10**12, policy or policy_of(scenario))
        step_ns = int(whole_step_s(scenario) * S)
        pass_ns = int(scenario.pass_s * S) or int(scenario.step_s * S) // scenario.micro_batches
        self.progress = Progress(step_ns, replicas, scenario.micro_batches, pass_ns)
        self.interval_ns = int(scenario.interval_s * S) or step_ns
        self._set_overhead()
        self.made = 0  # the generation that made the last step
        self.redo_ns = 0
        self.ready_ns = 0  # no generation can form before this
        self.storage_ns = 0  # nothing can be loaded or written before this
        self.broken: dict[int, int] = {}  # replica -> failures not yet noticed
        self.sick: dict[int, int] = {}  # node that must be repaired -> duration
        self.limping: dict[int, dict[int, float]] = {}  # node -> {end time: factor by which it slows the steps}
        self.resets: dict[int, int] = {}  # node -> end time of its device reset
        self.maintained: dict[int, int] = {}  # drained node -> duration
        self.incarnation: defaultdict[str, int] = defaultdict(lambda: 1)
        self.launches: dict[int, int] = {}  # place -> duration of the next launch there, if a script gives it
        self.buddies: dict[str, str] = {}
        self.down: set[str] = set()  # nodes that are out
        self.reborn: set[str] = set()  # nodes that came back since the last generation, with empty memory
        self.timers: dict[str, int] = {}
        self.members = {node: node // self.block for node in range(nodes)} if self.block_wise else {}
        self.free = list(range(nodes, self.fleet.nodes)) if self.block_wise else []
        self.lacking: defaultdict[int, int] = defaultdict(int)  # block -> number of missing nodes
        self._start()

    @property
    def block_wise(self) -> bool:
        return self.scenario.policy == "restart"

    def run(self, until_ns: int | None = None, tell: Callable[[float], None] | None = None) -> None:
        """Simulate until `until_ns`. `tell` is called with the share of the time simulated so far."""
        until_ns = int(self.scenario.days * DAY_NS) if until_ns is None else until_ns
        gc.disable()  # the state is large and lives as long as the run, so collecting it is wasted work
        try:
            for part in range(PARTS_TOLD):
                if tell:
                    tell(part / PARTS_TOLD)
                self.agenda.run(until_ns * (part + 1) // PARTS_TOLD)
        finally:
            gc.enable()
        self.progress.advance(until_ns)

    # -- the beginning, which takes no time

    def _start(self) -> None:
        names = range(self.gang.members.replica_size) if self.block_wise else range(self.fleet.nodes)
        size = self.scenario.switch_nodes or 1
        for node in names:
            name = _name(node)
            self.hear(say.NodeJoined(name, 1, f"d{node // size}", name, name), quiet=True)
        crews: dict[str, list[int]] = {}
        for worker, found in self.gang.members.workers.items():
            crews.setdefault(found.node, []).append(worker)
        for name, workers in crews.items():
            self.hear(say.WorkersUp(name, 1, tuple(workers), tuple(workers)), quiet=True)
        for number, replica in self.gang.worlds.replicas.items():
            there = self.gang.worlds.crews(number, replica.waiting).items()
            about = _columns((name, 1, tuple(crew.values())) for name, crew in there)
            self.hear(say.Built(*about, replica.world), quiet=True)
        assert self.gang.form
        self._formed(self.gang.form)

    # -- what the gang is told, and what it says

    def hear(self, event: Event, quiet: bool = False) -> None:
        """Pass an event to the gang and obey its commands. `quiet`: the caller handles what follows."""
        before = (self.gang.generation, self.gang.members.last_worker)
        commands = self.gang.apply(self.agenda.now, event)
        self.events += 1
        if self.events % self.check_every == 0:
            invariants.check(self.gang, before)
        if quiet:
            for command in commands:
                if isinstance(command, say.SetTimer):
                    self._set_timer(command)
        elif commands:
            self._obey(commands)
        self._mark()

    def _mark(self) -> None:
        """Attribute the time while the gang does not train."""
        progress = self.progress
        if progress.state in ("restart", "waiting"):
            part = "waiting" if self.gang.desk.said_ns >= 0 else "restart"
            if part != progress.state:
                progress.advance(self.agenda.now)
                progress.stop(part)

    def _obey(self, commands: list[Command]) -> None:
        halts: dict[int, list[say.Halt]] = {}
        builds: dict[int, list[say.Build]] = {}
        for command in commands:
            if isinstance(command, say.Halt):
                halts.setdefault(command.world, []).append(command)
            elif isinstance(command, say.Build):
                builds.setdefault(command.world, []).append(command)
            elif (handler := HANDLERS.get(type(command))) is not None:
                handler(self, command)
        for some in halts.values():
            self.agenda.after(self.times.decide, self._parked, some)
        for orders in builds.values():
            self.agenda.after(self.times.build if self.contained else 0, self._built, orders)

    def _set_timer(self, command: say.SetTimer) -> None:
        if command.at_ns < NEVER_NS and self.timers.get(command.timer) != command.at_ns:
            self.timers[command.timer] = command.at_ns
            self.agenda.after(max(0, command.at_ns - self.agenda.now), self._fire, command.timer, command.at_ns)

    def _fire(self, timer: str, at_ns: int) -> None:
        if self.timers.get(timer) == at_ns:
            del self.timers[timer]
            if timer in self.gang.desk.timers:
                self.hear(say.TimerFired(timer))

    def _alive(self, name: str, incarnation: int) -> bool:
        """Return True if this life of the node is present."""
        return self.incarnation[name] == incarnation and name not in self.down

    # -- workers

    def _launch(self, command: say.Launch) -> None:
        self._up_later(command.node, command.incarnation, tuple(command.workers.values()))

    def _up_later(self, name: str, incarnation: int, workers: tuple[int, ...]) -> None:
        if self.block_wise:
            self.agenda.after(0, self._up, name, incarnation, workers)
            return
        reset_ns = self.resets.get(_number(name), 0)
        launch_ns = self.launches.pop(self.gang.members.nodes[name].place, self.times.launch)
        wait_ns = max(0, reset_ns - self.agenda.now) + (launch_ns if self.contained else 0)
        self.agenda.after(wait_ns, self._up, name, incarnation, workers)

    def _up(self, name: str, incarnation: int, workers: tuple[int, ...]) -> None:
        number = _number(name)
        if self.block_wise and self.lacking[number]:
            self.progress.advance(self.agenda.now)
            self.progress.stop("waiting")
            return  # it starts when a repaired node fills the block
        if not self._alive(name, incarnation):
            return
        if number in self.sick and self.contained:
            self.hear(say.WorkerDied(name, incarnation, workers[0], DIED))
            workers = workers[1:]
        if workers:
            self.hear(say.WorkersUp(name, incarnation, workers, workers))

    def _kill(self, command: say.Kill) -> None:
        incarnation = self.incarnation[command.node]
        for worker in command.workers:
            self.agenda.after(self.times.decide, self._killed, command.node, incarnation, worker)
        number = _number(command.node)
        if self.block_wise:
            return
        if self.gang.members.nodes[command.node].fault:  # it was replaced, and goes to repair
            self.sick.setdefault(number, int(self.assume("repair.reboot_s") * S))
        if number in self.sick:
            self.agenda.after(S, self._repair, number)

    def _killed(self, name: str, incarnation: int, worker: int) -> None:
        if self._alive(name, incarnation):
            self.hear(say.WorkerDied(name, incarnation, worker, DIED))

    def _parked(self, orders: list[say.Halt]) -> None:
        self._note(f"parked {orders[0].world} {len(orders)}")
        number = next((r for r, world in self.gang.gen.worlds.items() if world == orders[0].world), -1)
        held = self._state() if number >= 0 else (-1, -1, 0)
        lives = self.incarnation
        there = [o for o in orders if o.node not in self.down] if self.down else orders
        if there:
            about = _columns((o.node, lives[o.node], o.workers) for o in there)
            self.hear(say.Parked(*about, orders[0].world, *held))

    def _built(self, orders: list[say.Build]) -> None:
        self._note(f"built {orders[0].world} {len(orders)}")
        lives = self.incarnation
        bad = self.down | {_name(node) for node in self.sick}
        there = [o for o in orders if o.node not in bad] if bad else orders
        if there:
            about = _columns((o.node, lives[o.node], tuple(o.crew.values())) for o in there)
            self.hear(say.Built(*about, orders[0].world))

    def _probe(self, command: say.Probe) -> None:
        for name in command.nodes:
            self.agenda.after(self.times.decide, self._standing, name, self.incarnation[name])

    def _standing(self, name: str, incarnation: int) -> None:
        """Report all workers as making progress: nothing that takes long here is stuck."""
        if self._alive(name, incarnation):
            workers = [w for w, found in self.gang.members.workers.items() if found.node == name]
            self.hear(say.Standing(name, incarnation, dict.fromkeys(workers, self.agenda.now)))

    # -- generations

    def _part(self, command: say.Part) -> None:
        progress = self.progress
        ends_ns = progress.until_ns if progress.state == "finishing" else 0
        at_ns = max(self.agenda.now + self.times.decide, ends_ns)
        self.agenda.after(at_ns - self.agenda.now, self._parted, command.generation)

    def _parted(self, generation: int) -> None:
        gang, progress = self.gang, self.progress
        if gang.generation != generation or gang.phase != "parting" or not gang.gen.left:
            return
        progress.advance(self.agenda.now)
        if progress.state in ("training", "finishing", "detect"):
            progress.stop("restart")
        self._leave(kept=True)

    def _leave(self, kept: bool) -> None:
        gen, state = self.gang.gen, self._state()
        there = [r for r in gen.worlds if r in gen.left]
        worlds = tuple(gen.worlds[r] for r in there)
        self._note(f"parted {gen.number} {len(there)} {state[0]}")
        self.hear(say.Parted(tuple(there), worlds, gen.number, *state, kept))

    def _state(self) -> tuple[int, int, int]:
        """Return what a worker holds: its last step, the step that it has prepared, and the generation that made it."""
        step, form = self.progress.step, self.gang.form
        if form and step > form.step:
            self.made = form.generation
        return step, step, self.made

    def _pause(self, command: say.Pause) -> None:
        self.progress.advance(self.agenda.now)
        at_ns = self.progress.boundary_ns(self.agenda.now + self.times.decide)
        self.agenda.after(at_ns - self.agenda.now, self._boundary, command.generation)

    def _boundary(self, generation: int) -> None:
        gang, progress = self.gang, self.progress
        if gang.generation != generation or gang.phase != "running" or progress.state != "training":
            return  # something broke first
        progress.advance(self.agenda.now)
        progress.stop("restart")
        self._leave(kept=False)

    def _form(self, form: say.Form) -> None:
        now, times, progress = self.agenda.now, self.times, self.progress
        progress.advance(now)
        if form.step < progress.step or (form.branch and not self.contained):
            progress.back_to(form.step)
        self.made = max(self.made, form.generation - 1)
        self.buddies = form.buddies
        kinds = {source.kind for source in (form.every, *form.sources.values()) if source}
        kinds |= {"live"} if form.gifts else set()
        takes = max((getattr(times, kind, 0) for kind in kinds), default=0)
        at_ns = now + times.decide + times.form + takes if self.contained else now
        if "durable" in kinds:
            at_ns = max(at_ns, self.storage_ns)
        if form.rung >= 1:
            at_ns = max(at_ns, self.ready_ns)
        self._note(f"form {form.generation} {form.step} {len(form.replicas)} {form.rung}")
        if self.scripted:
            self.forms.append(form)
        if form.rung >= 0 and self.incidents and not self.incidents[-1][2]:
            at, what, _ = self.incidents[-1]
            self.incidents[-1] = (at, what, form.reason)
        self.agenda.after(at_ns - now, self._formed, form)

    def _formed(self, form: say.Form) -> None:
        gang, progress = self.gang, self.progress
        if gang.form is not form or gang.phase != "forming":
            return
        progress.advance(self.agenda.now)
        if any(count and r in gang.gen.worlds for r, count in self.broken.items()):
            progress.stop("detect")  # a failure that is still to be noticed
            return
        progress.train(len(form.replicas), self.redo_ns if form.kept else 0)
        self.hear(say.Formed(form.replicas, form.worlds, form.generation))
        assert gang.phase == "running", gang.phase
        self._slow_down()
        self._count_spares()
        self.redo_ns = 0
        self.reborn.clear()
        at_ns = progress.boundary_ns(self.agenda.now)
        self.agenda.after(at_ns - self.agenda.now, self._stepped, form.generation)

    def _stepped(self, generation: int) -> None:
        """Report the first step of a generation."""
        progress, gang = self.progress, self.gang
        if gang.generation != generation or progress.state != "training":
            return
        progress.advance(self.agenda.now)
        self.made = generation
        self.hear(say.StepsDone(generation, progress.step))
        if not self.scenario.interval_s and gang.commits.failures % RETUNE == 0:
            times = self.times
            self.hear(say.Cost(progress.step, progress.step_ns, times.stall, 0, times.drain))

    # -- checkpoints

    def _interval(self, command: say.Interval) -> None:
        self.interval_ns = command.steps * self.progress.step_ns
        self.progress.advance(self.agenda.now)
        self._set_overhead()

    def _set_overhead(self) -> None:
        stall, every = self.times.stall, self.interval_ns
        self.progress.overhead = self.times.memory_share + stall / (stall + every)

    def _save(self) -> None:
        """Report the newest checkpoint: the last multiple of the interval that had time to be written."""
        progress, now = self.progress, self.agenda.now
        if now < self.storage_ns:
            return
        work_ns = (progress.work_ns - self.times.drain) // self.interval_ns * self.interval_ns
        step = max(0, work_ns // progress.step_ns)
        if step > self.gang.commits.last and self.gang.phase == "running":
            self.hear(say.Durable(step, self.made))

    def _ask(self, command: say.Ask) -> None:
        self.agenda.after(0, self._held, command.generation)

    def _held(self, generation: int) -> None:
        """Report what nodes hold in memory: the state of their own ranks, and of the nodes whose buddies they are."""
        gang = self.gang
        keeps: defaultdict[str, list[str]] = defaultdict(list)
        for name, address in self.buddies.items():
            keeps[address].append(name)
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        if not self.block_wise:
            for replica in gang.gen.worlds:
                for rank, home in zip(
                    sorted(gang.worlds.replicas[replica].crew), gang.worlds.homes(replica), strict=True
                ):
                    ranks[home].append(rank)
        step, _, made = self._state()
        for name in sorted(gang.finder.unanswered):
            incarnation = self.incarnation[name]
            if self._alive(name, incarnation):
                own = [] if name in self.reborn else ranks[name]
                found = tuple((rank, step, made) for rank in (*own, *(r for n in keeps[name] for r in ranks[n])))
                self.hear(say.Held(name, incarnation, generation, found))

    # -- failures

    def strike(self, fault: Fault) -> None:
        self.progress.advance(self.agenda.now)
        self._note(f"{fault.name} {fault.nodes[:4]} {fault.swap}")
        getattr(self, f"_strike_{fault.effect}", self._strike_hardware)(fault)

    def _strike_storage(self, fault: Fault) -> None:
        self._save()
        self.storage_ns = max(self.storage_ns, self.agenda.now + fault.repair_ns)

    def _strike_planned(self, fault: Fault) -> None:
        (node,) = fault.nodes
        if self.contained:
            if self._seated(node):
                self.planned += 1
                self.maintained[node] = fault.repair_ns
                self.hear(say.Drain(_name(node)))
        elif self._seated(node):
            self.planned += 1
            self._stop_for_maintenance()
            self._lose_worker(self._agent(node), "worker")

    def _release(self, command: say.Release) -> None:
        number = _number(command.node)
        if number in self.maintained:
            self.agenda.after(self.maintained.pop(number), self._undrain, number)

    def _undrain(self, node: int) -> None:
        if self.fleet.up[node]:
            self.hear(say.Drain(_name(node), off=True))

    def _strike_limp(self, fault: Fault) -> None:
        """Slow the steps of all replicas until the fault is over or the node is replaced."""
        (node,) = fault.nodes
        self.limping.setdefault(node, {})[self.agenda.now + fault.repair_ns] = fault.slow
        self._slow_down()
        self.agenda.after(fault.repair_ns, self._recover, node)
        if self.contained:
            self.agenda.after(
                int(self.assume("contained.slow_detect_s") * S), self._warn, node, self.incarnation[_name(node)]
            )

    def _warn(self, node: int, incarnation: int) -> None:
        if node in self.limping and self._alive(_name(node), incarnation) and self._seated(node):
            self.sick.setdefault(node, int(self.assume("repair.reboot_s") * S))
            self.hear(say.DeviceWarning(_name(node), incarnation, "link_errors", 10**6))

    def _recover(self, node: int) -> None:
        left = {end: factor for end, factor in self.limping.pop(node, {}).items() if end > self.agenda.now}
        if left:
            self.limping[node] = left
        self._slow_down()

    def _slow_down(self) -> None:
        active = self.gang.gen.worlds
        there = (n for n in self.limping if self._seated(n) and any(r in active for r in self._replicas(n)))
        slow = max((factor for node in there for factor in self.limping[node].values()), default=1.0)
        if slow != self.progress.slow:
            self.progress.advance(self.agenda.now)
            self.progress.slow = slow

    def _strike_slow(self, fault: Fault) -> None:
        """Slow the node down, and stop it in the end unless it is replaced first."""
        (node,) = fault.nodes
        if not self._seated(node):
            self._strike_hardware(fault)
            return
        last_ns = int(self.assume("slow.chip_minutes") * 60 * S)
        self._strike_limp(Fault(fault.name, "limp", fault.nodes, False, last_ns, fault.slow))
        self.agenda.after(last_ns, self._stop_slow, fault, self.incarnation[_name(node)])

    def _stop_slow(self, fault: Fault, incarnation: int) -> None:
        (node,) = fault.nodes
        if self.fleet.up[node] and self.incarnation[_name(node)] == incarnation and self._seated(node):
            self._strike_hardware(fault)

    def _strike_corrupt(self, fault: Fault) -> None:
        """Let the node corrupt silently. All train on, and the work since the last checkpoint before the fault will not
        count."""
        after_ns = int(self.assume("contained.corrupt_detect_s") * S)
        if not after_ns or not self.contained or not self._seated(fault.nodes[0]):
            self._strike_hardware(fault)
            return
        self._save()
        progress = self.progress
        unsaved_ns = progress.work_ns - self.gang.commits.last * progress.step_ns
        good_ns = progress.spent["productive"] - max(0, unsaved_ns)
        self.agenda.after(after_ns, self._find_corrupt, fault, self.incarnation[_name(fault.nodes[0])], good_ns)

    def _find_corrupt(self, fault: Fault, incarnation: int, good_ns: int) -> None:
        """Notice the corruption. `good_ns`: the work in the checkpoint before it. Redone steps keep their numbers, so
        that checkpoint is reported under the current step."""
        if self.gang.phase != "running":
            self.agenda.after(S, self._find_corrupt, fault, incarnation, good_ns)
            return
        (node,), progress = fault.nodes, self.progress
        progress.advance(self.agenda.now)
        progress.discount(max(0, progress.spent["productive"] - good_ns))
        step, _, made = self._state()
        if step > self.gang.commits.last:
            self.hear(say.Durable(step, made))
        if self.fleet.up[node] and self.incarnation[_name(node)] == incarnation and self._seated(node):
            self._strike_hardware(fault)

    def _strike_hardware(self, fault: Fault) -> None:
        nodes = fault.nodes or (self._any_node() if fault.rank < 0 else self._node_of(fault.rank))
        hit = [node for node in nodes if self._seated(node)]
        self.failures += 1
        if fault.launch_ns:
            self.launches[fault.rank // self.fleet.per_node] = fault.launch_ns
        if hit:
            self._count(fault)
            self.causes[fault.name] += 1
            if len(self.incidents) < KEPT_INCIDENTS:
                self.incidents.append((self.agenda.now / S, fault.name, ""))
            self._save()
            self._stop_pass(hit, _process(fault))
        for node in sorted(nodes, key=lambda node: node in hit):  # spares that fail too go first, so that none is taken
            self._hit(node, fault, node in hit)
        self._count_spares()

    def _count(self, fault: Fault) -> None:
        """Count failures with a common cause as one interruption."""
        self.interruptions += fault.cause == 0 or fault.cause != self.last_cause
        self.last_cause = fault.cause

    def _count_spares(self) -> None:
        spares = len(self.free) if self.block_wise else len(self.gang.members.spares)
        self.fewest_spares = min(self.fewest_spares, spares)

    def _stop_pass(self, hit: list[int], rank: int) -> None:
        """Remove the replicas of these nodes from the current step."""
        self.progress.advance(self.agenda.now)
        running = self.gang.phase == "running" and self.progress.state in ("training", "finishing")
        broken = {replica for node in hit for replica in self._replicas(node, rank)}
        there = {r for r in broken if r in self.gang.gen.worlds and not self.broken.get(r)}
        if running and there:
            self.progress.break_off(len(there))
            self.redo_ns = self.progress.pass_ns
        if self.times.stop:
            self.ready_ns = max(self.ready_ns, self.agenda.now + self._stop_ns())
        for replica in broken:
            self.broken[replica] = self.broken.get(replica, 0) + 1

    def _stop_ns(self) -> int:
        """Draw how long a recovery takes that stops the job."""
        stop_s = self.draw.lognormal(self.times.stop / S, self.assume("repair.sigma"))
        if not self.contained and self.draw.chance(self.assume("restart.manual_share")):
            stop_s += 3600 * self.draw.log_uniform(
                self.assume("restart.manual_h_low"), self.assume("restart.manual_h_high")
            )
        return int(stop_s * S)

    def _hit(self, node: int, fault: Fault, seated: bool) -> None:
        """Decide what happens to a node, and when that is noticed."""
        self.limping.pop(node, None)
        after_ns, name = self.times.detect.get(fault.effect, 0), _name(node)
        replicas = self._replicas(node, _process(fault)) if seated else ()
        agent = self._agent(node) if seated else name
        if fault.effect == "node" or (fault.swap and not (self.contained and seated)):
            self._take_out(node, fault.repair_ns)
            if not self.block_wise:
                self.agenda.after(after_ns, self._silent, name, self.incarnation[name], replicas, fault.proof)
            elif seated:
                self._replace(node)
                self.agenda.after(after_ns, self._lose_worker, agent, fault.effect)
            else:
                self.free.remove(node)
            return
        if fault.swap:
            self.sick[node] = fault.repair_ns
            self.agenda.after(SICK_NS, self._repair, node)
        elif fault.nodes:
            self.resets[node] = self.agenda.now + after_ns + fault.repair_ns
        if seated:
            self.agenda.after(after_ns, self._lose_worker, agent, fault.effect, replicas, _process(fault))

    def _stop_for_maintenance(self) -> None:
        """Save, and stop the job."""
        progress = self.progress
        progress.advance(self.agenda.now)
        if self.gang.phase == "running":
            progress.lose(progress.work_ns % progress.step_ns)
            self.hear(say.Durable(progress.step, self.made))
        progress.stop("restart")
        self.ready_ns = max(self.ready_ns, self.agenda.now + self._stop_ns())

    def _lose_worker(self, name: str, effect: str, replicas: Iterable[int] = (0,), rank: int = -1) -> None:
        """Let a process die, and let its agent report it."""
        self._noticed(replicas)
        found = self.gang.members.nodes.get(name)
        if found is None or found.dead or found.place < 0 or not self._alive(name, self.incarnation[name]):
            return
        seats = self.gang.members.places[found.place].seats()
        workers = next((seat.workers for seat in seats if seat.node == name), {})
        if rank >= 0 and self.contained:
            workers = {rank: workers[rank]} if rank in workers else {}
        if workers:
            worker = sorted(workers.values())[self.draw.below(len(workers))]
            failure = Failure(hang="stands still") if effect == "hang" else DIED
            self.hear(say.WorkerDied(name, self.incarnation[name], worker, failure))

    def _noticed(self, replicas: Iterable[int]) -> None:
        progress = self.progress
        for replica in replicas:
            if self.broken.get(replica, 0) > 1:
                self.broken[replica] -= 1
            else:
                self.broken.pop(replica, None)
        progress.advance(self.agenda.now)
        if progress.state == "detect" and not self.broken:
            progress.stop("restart")

    def _silent(self, name: str, incarnation: int, replicas: Iterable[int], proof: str) -> None:
        self._noticed(replicas)
        if self.incarnation[name] == incarnation:
            self.hear(say.NodeDead(name, incarnation, proof))

    def _repair(self, node: int) -> None:
        """Take out a node that is known to need repair."""
        for_ns, name = self.sick.pop(node, 0), _name(node)
        if not for_ns or not self.fleet.up[node]:
            return
        hit = [node] if self._seated(node) else []
        trains = any(r in self.gang.gen.worlds for r in self._replicas(node)) if hit else False
        if trains and self.gang.phase == "running":
            self.sick[node] = for_ns  # it still trains, and is taken out once a spare has come
            self.agenda.after(SICK_NS, self._repair, node)
            return
        self.limping.pop(node, None)
        self._take_out(node, for_ns)
        self.hear(say.NodeDead(name, self.incarnation[name], "taken out"))

    def _take_out(self, node: int, for_ns: int) -> None:
        self.fleet.take_out(node, for_ns, self._back)
        if not self.block_wise:
            self.down.add(_name(node))

    def _back(self, node: int) -> None:
        """Bring back a repaired node."""
        self.down.discard(_name(node))
        self.sick.pop(node, None)
        if self.block_wise:
            self._fill(node)
            return
        name = _name(node)
        self.incarnation[name] += 1
        self.reborn.add(name)
        self.hear(say.NodeJoined(name, self.incarnation[name], self.gang.members.nodes[name].domain, name, name))

    # -- nodes of a job that starts again as a whole: its scheduler hands them out

    def _agent(self, node: int) -> str:
        """Return the name under which a node of the job reports."""
        return _name(self.members[node] if self.block_wise else node)

    def _replace(self, node: int) -> None:
        block = self.members.pop(node)
        if self.free:
            self.members[self.free.pop(0)] = block
        else:
            self.lacking[block] += 1

    def _fill(self, node: int) -> None:
        block = next((b for b, count in sorted(self.lacking.items()) if count), -1)
        if block < 0:
            self.free.append(node)
            return
        self.members[node] = block
        self.lacking[block] -= 1
        if not self.lacking[block]:
            found = self.gang.staff.starting
            workers = tuple(w for w in found if self.gang.members.workers[w].node == _name(block))
            self.progress.advance(self.agenda.now)
            self.progress.stop("restart")
            if workers:
                self.hear(say.WorkersUp(_name(block), 1, workers, workers))

    # -- who is where

    def _any_node(self) -> tuple[int, ...]:
        """Choose a node of the job; none: no node of it is up."""
        for _ in range(100):
            node = self.draw.below(self.fleet.nodes)
            if self.fleet.up[node] and self._seated(node):
                return (node,)
        return ()

    def _node_of(self, rank: int) -> tuple[int, ...]:
        """Return the node that runs a rank of the real job; none: its place is vacant."""
        place = rank // self.fleet.per_node
        if self.block_wise:
            return tuple(node for node, block in self.members.items() if block == place // self.block)[:1]
        seat = self.gang.members.places[place].now
        return (_number(seat.node),) if seat else ()

    def _seated(self, node: int) -> bool:
        if self.block_wise:
            return node in self.members
        found = self.gang.members.nodes.get(_name(node))
        return found is not None and not found.dead and found.place >= 0

    def _replicas(self, node: int, rank: int = -1) -> Iterable[int]:
        """Return the replicas on a node, or only that of a rank."""
        if not self.contained:
            return (0,)
        members = self.gang.members
        place = members.nodes[_name(node)].place
        if place < 0:
            return ()
        return (members.replica_of(rank),) if rank >= 0 else members.replicas_at(place)

    def _note(self, text: str) -> None:
        self.digest.update(f"{self.agenda.now} {text}\n".encode())


def _process(fault: Fault) -> int:
    """Return the rank whose process a scripted fault kills; -1: it kills a node, or any process."""
    return -1 if fault.effect == "node" else fault.rank


def _columns(reports: Iterable[tuple[str, int, tuple[int, ...]]]) -> tuple[Any, Any, Any]:
    """Merge reports into columns, as an aggregator does: the nodes, their incarnations, their workers."""
    nodes, lives, workers = zip(*reports, strict=True)
    return nodes, lives, workers


def _name(node: int) -> str:
    return f"n{node:06}"


def _number(name: str) -> int:
    return int(name[1:])


HANDLERS: dict[type[Command], Any] = {
    say.SetTimer: Job._set_timer,
    say.Launch: Job._launch,
    say.Kill: Job._kill,
    say.Probe: Job._probe,
    say.Part: Job._part,
    say.Pause: Job._pause,
    say.Form: Job._form,
    say.Interval: Job._interval,
    say.Ask: Job._ask,
    say.Release: Job._release,
}
