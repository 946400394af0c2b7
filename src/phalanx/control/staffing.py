"""Nodes and workers come and go: who is believed dead, which worker fills which rank, which spare takes a place.
Methods that lose workers return them by rank; the gang decides what that means for their generation."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from phalanx.control import messages
from phalanx.control.desk import Desk
from phalanx.control.membership import Membership, top_of
from phalanx.control.messages import Command, Event
from phalanx.control.policy import Policy

MANY = 64  # vacant places
Gone = dict[int, int]  # rank -> worker


@dataclass(slots=True)
class Patience:
    """Patience with late workers: they are asked how far they have come, and given up if they have not moved."""

    counters: dict[int, int] = field(default_factory=dict)  # as of their last answer
    doubted: set[int] = field(default_factory=set)  # asked, and not seen to move since

    def moved(self, counters: dict[int, int]) -> set[int]:
        """Return the workers that have come further since their last answer."""
        found = {worker for worker, counter in counters.items() if counter > self.counters.get(worker, 0)}
        self.counters.update(counters)
        self.doubted -= found
        return found

    def forget(self, workers: Iterable[int]) -> None:
        for worker in workers if self.counters or self.doubted else ():
            self.counters.pop(worker, None)
            self.doubted.discard(worker)


@dataclass
class Staff:
    starting: dict[int, int] = field(default_factory=dict)  # worker -> when it must be up, or have moved
    killed: dict[int, str] = field(default_factory=dict)  # worker -> node, until its end is confirmed
    leaving: set[str] = field(default_factory=set)  # nodes with a place that are to be replaced
    late_ns: dict[str, int] = field(default_factory=dict)  # node that restarts ranks -> when that takes too long
    suspects: set[str] = field(default_factory=set)  # nodes that are silent
    silent: set[str] = field(default_factory=set)  # those of them that were reported dead
    given_up_ns: list[int] = field(default_factory=list)  # when nodes were given up for their silence
    rounds: int = 0  # of waiting for the network
    noted: bool = False  # people were told of the waiting
    patience: Patience = field(default_factory=Patience)
    why: list[tuple[int, str]] = field(default_factory=list)  # rungs and reasons since the last Form

    def __post_init__(self) -> None:
        self.late_ns = dict(sorted(self.late_ns.items(), key=lambda item: item[1]))  # it may arrive sorted by name

    def bind(self, desk: Desk, members: Membership, policy: Policy) -> None:
        self._desk, self._members, self._policy = desk, members, policy

    # -- nodes

    def refuses(self, event: Event) -> bool:
        """Return whether an event comes from a node, or from an incarnation of one, that no longer counts."""
        incarnation = getattr(event, "incarnation", None)
        if incarnation is None or isinstance(event, messages.NodeJoined):
            return False
        fence = not isinstance(event, (messages.NodeDead, messages.NodeSuspect))
        return not self.counts(getattr(event, "node", ""), incarnation, fence)

    def counts(self, name: str, incarnation: int, fence: bool = True) -> bool:
        """Return whether this incarnation of a node counts. One that was declared dead but still speaks is fenced."""
        node = self._members.nodes.get(name)
        if node is None or node.incarnation != incarnation:
            return False
        if node.dead and fence:
            self._desk.say(messages.Fence(name, incarnation))
        return not node.dead

    def join(self, event: messages.NodeJoined) -> tuple[bool, Gone]:
        """Add a node. Return whether it is new, and the workers of its last incarnation, which are proven to be
        gone."""
        node = self._members.nodes.get(event.node)
        gone: Gone = {}
        if node and event.incarnation <= node.incarnation:
            if event.incarnation == node.incarnation:
                answer = messages.Fence if node.dead else messages.Welcome
                self._desk.say(answer(event.node, event.incarnation))
                node.address, node.memory = event.address, event.memory
                self.clear(event.node)
            return False, gone
        if node and not node.dead:
            gone = self.lose_node(event.node, f"came back as incarnation {event.incarnation}", back=True)
        self._members.join(event.node, event.incarnation, event.domain, event.address, event.memory)
        self._desk.say(messages.Welcome(event.node, event.incarnation))
        return True, gone

    def clear(self, name: str) -> None:
        self.suspects.discard(name)
        self.silent.discard(name)
        if self.silent:  # the others may be heard in a moment
            self._desk.set("silence", self._policy.silence_ns)
        else:
            self.rounds, self.noted = 0, False

    def give_up(self, name: str) -> dict[str, Gone]:
        """Note that a node was reported dead without proof. Return the nodes that are given up now."""
        self.suspects.add(name)
        self.silent.add(name)
        return self.give_up_silent()

    def give_up_silent(self, waited: bool = False) -> dict[str, Gone]:
        """Give up the nodes that were reported dead for their silence, unless so many are silent that it may be the
        network. Then wait for the network in rounds, and for `hold_ns` while the gang could not continue without
        them."""
        gone: dict[str, Gone] = {}
        if not self.silent:
            return gone
        self.given_up_ns = [at for at in self.given_up_ns if at > self._desk.now_ns - self._policy.silence_ns]
        count, most = len(self.suspects) + len(self.given_up_ns), self.most_silent()
        if count > most:
            self.rounds += waited
            waits = self.rounds * self._policy.silence_ns < self._policy.hold_ns
            if self.rounds < self._policy.silence_rounds or (waits and not self._can_do_without(self.silent)):
                if not self.noted:
                    text = f"{count} nodes are silent, more than {most}: it may be the network"
                    self._desk.say(messages.Note(6, text))
                self.noted = True
                if waited or "silence" not in self._desk.timers:
                    self._desk.set("silence", self._policy.silence_ns)
                return gone
        self.rounds, self.noted = 0, False
        for name in sorted(self.silent):
            self.given_up_ns.append(self._desk.now_ns)
            gone[name] = self.lose_node(name, "is silent")
        return gone

    def most_silent(self) -> int:
        """Return how many nodes may be given up at once; never all."""
        alive = self._members.alive + len(self.given_up_ns)
        return min(max(1, alive * self._policy.silence_percent // 100), alive - 1)

    def _can_do_without(self, names: set[str]) -> bool:
        """Return whether enough replicas are left without these nodes, or can be completed with spares."""
        members = self._members
        lacking: dict[int, int] = dict.fromkeys(members.wanted, 0)  # replica -> its places without a node
        for number, place in members.places.items():
            if place.now is None or place.now.node in names:
                for replica in members.replicas_at(number):
                    lacking[replica] += 1
        left, enough = sum(name not in self.suspects for names in members.fit for name in names), 0
        for count in sorted(lacking.values()):
            left -= count
            enough += left >= 0
        return enough >= self._policy.min_replicas

    def can_let_go(self, name: str, replicas: list[int]) -> bool:
        """Return whether no node is going to take over from a drained one, and enough of the replicas are left without
        it."""
        node = self._members.nodes[name]
        place = self._members.places[node.place]
        if not node.drained or place.next or not place.now or place.now.node != name:
            return False
        there = self._members.replicas_at(node.place)
        return bool(there & set(replicas)) and len(set(replicas) - there) >= self._policy.min_replicas

    def lose_node(self, name: str, why: str, back: bool = False) -> Gone:
        """Count a node as dead, and return its workers. `back`: it has returned, though without them."""
        place = self._members.nodes[name].place
        gone = self._members.lose(name)
        self.suspects.discard(name)
        self.silent.discard(name)
        self.leaving.discard(name)
        self.late_ns.pop(name, None)
        self.killed = {worker: node for worker, node in self.killed.items() if node != name}
        if place >= 0:
            alone = place in self._members.vacant and not back and self._spare(place) is None
            self.why.append((3 if alone else 2, f"node {name} {why}" + ", and there is no spare" * alone))
        self._forget(gone)
        return gone

    def fault(self, name: str, rung: int, text: str) -> None:
        """Mark a node to be replaced before it fails, or fails again."""
        node = self._members.nodes[name]
        if not node.fault:
            self._members.mark(name, fault=text, rung=rung)
            self._desk.say(messages.Note(rung, f"node {name} should be replaced: {text}"))
        if node.place >= 0:
            self.leaving.add(name)

    def warn(self, event: messages.DeviceWarning) -> bool:
        limit = self._policy.warnings.get(event.sign)
        if limit is None or event.count < limit:
            return False
        self.fault(event.node, 0, f"{event.sign} at {event.count}")
        return True

    def drain(self, event: messages.Drain) -> bool:
        node = self._members.nodes.get(event.node)
        if node is None or node.dead:
            self._desk.say(messages.Note(-1, f"node {event.node} is not there, so it cannot be drained"))
            return False
        self._members.mark(event.node, drained=not event.off)
        if event.off:
            place = self._members.places.get(node.place)
            if not node.fault and place and not place.next and not place.old:
                self.leaving.discard(event.node)
        elif node.place >= 0:
            self.leaving.add(event.node)
        else:
            self._desk.say(messages.Release(event.node))
        return True

    # -- workers

    def up(self, event: messages.WorkersUp) -> bool:
        self.end_strangers(event.node, event.workers)
        new = [w for w in event.workers if self.starting.pop(w, None) is not None]
        if new:
            self.patience.forget(new)
            ports = dict(zip(event.workers, event.ports, strict=True))
            self._members.up({worker: ports[worker] for worker in new})
            self._stay(event.node)
        return bool(new)

    def _stay(self, name: str) -> None:
        """Keep a node on its place if its ranks have started before those of the spare beside it."""
        if self._starts(name):
            return
        self.late_ns.pop(name, None)
        node, members = self._members.nodes[name], self._members
        place = members.places[node.place]
        stays = place.now and place.now.node == name and not (node.fault or node.drained)
        if stays and name in self.leaving and not members.can_switch(node.place):
            self.leaving.discard(name)
            if place.next:
                self.release(node.place, "next")

    def _starts(self, name: str) -> bool:
        """Return whether the node fills a place and is starting ranks there."""
        place = self._members.places.get(self._members.nodes[name].place)
        seat = place.now if place else None
        return seat is not None and seat.node == name and not self.starting.keys().isdisjoint(seat.workers.values())

    def lose_worker(self, worker: int, why: str, kill: bool = False) -> Gone:
        members = self._members
        found = members.workers[worker]
        number, name = members.place_of(found.rank), found.node
        place = members.places[number]
        if place.next and place.next.workers.get(found.rank) == worker:  # this one will not take over
            gone = members.clear(number, "next")
            self.leaving.discard(name)
            self.kill(name, gone)
        else:
            gone = {members.remove(worker).rank: worker}
            if kill:
                self.kill(name, gone)
        self.demerit(name)
        self.why.append((1, f"the worker of rank {found.rank} on {name} {why}"))
        self._forget(gone)
        return gone

    def demerit(self, name: str) -> None:
        """Count a failure on a node. A few of them in a short time, and it is replaced."""
        node, now_ns = self._members.nodes.get(name), self._desk.now_ns
        if node is None or node.dead:
            return
        node.deaths = [at for at in node.deaths if at > now_ns - self._policy.deaths_ns]
        if not node.deaths or now_ns >= node.deaths[-1] + self._policy.burst_ns:
            node.deaths.append(now_ns)
        if len(node.deaths) >= self._policy.deaths:
            self.fault(name, 2, f"it failed {len(node.deaths)} times in a short time")

    def kill(self, name: str, workers: Gone) -> None:
        if workers:
            numbers = sorted(workers.values())
            self.killed.update(dict.fromkeys(numbers, name))
            self._desk.say(messages.Kill(name, tuple(numbers)))

    def end_strangers(self, name: str, workers: Iterable[int]) -> None:
        """End workers that should be gone by now."""
        known = self._members.workers
        strangers = tuple([w for w in workers if w not in known])
        if strangers:
            self._desk.say(messages.Kill(name, strangers))

    def _forget(self, workers: Gone) -> None:
        for worker in workers.values():
            self.starting.pop(worker, None)
        self.patience.forget(workers.values())

    def look_at_late(self) -> Gone:
        """Ask workers that are not up in time how far they are. Return those that have not moved since they were asked:
        they are lost."""
        now_ns, gone = self._desk.now_ns, Gone()
        late = sorted(w for w, until_ns in self.starting.items() if until_ns <= now_ns)
        asked = [w for w in late if w not in self.patience.doubted]
        for worker in late:
            if worker not in asked and worker in self.starting:
                gone |= self.lose_worker(worker, "did not start in time", kill=True)
        self.doubt([w for w in asked if w in self.starting])
        for worker in asked:
            if worker in self.starting:
                self.starting[worker] = now_ns + self._policy.ask_ns
        if self.starting:
            self._desk.set("launch", min(self.starting.values()) - now_ns)
        return gone

    def doubt(self, workers: Iterable[int]) -> None:
        doubted = set(workers)
        self.patience.doubted |= doubted
        if doubted:
            self._desk.say(messages.Probe(self._members.nodes_of(doubted)))

    def are_stuck(self, workers: set[int]) -> bool:
        """Ask late workers how far they are. Return whether they were asked before and none of them has moved since:
        while one moves, the others may be waiting for it."""
        if not workers <= self.patience.doubted:
            self.doubt(workers)
            return False
        self.patience.doubted -= workers
        return True

    def standing(self, event: messages.Standing) -> set[int]:
        """Return the workers on a node that have moved since their last answer."""
        moved = self.patience.moved({w: c for w, c in event.counters.items() if w in self._members.workers})
        until_ns = self._desk.now_ns + self._policy.launch_ns
        for worker in moved & self.starting.keys():
            self.starting[worker] = until_ns
        return moved

    def outstanding(self) -> list[Command]:
        """Return the Launch and Kill commands that were not answered."""
        members, launched, doomed = self._members, defaultdict[str, Gone](Gone), defaultdict[str, list[int]](list)
        for worker in sorted(self.starting):
            found = members.workers[worker]
            launched[found.node][found.rank] = worker
        for worker, node in sorted(self.killed.items()):
            doomed[node].append(worker)
        starts = [messages.Launch(n, members.nodes[n].incarnation, some) for n, some in sorted(launched.items())]
        return [*starts, *(messages.Kill(node, tuple(some)) for node, some in sorted(doomed.items()))]

    # -- filling places

    def _spare(self, place: int, good: bool = False) -> str | None:
        """Choose the best spare: without a fault if possible, then near the place's last node in the network, then by
        name. `good`: do not accept one that has a fault."""
        members, domain = self._members, self._members.places[place].domain
        for which in (0,) if good else (0, 1):
            near = members.fit_in[which].get(top_of(domain), set()) - self.suspects
            if near:
                return min(near, key=lambda n: (-_levels_shared(members.nodes[n].domain, domain), n))
            found = next((n for n in members.fit[which] if n not in self.suspects), None)
            if found is not None:
                return found
        return None

    def fill(self) -> Gone:
        """Fill places, and start the ranks that lack a worker. Return the workers of nodes that were taken off a place
        for it."""
        members = self._members
        for name in [*members.fit[0]] if members.homes and members.vacant else ():
            if members.homes.get(name) in members.vacant and name not in self.suspects:
                self._seat(members.homes[name], name)
        self._fill_vacant()
        gone = self._part_pairs() if members.vacant and members.paired else Gone()
        for place in sorted(members.short):
            self._restart(place)
        self._look_at_slow()
        for name in sorted(self.leaving) if members.fit[0] else ():
            place = members.nodes[name].place
            seats = members.places[place]
            fills = seats.now and seats.now.node == name and members.ranks(place)
            if fills and seats.next is None and seats.old is None:
                if not self._is_to_leave(name) and name not in self.late_ns:
                    self.leaving.discard(name)  # its ranks have started, after all
                elif (spare := self._spare(place, good=True)) is not None:
                    members.sit(place, spare, "next")
                    self._launch(place, "next")
        return gone

    def _look_at_slow(self) -> None:
        """Mark nodes to be replaced whose ranks take too long to restart, if there are good spares. `late_ns` is in
        order of time, so nodes that are not due yet are not looked at."""
        now_ns, late = self._desk.now_ns, self.late_ns
        if not late or (next(iter(late.values())) <= now_ns and not self._members.fit[0]):
            return
        for name in [name for name, _ in itertools.takewhile(lambda item: item[1] <= now_ns, late.items())]:
            if not self._starts(name):
                del late[name]
            elif name not in self.leaving and self._spare(self._members.nodes[name].place, good=True):
                self.leaving.add(name)
        if later_ns := next((at_ns for at_ns in late.values() if at_ns > now_ns), 0):
            self._desk.look_after(later_ns - now_ns)

    @property
    def is_hopeful(self) -> bool:
        """Return whether ranks are starting on a node that has not failed again and again."""
        nodes, workers, most = self._members.nodes, self._members.workers, self._policy.deaths
        return any(len(nodes[workers[number].node].deaths) < most for number in self.starting)

    def _is_to_leave(self, name: str) -> bool:
        """Return whether the node is to leave its place even if its ranks are up."""
        node = self._members.nodes[name]
        return bool(node.fault) or node.drained

    def _fill_vacant(self) -> None:
        for place in self._vacant():
            spare = self._spare(place)
            if spare is None:
                break
            self._seat(place, spare)

    def _part_pairs(self) -> Gone:
        """Take the second node off places that have two, if other places have none. It only prepares to take over, or
        was taken over from, so it is needed more elsewhere, unless it is drained. Return the workers that are gone."""
        members, gone, lacking = self._members, Gone(), len(self._members.vacant)
        for number in sorted(members.paired):
            place = members.places[number]
            which, seat = ("next", place.next) if place.next else ("old", place.old)
            if not lacking or not seat or seat.node in self.suspects or members.nodes[seat.node].drained:
                continue
            late = place.now.node if place.next and place.now else seat.node
            gone |= self.release(number, which)
            if not self._is_to_leave(late):
                self.leaving.discard(late)
            lacking -= 1
        self._fill_vacant()
        return gone

    def _seat(self, place: int, name: str) -> None:
        self._members.sit(place, name)
        if self._members.nodes[name].fault:
            self.leaving.add(name)
        self._desk.say(messages.Note(2, f"node {name} takes place {place}"))

    def _vacant(self) -> Iterator[int]:
        """Yield the vacant places, first those whose replicas lack least. At the start of a run, when all are alike, go
        by number. Each must be filled before the next is asked for."""
        members = self._members
        while members.spares and len(members.vacant) > MANY:
            first = members.first_vacant()
            assert first is not None
            yield first
        if not members.spares:
            return
        lacking: dict[int, int] = defaultdict(int)
        for place in members.vacant:
            for replica in members.replicas_at(place):
                lacking[replica] += 1
        yield from sorted(members.vacant, key=lambda p: (min(lacking[r] for r in members.replicas_at(p)), p))

    def _restart(self, place: int) -> None:
        """Start the ranks of a place that have no worker, unless too many have died there lately."""
        seat = self._members.places[place].now
        assert seat
        deaths, now_ns = self._members.nodes[seat.node].deaths, self._desk.now_ns
        if len(deaths) >= self._policy.deaths:
            again_ns = deaths[-self._policy.deaths] + self._policy.deaths_ns
            if again_ns > now_ns:
                if self._desk.timers.get("retry", now_ns) <= now_ns:
                    self._desk.set("retry", again_ns - now_ns)
                return
        self._launch(place, "now")
        # Not at the start of a run, when all start, and not where replicas that train share the place.
        if deaths and seat.node not in self.late_ns and len(self._members.replicas_at(place)) == 1:
            self.late_ns[seat.node] = now_ns + self._policy.late_ns

    def _launch(self, place: int, which: str) -> None:
        desk, launch_ns = self._desk, self._policy.launch_ns
        name, workers = self._members.launch(place, which)
        self.starting.update(dict.fromkeys(workers.values(), desk.now_ns + launch_ns))
        if "launch" not in desk.timers:
            desk.set("launch", launch_ns)
        desk.say(messages.Launch(name, self._members.nodes[name].incarnation, workers))

    def is_replacing(self, names: Iterable[str]) -> bool:
        """Return whether one of the nodes is bad, and another prepares to take its place."""
        nodes, places = self._members.nodes, self._members.places
        bad = (nodes[name].place for name in names if name in self.leaving and nodes[name].fault)
        return any(places[number].next for number in bad)

    def release(self, place: int, which: str) -> Gone:
        """Take a living node off a place. Return its workers, which are gone."""
        seat = getattr(self._members.places[place], which)
        gone = self._members.clear(place, which)
        self._forget(gone)
        self.kill(seat.node, gone)
        self.leaving.discard(seat.node)
        self.late_ns.pop(seat.node, None)
        if self._members.nodes[seat.node].drained:
            self._desk.say(messages.Release(seat.node))
        return gone


def _levels_shared(one: str, other: str) -> int:
    """Return how many levels of the network two nodes share: spine.leaf1 and spine.leaf2 share one."""
    pairs = zip(one.split("."), other.split("."), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
