"""The next generation: who is in it, from which step it goes on, and where each rank gets its state. Then all form, and
when all are ready and agree, they start."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import filterfalse

from phalanx.control import messages
from phalanx.control.halting import Halting
from phalanx.control.messages import Form, Source
from phalanx.control.roll import Roll
from phalanx.control.sources import Stocks

TOLD = 16  # reasons in a Form


@dataclass
class Forming(Halting):
    durable: list[tuple[int, int]] = field(default_factory=list)  # step, generation; first what the run began from
    digests: dict[int, str] = field(default_factory=dict)  # of those that are Ready
    agreed: dict[int, str] = field(default_factory=dict)  # coordinate -> the first of them
    disputed: set[int] = field(default_factory=set)  # coordinates that have another one too
    asked: bool = False  # all that `held` can have is there
    unanswered: set[str] = field(default_factory=set)  # nodes that were asked
    held: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)  # node -> what is in its memory
    stepped: bool = False  # the generation is known to have committed a step
    relink: bool = False  # it avoids other links than those that are down
    rescaled: bool = False  # it may have other replicas than those that are wanted
    surplus: bool = False  # there may be workers of replicas that are not wanted

    def _on_NodeJoined(self, event: messages.NodeJoined) -> bool:
        if self.patience_ns < 0:
            self._be_patient(self.policy.gather_ns)
        return super()._on_NodeJoined(event)

    def _lose_node(self, name: str, why: str, back: bool = False) -> None:
        self.held.pop(name, None)
        self.unanswered.discard(name)
        super()._lose_node(name, why, back)
        if self.phase == "asking" and not self.unanswered:
            self._timer_ask()

    def _gather(self) -> None:
        """Form the next generation, if it can be."""
        members = self.members
        for name in sorted(self.leaving):
            node = members.nodes[name]
            if members.can_switch(node.place):
                members.switch(node.place)
                seat = members.places[node.place].now
                assert seat
                text = node.fault or "it is drained"
                self.why.append((node.rung, f"node {seat.node} takes place {node.place} over from {name}: {text}"))
        chosen, full = sorted(members.whole), len(members.wanted)
        for name in sorted(self.leaving):
            if self._can_do_without(name, chosen):
                there = members.replicas_at(members.nodes[name].place)
                chosen = [replica for replica in chosen if replica not in there]
                full -= len(there)
        if len(chosen) < full and self.now_ns < self.patience_ns:
            return
        chosen = chosen[: self.policy.usable(len(chosen))]
        if len(chosen) < self.policy.min_replicas:
            vacant = f"; {len(members.vacant)} places have no node" if members.vacant else ""
            self._hold(f"{len(chosen)} replicas are whole, and {self.policy.min_replicas} must be{vacant}")
            return
        crew, places = members.crew(chosen)
        step, sources = self._plan(crew)
        kept = all(source.kind == "live" for source in sources.values())
        if self.generation and not self.asked and not (kept and step == self.committed and self.certain):
            self.phase = "asking"
            self.unanswered = {name for name, node in members.nodes.items() if not node.dead}
            self._timer("ask", self.policy.ask_ns)
            self._say(messages.Ask(self.generation, tuple(sorted(self.unanswered))))
            return
        self._form(chosen, step, crew, places, sources)

    def _can_do_without(self, name: str, replicas: list[int]) -> bool:
        """A drained node that nobody is going to take over from."""
        node = self.members.nodes[name]
        place = self.members.places[node.place]
        if not node.drained or place.next or not place.now or place.now.node != name:
            return False
        there = self.members.replicas_at(node.place)
        return bool(there & set(replicas)) and len(set(replicas) - there) >= self.policy.min_replicas

    def _plan(self, crew: dict[int, int]) -> tuple[int, dict[int, Source]]:
        """The step to go on from, and where ranks that lack it get it."""
        if self.certain and self._roll and all(self.lineage.step_of(c) == self.committed for c in self._roll.copies):
            # Most often: whoever is left has the last step. So only the others need one, and only of their coordinates.
            new, workers = filterfalse(self._roll.parked.__contains__, crew.values()), self.members.workers
            others = {workers[worker].rank: worker for worker in new}
            sources = self._from_parked(others)
            if sources is None:
                sources = self._stocks(others).at(self.committed)
            if sources is not None:
                return self.committed, sources
        return self._stocks(crew).newest(self.committed if self.certain else None)

    def _from_parked(self, ranks: dict[int, int]) -> dict[int, Source] | None:
        """For ranks that lack the last step, which all that have parked have: of each the next of its coordinate that
        has. None: there is none of some."""
        assert self._roll
        at, workers, parked = self.members.at, self.members.workers, self._roll.parked
        size = self.members.replica_size
        world = (max(self.members.wanted, default=-1) + 1) * size
        sources = {}
        for rank, worker in ranks.items():
            if self.lineage.step_of(workers[worker].copy) == self.committed:
                continue
            peers = (at.get(peer % world, 0) for peer in range(rank + size, rank + world, size))
            found = next(filter(parked.__contains__, peers), None)
            if found is None:
                return None
            sources[rank] = Source("live", workers[found].node, found)
        return sources

    def _stocks(self, crew: dict[int, int]) -> Stocks:
        """All that the ranks of a crew, or of some of it, could go on from."""
        members, steps = self.members, self.lineage.steps_of
        own = zip(crew.items(), steps(members.workers[w].copy for w in crew.values()), strict=True)
        where = {rank: (members.workers[worker].node, step) for (rank, worker), step in own}
        live: dict[int, dict[int, tuple[str, int]]] = defaultdict(dict)
        found = list(members.filling({rank % members.replica_size for rank in crew}))
        for (rank, worker), step in zip(found, steps(members.workers[w].copy for _, w in found), strict=True):
            if step >= 0:
                live[step].setdefault(rank, (members.workers[worker].node, worker))
        held: dict[int, dict[int, list[tuple[str, int, int]]]] = defaultdict(lambda: defaultdict(list))
        for node, copies in self.held.items():
            for rank, step, made in copies:
                if self.lineage.counts(step, made):
                    held[rank % members.replica_size][step].append((node, rank, made))
        memories = {node: members.nodes[node].memory for node in self.held if node in members.nodes}
        return Stocks(members.replica_size, where, live, held, dict(self.durable), memories)

    def _on_Held(self, event: messages.Held) -> bool:
        if self.phase != "asking" or event.generation != self.generation:
            return False
        self.held[event.node] = list(event.copies)
        self.unanswered.discard(event.node)
        if not self.unanswered:
            self._timer_ask()
        return not self.unanswered

    def _timer_ask(self) -> None:
        """Whoever has not answered has nothing."""
        self.phase, self.asked = "gathering", True
        self.timers.pop("ask", None)

    def _form(
        self, chosen: list[int], step: int, crew: dict[int, int], places: dict[int, str], sources: dict[int, Source]
    ) -> None:
        members = self.members
        if self.generation and any(source.kind == "durable" for source in sources.values()):
            self.why.append((4, f"step {step} is in a checkpoint only"))
        if len(chosen) < len(members.wanted):
            absent = sorted({*members.wanted}.difference(chosen))
            self.why.append((-1, f"replicas {absent} are left out"))
        branch, last = step < self.committed or not self.certain, max(step, self.committed)
        if branch:
            self.why.append((-1, f"back to step {step}: no later one is left of every rank"))
        self.generation += 1
        if branch:
            self.lineage.branch(self.generation, step)
        self.durable = [d for d in self.durable if self.lineage.counts(*d)]
        self.committed, self.certain = step, True
        self.form = Form(
            generation=self.generation,
            step=step,
            replicas=tuple(chosen),
            crew=crew,
            places=places,
            ranks_per_place=members.ranks_per_place,
            store=members.nodes[places[min(places)]].address,
            sources=sources,
            branch=branch,
            last=last,
            avoid=tuple(sorted(self.links)),
            rung=max((rung for rung, _ in self.why), default=-1),
            reason=self._reason(),
            nodes=tuple(sorted(dict.fromkeys([*places.values(), *(s.node for s in sources.values() if s.node)]))),
        )
        self._roll = Roll(self.form)
        self.why, self.said, self.relink, self.rescaled = [], "", False, False
        self.digests, self.agreed, self.disputed = {}, {}, set()
        self.phase, self.stepped, self.waiting = "forming", False, set(self._roll.left)
        self._timer("form", self.policy.form_ns)
        self._say(self.form)

    def _reason(self) -> str:
        """Every node is told, so of a thousand failures not each."""
        texts = [text for _, text in self.why[:TOLD]]
        more = len(self.why) - len(texts)
        return "; ".join(texts + [f"and {more} more"] * bool(more)) or "all are there"

    def _on_Ready(self, event: messages.Ready) -> bool:
        self._end_strangers(event.node, event.digests)
        if self.phase != "forming" or not self.form or event.generation != self.generation:
            return False
        if event.step != self.form.step:
            return False
        workers, size, agreed = self.members.workers, self.members.replica_size, self.agreed
        new = [worker for worker in event.digests if worker in self.waiting]
        for worker in new:
            self.digests[worker] = digest = event.digests[worker]
            coordinate = workers[worker].rank % size
            if agreed.setdefault(coordinate, digest) != digest:
                self.disputed.add(coordinate)
        self.waiting.difference_update(new)
        if self.waiting:
            return False
        for coordinate in sorted(self.disputed):
            for worker in self._wrong(coordinate):
                self._lose_worker(worker, "has another state than its peers", kill=True)
        if self.phase == "forming":
            self._start()
        return True

    def _wrong(self, coordinate: int) -> list[int]:
        """Workers whose state is not that of the same coordinate in other replicas. Most are right; if that does not
        tell, those that kept what they had."""
        assert self.form
        said: dict[str, list[int]] = defaultdict(list)
        for replica in self.form.replicas:
            rank = replica * self.members.replica_size + coordinate
            said[self.digests[self.form.crew[rank]]].append(rank)
        kept = {digest: sum(rank not in self.form.sources for rank in ranks) for digest, ranks in said.items()}
        right = max(said, key=lambda digest: (len(said[digest]), kept[digest], -said[digest][0]))
        return [self.form.crew[rank] for digest, ranks in said.items() if digest != right for rank in ranks]

    def _on_Missing(self, event: messages.Missing) -> bool:
        if self.phase != "forming" or event.generation != self.generation or event.worker not in self.waiting:
            return False
        assert self.form
        worker = self.members.workers[event.worker]
        source = self.form.sources.get(worker.rank)
        if source is None:
            worker.copy = None
        elif source.kind == "memory" and source.node in self.held:
            bad = (source.number, self.form.step, source.made)
            kept = [copy for copy in self.held[source.node] if copy != bad]
            self.held[source.node] = kept
        elif source.kind == "durable":
            first, *others = self.durable
            self.durable = [first, *(d for d in others if d[0] != self.form.step)]
        self.members.nodes[event.node].deaths.append(self.now_ns)
        self.why.append((1, f"rank {worker.rank} did not get its state: {event.reason}"))
        self._halt()
        return True

    def _start(self) -> None:
        assert self.form
        self.phase, self.ran = "running", True
        self.asked, self.held = False, {}
        self.digests, self.agreed = {}, {}
        self.timers.pop("form", None)
        self._say(messages.Start(self.generation, self._crew_nodes()))
        self._retire()

    def _retire(self) -> None:
        """Let go of whoever the gang has started without and does not want: nodes that leave, or all that replicas have
        which are not wanted any more."""
        assert self.form
        members, size, active = self.members, self.members.replica_size, set(self.form.replicas)
        for number in sorted(members.places if self.surplus else {members.nodes[name].place for name in self.leaving}):
            place = members.places[number]
            if place.old:
                self._release(number, "old")
            if place.now and not active & {rank // size for rank in place.now.workers}:
                unwanted = members.nodes[place.now.node].drained or not members.replicas_at(number)
                if place.next and not members.replicas_at(number):
                    self._release(number, "next")  # or it would move up
                if unwanted:
                    self._release(number, "now")
        if self.surplus:
            self.surplus = not active <= members.down.keys()
            kept = active | members.down.keys()
            for worker in sorted(w for w, found in members.workers.items() if found.rank // size not in kept):
                found = members.remove(worker)
                self.starting.pop(worker, None)
                self._kill(found.node, {found.rank: worker})
