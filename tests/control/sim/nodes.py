"""A simulated host: the shell around the real `Agent`, a keeper with memory and disk, and workers that train. It does
what `runtime.node`, the keeper and the worker do, in simulated time."""

from __future__ import annotations

from phalanx.control import agent as a
from phalanx.control.agent import Agent, Service
from phalanx.control.member import Member, in_common
from phalanx.control.messages import Failure, NodeDead, Source
from phalanx.control.pace import Pace
from tests.control.sim.ledger import advanced, initial, must

MS, S = 10**6, 10**9
BEAT_NS = 2 * S
SLOTS = 3


class Node:
    def __init__(self, world, name, domain):
        self.world, self.name, self.domain = world, name, domain
        self.alive, self.incarnation, self.visits = False, 0, 0
        self.home, self.connected, self.line = "", False, 0  # line: the number of the connection
        self.busy = -1  # the line on which a message is under way
        self.procs, self.memory = {}, {}  # worker -> process; (rank, step, made) -> state
        self.agent = None

    # -- coming and going

    def power_on(self):
        self.alive = True
        services = {name: Service() for name in a.SERVICES}
        limits = dict(halt_ns=4 * S, end_ns=6 * S)
        self.agent = Agent(self.name, self.domain, services, Pace(fixed_ns=20 * S), host=self.name, **limits)
        self.posted, self.outbox, self.unsent = 0, {}, []
        self.agent.begin(self.world.now)
        self.act()

    def power_off(self, proved=False, back=None, fin=False):
        """Stop the host, with everything on it. Without `fin`, its peers see nothing but silence."""
        if not self.alive:
            return
        world, incarnation = self.world, self.incarnation
        self.alive = False
        for proc in list(self.procs.values()):
            proc.vanish(fin)
        self.memory = {}
        self.hang_up(tell=fin)
        if proved:
            world.after(world.ms(50, 500), self.prove, incarnation)
        if back is not None:
            world.after(back, self.power_on)

    def prove(self, incarnation):
        """Report that the host is gone, as its supervisor or scheduler would."""
        if not self.world.controller.take("event", {"event": NodeDead(self.name, incarnation, "it is off").to_dict()}):
            self.world.after(S, self.prove, incarnation)

    # -- the network

    def dial(self, agent):
        """Connect to any aggregator that answers."""
        world = self.world
        if not self.alive or agent is not self.agent or self.connected or not self.incarnation:
            return
        homes = [h for h in world.homes.values() if h.alive]
        if not homes or self.name in world.cut:
            world.after(world.ms(200, 1500), self.dial, agent)
            return
        self.home, self.connected = world.rng.choice(homes).name, True
        self.visits += 1
        self.line += 1
        self.unsent = sorted(self.outbox)
        if not self.agent.fenced:
            self.beat_once()
        self.agent.connected(world.now)
        self.act()
        self.pump(self.line)

    def hang_up(self, tell=True):
        if self.connected:
            self.connected = False
            self.line += 1
            if tell and self.world.homes[self.home].alive:
                self.world.homes[self.home].hung_up(self.name, self.incarnation, self.visits)
            if self.alive:
                self.agent.disconnected()
                self.world.after(self.world.ms(50, 500), self.dial, self.agent)

    def pump(self, line):
        """Send one message at a time, in order; each is kept until it is acknowledged."""
        world = self.world
        if line != self.line or not self.connected or not self.unsent or self.busy == line:
            return
        self.busy = line
        number, event = self.unsent[0], self.outbox[self.unsent[0]]
        if self.name in world.cut or world.rng.random() < world.set.breaks:
            self.hang_up()
            return
        world.after(world.delay(), self.arrive, line, self.incarnation, number, event)

    def arrive(self, line, incarnation, number, event):
        if line != self.line or not self.connected:
            return
        item = {"type": "event", "node": self.name, "incarnation": incarnation, "number": number}
        if self.name in self.world.cut or not self.world.homes[self.home].pass_up({**item, "event": event.to_dict()}):
            self.world.after(200 * MS, self.arrive, line, incarnation, number, event)
            return
        if incarnation != self.incarnation or line != self.line:
            return
        if self.name in self.world.unthanked and self.world.rng.random() < 0.3:
            self.hang_up()  # the acknowledgement is lost with the connection
            return
        self.busy = -1
        self.unsent.remove(number)
        del self.outbox[number]
        self.agent.acknowledged(number)
        self.pump(line)

    def receive(self, command):
        world = self.world
        if self.name in world.unreached:
            return False
        if not self.connected or self.name in world.cut or world.rng.random() < world.set.breaks:
            return False
        self.obey(self.line, command)
        if world.rng.random() < world.set.twice:
            world.after(world.ms(1, world.set.late_ms), self.obey, self.line, command)
        return True

    def obey(self, line, command):
        if self.alive and line == self.line:
            self.agent.obey(self.world.now, command)
            self.act()

    def beat(self, agent, incarnation):
        if self.alive and agent is self.agent and incarnation == self.incarnation:
            self.world.after(BEAT_NS, self.beat, agent, incarnation)
            said = self.agent.beat(self.world.now)
            self.act()
            if said is not None:
                self.beat_once()

    def beat_once(self):
        world = self.world
        if self.connected and self.name not in world.cut:
            world.after(world.delay(), self.beat_arrives, self.line, self.incarnation, self.visits, world.now)

    def beat_arrives(self, line, incarnation, visits, sent):
        world = self.world
        if line != self.line or not self.connected or self.name in world.cut:
            return
        home = world.homes[self.home]
        if home.alive:
            home.beat(self.name, incarnation, visits, sent)

    def renew(self, line, until):
        if self.alive and line == self.line and not {self.name} & (self.world.cut | self.world.unreached):
            self.agent.renew(self.world.now, until)
            self.act()

    # -- what the agent asks for

    def act(self):
        world = self.world
        while actions := self.agent.take():
            for action in actions:
                if isinstance(action, a.Post):
                    self.posted += 1
                    self.outbox[self.posted] = action.event
                    self.unsent.append(self.posted)
                    self.pump(self.line)
                elif isinstance(action, a.Spawn):
                    self.spawn(action)
                elif isinstance(action, a.Send):
                    world.after(MS, self.deliver, self.agent, action.number, action.body)
                elif isinstance(action, a.End):
                    world.after(world.ms(1, 20), self.kill, self.agent, action.number)
                elif isinstance(action, a.Alarm):
                    world.after(max(0, action.at_ns - world.now), self.fire, self.agent, action.name)
                elif isinstance(action, a.Count):
                    counters = {number: proc.moves for number, proc in self.procs.items()}
                    self.agent.counted(world.now, counters)
                elif isinstance(action, a.Reboot):
                    self.boot()
                elif isinstance(action, a.Redial):
                    self.hang_up()

    def boot(self):
        self.hang_up()
        self.incarnation += 1
        self.posted, self.outbox, self.unsent = 0, {}, []
        self.agent.booted(self.world.now, self.incarnation)
        self.world.after(BEAT_NS, self.beat, self.agent, self.incarnation)
        self.dial(self.agent)

    def fire(self, agent, name):
        if self.alive and agent is self.agent:
            agent.fire(self.world.now, name)
            self.act()

    def spawn(self, action):
        if action.name:
            self.world.after(self.world.ms(50, 400), self.serve, self.agent, action.name)
        else:
            proc = Proc(self.world, self, action.args["rank"], action.number)
            self.procs[action.number] = proc

    def serve(self, agent, name):
        if self.alive and agent is self.agent:
            agent.service_said(self.world.now, name, {"type": name, "port": 1, "address": name})
            self.act()

    def kill_service(self, name):
        if self.alive and self.agent.services[name].said is not None:
            if name == "keeper":
                self.memory = {}
            self.agent.ended(self.world.now, a.SERVICES[name], Failure(signal="SIGKILL"))
            self.act()

    def deliver(self, agent, number, body):
        if not self.alive or agent is not self.agent:
            return
        if number == a.SERVICES["keeper"]:
            self.order(body)
        elif number in self.procs:
            self.procs[number].hear(body)

    def kill(self, agent, number):
        if not self.alive or agent is not self.agent or number not in self.procs:
            return
        if self.name in self.world.undead:  # the kernel holds it
            self.procs[number].stuck = True
            self.world.after(S, self.kill, agent, number)
        else:
            self.procs[number].die("SIGKILL")

    def heard(self, number, body):
        if self.alive:
            self.agent.worker_said(self.world.now, number, body)
            self.act()

    def lost(self, number, failure):
        if self.alive:
            self.agent.ended(self.world.now, number, failure)
            self.act()

    # -- the keeper

    def keep(self, rank, step, made, state):
        """Keep a snapshot, and only the last few of each rank."""
        if self.alive:
            self.memory[rank, step, made] = state
            for old in sorted((key for key in self.memory if key[0] == rank), key=lambda k: (k[2], k[1]))[:-SLOTS]:
                del self.memory[old]

    def order(self, body):
        kind, world = body["type"], self.world
        if kind == "held":
            self.say({"type": "held", "copies": sorted(self.memory)})
        elif kind == "write":
            self.write(body["step"], body["generation"])
        elif kind == "commit":
            world.after(world.ms(50, 400), self.commit, self.agent, body)

    def say(self, body):
        if self.alive and self.name not in self.world.mum and self.agent.services["keeper"].said is not None:
            self.agent.keeper_said(self.world.now, body)
            self.act()

    def write(self, step, made, ranks=None):
        own = [at for at, home in enumerate(self.world.ledger.homes[made]) if home == self.name]
        found = [r for r in own if (r, step, made) in self.memory and (ranks is None or r in ranks)]
        for rank in found:
            self.world.after(self.world.ms(50, 500), self.written, self.agent, rank, step, made)
        if not found:
            self.fail(0, step, made, "it is not in memory any more", gone=True)

    def fail(self, rank, step, made, reason, gone=False):
        body = {"type": "checkpoint_failed", "where": "disk", "rank": rank, "step": step, "generation": made}
        self.say({**body, "reason": reason, "gone": gone})

    def written(self, agent, rank, step, made):
        if not self.alive or agent is not self.agent:
            return
        state = self.memory.get((rank, step, made))
        if state is None or self.name in self.world.full:
            reason = "no space" if state else "it is not in memory any more"
            self.fail(rank, step, made, reason, gone=state is None)
            return
        ranks = len(self.world.ledger.homes[made])
        body = {"checkpoint": f"step-{step}", "step": step, "generation": made, "ranks": ranks, "seal": "s"}
        about = {"rank": rank, "size": 1, "root": state, "drain_s": 0.1}
        self.say({"type": "shard", **body, **about})

    def commit(self, agent, body):
        if not self.alive or agent is not self.agent:
            return
        step, made = body["step"], body["generation"]
        if self.name in self.world.full:
            self.fail(-1, step, made, "no space for the manifest")
            return
        states = [root for _, root in body["files"]]
        size = self.world.size
        for at, state in enumerate(states):
            must(state == states[at % size], "two states are written as one, at step {}", step)
        self.world.durables[step, made] = dict(enumerate(states[:size]))
        self.say({"type": "committed", "step": step, "generation": made, "drain_s": 0.1})


