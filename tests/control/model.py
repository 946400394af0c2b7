"""Explore every possible order of events for a gang so small that all can be tried: nodes with one rank each and a
spare, a step or two, and a budget of faults. The gang, the agents and the workers' half of the protocol are the real
ones. Between them is a bag of messages, and any may be delivered next. Ranks of a replica agree in one move, as their
world stands or falls as one; each applies a step by itself.

Time stands still: all time-outs are zero, and a timer fires when nothing else can happen, or early, if the budget
allows it. A state is hashed whole, so each is looked at once.
"""

from __future__ import annotations

import pickle
from operator import attrgetter
from typing import NamedTuple

from phalanx.control import agent as machine
from phalanx.control import invariants, messages
from phalanx.control.agent import Agent, Service
from phalanx.control.gang import Gang
from phalanx.control.member import Member, in_common
from phalanx.control.messages import (
    EVERYONE,
    Build,
    Ended,
    Failure,
    Form,
    Halt,
    Note,
    Part,
    Pause,
    Report,
    SetTimer,
    Source,
    Started,
    TimerFired,
)
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout

TIMES = ("gather", "wait", "hold", "lease", "park", "pause", "form", "launch", "ask", "resend", "deaths", "silence")
# Wait for nothing but the start of the run, and try as often as it takes.
POLICY = Policy(
    **{f"{name}_ns": int(name == "gather") for name in TIMES}, backoff_ns=0, attempts=10**6, strikes=10**6, save=False
)
pack = attrgetter(*Member.__dataclass_fields__)
EARLY = ("park", "form", "launch", "build", "leave")  # timers that may fire while answers are under way


class Host(NamedTuple):
    agent: int  # its number in the table
    alive: bool = True


class Worker(NamedTuple):
    node: str
    rank: int
    member: tuple  # the fields of Member
    chain: tuple = ()  # the generation in which each step that made its state was
    next: int = 0  # the same for the step that it has prepared
    task: tuple = ()  # the step to continue from, and its source; (): it has that state
    told: int = 0  # the last generation that it was told to leave


class State(NamedTuple):
    gang: int
    hosts: tuple  # of (name, Host)
    workers: tuple  # of (number, Worker)
    net: frozenset  # of (node or "", message)
    worlds: tuple  # of (world, its workers)
    gens: tuple  # of (generation, its worlds)
    votes: frozenset  # of (generation, step, world, whether it asks for a pause)
    history: tuple  # the generation in which each committed step was made
    branches: tuple  # of (generation, step)
    deaths: int  # deaths that may still happen
    lies: int  # nodes that may still be declared dead by mistake
    hurries: int  # timers that may still fire early
    repeats: int  # messages that may still be delivered again


class Broken(AssertionError):
    pass


def must(true, text):
    if not true:
        raise Broken(text)


class Table:
    """Numbers for values that are compared often and seldom looked at."""

    def __init__(self):
        self.items, self.numbers = [], {}

    def number(self, key, item):
        if key not in self.numbers:
            self.numbers[key] = len(self.items)
            self.items.append(item)
        return self.numbers[key]


