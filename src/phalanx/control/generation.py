"""One generation of the gang: who is in it, who has left it, and what is waited for."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.control.membership import Membership
from phalanx.control.messages import Form, Parked, Ready
from phalanx.control.roll import Roll
from phalanx.control.sources import Copy


@dataclass
class Generation:
    number: int = 0
    form: Form | None = None
    ran: bool = False  # Start was said in it
    stepped: bool = False  # it is known to have committed a step
    waiting: set[int] = field(default_factory=set)  # workers whose Ready or Parked is awaited
    quiet: bool = False  # halting: they stop after a step, by themselves
    pausing: str = ""  # why Pause was said
    doomed: set[int] = field(default_factory=set)  # members that are being killed, until their end is confirmed
    over: str = ""  # how it is known that no member can commit another step: acknowledged, proven, or its lease ended
    digests: dict[int, str] = field(default_factory=dict)  # of those that are Ready
    agreed: dict[int, str] = field(default_factory=dict)  # coordinate -> the first of them
    disputed: set[int] = field(default_factory=set)  # coordinates that have another one too

    def bind(self, members: Membership) -> None:
        self._members = members
        self.roll = Roll.of(self.form, members.workers) if self.form else None

    def begin(self, form: Form) -> None:
        self.number, self.form, self.roll = form.generation, form, Roll(form)
        self.ran = self.stepped = self.quiet = False
        self.pausing = self.over = ""
        self.doomed = set()
        self.waiting = set(self.roll.left)
        self.digests, self.agreed, self.disputed = {}, {}, set()

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes of its crew."""
        assert self.roll
        return self.roll.crew_nodes

    @property
    def ranks(self) -> int:
        return len(self.form.crew) if self.form else 0

    def lose(self, workers: dict[int, int]) -> bool:
        """By rank. Whether one of them was in the generation."""
        self.waiting.difference_update(workers.values())
        if self.form is None or not any(self.form.crew.get(rank) == w for rank, w in workers.items()):
            return False
        assert self.roll
        for rank, worker in workers.items():
            self.roll.lose(rank, worker)
        return True

    def park(self, event: Parked) -> list[int]:
        """The ranks that leave the generation with this."""
        assert self.roll
        copy = Copy(event.step, event.prepared, event.made) if event.step >= 0 else None
        workers, left = self._members.workers, self.roll.left
        new, ranks = [], []
        for worker in event.workers:
            if worker in left and (found := workers[worker]).node == event.node:
                found.parked, found.copy = self.number, copy
                new.append(worker)
                ranks.append(found.rank)
        if new:
            self.over = self.over or "acknowledged"
            self.waiting.difference_update(new)
            self.roll.park(ranks[0], new, copy)
        return ranks

    def ready(self, event: Ready) -> bool:
        """Whether all are, with this."""
        workers, size, agreed = self._members.workers, self._members.replica_size, self.agreed
        new = [worker for worker in event.digests if worker in self.waiting]
        for worker in new:
            self.digests[worker] = digest = event.digests[worker]
            coordinate = workers[worker].rank % size
            if agreed.setdefault(coordinate, digest) != digest:
                self.disputed.add(coordinate)
        self.waiting.difference_update(new)
        return not self.waiting

    def wrong(self, coordinate: int) -> list[int]:
        """Workers whose state is not that of the same coordinate in other replicas. The majority is right; without one,
        those that kept what they had."""
        assert self.form
        said: dict[str, list[int]] = {}
        for replica in self.form.replicas:
            rank = replica * self._members.replica_size + coordinate
            said.setdefault(self.digests[self.form.crew[rank]], []).append(rank)
        kept = {digest: sum(rank not in self.form.sources for rank in ranks) for digest, ranks in said.items()}
        right = max(said, key=lambda digest: (len(said[digest]), kept[digest], -said[digest][0]))
        return [self.form.crew[rank] for digest, ranks in said.items() if digest != right for rank in ranks]

    def last_vote(self) -> int | None:
        """The step that all who are left have voted for; None: nobody is left. A step counts when all of them have
        voted for it, as those that are gone may have seen it committed. If one has not, nobody can have."""
        assert self.form and self.roll
        if not self.roll.copies:
            return None
        return min(c.prepared if c and c.made == self.number else self.form.step for c in self.roll.copies)
