"""Which step a gang goes on from, and where each rank gets it: from workers that are parked, from snapshots in the
memory of nodes, from checkpoints, from what the run began with. A source that failed is not asked again before the
next step is committed."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import filterfalse

from phalanx.control.commits import Commits
from phalanx.control.membership import Membership
from phalanx.control.messages import Source
from phalanx.control.roll import Roll
from phalanx.control.sources import Lineage, Stocks


@dataclass
class Finder:
    asked: bool = False  # all that `held` can have is there
    unanswered: set[str] = field(default_factory=set)  # nodes that were asked
    held: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)  # node -> what is in its memory
    banned: set[int] = field(default_factory=set)  # workers whose state nobody could take

    def bind(self, members: Membership, lineage: Lineage, commits: Commits) -> None:
        self._members, self._lineage, self._commits = members, lineage, commits

    def plan(
        self, crew: dict[int, int], roll: Roll | None, committed: int, certain: bool
    ) -> tuple[int, dict[int, Source]]:
        """The step to go on from, and the sources of the ranks that lack it."""
        if certain and roll and all(self._lineage.step_of(copy) == committed for copy in roll.copies):
            # Most often all that are left have the last step, so only the others need a source.
            new, workers = filterfalse(roll.parked.__contains__, crew.values()), self._members.workers
            others = {workers[worker].rank: worker for worker in new}
            sources = self._from_parked(others, roll, committed)
            if sources is None:
                sources = self._stocks(others).at(committed)
            if sources is not None:
                return committed, sources
        return self._stocks(crew).newest(committed if certain else None)

    def _from_parked(self, ranks: dict[int, int], roll: Roll, committed: int) -> dict[int, Source] | None:
        """For ranks that lack the last step, which all that have parked have: the next of its coordinate that has.
        None: there is none for some."""
        at, workers, size = self._members.at, self._members.workers, self._members.replica_size
        world = (max(self._members.wanted, default=-1) + 1) * size
        sources = {}
        for rank, worker in ranks.items():
            if self._lineage.step_of(workers[worker].copy) == committed:
                continue
            peers = (at.get(peer % world, 0) for peer in range(rank + size, rank + world, size))
            found = next((p for p in peers if p in roll.parked and p not in self.banned), None)
            if found is None:
                return None
            sources[rank] = Source("live", workers[found].node, found)
        return sources

    def _stocks(self, crew: dict[int, int]) -> Stocks:
        """All that the ranks of a crew, or of some of it, could go on from."""
        members, steps = self._members, self._lineage.steps_of
        own = zip(crew.items(), steps(members.workers[w].copy for w in crew.values()), strict=True)
        where = {rank: (members.workers[worker].node, step) for (rank, worker), step in own}
        live: dict[int, dict[int, tuple[str, int]]] = defaultdict(dict)
        found = [
            item
            for item in members.filling({rank % members.replica_size for rank in crew})
            if item[1] not in self.banned
        ]
        for (rank, worker), step in zip(found, steps(members.workers[w].copy for _, w in found), strict=True):
            if step >= 0:
                live[step].setdefault(rank, (members.workers[worker].node, worker))
        held: dict[int, dict[int, list[tuple[str, int, int]]]] = defaultdict(lambda: defaultdict(list))
        for node, copies in self.held.items():
            for rank, step, made in copies:
                if self._lineage.counts(step, made):
                    held[rank % members.replica_size][step].append((node, rank, made))
        memories = {node: members.nodes[node].memory for node in self.held if node in members.nodes}
        return Stocks(members.replica_size, where, live, held, self._commits.durable, memories)

    # -- what nodes have in memory

    def ask(self, nodes: set[str]) -> None:
        self.unanswered = nodes

    def hear(self, node: str, copies: tuple[tuple[int, int, int], ...]) -> bool:
        """Whether all have answered."""
        self.held[node] = list(copies)
        self.unanswered.discard(node)
        return not self.unanswered

    def lose_node(self, name: str) -> None:
        self.held.pop(name, None)
        self.unanswered.discard(name)

    def close(self) -> None:
        """The gang goes on: memories will change."""
        self.asked, self.held = False, {}

    def fail(self, source: Source, step: int, damaged: bool) -> None:
        """A source did not have what it should; if that was not damaged, the others of that memory are no better."""
        if source.kind == "live":
            self.banned.add(source.number)
        elif source.kind == "memory" and source.node in self.held:
            bad = (source.number, step, source.made)
            self.held[source.node] = [copy for copy in self.held[source.node] if damaged and copy != bad]
        elif source.kind == "durable":
            self._commits.forget(step, source.made)

    def newest_whole(self, homes: list[str], generation: int, after: int) -> int:
        """The newest step after `after`, made in `generation`, whose snapshots all nodes have in memory; -1: none.
        `homes`: for each rank that took part, in order, its node."""
        found: dict[int, int] = defaultdict(int)
        for rank, node in enumerate(homes):
            for step in {s for r, s, made in self.held.get(node, ()) if r == rank and made == generation}:
                found[step] += 1
        return max((step for step, count in found.items() if step > after and count == len(homes)), default=-1)
