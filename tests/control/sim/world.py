"""The world around the control code: a clock, a network, a controller that can be killed and folded again, agents with
their memory, and workers that train. Everything random comes from one generator."""

from __future__ import annotations

import heapq
import json
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from random import Random

from phalanx.control import invariants
from phalanx.control.gang import Gang
from phalanx.control.member import Member
from phalanx.control.messages import (
    Durable,
    Event,
    Form,
    Held,
    Missing,
    NodeClear,
    NodeDead,
    NodeJoined,
    NodeSuspect,
    Note,
    Parked,
    Ready,
    SetTimer,
    StepsDone,
    TimerFired,
    WorkerDied,
    WorkerStuck,
    WorkersUp,
)
from phalanx.control.policy import Policy
from phalanx.core.checkpoint import buddies
from phalanx.core.layout import Layout
from tests.control.sim.ledger import Ledger, advanced, initial, must

MS, S = 10**6, 10**9
BEAT, SUSPECT, DEAD = 2 * S, 6 * S, 12 * S  # of heartbeats
QUICK = dict(
    gather_ns=20 * S, park_ns=5 * S, pause_ns=15 * S, form_ns=8 * S, launch_ns=8 * S, ask_ns=3 * S, resend_ns=1 * S,
    deaths_ns=40 * S, silence_ns=15 * S, link_ns=10 * S,
)  # fmt: skip


@dataclass
class Setting:
    layout: Layout = field(default_factory=lambda: Layout(replica=2, ranks_per_node=1))
    steps: int = 8
    nodes: int = 2
    domains: int = 2
    policy: Policy = field(default_factory=lambda: Policy(**QUICK))
    snapshot_every: int = 1
    durable_every: int = 4
    loss: float = 0.0
    twice: float = 0.0
    delay_ms: tuple[int, int] = (1, 5)
    late_ms: int = 10  # what comes twice comes that much later
    point_kills: int = 0  # how many workers or nodes die at the tender points of the protocol
    point_chance: float = 0.05


class World:
    def __init__(self, setting, seed=0):
        self.set, self.rng = setting, Random(seed)
        self.now, self.queue, self.order = 0, [], count()
        self.digest = blake2b(digest_size=8)
        self.size = setting.layout.replica_size
        self.ledger = Ledger(self.size, max(setting.layout.replica, setting.policy.max_replicas) * self.size)
        self.rounds, self.broken = {}, set()
        self.durables, self.shards, self.writing = {}, {}, set()
        self.cut = set()  # nodes that the controller cannot reach, nor they it
        self.slow = self.flip = False
        self.kills_left = setting.point_kills
        self.faults = []
        self.controller = Controller(self)
        names = [f"n{i}" for i in range(setting.nodes)]
        self.agents = {name: Agent(self, name, f"d{i % setting.domains}") for i, name in enumerate(names)}
        for agent in self.agents.values():
            agent.boot()

    # -- time

    def after(self, delay, call, *args):
        heapq.heappush(self.queue, (self.now + delay, next(self.order), call, args))

    def ms(self, low, high):
        return self.rng.randrange(low * MS, high * MS + 1)

    def run(self, until=10**15, stop=None):
        """Until the run has ended, or `stop()`."""
        while self.queue and self.queue[0][0] <= until:
            if self.over or (stop and stop()):
                return
            self.now, _, call, args = heapq.heappop(self.queue)
            call(*args)

    @property
    def over(self):
        return self.gang.phase == "ended" and self.controller.alive

    @property
    def gang(self):
        return self.controller.gang

    # -- the network between agents and the controller

    def send(self, agent, call, *args):
        """Late, twice, out of order, or never."""
        for copy in range(2 if self.rng.random() < self.set.twice else 1):
            if agent.name not in self.cut and self.rng.random() >= self.set.loss:
                delay = self.ms(*self.set.delay_ms) * (self.rng.randrange(20, 200) if self.slow else 1)
                self.after(delay + copy * self.ms(1, self.set.late_ms), self._arrive, agent, call, args)

    def _arrive(self, agent, call, args):
        if agent.name not in self.cut:
            call(*args)

    # -- faults

    def proc(self, number):
        return next((a.procs[number] for a in self.agents.values() if number in a.procs), None)

    def procs(self):
        return [proc for agent in self.agents.values() for proc in agent.procs.values()]

    def tender(self, proc):
        """A point of the protocol at which a death is worth a try."""
        if self.kills_left and self.rng.random() < self.set.point_chance:
            self.kills_left -= 1
            victim = self.rng.choice([proc, *self.procs()])
            self.faults.append(f"{self.now / S:.3f} s: at a tender point")
            if self.rng.random() < 0.6:
                victim.die("at a tender point")
            else:
                victim.agent.die(proved=self.rng.random() < 0.5, back=self.ms(2000, 20000))

    def needs(self, form):
        """Nothing is abandoned while workers that can be reached have it, or have prepared it."""
        last, known = form.last, [proc for proc in self.procs() if proc.number in self.gang.members.workers]
        attempt = self.ledger.history.get(last, max((g for g, _ in self.ledger.in_slot), default=0))
        has = {p.rank % self.size for p in known if p.member.prepared == last and p.member.made >= attempt}
        enough = form.branch and last > form.step and len(has) == self.size
        must(not enough, "step {} is abandoned, though workers have it", last)

    # -- checkpoints

    def write(self, proc, step, made):
        if (step, made) not in self.durables:
            shards = self.shards.setdefault((step, made), {})
            state = shards.setdefault(proc.rank % self.size, proc.state)
            must(state == proc.state, "two states are written as one, at step {}", step)
            if len(shards) == self.size and (step, made) not in self.writing:
                self.writing.add((step, made))
                self.after(self.ms(100, 900), self._commit_checkpoint, step, made)

    def _commit_checkpoint(self, step, made):
        self.durables[step, made] = self.shards[step, made]
        self._tell_durable(step, made)

    def _tell_durable(self, step, made):
        agents = [a for a in self.agents.values() if a.alive]
        if agents:
            self.send(self.rng.choice(agents), self.controller.hear, Durable(step, made))


