"""One number makes one world: its shape, its network, and what goes wrong in it."""

from __future__ import annotations

import dataclasses
from random import Random

from phalanx.control.messages import DeviceWarning, Drain, LinkBack, LinkLost, Scale, Stop
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from tests.control.sim.ledger import must
from tests.control.sim.world import QUICK, S, Setting, World

LIMIT_NS = 600 * S  # by when the gang must be done


@dataclasses.dataclass
class Result:
    seed: int
    digest: str
    steps: int
    generations: int
    undone: int
    faults: list
    events: int
    rungs: set
    ended: str
    accounts: list  # of each slot: productive, stalled, lost and idle time


def draw(rng):
    replica, shard = rng.choice([(1, 1), (1, 2), (2, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1)])
    per_node = rng.choice([d for d in (1, 2, 4) if replica * shard % d == 0])
    places = replica * shard // per_node
    policy = Policy(
        **QUICK,
        min_replicas=rng.choice([1, 1, 1, replica]),
        wait_ns=rng.choice([0, 0, 0, 8 * S]),
        silence_percent=rng.choice([25, 50]),
        save=rng.random() < 0.8,
    )
    wild = rng.random() < 0.5
    return Setting(
        layout=Layout(replica=replica, shard=shard, ranks_per_node=per_node),
        steps=rng.randrange(8, 31),
        nodes=places + rng.randrange(0, 3),
        domains=rng.choice([1, 2, 3]),
        policy=policy,
        snapshot_every=rng.choice([1, 1, 2, 3]),
        durable_every=rng.choice([0, 3, 4]),
        loss=rng.choice([0.02, 0.1, 0.25]) if wild else 0.0,
        twice=rng.choice([0.05, 0.3]) if wild else 0.0,
        delay_ms=rng.choice([(1, 5), (1, 400)]) if wild else (1, 5),
        late_ms=rng.choice([10, 2000, 10000]),
        point_kills=rng.choice([0, 0, 1, 2, 4]),
        point_chance=rng.choice([0.01, 0.05, 0.2]),
    )