class Model:
    def __init__(self, replicas=2, shards=1, spares=1, steps=1, deaths=0, lies=0, hurries=0, repeats=0):
        self.steps, self.size = steps, shards
        self.gangs, self.agents, self.messages, self.memo, self.voids = Table(), Table(), Table(), {}, {}
        gang = Gang.of(Layout(replica=replicas, shard=shards, ranks_per_node=1), steps, POLICY)
        names = [f"n{i}" for i in range(replicas * shards + spares)]
        nobody = Host(self._agent(Agent("", "", {})))
        hosts, none = tuple((n, nobody) for n in names), frozenset()
        state = State(self._gang(gang), hosts, (), none, (), (), none, (), (), 0, 0, 0, 0)
        for name in names:
            agent = Agent(name, name, {"store": Service({"address": name})}, host=name, incarnation=1)
            agent.connected(0)
            state = self.acted(state, name, agent)
        while self.phase(state) != "running" or state.net:  # without faults there is only one way to start
            state = next(after for _, after in self.moves(state))
        self.first = state._replace(deaths=deaths, lies=lies, hurries=hurries, repeats=repeats)

    def explore(self, depth=10**9):
        """Visit all states that can be reached in `depth` moves; Broken tells the way to a bad one. Return the number
        of states and of moves, and the depth reached."""
        came, layer, moves, level, back = {self.first: None}, [self.first], 0, 0, {}
        while layer and level < depth:
            level += 1
            after = []
            for state in layer:
                try:
                    following = self.successors(state)
                    must(following or self.phase(state) == "ended" or self.held(state), "nothing can happen any more")
                except AssertionError as error:
                    raise Broken(f"{error}\n" + "\n".join(self.way(came, state))) from None
                for label, other in following:
                    moves += 1
                    back.setdefault(other, []).append(state)
                    if other not in came:
                        came[other] = (state, label)
                        after.append(other)
            layer = after
        if not layer:
            self.check_progress(came, back)
        return len(came), moves, level

    def check_progress(self, came, back):
        """Check that an end can be reached from every state."""
        ends = [state for state in came if self.phase(state) == "ended" or self.held(state)]
        seen, stack = set(ends), list(ends)
        while stack:
            for before in back.get(stack.pop(), ()):
                if before not in seen:
                    seen.add(before)
                    stack.append(before)
        for state in came:
            if state not in seen:
                raise Broken("no end can be reached from here:\n" + "\n".join(self.way(came, state)))

    def held(self, state):
        gang = self.gang(state)
        idle = not gang.members.spares and not gang.staff.starting
        return gang.phase == "gathering" and bool(gang.desk.said) and idle

    def way(self, came, state):
        steps = []
        while came[state]:
            state, label = came[state]
            steps.append(label if isinstance(label, str) else f"-> {label[0]} {self.messages.items[label[1]]}")
        return steps[::-1]

    # -- the controller

    def _gang(self, gang):
        return self.gangs.number(gang.to_bytes(), gang)

    def gang(self, state):
        """Return the gang, only to be looked at."""
        return self.gangs.items[state.gang]

    def phase(self, state):
        return self.gang(state).phase

    def hear(self, state, event):
        key = (state.gang, repr(event))
        if key not in self.memo:
            gang = pickle.loads(pickle.dumps(self.gang(state)))
            before = (gang.generation, gang.members.last_worker)
            commands = gang.apply(0, event)
            invariants.check(gang, before)
            said = [c for c in commands if not isinstance(c, (SetTimer, Note, Report, Ended, Started))]
            self.memo[key] = self._gang(gang), said
        number, commands = self.memo[key]
        state = state._replace(gang=number)
        for command in commands:
            if isinstance(command, Build):
                crew = tuple(self.gang(state).worlds.replicas[command.replica].crew.values())
                state = state._replace(worlds=tuple(sorted({*state.worlds, (command.world, crew)})))
            elif isinstance(command, Form):
                state = self.formed(state, command)
            here = {worker.node for _, worker in state.workers}  # other nodes have no worker to tell
            nodes = sorted(here) if command.to == EVERYONE else command.to
            state = self.send(state, *((node, command) for node in nodes))
        ending = self.gang(state).ending.outcome
        if self.phase(state) == "ended" and ending.ok:
            must(len(state.history) == self.steps, f"it ended after {len(state.history)} steps")
        return state

    def formed(self, state, form):
        state = state._replace(gens=tuple(sorted({*state.gens, (form.generation, form.worlds)})))
        if form.generation != self.gang(state).generation or not form.branch:
            must(len(state.history) <= form.step, "committed steps are silently undone")
            return state
        branches = tuple(sorted({*state.branches, (form.generation, form.step)}))
        if branches == state.branches:
            return state
        return state._replace(history=state.history[: form.step], branches=branches)

    # -- the network

    def send(self, state, *pairs):
        new = {(node, self.messages.number(repr(message), message)) for node, message in pairs}
        return state._replace(net=state.net | new)

    def say(self, state, *events):
        return self.send(state, *(("", event) for event in events))

    # -- what can happen next

    def successors(self, state):
        moves = list(self.moves(state))
        gang = self.gang(state)
        if gang.phase == "ended":
            return []
        if not moves:
            timers = [t for t in sorted(gang.desk.timers) if t != "hold"]  # `hold` would end a run that has not failed
            moves = [(f"timer {t}", self.hear(state, TimerFired(t))) for t in timers]
            moves = [(label, after) for label, after in moves if after != state]
        return [(label, self.tidy(after)) for label, after in moves + list(self.faults(state, gang))]

    def tidy(self, state):
        """Drop messages that are refused, and always will be: their generation or their worker is over."""
        void = [item for item in state.net if self.void(state, item)]
        return state._replace(net=state.net.difference(void)) if void else state

    def void(self, state, item):
        node, number = item
        if not node:
            key = (state.gang, number)
            if key not in self.voids:
                event = self.messages.items[number]
                self.voids[key] = self.late(self.gang(state), event) and self.hear(state, event) == state
            return self.voids[key]
        message, gang = self.messages.items[number], self.gang(state)
        if isinstance(message, (messages.Welcome, messages.Release, messages.Leave)):
            return True
        late = isinstance(message, Form | Part | Pause) and message.generation < gang.generation
        if isinstance(message, Build | Halt):
            late = message.world not in {r.world for r in gang.worlds.replicas.values() if r.phase != "out"}
        return late and self.deliver(state._replace(net=state.net - {item}), item) == state._replace(
            net=state.net - {item}
        )

    def late(self, gang, event):
        workers = getattr(event, "workers", (getattr(event, "worker", 10**9),))
        if isinstance(event, messages.Built | messages.Parked):
            workers = [worker for some in workers for worker in some]
        known = gang.members.workers.keys() | gang.staff.killed.keys()
        awaited = {messages.Parted: gang.gen.left, messages.Formed: gang.gen.waiting}.get(type(event))
        if awaited is not None and awaited.isdisjoint(event.replicas) and event.generation == gang.generation:
            return True
        return getattr(event, "generation", 10**9) < gang.generation or all(
            worker not in known and worker <= gang.members.last_worker for worker in workers
        )

    def moves(self, state):
        for item in sorted(state.net):
            yield item, self.deliver(state._replace(net=state.net - {item}), item)
        workers = dict(state.workers)
        for number, worker in state.workers:
            yield from self.work(state, workers, number, worker)
        for world, crew in state.worlds:
            if self.stands(workers, world, crew):
                yield from self.agree(state, workers, world, crew)

    def faults(self, state, gang):
        if state.deaths:
            for number, _ in state.workers:
                after = self.kill(state._replace(deaths=state.deaths - 1), number)
                yield f"worker {number} dies", after
            for name, host in state.hosts:
                if host.alive:
                    after = state._replace(deaths=state.deaths - 1)
                    for number, worker in state.workers:
                        after = self.drop(after, number) if worker.node == name else after
                    after = self.host(after, name, host._replace(alive=False))
                    after = after._replace(net=frozenset(item for item in after.net if item[0] != name))
                    incarnation = self.agent(state, name).incarnation
                    yield f"node {name} dies", self.say(after, messages.NodeDead(name, incarnation, "it is"))
        if state.lies:
            for name, host in state.hosts:
                if host.alive:
                    lie = messages.NodeDead(name, self.agent(state, name).incarnation)
                    yield f"node {name} is declared dead", self.say(state._replace(lies=state.lies - 1), lie)
        if state.hurries:
            for timer in EARLY:
                if timer in gang.desk.timers:
                    yield (
                        f"timer {timer}, early",
                        self.hear(state._replace(hurries=state.hurries - 1), TimerFired(timer)),
                    )
        if state.repeats:
            for item in sorted(state.net):
                again = self.deliver(state._replace(repeats=state.repeats - 1), item)
                yield item, again

    def deliver(self, state, item):
        node, message = item[0], self.messages.items[item[1]]
        if not node:
            return self.hear(state, message)
        if not dict(state.hosts)[node].alive:
            return state
        agent = self.agent(state, node)
        agent.obey(0, message)
        return self.acted(state, node, agent)

    # -- agents

    def _agent(self, agent):
        agent.now_ns, agent.alarms = 0, {}  # time stands still, and what was posted is heard
        agent.posted = agent.acked = agent.joined = agent.stepped = 0
        return self.agents.number(pickle.dumps(agent), pickle.dumps(agent))

    def agent(self, state, name):
        """Return a copy of an agent, to be changed."""
        return pickle.loads(self.agents.items[dict(state.hosts)[name].agent])

    def host(self, state, name, host):
        return state._replace(hosts=tuple((n, host if n == name else h) for n, h in state.hosts))

    def acted(self, state, name, agent):
        """Carry out what an agent wants, at once."""
        while True:
            agent.fire(agent.alarms.get("gather", 0), "gather")
            actions = agent.take()
            if not actions:
                host = dict(state.hosts)[name]
                return self.host(state, name, host._replace(agent=self._agent(agent)))
            for action in actions:
                if isinstance(action, machine.Post):
                    state = self.say(state, action.event)
                    agent.acknowledged(agent.posted)
                elif isinstance(action, machine.Spawn):
                    rank = action.args["rank"]
                    member = Member(action.number, self.steps, speaks=rank % self.size == 0)
                    state = self.put(state, action.number, Worker(name, rank, pack(member)))
                    agent.worker_said(0, action.number, {"type": "up", "port": 1})
                elif isinstance(action, machine.End):
                    state = self.drop(state, action.number)
                    agent.ended(0, action.number, Failure(signal="SIGKILL"))
                elif isinstance(action, machine.Reboot):
                    agent.booted(0, agent.incarnation + 1)
                    agent.connected(0)
                elif isinstance(action, machine.Send) and action.number in dict(state.workers):
                    state, said = self.tell(state, action.number, action.body)
                    if said:
                        agent.worker_said(0, action.number, said)

    def kill(self, state, number):
        name = dict(state.workers)[number].node
        agent = self.agent(state, name)
        agent.ended(0, number, Failure(signal="SIGKILL"))
        return self.acted(self.drop(state, number), name, agent)

    def spoke(self, state, *numbers):
        """Workers report where they stand."""
        for number in numbers:
            worker = dict(state.workers)[number]
            if said := Member(*worker.member).standing():
                agent = self.agent(state, worker.node)
                agent.worker_said(0, number, said)
                state = self.acted(state, worker.node, agent)
        return state

    def put(self, state, number, worker, member=None):
        if member is not None:
            worker = worker._replace(member=pack(member))
        return state._replace(workers=tuple(sorted({**dict(state.workers), number: worker}.items())))

    def drop(self, state, number):
        return state._replace(workers=tuple(item for item in state.workers if item[0] != number))

    def tell(self, state, number, body):
        """Have a worker hear its agent. Return the state, and what the worker reports at once."""
        worker, kind = dict(state.workers)[number], body["type"]
        member, says = Member(*worker.member), False
        if kind == "build":
            if member.build(body["world"]):
                worker = worker._replace(told=0, task=())
            else:
                says = member.world == body["world"]
        elif kind == "halt":
            says = member.halt(body["world"])
        elif kind == "form":
            source = Source(**body["source"]) if body["source"] else None
            if member.form(body["generation"], body["world"], source):
                worker = worker._replace(task=(body["step"], source))
            else:
                says = member.generation == body["generation"]
        elif kind == "part":
            if body["generation"] > member.parted and member.phase in ("built", "entering", "running"):
                worker = worker._replace(told=max(worker.told, body["generation"]))
            says = member.phase == "built" and member.parted >= body["generation"]
        elif kind == "pause":
            member.ask_pause(body["generation"])
        elif kind == "serve" and member.may_serve(body["generation"]):
            return self.settle(state, number, worker, member, body["step"]), None
        return self.put(state, number, worker, member), member.standing() if says else None

    # -- what a worker does by itself

    def stands(self, workers, world, crew):
        """Return whether nobody of a world is gone or has left it."""
        there = [Member(*workers[number].member) for number in crew if number in workers]
        return len(there) == len(crew) and all(m.world == world and m.phase != "parked" for m in there)

    def is_gone(self, workers, number, world):
        """Return whether a worker has ended or has left the world; False if it has yet to come."""
        m = Member(*workers[number].member) if number in workers else None
        return m is None or m.world > world or (m.phase == "parked" and m.world == world)

    def work(self, state, workers, number, worker):
        m = Member(*worker.member)
        if m.phase not in ("building", "entering", "running"):
            return
        crew = dict(state.worlds)[m.world]
        if m.phase == "entering" and worker.task and not m.lacks:
            yield from self.restore(state, workers, number, worker, m)
        if m.phase == "building" and self.stands(workers, m.world, crew):
            m.built()
            yield f"{number} has built {m.world}", self.spoke(self.put(state, number, worker, m), number)
        elif m.phase == "running" and m.prepared > m.step:
            yield from self.commit(state, workers, number, worker, m)
        m = Member(*worker.member)
        if any(self.is_gone(workers, n, m.world) for n in crew) and m.halt(m.world):
            yield f"{number} has lost its world", self.spoke(self.put(state, number, worker, m), number)

    def commit(self, state, workers, number, worker, m):
        g, step = m.generation, m.prepared
        votes = [vote for vote in state.votes if vote[:2] == (g, step)]
        if not self.may_commit(len(votes), len(dict(state.gens)[g])):
            return
        after = self.apply(state, worker, step, voted=True)
        m.commit(any(pause for *_, pause in votes))
        after = self.put(after, number, worker._replace(chain=(*worker.chain, worker.next)), m)
        crew = dict(state.worlds)[m.world]
        found = dict(after.workers)
        rests = self.stands(found, m.world, crew) and all(Member(*found[n].member).parted >= g for n in crew)
        yield f"{number} applies {step}", self.spoke(after, *crew) if rests else after

    @staticmethod
    def may_commit(votes, replicas):
        return votes == replicas

    def is_replaced(self, state, made, step):
        return any(generation > made and step > last for generation, last in state.branches)

    def apply(self, state, worker, step, voted=False):
        """Judge a step: it is committed once, after the one before it, and all who have it have the same."""
        made = worker.next
        must(len(worker.chain) == step - 1, f"step {step} is applied to {len(worker.chain)}")
        if self.is_replaced(state, made, step) and voted:
            return state  # the worker was given up and does not know it: it voted before
        must(not self.is_replaced(state, made, step), f"step {step} of generation {made} was abandoned, and is applied")
        history = state.history if len(state.history) >= step else (*state.history, made)
        must(
            history[:step] == (*worker.chain, made), f"step {step} of {(*worker.chain, made)} is not that of {history}"
        )
        return state._replace(history=history)

    def settle(self, state, number, worker, member, step):
        try:
            if member.settle(step):
                state = self.apply(state, worker, step)
                worker = worker._replace(chain=(*worker.chain, worker.next))
        except ValueError:
            return state
        return self.put(state, number, worker._replace(chain=worker.chain[:step]), member)

    def restore(self, state, workers, number, worker, member):
        step, source = worker.task
        if source is None:
            state = self.settle(state, number, worker, member, step)
            worker = dict(state.workers)[number]
            chain = worker.chain if len(worker.chain) == step else None
        elif source.kind == "live":
            donor = workers.get(source.number)
            if donor and Member(*donor.member).step != step:
                return  # not yet
            chain = donor.chain if donor else None
        else:
            chain = () if step == 0 else None
        member = Member(*worker.member)
        if chain is None:
            member.lack("it is not there")
            yield f"{number} does not get its state", self.spoke(self.put(state, number, worker, member), number)
            return
        member.restored(step)
        yield f"{number} has its state", self.put(state, number, worker._replace(chain=chain, task=()), member)

    # -- what the ranks of a world that stands agree on

    def agree(self, state, workers, world, crew):
        ranks = {number: Member(*workers[number].member) for number in crew}
        phases = {m.phase for m in ranks.values()}
        g = max(max(m.generation, workers[n].told) for n, m in ranks.items())
        if phases == {"running"}:
            yield from self.step(state, workers, world, ranks, g)
        elif phases <= {"built", "entering"}:
            heard = all(
                (m.phase == "entering" and m.generation == g) or (workers[n].told >= g > m.parted)
                for n, m in ranks.items()
            )
            if not heard:
                return
            entering = phases == {"entering"} and g in dict(state.gens)
            if entering and all(self.is_ready(workers, n, g) for n in self.members(state, g)):
                yield f"world {world} enters {g}", self.enter(state, workers, ranks, g)
            if any(m.lacks for m in ranks.values()) or self.is_over(state, workers, ranks, g):
                least = [min(getattr(m, name) for m in ranks.values()) for name in ("step", "prepared", "made")]
                held = in_common(*least, max(m.made for m in ranks.values()))
                yield f"world {world} does not enter {g}", self.part(state, workers, ranks, g, held)

    def members(self, state, g):
        return [number for world in dict(state.gens)[g] for number in dict(state.worlds)[world]]

    def is_ready(self, workers, number, g):
        m = Member(*workers[number].member) if number in workers else None
        return (
            bool(m)
            and m.generation == g
            and (m.phase == "running" or (m.phase == "entering" and not workers[number].task))
        )

    def is_over(self, state, workers, ranks, g):
        """Return whether one of the ranks was told to leave, or a peer has left."""
        if any(workers[number].told >= g for number in ranks):
            return True
        for number in self.members(state, g):
            m = Member(*workers[number].member) if number in workers else None
            if m is None or m.phase == "parked" or m.parted >= g or m.generation > g:
                return True
        return False

    def enter(self, state, workers, ranks, g):
        for number, m in ranks.items():
            others = [Member(*w.member) for n, w in workers.items() if n != number and w.rank == workers[number].rank]
            must(not any(o.phase == "running" and o.generation == g for o in others), "two workers are one rank")
            m.formed(m.step)
            state = self.put(state, number, workers[number], m)
        return self.spoke(state, *ranks)

    def step(self, state, workers, world, ranks, g):
        (step, *more) = {m.step + 1 for m in ranks.values()}
        if more:
            return  # one has applied it, and the others will too
        prepared = {m.prepared for m in ranks.values()}
        voted = {at for generation, n, at, _ in state.votes if (generation, n) == (g, step)}
        others = [n for at in dict(state.gens)[g] if at not in voted for n in dict(state.worlds)[at]]
        peers = [Member(*workers[n].member) for n in others if n in workers]
        there = [p for p in peers if p.phase == "running" and (p.generation, p.step) == (g, step - 1)]
        if prepared == {step - 1} and len(there) == len(others):
            pause, after = False, state
            for number, m in ranks.items():
                pause = m.vote() or pause
                after = self.put(after, number, workers[number]._replace(next=g), m)
            last = len(voted) + 1 == len(dict(state.gens)[g])
            must(not (last and self.is_replaced(state, g, step)), f"generation {g} goes on after it was replaced")
            yield f"world {world} votes for {step}", after._replace(votes=after.votes | {(g, step, world, pause)})
        ranks = {number: Member(*workers[number].member) for number in ranks}
        if self.is_over(state, workers, ranks, g):
            yield f"world {world} leaves {g}", self.part(state, workers, ranks, g)

    def part(self, state, workers, ranks, g, agreed=None):
        for number, m in ranks.items():
            m.generation = max(m.generation, g)
            m.part(g, agreed)
            state = self.put(state, number, workers[number]._replace(task=()), m)
        return self.spoke(state, *ranks)
