"""Who is there, and who stands where: nodes, the places of the gang that they fill, and the workers on them.

A place is as many neighbouring ranks as a node has. A node fills it. It may also have a next node, which prepares to
take over, and an old one, which was taken over from and stays until the gang has started without it. A node without a
place is a spare.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from phalanx.control.messages import Fence, Source
from phalanx.control.sources import Copy


@dataclass(slots=True)
class Node:
    incarnation: int
    domain: str
    address: str = ""
    memory: str = ""
    dead: bool = False
    drained: bool = False
    fault: str = ""  # why it should be replaced, and the rung of the ladder that this is
    rung: int = -1
    deaths: list[int] = field(default_factory=list)  # when workers died on it
    place: int = -1


@dataclass(slots=True)
class Worker:
    rank: int
    node: str
    up: bool = False
    parked: int = -1  # the world that it has left for good
    copy: Copy | None = None  # as of then
    misses: int = 0  # times that it did not get its state
    port: int = 0  # where it gives its state to others


@dataclass(slots=True)
class Seat:
    node: str
    workers: dict[int, int] = field(default_factory=dict)  # by rank, in order


@dataclass(slots=True)
class Place:
    now: Seat | None = None
    next: Seat | None = None
    old: Seat | None = None
    domain: str = ""  # of the last that filled it

    def seats(self) -> list[Seat]:
        return [seat for seat in (self.now, self.next, self.old) if seat]


def top_of(domain: str) -> str:
    """Return the top level of a domain."""
    return domain.partition(".")[0]


@dataclass
class Membership:
    replica_size: int
    ranks_per_place: int
    wanted: list[int] = field(default_factory=list)  # replicas
    nodes: dict[str, Node] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    workers: dict[int, Worker] = field(default_factory=dict)
    last_worker: int = 0
    homes: dict[str, int] = field(default_factory=dict)  # node -> the place that it fills if that is vacant
    # Derived from the above, so that nobody has to search it.
    alive: int = field(init=False)  # nodes
    spares: set[str] = field(init=False)
    fit: tuple[list[str], list[str]] = field(init=False)  # spares that are not drained: without a fault, with one
    fit_in: tuple[dict[str, set[str]], dict[str, set[str]]] = field(init=False)  # by the top level of their domain
    down: dict[int, int] = field(init=False)  # wanted replica -> its ranks without a worker that is up
    whole: set[int] = field(init=False)  # wanted replicas that lack none
    news: set[int] = field(init=False)  # those of them that nobody has looked at since they became whole
    vacant: set[int] = field(init=False)  # places without a node
    short: set[int] = field(init=False)  # places that have a node, and a rank without a worker
    ready: set[int] = field(init=False)  # ranks of wanted replicas whose worker is up
    paired: set[int] = field(init=False)  # places where two nodes stand

    def __post_init__(self) -> None:
        there = {name for name, node in self.nodes.items() if not node.dead}
        self.alive = len(there)
        self.spares, self.fit, self.fit_in = set(), ([], []), ({}, {})
        for name in there:
            if self.nodes[name].place < 0:
                self._free(name)
        self.want(self.wanted)

    # -- replicas and places

    def want(self, replicas: list[int]) -> None:
        self.wanted = sorted(replicas)
        self.down = dict.fromkeys(self.wanted, self.replica_size)
        self.whole, self.news, self.vacant, self.short, self.ready = set(), set(), set(), set(), set()
        self._first_vacant = list[int]()
        for replica in self.wanted:
            for place in self._places_of(replica):
                self.places.setdefault(place, Place())
        for place in self.places:
            self._count(place)
        self.paired = {number for number, place in self.places.items() if place.next or place.old}

    def place_of(self, rank: int) -> int:
        return rank // self.ranks_per_place

    def replica_of(self, rank: int) -> int:
        return rank // self.replica_size

    def ranks(self, place: int) -> Sequence[int]:
        """Return the ranks of a place that belong to wanted replicas."""
        first, size = place * self.ranks_per_place, self.replica_size
        ranks = range(first, first + self.ranks_per_place)
        if first // size == ranks[-1] // size:
            return ranks if first // size in self.down else ()
        return [r for r in ranks if r // size in self.down]

    def _ranks_of(self, replica: int) -> range:
        return range(replica * self.replica_size, (replica + 1) * self.replica_size)

    def _places_of(self, replica: int) -> range:
        ranks = self._ranks_of(replica)
        return range(self.place_of(ranks[0]), self.place_of(ranks[-1]) + 1)

    def replicas_at(self, place: int) -> set[int]:
        return {rank // self.replica_size for rank in self.ranks(place)}

    # -- nodes

    def join(self, name: str, incarnation: int, domain: str, address: str = "", memory: str = "") -> None:
        """Add a node. Its last incarnation leaves two things behind: whether it is drained, and when workers died on
        it."""
        old = self.nodes.get(name)
        self._take(name)
        self.nodes[name] = Node(incarnation, domain, address, memory)
        if old:
            self.nodes[name].drained, self.nodes[name].deaths = old.drained, old.deaths
        self.alive += 1
        self._free(name)

    def lose(self, name: str) -> dict[int, int]:
        """Count a node as dead. Return the workers that are gone with it, by rank."""
        node = self.nodes[name]
        node.dead = True
        self.alive -= 1
        self._take(name)
        if node.place < 0:
            return {}
        place = self.places[node.place]
        which = next(w for w in ("now", "next", "old") if (seat := getattr(place, w)) and seat.node == name)
        return self.clear(node.place, which)

    def fences(self, nodes: Mapping[str, int]) -> list[Fence]:
        """Return a Fence for each of the nodes, given by incarnation, that was given up: they are back, and may not
        have been told."""
        known = [(name, incarnation, self.nodes.get(name)) for name, incarnation in nodes.items()]
        return [
            Fence(name, number) for name, number, node in known if node and node.dead and node.incarnation == number
        ]

    def mark(self, name: str, fault: str = "", rung: int = -1, drained: bool | None = None) -> None:
        """Note that a node has a fault, or whether it is drained."""
        node, is_spare = self.nodes[name], name in self.spares
        if is_spare:
            self._take(name)
        if fault:
            node.fault, node.rung = fault, rung
        if drained is not None:
            node.drained = drained
        if is_spare:
            self._free(name)

    def _free(self, name: str) -> None:
        node = self.nodes[name]
        if name in self.spares:
            return
        self.spares.add(name)
        if not node.drained:
            which = 1 if node.fault else 0
            insort(self.fit[which], name)
            self.fit_in[which].setdefault(top_of(node.domain), set()).add(name)

    def _take(self, name: str) -> None:
        if name not in self.spares:
            return
        self.spares.discard(name)
        node = self.nodes[name]
        if not node.drained:
            which = 1 if node.fault else 0
            del self.fit[which][bisect_left(self.fit[which], name)]
            self.fit_in[which][top_of(node.domain)].discard(name)

    def sit(self, place: int, name: str, which: str = "now") -> None:
        """Put a spare on a place: on a vacant one (`now`), or as its next."""
        assert name in self.spares and (which == "next" or place in self.vacant), (place, name)
        found, node = self.places[place], self.nodes[name]
        setattr(found, which, Seat(name))
        found.domain, node.place = node.domain, place
        self._take(name)
        if which == "now":
            self.vacant.discard(place)
            self.short.add(place)
        else:
            self.paired.add(place)

    def clear(self, number: int, which: str) -> dict[int, int]:
        """Take a node off a place. Return its workers by rank, which are gone. If this node filled the place, the old
        or the next one does from now on."""
        place = self.places[number]
        seat = getattr(place, which)
        setattr(place, which, None)
        if which == "now" and (other := "old" if place.old else "next" if place.next else ""):
            place.now = getattr(place, other)
            setattr(place, other, None)
        if not (place.next or place.old):
            self.paired.discard(number)
        self._count(number)
        node = self.nodes[seat.node]
        node.place = -1
        if not node.dead:
            self._free(seat.node)
        for worker in seat.workers.values():
            del self.workers[worker]
        return dict(sorted(seat.workers.items()))

    def can_switch(self, number: int) -> bool:
        place = self.places[number]
        if place.next is None or place.old is not None:
            return False
        ranks = self.ranks(number)
        return len(place.next.workers) == len(ranks) and all(self.workers[w].up for w in place.next.workers.values())

    def switch(self, number: int) -> None:
        place = self.places[number]
        place.old, place.now, place.next = place.now, place.next, None
        self._count(number)

    # -- workers

    def launch(self, place: int, which: str = "now") -> tuple[str, dict[int, int]]:
        """Give every rank of a seat a worker. Return its node, and the new workers by rank."""
        seat: Seat = getattr(self.places[place], which)
        name, there, workers, last = seat.node, seat.workers, self.workers, self.last_worker
        new: dict[int, int] = {}
        for rank in self.ranks(place):
            if rank not in there:
                new[rank] = last = last + 1
                workers[last] = Worker(rank, name)
        self.last_worker = last
        seat.workers = dict(sorted({**there, **new}.items())) if there else new.copy()
        if which == "now":
            self.short.discard(place)
            self._shrink()
        return name, new

    def up(self, ports: dict[int, int]) -> None:
        """Note that workers on one node are up. `ports`: where they give their state to others."""
        for worker, port in ports.items():
            found = self.workers[worker]
            found.up, found.port = True, port
        self._count(self.place_of(self.workers[next(iter(ports))].rank))

    def source(self, worker: int) -> Source:
        """Return a worker's live state as a source."""
        found = self.workers[worker]
        return Source("live", found.node, worker, address=f"{self.nodes[found.node].address}:{found.port}")

    def remove(self, worker: int) -> Worker:
        found = self.workers[worker]
        number = self.place_of(found.rank)
        for seat in self.places[number].seats():
            if seat.workers.get(found.rank) == worker:
                del seat.workers[found.rank]
        del self.workers[worker]
        self._count(number)
        return found

    def crew(self, replica: int) -> tuple[dict[int, int], tuple[str, ...]]:
        """Return the crew of a whole replica, as rank -> worker, and its nodes."""
        crew: dict[int, int] = {}
        nodes: list[str] = []
        for number in self._places_of(replica):
            if seat := self.places[number].now:
                crew.update(seat.workers)
                nodes.append(seat.node)
        if len(crew) > self.replica_size:  # a place has ranks of other replicas too
            crew = {rank: crew[rank] for rank in self._ranks_of(replica)}
        return crew, tuple(nodes)

    def worker_at(self, rank: int) -> int:
        """Return the worker that fills a rank of a wanted replica; 0: none."""
        place = self.places[self.place_of(rank)] if self.replica_of(rank) in self.down else None
        return place.now.workers.get(rank, 0) if place and place.now else 0

    def nodes_of(self, workers: Iterable[int]) -> tuple[str, ...]:
        return tuple(sorted({self.workers[worker].node for worker in workers}))

    def name_ranks(self, workers: Iterable[int]) -> str:
        """Name the ranks of workers, the first few if there are many."""
        numbers = sorted(self.workers[worker].rank for worker in workers)
        shown = ", ".join(map(str, numbers[:8]))
        return f"ranks {shown}" if len(numbers) <= 8 else f"ranks {shown} and {len(numbers) - 8} more"

    def filling(self, coordinates: set[int]) -> Iterator[tuple[int, int]]:
        """Yield the ranks of some coordinates, in all replicas, with their workers. The worker of the node that fills a
        place comes before that of the old one."""
        if not self.places:
            return
        replicas = ((max(self.places) + 1) * self.ranks_per_place - 1) // self.replica_size + 1
        for rank in (r * self.replica_size + coordinate for r in range(replicas) for coordinate in sorted(coordinates)):
            place = self.places.get(self.place_of(rank))
            for seat in (place.now, place.old) if place else ():
                if seat and (worker := seat.workers.get(rank)):
                    yield rank, worker

    def first_vacant(self) -> int | None:
        """Return the vacant place with the lowest number."""
        heap = self._first_vacant
        while heap and heap[0] not in self.vacant:
            heappop(heap)
        return heap[0] if heap else None

    # -- counting

    def _count(self, number: int) -> None:
        """Bring the derived sets up to date after a change at a place."""
        seat, ranks, ready, workers = self.places[number].now, self.ranks(number), self.ready, self.workers
        filled = seat.workers if seat else {}
        for rank in ranks:
            worker = filled.get(rank, 0)
            is_up = worker > 0 and workers[worker].up
            if is_up != (rank in ready):
                self._turn(rank, is_up)
        self.vacant.discard(number)
        self.short.discard(number)
        if ranks and seat is None:
            self.vacant.add(number)
            heappush(self._first_vacant, number)
        elif not all(map(filled.__contains__, ranks)):
            self.short.add(number)
        self._shrink()

    def _shrink(self) -> None:
        """Replace sets that are empty: a set that was once large stays slow to iterate over."""
        self.short, self.vacant = self.short or set(), self.vacant or set()

    def _turn(self, rank: int, is_up: bool) -> None:
        """Note that a rank has a worker that is up, or has none any more."""
        replica = rank // self.replica_size
        self.down[replica] += -1 if is_up else 1
        (self.ready.add if is_up else self.ready.discard)(rank)
        if self.down[replica]:
            self.whole.discard(replica)
            self.news.discard(replica)
        else:
            self.whole.add(replica)
            self.news.add(replica)
