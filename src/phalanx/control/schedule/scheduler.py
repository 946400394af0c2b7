"""The gang scheduler. `apply` takes one event and returns commands. Nothing else changes the state, so replaying the
same events gives the same state.

A gang waits, claims its places while others leave them, runs, leaves, and then ends or waits again. After every event
the scheduler looks at the lines in order (`lines`). A gang that fits starts. For the first gangs that do not fit,
others make room (`yielding`), or places are held as they become free, so that a large gang is not overtaken forever.
GPUs that no gang waits for go to gangs that can grow.

No gang starves. One that has waited for `patience_ns` is overdue. Overdue gangs of a priority are served in order,
before all others of that priority, and others yield to them unless they are safe, which lasts at most `turn_ns`. So
with k overdue gangs before it, a gang starts within patience_ns + (k + 1) x (turn_ns + grace_ns + look_ns), if its
tenant may have so many GPUs, the nodes are up, and gangs of its priority are preemptible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from phalanx.control.schedule import asks
from phalanx.control.schedule.asks import Ask, Command, Event, Rules, Tenant
from phalanx.control.schedule.cells import Cells, Placing, Spot
from phalanx.control.schedule.curves import choose
from phalanx.control.schedule.gangs import CLAIMING, ENDED, LEAVING, RUNNING, WAITING, Account, Gang, Visit
from phalanx.control.schedule.lending import only_guests, place_guest, waits_until
from phalanx.control.schedule.lines import Lines
from phalanx.control.schedule.moving import by_node, pays, plan_moves
from phalanx.control.schedule.wards import Wards
from phalanx.control.schedule.yielding import Claim, Sacrifice, make_room

ATTEMPTS = 8  # attempts to make room, per event
STOPPED = "stopped: "  # prefix of the note about a stop, before the reason


class Scheduler:
    def __init__(self, cells: Cells, names: Sequence[str], rules: Rules, tenants: Iterable[Tenant] = ()):
        self.cells, self.names, self.rules = cells, list(names), rules
        self.index = {name: node for node, name in enumerate(names)}
        self.accounts = {tenant.name: Account(tenant) for tenant in tenants}
        self.lines, self.wards = Lines(rules, self.accounts), Wards(rules)
        self.gangs: dict[str, Gang] = {}
        self.running: dict[str, Gang] = {}
        self.timed: dict[str, Gang] = {}  # running gangs that end or pause at a known time
        self.claiming: dict[str, Gang] = {}
        self.elastic: dict[str, Gang] = {}  # running gangs that can do with fewer replicas
        self.at: list[dict[str, None]] = [{} for _ in names]  # node -> jobs that use its GPUs
        self.debtors: dict[int, dict[str, None]] = {}  # node -> gangs that are owed GPUs of it
        self.now_ns, self.timer_ns, self.weighed_ns, self.cap_watts, self.watts, self.ramped = 0, 0, 0, 0, 0, 0
        self.held: dict[str, Gang] = {}  # gangs that wait for their hour
        self.out: list[Command] = []
        self.decisions = 0
        if rules.rack_watts:
            cells.limit_racks(rules.rack_level, rules.rack_watts // rules.watts_per_gpu)

    def apply(self, now_ns: int, event: Event) -> list[Command]:
        self.now_ns, self.out = max(now_ns, self.now_ns), []
        self.lines.age(self.now_ns)
        HANDLERS[type(event)](self, event)
        self._recall()
        self._look()
        self._wake()
        return self.out

    # -- gangs come and go

    def _on_submit(self, event: asks.Submit) -> None:
        ask = event.ask
        if ask.job in self.gangs and self.gangs[ask.job].state != ENDED:
            return  # a duplicate
        self.accounts.setdefault(ask.tenant, Account(Tenant(ask.tenant), at_ns=self.now_ns))
        gang = Gang(ask, len(self.gangs), self.now_ns, since_ns=self.now_ns)
        self.gangs[ask.job] = gang
        gang.note(self.now_ns, "submitted")
        if ask.deadline_ns and self.rules.hour_prices:
            rules = self.rules
            gang.slots = choose(
                rules.hour_prices, self.now_ns, ask.needs_ns, ask.deadline_ns, ask.pausable, rules.restart_ns
            )
        self._enqueue(gang)

    def _enqueue(self, gang: Gang, since_ns: int = -1) -> None:
        """Put a gang in its line. `since_ns`: when it began to wait, if that was not now."""
        gang.state, gang.since_ns = WAITING, self.now_ns if since_ns < 0 else since_ns
        gang.idle_ns = self.now_ns
        gang.weigh(self.now_ns, self.rules)
        if gang.slots and gang.slots[0][0] > self.now_ns:
            self.held[gang.job] = gang
            gang.note(self.now_ns, f"waits for a cheaper hour, {_in(gang.slots[0][0] - self.now_ns)} from now")
        else:
            self.lines.add(self.now_ns, gang)

    def _on_cancel(self, event: asks.Cancel) -> None:
        gang = self.gangs.get(event.job)
        if gang is None or gang.state == ENDED:
            return
        if gang.state in (RUNNING, LEAVING):
            if gang.state == RUNNING:
                self._stop(gang, again=False, why="cancelled")
            else:
                gang.note(self.now_ns, f"{STOPPED}cancelled")
                self._forget_target(gang)
            gang.again = False
            return
        self.lines.remove(gang)
        self.held.pop(gang.job, None)
        self._dissolve(gang, "cancelled")
        self.lines.remove(gang)
        gang.state = ENDED

    def _on_ended(self, event: asks.Ended) -> None:
        gang = self.gangs.get(event.job)
        if gang and gang.state in (RUNNING, LEAVING):
            self._forget_target(gang)
            self._leave(gang)
            gang.state = ENDED
            gang.note(self.now_ns, "done" if event.ok else "failed")

    def _on_stopped(self, event: asks.Stopped) -> None:
        gang = self.gangs.get(event.job)
        if gang and gang.state == LEAVING:
            visit = gang.visit
            self._leave(gang)
            if visit and visit.lost:
                gang.served, gang.ran_ns = visit.served, visit.ran_ns
            gang.stops += 1
            if gang.again and gang.target and not self.refusal(gang, sum(gpus for _, gpus in gang.target.spots)):
                self._arrive(gang)
            elif gang.again:
                self._forget_target(gang)
                self._enqueue(gang, visit.since_ns if visit else -1)
            else:
                gang.state = ENDED
                gang.note(self.now_ns, gang.notes[-1][1].removeprefix(STOPPED))

    def _on_shrunk(self, event: asks.Shrunk) -> None:
        gang = self.gangs.get(event.job)
        if gang and gang.shrinking:
            spots = [spot for replica in gang.shrinking.values() for spot in replica]
            self._serve(gang)
            gang.shrinking = {}
            self._release(gang, spots)

    def _leave(self, gang: Gang) -> None:
        self._serve(gang)
        spots = gang.spots()
        gang.replicas, gang.shrinking, gang.spares = {}, {}, []
        self._end_visit(gang)
        self._retire(gang)
        self._release(gang, spots)

    def _retire(self, gang: Gang) -> None:
        for group in (self.running, self.timed, self.elastic):
            group.pop(gang.job, None)

    def _serve(self, gang: Gang) -> None:
        gang.served, gang.ran_ns = gang.served_at(self.now_ns), gang.ran_at(self.now_ns)
        gang.since_ns = self.now_ns

    def _stop(self, gang: Gang, again: bool, why: str, grace_ns: int = -1) -> None:
        self._serve(gang)
        self._retire(gang)
        gang.state, gang.again = LEAVING, again
        gang.note(self.now_ns, f"{STOPPED}{why}")
        self.decisions += 1
        self.out.append(asks.Stop(gang.job, self.rules.grace_ns if grace_ns < 0 else grace_ns, again, why))

    # -- GPUs

    def _take(self, gang: Gang, spots: list[Spot]) -> None:
        self.cells.take(spots)
        gpus = sum(gpus for _, gpus in spots)
        gang.gpus += gpus
        self.accounts[gang.ask.tenant].change(self.now_ns, gpus, self.rules.half_life_ns)
        self.watts += gpus * self.rules.watts_per_gpu
        for node, _ in spots:
            self.at[node][gang.job] = None

    def _release(self, gang: Gang, spots: list[Spot]) -> None:
        """Free the GPUs; gangs that have claimed them get them first."""
        self.cells.give(spots)
        gpus = sum(gpus for _, gpus in spots)
        gang.gpus -= gpus
        self.accounts[gang.ask.tenant].change(self.now_ns, -gpus, self.rules.half_life_ns)
        self.watts -= gpus * self.rules.watts_per_gpu
        self._part(gang, spots)

    def _part(self, gang: Gang, spots: list[Spot]) -> None:
        """Record that a gang has left those nodes on which it has nothing else, and pay waiting gangs from what is
        free."""
        kept = {node for node, _ in gang.spots() + (gang.target.spots if gang.target else [])}
        nodes = dict.fromkeys(node for node, _ in spots)
        for node in nodes:
            if node not in kept:
                self.at[node].pop(gang.job, None)
        for node in nodes:
            for job in list(self.debtors.get(node, ())):
                self._pay(self.gangs[job], node)
        self.lines.look_again()

    def _pay(self, gang: Gang, node: int) -> None:
        gpus = min(gang.owed[node], self.cells.free[node])
        if not gpus or self.cells.closed[node]:
            return
        self.cells.take([(node, gpus)])
        self.at[node][gang.job] = None
        gang.owed[node] -= gpus
        if not gang.owed[node]:
            del gang.owed[node]
            self._forget_debt(gang.job, node)
        if not gang.owed:
            self._begin(gang, "its places are free now")

    def _forget_debt(self, job: str, node: int) -> None:
        debts = self.debtors[node]
        debts.pop(job, None)
        if not debts:
            del self.debtors[node]

    def _dissolve(self, gang: Gang, why: str) -> None:
        """Give up a claim: the gang loses its places and waits."""
        if gang.state != CLAIMING:
            return
        owed, placed = gang.owed, gang.spots()
        for node in owed:
            self._forget_debt(gang.job, node)
        del self.claiming[gang.job]
        for guest in [self.gangs[job] for job in gang.guests]:
            self._end_visit(guest)  # it stays, because its places are no longer wanted
        gang.owed, gang.replicas, gang.spares, gang.blockers, gang.late = {}, {}, [], [], False
        # Owed GPUs were counted as its own, but were never taken from the cells.
        gpus = sum(owed.values())
        gang.gpus -= gpus
        self.accounts[gang.ask.tenant].change(self.now_ns, -gpus, self.rules.half_life_ns)
        self.watts -= gpus * self.rules.watts_per_gpu
        rest = dict(owed)
        taken = [(node, count - rest.pop(node, 0)) for node, count in by_node(placed)]
        for node, _ in placed:
            self.at[node].pop(gang.job, None)
        gang.state = WAITING
        gang.note(self.now_ns, f"lost its places: {why}")
        self._release(gang, [spot for spot in taken if spot[1]])
        self.lines.add(self.now_ns, gang)

    # -- nodes

    def _on_node_up(self, event: asks.NodeUp) -> None:
        node = self._node(event.node)
        self.wards.come_back(node, self.now_ns)
        self._reopen()

    def _on_node_down(self, event: asks.NodeDown) -> None:
        node = self._node(event.node)
        self.wards.fail(node, self.now_ns, event.why)
        self._shut(node, f"node {event.node} is down ({event.why})", gone=True)

    def _on_drain(self, event: asks.Drain) -> None:
        node = self._node(event.node)
        self.wards.drain(node, event.off)
        if event.off:
            self._reopen()
        else:
            self._shut(node, f"node {event.node} is drained", gone=False)

    def _on_maintain(self, event: asks.Maintain) -> None:
        self.wards.maintain(event, tuple(self._node(name) for name in event.nodes))
        self._maintain()

    def _node(self, name: str) -> int:
        return self.index[name]

    def _maintain(self) -> None:
        for window in self.wards.windows:
            if self.wards.begins(window) <= self.now_ns < window[1]:
                for node in window[2]:
                    if not self.cells.closed[node] or self.at[node]:
                        self._shut(node, f"node {self.names[node]} has maintenance", gone=False, urgent=True)

    def _reopen(self) -> None:
        for node in [*self.wards.wards, *(n for w in self.wards.windows for n in w[2])]:
            if self.cells.closed[node] and self.wards.usable(node, self.now_ns):
                self.cells.open(node)
                self.lines.look_again()
        self.wards.windows = [window for window in self.wards.windows if self.now_ns < window[1]]

    def _shut(self, node: int, why: str, gone: bool, urgent: bool = False) -> None:
        """Close a node. A gang there moves to a spare or to a node nearby, gives up the replica, or stops. A node that
        is drained without urgency is only left when there is a replacement."""
        self.cells.close(node)
        for job in list(self.at[node]) + list(self.debtors.get(node, ())):
            gang = self.gangs[job]
            if gang.state == CLAIMING:
                self._dissolve(gang, why)
            if gang.target and any(node == at for at, _ in gang.target.spots):
                self._forget_target(gang)
            for _ in range(1 + len(gang.replicas)):  # several of its replicas may be on this node
                if gang.state == RUNNING:
                    self._move(gang, node, why, must=gone or urgent)

    def _move(self, gang: Gang, node: int, why: str, must: bool) -> None:
        if node in gang.spares:
            gang.spares.remove(node)
            self._release(gang, [(node, gang.ask.gpus)])
            self._refill(gang)
            return
        number = next((n for n, spots in gang.replicas.items() if any(node == at for at, _ in spots)), None)
        if number is None:
            return  # a replica that it is already giving up
        spots = gang.replicas[number]
        count = sum(gpus for at, gpus in spots if at == node)
        own = {at for at, _ in gang.spots()}
        spare = bool(gang.spares) and count <= gang.ask.gpus
        if spare:
            new = gang.spares.pop(0)
        else:
            near = self.cells.neighbour(spots[0][0], count, own)
            new = -1 if near is None else near
        if new >= 0:
            gang.replicas[number] = [(new if at == node else at, gpus) for at, gpus in spots]
            if not spare:
                self._take(gang, [(new, count)])
            over = gang.ask.gpus - count if spare else 0
            self._release(gang, [(node, count), (new, over)] if over else [(node, count)])
            self.decisions += 1
            gang.note(self.now_ns, f"{self.names[new]} takes over from {self.names[node]}: {why}")
            self.out.append(asks.Replace(gang.job, self.names[node], self.names[new], why))
            self._refill(gang)
        elif must and len(gang.replicas) > gang.ask.fewest:
            self._shrink(gang, [number], why)
        elif must:
            self._stop(gang, again=True, why=why)

    def _refill(self, gang: Gang) -> None:
        """Reserve spares near a gang that has lost some."""
        while gang.replicas and len(gang.spares) < gang.ask.spares:
            own = {at for at, _ in gang.spots()}
            node = self.cells.neighbour(gang.replicas[min(gang.replicas)][0][0], gang.ask.gpus, own)
            if node is None or not self._allowed(gang, gang.ask.gpus):
                return
            gang.spares.append(node)
            self._take(gang, [(node, gang.ask.gpus)])

    def _shrink(self, gang: Gang, numbers: list[int], why: str) -> None:
        self._serve(gang)
        for number in numbers:
            gang.shrinking[number] = gang.replicas.pop(number)
        self.decisions += 1
        gang.note(self.now_ns, f"gives up {len(numbers)} of its replicas: {why}")
        self.out.append(asks.Shrink(gang.job, tuple(sorted(numbers)), why))

    # -- power and time

    def _on_cap(self, event: asks.Cap) -> None:
        self.cap_watts = event.watts
        for gang in list(self.claiming.values()):
            self._dissolve(gang, "the site may draw less power")
        for gang in sorted(self.running.values(), key=lambda g: (g.ask.priority, -g.since_ns)):
            leaving = sum(g.gpus for g in self.gangs.values() if g.state == LEAVING) * self.rules.watts_per_gpu
            if not self.cap_watts or self.watts - leaving <= self.cap_watts:
                break
            if gang.ask.preemptible:
                self._stop(gang, again=True, why="the site may draw less power")
        self.lines.look_again()

    def _on_tick(self, event: asks.Tick) -> None:
        if self.now_ns < self.timer_ns:
            return
        self.timer_ns, self.ramped = 0, 0
        self._reopen()
        self._maintain()
        for gang in [g for g in self.held.values() if g.slots[0][0] <= self.now_ns]:
            del self.held[gang.job]
            gang.since_ns = self.now_ns
            self.lines.add(self.now_ns, gang)
        self._weigh()
        for gang in list(self.timed.values()):
            if gang.ask.limit_ns and self.now_ns - gang.began_ns >= gang.ask.limit_ns:
                self._stop(gang, again=False, why="its time limit")
            elif len(gang.slots) > 1 and self.now_ns >= gang.slots[0][1]:
                del gang.slots[0]
                self._stop(gang, again=True, why="a pause until electricity is cheaper")
        for gang in list(self.claiming.values()):
            self._press(gang)
        self.lines.look_again()
        self.lines.stuck.clear()

    def _wake(self) -> None:
        """Schedule the next tick."""
        times = [self.wards.next_ns(self.now_ns)]
        if self.lines.count or self.claiming:
            times.append(self.now_ns + self.rules.look_ns)
        times += [gang.slots[0][0] for gang in self.held.values()]
        for gang in self.timed.values():
            times.append(gang.began_ns + gang.ask.limit_ns if gang.ask.limit_ns else 0)
            times.append(gang.slots[0][1] if len(gang.slots) > 1 else 0)
        due = min((at for at in times if at > self.now_ns), default=0)
        if due and not self.now_ns < self.timer_ns <= due:
            self.timer_ns = due
            self.out.append(asks.SetTimer(due))

    # -- decisions

    def _allowed(self, gang: Gang, gpus: int) -> bool:
        return not self.refusal(gang, gpus)

    def refusal(self, gang: Gang, gpus: int) -> str:
        """Return why a gang may not have `gpus` GPUs even if they are free; "": it may."""
        rules, account = self.rules, self.accounts[gang.ask.tenant]
        if not account.allows(gpus):
            return f"its tenant may use {account.tenant.most} GPUs and uses {account.used}"
        watts = gpus * rules.watts_per_gpu
        if self.cap_watts and self.watts + watts > self.cap_watts:
            return f"the site may draw {self.cap_watts} W and draws {self.watts} W"
        if rules.ramp_watts and self.ramped and self.ramped + watts > rules.ramp_watts:
            return f"no more than {rules.ramp_watts} W are switched on at once"
        return ""

    def _look(self) -> None:
        """Start what fits, in order, and try to make room for the rest."""
        attempts = ATTEMPTS
        for _, account in self.accounts.items():
            if self.lines.count and account.used:
                account.fade(self.now_ns, self.rules.half_life_ns)
        lines, free = self.lines, self.cells.free_gpus
        heads = lines.heads(free, self._fits)
        heapify(heads)
        while heads:
            _, line = heappop(heads)
            if line in lines.stuck and line[-1] in lines.full:
                continue  # another gang of this shape has just failed to fit
            gang = lines.head(line)
            assert gang
            if not self._try(gang):
                if attempts and line not in lines.stuck and self._help(gang):
                    attempts -= 1
                else:
                    lines.blocked.add(line)
                    lines.stuck.add(line)
                    continue
            if line in lines.lines and (after := lines.head(line)):
                heappush(heads, (lines.order(after), line))
        if not self.lines.count:
            self._grow()

    def _try(self, gang: Gang) -> bool:
        """Start a gang with as many replicas as there is room for."""
        ask = gang.ask
        if ask.shape in self.lines.full:
            return False
        for replicas in range(ask.replicas, ask.fewest - 1, -1):
            if self.refusal(gang, replicas * ask.replica_gpus + ask.spares * ask.gpus):
                continue
            found = self._place(ask, replicas)
            if found:
                self._seat(gang, *found)
                self._begin(gang, "there is room")
                return True
            if replicas == ask.fewest and not self.wards.windows:
                self.lines.full.add(ask.shape)
        return False

    def _fits(self, gang: Gang) -> bool:
        """Return True if there is room for the fewest replicas anywhere."""
        return self.cells.place(gang.ask, gang.ask.fewest) is not None

    def _place(self, ask: Ask, replicas: int) -> tuple[Placing, list[int]] | None:
        """Place a gang. One that cannot be stopped stays away from nodes whose maintenance begins before it ends."""
        shut = list[int]()
        if self.wards.windows and ask.limit_ns and not ask.preemptible:
            until = self.now_ns + ask.limit_ns
            wanted = {n for window in self.wards.windows for n in window[2] if self.wards.wanted(n, self.now_ns, until)}
            shut = [n for n in wanted if not self.cells.closed[n]]
        for node in shut:
            self.cells.close(node)
        found = self.cells.place(ask, replicas)
        for node in shut:
            self.cells.open(node)
        return found

    def _seat(self, gang: Gang, placing: Placing, spares: list[int]) -> None:
        gang.replicas, gang.spares = dict(enumerate(placing)), spares
        self.lines.remove(gang)
        self._take(gang, gang.spots())

    def _begin(self, gang: Gang, why: str) -> None:
        rules = self.rules
        late = gang.late or gang.overdue(self.now_ns, rules)
        gang.late, gang.blockers, gang.guests = False, [], {}
        gang.safe_ns = self.now_ns + (rules.turn_ns if late else rules.min_run_ns)
        gang.state, gang.since_ns, gang.began_ns = RUNNING, self.now_ns, self.now_ns
        self.claiming.pop(gang.job, None)
        self.running[gang.job] = gang
        if gang.ask.limit_ns or gang.slots:
            self.timed[gang.job] = gang
        if gang.ask.least:
            self.elastic[gang.job] = gang
        self.ramped += gang.gpus * rules.watts_per_gpu
        self.decisions += 1
        gang.note(self.now_ns, f"started on {len({n for n, _ in gang.spots()})} nodes: {why}")
        replicas = tuple(tuple((self.names[n], g) for n, g in spots) for _, spots in sorted(gang.replicas.items()))
        self.out.append(asks.Start(gang.job, replicas, tuple(self.names[n] for n in gang.spares), why))

    def _make_room(self, gang: Gang) -> bool:
        """Make others leave for a gang, if that lets it start."""
        if self.refusal(gang, gang.ask.needs_gpus):
            return False
        if self.now_ns - self.weighed_ns >= self.rules.look_ns:
            self._weigh()
        running = list(self.running.values())
        found = make_room(gang, running, self.cells, self.accounts, self.rules, self.now_ns)
        if found is None and gang.overdue(self.now_ns, self.rules) and not self._holding(gang):
            found = make_room(gang, running, self.cells, self.accounts, self.rules, self.now_ns, later=True)
        if found is None:
            return False
        self._claim(gang, found)
        return True

    def _weigh(self) -> None:
        self.weighed_ns = self.now_ns
        for gang in self.running.values():
            gang.weigh(self.now_ns, self.rules)

    def _holding(self, gang: Gang) -> bool:
        """Return True if an overdue gang of this priority already holds places; only one may at a time."""
        return any(other.blockers and other.ask.priority == gang.ask.priority for other in self.claiming.values())

    def _claim(self, gang: Gang, found: Sacrifice) -> None:
        gang.late = gang.overdue(self.now_ns, self.rules)
        self.lines.remove(gang)
        gang.state, gang.since_ns = CLAIMING, self.now_ns
        self.claiming[gang.job] = gang
        gang.replicas, gang.spares = dict(enumerate(found.placing)), found.spares
        spots = by_node(gang.spots())
        free = [(node, min(gpus, self.cells.free[node])) for node, gpus in spots]
        gang.owed = {node: gpus - got for (node, gpus), (_, got) in zip(spots, free, strict=True) if gpus > got}
        self._take(gang, [spot for spot in free if spot[1]])
        gpus = sum(gang.owed.values())
        gang.gpus += gpus
        self.accounts[gang.ask.tenant].change(self.now_ns, gpus, self.rules.half_life_ns)
        self.watts += gpus * self.rules.watts_per_gpu
        for node in gang.owed:
            self.debtors.setdefault(node, {})[gang.job] = None
        if names := [victim.job for victim in found.stops] + list(found.shrinks):
            more = " and more" if len(names) > 4 else ""
            gang.note(self.now_ns, f"waits for {', '.join(names[:4])}{more} to make room")
        for victim, numbers in found.shrinks.values():
            self._shrink(victim, numbers, _why(gang))
        gang.blockers = [victim.job for victim in found.stops]
        self._press(gang)

    def _press(self, gang: Gang) -> None:
        """Stop the gangs that block a claim as soon as that is allowed."""
        may, left = Claim(gang, self.accounts, self.rules, self.now_ns), list[str]()
        for job in gang.blockers:
            victim = self.gangs[job]
            if victim.state != RUNNING:
                continue
            if victim.ask.preemptible and may.displace(victim):
                self._stop(victim, again=True, why=_why(gang))
            else:
                left.append(job)
        gang.blockers = left

    def _help(self, gang: Gang) -> bool:
        return self._make_room(gang) or self._make_one_place(gang) or self._be_guest(gang)

    def _make_one_place(self, gang: Gang) -> bool:
        """Move other gangs to join scattered free GPUs into one place, if that pays."""
        once_ns = self.rules.grace_ns + self.rules.restart_ns
        too_soon = gang.ask.needs_gpus * (self.now_ns - gang.idle_ns) < once_ns  # not even the cheapest move pays yet
        if too_soon or self.refusal(gang, gang.ask.needs_gpus):
            return False
        found = plan_moves(gang, self.at, self.running, self.cells, self.rules, self.now_ns)
        if found is None or not pays(gang, found, self.now_ns):
            return False
        self._claim(gang, Sacrifice(found.placing, found.spares))
        gang.note(self.now_ns, f"waits for {', '.join(mover.job for mover, _ in found.targets)} to move elsewhere")
        for mover, target in found.targets:
            self.cells.take(target.spots)
            mover.target = target
            mover.moves += 1
            for node, _ in target.spots:
                self.at[node][mover.job] = None
            self._stop(mover, again=True, why=f"{gang.job} needs the room in one piece, and it moves elsewhere")
        return True

    def _arrive(self, gang: Gang) -> None:
        """Start a gang at its destination, after it has left its old place."""
        target, gang.target = gang.target, None
        assert target
        self.cells.give(target.spots)
        gang.replicas, gang.spares = target.replicas, target.spares
        self._take(gang, target.spots)
        self._begin(gang, "it has moved")

    def _forget_target(self, gang: Gang) -> None:
        if gang.target:
            target, gang.target = gang.target, None
            self.cells.give(target.spots)
            self._part(gang, target.spots)

    def _be_guest(self, gang: Gang) -> bool:
        """Start a gang in places that others hold but will not need for a while."""
        ask, least_ns = gang.ask, self.now_ns + self.rules.min_run_ns
        if not self.claiming or not ask.preemptible or ask.spares or self.refusal(gang, ask.needs_gpus):
            return False
        holders = [holder for holder in self.claiming.values() if waits_until(holder, self.gangs) >= least_ns]
        found = place_guest(gang, holders, self.cells) if holders else None
        if not found:
            return False
        placing, loans = found
        nodes = {node for _, spots in loans for node, _ in spots}
        gang.visit = Visit([h.job for h, _ in loans], nodes, gang.since_ns, gang.served, gang.ran_ns)
        for holder, spots in loans:
            holder.guests[gang.job] = None
            self.cells.give(spots)
            for node, gpus in spots:
                holder.owed[node] = holder.owed.get(node, 0) + gpus
                self.debtors.setdefault(node, {})[holder.job] = None
        self._seat(gang, placing, [])
        self._begin(gang, f"it is a guest in places that are held for {', '.join(gang.visit.holders)}")
        return True

    def _recall(self) -> None:
        """Stop guests once only they keep the holder waiting, or once all other occupants are leaving."""
        for holder in [h for h in self.claiming.values() if h.guests]:
            last = only_guests(holder, self.gangs)
            if last or not waits_until(holder, self.gangs):
                for guest in [self.gangs[job] for job in holder.guests]:
                    if guest.state == RUNNING:
                        assert guest.visit
                        guest.visit.lost = last
                        self._stop(guest, True, f"{holder.job} takes its places back", 0 if last else -1)

    def _end_visit(self, gang: Gang) -> None:
        if gang.visit:
            for job in gang.visit.holders:
                self.gangs[job].guests.pop(gang.job, None)
            gang.visit = None

    def _grow(self) -> None:
        """Give GPUs that no gang waits for to gangs that run with fewer replicas than they asked for."""
        for gang in list(self.elastic.values()):
            ask = gang.ask
            if len(gang.replicas) < ask.replicas and not gang.shrinking:
                missing = sorted(set(range(ask.replicas)) - gang.replicas.keys())
                new = dict[int, tuple[asks.Seat, ...]]()
                for number in missing:
                    found = None
                    if self._allowed(gang, ask.replica_gpus):
                        found = self.cells.place(_one(ask), 1)
                    if not found:
                        break
                    self._serve(gang)
                    gang.replicas[number] = found[0][0]
                    self._take(gang, found[0][0])
                    new[number] = tuple((self.names[n], g) for n, g in found[0][0])
                if new:
                    self.decisions += 1
                    gang.note(self.now_ns, f"gets {len(new)} replicas back")
                    self.out.append(asks.Grow(gang.job, new, "nobody else waits for the room"))


def _one(ask: Ask) -> Ask:
    return Ask(ask.job, ask.tenant, nodes=ask.nodes, gpus=ask.gpus, rest=ask.rest, level=ask.level)


def _why(gang: Gang) -> str:
    standing = "it is overdue" if gang.late else f"priority {gang.ask.priority}, level {gang.level}"
    return f"{gang.job} needs the room ({standing})"


def _in(ns: int) -> str:
    s = ns // asks.S
    return f"{s // 3600} h {s % 3600 // 60} min" if s >= 3600 else f"{s // 60} min {s % 60} s"


HANDLERS: dict[type[Event], Callable[[Scheduler, Any], None]] = {
    asks.Submit: Scheduler._on_submit,
    asks.Cancel: Scheduler._on_cancel,
    asks.Ended: Scheduler._on_ended,
    asks.Stopped: Scheduler._on_stopped,
    asks.Shrunk: Scheduler._on_shrunk,
    asks.NodeUp: Scheduler._on_node_up,
    asks.NodeDown: Scheduler._on_node_down,
    asks.Drain: Scheduler._on_drain,
    asks.Maintain: Scheduler._on_maintain,
    asks.Cap: Scheduler._on_cap,
    asks.Tick: Scheduler._on_tick,
}
