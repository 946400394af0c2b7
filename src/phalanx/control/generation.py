"""One generation of the gang: which replicas are in it, which have left it, and which step was its last. Commits are
unanimous, so a generation is over as soon as one member is known to have left it or to be dead."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from phalanx.control import messages
from phalanx.control.desk import Desk
from phalanx.control.membership import Membership
from phalanx.control.messages import EVERYONE, Command, Form
from phalanx.control.policy import Policy
from phalanx.control.sources import Copy, Lineage
from phalanx.control.worlds import Worlds

STEPS_TO_PAUSE = 4  # a pause may take this many to come, and a pass to end


@dataclass
class Generation:
    number: int = 0
    form: Form | None = None
    began_ns: int = 0  # when the Form was sent
    begun: bool = False  # this or an earlier one has run
    stepped: bool = False  # it is known to have committed a step
    step_seen: tuple[int, int] = (0, 0)  # a step, and when it was heard of
    step_ns: int = 0  # as last measured
    waiting: set[int] = field(default_factory=set)  # replicas that are not Formed yet
    left: set[int] = field(default_factory=set)  # replicas that have neither parted nor broken
    quiet: bool = False  # parting: replicas leave by themselves, after a step
    pausing: str = ""  # why Pause was sent
    doomed: set[int] = field(default_factory=set)  # members that are being killed, until their end is confirmed
    seats: dict[int, dict[int, tuple[str, ...]]] = field(default_factory=dict)  # generation -> replica -> its nodes
    over: str = ""  # how it is known that no member can commit another step: acknowledged, proven, or its lease ended

    def __post_init__(self) -> None:
        self.worlds = dict(zip(self.form.replicas, self.form.worlds, strict=True)) if self.form else {}

    def bind(self, desk: Desk, members: Membership, policy: Policy, worlds: Worlds, lineage: Lineage) -> None:
        self._desk, self._members, self._policy, self._worlds, self._lineage = desk, members, policy, worlds, lineage

    # -- its beginning

    def begin(self, form: Form) -> None:
        if self.form and self._lineage.ends.get(self.number, -1) > self.form.step:
            self.seats = {self.number: self.seats.get(self.number, {})}  # its steps may still be in memory
        else:
            self.seats.pop(self.number, None)
        self.seats[form.generation] = {r: tuple(self._worlds.replicas[r].nodes) for r in form.replicas}
        self.number, self.form, self.began_ns = form.generation, form, self._desk.now_ns
        self.worlds = dict(zip(form.replicas, form.worlds, strict=True))  # by replica
        self.stepped = self.quiet = False
        self.pausing = self.over = ""
        self.doomed = set()
        self.waiting, self.left = set(form.replicas), set(form.replicas)
        self._worlds.enter(form.replicas)
        self._desk.resume()
        self._desk.phase = "forming"
        self._desk.set("form", self._policy.form_ns)
        self._desk.say(form)

    def hear_formed(self, event: messages.Formed) -> None:
        named, worlds = zip(event.replicas, event.worlds, strict=True), self.worlds
        self.waiting.difference_update([replica for replica, world in named if worlds.get(replica) == world])

    def start(self) -> None:
        self._desk.phase, self.begun, self.waiting = "running", True, set()
        self._desk.drop("form")
        self._desk.say(messages.Started(self.number))

    def hear_steps(self, event: messages.StepsDone) -> None:
        """Note a committed step, and how long one takes."""
        (step, at_ns), now_ns = self.step_seen, self._desk.now_ns
        if self.stepped and event.step > step:
            self.step_ns = (now_ns - at_ns) // (event.step - step)
        self.step_seen, self.stepped = (event.step, now_ns), True
        self._lineage.commit(event.step)

    def pause(self, why: str) -> None:
        """Have all replicas stop after a step, if there is a reason to."""
        self.pausing = why
        if why:
            self._desk.say(messages.Pause(self.number, EVERYONE))

    # -- its end

    def part(self, quiet: bool) -> None:
        """Wait for all replicas to leave. `quiet`: they leave by themselves, after a step."""
        self._desk.phase, self.quiet = "parting", quiet
        self._desk.drop("form")
        self._desk.resume()
        limit_ns = self._policy.pause_ns if quiet else self._policy.park_ns
        self._desk.set("park", max(limit_ns, STEPS_TO_PAUSE * self.step_ns))
        if not quiet:
            self._desk.say(self.order_to_part())

    def order_to_part(self) -> messages.Part:
        return messages.Part(self.number, tuple(self.worlds.values()), EVERYONE)

    def hear_parted(self, event: messages.Parted) -> list[int]:
        """Record replicas that have parted, and return them. Those of a fenced generation are only returned: they were
        given up before."""
        named = zip(event.replicas, event.worlds, strict=True)
        fenced, worlds, left = self._desk.phase == "fencing", self.worlds, self.left
        parted = [r for r, world in named if (fenced or r in left) and worlds.get(r) == world]
        if parted and not fenced:
            replicas, generation, copy, kept = self._worlds.replicas, event.generation, Copy.of(event), event.kept
            for replica in parted:
                replicas[replica].part(generation, copy, kept)
            self.lose(parted)
        if parted:
            self.prove("acknowledged")
        return parted

    def lose(self, replicas: list[int]) -> bool:
        """Remove replicas that have parted or are broken. Return whether any of them was still in."""
        count = len(self.left)
        self.left.difference_update(replicas)
        self.waiting.difference_update(replicas)
        return len(self.left) < count

    def has_world(self, replica: int) -> bool:
        """Return whether the last world of a replica is, or was, in this generation."""
        return self._worlds.replicas[replica].world == self.worlds.get(replica)

    def prove(self, how: str) -> None:
        """Note that no member can commit another step; the first proof is kept."""
        self.over = self.over or how

    def standing(self) -> list[int]:
        """Return the replicas that have parted from this generation and still stand."""
        replicas, number = self._worlds.replicas, self.number
        return [r for r in self.worlds if replicas[r].parted == number]

    def resolve(self) -> bool:
        """Decide which step was the generation's last, once nobody is left in it. Return whether that is decided.

        One member that has left, or is proven dead, ends the generation for all; without any, the lease of its agents
        does. A replica that stands speaks for itself. If none stands, wait for everyone who is left of the broken ones.
        """
        desk, standing = self._desk, self.standing()
        if not standing and any(self._worlds.replicas[r].phase == "leaving" for r in self.worlds):
            return False
        desk.drop("park")
        if not self.over:
            if desk.phase != "fencing":
                desk.phase = "fencing"
                desk.resume()
                desk.hold(f"nobody of generation {self.number} answers: it may go on until its lease ends")
                desk.set("lease", self._policy.lease_ns)
            return False
        desk.drop("lease")
        vote = self._last_vote(standing)
        if vote is None:
            self._lineage.certain = False
        else:
            self._lineage.commit(vote)
        self._lineage.end(self.number)
        desk.phase, self.pausing = "gathering", ""
        return True

    def _last_vote(self, standing: list[int]) -> int | None:
        """Return the last step that everyone who is left has voted for; None: nobody is left. Such a step counts,
        because members that are gone may have seen it committed. If one has not voted for a step, nobody can have seen
        that."""
        assert self.form
        replicas, number, step = self._worlds.replicas, self.number, self.form.step
        copies = [replicas[r].copy for r in standing]
        if not standing:
            worlds, replica_of = self.worlds, self._members.replica_of
            copies = [w.copy for w in self._members.workers.values() if w.parked == worlds.get(replica_of(w.rank), 0)]
        if not copies:
            return None
        return min([c.prepared if c and c.made == number else step for c in copies])

    def outstanding(self) -> list[Command]:
        phase = self._desk.phase
        if phase == "forming":
            assert self.form
            late, replica_of = self._worlds.nodes(self.waiting), self._members.replica_of
            late |= {s.node for rank, s in self.form.sources.items() if s.node and replica_of(rank) in self.waiting}
            late.update(*(gift.addresses for replica, gift in self.form.gifts.items() if replica in self.waiting))
            return [replace(self.form, nodes=tuple(sorted(late)))]
        if phase == "parting" and self.left:
            nodes = tuple(sorted(self._worlds.nodes(self.left)))
            return [messages.Pause(self.number, nodes) if self.quiet else replace(self.order_to_part(), nodes=nodes)]
        return [messages.Pause(self.number, EVERYONE)] if phase == "running" and self.pausing else []
