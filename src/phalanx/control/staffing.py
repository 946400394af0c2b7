"""Staffing: who is given up, who is replaced, and by whom. The ladder's rungs 0 to 3 and 5 begin here; what the gang
does meanwhile is in `gang`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nsmallest

from phalanx.control import messages
from phalanx.control.membership import Membership
from phalanx.control.messages import Command, Event
from phalanx.control.policy import Policy

MANY = 64  # vacant places


@dataclass
class Staffing:
    policy: Policy
    members: Membership
    most: int  # replicas that Scale may ask for
    now_ns: int = 0
    timers: dict[str, int] = field(default_factory=dict)
    starting: dict[int, int] = field(default_factory=dict)  # worker -> until when it must be up
    killed: dict[int, str] = field(default_factory=dict)  # worker -> node, until its end is confirmed
    leaving: set[str] = field(default_factory=set)  # nodes with a fault, and drained ones, that have a place
    links: set[tuple[str, str]] = field(default_factory=set)  # that are down
    suspects: set[str] = field(default_factory=set)  # nodes that are silent
    silent: set[str] = field(default_factory=set)  # those of them that were reported dead for it
    given_up_ns: list[int] = field(default_factory=list)  # when nodes were, for their silence
    why: list[tuple[int, str]] = field(default_factory=list)  # rungs and reasons since the last Form
    said: str = ""  # why nothing is done

    def __post_init__(self) -> None:
        self._out: list[Command] = []

    def _say(self, command: Command) -> None:
        self._out.append(command)

    def _hold(self, text: str) -> None:
        """Say once why nothing is done."""
        if text != self.said:
            self.said = text
            self._say(messages.Note(6, text))

    def _timer(self, name: str, after_ns: int) -> None:
        self.timers[name] = self.now_ns + after_ns
        self._say(messages.SetTimer(name, self.timers[name]))

    def _gone(self, workers: dict[int, int]) -> None:
        """By rank; `members` does not have them any more."""
        for worker in workers.values():
            self.starting.pop(worker, None)

    # -- nodes

    def _refuses(self, event: Event) -> bool:
        """Whether it comes from somebody who does not count (any more)."""
        name, incarnation = getattr(event, "node", ""), getattr(event, "incarnation", None)
        if incarnation is None or isinstance(event, messages.NodeJoined):
            return False
        node = self.members.nodes.get(name)
        if node is None or node.incarnation != incarnation:
            return True
        if node.dead and not isinstance(event, (messages.NodeDead, messages.NodeSuspect)):
            self._say(messages.Fence(name, incarnation))
        return node.dead

    def _on_NodeJoined(self, event: messages.NodeJoined) -> bool:
        node = self.members.nodes.get(event.node)
        if node and event.incarnation <= node.incarnation:
            if event.incarnation == node.incarnation:
                answer = messages.Fence if node.dead else messages.Welcome
                self._say(answer(event.node, event.incarnation))
                node.address, node.memory = event.address, event.memory
                self._clear(event.node)
            return False
        if node and not node.dead:
            self._lose_node(event.node, f"came back as incarnation {event.incarnation}", back=True)
        self.members.join(event.node, event.incarnation, event.domain, event.address, event.memory)
        self._say(messages.Welcome(event.node, event.incarnation))
        return True

    def _on_NodeSuspect(self, event: messages.NodeSuspect) -> bool:
        self.suspects.add(event.node)
        return False

    def _on_NodeClear(self, event: messages.NodeClear) -> bool:
        self._clear(event.node)
        return True

    def _clear(self, name: str) -> None:
        self.suspects.discard(name)
        self.silent.discard(name)
        if self.silent:  # the others may be heard in a moment
            self._timer("silence", self.policy.silence_ns)

    def _on_NodeDead(self, event: messages.NodeDead) -> bool:
        if event.proof:
            self._lose_node(event.node, f"died ({event.proof})")
        else:
            self.suspects.add(event.node)
            self.silent.add(event.node)
            self._give_up_silent()
        return True

    def _give_up_silent(self) -> None:
        """Those that were reported dead for their silence, unless so many are silent that it must be the network."""
        if not self.silent:
            return
        self.given_up_ns = [at for at in self.given_up_ns if at > self.now_ns - self.policy.silence_ns]
        count, most = len(self.suspects) + len(self.given_up_ns), self._most_silent()
        if count > most:
            self._hold(f"{count} nodes are silent, more than {most}: it must be the network")
            self._timer("silence", self.policy.silence_ns)
            return
        for name in sorted(self.silent):
            self.given_up_ns.append(self.now_ns)
            self._lose_node(name, "is silent")

    def _most_silent(self) -> int:
        """How many may be given up at once; never all."""
        alive = self.members.alive + len(self.given_up_ns)
        return min(max(1, alive * self.policy.silence_percent // 100), alive - 1)

    def _timer_silence(self) -> None:
        self._give_up_silent()

    def _lose_node(self, name: str, why: str, back: bool = False) -> None:
        """`back`: it is there again, though without its workers."""
        place = self.members.nodes[name].place
        gone = self.members.lose(name)
        self.suspects.discard(name)
        self.silent.discard(name)
        self.leaving.discard(name)
        self.killed = {worker: node for worker, node in self.killed.items() if node != name}
        self.links = {link for link in self.links if name not in link}
        if place >= 0:
            alone = place in self.members.vacant and not back and self._spare(place) is None
            self.why.append((3 if alone else 2, f"node {name} {why}" + ", and there is no spare" * alone))
        self._gone(gone)

    # -- what should be replaced before it fails

    def _fault(self, name: str, rung: int, text: str) -> None:
        node = self.members.nodes[name]
        if not node.fault:
            node.fault, node.rung = text, rung
            self._say(messages.Note(rung, f"node {name} should be replaced: {text}"))
        if node.place >= 0:
            self.leaving.add(name)

    def _on_DeviceWarning(self, event: messages.DeviceWarning) -> bool:
        limit = self.policy.warnings.get(event.sign)
        if limit is None or event.count < limit:
            return False
        self._fault(event.node, 0, f"{event.sign} at {event.count}")
        return True

    def _on_LinkLost(self, event: messages.LinkLost) -> bool:
        link = (min(event.a, event.b), max(event.a, event.b))
        known = all(name in self.members.nodes for name in link if name)
        if not known or link in self.links:
            return False
        self.links.add(link)
        self._timer("link", self.policy.link_ns)
        return True

    def _on_LinkBack(self, event: messages.LinkBack) -> bool:
        self.links.discard((min(event.a, event.b), max(event.a, event.b)))
        self._timer("link", self.policy.link_ns)  # it may flap
        return False

    def _timer_link(self) -> None:
        """A link has two ends; that one of them is to blame shows when it has more of those that stay down."""
        counts: dict[str, int] = defaultdict(int)
        for name in sorted(name for link in self.links for name in link if name):
            counts[name] += 1
        worst = [name for name, count in counts.items() if count == max(counts.values())]
        if len(worst) == 1:
            self._fault(worst[0], 5, f"{counts[worst[0]]} of its links stay down")

    # -- workers

    def _on_WorkersUp(self, event: messages.WorkersUp) -> bool:
        self._end_strangers(event.node, event.workers)
        new = [w for w in event.workers if self.starting.pop(w, None) is not None]
        if new:
            self.members.up(new)
        return bool(new)

    def _on_WorkerDied(self, event: messages.WorkerDied) -> bool:
        self.killed.pop(event.worker, None)
        if event.worker not in self.members.workers:
            return False
        self._lose_worker(event.worker, event.reason or "died")
        return True

    def _on_WorkerStuck(self, event: messages.WorkerStuck) -> bool:
        if event.worker not in self.members.workers:
            return False
        self._lose_worker(event.worker, f"hangs {event.reason}".strip(), kill=True)
        return True

    def _lose_worker(self, worker: int, why: str, kill: bool = False) -> None:
        found = self.members.workers[worker]
        number, name = self.members.place_of(found.rank), found.node
        node, place = self.members.nodes[name], self.members.places[number]
        if place.next and place.next.workers.get(found.rank) == worker:  # this one will not take over
            gone = self.members.clear(number, "next")
            self.leaving.discard(name)
            self._kill(name, gone)
        else:
            gone = {self.members.remove(worker).rank: worker}
            if kill:
                self._kill(name, gone)
        node.deaths = [at for at in node.deaths if at > self.now_ns - self.policy.deaths_ns]
        if not node.deaths or self.now_ns >= node.deaths[-1] + self.policy.burst_ns:
            node.deaths.append(self.now_ns)
        if len(node.deaths) >= self.policy.deaths:
            self._fault(name, 2, f"workers died on it {len(node.deaths)} times in a short time")
        self.why.append((1, f"the worker of rank {found.rank} on {name} {why}"))
        self._gone(gone)

    def _kill(self, name: str, workers: dict[int, int]) -> None:
        if workers:
            numbers = sorted(workers.values())
            self.killed.update(dict.fromkeys(numbers, name))
            self._say(messages.Kill(name, tuple(numbers)))

    def _end_strangers(self, name: str, workers: Iterable[int]) -> None:
        """Workers that should be gone by now."""
        known = self.members.workers
        strangers = tuple([w for w in workers if w not in known])
        if strangers:
            self._say(messages.Kill(name, strangers))

    def _timer_launch(self) -> None:
        for worker in sorted(w for w, until_ns in self.starting.items() if until_ns <= self.now_ns):
            if worker in self.starting:
                self._lose_worker(worker, "did not start in time", kill=True)
        if self.starting:
            self._timer("launch", min(self.starting.values()) - self.now_ns)

    # -- filling places

    def _spare(self, place: int, good: bool = False) -> str | None:
        """The best there is: without a fault, where the last one was, in the order of names."""
        nodes = self.members.nodes
        domain = self.members.places[place].domain
        fit = [n for n in self.members.spares - self.suspects if not (nodes[n].drained or (good and nodes[n].fault))]
        return min(fit, key=lambda n: (bool(nodes[n].fault), nodes[n].domain != domain, n), default=None)

    def _fill(self) -> None:
        members = self.members
        for place in self._vacant():
            spare = self._spare(place)
            if spare is None:
                break
            members.sit(place, spare)
            if members.nodes[spare].fault:
                self.leaving.add(spare)
            self._say(messages.Note(2, f"node {spare} takes place {place}"))
        for place in sorted({members.place_of(rank) for rank in members.missing}):
            self._restart(place)
        for name in sorted(self.leaving):
            place = members.nodes[name].place
            seats, ranks = members.places[place], members.ranks(place)
            if ranks and seats.now and seats.now.node == name and seats.next is None and seats.old is None:
                spare = self._spare(place, good=True)
                if spare is not None:
                    members.sit(place, spare, "next")
                    self._launch(place, ranks, "next")

    def _vacant(self) -> list[int]:
        """First those whose replicas lack least; as many as there are spares."""
        members = self.members
        if len(members.vacant) > MANY:  # a beginning, where one is as good as another
            return nsmallest(len(members.spares), members.vacant)
        lacking: dict[int, int] = defaultdict(int)
        for place in members.vacant if members.spares else ():
            for replica in members.replicas_at(place):
                lacking[replica] += 1
        return sorted(members.vacant, key=lambda p: (min(lacking[r] for r in members.replicas_at(p)), p))

    def _restart(self, place: int) -> None:
        """The ranks of a place that have no worker, unless too many have died there lately."""
        seat = self.members.places[place].now
        assert seat
        deaths = self.members.nodes[seat.node].deaths
        again_ns = deaths[-self.policy.deaths] + self.policy.deaths_ns if len(deaths) >= self.policy.deaths else 0
        if again_ns > self.now_ns:
            if self.timers.get("retry", self.now_ns) <= self.now_ns:
                self._timer("retry", again_ns - self.now_ns)
            return
        self._launch(place, [rank for rank in self.members.ranks(place) if rank in self.members.missing], "now")

    def _timer_retry(self) -> None:
        pass  # `_fill` does it

    def _launch(self, place: int, ranks: list[int], which: str) -> None:
        workers = self.members.launch(place, ranks, which)
        until_ns = self.now_ns + self.policy.launch_ns
        self.starting.update(dict.fromkeys(workers.values(), until_ns))
        if "launch" not in self.timers:
            self._timer("launch", self.policy.launch_ns)
        name = self.members.workers[next(iter(workers.values()))].node
        self._say(messages.Launch(name, self.members.nodes[name].incarnation, workers))

    # -- by hand

    def _on_Drain(self, event: messages.Drain) -> bool:
        node = self.members.nodes.get(event.node)
        if node is None or node.dead:
            self._say(messages.Note(-1, f"node {event.node} is not there, so it cannot be drained"))
            return False
        node.drained = True
        if node.place >= 0:
            self.leaving.add(event.node)
        else:
            self._say(messages.Release(event.node))
        return True

    def _release(self, place: int, which: str) -> None:
        """Take a node that lives off a place."""
        seat = getattr(self.members.places[place], which)
        gone = self.members.clear(place, which)
        Staffing._gone(self, gone)
        self._kill(seat.node, gone)
        self.leaving.discard(seat.node)
        if self.members.nodes[seat.node].drained:
            self._say(messages.Release(seat.node))