class Controller:
    """Journals, then applies, then says. Liveness is its soft state, as the aggregators' will be."""

    def __init__(self, world):
        self.world, self.alive, self.life = world, True, 0
        self.journal, self.notes, self.forms = [], [], []
        self.gang = self.new()
        self.heard = {}  # node -> (when, incarnation, judged)
        self.crash_at = -1  # the journal's length
        world.after(S, self.tick)

    def new(self):
        return Gang.of(self.world.set.layout, self.world.set.steps, self.world.set.policy)

    def hear(self, event, teller=None):
        if not self.alive:
            return
        if teller:
            teller.unheard.pop(event.worker, None)
        world, gang = self.world, self.gang
        if len(self.journal) % 16 == 0:
            event = Event.from_dict(json.loads(json.dumps(event.to_dict())))
        self.journal.append((world.now, event))
        before = (gang.generation, gang.members.last_worker)
        commands = gang.apply(world.now, event)
        world.digest.update(f"{world.now} {event}\n".encode())
        invariants.check(gang, before)
        if 0 <= self.crash_at <= len(self.journal):
            commands = commands[: world.rng.randrange(len(commands) + 1)]
            self.crash()
        for command in commands:
            self.do(command)

    def do(self, command):
        world = self.world
        world.digest.update(type(command).__name__.encode())
        if isinstance(command, SetTimer):
            world.after(max(0, command.at_ns - world.now), self.fire, command.timer, self.life)
        elif isinstance(command, Note):
            self.notes.append((command.rung, command.text))
        elif isinstance(command, Form):
            if command.generation not in world.ledger.forms:
                self.forms.append(command)
                world.needs(command)
                world.ledger.formed(command)
                for rank, worker in command.crew.items():
                    alive = world.proc(worker) is not None
                    world.ledger.owns(rank, worker if alive else 0, world.now)
            for node, part in command.parts().items():
                world.send(world.agents[node], world.agents[node].obey, part)
        else:
            for node in command.to:
                world.send(world.agents[node], world.agents[node].obey, command)

    def fire(self, timer, life):
        if life == self.life:
            self.hear(TimerFired(timer))

    def beat(self, node, incarnation):
        if self.alive:
            _, known, judged = self.heard.get(node, (0, incarnation, ""))
            if incarnation >= known:
                self.heard[node] = (self.world.now, incarnation, "")
                if judged:
                    self.hear(NodeClear(node, incarnation))

    def tick(self):
        self.world.after(S, self.tick)
        for node, (when, incarnation, judged) in list(self.heard.items()):
            silent = self.world.now - when
            if self.alive and silent > DEAD and judged == "suspect":
                self.heard[node] = (when, incarnation, "dead")
                self.hear(NodeDead(node, incarnation))
            elif self.alive and silent > SUSPECT and not judged:
                self.heard[node] = (when, incarnation, "suspect")
                self.hear(NodeSuspect(node, incarnation))

    def crash(self):
        self.alive, self.crash_at = False, -1
        self.life += 1
        self.world.after(self.world.ms(500, 8000), self.restart)

    def restart(self):
        """Folds the journal, from a snapshot or from nothing, to the very same state."""
        world = self.world
        was = self.gang.to_bytes()
        half = len(self.journal) // 2 if world.rng.random() < 0.5 else 0
        self.gang = self.new()
        for i, (at, event) in enumerate(self.journal):
            if i == half:
                self.gang = Gang.from_bytes(self.gang.to_bytes())
            self.gang.apply(at, event)
        must(self.gang.to_bytes() == was, "the journal folds to another state")
        self.alive = True
        members = self.gang.members
        self.heard = {n: (world.now, node.incarnation, "") for n, node in members.nodes.items() if not node.dead}
        for command in self.gang.outstanding() + self.gang.set_timers():
            self.do(command)


