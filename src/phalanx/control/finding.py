"""Which step a gang continues from, and where each rank gets it: from parked workers, from snapshots in the memory of
nodes, from checkpoints, or from what the run began with. A source that failed is not asked again before the next step
is committed."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from dataclasses import dataclass, field

from phalanx.control.commits import Commits
from phalanx.control.desk import Desk
from phalanx.control.membership import Membership
from phalanx.control.messages import Ask, Gift, Source
from phalanx.control.policy import Policy
from phalanx.control.sources import Copy, Lineage, Stocks
from phalanx.control.worlds import Worlds


@dataclass
class Finder:
    asked: bool = False  # `held` is complete
    unanswered: set[str] = field(default_factory=set)  # nodes that were asked and have not answered
    held: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)  # node -> what is in its memory
    banned: set[int] = field(default_factory=set)  # workers whose state nobody could take

    def bind(
        self, desk: Desk, members: Membership, policy: Policy, worlds: Worlds, lineage: Lineage, commits: Commits
    ) -> None:
        self._desk, self._members, self._policy = desk, members, policy
        self._replicas, self._homes, self._lineage, self._commits = worlds.replicas, worlds.homes, lineage, commits

    def from_peer(self, replica: int, standing: list[int]) -> Gift | None:
        """Return a gift for a replica that lacks the last step: the state of the next replica that has it. None: no
        replica is left whose state can be taken."""
        at = bisect(standing, replica)
        for donor in standing[at:] + standing[:at]:
            workers = tuple(self._replicas[donor].crew.values())
            if donor != replica and self.banned.isdisjoint(workers):
                known, nodes = self._members.workers, self._members.nodes
                return Gift(
                    givers=tuple(self._homes(donor)),
                    workers=workers,
                    ports=tuple([known[worker].port for worker in workers]),
                    addresses={name: nodes[name].address for name in self._replicas[donor].nodes},
                    takers=tuple(self._homes(replica)),
                )
        return None

    def newest(self, crew: dict[int, int], committed: int | None) -> tuple[int, dict[int, Source]]:
        """Return the last step, up to `committed`, that all ranks of a crew can have, and the sources for those that
        lack it."""
        members, steps = self._members, self._lineage.steps_of
        own = zip(crew.items(), steps(map(self._copy_of, crew.values())), strict=True)
        where = {rank: (members.workers[worker].node, step) for (rank, worker), step in own}
        live: dict[int, dict[int, Source]] = defaultdict(dict)
        found = [
            item
            for item in members.filling({rank % members.replica_size for rank in crew})
            if item[1] not in self.banned
        ]
        for (rank, worker), step in zip(found, steps(self._copy_of(w) for _, w in found), strict=True):
            if step >= 0:
                live[step].setdefault(rank, members.source(worker))
        held: dict[int, dict[int, list[tuple[str, int, int]]]] = defaultdict(lambda: defaultdict(list))
        for node, copies in self.held.items():
            for rank, step, made in copies:
                if self._lineage.counts(step, made):
                    held[rank % members.replica_size][step].append((node, rank, made))
        memories = {node: members.nodes[node].memory for node in self.held if node in members.nodes}
        stocks = Stocks(members.replica_size, where, live, held, self._commits.durable, memories)
        return stocks.newest(committed)

    def _copy_of(self, worker: int) -> Copy | None:
        found = self._members.workers[worker]
        replica = self._replicas.get(found.rank // self._members.replica_size)
        if replica and replica.parted >= 0 and replica.crew.get(found.rank) == worker:
            return replica.copy
        return found.copy

    # -- what nodes have in memory

    def ask(self, generation: int) -> None:
        """Ask all nodes what they hold."""
        self.unanswered = {name for name, node in self._members.nodes.items() if not node.dead}
        self._desk.set("ask", self._policy.ask_ns)
        self._desk.say(self.question(generation))

    def question(self, generation: int) -> Ask:
        return Ask(generation, tuple(sorted(self.unanswered)))

    def stop_asking(self) -> None:
        """Stop waiting for answers. Nodes that have not answered count as holding nothing."""
        self._desk.drop("ask")
        self.unanswered = set()

    def hear(self, node: str, copies: tuple[tuple[int, int, int], ...]) -> bool:
        """Record what a node holds. Return whether all nodes have answered."""
        self.held[node] = list(copies)
        self.unanswered.discard(node)
        return not self.unanswered

    def lose_node(self, name: str) -> None:
        self.held.pop(name, None)
        self.unanswered.discard(name)

    def close(self) -> None:
        """Forget the answers: the gang runs, and memories will change."""
        self.asked, self.held = False, {}

    def fail(self, source: Source, step: int, damaged: bool) -> None:
        """Drop a source that did not have what it should. If its data was missing, not damaged, drop the rest of that
        node's memory too."""
        if source.kind == "live":
            self.banned.add(source.number)
        elif source.kind == "memory" and source.node in self.held:
            bad = (source.number, step, source.made)
            self.held[source.node] = [copy for copy in self.held[source.node] if damaged and copy != bad]
        elif source.kind == "durable":
            self._commits.forget(step, source.made)

    def newest_whole(self, homes: list[str], generation: int, after: int) -> int:
        """Return the newest step after `after`, made in `generation`, whose snapshots all nodes have in memory; -1:
        none that counts. `homes`: the node of each rank that took part, in order."""
        found: dict[int, int] = defaultdict(int)
        for rank, node in enumerate(homes):
            for step in {s for r, s, made in self.held.get(node, ()) if r == rank and made == generation}:
                found[step] += 1
        whole = [step for step, count in found.items() if step > after and count == len(homes)]
        return max((step for step in whole if self._lineage.counts(step, generation)), default=-1)
