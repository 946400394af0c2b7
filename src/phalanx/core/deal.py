"""Decide which replica computes which micro-batches of a step. This is a pure function of the job, of the replicas that
take part and of what they have computed already, so every rank works it out for itself.

A round is what the shard ranks of a replica compute in one pass of a micro-batch each: `shard` neighbouring
micro-batches. Shares are whole rounds and may be uneven."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from phalanx.core.job import Job

Shares = dict[int, tuple[int, ...]]  # micro-batches in order, by the number of the replica


@dataclass(frozen=True, slots=True)
class Deal:
    """The micro-batches of one step."""

    held: Shares  # computed already
    todo: Shares

    @property
    def replicas(self) -> list[int]:
        """Return the replicas that take part, in the order of the cross-replica groups."""
        return sorted(self.todo)

    @property
    def redo(self) -> bool:
        """Return whether a part of the step has been computed already."""
        return any(self.held.values())

    def whole(self, replica: int) -> tuple[int, ...]:
        """Return what the replica holds once it has computed its part."""
        return tuple(sorted(self.held[replica] + self.todo[replica]))


def deal(job: Job, replicas: Collection[int], held: Mapping[int, Collection[int]] | None = None) -> Deal:
    """Deal out what no replica holds, evenly to within one round. A replica keeps as much as possible of the share that
    it has at full strength: its samples are at hand, and an aligned share is one node of the exact tree."""
    have: Shares = {r: tuple(sorted((held or {}).get(r, ()))) for r in sorted(replicas)}
    width, taken = job.layout.shard, [i for share in have.values() for i in share]
    assert len(set(taken)) == len(taken) and len(taken) % width == 0, held
    missing = set(range(job.num_micro // width)) - {i // width for i in taken}
    full = job.num_micro // width // job.layout.replica
    own = {r: [i for i in range(r * full, (r + 1) * full) if i in missing] for r in have}
    each, more = divmod(len(missing), len(have))
    # One round more for those that hold nothing yet, then for those with most of their own, which need not move.
    longer = sorted(have, key=lambda r: (bool(have[r]), -len(own[r]), r))[:more]
    rounds = {r: own[r][: each + (r in longer)] for r in have}
    rest = sorted(missing.difference(*rounds.values()))
    for r in have:
        short = each + (r in longer) - len(rounds[r])
        rounds[r] += rest[:short]
        del rest[:short]
    todo = {r: tuple(i * width + j for i in sorted(rounds[r]) for j in range(width)) for r in have}
    return Deal(have, todo)