class Agent:
    def __init__(self, world, name, domain):
        self.world, self.name, self.domain = world, name, domain
        self.incarnation, self.alive, self.life = 0, False, 0
        self.memory = {}  # (rank, step, made) -> state
        self.procs, self.last = {}, {}  # worker -> process; rank -> its last worker
        self.unheard = {}  # dead worker -> why

    def boot(self):
        self.alive, self.welcome = True, False
        self.incarnation += 1
        self.life += 1
        self.tick(self.life)
        self.beat(self.life)

    def say(self, kind, *args):
        self.world.send(self, self.world.controller.hear, kind(self.name, self.incarnation, *args))

    def beat(self, life):
        if life == self.life and self.alive:
            self.world.send(self, self.world.controller.beat, self.name, self.incarnation)
            self.world.after(BEAT, self.beat, life)

    def tick(self, life):
        """What may have got lost is said again. (A transport that acknowledges does without.)"""
        if life != self.life or not self.alive:
            return
        self.world.after(S, self.tick, life)
        if not self.welcome:
            self.say(NodeJoined, self.domain)
            return
        for proc in self.procs.values():
            proc.report()
        for worker, why in self.unheard.items():
            self.say_died(worker, why)

    def say_died(self, worker, why):
        """Until it is acknowledged."""
        event = WorkerDied(self.name, self.incarnation, worker, why)
        self.world.send(self, self.world.controller.hear, event, self)

    def die(self, proved=False, back=None, fin=False):
        """The node, with all that is on it. Without `fin`, its peers see nothing but silence."""
        if not self.alive:
            return
        world = self.world
        self.alive, incarnation = False, self.incarnation
        for proc in list(self.procs.values()):
            proc.die("", told=False, fin=fin)
        self.memory, self.last, self.unheard = {}, {}, {}
        if proved:
            other = next((a for a in world.agents.values() if a.alive), None)
            if other:
                world.send(other, world.controller.hear, NodeDead(self.name, incarnation, "its host says so"))
        if back is not None:
            world.after(back, self.boot)

    # -- commands

    def obey(self, command):
        if self.alive:
            getattr(self, "on_" + type(command).__name__)(command)

    def on_Welcome(self, command):
        self.welcome = self.welcome or command.incarnation == self.incarnation

    def on_Fence(self, command):
        if command.incarnation == self.incarnation:
            for proc in list(self.procs.values()):
                proc.die("", told=False)
            self.last, self.unheard = {}, {}
            self.boot()

    def on_Launch(self, command):
        if command.incarnation != self.incarnation:
            return
        for rank, worker in command.workers.items():
            if worker in self.procs:
                self.procs[worker].report()
            elif self.last.get(rank, 0) >= worker:
                self.say(WorkerDied, worker, "it has ended")
            else:
                for proc in [p for p in self.procs.values() if p.rank == rank]:
                    proc.die("", told=False)
                self.last[rank] = worker
                self.procs[worker] = Proc(self.world, self, rank, worker)

    def on_Kill(self, command):
        for worker in command.workers:
            if worker in self.procs:
                proc = self.procs[worker]
                proc.die("was ended", told=False)
            self.unheard.pop(worker, None)
            self.say(WorkerDied, worker, "was ended")

    def on_Release(self, command):
        pass

    def on_Leave(self, command):
        self.welcome = True

    def on_Halt(self, command):
        for proc in list(self.procs.values()):
            proc.halt(command.generation)

    def on_Pause(self, command):
        for proc in self.procs.values():
            proc.member.ask_pause(command.generation)
            proc.report()

    def on_Form(self, form):
        for source in form.sources.values():
            if source.kind == "live" and source.number in self.procs:
                self.procs[source.number].serve(form)
        for worker in form.crew.values():
            if worker in self.procs:
                self.procs[worker].form_up(form)
            else:
                self.say(WorkerDied, worker, "it has ended")

    def on_Start(self, command):
        for proc in list(self.procs.values()):
            proc.start(command.generation)

    def on_Ask(self, command):
        self.say(Held, command.generation, tuple(sorted(self.memory)))

    def on_Save(self, command):
        for proc in self.procs.values():
            proc.save(command.generation, command.step)
        for step, made in sorted(self.world.durables):
            if step == command.step:
                self.world._tell_durable(step, made)

    def keep(self, rank, step, made, state):
        """The last two of each rank."""
        if self.alive:
            self.memory[rank, step, made] = state
            for old in sorted((key for key in self.memory if key[0] == rank), key=lambda k: (k[2], k[1]))[:-2]:
                del self.memory[old]


