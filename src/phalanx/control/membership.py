"""Who is there, and who stands where: nodes, the places of the gang that they fill, and the workers on them.

A place is as many neighbouring ranks as a node has. It is filled by a node, may have a next one that prepares to take
over, and, until the gang has started without it, the old one that was taken over from. A node without a place is a
spare.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from phalanx.control.sources import Copy


@dataclass(slots=True)
class Node:
    incarnation: int
    domain: str
    address: str = ""
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
    parked: int = -1  # the generation that it has left for good
    copy: Copy | None = None  # as of then


@dataclass(slots=True)
class Seat:
    node: str
    workers: dict[int, int] = field(default_factory=dict)  # by rank


@dataclass(slots=True)
class Place:
    now: Seat | None = None
    next: Seat | None = None
    old: Seat | None = None
    domain: str = ""  # of the last that filled it

    def seats(self) -> list[Seat]:
        return [seat for seat in (self.now, self.next, self.old) if seat]


@dataclass(slots=True)
class Membership:
    replica_size: int
    ranks_per_place: int
    wanted: list[int] = field(default_factory=list)  # replicas
    nodes: dict[str, Node] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    workers: dict[int, Worker] = field(default_factory=dict)
    last_worker: int = 0
    # What follows from the above, so that nobody has to look through it.
    alive: int = 0  # nodes
    spares: set[str] = field(default_factory=set)
    down: dict[int, int] = field(default_factory=dict)  # wanted replica -> its ranks without a worker that is up
    whole: set[int] = field(default_factory=set)  # wanted replicas that lack none
    vacant: set[int] = field(default_factory=set)  # places without a node
    missing: set[int] = field(default_factory=set)  # ranks without a worker, in places that have a node

    # -- replicas and places

    def want(self, replicas: list[int]) -> None:
        self.wanted = sorted(replicas)
        self.down = dict.fromkeys(self.wanted, 0)
        self.whole, self.vacant, self.missing = set(self.wanted), set(), set()
        for replica in self.wanted:
            first = replica * self.replica_size
            for place in range(self.place_of(first), self.place_of(first + self.replica_size - 1) + 1):
                self.places.setdefault(place, Place())
        for place in self.places:
            self._tally(place, 1)

    def place_of(self, rank: int) -> int:
        return rank // self.ranks_per_place

    def ranks(self, place: int) -> list[int]:
        """Of wanted replicas."""
        first = place * self.ranks_per_place
        return [r for r in range(first, first + self.ranks_per_place) if r // self.replica_size in self.down]

    def replicas_at(self, place: int) -> set[int]:
        return {rank // self.replica_size for rank in self.ranks(place)}

    # -- nodes

    def join(self, name: str, incarnation: int, domain: str, address: str = "") -> None:
        self.nodes[name] = Node(incarnation, domain, address)
        self.alive += 1
        self.spares.add(name)

    def lose(self, name: str) -> dict[int, int]:
        """The workers that are gone with it, by rank."""
        node = self.nodes[name]
        node.dead = True
        self.alive -= 1
        self.spares.discard(name)
        if node.place < 0:
            return {}
        place = self.places[node.place]
        which = next(w for w in ("now", "next", "old") if (seat := getattr(place, w)) and seat.node == name)
        return self.clear(node.place, which)

    def sit(self, place: int, name: str, which: str = "now") -> None:
        assert name in self.spares, (place, name)
        with self._changing(place):
            setattr(self.places[place], which, Seat(name))
        self.places[place].domain = self.nodes[name].domain
        self.nodes[name].place = place
        self.spares.discard(name)

    def clear(self, number: int, which: str) -> dict[int, int]:
        """Take a node off a place. Returns its workers by rank, which are gone. If it was the one that fills the place,
        the old or the next one does from now on."""
        place = self.places[number]
        with self._changing(number):
            seat = getattr(place, which)
            setattr(place, which, None)
            if which == "now" and (other := "old" if place.old else "next" if place.next else ""):
                place.now = getattr(place, other)
                setattr(place, other, None)
        node = self.nodes[seat.node]
        node.place = -1
        if not node.dead:
            self.spares.add(seat.node)
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
        with self._changing(number):
            place.old, place.now, place.next = place.now, place.next, None

    # -- workers

    def launch(self, place: int, ranks: list[int], which: str = "now") -> dict[int, int]:
        seat = getattr(self.places[place], which)
        new = dict(zip(ranks, range(self.last_worker + 1, self.last_worker + 1 + len(ranks)), strict=True))
        self.last_worker += len(ranks)
        with self._changing(place):
            for rank, worker in new.items():
                self.workers[worker] = Worker(rank, seat.node)
            seat.workers.update(new)
        return new

    def up(self, workers: list[int]) -> None:
        """Workers on one node."""
        with self._changing(self.place_of(self.workers[workers[0]].rank)):
            for worker in workers:
                self.workers[worker].up = True

    def remove(self, worker: int) -> Worker:
        found = self.workers[worker]
        number = self.place_of(found.rank)
        with self._changing(number):
            for seat in self.places[number].seats():
                if seat.workers.get(found.rank) == worker:
                    del seat.workers[found.rank]
            del self.workers[worker]
        return found

    def crew(self, replicas: list[int]) -> tuple[dict[int, int], dict[int, str]]:
        """Of whole replicas: rank -> worker, and place -> node."""
        crew, places, chosen, size = {}, {}, set(replicas), self.replica_size
        for number, place in self.places.items():
            for rank, worker in place.now.workers.items() if place.now else ():
                if rank // size in chosen:
                    crew[rank] = worker
                    places[number] = self.workers[worker].node
        return crew, places

    # -- counting

    @contextmanager
    def _changing(self, place: int) -> Iterator[None]:
        self._tally(place, -1)
        yield
        self._tally(place, 1)

    def _tally(self, number: int, sign: int) -> None:
        seat, ranks = self.places[number].now, self.ranks(number)
        for rank in ranks:
            worker = seat.workers.get(rank) if seat else None
            if worker is None or not self.workers[worker].up:
                replica = rank // self.replica_size
                self.down[replica] += sign
                (self.whole.discard if self.down[replica] else self.whole.add)(replica)
        self.vacant.discard(number)
        self.missing.difference_update(ranks)
        if sign > 0 and ranks and seat is None:
            self.vacant.add(number)
        elif sign > 0 and seat:
            self.missing.update(rank for rank in ranks if rank not in seat.workers)
