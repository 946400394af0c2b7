"""The worlds of the replicas, each built, broken and rebuilt by itself. A world stands when all its workers have
reported Built, and is gone when all that are left have reported Parked. The gang decides what a broken world means for
the generation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import TypeVar

from phalanx.control import messages
from phalanx.control.desk import Desk
from phalanx.control.membership import Membership
from phalanx.control.messages import Command
from phalanx.control.policy import Policy
from phalanx.control.replica import Replica
from phalanx.control.sources import Copy, Lineage
from phalanx.control.staffing import Staff

T = TypeVar("T")


@dataclass
class Worlds:
    replicas: dict[int, Replica] = field(default_factory=dict)
    last: int = 0  # the number of the newest world

    def __post_init__(self) -> None:
        # Derived from the above, so that nobody has to search it.
        self.astir = {*self.among(self.replicas, "building", "leaving")}
        self.built = {*self.among(self.replicas, "built")}
        self.failing = {r for r, found in self.replicas.items() if found.failures}

    def bind(self, desk: Desk, members: Membership, policy: Policy, staff: Staff, active: dict[int, int]) -> None:
        """Connect the other parts of the gang. `active`: the worlds of the generation, by replica."""
        self._desk, self._members, self._policy, self._staff = desk, members, policy, staff
        self.aside = {r for r in self.built if self.replicas[r].world != active.get(r)}  # built, but not active

    def among(self, replicas: Iterable[int], *phases: str) -> list[int]:
        """Return those of the replicas whose world is in one of the phases, in order."""
        return sorted(r for r in replicas if self.replicas[r].phase in phases)

    def waiting(self, phase: str) -> set[int]:
        """Return the workers that worlds in a phase wait for."""
        return {w for r in self.among(self.astir, phase) for w in self.replicas[r].waiting}

    # -- building

    def build(self) -> None:
        """Build the worlds of replicas that have become whole."""
        for number in sorted(self._members.news):
            found = self.replicas.setdefault(number, Replica())
            if found.phase == "out" and self._desk.now_ns < found.again_ns:
                self._desk.look_after(found.again_ns - self._desk.now_ns)
                continue
            if found.phase == "out" and self._staff.is_replacing(found.nodes):
                continue  # the next node of a bad one is about to take over
            self._members.news.discard(number)
            if found.phase != "out":
                continue
            self.last += 1
            found.build(self.last, *self._members.crew(number))
            self._staff.patience.forget(found.crew.values())
            self.astir.add(number)
            self._desk.out += self._orders(number)
            if "build" not in self._desk.timers:
                self._desk.set("build", self._policy.form_ns)

    def hear_built(self, event: messages.Built) -> bool:
        """Record workers that are Built. Return whether their world stands now."""
        number, workers = self._about(event)
        found = self.replicas.get(number)
        if found is None or found.phase != "building" or found.world != event.world:
            return False
        found.waiting.difference_update(workers)
        if found.waiting:
            return False
        found.phase = "built"
        self.astir.discard(number)
        self.built.add(number)
        self.aside.add(number)
        self._staff.patience.forget(found.crew.values())
        return True

    def enter(self, numbers: tuple[int, ...]) -> None:
        """Note that these replicas take part in a generation; the others that are built stand aside."""
        self.aside = self.built.difference(numbers)
        for number in numbers:
            self.replicas[number].enter()

    # -- leaving

    def halt(self, number: int) -> bool:
        """Have all workers leave the world of a replica, because it is broken or no longer wanted. Return whether
        nobody is left in it."""
        found = self.replicas[number]
        found.leave(self._members.workers.keys() & found.crew.values())
        self.astir.add(number)
        self.built.discard(number)
        self.aside.discard(number)
        if found.waiting:
            self._desk.out += self._orders(number)
            if "leave" not in self._desk.timers:
                self._desk.set("leave", self._policy.park_ns)
        return not found.waiting

    def hear_parked(self, event: messages.Parked) -> tuple[int, list[int]]:
        """Record the state of workers that have left their world. Return the replica and the workers; no workers: it is
        no news."""
        number, workers = self._about(event)
        found = self.replicas.get(number)
        if found is None or found.world != event.world or found.phase == "out":
            return number, []
        world, copy = event.world, Copy.of(event)
        for left in map(self._members.workers.__getitem__, workers):
            left.parked, left.copy = world, copy
        return number, workers

    def leave(self, number: int, workers: Iterable[int]) -> bool:
        """Take workers out of the world of a replica. Return whether they were the last that it waited for."""
        found = self.replicas[number]
        found.waiting.difference_update(workers)
        return found.phase == "leaving" and not found.waiting

    def end(self, number: int) -> None:
        """Note that nobody is left in the world of a replica. It is rebuilt when all its ranks are there."""
        found = self.replicas[number]
        found.phase, found.waiting = "out", set()
        self._fail(number)
        self.astir.discard(number)
        if number in self._members.whole:
            self._members.news.add(number)

    def forget(self, number: int) -> None:
        """Drop a replica that was let go, and its world. What its remaining workers hold stays known."""
        found = self.replicas.pop(number, None)
        if found and found.parted >= 0:
            for worker in self._members.workers.keys() & found.crew.values():
                self._members.workers[worker].copy = found.copy
        for some in (self.astir, self.built, self.aside, self.failing):
            some.discard(number)

    # -- failures

    def _fail(self, number: int) -> None:
        found = self.replicas[number]
        found.failures += 1
        self.failing.add(number)
        found.again_ns = self._desk.now_ns + self._policy.pause_before(found.failures)

    def fail_to_join(self, numbers: Iterable[int], since_ns: int) -> None:
        """Hold back replicas that have stopped the others in vain since `since_ns`: the others train many times as long
        before the next attempt."""
        now_ns = self._desk.now_ns
        for number in numbers:
            self._fail(number)
            found = self.replicas[number]
            if found.again_ns > now_ns:
                wait_ns = min(self._policy.deaths_ns, (now_ns - since_ns) << min(found.failures, 10))
                found.again_ns = max(found.again_ns, now_ns + wait_ns)

    def succeed(self, worlds: dict[int, int]) -> None:
        """Forgive the failures of replicas that took part in a step, unless they have failed since."""
        for number in self.failing & worlds.keys():
            found = self.replicas[number]
            if found.phase == "built" and found.world == worlds[number]:
                found.failures = 0
                self.failing.discard(number)

    # -- what they are told, and where they are

    def outstanding(self) -> list[Command]:
        return [order for number in sorted(self.astir) for order in self._orders(number)]

    def _orders(self, number: int) -> list[Command]:
        """Return the commands that tell each node which of its workers build the world, or leave it."""
        found = self.replicas[number]
        world, waiting = found.world, found.waiting
        if found.phase == "leaving":
            crews = self._by_node(number, found.crew.values())
            left = [(node, [worker for worker in crew if worker in waiting]) for node, crew in crews]
            return [messages.Halt(node, world, tuple(crew)) for node, crew in left if crew]
        return [messages.Build(node, number, world, crew) for node, crew in self.crews(number, waiting).items()]

    def crews(self, number: int, workers: set[int]) -> dict[str, dict[int, int]]:
        """Group the given workers of a replica by node, then by rank."""
        crews = {}
        for node, there in self._by_node(number, self.replicas[number].crew.items()):
            crew = dict(there)
            if not workers.issuperset(crew.values()):
                crew = {rank: worker for rank, worker in crew.items() if worker in workers}
            if crew:
                crews[node] = crew
        return crews

    def _by_node(self, number: int, values: Iterable[T]) -> Iterator[tuple[str, Iterator[T]]]:
        """Yield each node of a replica with its part of some values, one value for each rank."""
        per, values = self._members.ranks_per_place, iter(values)
        first = number * self._members.replica_size % per  # the replica may have only part of its first place
        for node in self.replicas[number].nodes:
            yield node, islice(values, per - first)
            first = 0

    def homes(self, number: int, nodes: Iterable[str] | None = None) -> Iterator[str]:
        """Return the node of each rank of a replica, in order, including ranks that are gone. `nodes`: the nodes that
        it had; None: those that it has."""
        size, per = self._members.replica_size, self._members.ranks_per_place
        nodes = self.replicas[number].nodes if nodes is None else nodes
        first = number * size % per  # the replica may have only part of its first place
        return islice(chain.from_iterable(map(repeat, nodes, repeat(per))), first, first + size)

    def nodes(self, numbers: Iterable[int]) -> set[str]:
        return {name for number in numbers for name in self.replicas[number].nodes}

    def unsaid(self) -> list[int]:
        """Return the replicas that have parted without a state common to all their ranks. Some ranks may hold one, and
        report it when their world is halted."""
        if self._members.replica_size == 1:
            return []
        return [r for r in sorted(self.built) if self.replicas[r].parted >= 0 and self.replicas[r].copy is None]

    def up_to_date(self, lineage: Lineage) -> set[int]:
        """Return the replicas that stand and hold the last step."""
        if not lineage.certain:
            return set()
        replicas, committed = self.replicas, lineage.committed
        parted = [r for r in self.built if replicas[r].parted >= 0]
        steps = lineage.steps_of([replicas[r].copy for r in parted])
        return {r for r, step in zip(parted, steps, strict=True) if step == committed}

    def _about(self, event: messages.Built | messages.Parked) -> tuple[int, list[int]]:
        """Return the replica that a report is about, and its workers. Each node speaks for its own workers; those that
        should be gone are ended."""
        known, staff = self._members.workers, self._staff
        workers: list[int] = []
        for at, node in enumerate(event.nodes):
            if staff.counts(node, event.incarnations[at]):
                some = event.workers[at]
                for worker in some:
                    if worker not in known or known[worker].node != node:
                        staff.end_strangers(node, some)
                        some = tuple([w for w in some if w in known and known[w].node == node])
                        break
                workers += some
        return known[workers[0]].rank // self._members.replica_size if workers else -1, workers
