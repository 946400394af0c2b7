"""The cluster as a tree: nodes in domains of several levels (an NVLink domain, a leaf, a pod, the site), with the
number of free GPUs in each domain. A gang goes to the lowest domain that can hold it, and to the fullest of those, so
that large domains stay whole for large gangs. Inside the domain it is spread over as few leaves as possible, replica by
replica.

Nodes are numbers here. Counts are kept per domain, so that the cost of a placement depends on the size of the gang.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence

from phalanx.control.schedule.asks import Ask

Spot = tuple[int, int]  # a node, and how many of its GPUs are used
Placing = list[list[Spot]]  # by replica
LOOKS = 16  # how many equally full nodes are compared
TOP = "cluster"


class Cells:
    """`paths`: the domain of each node at each of `levels`, the lowest first. `size`: GPUs per node. All nodes share
    one root."""

    def __init__(self, size: int, levels: Sequence[str], paths: Sequence[Sequence[str]]):
        self.size, self.levels = size, (*levels, TOP)
        self.num_nodes = len(paths)
        self.domain: list[list[int]] = []  # level -> node -> domain
        self.nodes_of: list[list[list[int]]] = []  # level -> domain -> nodes
        for at in range(len(levels)):
            # A domain is identified by its whole path: two pods may both have a leaf "S1".
            self._number([tuple(path[at:]) for path in paths])
        self._number([("",)] * len(paths))
        self.free = [0] * len(paths)
        self.closed = [True] * len(paths)  # nothing may start there
        self.counts = [
            [[0] * (size + 1) for _ in nodes] for nodes in self.nodes_of
        ]  # level, domain, free -> open nodes
        self.sorted: list[list[tuple[int, int]]] = [
            [(0, d) for d in range(len(n))] for n in self.nodes_of
        ]  # whole ones
        self.stacks: list[dict[int, None]] = [{} for _ in range(size + 1)]  # free -> open nodes, the latest change last
        self.used_racks: list[int] = []  # GPUs in use, per domain of the level with a power limit
        self.rack, self.rack_most = -1, 0
        for node in range(len(paths)):
            self.free[node] = size
            self.open(node)

    def _number(self, keys: Sequence[tuple[str, ...]]) -> None:
        known: dict[tuple[str, ...], int] = {}
        of = [known.setdefault(key, len(known)) for key in keys]
        nodes: list[list[int]] = [[] for _ in known]
        for node, domain in enumerate(of):
            nodes[domain].append(node)
        self.domain.append(of)
        self.nodes_of.append(nodes)

    def limit_racks(self, level: str, gpus: int) -> None:
        """Let at most `gpus` GPUs of a domain work at once."""
        self.rack, self.rack_most = self.levels.index(level), gpus
        self.used_racks = [0] * len(self.nodes_of[self.rack])

    # -- counting

    def _count(self, changes: Iterable[tuple[int, int, int]]) -> None:
        """Update the counts for nodes whose number of free GPUs changed, given as (node, old, new); -1: closed."""
        listed = list(changes)
        for node, old, new in listed:
            if old >= 0:
                del self.stacks[old][node]
            if new >= 0:
                self.stacks[new][node] = None
        for level, of in enumerate(self.domain):
            moved: Counter[int] = Counter()
            counts = self.counts[level]
            for node, old, new in listed:
                count = counts[of[node]]
                if old >= 0:
                    count[old] -= 1
                if new >= 0:
                    count[new] += 1
                if (old == self.size) != (new == self.size):
                    moved[of[node]] += 1 if new == self.size else -1
            order = self.sorted[level]
            for domain, by in moved.items():
                if by:
                    whole = counts[domain][self.size]
                    del order[bisect_left(order, (whole - by, domain))]
                    insort(order, (whole, domain))

    def take(self, spots: Iterable[Spot]) -> None:
        self._move((node, -gpus) for node, gpus in spots)

    def give(self, spots: Iterable[Spot]) -> None:
        self._move(spots)

    def _move(self, spots: Iterable[Spot]) -> None:
        changes = []
        for node, gpus in spots:
            old = self.free[node]
            self.free[node] = old + gpus
            assert 0 <= self.free[node] <= self.size, f"node {node} would have {self.free[node]} GPUs free"
            if not self.closed[node]:
                changes.append((node, old, old + gpus))
            if self.used_racks:
                self.used_racks[self.domain[self.rack][node]] -= gpus
        self._count(changes)

    def open(self, node: int) -> None:
        if self.closed[node]:
            self.closed[node] = False
            self._count([(node, -1, self.free[node])])

    def close(self, node: int) -> None:
        if not self.closed[node]:
            self.closed[node] = True
            self._count([(node, self.free[node], -1)])

    @property
    def free_gpus(self) -> int:
        return sum(free * count for free, count in enumerate(self.counts[-1][0]))

    @property
    def open_gpus(self) -> int:
        """Return the GPUs of all open nodes, used or not."""
        return self.size * sum(self.counts[-1][0])

    def with_room(self, level: int, domain: int, gpus: int) -> int:
        """Count the open nodes of a domain that have at least `gpus` GPUs free."""
        return sum(self.counts[level][domain][gpus:])

    # -- placing

    def place(self, ask: Ask, replicas: int) -> tuple[Placing, list[int]] | None:
        """Find places for `replicas` replicas and for the spares, without taking them. None: there is no room."""
        if ask.replica_gpus * replicas + ask.spares * ask.gpus > self.free_gpus or ask.gpus > self.size:
            return None
        if self.rack_most:
            return self._place_capped(ask, replicas)
        if replicas == 1 and ask.nodes == 1 and not ask.rest and not ask.spares and ask.gpus < self.size:
            node = self._fullest(ask.gpus)
            return None if node is None else ([[(node, ask.gpus)]], [])
        need = replicas * ask.nodes
        for level in range(len(self.levels)):
            for domain in self._holding(level, need + ask.spares, ask.gpus):
                found = self._inside(ask, replicas, level, domain)
                if found:
                    return found
                if level < len(self.levels) - 1:
                    break  # the other domains of this level are emptier, and no better
        return None

    def _fullest(self, gpus: int) -> int | None:
        """Return the node with the least room that suffices; among equals, one in the leaf with the fewest whole
        nodes."""
        for stack in self.stacks[gpus:]:
            if stack:
                counts, of = self.counts[0], self.domain[0]
                near = [node for node, _ in zip(reversed(stack), range(LOOKS), strict=False)]
                return min(near, key=lambda node: (counts[of[node]][self.size], -node))
        return None

    def _holding(self, level: int, nodes: int, gpus: int) -> Iterable[int]:
        """List the domains in which enough nodes have room, the tightest first."""
        if gpus == self.size:
            order = self.sorted[level]
            return (domain for _, domain in order[bisect_left(order, (nodes, -1)) :])
        having = ((self.with_room(level, d, gpus), d) for d in range(len(self.nodes_of[level])))
        return (domain for _, domain in sorted(pair for pair in having if pair[0] >= nodes))

    def _inside(self, ask: Ask, replicas: int, level: int, domain: int) -> tuple[Placing, list[int]] | None:
        leaves = self._leaves(level, domain, ask.gpus)
        unit = self.levels.index(ask.level) if ask.level else -1
        if unit > 0:
            leaves = self._grouped(leaves, unit)
        rooms = self._choose(leaves, ask, replicas, whole=bool(ask.level))
        if rooms is None:
            return None
        placing = self._seat(rooms, ask, replicas)
        taken = {node for replica in placing for node, _ in replica}
        if ask.rest and not self._add_rest(placing, ask, taken):
            return None
        spares = self._near(placing, ask, taken)
        return None if spares is None else (placing, spares)

    def _leaves(self, level: int, domain: int, gpus: int) -> list[list[int]]:
        """List the nodes of a domain that have room, by leaf."""
        of = self.domain[0]
        leaves = {of[node]: None for node in self.nodes_of[level][domain]} if level else {domain: None}
        out = []
        for leaf in leaves:
            if self.with_room(0, leaf, gpus):
                nodes = [n for n in self.nodes_of[0][leaf] if not self.closed[n] and self.free[n] >= gpus]
                nodes.sort(key=lambda n: self.free[n])
                out.append(nodes)
        return out

    def _grouped(self, leaves: list[list[int]], level: int) -> list[list[int]]:
        groups: dict[int, list[int]] = {}
        for nodes in leaves:
            groups.setdefault(self.domain[level][nodes[0]], []).extend(nodes)
        return list(groups.values())

    def _choose(self, leaves: list[list[int]], ask: Ask, replicas: int, whole: bool) -> list[list[int]] | None:
        """Choose nodes, leaf by leaf. Whole replicas go to leaves that can hold them, the roomiest leaf first and the
        last one as tight as possible; the remaining replicas are split over the fewest leaves."""
        chosen, rest = list[list[int]](), replicas
        left = sorted(leaves, key=len, reverse=True)
        while rest and left and len(left[0]) >= ask.nodes:
            tight = next((n for n in reversed(left) if len(n) // ask.nodes >= rest), None)
            nodes = tight if tight is not None else left[0]
            left.remove(nodes)
            fit = 1 if ask.spread and len(left) >= rest - 1 and rest > 1 else min(rest, len(nodes) // ask.nodes)
            chosen.append(nodes[: fit * ask.nodes])
            rest -= fit
            if len(nodes) > fit * ask.nodes:
                insort(left, nodes[fit * ask.nodes :], key=lambda n: -len(n))
        if not rest:
            return chosen
        if whole:
            return None
        need = rest * ask.nodes
        while need:
            if not left:
                return None
            tight = next((n for n in reversed(left) if len(n) >= need), left[0])
            left.remove(tight)
            chosen.append(tight[:need])
            need -= len(chosen[-1])
        return chosen

    def _seat(self, rooms: list[list[int]], ask: Ask, replicas: int) -> Placing:
        """Put neighbouring ranks on neighbouring nodes, depth first through the tree."""
        nodes = [node for room in rooms for node in room]
        size = ask.nodes
        return [[(node, ask.gpus) for node in nodes[r * size : (r + 1) * size]] for r in range(replicas)]

    def _add_rest(self, placing: Placing, ask: Ask, taken: set[int]) -> bool:
        for replica in placing:
            near = self.neighbour(replica[0][0], ask.rest, taken)
            if near is None:
                return False
            taken.add(near)
            replica.append((near, ask.rest))
        return True

    def _near(self, placing: Placing, ask: Ask, taken: set[int]) -> list[int] | None:
        """Choose spare nodes near the gang; None: there are too few."""
        out = list[int]()
        for _ in range(ask.spares):
            node = self.neighbour(placing[0][0][0], ask.gpus, taken)
            if node is None:
                return None
            taken.add(node)
            out.append(node)
        return out

    def neighbour(self, node: int, gpus: int, taken: set[int]) -> int | None:
        """Return the fullest open node with room, as low in the tree as possible."""
        for level, of in enumerate(self.domain):
            if self.with_room(level, of[node], gpus):
                near = (
                    n
                    for n in self.nodes_of[level][of[node]]
                    if self.free[n] >= gpus and not self.closed[n] and n not in taken
                )
                found = min(near, key=lambda n: (self.free[n], n), default=None)
                if found is not None:
                    return found
        return None

    def _place_capped(self, ask: Ask, replicas: int) -> tuple[Placing, list[int]] | None:
        """Like `place`, but use only racks that have power left; the nodes of the others are closed meanwhile."""
        most, of = self.rack_most, self.domain[self.rack]
        left = [most - used for used in self.used_racks]
        shut = [n for n in range(self.num_nodes) if not self.closed[n] and left[of[n]] < ask.gpus]
        rack_nodes: dict[int, int] = {}
        for node in range(self.num_nodes):
            if not self.closed[node] and left[of[node]] >= ask.gpus and self.free[node] >= ask.gpus:
                rack_nodes[of[node]] = rack_nodes.get(of[node], 0) + 1
                if rack_nodes[of[node]] * ask.gpus > left[of[node]]:
                    shut.append(node)
        for node in shut:
            self.close(node)
        limit, self.rack_most = self.rack_most, 0
        try:
            return self.place(ask, replicas)
        finally:
            self.rack_most = limit
            for node in shut:
                self.open(node)

    def copy(self) -> Cells:
        """Copy the counts, to try things out; the tree itself is shared."""
        other = Cells.__new__(Cells)
        other.__dict__.update(self.__dict__)
        other.free, other.closed = self.free.copy(), self.closed.copy()
        other.counts = [[count.copy() for count in level] for level in self.counts]
        other.sorted = [order.copy() for order in self.sorted]
        other.stacks = [stack.copy() for stack in self.stacks]
        other.used_racks = self.used_racks.copy()
        return other
