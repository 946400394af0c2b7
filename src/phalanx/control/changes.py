"""Changes that wait for a step boundary: a node takes over from another, a drained node leaves, replicas join or are no
longer wanted. No step is interrupted for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.control import messages
from phalanx.control.desk import Desk
from phalanx.control.generation import Generation
from phalanx.control.membership import Membership
from phalanx.control.policy import Policy
from phalanx.control.staffing import Staff
from phalanx.control.worlds import Worlds


@dataclass
class Changes:
    most: int  # replicas that Scale may ask for
    rescaled: bool = False  # the gang may have other replicas than those that are wanted
    surplus: bool = False  # there may be workers of replicas that are not wanted

    def bind(
        self, desk: Desk, members: Membership, policy: Policy, staff: Staff, worlds: Worlds, gen: Generation
    ) -> None:
        self._desk, self._members, self._policy = desk, members, policy
        self._staff, self._worlds, self._gen = staff, worlds, gen

    def scale(self, event: messages.Scale) -> bool:
        """Set how many replicas are wanted. Keep those that take part first, then those that are whole."""
        members, active = self._members, self._gen.worlds
        count = max(self._policy.min_replicas, min(event.replicas, self.most))
        best = sorted(members.wanted, key=lambda r: (r not in active, members.down[r] > 0, r))
        others = [r for r in range(self.most) if r not in members.wanted]
        members.want((best + others)[:count])
        self._staff.why.append((-1, f"{count} replicas are wanted"))
        self.rescaled = self.surplus = True
        return True

    def why_pause(self) -> str:
        """Return why a step boundary is wanted; "": it is not."""
        members, active, now_ns = self._members, self._gen.worlds, self._desk.now_ns
        for name in sorted(self._staff.leaving):
            place = members.nodes[name].place
            if members.can_switch(place):
                return f"place {place} has a new node"
            if self._staff.can_let_go(name, list(active)):
                return f"node {name} is drained"
        if self.rescaled and any(r not in members.down for r in active):
            return f"{len(members.wanted)} replicas are wanted"
        replicas = self._worlds.replicas
        back = sorted(r for r in self._worlds.aside if r in members.down and not self._leaves(r))
        late = [replicas[r].again_ns for r in back if replicas[r].again_ns > now_ns]
        back = [r for r in back if replicas[r].again_ns <= now_ns]
        if late and not back:
            self._desk.look_after(min(late) - now_ns)
        return f"replicas {back} are whole again" if back else ""

    def _leaves(self, replica: int) -> bool:
        """Return whether a node of the replica is drained."""
        nodes = self._members.nodes
        return any(nodes[name].drained for name in self._worlds.replicas[replica].nodes)

    def take_over(self, active: dict[int, int]) -> Iterator[int]:
        """Let the next node of a place take over where it is ready, but not from replicas that are in a step. Yield the
        replicas there that have a world: they must rebuild it."""
        members = self._members
        for name in sorted(self._staff.leaving):
            old = members.nodes[name]
            place = members.places[old.place]
            if not members.can_switch(old.place):
                continue
            assert place.now
            there = members.replicas_at(old.place)
            there |= {members.replica_of(rank) for rank in place.now.workers}  # not wanted now, and perhaps later
            if not active.keys().isdisjoint(there):
                continue
            members.switch(old.place)
            reason = old.fault or ("it is drained" if old.drained else "its ranks take long to start")
            why = f"node {place.now.node} takes place {old.place} over from {name}: {reason}"
            self._staff.why.append((old.rung, why))
            for number in sorted(there):
                found = self._worlds.replicas.get(number)
                if found and found.phase in ("building", "built"):
                    yield number

    def retire(self) -> None:
        """Release what the gang has started without and no longer wants: nodes that leave, and everything that belongs
        to replicas that are no longer wanted."""
        members, active, replicas = self._members, self._gen.worlds, self._worlds.replicas
        leaving = {members.nodes[name].place for name in self._staff.leaving}
        for number in sorted(members.places if self.surplus else leaving):
            place = members.places[number]
            there = {members.replica_of(rank) for rank in place.now.workers} if place.now else set()
            if place.old and all(r in active or r not in members.down for r in members.replicas_at(number)):
                self._staff.release(number, "old")
            if place.now and active.keys().isdisjoint(there):
                unwanted = members.nodes[place.now.node].drained or not members.replicas_at(number)
                if place.next and not members.replicas_at(number):
                    self._staff.release(number, "next")  # or it would move up
                if unwanted:
                    for replica in sorted(there & replicas.keys()):
                        self._worlds.forget(replica)
                    self._staff.release(number, "now")
        if self.surplus:
            self.surplus = not active.keys() <= members.down.keys()
            kept = active.keys() | members.down.keys()
            for worker in sorted(w for w, f in members.workers.items() if members.replica_of(f.rank) not in kept):
                found = members.remove(worker)
                self._staff.starting.pop(worker, None)
                self._staff.kill(found.node, {found.rank: worker})
            for replica in sorted(replicas.keys() - kept):
                self._worlds.forget(replica)