class Round:
    """One step of one generation, seen from above."""

    def __init__(self, form):
        self.crew = form.crew
        self.computed, self.votes = set(), set()
        self.pause = False
        self.taken = {}


class Proc:
    def __init__(self, world, agent, rank, number):
        self.world, self.agent, self.rank, self.number = world, agent, rank, number
        self.member = Member(number, world.set.steps)
        self.alive, self.up, self.stuck, self.applying, self.halted = True, False, False, False, -1
        self.state = self.next = self.true = None
        self.lacks = 0  # the generation for which it did not get its state
        world.after(world.ms(300, 2500), self.come_up)

    def come_up(self):
        if self.alive:
            self.up = True
            if not self.world.ledger.slots[self.rank].owner:
                self.world.ledger.owns(self.rank, self.number, self.world.now)
            self.report()

    def die(self, why, told=True, fin=True):
        if not self.alive:
            return
        self.alive = False
        del self.agent.procs[self.number]
        self.world.ledger.clock(self.rank, self.number, "idle", self.world.now)
        if told:
            self.agent.unheard[self.number] = why
            self.agent.say_died(self.number, why)
        if fin:
            self.leave_groups()

    def report(self):
        """Where it stands, as often as asked."""
        m = self.member
        if not self.up or self.stuck:
            return
        if m.phase == "new":
            self.agent.say(WorkersUp, (self.number,))
        elif m.phase == "parked":
            self.agent.say(Parked, m.generation, (self.number,), m.step, m.prepared, m.made)
        elif m.phase == "ready":
            self.agent.say(Ready, m.generation, m.step, {self.number: self.state})

    # -- leaving

    def halt(self, generation):
        if self.stuck or not self.up:
            return
        if self.applying:
            self.halted = max(self.halted, generation)
        elif self.member.halt(generation):
            self.state, self.true = self.true or self.state, None
            self.world.ledger.clock(self.rank, self.number, "stalled", self.world.now)
            self.report()
            self.leave_groups()

    def leave_groups(self):
        """Its sockets close, and its peers' operations fail a little later."""
        world, generation = self.world, self.member.generation
        if generation and generation not in world.broken and self.member.phase != "new":
            world.broken.add(generation)
            for worker in world.ledger.forms[generation].crew.values():
                peer = world.proc(worker)
                if peer:
                    world.after(world.ms(5, 60), peer.lost_peer, generation)

    def lost_peer(self, generation):
        m = self.member
        if self.alive and m.generation == generation and m.phase in ("restoring", "ready", "running"):
            self.halt(generation)

    # -- forming

    def serve(self, form):
        m = self.member
        if self.up and not self.stuck and m.phase in ("parked", "restoring") and m.may_serve(form.generation):
            self.settle(form.step)

    def settle(self, step):
        try:
            if self.member.settle(step):
                self.world.ledger.applied(self.rank, step, self.member.made, self.state, self.next)
                self.state = self.next
        except ValueError:
            return False
        return True

    def form_up(self, form):
        if not self.up or self.stuck:
            return
        source = form.sources.get(self.rank)
        if self.member.form(form.generation, form.step, source):
            self.replicas = form.replicas
            self.world.after(self.world.ms(50, 800), self.restore, form, source, 10)
            self.world.tender(self)
        elif self.member.generation == form.generation:
            if self.lacks == form.generation:
                self.agent.say(Missing, form.generation, self.number, "it is not there")
            self.report()

    def restore(self, form, source, tries):
        world, m = self.world, self.member
        if not self.alive or self.stuck or m.generation != form.generation or m.phase != "restoring":
            return
        state = self.fetch(form, source)
        if state is None and tries and source and source.kind == "live":
            world.after(world.ms(100, 400), self.restore, form, source, tries - 1)
        elif state is None:
            self.lacks = form.generation
            self.agent.say(Missing, form.generation, self.number, "it is not there")
        else:
            self.state = state
            whole = world.ledger.forms[form.generation]
            kept = any(r % world.size == self.rank % world.size and r not in whole.sources for r in whole.crew)
            if world.flip and source and kept:
                world.flip, self.state, self.true = False, state + "?", state
            m.restored(form.step)
            self.report()
            world.tender(self)

    def fetch(self, form, source):
        world = self.world
        if source is None:
            return self.state if self.settle(form.step) else None
        if source.kind == "live":
            donor = world.proc(source.number)
            return donor.state if donor and donor.up and not donor.stuck and donor.member.step == form.step else None
        if source.kind == "memory":
            return world.agents[source.node].memory.get((source.number, form.step, source.made))
        if form.step == 0:
            return initial(self.rank % world.size)
        return world.durables[form.step, source.made][self.rank % world.size]

    # -- a step

    def start(self, generation):
        if self.up and not self.stuck and self.member.start(generation):
            self.true = None
            self.world.ledger.started(generation, self.rank, self.number)
            self.world.ledger.clock(self.rank, self.number, "running", self.world.now)
            self.compute()
        elif self.member.phase == "parked":
            self.report()

    def running(self, generation, step):
        m = self.member
        return (
            self.alive and not self.stuck and m.phase == "running" and m.generation == generation and m.step == step - 1
        )

    def compute(self):
        m, world = self.member, self.world
        world.ledger.begin(self.rank, self.number, m.step + 1, m.generation, world.now)
        world.after(world.ms(300, 700), self.computed, m.generation, m.step + 1)

    def computed(self, generation, step):
        if not self.running(generation, step):
            return
        world = self.world
        form = world.ledger.forms[generation]
        round_ = world.rounds.setdefault((generation, step), Round(form))
        replica, coordinate = divmod(self.rank, world.size)
        count, share = len(self.replicas), self.replicas.index(replica)
        round_.taken.setdefault(coordinate, []).extend(world.ledger.share(share, count))
        round_.computed.add(self.number)
        if len(round_.computed) == len(round_.crew):
            world.ledger.reduced(round_.taken)
            for worker in round_.crew.values():
                peer = world.proc(worker)
                if peer:
                    world.after(world.ms(10, 60), peer.reduced, generation, step, round_)

    def reduced(self, generation, step, round_):
        if not self.running(generation, step):
            return
        world = self.world
        self.next = advanced(self.state, step, generation)
        round_.pause |= self.member.vote()
        round_.votes.add(self.number)
        if self.may_commit(round_):
            for worker in round_.crew.values():
                peer = world.proc(worker)
                if peer:
                    world.after(world.ms(5, 60), peer.commit, generation, step, round_)
        world.tender(self)

    @staticmethod
    def may_commit(round_):
        return len(round_.votes) == len(round_.crew)

    def commit(self, generation, step, round_):
        if self.running(generation, step) and not self.applying:
            self.applying = True
            self.world.after(self.world.ms(10, 60), self.applied, generation, step, round_)
            self.world.tender(self)

    def applied(self, generation, step, round_):
        if not self.alive:
            return
        self.applying = False
        world, m = self.world, self.member
        world.ledger.applied(self.rank, step, generation, self.state, self.next)
        self.state = self.next
        go_on = m.commit(round_.pause)
        self.snapshot(step, generation)
        if world.rng.random() < 0.3:
            world.send(self.agent, world.controller.hear, StepsDone(generation, step))
        if self.halted >= generation:
            self.halt(self.halted)
        elif go_on:
            self.compute()
        else:
            world.ledger.clock(self.rank, self.number, "stalled", world.now)
            self.report()

    def snapshot(self, step, made):
        world = self.world
        if step % world.set.snapshot_every == 0:
            self.agent.keep(self.rank, step, made, self.state)
            nodes = sorted(world.ledger.forms[made].places.values())
            buddy = buddies([world.agents[n].domain for n in nodes])[nodes.index(self.agent.name)]
            if buddy is not None:
                world.after(world.ms(50, 300), world.agents[nodes[buddy]].keep, self.rank, step, made, self.state)
        if world.set.durable_every and step % world.set.durable_every == 0:
            world.write(self, step, made)

    def save(self, generation, step):
        m = self.member
        if self.up and not self.stuck and m.phase == "parked" and m.generation == generation and self.settle(step):
            self.world.write(self, step, generation)

    # -- hanging

    def hang(self):
        if self.alive and self.up and not self.stuck and self.member.phase == "running" and not self.applying:
            self.stuck = True
            self.world.after(3 * S, self.found_stuck)

    def found_stuck(self):
        if self.alive:
            self.agent.say(WorkerStuck, self.number, "in its step")
            self.world.after(3 * S, self.found_stuck)
