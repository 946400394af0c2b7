"""Every order of events there can be, for a gang so small that all can be tried: three nodes with one rank each and a
spare, two steps, and a budget of things that go wrong. The gang, the agents and the workers' half of the protocol are
the real ones; between them is a bag of messages, any of which may be next.

Time stands still: all time-outs are nought, and a timer fires when nothing else can happen, or early, if the budget
has it. A state is hashed whole, so each is looked at once.
"""

from __future__ import annotations

import pickle
from operator import attrgetter
from typing import NamedTuple

from phalanx.control import agent as machine
from phalanx.control import invariants, messages
from phalanx.control.agent import Agent, Service
from phalanx.control.gang import Gang
from phalanx.control.member import Member
from phalanx.control.messages import Ended, Failure, Form, Note, Report, SetTimer, Source, TimerFired
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout

TIMES = ("gather", "wait", "hold", "lease", "park", "pause", "form", "launch", "ask", "resend", "deaths", "silence")
# Nothing is waited for but a beginning; nothing is given up for having been tried often.
POLICY = Policy(
    **{f"{name}_ns": int(name == "gather") for name in TIMES}, backoff_ns=0, attempts=10**6, strikes=10**6, save=False
)
pack = attrgetter(*Member.__dataclass_fields__)
GENERATION = [*Member.__dataclass_fields__].index("generation")
EARLY = ("park", "form", "launch")  # timers that may fire while answers are under way


class Host(NamedTuple):
    agent: int  # its number in the table
    alive: bool = True


class Worker(NamedTuple):
    node: str
    rank: int
    member: tuple  # the fields of Member
    chain: tuple = ()  # the generation in which each step that made its state was
    next: int = 0  # that of the step that it has prepared
    peers: int = 0  # in its generation, with itself
    task: tuple = ()  # the step to go on from, and its source


class State(NamedTuple):
    gang: int
    hosts: tuple  # of (name, Host)
    workers: tuple  # of (number, Worker)
    net: frozenset  # of (node or "", message)
    votes: frozenset  # of (generation, step, worker)
    history: tuple  # the generation in which each committed step was made
    branches: tuple  # of (generation, step)
    deaths: int  # that may still come
    lies: int  # nodes that may still be declared dead and are not
    hurries: int  # timers that may still fire early
    repeats: int  # messages that may still come again


class Broken(AssertionError):
    pass


def must(true, text):
    if not true:
        raise Broken(text)


class Table:
    """Numbers for things that are compared often and seldom looked at."""

    def __init__(self):
        self.items, self.numbers = [], {}

    def number(self, key, item):
        if key not in self.numbers:
            self.numbers[key] = len(self.items)
            self.items.append(item)
        return self.numbers[key]


