"""Shares of GPUs: small jobs that ask for a part of one. A job is placed where it makes the fewest free GPUs useless
for the jobs to be expected, weighed by how often they come (fragmentation gradient descent, USENIX ATC 2023).

A GPU has 1,000 parts. What is free on a node is useless for a kind of job if the job does not fit there at all; or, for
a share, on the GPUs with too little left; or, for whole GPUs, on those that are not whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

WHOLE = 1000


@dataclass(frozen=True, slots=True)
class Need:
    """`gpus` whole ones, or `parts` of one; on one of `models`, if they are named."""

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
    """`kinds`: how often each need comes, of those that are to be expected."""

    hosts: list[Host]
    kinds: list[tuple[Need, int]]
    scores: dict[Need, list[tuple[int, int] | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for host in self.hosts:
            host.useless = self.wasted(host.cpus, host.memory, host.model, host.left)

    def wasted(self, cpus: int, memory: int, model: str, left: list[int]) -> int:
        """What is free and useless, over all kinds."""
        total = sum(left)
        if not total:
            return 0
        whole, most, out = left.count(WHOLE), max(left), 0
        broken = total - whole * WHOLE
        below: dict[int, int] = {}
        for need, weight in self.kinds:
            parts = need.parts
            if need.cpus > cpus or need.memory > memory or (need.models and model not in need.models):
                out += weight * total
            elif parts >= WHOLE:
                out += weight * (broken if whole >= need.gpus else total)
            elif most < parts:
                out += weight * total
            else:
                if parts not in below:
                    below[parts] = sum(each for each in left if each < parts)
                out += weight * below[parts]
        return out

    def place(self, need: Need) -> tuple[int, list[int]] | None:
        """Take a place: the host, and which of its GPUs. None: there is no room."""
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
        """What becomes useless, and what would be left; (-1, 0): it does not fit."""
        if host.cpus < need.cpus or host.memory < need.memory or (need.models and host.model not in need.models):
            return -1, 0
        if need.gpus and not (host.left.count(WHOLE) >= need.gpus if need.parts >= WHOLE else max(host.left, default=0) >= need.parts):  # noqa: E501  # fmt: skip
            return -1, 0
        more, chosen = self._chosen(host, need)
        # Shifted, for a job may make less useless than before.
        return more + OFFSET, sum(host.left) - need.total if chosen or not host.left else OFFSET

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


def expected(needs: Iterable[Need], share_percent: int = 100) -> list[tuple[Need, int]]:
    """The kinds that make up so much of what came, the most frequent first."""
    counts: dict[Need, int] = {}
    for need in needs:
        if need.gpus:
            counts[need] = counts.get(need, 0) + 1
    total, seen, out = sum(counts.values()), 0, []
    for need, count in sorted(counts.items(), key=lambda item: -item[1]):
        if 100 * seen >= share_percent * total:
            break
        seen += count
        out.append((need, count * need.total))  # by GPUs, not by jobs: whole GPUs are the scarcer good
    return out