class Meeting:
    """A place where processes wait for each other: the ranks of a world, or those of one coordinate in a generation. It
    breaks when one of them leaves. Those that wait learn of it a little later, and those that come, at once. A message
    that was under way then reaches only some."""

    def __init__(self, world, count):
        self.world, self.count, self.broken = world, count, False
        self.points = {}  # name -> {process: its value, and the callback}

    def arrive(self, name, proc, value, then):
        if self.broken:
            self.world.after(self.world.ms(1, 30), then, None)
            return
        point = self.points.setdefault(name, {})
        point[proc] = (value, then)
        if len(point) == self.count:
            values = [value for value, _ in point.values()]
            for _, then in self.points.pop(name).values():
                self.world.after(self.world.ms(2, 40), self.deliver, then, values)

    def deliver(self, then, values):
        then(None if self.broken and self.world.rng.random() < 0.5 else values)

    def leave(self):
        if not self.broken:
            self.broken = True
            for point in self.points.values():
                for _, then in point.values():
                    self.world.after(self.world.ms(5, 60), then, None)
            self.points = {}


class Proc:
    """A worker: it behaves as `train.worker` does."""

    def __init__(self, world, node, rank, number):
        self.world, self.node, self.rank, self.number = world, node, rank, number
        self.replica, self.coordinate = divmod(rank, world.size)
        self.member = Member(number, world.set.steps, speaks=self.coordinate == 0)
        self.alive, self.up, self.stuck, self.applying, self.halted = True, False, False, False, -1
        self.state = self.next = self.true = None
        self.form = self.queued = None
        self.kept = (0, ())  # a step, and the samples that it has gradients of
        self.moves, self.waits = 0, False
        self.saved = set()
        world.after(world.ms(*world.set.start_ms), self.come_up)
        world.after(S, self.start_up)

    def start_up(self):
        """Make progress while the worker starts."""
        if self.alive and not self.up and not self.stuck:
            self.moves += 1
            self.world.after(S, self.start_up)

    def come_up(self):
        self.stuck = self.stuck or self.node.name in self.world.duds
        if self.alive and not self.stuck:
            self.up = True
            self.moves += 1
            if not self.world.ledger.slots[self.rank].owner:
                self.world.ledger.owns(self.rank, self.number, self.world.now)
            self.say({"type": "up", "port": 1})

    def say(self, body):
        if body and self.alive and not self.stuck:
            self.world.after(MS, self.heard, body)

    def heard(self, body):
        if self.alive:
            self.node.heard(self.number, body)

    def vanish(self, fin):
        """End along with the host."""
        if self.alive:
            self.alive = False
            del self.node.procs[self.number]
            self.world.ledger.clock(self.rank, self.number, "idle", self.world.now)
            if fin:
                self.leave_world()

    def die(self, signal="", kind="", text=""):
        if not self.alive:
            return
        self.vanish(fin=True)
        if kind:
            self.node.heard(self.number, {"type": "error", "kind": kind, "text": text})
        self.node.lost(self.number, Failure(signal=signal, code=0 if signal else 1, text=text, step=self.member.step))

    def hear(self, body):
        if not self.up or self.stuck or not self.alive:
            return
        kind = body["type"]
        if kind == "build":
            self.build(body["world"])
        elif kind == "form":
            self.enter(body)
        elif kind == "serve":
            if self.member.may_serve(body["generation"]):
                self.settle(body["step"])
        elif kind == "halt":
            self.halt(body["world"])
        elif kind == "part":
            self.part(body["generation"])
        elif kind == "pause":
            self.member.ask_pause(body["generation"])
        elif kind == "save":
            self.save(body["generation"], body["step"])
        elif kind == "leave":
            self.die()

    # -- the world

    @property
    def crew(self):
        return self.world.crews[self.member.world]

    def build(self, number):
        m, world = self.member, self.world
        if not m.build(number):
            if number == m.world:
                self.say(m.standing())
            return
        world.tender(self, "build")
        self.waits = False
        world.after(S, self.move, "building", number)
        if self.node.name in world.lonely:
            world.after(world.ms(10, 100), self.halt, number, world.lonely[self.node.name])
        else:
            world.after(world.ms(10, 200), self.meet_crew, number)

    def move(self, phase, number):
        """Make progress while the worker builds or restores."""
        m = self.member
        there = self.alive and not self.stuck and not self.waits and m.phase == phase
        if there and number == (m.world if phase == "building" else m.generation):
            self.moves += 1
            self.world.after(S, self.move, phase, number)

    def meet_crew(self, number):
        if self.alive and self.member.phase == "building" and self.member.world == number:
            self.world.tender(self, "meet")
            self.waits = True
            self.crew.arrive("built", self, None, lambda values: self.met_crew(number, values))

    def met_crew(self, number, values):
        m = self.member
        if self.alive and not self.stuck and m.phase == "building" and m.world == number:
            if values is None:
                self.halt(number, "connection closed by peer")
                return
            m.built()
            self.say(m.standing())
            self.world.tender(self, "built")

    def halt(self, number, why=""):
        if self.stuck or not self.up or not self.alive:
            return
        if self.applying:
            self.halted = max(self.halted, number)
        elif self.member.halt(number, {"text": why} if why else None):
            self.state, self.true, self.queued = self.true or self.state, None, None
            self.world.ledger.clock(self.rank, self.number, "stalled", self.world.now)
            self.say(self.member.standing())
            self.leave_world()

    def leave_world(self):
        """Close all sockets."""
        if self.member.world in self.world.crews:
            self.crew.leave()
        self.leave_groups()

    def leave_groups(self):
        if self.form:
            self.cross.leave()

    # -- the generation

    @property
    def cross(self):
        """Return the group of this coordinate over all replicas."""
        generation = self.form["generation"]
        made = self.world.crosses.setdefault((generation, self.coordinate), None)
        if made is None:
            made = self.world.crosses[generation, self.coordinate] = Meeting(self.world, len(self.form["replicas"]))
        return made

    def enter(self, body):
        m, world = self.member, self.world
        source = Source(**body["source"]) if body["source"] else None
        generation, step = body["generation"], body["step"]
        if m.phase in ("entering", "running") and generation > m.generation:
            self.queued = body  # it is about to part, as its replica has reported
            return
        if not m.form(generation, body["world"], source):
            if m.generation == generation:
                self.say(m.standing())
            return
        self.form, self.waits = body, False
        takes = world.ms(*world.set.restore_ms) if source else world.ms(10, 100)
        world.after(S, self.move, "entering", generation)
        world.after(takes, self.restore, generation, step, source, 10)
        world.tender(self, "enter")

    def entering(self, generation):
        m = self.member
        return self.alive and not self.stuck and m.phase == "entering" and m.generation == generation

    def restore(self, generation, step, source, tries):
        world, m = self.world, self.member
        if not self.entering(generation) or m.lacks:
            return
        state, reason = self.fetch(step, source)
        waits = source and source.kind == "live" and source.node not in world.deaf and not self.cross.broken
        if state is None and tries and waits:
            world.after(world.ms(100, 400), self.restore, generation, step, source, tries - 1)
            return
        if state is None:
            m.lack(reason, damaged="damaged" in reason)
            self.say(m.standing())
            self.agree_to_enter(generation, False)
            return
        self.state = state
        whole, size = world.ledger.forms[generation], world.size
        kept = not whole.every and any(whole.source_of(r * size + self.coordinate) is None for r in whole.replicas)
        if world.flip and source and kept:
            world.flip, self.state, self.true = False, f"{state}?{self.number}", state
        m.restored(step)
        if self.node.name in world.mute:
            self.agree_to_enter(generation, False)
            return
        self.waits = True
        told = (self.state, source is None)
        point = "form" if self.node.name not in world.walled else "a wall"
        self.cross.arrive(point, self, told, lambda values: self.formed(generation, values))
        world.tender(self, "restored")

    def formed(self, generation, values):
        """Handle the arrival of all ranks of the coordinate. A rank whose state differs from that of the majority ends
        by itself."""
        if not self.entering(generation):
            return
        if values and len({state for state, _ in values}) > 1:
            states = [state for state, _ in values]
            right = max(states, key=lambda s: (states.count(s), (s, True) in values, s))
            if self.state != right:
                self.die(text="has another state than its peers")
                return
        self.agree_to_enter(generation, values is not None)

    def agree_to_enter(self, generation, ok):
        m = self.member
        told = (ok, m.step, m.prepared, m.made)
        self.world.tender(self, "agree")
        self.crew.arrive(f"enter {generation}", self, told, lambda values: self.entered(generation, values))

    def entered(self, generation, values):
        m = self.member
        if not self.alive or self.stuck or m.parted >= generation or m.phase not in ("built", "entering"):
            return
        if values is None:
            self.halt(m.world, "connection closed by peer")
        elif all(ok for ok, *_ in values) and m.generation == generation:
            self.true = None
            world = self.world
            world.ledger.started(generation, self.rank, self.number, world.now)
            if m.formed(m.step):
                world.ledger.clock(self.rank, self.number, "running", world.now)
            self.say(m.standing())
            world.tender(self, "entered")
            if m.phase == "running":
                self.compute()
        else:
            _, *held = (min(column) for column in zip(*values, strict=True))
            self.depart(generation, in_common(*held, max(made for *_, made in values)))

    def part(self, generation):
        """Obey an order to part: finish the pass, and do not wait for others."""
        m = self.member
        if generation == m.generation and m.phase in ("entering", "running"):
            self.leave_groups()
        elif m.phase == "built" and generation > m.generation:
            m.generation = generation
            self.agree_to_enter(generation, False)
        elif m.phase == "built":
            self.say(m.standing())

    def depart(self, generation, agreed=None, kept=False):
        """Leave the generation, with all ranks of the replica."""
        m, world = self.member, self.world
        m.generation = max(m.generation, generation)
        if m.part(generation, agreed, kept):
            self.state, self.true = self.true or self.state, None
            self.leave_groups()
            world.ledger.clock(self.rank, self.number, "stalled", world.now)
            self.say(m.standing())
            world.tender(self, "parted")
            if self.queued:
                body, self.queued = self.queued, None
                self.enter(body)

    def settle(self, step):
        try:
            if self.member.settle(step):
                self.world.ledger.applied(self.rank, step, self.member.made, self.state, self.next)
                self.state = self.next
        except ValueError:
            return False
        return True

    def fetch(self, step, source):
        world, coordinate = self.world, self.coordinate
        if source is None:
            return (self.state, "") if self.settle(step) else (None, "it does not hold that step")
        if source.kind == "live":
            donor = world.proc(source.number)
            there = donor and donor.up and not donor.stuck and donor.member.step == step
            there = there and donor.node.name not in world.deaf
            return (donor.state, "") if there else (None, "the donor does not answer")
        if source.kind == "memory":
            found = world.nodes[source.node].memory.get((source.number, step, source.made))
            found = None if source.node in world.deaf else found
            return found, "it is not there"
        if source.kind == "start":
            if -1 in world.unreadable:
                return None, "the checkpoint is damaged"
            return initial(coordinate), ""
        if (step, source.made) in world.unreadable:
            return None, "the checkpoint is damaged"
        return world.durables[step, source.made][coordinate], ""

    # -- a step

    def running(self, generation, step):
        m = self.member
        return (
            self.alive and not self.stuck and m.phase == "running" and m.generation == generation and m.step == step - 1
        )

    def compute(self):
        m, world = self.member, self.world
        step, generation = m.step + 1, m.generation
        world.ledger.begin(self.rank, self.number, step, generation, world.now)
        self.share, held = world.ledger.share(generation, self.replica, step)
        must(not held or self.kept == (step, held), "{} are to be gradients of step {}, not {}", held, step, self.kept)
        world.after(world.ms(300, 700), self.computed, generation, step)

    def computed(self, generation, step):
        if self.running(generation, step):
            if self.node.name in self.world.frail and len(self.form["replicas"]) > 1:
                self.leave_groups()
            self.cross.arrive(f"sum {step}", self, self.share, lambda values: self.summed(generation, step, values))

    def summed(self, generation, step, values):
        if self.running(generation, step):
            if values:
                self.world.ledger.reduced(self.coordinate, [sample for share in values for sample in share])
            self.world.tender(self, "sum")
            then = lambda agreed: self.reduced(generation, step, agreed)  # noqa: E731
            self.crew.arrive(f"sum {generation} {step}", self, values is not None, then)

    def reduced(self, generation, step, agreed):
        if not self.running(generation, step):
            return
        m = self.member
        if agreed is None:
            self.halt(m.world, "connection closed by peer")
        elif not all(agreed):
            self.keep(generation, step)
        else:
            self.next = advanced(self.state, step, generation)
            pause = m.vote()
            then = lambda votes: self.voted(generation, step, votes)  # noqa: E731
            self.cross.arrive(f"vote {step}", self, pause, then)
            self.world.tender(self, "vote")

    def voted(self, generation, step, votes):
        if self.running(generation, step):
            if votes is not None:
                self.world.votes.setdefault((generation, step), self.world.now)
            then = lambda seen: self.commit(generation, step, seen)  # noqa: E731
            self.crew.arrive(f"vote {generation} {step}", self, votes, then)

    def commit(self, generation, step, seen):
        if not self.running(generation, step) or self.applying:
            return
        if seen is None:
            self.halt(self.member.world, "connection closed by peer")
        elif not self.may_commit(seen):
            self.keep(generation, step)
        else:
            self.applying = True
            pause = any(pause for votes in seen if votes for pause in votes)
            self.world.after(self.world.ms(10, 60), self.applied, generation, step, pause)
            self.world.tender(self, "apply")

    def keep(self, generation, step):
        """Leave the generation, but keep the gradients of the pass."""
        self.kept = (step, self.share)
        self.depart(generation, kept=True)

    @staticmethod
    def may_commit(seen):
        """Return whether any rank of the replica has seen all votes: one is enough."""
        return any(votes is not None for votes in seen)

    def applied(self, generation, step, pause):
        if not self.alive or self.stuck:
            return
        self.applying = False
        world, m = self.world, self.member
        world.ledger.applied(self.rank, step, generation, self.state, self.next, world.votes.get((generation, step), 0))
        self.state = self.next
        go_on = m.commit(pause)
        self.moves += 1
        self.snapshot(step, generation, world.set.durable_every and step % world.set.durable_every == 0)
        self.say({"type": "step", "generation": generation, "step": step - 1, "time_s": 0.5})
        if self.halted >= m.world:
            self.halt(self.halted)
        elif go_on:
            self.compute()
        else:
            self.leave_groups()
            world.ledger.clock(self.rank, self.number, "stalled", world.now)
            world.tender(self, "end")
            self.crew.arrive(f"end {generation}", self, None, self.rested)

    def rested(self, values):
        """Report, now that all ranks of the replica have applied the last step."""
        if self.alive and not self.stuck and self.member.phase == "built":
            if values is None:
                self.halt(self.member.world, "connection closed by peer")
            else:
                self.say(self.member.standing())

    def place(self, made):
        """Return the index among the ranks that take part, by which files and snapshots are counted."""
        return self.world.ledger.forms[made].replicas.index(self.replica) * self.world.size + self.coordinate

    def snapshot(self, step, made, durable):
        world, at = self.world, self.place(made)
        if step % world.set.snapshot_every == 0 or durable:
            self.node.keep(at, step, made, self.state)
            buddy = world.ledger.forms[made].buddies.get(self.node.name)
            if buddy:
                other = world.nodes[buddy.partition(":")[0]]
                world.after(world.ms(50, 300), other.keep, at, step, made, self.state)
        if durable:
            self.saved.add((step, made))
            self.node.write(step, made, [at])

    def save(self, generation, step):
        m = self.member
        if m.phase == "built" and m.parted == generation and self.settle(step):
            if (step, generation) in self.saved:
                return
            self.saved.add((step, generation))
            self.node.keep(self.place(generation), step, generation, self.state)
            self.node.write(step, generation, [self.place(generation)])

    # -- hanging

    def hang(self):
        if self.alive and self.up and not self.stuck and self.member.phase == "running" and not self.applying:
            self.stuck = True
            self.world.after(3 * S, self.found_stuck)

    def found_stuck(self):
        if self.alive and self.node.alive:
            self.node.agent.hung(self.world.now, [self.number], "stands still in its step")
            self.node.act()
            self.world.after(3 * S, self.found_stuck)
