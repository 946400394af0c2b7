"""A small world around the real scheduler: jobs come, end, stop and shrink with delays; nodes die and come back; users
cancel; there are drains, maintenance, caps and duplicate events. A seed always gives the same world."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from heapq import heappop, heappush

from phalanx.control.schedule import asks
from phalanx.control.schedule.asks import Ask, Rules, S, Tenant
from phalanx.control.schedule.cells import Cells
from phalanx.control.schedule.gangs import ENDED, LEAVING, RUNNING, WAITING
from phalanx.control.schedule.promises import check
from phalanx.control.schedule.scheduler import Scheduler

LAST_FAULT = 40_000  # seconds; after that there are no faults, and everything must end


class World:
    def __init__(self, seed: int, in_pieces: bool = False):
        """Draw a world. `in_pieces`: small gangs stay for long, and need not yield to later ones; some other worlds are
        drawn that way, too."""
        self.draw = draw = random.Random(seed)
        self.nodes = draw.choice((4, 8, 12))
        self.size = draw.choice((1, 4, 8))
        self.rules = Rules(
            patience_ns=draw.choice((600, 3600)) * S,
            turn_ns=300 * S,
            min_run_ns=60 * S,
            watts_per_gpu=draw.choice((0, 100)),
            first_level=draw.choice((200, 3600)),
            move_share=draw.choice((2, 20)),
        )
        self.in_pieces = (draw.random() < 0.3 or in_pieces) and self.size > 1
        if self.in_pieces:
            self.rules.first_level, self.rules.patience_ns = 10**6, 4 * 3600 * S
        leaf = draw.choice((2, 4))
        self.paths = [(f"leaf-{n // leaf}", f"pod-{n // leaf // 2}") for n in range(self.nodes)]
        total = self.nodes * self.size
        self.tenants = [Tenant("a", quota=total // 2, weight=2), Tenant("b", quota=total // 4, most=total * 3 // 4)]
        self.scheduler = self.fresh()
        self.journal: list[tuple[int, asks.Event, list[asks.Command]]] = []
        self.agenda: list[tuple[int, int, asks.Event]] = []
        self.count, self.now_ns, self.timer_ns = 0, 0, 0
        self.left: dict[str, int] = {}  # what each job still has to run, while it runs with `began`
        self.began: dict[str, int] = {}
        self.ran: dict[str, int] = {}  # in ns, counted independently by this world, up to the last stop
        self.moved: dict[str, int] = {}
        self.stopped: dict[str, int] = {}  # when each was asked to stop

    def fresh(self) -> Scheduler:
        cells = Cells(self.size, ("leaf", "pod"), self.paths)
        return Scheduler(cells, [f"n{i}" for i in range(self.nodes)], self.rules, self.tenants)

    def later(self, delay_s: float, event: asks.Event) -> None:
        self.count += 1
        heappush(self.agenda, (self.now_ns + int(delay_s * S), self.count, event))

    def populate(self) -> None:
        draw = self.draw
        for i in range(draw.randrange(6, 18) + self.nodes * self.in_pieces):
            nodes = draw.choice((1, 1, 1, 2, 3))
            replicas = draw.choice((1, 1, 2, 4))
            while nodes * replicas > self.nodes - 1:
                replicas //= 2
                nodes = nodes if replicas else 1
                replicas = replicas or 1
            gpus = draw.choice((self.size, self.size, max(1, self.size // 2), 1))
            if self.in_pieces and draw.random() < 0.7:
                nodes, replicas, gpus = 1, 1, draw.randrange(1, self.size)
            rest = draw.choice((0, 0, 1)) if nodes * replicas + replicas < self.nodes and gpus == self.size > 1 else 0
            ask = Ask(
                f"j{i}",
                draw.choice("ab"),
                priority=draw.choice((0, 0, 0, 1)),
                replicas=replicas,
                least=draw.choice((0, 1)) if replicas > 1 else 0,
                nodes=nodes,
                gpus=gpus,
                rest=rest,
                spares=draw.choice((0, 0, 1)) if nodes * replicas + 2 * replicas < self.nodes else 0,
                level=draw.choice(("", "", "leaf")) if nodes == 1 else "",
                preemptible=draw.random() < 0.85,
            )
            need = ask.fewest * ask.replica_gpus + ask.spares * ask.gpus
            if any(t.name == ask.tenant and t.most and need > t.most for t in self.tenants):
                ask = Ask(f"j{i}", ask.tenant, gpus=1)
            self.left[ask.job] = int(draw.lognormvariate(9 if self.in_pieces else 7, 1.5)) * S + S
            self.later(draw.uniform(0, 20_000), asks.Submit(ask))
            if draw.random() < 0.1:
                self.later(draw.uniform(0, 30_000), asks.Cancel(ask.job))
        for _ in range(draw.randrange(6)):
            node, at = f"n{draw.randrange(self.nodes)}", draw.uniform(0, LAST_FAULT - 5000)
            match draw.randrange(4):
                case 0 | 1:
                    self.later(at, asks.NodeDown(node))
                    self.later(at + draw.uniform(1, 4000), asks.NodeUp(node))
                case 2:
                    self.later(at, asks.Drain(node))
                    self.later(at + draw.uniform(1, 4000), asks.Drain(node, off=True))
                case 3:
                    self.later(at, asks.Maintain((node,), int((at + 500) * S), int((at + 1500) * S)))
        if self.rules.watts_per_gpu and draw.random() < 0.5:
            total = self.nodes * self.size * 100
            self.later(draw.uniform(0, 20_000), asks.Cap(total // 2))
            self.later(LAST_FAULT, asks.Cap(0))

    def run(self) -> None:
        self.populate()
        turns = 0
        while self.agenda or self.timer_ns:
            turns += 1
            assert turns < 20_000, "it goes round for ever"
            if self.timer_ns and (not self.agenda or self.timer_ns <= self.agenda[0][0]):
                self.now_ns, self.timer_ns, event = self.timer_ns, 0, asks.Tick()
            else:
                self.now_ns, _, event = heappop(self.agenda)
            self.tell(event)
            if not isinstance(event, asks.Tick) and self.draw.random() < 0.05:
                self.tell(event)  # a duplicate
        open_ = [g.job for g in self.scheduler.gangs.values() if g.state != ENDED]
        assert not open_, f"{open_} never end"
        self.refold()

    def tell(self, event: asks.Event) -> None:
        if isinstance(event, asks.Ended):
            gang = self.scheduler.gangs[event.job]
            # Only a running gang can end; an end that was planned before a stop is void.
            if gang.state not in (RUNNING, LEAVING) or self.began.get(event.job, -1) < 0:
                return
            if self.left[event.job] > self.now_ns - self.began[event.job]:
                return
            self.began[event.job] = -1
        if isinstance(event, asks.Stopped) and self.scheduler.gangs[event.job].state == LEAVING:
            began = self.began.get(event.job, -1)
            if began < 0:
                return  # it has ended by itself meanwhile
            self.left[event.job] = max(S, self.left[event.job] - (self.now_ns - began))
            self.ran[event.job] = self.ran.get(event.job, 0) + self.stopped.pop(event.job) - began
            self.began[event.job] = -1
        waits = {g.job: self.now_ns - g.idle_ns for g in self.scheduler.gangs.values() if g.state == WAITING}
        moves = isinstance(event, asks.Stopped) and self.scheduler.gangs[event.job].target
        commands = self.scheduler.apply(self.now_ns, event)
        check(self.scheduler)
        self.check_moves([c for c in commands if isinstance(c, asks.Stop) and "in one piece" in c.why], waits)
        if moves:
            arrived = self.scheduler.gangs[event.job].state == RUNNING
            assert arrived or self.scheduler.cap_watts, f"{event.job} moves, and its place is gone"
        self.journal.append((self.now_ns, event, commands))
        for command in commands:
            self.obey(command)

    def obey(self, command: asks.Command) -> None:
        match command:
            case asks.Start(job):
                assert self.began.get(job, -1) < 0, f"{job} is started twice"
                self.began[job] = self.now_ns
                self.later(self.left[job] / S + 1e-3, asks.Ended(job))
            case asks.Stop(job, grace_ns):
                self.check_turn(command)
                self.stopped[job] = self.now_ns
                if not grace_ns:
                    self.left[job] += self.now_ns - self.began[job]  # it has no time to save
                self.later(self.draw.uniform(0, grace_ns / S), asks.Stopped(job))
            case asks.Shrink(job):
                self.later(self.draw.uniform(0, 30), asks.Shrunk(job))
            case asks.SetTimer(at_ns):
                assert at_ns > self.now_ns
                self.timer_ns = at_ns

    def check_moves(self, stops: list[asks.Stop], waits: dict[str, int]) -> None:
        """Check independently that gangs move for another one only if that pays, a few at a time, and seldom."""
        rules, gangs = self.rules, self.scheduler.gangs
        once_ns, costs = rules.grace_ns + rules.restart_ns, dict[str, list[int]]()
        for stop in stops:
            head = gangs[stop.why.partition(" needs the room")[0]]
            assert head.ask.priority >= gangs[stop.job].ask.priority and head.gpus > gangs[stop.job].gpus
            costs.setdefault(head.job, []).append(gangs[stop.job].gpus * once_ns)
            self.moved[stop.job] = self.moved.get(stop.job, 0) + 1
            ran_ns = self.ran.get(stop.job, 0) + self.now_ns - self.began[stop.job]
            spent_ns = self.moved[stop.job] * once_ns
            assert spent_ns * rules.move_share <= ran_ns, f"{stop.job} has moved {self.moved[stop.job]} times"
        for job, each in costs.items():
            assert len(each) <= rules.moves, f"{len(each)} gangs move for {job}"
            assert waits.get(job, 0) * gangs[job].gpus >= sum(each), f"the moves for {job} cost more than its wait"

    def check_turn(self, stop: asks.Stop) -> None:
        """Check that gangs of one tenant and priority do not chase each other: a started gang gets its minimum time."""
        gangs = self.scheduler.gangs
        claimant, victim = gangs.get(stop.why.partition(" needs the room")[0]), gangs[stop.job]
        if claimant and (claimant.ask.tenant, claimant.ask.priority) == (victim.ask.tenant, victim.ask.priority):
            ran_ns = self.now_ns - victim.began_ns
            assert ran_ns >= self.rules.min_run_ns, f"{stop.job} is stopped after {ran_ns // S} s for an equal"

    def refold(self) -> None:
        """Check that a scheduler that replays the journal gives the same commands."""
        other = self.fresh()
        for now_ns, event, commands in self.journal:
            assert other.apply(now_ns, event) == commands, "folding gives another state"

    def stops(self) -> int:
        return sum(gang.stops for gang in self.scheduler.gangs.values())


def run(seed: int) -> str:
    try:
        World(seed).run()
    except Exception as error:
        return f"seed {seed}: {type(error).__name__}: {error}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="from:to")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    with multiprocessing.Pool(options.jobs) as pool:
        bad = [said for said in pool.imap_unordered(run, range(first, last), chunksize=20) if said]
    print(f"{last - first} worlds, {len(bad)} violations", *bad[:20], sep="\n")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