class Faults:
    """Each seed has a mix of its own."""

    def __init__(self, world):
        self.world, self.rng = world, world.rng
        kinds = [name for name in sorted(vars(Faults)) if name.startswith("do_")]
        self.kinds = self.rng.sample(kinds, self.rng.randrange(1, 8))
        for _ in range(self.rng.choice([0, 1, 2, 3, 5, 8, 12])):
            world.after(world.ms(1500, 5000 + 800 * world.set.steps), self.strike, self.rng.choice(self.kinds))

    def strike(self, kind):
        text = getattr(self, kind)()
        if text:
            self.world.faults.append(f"{self.world.now / S:.3f} s: {kind[3:]} {text}")

    def _agent(self):
        return self.rng.choice(list(self.world.agents.values()))

    def _back(self):
        return self.world.ms(1000, 40000)

    def do_worker(self):
        procs = self.world.procs()
        if procs:
            proc = self.rng.choice(procs)
            proc.die("was killed")
            return f"rank {proc.rank}"
        return ""

    def do_again(self):
        """The same rank, again and again."""
        rank = self.rng.randrange(self.world.set.layout.world_size)
        for i in range(4):
            self.world.after(i * 4 * S, self._kill_rank, rank)
        return f"rank {rank}"

    def _kill_rank(self, rank):
        for proc in [p for p in self.world.procs() if p.rank == rank]:
            proc.die("was killed again")

    def do_coordinate(self):
        """The same coordinate of all replicas at once."""
        coordinate = self.rng.randrange(self.world.size)
        for proc in [p for p in self.world.procs() if p.rank % self.world.size == coordinate]:
            proc.die("was killed with its peers")
        return str(coordinate)

    def do_node(self):
        agent = self._agent()
        agent.die(proved=self.rng.random() < 0.4, fin=self.rng.random() < 0.4, back=self._back())
        return agent.name

    def do_domain(self):
        domain = self._agent().domain
        for agent in [a for a in self.world.agents.values() if a.domain == domain]:
            agent.die(proved=True, back=self._back())
        return domain

    def do_agent(self):
        """Its workers end with it, and it is started again at once."""
        agent = self._agent()
        agent.die(fin=True, back=self.world.ms(200, 900))
        return agent.name

    def do_controller(self):
        if self.world.controller.alive:
            self.world.controller.crash_at = len(self.world.controller.journal) + self.rng.randrange(5)
        return "soon"

    def do_hang(self):
        procs = self.world.procs()
        if procs:
            proc = self.rng.choice(procs)
            proc.hang()
            return f"rank {proc.rank}"
        return ""

    def do_partition(self):
        names = sorted(self.world.agents)
        away = (
            set(names)
            if self.rng.random() < 0.3
            else set(self.rng.sample(names, self.rng.randrange(1, len(names) + 1)))
        )
        self.world.cut |= away
        self.world.after(self.world.ms(1000, 25000), self.world.cut.difference_update, away)
        return ", ".join(sorted(away))

    def do_slow(self):
        self.world.slow = True
        self.world.after(self.world.ms(1000, 15000), setattr, self.world, "slow", False)
        return "network"

    def do_warning(self):
        agent = self._agent()
        agent.say(DeviceWarning, self.rng.choice(["ecc", "throttle", "slow"]), self.rng.choice([1, 20, 100]))
        return agent.name

    def do_link(self):
        a = self._agent()
        b = self.rng.choice([x.name for x in self.world.agents.values() if x is not a] or [""])
        self.world.send(a, self.world.controller.hear, LinkLost(a.name, b))
        if self.rng.random() < 0.7:
            self.world.after(self.world.ms(500, 20000), self._link_back, a, b)
        return f"{a.name} {b}"

    def _link_back(self, a, b):
        self.world.send(a, self.world.controller.hear, LinkBack(a.name, b))

    def do_drain(self):
        agent = self._agent()
        self.world.send(agent, self.world.controller.hear, Drain(agent.name))
        return agent.name

    def do_scale(self):
        count = self.rng.randrange(1, self.world.set.layout.replica + 1)
        self.world.send(self._agent(), self.world.controller.hear, Scale(count))
        return str(count)

    def do_stop(self):
        if self.rng.random() < 0.3:
            self.world.send(self._agent(), self.world.controller.hear, Stop(self.world.ms(5000, 60000)))
            return "please"
        return ""

    def do_forget(self):
        """Snapshots are damaged, and found to be."""
        agent = self._agent()
        agent.memory.clear()
        return agent.name

    def do_flip(self):
        """A state is damaged in a way that only its peers' digests tell."""
        self.world.flip = True
        return "a bit"


def hopeless(world):
    """Whether the nodes that are left cannot make the replicas that must be; the gang must say so."""
    gang, layout = world.gang, world.set.layout
    per_place = layout.ranks_per_node
    usable = [n for n, node in gang.members.nodes.items() if not node.drained and world.agents[n].alive]
    needed = -(-gang.policy.min_replicas * layout.replica_size // per_place)
    short = len(usable) < needed or len(usable) < -(-len(gang.members.wanted) * layout.replica_size // per_place)
    return short and gang.phase == "gathering" and bool(gang.said)


def run(seed):
    rng = Random(seed)
    world = World(draw(rng), rng.getrandbits(64))
    Faults(world)
    world.run(until=LIMIT_NS)
    gang, saved = world.gang, [key for key in world.durables if world.gang.lineage.counts(*key)]
    if world.over and gang.stop_ns < 0:
        last = [world.durables[step, made] for step, made in saved if step == gang.steps]
        final = last[-1] if gang.policy.save else {c: world.ledger.states[c, gang.steps] for c in range(world.size)}
        accounts = world.ledger.finish(gang.steps, world.now, final)
    else:
        bad = not world.over and not hopeless(world)
        must(not bad, "after {} s the gang is {} at step {}", world.now // S, gang.phase, gang.committed)
        accounts = world.ledger.accounts(world.now)
    rungs = {form.rung for form in world.controller.forms} | {rung for rung, _ in world.controller.notes}
    return Result(
        seed,
        world.digest.hexdigest(),
        len(world.ledger.history),
        gang.generation,
        world.ledger.undone,
        world.faults,
        len(world.controller.journal),
        rungs,
        gang.said if world.over else "held: " + gang.said,
        accounts,
    )
