"""The world around the control code: a clock, a network that breaks, aggregators that die, and a controller that can be
killed and folded again. The machines are those that run in production: `State` at the controller, `Liveness` at the
aggregators, `Agent` on the nodes, `Member` in the workers. Everything random comes from one generator."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from phalanx.control import invariants
from phalanx.control.journaled import Plan, State, fences
from phalanx.control.liveness import DEAD, GONE, Edge, Liveness, Orphans
from phalanx.control.messages import (
    EVERYONE,
    Build,
    Ended,
    Fence,
    Form,
    Halt,
    Note,
    Part,
    Pause,
    Report,
    SetTimer,
    Started,
)
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from phalanx.runtime.aggregator import merged
from phalanx.twin.agenda import Agenda
from tests.control.sim.ledger import Ledger, must
from tests.control.sim.nodes import Meeting, Node

MS, S = 10**6, 10**9
BEAT_NS = 2 * S
GONE_NS = BEAT_NS
QUICK = dict(
    gather_ns=20 * S, park_ns=5 * S, pause_ns=15 * S, form_ns=8 * S, launch_ns=8 * S, ask_ns=3 * S, resend_ns=1 * S,
    late_ns=1500 * MS, deaths_ns=40 * S, silence_ns=15 * S, hold_ns=90 * S, lease_ns=20 * S, save_ns=30 * S,
)  # fmt: skip


@dataclass
class Setting:
    layout: Layout = field(default_factory=lambda: Layout(replica=2, ranks_per_node=1))
    steps: int = 8
    nodes: int = 2
    domains: int = 2
    aggregators: int = 1
    policy: Policy = field(default_factory=lambda: Policy(**QUICK))
    snapshot_every: int = 1
    durable_every: int = 4
    breaks: float = 0.0  # chance that a connection ends with a message
    twice: float = 0.0  # chance that a command comes twice
    delay_ms: tuple[int, int] = (1, 5)
    late_ms: int = 10  # how much later the second one comes
    restore_ms: tuple[int, int] = (50, 800)
    start_ms: tuple[int, int] = (300, 2500)
    points: tuple[str, ...] = ()  # vulnerable points of the protocol, at which
    point_kills: int = 0  # this many workers or nodes die
    point_chance: float = 0.05


class World(Agenda):
    def __init__(self, setting, seed=0):
        super().__init__()
        self.set, self.rng = setting, Random(seed)
        self.digest = blake2b(digest_size=8)
        self.size = setting.layout.replica_size
        self.ledger = Ledger(self.size, max(setting.layout.replica, setting.policy.max_replicas) * self.size)
        self.crews, self.crosses = {}, {}  # where processes meet: by world; by generation and coordinate
        self.votes = {}  # generation, step -> when all had voted
        self.durables = {}  # (step, made) -> coordinate -> state
        self.cut = set()  # nodes that no aggregator can reach, nor they them
        self.cut_homes = set()  # aggregators that the controller cannot reach, nor they it
        self.slow = self.flip = False
        self.full = set()  # nodes whose disk takes nothing
        self.deaf = set()  # nodes from which nobody can take state
        self.lonely = {}  # node -> why its ranks cannot form groups
        self.walled = set()  # nodes whose ranks wait for other replicas in vain
        self.mute = set()  # nodes whose ranks do not enter, and do not say why
        self.frail = set()  # nodes whose ranks lose the other replicas in each sum
        self.duds = set()  # nodes on which no worker comes up, without a reason
        self.undead = set()  # nodes whose workers do not end when they are killed
        self.mum = set()  # nodes whose keeper does not answer
        self.unthanked = set()  # nodes that lose acknowledgements
        self.unreached = set()  # nodes that are heard, and hear nothing
        self.unreadable = set()  # durable steps that cannot be loaded; -1: what the run began from
        self.kills_left = setting.point_kills
        self.faults = []
        self.controller = Controller(self)
        self.homes = {f"h{i}": Aggregator(self, f"h{i}") for i in range(setting.aggregators)}
        names = [f"n{i}" for i in range(setting.nodes)]
        self.nodes = {name: Node(self, name, f"d{i % setting.domains}") for i, name in enumerate(names)}
        for node in self.nodes.values():
            node.power_on()

    # -- time

    def ms(self, low, high):
        return self.rng.randrange(low * MS, high * MS + 1)

    def run(self, until=10**15, stop=None):
        """Run until the run has ended, or `stop()`."""
        super().run(until, lambda: self.over or (stop and stop()))

    @property
    def over(self):
        return self.controller.ended is not None and self.controller.alive

    @property
    def gang(self):
        return self.controller.state.gang

    def delay(self):
        return self.ms(*self.set.delay_ms) * (self.rng.randrange(20, 200) if self.slow else 1)

    # -- faults

    def proc(self, number):
        return next((n.procs[number] for n in self.nodes.values() if number in n.procs), None)

    def procs(self):
        return [proc for node in self.nodes.values() for proc in node.procs.values()]

    def tender(self, proc, point):
        """Perhaps kill somebody: the worker is at a vulnerable point of the protocol."""
        if self.kills_left and point in self.set.points and self.rng.random() < self.set.point_chance:
            self.kills_left -= 1
            victim = self.rng.choice([proc, *self.procs()])
            self.faults.append(f"{self.now / S:.3f} s: at {point}")
            if self.rng.random() < 0.6:
                victim.die("SIGKILL")
            else:
                victim.node.power_off(proved=self.rng.random() < 0.5, back=self.ms(2000, 20000))

    def needs(self, form):
        """Check that nothing is abandoned while workers that can be reached have it, or have prepared it."""
        last, known = form.last, [proc for proc in self.procs() if proc.number in self.gang.members.workers]
        attempt = self.ledger.history.get(last, max((g for g, _ in self.ledger.in_slot), default=0))
        takes = [p for p in known if p.node.name not in self.deaf and p.number not in self.gang.finder.banned]
        has = {p.rank % self.size for p in takes if p.member.prepared == last and p.member.made >= attempt}
        enough = form.branch and last > form.step and len(has) == self.size
        must(not enough, "step {} is abandoned, though workers have it", last)


class Controller:
    """A controller: it journals, then folds, then sends commands."""

    def __init__(self, world):
        self.world, self.alive, self.life, self.stopped = world, True, 0, False
        self.journal, self.notes, self.forms, self.ended = [], [], [], None
        self.told = []  # commands to replicas
        set_ = world.set
        self.plan = Plan(set_.layout, set_.steps, 0, 0, set_.policy)
        self.state = State.of(self.plan)
        self.orphans = Orphans(self.state.roster, BEAT_NS)
        self.crash_at = -1  # the journal's length
        self.waiting = []  # while it hangs
        self.poisoned = []  # it raises on an entry with this word in it; "": on the next
        world.after(S, self.tick, 0)

    def hear(self, home, items):
        self.take("reports", {"from": home, "items": items})

    def ask(self, event):
        self.take("event", {"event": event.to_dict()})

    def take(self, kind, body):
        if not self.alive:
            return False
        if self.stopped:
            self.waiting.append((kind, body))
            return True
        world, gang = self.world, self.state.gang
        if len(self.journal) % 16 == 0:
            body = json.loads(json.dumps(body))
        before = (gang.generation, gang.members.last_worker)
        body, commands = self.state.take(kind, body, world.now)
        if self.poisoned and self.poisoned[0] in str(body):
            self.set_aside(kind, body)
            return True
        self.journal.append((world.now, kind, body))
        world.digest.update(f"{world.now} {body}\n".encode())
        must(not self.state.refused, "refused: {}", self.state.refused)
        invariants.check(gang, before)
        if 0 <= self.crash_at <= len(self.journal):
            commands = commands[: world.rng.randrange(len(commands) + 1)]
            self.crash()
        for command in commands:
            self.do(command)
        return True

    def set_aside(self, kind, body):
        """Set an entry aside, as if the state machine had raised half-way through it: the entry never happened."""
        del self.poisoned[0]
        entry = {"kind": kind, "body": body, "why": "it raised"}
        self.journal.append((self.world.now, "aside", entry))
        self.fold()
        for command in [*fences(body), *self.state.gang.outstanding(), *self.state.gang.set_timers()]:
            self.do(command)

    def fold(self, half=0):
        """Fold the journal; from entry `half` on, as if from a snapshot."""
        self.state = State.of(self.plan)
        for i, (at, kind, body) in enumerate(self.journal):
            if i == half:
                self.state = State.from_bytes(self.state.to_bytes())
            self.state.take(kind, json.loads(json.dumps(body)), at)
        self.orphans = Orphans(self.state.roster, BEAT_NS)
        for home in self.world.homes.values():
            if not home.alive or home.name in self.world.cut_homes:
                self.lose_home(home.name)

    def do(self, command):
        world = self.world
        world.digest.update(type(command).__name__.encode())
        if isinstance(command, SetTimer):
            world.after(max(0, command.at_ns - world.now), self.fire, command.timer, self.life)
        elif isinstance(command, Note):
            self.notes.append((command.rung, command.text))
        elif isinstance(command, Report | Started):
            pass
        elif isinstance(command, Ended):
            self.ended = command
        else:
            if isinstance(command, (Build, Halt, Part, Pause)):
                self.told.append(command)
            if isinstance(command, Form) and command.generation not in world.ledger.forms:
                self.formed(command)
            elif isinstance(command, Build) and command.world not in world.crews:
                world.crews[command.world] = Meeting(world, world.size)
            for node in world.nodes if command.to == EVERYONE else command.to:
                self.send(node, command)

    def formed(self, form):
        world, replicas = self.world, self.state.gang.worlds.replicas
        self.forms.append(form)
        world.needs(form)
        crew = {rank: worker for r in form.replicas for rank, worker in replicas[r].crew.items()}
        world.ledger.formed(form, [self.state.gang.members.workers[crew[rank]].node for rank in sorted(crew)])
        for rank, worker in crew.items():
            world.ledger.owns(rank, worker if world.proc(worker) else 0, world.now)

    def send(self, node, command):
        home = self.state.roster.home(node)
        if home and home not in self.world.cut_homes:
            delay, aggregator = self.world.delay(), self.world.homes[home]
            aggregator.told_ns = max(aggregator.told_ns, self.world.now + delay)
            self.world.after(delay, aggregator.pass_down, node, command)

    def fire(self, timer, life):
        if life == self.life and timer in self.state.gang.desk.timers:
            self.take("event", {"event": {"kind": "TimerFired", "timer": timer}})

    def tick(self, life):
        if life != self.life:
            return
        self.world.after(S, self.tick, life)
        if not self.stopped:
            for home, item in self.orphans.tick(self.world.now):
                self.hear(home, [item])

    def lose_home(self, home):
        self.orphans.lose(home, self.world.now)

    def find_home(self, home):
        self.orphans.find(home)
        for command in self.state.gang.members.fences(self.state.roster.expected(home)):
            self.do(command)

    def hang(self, for_ns):
        """Stand still until something notices, ends it, and starts another."""
        self.stopped = True
        self.world.after(for_ns, self.unhang, self.life)

    def unhang(self, life):
        if life == self.life and self.alive:
            self.stopped, self.waiting = False, []
            self.crash()

    def crash(self):
        self.alive, self.stopped, self.crash_at, self.waiting = False, False, -1, []
        self.life += 1
        self.world.after(self.world.ms(500, 8000), self.restart)

    def restart(self):
        """Fold the journal, from a snapshot or from nothing, to the very same state, and continue."""
        world = self.world
        was = self.state.to_bytes()
        self.fold(len(self.journal) // 2 if world.rng.random() < 0.5 else 0)
        must(self.state.to_bytes() == was, "the journal folds to another state")
        self.alive = True
        for home in world.homes.values():
            if home.alive and home.name not in world.cut_homes:
                self.find_home(home.name)
                home.found()
        gang = self.state.gang
        for command in [*gang.outstanding(), *gang.set_timers()]:
            self.do(command)
        world.after(S, self.tick, self.life)


class Aggregator:
    """An aggregator: it passes on what agents post, in order, and reports who is silent."""

    def __init__(self, world, name):
        self.world, self.name, self.alive, self.life = world, name, True, 0
        self.liveness, self.outbox, self.beats = Liveness(BEAT_NS), [], {}
        self.lease_ns = world.set.policy.lease_ns  # when it ends, unless the controller renews it
        self.told_ns = self.finds = 0  # when the last command arrives here; how often the controller was found
        self.unheard = {}  # node -> the line on which it missed its Fence
        world.after(S // 4, self.tick, 0)

    def tick(self, life):
        if life != self.life:
            return
        self.world.after(S // 4, self.tick, life)
        if self.reaches:
            self.lease_ns = self.world.now + self.world.set.policy.lease_ns
        for edge in list(self.liveness.tick(self.world.now)):
            self.edge(edge)

    @property
    def reaches(self):
        """Return whether the controller can be reached."""
        controller = self.world.controller
        return self.alive and controller.alive and not controller.stopped and self.name not in self.world.cut_homes

    def edge(self, edge):
        """Post an edge. It is kept until the controller has it, in order. A node that was given up must connect
        anew."""
        node = self.world.nodes[edge.node]
        if edge.edge in (DEAD, GONE) and node.home == self.name and node.incarnation == edge.incarnation:
            node.hang_up(tell=False)
        self.outbox.append(edge.to_item())
        if len(self.outbox) == 1:
            self.world.after(self.world.delay(), self.pump, self.life)

    def pump(self, life):
        if life != self.life or not self.outbox:
            return
        if self.reaches and self.world.controller.take("reports", {"from": self.name, "items": [self.outbox[0]]}):
            item, told = self.outbox.pop(0), max(0, self.told_ns - self.world.now)
            if self.reaches:  # the entry did not kill it
                self.world.after(told, self.acked, life, self.finds, item)
            self.world.after(self.world.delay(), self.pump, life)
        else:
            self.world.after(200 * MS, self.pump, life)

    def acked(self, life, finds, item):
        """Handle an acknowledgement, which comes after the commands that followed from the item."""
        if (life, finds) == (self.life, self.finds) and (node := self.liveness.confirm(item)):
            self.lease(node, MS)

    def beat(self, node, incarnation, visit, sent):
        self.beats[node] = sent
        for edge in list(self.liveness.beat(node, incarnation, visit, self.world.now)):
            self.edge(edge)
        if self.lease_ns > self.world.now:
            self.lease(node, self.world.delay())

    def lease(self, node, delay):
        """Renew a node's lease, unless a Fence that it did not get still waits: that comes again over the next
        connection."""
        left, host = self.liveness.lease(node, self.lease_ns) - self.world.now, self.world.nodes[node]
        if left > 0 and host.home == self.name and host.connected and self.unheard.get(node) != host.line:
            self.world.after(delay, host.renew, host.line, self.beats[node] + left)

    def found(self):
        """Report all nodes, as the controller can be reached again."""
        self.finds += 1
        self.expect(self.world.controller.state.roster.expected(self.name))
        for edge in self.liveness.all(self.lease_ns):
            self.edge(edge)

    def expect(self, nodes):
        for node, incarnation in nodes.items():
            known = self.liveness.nodes.get(node)
            if known is None or known.incarnation < incarnation:
                self.liveness.expect(node, incarnation, self.world.now)

    def hung_up(self, node, incarnation, visit):
        """Note that a connection ended; the node may be back in a moment."""
        self.world.after(GONE_NS, self.missed, node, incarnation, visit)

    def missed(self, node, incarnation, visit):
        seen, host = self.liveness.nodes.get(node), self.world.nodes[node]
        back = host.home == self.name and host.connected
        if self.alive and seen and (seen.incarnation, seen.visit) == (incarnation, visit) and not back:
            self.liveness.forget(node)
            self.edge(Edge(node, incarnation, visit, GONE))

    def pass_up(self, item):
        """Pass an item to the controller, in its merged form if it has one. Return whether the controller has it."""
        return self.reaches and self.world.controller.take("reports", {"from": self.name, "items": merged([item])})

    def pass_down(self, node, command):
        if self.alive and self.world.nodes[node].home == self.name:
            host = self.world.nodes[node]
            if not host.receive(command) and isinstance(command, Fence):
                self.unheard[node] = host.line

    def die(self, back):
        self.alive = False
        self.life += 1
        self.liveness, self.outbox = Liveness(BEAT_NS), []
        for node in self.world.nodes.values():
            if node.home == self.name:
                node.hang_up(tell=False)
        self.world.after(50 * MS, self.world.controller.lose_home, self.name)
        if back is not None:
            self.world.after(back, self.revive)

    def revive(self):
        self.alive = True
        self.lease_ns = self.world.now
        self.world.after(S // 4, self.tick, self.life)
        if self.world.controller.alive:
            self.world.controller.find_home(self.name)
            self.found()
