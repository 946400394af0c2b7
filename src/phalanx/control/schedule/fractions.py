"""Fractional GPUs, for small jobs that ask for a part of one. A job goes where it makes the fewest free GPUs useless
for expected jobs, weighted by how often they come (fragmentation gradient descent, USENIX ATC 2023).

A GPU has 1,000 parts. The free capacity of a host is useful for a kind of job as far as jobs of that kind can fill it:
as many as its CPUs and GPUs hold together. The published measure counts a whole GPU as useful if one such job fits on
it, and counts a host's GPUs even if its CPUs suffice for only one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

WHOLE = 1000


@dataclass(frozen=True, slots=True)
class Need:
    """`gpus` whole GPUs, or `parts` of one; restricted to `models`, if any are named."""

    cpus: int
    memory: int
    gpus: int
    parts: int
    models: frozenset[str] = frozenset()

    @property
    def total(self) -> int:
        return self.gpus * WHOLE if self.parts >= WHOLE else self.parts * bool(self.gpus)


@dataclass(slots=True)
class Host:
    cpus: int
    memory: int
    model: str
    left: list[int]  # parts of each GPU
    useless: int = 0


@dataclass
class Shares:
    """`kinds`: the expected needs, and how often each comes."""

    hosts: list[Host]
    kinds: list[tuple[Need, int]]
    scores: dict[Need, list[tuple[int, int] | None]] = field(default_factory=dict)
    known: dict[tuple[int, int, str, tuple[int, ...]], int] = field(default_factory=dict)  # a host's state -> useless

    def __post_init__(self) -> None:
        self.weight = sum(weight for _, weight in self.kinds)
        self.groups: dict[tuple[int, int], list[tuple[Need, int]]] = {}  # by GPUs and parts
        for need, weight in self.kinds:
            self.groups.setdefault((need.gpus, need.parts), []).append((need, weight * need.total))
        for host in self.hosts:
            host.useless = self.wasted(host.cpus, host.memory, host.model, host.left)

    def wasted(self, cpus: int, memory: int, model: str, left: list[int]) -> int:
        """Return the free capacity that is useless, weighted over all kinds."""
        state = (cpus, memory, model, tuple(sorted(left)))
        if (out := self.known.get(state)) is None:
            out = self.known[state] = self.weight * sum(left) - self._useful(cpus, memory, model, left)
        return out

    def _useful(self, cpus: int, memory: int, model: str, left: list[int]) -> int:
        out, whole = 0, left.count(WHOLE)
        for (gpus, parts), kinds in self.groups.items():
            most = whole // gpus if parts >= WHOLE else sum(each // parts for each in left)
            if not most:
                continue
            for need, value in kinds:
                if need.cpus > cpus or need.memory > memory or (need.models and model not in need.models):
                    continue
                out += value * (min(most, cpus // need.cpus) if need.cpus else most)
        return out

    def place(self, need: Need) -> tuple[int, list[int]] | None:
        """Take a place and return the host and its chosen GPUs. None: there is no room."""
        scores = self.scores.setdefault(need, [None] * len(self.hosts))
        best, at = None, -1
        for number, score in enumerate(scores):
            if score is None:
                score = scores[number] = self._score(self.hosts[number], need)
            if score[0] >= 0 and (best is None or score < best):
                best, at = score, number
        if best is None:
            return None
        host = self.hosts[at]
        chosen = self._chosen(host, need)[1]
        host.cpus -= need.cpus
        host.memory -= need.memory
        for gpu in chosen:
            host.left[gpu] -= min(need.parts, WHOLE)
        host.useless = self.wasted(host.cpus, host.memory, host.model, host.left)
        for each in self.scores.values():
            each[at] = None
        return at, chosen

    def _score(self, host: Host, need: Need) -> tuple[int, int]:
        """Return how much capacity becomes useless, and how much would be left; (-1, 0): it does not fit."""
        if host.cpus < need.cpus or host.memory < need.memory or (need.models and host.model not in need.models):
            return -1, 0
        room = host.left.count(WHOLE) >= need.gpus if need.parts >= WHOLE else max(host.left, default=0) >= need.parts
        if need.gpus and not room:
            return -1, 0
        # Shifted to stay positive: a job may also make less capacity useless than before.
        return self._chosen(host, need)[0] + OFFSET, sum(host.left) - need.total

    def _chosen(self, host: Host, need: Need) -> tuple[int, list[int]]:
        cpus, memory = host.cpus - need.cpus, host.memory - need.memory
        if not need.gpus:
            return self.wasted(cpus, memory, host.model, host.left) - host.useless, []
        if need.parts >= WHOLE:
            chosen = [gpu for gpu, left in enumerate(host.left) if left == WHOLE][: need.gpus]
            after = [0 if gpu in chosen else left for gpu, left in enumerate(host.left)]
            return self.wasted(cpus, memory, host.model, after) - host.useless, chosen
        tries = []
        for left in {left for left in host.left if left >= need.parts}:
            gpu = host.left.index(left)
            after = host.left.copy()
            after[gpu] -= need.parts
            tries.append((self.wasted(cpus, memory, host.model, after) - host.useless, left, gpu))
        more, _, gpu = min(tries)
        return more, [gpu]


OFFSET = 1 << 60


def expected(needs: Iterable[Need]) -> list[tuple[Need, int]]:
    """Count the kinds of GPU jobs that came, the most frequent first."""
    counts: dict[Need, int] = {}
    for need in needs:
        if need.gpus:
            counts[need] = counts.get(need, 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])
