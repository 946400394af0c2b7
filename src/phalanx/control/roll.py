"""Who of a generation's crew is still in its groups, and what those that have left them hold. It follows from the rest
of the state and is no part of it: kept, so that a decision about 100,000 workers need not look at each of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import compress

from phalanx.control.membership import Worker
from phalanx.control.messages import Form
from phalanx.control.sources import Copy


class Roll:
    """Of `form`: nobody has left yet."""

    def __init__(self, form: Form):
        self.left = set(form.crew.values())  # workers that are there, and have not parked
        self.parked: dict[int, Copy | None] = {}  # workers that are there, and have
        self.copies: Counter[Copy | None] = Counter()  # of those
        self._form = form
        at = Counter(dict.fromkeys(form.places, form.ranks_per_place))
        if len(form.crew) < at.total():
            at = Counter(rank // form.ranks_per_place for rank in form.crew)
        self._at = {place: at[place] for place in sorted(form.places, key=form.places.__getitem__)}  # of `left`
        self.crew_nodes = tuple(map(form.places.__getitem__, self._at))

    @staticmethod
    def of(form: Form, workers: Mapping[int, Worker]) -> Roll:
        """Called from what the state says."""
        roll = Roll(form)
        for rank, worker in form.crew.items():
            found = workers.get(worker)
            if found is None:
                roll.lose(rank, worker)
            elif found.parked >= form.generation:
                roll.park(rank, (worker,), found.copy)
        return roll

    def nodes(self) -> tuple[str, ...]:
        """That somebody is left on, in the order of names."""
        return tuple(compress(self.crew_nodes, self._at.values()))

    def park(self, rank: int, workers: Sequence[int], copy: Copy | None) -> None:
        """Those of one place, which has the rank; all of them were left."""
        self.left.difference_update(workers)
        self.parked.update(dict.fromkeys(workers, copy))
        self.copies[copy] += len(workers)
        self._at[rank // self._form.ranks_per_place] -= len(workers)

    def lose(self, rank: int, worker: int) -> None:
        if worker in self.left:
            self.left.discard(worker)
            self._at[rank // self._form.ranks_per_place] -= 1
        elif worker in self.parked:
            copy = self.parked.pop(worker)
            self.copies[copy] -= 1
            if not self.copies[copy]:
                del self.copies[copy]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Roll) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]