class Model:
    def __init__(self, replicas=3, spares=1, steps=2, deaths=1, lies=0, hurries=0, repeats=0):
        self.steps = steps
        self.gangs, self.agents, self.messages, self.memo, self.voids = Table(), Table(), Table(), {}, {}
        gang = Gang.of(Layout(replica=replicas, ranks_per_node=1), steps, POLICY)
        names = [f"n{i}" for i in range(replicas + spares)]
        nobody = Host(self._agent(Agent("", "", {})))
        state = State(
            self._gang(gang), tuple((n, nobody) for n in names), (), frozenset(), frozenset(), (), (), 0, 0, 0, 0
        )
        for name in names:
            agent = Agent(name, name, {"store": Service({"host": name, "port": 1})}, incarnation=1)
            agent.connected(0)
            state = self.acted(state, name, agent)
        while self.phase(state) != "running" or state.net:  # without faults there is one way to begin
            state = next(after for _, after in self.moves(state))
        self.first = state._replace(deaths=deaths, lies=lies, hurries=hurries, repeats=repeats)

    def explore(self, depth=10**9):
        """All states that can be reached in so many moves; Broken tells the way to a bad one. Returns how many states
        and moves there are, and how deep it went."""
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
        """From everywhere an end can be reached."""
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
        """For looking at."""
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
            said = [c for c in commands if not isinstance(c, (SetTimer, Note, Report, Ended))]
            self.memo[key] = self._gang(gang), said
        number, commands = self.memo[key]
        state = state._replace(gang=number)
        for command in commands:
            if isinstance(command, Form):
                state = self.formed(state, command)
                state = self.send(state, *command.parts().items())
            else:
                state = self.send(state, *((node, command) for node in command.to))
        ending = self.gang(state).ending
        if self.phase(state) == "ended" and ending.ok:
            must(len(state.history) == self.steps, f"it ended after {len(state.history)} steps")
        return state

    def formed(self, state, form):
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
            timers = [t for t in sorted(gang.desk.timers) if t != "hold"]  # it would give up, and nothing has failed
            moves = [(f"timer {t}", self.hear(state, TimerFired(t))) for t in timers]
            moves = [(label, after) for label, after in moves if after != state]
        return [(label, self.tidy(after)) for label, after in moves + list(self.faults(state, gang))]

    def tidy(self, state):
        """Without messages that are refused, and always will be: their generation or their worker is over."""
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
        message = self.messages.items[number]
        if isinstance(message, (messages.Welcome, messages.Release, messages.Leave)):
            return True
        here = [worker.member[GENERATION] for _, worker in state.workers if worker.node == node]
        late = bool(here) and getattr(message, "generation", 10**9) < min(here)
        return late and self.deliver(state, item) == state

    def late(self, gang, event):
        workers = getattr(event, "workers", (getattr(event, "worker", 10**9),))
        known = gang.members.workers.keys() | gang.staff.killed.keys()
        return getattr(event, "generation", 10**9) < gang.generation or all(
            worker not in known and worker <= gang.members.last_worker for worker in workers
        )

    def moves(self, state):
        for item in sorted(state.net):
            yield item, self.deliver(state._replace(net=state.net - {item}), item)
        workers = dict(state.workers)
        for number, worker in state.workers:
            yield from self.work(state, workers, number, worker)

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
        agent.posted = agent.acked = agent.joined = agent.stepped = agent.halted = 0
        return self.agents.number(pickle.dumps(agent), pickle.dumps(agent))

    def agent(self, state, name):
        """A copy, to be changed."""
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
                    member = Member(action.number, self.steps)
                    state = self.put(state, action.number, Worker(name, action.args["rank"], pack(member)))
                    agent.worker_said(0, action.number, {"type": "up"})
                elif isinstance(action, machine.End):
                    state = self.drop(state, action.number)
                    agent.ended(0, action.number, Failure(signal="SIGKILL"))
                elif isinstance(action, machine.Reboot):
                    agent.booted(0, agent.incarnation + 1)
                    agent.connected(0)
                elif isinstance(action, machine.Send) and action.number in dict(state.workers):
                    state, said = self.tell(state, action.number, action.body)
                    for body in said:
                        agent.worker_said(0, action.number, body)

    def kill(self, state, number):
        name = dict(state.workers)[number].node
        agent = self.agent(state, name)
        agent.ended(0, number, Failure(signal="SIGKILL"))
        return self.acted(self.drop(state, number), name, agent)

    def spoke(self, state, number, member):
        """A worker reports where it stands."""
        name = dict(state.workers)[number].node
        agent, said = self.agent(state, name), member.standing()
        if said:
            agent.worker_said(0, number, said)
        return self.acted(state, name, agent)

    def put(self, state, number, worker, member=None):
        if member is not None:
            worker = worker._replace(member=pack(member))
        return state._replace(workers=tuple(sorted({**dict(state.workers), number: worker}.items())))

    def drop(self, state, number):
        return state._replace(workers=tuple(item for item in state.workers if item[0] != number))

    def tell(self, state, number, body):
        """A worker hears its agent; what it says at once."""
        worker, kind = dict(state.workers)[number], body["type"]
        member, said = Member(*worker.member), None
        if kind == "form":
            source = Source(**body["source"]) if body["source"] else None
            if member.form(body["generation"], body["step"], source):
                worker = worker._replace(peers=len(body["replicas"]), task=(body["step"], source))
            elif member.generation == body["generation"]:
                said = member.standing()
        elif kind == "serve" and member.phase in ("parked", "restoring") and member.may_serve(body["generation"]):
            state = self.settle(state, number, worker, member, body["step"])
            return state, []
        elif kind == "start":
            if member.start(body["generation"]):
                others = [w for n, w in state.workers if n != number and w.rank == worker.rank]
                same = [m for w in others if (m := Member(*w.member)).phase == "running"]
                must(all(m.generation != member.generation for m in same), "two workers are one rank")
            elif member.phase == "parked":
                said = member.standing()
        elif kind == "halt":
            said = member.standing() if member.halt(body["generation"]) else None
        elif kind == "pause":
            member.ask_pause(body["generation"])
            said = member.standing() if member.phase == "parked" else None
        return self.put(state, number, worker, member), [said] if said else []

    # -- workers

    def work(self, state, workers, number, worker):
        """What a worker can do by itself."""
        m = Member(*worker.member)
        if m.phase == "restoring":
            yield from self.restore(state, workers, number, worker, m)
        elif m.phase == "running":
            g, step = m.generation, m.step + 1
            votes = sum(vote[:2] == (g, step) for vote in state.votes)
            peers = [p for w in workers.values() if (p := Member(*w.member)).generation == g]
            if m.prepared < step and (
                votes or sum(p.phase == "running" and p.step == m.step for p in peers) == worker.peers
            ):
                m.vote()
                after = state._replace(votes=state.votes | {(g, step, number)})
                yield f"{number} votes for {step}", self.put(after, number, worker._replace(next=g), m)
            elif m.prepared == step and self.may_commit(votes, worker.peers):
                pause = any(Member(*w.member).pause for n, w in workers.items() if (g, step, n) in state.votes)
                after = self.apply(state, worker, step)
                m.commit(pause)
                after = self.put(after, number, worker._replace(chain=(*worker.chain, worker.next)), m)
                yield f"{number} applies {step}", self.spoke(after, number, m) if m.phase == "parked" else after
            if sum(p.phase in ("ready", "running") for p in peers) < worker.peers:
                m = Member(*worker.member)
                m.halt(g)
                yield f"{number} has lost a peer", self.spoke(self.put(state, number, worker, m), number, m)

    @staticmethod
    def may_commit(votes, peers):
        return votes == peers

    def apply(self, state, worker, step):
        """The judge: a step is committed once, after the one before it, and all who have it have the same."""
        made = worker.next
        must(len(worker.chain) == step - 1, f"step {step} is applied to {len(worker.chain)}")
        replaced = any(generation > made and step > last for generation, last in state.branches)
        must(not replaced, f"step {step} is committed in generation {made}, which was replaced")
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
        worker = worker._replace(chain=worker.chain[:step])
        return self.put(state, number, worker, member)

    def restore(self, state, workers, number, worker, member):
        step, source = worker.task
        if member.lacks:
            return
        if source is None:
            after = self.settle(state, number, worker, member, step)
            worker = dict(after.workers)[number]
            chain = worker.chain if len(worker.chain) == step else None
        elif source.kind == "live":
            donor = workers.get(source.number)
            if donor and Member(*donor.member).step != step:
                return  # not yet
            after, chain = state, donor.chain if donor else None
        else:
            after, chain = state, () if step == 0 else None
        member = Member(*worker.member)
        if chain is None:
            member.lack("it is not there")
            yield (
                f"{number} does not get its state",
                self.spoke(self.put(state, number, worker, member), number, member),
            )
            return
        member.restored(step)
        member.digest = str(chain)
        after = self.put(after, number, worker._replace(chain=chain), member)
        yield f"{number} is ready", self.spoke(after, number, member)
