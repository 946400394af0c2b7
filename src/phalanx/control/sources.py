"""Where state is, and which state counts. A state is a step and the generation that made it. When a gang goes back to a
step, the later steps that were made before are abandoned, even if copies of them turn up later."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from phalanx.control.messages import Parked, Parted, Source

KEPT_ENDS = 64


@dataclass(frozen=True, slots=True)
class Copy:
    """The state that a parked worker holds (see Parked)."""

    step: int
    prepared: int
    made: int

    @staticmethod
    def of(event: Parked | Parted) -> Copy | None:
        return Copy(event.step, event.prepared, event.made) if event.step >= 0 else None


@dataclass(slots=True)
class Lineage:
    """Which steps were committed, and which of them were abandoned."""

    ends: dict[int, int] = field(default_factory=dict)  # a recent generation -> the last step that it committed
    branches: list[tuple[int, int]] = field(default_factory=list)  # generation, step: it abandoned later ones
    committed: int = 0  # the last step known to be committed
    certain: bool = True  # no later step can have been committed

    def commit(self, step: int) -> None:
        self.committed = max(self.committed, step)

    def end(self, generation: int) -> None:
        self.ends[generation] = self.committed
        for old in sorted(self.ends)[:-KEPT_ENDS]:
            del self.ends[old]

    def branch(self, generation: int, step: int) -> None:
        self.branches = [b for b in self.branches if b[1] < step] + [(generation, step)]

    def resume(self, generation: int, step: int) -> bool:
        """Continue from a step. Return whether later ones are abandoned, or may be."""
        branches = step < self.committed or not self.certain
        if branches:
            self.branch(generation, step)
        self.committed, self.certain = step, True
        return branches

    def counts(self, step: int, made: int) -> bool:
        return all(made >= generation or step <= last for generation, last in self.branches)

    def step_of(self, copy: Copy | None) -> int:
        """Return the step that a copy has, or can reach with what it has prepared; -1: none that counts."""
        if copy is None:
            return -1
        if copy.prepared <= self.ends.get(copy.made, -1) and self.counts(copy.prepared, copy.made):
            return copy.prepared
        return copy.step if self.counts(copy.step, copy.made) else -1

    def steps_of(self, copies: Iterable[Copy | None]) -> Iterator[int]:
        """Yield the step of each copy. Most copies are alike, so equal neighbours are looked at once."""
        last, step = None, -1
        for copy in copies:
            if copy is not last and copy != last:
                last, step = copy, self.step_of(copy)
            yield step


@dataclass(slots=True)
class Stocks:
    """Everything that a gang could continue from."""

    replica_size: int
    own: dict[int, tuple[str, int]]  # by rank: the node that it is on, and the step that it has; -1: none
    live: dict[int, dict[int, Source]]  # step -> rank -> the worker that has it
    held: dict[int, dict[int, list[tuple[str, int, int]]]]  # coordinate -> step -> node, rank, generation
    durable: list[tuple[int, int]]  # step, generation; first what the run began from
    memories: dict[str, str]  # node -> the address of its memory

    def newest(self, limit: int | None) -> tuple[int, dict[int, Source]]:
        """Return the last step, up to `limit`, that all ranks can have, and the sources for those that lack it."""
        steps = self.live.keys() | {step for step, _ in self.durable}
        steps |= {step for found in self.held.values() for step in found}
        for step in sorted((s for s in steps if limit is None or s <= limit), reverse=True):
            sources = self.at(step)
            if sources is not None:
                return step, sources
        raise AssertionError("what the run began from is always there")

    def at(self, step: int) -> dict[int, Source] | None:
        """Return a source for each rank that lacks a step; None: one of them cannot have it. The best source comes
        first: a worker, the node's own memory, another node's, a checkpoint, what the run began from."""
        size, live = self.replica_size, self.live.get(step, {})
        holders: dict[int, list[int]] = defaultdict(list)  # coordinate -> ranks
        for rank in sorted(live):
            holders[rank % size].append(rank)
        begin, *checkpoints = self.durable
        made = max((generation for known, generation in checkpoints if known == step), default=-1)
        sources = {}
        for rank, (node, has) in self.own.items():
            if has == step:
                continue
            if found := holders.get(rank % size):
                next_one = found[bisect(found, rank) % len(found)]  # ranks of one coordinate ask different ones
                sources[rank] = live[next_one]
            elif kept := self.held.get(rank % size, {}).get(step):
                name, whose, at = min(kept, key=lambda copy: (copy[0] != node, copy[1] < rank, copy))
                sources[rank] = Source("memory", name, whose, at, self.memories.get(name, ""))
            elif made >= 0:
                sources[rank] = Source("durable", made=made)
            elif begin[0] == step:
                sources[rank] = Source("start", made=begin[1])
            else:
                return None
        return sources
