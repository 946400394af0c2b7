"""The gang decides what to do about each event. `apply` takes one event and returns commands. The state changes only
with events and with `put_off` and `disown`, so folding the same journal gives the same state. `outstanding` repeats the
commands that were not answered.

    gathering   no generation is under way: until enough replicas are built
    asking      a state is wanted that no worker holds: which node has it in memory?
    forming     Form was said; until all replicas are Formed
    running     steps are done and committed without the controller
    parting     until all replicas of the generation have Parted, or are broken
    fencing     nobody of the generation answers, and nothing proves that it is over: until its lease has ended
    saving      all have Parted at the last step; until it is Durable
    flushing    the run has failed: until the newest snapshots in memory are Durable
    ended

A replica has a world of its own, which is built, broken and rebuilt beside all this. A failure breaks the world of its
replica; the others finish their pass, part, and form the next generation without it. Once its world is rebuilt, the
replica joins at a step boundary.

The parts: `staffing` knows who is there, `worlds` which worlds stand, `generation` who trains together, `finding` where
state is, `commits` which checkpoints exist, `verdict` when to give up. `forming` begins the next generation, `changes`
waits for a step boundary, `ending` ends the run. Each part reports what has happened to it; the gang decides what that
means for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.control import codec, messages
from phalanx.control.changes import Changes
from phalanx.control.commits import Commits
from phalanx.control.desk import Desk
from phalanx.control.ending import Ending
from phalanx.control.finding import Finder
from phalanx.control.forming import MOST_REASONS, Forming
from phalanx.control.generation import Generation
from phalanx.control.membership import Membership
from phalanx.control.messages import EVERYONE, Command, Event, Failure, Form
from phalanx.control.policy import Policy
from phalanx.control.sources import Lineage
from phalanx.control.staffing import Gone, Staff
from phalanx.control.verdict import Evidence, Verdict
from phalanx.control.worlds import Worlds
from phalanx.core.layout import Layout

EACH_NS = 1_000_000  # extra wait for answers, per node


@dataclass
class Gang:
    policy: Policy
    members: Membership
    changes: Changes
    ending: Ending
    desk: Desk = field(default_factory=Desk)
    staff: Staff = field(default_factory=Staff)
    worlds: Worlds = field(default_factory=Worlds)
    gen: Generation = field(default_factory=Generation)
    lineage: Lineage = field(default_factory=Lineage)
    finder: Finder = field(default_factory=Finder)
    forming: Forming = field(default_factory=Forming)
    commits: Commits = field(default_factory=Commits)
    verdict: Verdict = field(default_factory=Verdict)

    def __post_init__(self) -> None:
        desk, members, policy, staff = self.desk, self.members, self.policy, self.staff
        worlds, gen, lineage, finder, commits = self.worlds, self.gen, self.lineage, self.finder, self.commits
        staff.bind(desk, members, policy)
        commits.bind(desk, policy)
        worlds.bind(desk, members, policy, staff, gen.worlds)
        gen.bind(desk, members, policy, worlds, lineage)
        finder.bind(desk, members, policy, worlds, lineage, commits)
        self.changes.bind(desk, members, policy, staff, worlds, gen)
        self.forming.bind(desk, members, policy, staff, worlds, gen, lineage, finder)
        self.ending.bind(desk, members, policy, worlds, gen, lineage, finder, commits)

    @staticmethod
    def of(
        layout: Layout, steps: int, policy: Policy, start: int = 0, generation: int = 0, homes: tuple[str, ...] = ()
    ) -> Gang:
        """Make a gang. `start`: the step that the run begins from; `generation`: the one that made that step; `homes`:
        nodes, in the order of the places that they are to fill."""
        members = Membership(layout.replica_size, layout.ranks_per_node or layout.world_size)
        members.homes = {name: place for place, name in enumerate(homes)}
        members.want(list(range(layout.replica)))
        gang = Gang(policy, members, Changes(policy.max_replicas or layout.replica), Ending(steps))
        gang.gen.number, gang.lineage.committed, gang.commits.durable = generation, start, [(start, generation)]
        return gang

    def to_bytes(self) -> bytes:
        return codec.to_bytes(self)

    @staticmethod
    def from_bytes(data: bytes) -> Gang:
        return codec.from_bytes(Gang, data)

    # -- what the shell calls

    def apply(self, now_ns: int, event: Event) -> list[Command]:
        desk = self.desk
        desk.out = []
        if now_ns > desk.now_ns:
            desk.now_ns = now_ns
        if desk.phase == "ended":
            if isinstance(event, (messages.NodeJoined, messages.NodeClear)):
                desk.say(messages.Leave(desk.said, (event.node,)))
        elif self.staff.refuses(event):
            self._hear_ghost(event)
        elif HANDLERS[type(event)](self, event):
            self._advance()
        return desk.out

    def put_off(self, now_ns: int, timer: str) -> None:
        """Fire a timer again after a while, because its handler raised an error."""
        self.desk.now_ns = max(self.desk.now_ns, now_ns)
        self.desk.set(timer, self.policy.resend_ns)

    def disown(self, now_ns: int, name: str, incarnation: int) -> None:
        """Count a node as lost because its report raised an error. It is fenced, and joins again."""
        self.desk.now_ns = max(self.desk.now_ns, now_ns)
        node = self.members.nodes.get(name)
        if self.phase != "ended" and node and node.incarnation == incarnation and not node.dead:
            self._lose_node(name, self.staff.lose_node(name, "has said what raised an error"), "")
            self._advance()

    @property
    def phase(self) -> str:
        return self.desk.phase

    @property
    def generation(self) -> int:
        return self.gen.number

    @property
    def form(self) -> Form | None:
        return self.gen.form

    @property
    def committed(self) -> int:
        return self.lineage.committed

    @property
    def calm(self) -> bool:
        """Return whether nothing is under way."""
        return self.phase == "ended" or (
            self.phase == "running" and self.gen.stepped and not self.gen.pausing and not self.worlds.astir
        )

    def outstanding(self) -> list[Command]:
        """Return the commands that were not answered, or never are. They are sent again after a while, and at once by a
        new controller."""
        if self.phase == "ended":
            return self.ending.outstanding()
        out = [*self.staff.outstanding(), *self.worlds.outstanding(), *self.gen.outstanding()]
        if self._asks and self.finder.unanswered:
            out.append(self.finder.question(self.generation))
        if self.phase == "running" and self.commits.version:
            out.append(self._interval())
        return [*out, *self.ending.outstanding(), *self.commits.outstanding()]

    def set_timers(self) -> list[messages.SetTimer]:
        """Return all timers, for a new controller."""
        return [messages.SetTimer(name, at_ns) for name, at_ns in sorted(self.desk.timers.items())]

    # -- nodes

    def _on_joined(self, event: messages.NodeJoined) -> bool:
        if self.forming.patience_ns < 0:
            self.forming.be_patient(self.policy.gather_ns)
            self.commits.began_ns = self.desk.now_ns
        known = self.members.nodes.get(event.node)
        again = known is not None and event.incarnation > known.incarnation
        new, gone = self.staff.join(event)
        if again:
            proof = f"node {event.node} came back as a new incarnation"
            self.finder.lose_node(event.node)
            self._lose(gone, proof)
            self._prove(event.node, proof)
        return new

    def _on_suspect(self, event: messages.NodeSuspect) -> bool:
        self.staff.suspects.add(event.node)
        return False

    def _on_clear(self, event: messages.NodeClear) -> bool:
        self.staff.clear(event.node)
        return True

    def _on_dead(self, event: messages.NodeDead) -> bool:
        if event.proof:
            gone = self.staff.lose_node(event.node, f"died ({event.proof})")
            self._lose_node(event.node, gone, event.proof)
        else:
            self._lose_silent(self.staff.give_up(event.node))
        return True

    def _lose_silent(self, nodes: dict[str, Gone]) -> None:
        for name, gone in nodes.items():
            self._lose_node(name, gone, "")

    def _lose_node(self, name: str, gone: Gone, proof: str) -> None:
        self.finder.lose_node(name)
        self.commits.lose_node(name, self._committer)
        self._lose(gone, proof)
        if proof:
            self._prove(name, proof)
        if (self.phase == "asking" or self.ending.asks) and not self.finder.unanswered:
            self._all_answered()

    def _committer(self) -> str:
        """Choose a living node of the generation to commit a checkpoint; "": there is none."""
        nodes = (name for replica in self.gen.worlds for name in self.worlds.replicas[replica].nodes)
        return next((name for name in nodes if not self.members.nodes[name].dead), "")

    def _prove(self, name: str, proof: str) -> None:
        """Note that a node that was given up for its silence has ended: its members cannot vote any more."""
        if self.phase == "fencing" and any(name in self.worlds.replicas[r].nodes for r in self.gen.worlds):
            self.gen.prove(proof)
            self._resolve()

    def _hear_ghost(self, event: Event) -> None:
        """Handle an event about a node that was declared dead."""
        if isinstance(event, messages.NodeDead) and event.proof:
            self._prove(event.node, event.proof)
            self._advance()

    # -- workers

    def _on_died(self, event: messages.WorkerDied) -> bool:
        self.staff.killed.pop(event.worker, None)
        if event.worker in self.gen.doomed:
            self.gen.doomed.discard(event.worker)
            self.gen.prove("proven")
            if self.phase == "fencing":
                self._resolve()
        found = self.members.workers.get(event.worker)
        if found is None:
            return self.phase == "gathering"
        self._hear_of(found.rank, f"rank {found.rank}", event.failure)
        self._lose(self.staff.lose_worker(event.worker, event.failure.brief), proof="proven")
        return self._continues()

    def _on_service(self, event: messages.ServiceDied) -> bool:
        self._hear_of(-1, f"the {event.service} of {event.node}", event.failure)
        self.staff.demerit(event.node)
        return self._continues()

    def _hear_of(self, rank: int, name: str, failure: Failure, died: bool = True) -> None:
        self.verdict.hear(self.desk.now_ns, rank, name, failure, died)

    def _continues(self) -> bool:
        """Fail at once if the evidence makes every further attempt useless. Return False if the run was already
        ending."""
        if self.phase in ("flushing", "ended"):
            return False
        if found := self.verdict.fatal():
            self.ending.fail(found.sentence(), found)
        elif self.phase == "gathering" and not self.worlds.astir and self.verdict.evidence:  # nothing is broken by it
            self._judge()
        return True

    def _lose(self, gone: Gone, proof: str = "") -> None:
        """Break the worlds of lost workers, given by rank. `proof`: how it is known that they cannot vote any more."""
        for number in sorted({self.members.replica_of(rank) for rank in gone}):
            found = self.worlds.replicas.get(number)
            if found is None or not any(found.crew.get(rank) == worker for rank, worker in gone.items()):
                continue
            if self.gen.has_world(number):
                self.gen.prove(proof)
            if found.phase in ("building", "built"):
                self._halt(number)
            elif found.phase == "leaving" and self.worlds.leave(number, gone.values()):
                self._out(number)

    def _give_up_on(self, workers: set[int]) -> None:
        """End workers that do not answer although their nodes do: they hang. Spare them when many nodes are affected:
        then they wait for something else, or cannot be reached."""
        if not workers:
            return
        nodes, suspects = set(self.members.nodes_of(workers)), self.staff.suspects
        if len(nodes | suspects) > max(1, self.staff.most_silent()):
            self.desk.hold(f"{len(nodes)} nodes do not answer: it may be the network")
            return
        self.staff.silent |= nodes & suspects
        for worker in sorted(workers):
            found = self.members.workers.get(worker)
            if found and found.node not in suspects:
                self._hear_of(found.rank, f"rank {found.rank}", Failure(hang="does not answer"))
                if self.gen.has_world(self.members.replica_of(found.rank)):
                    self.gen.doomed.add(worker)
                self._lose(self.staff.lose_worker(worker, "does not answer", kill=True))
        self._lose_silent(self.staff.give_up_silent())

    def _on_standing(self, event: messages.Standing) -> bool:
        moved, replicas = self.staff.standing(event), self.worlds.replicas
        if self.phase == "forming" and any(w in moved for r in self.gen.waiting for w in replicas[r].crew.values()):
            self.desk.set("form", self.policy.form_ns)
        if any(moved & replicas[number].waiting for number in self.worlds.astir):
            self.desk.set("build", self.policy.form_ns)
        return False

    # -- the worlds of replicas

    def _build_late(self) -> None:
        """Break worlds whose workers make no progress."""
        for number in self.worlds.among(self.worlds.astir, "building"):
            waiting = set(self.worlds.replicas[number].waiting)
            if self.staff.are_stuck(waiting):
                ranks = self.members.name_ranks(waiting)
                text = f"{ranks} did not form their groups in time, and none of them moved"
                self.staff.why.append((1, text))
                self._hear_of(-1, f"replica {number}", Failure(text=text), died=False)
                self._halt(number)
        if self.worlds.among(self.worlds.astir, "building") and self.phase != "ended":
            self.desk.set("build", self.policy.ask_ns)

    def _halt(self, number: int) -> None:
        """Break the world of a replica. The generation that it is in ends with it."""
        empty = self.worlds.halt(number)
        was_in, planned = self.gen.lose([number]), self.gen.quiet
        self.gen.quiet = planned and not was_in
        if empty:
            self._out(number)
        if was_in and (self.phase in ("forming", "running") or (self.phase == "parting" and planned)):
            self._part()
        elif was_in and self.phase == "parting" and not self.gen.left:
            self._resolve()
        elif self.phase == "saving" and number in self.gen.worlds:
            self.desk.phase = "gathering"

    def _on_parked(self, event: messages.Parked) -> bool:
        number, workers = self.worlds.hear_parked(event)
        if self.phase == "fencing" and event.world in self.gen.worlds.values():
            # They have left the groups for good, which counts even if their node was declared dead.
            self.gen.prove("acknowledged")
            self._resolve()
        if not workers:
            return self.phase == "gathering"
        rank = self.members.workers[workers[0]].rank
        if event.why:
            self._hear_of(rank, f"rank {rank}", event.why, died=False)
        if self.gen.has_world(number):
            self.gen.prove("acknowledged")
        first = self.worlds.replicas[number].phase in ("building", "built")
        if first:
            if not self.staff.why:
                self.staff.why.append((1, f"the worker of rank {rank} has lost its peers"))
            self._halt(number)
        last = self.worlds.leave(number, workers)
        if last:
            self._out(number)
        return first or last

    def _out(self, number: int) -> None:
        """Decide what follows when nobody is left in the world of a replica."""
        self.worlds.end(number)
        if self.phase == "parting" and not self.gen.left:
            self._resolve()
        elif self.phase in ("gathering", "running", "forming", "asking") and not (self.gen.quiet or self._planned()):
            others = len(self.worlds.aside) >= self.policy.min_replicas or bool(self.gen.standing())
            self._judge(contained=self.phase != "gathering" or others, number=number)

    def _planned(self) -> bool:
        """Return whether everything since the last Form was ordered, such as one node taking over from another."""
        why = self.staff.why
        return bool(why) and all(rung < 1 for rung, _ in why) and not self.verdict.evidence

    def _leave_late(self) -> None:
        """Give up workers that have not left their world. Had they only hung, their agents would have ended them."""
        self._give_up_on(self.worlds.waiting("leaving"))
        if self.worlds.among(self.worlds.astir, "leaving") and self.phase != "ended":
            self.desk.set("leave", self.policy.park_ns)

    # -- time

    def _on_timer(self, event: messages.TimerFired) -> bool:
        if not self.desk.due(event.timer):
            return False
        TIMERS[event.timer](self)
        return True

    def _resend_later(self) -> None:
        """Schedule unanswered commands to be sent again. Many nodes take longer to answer, and early repeats would only
        delay them."""
        if "resend" not in self.desk.timers:
            self.desk.set("resend", self.policy.resend_ns + len(self.members.nodes) * EACH_NS)

    def _advance(self) -> None:
        """Do what can be done now, after a change."""
        if self.phase == "ended":
            return
        if self.phase != "flushing":
            self._move_on()
        if self.desk.said_ns >= 0 and "hold" not in self.desk.timers:
            self.desk.set("hold", max(0, self.desk.said_ns + self.policy.hold_ns - self.desk.now_ns))
        staff = self.staff
        asked = staff.starting or staff.killed or self.commits.drafts or self.worlds.astir or self.gen.pausing
        writing = self.ending.asks or self.ending.is_writing
        if asked or writing or self.phase not in ("gathering", "running", "ended"):
            self._resend_later()

    def _move_on(self) -> None:
        self._lose(self.staff.fill())
        trains = self.phase == "running" and not self.gen.pausing
        if trains:
            self._take_over(self.gen.worlds)
        self.worlds.build()
        if self.phase == "gathering":
            if not (self.ending.due and self.ending.save()):
                self._gather()
        elif trains:
            self.gen.pause("the run is to stop" if self.ending.stop_ns >= 0 else self.changes.why_pause())

    def _take_over(self, active: dict[int, int]) -> None:
        for number in self.changes.take_over(active):
            self._halt(number)

    def _give_up_holding(self) -> None:
        if self.phase in ("gathering", "parting", "asking", "fencing") and self.desk.said_ns >= 0:
            self.ending.fail(f"the run cannot continue: {self.desk.said}")
        else:
            self.desk.resume()

    # -- the end of a generation

    def _on_parted(self, event: messages.Parted) -> bool:
        if event.generation != self.generation:
            return False
        parted = self.gen.hear_parted(event)
        if self.phase == "fencing":
            if parted:
                self._resolve()
            return True
        if not parted:
            return False
        if self.phase in ("forming", "running"):
            planned = self.phase == "running" and (bool(self.gen.pausing) or event.step >= self.ending.steps)
            if not planned:
                self._hold_back(parted, event.step)
            if not planned and not self.staff.why:
                self.staff.why.append((1, f"replica {parted[0]} has lost its peers"))
            self._part(quiet=planned)
        elif self.phase == "parting" and not self.gen.left:
            self._resolve()
        return self.phase == "gathering"

    def _hold_back(self, parted: list[int], step: int) -> None:
        """Hold back the replica that left a generation first, if no step was made and nothing else is known to be
        wrong. Also hold back those that have failed before and left while forming."""
        assert self.form
        late = {r for r in parted if self.phase == "forming" and self.worlds.replicas[r].failures}
        if not (self.gen.stepped or step > self.form.step or self.staff.why):
            late |= {parted[0]}
        self.worlds.fail_to_join(sorted(late), self.gen.began_ns)

    def _part(self, quiet: bool = False) -> None:
        self.gen.part(quiet)
        if not self.gen.left:
            self._resolve()
        self._resend_later()

    def _park_late(self) -> None:
        """Break the worlds of replicas that have not parted in time; agents end ranks that hang in them. After a
        planned pause, order the replicas to part first."""
        if self.phase != "parting":
            return
        if self.gen.quiet:
            self._part()
            return
        if not self.policy.recover:
            self._judge()
            return
        suspects, replicas = self.staff.suspects, self.worlds.replicas
        heard = [r for r in sorted(self.gen.left) if suspects.isdisjoint(replicas[r].nodes)]
        for number in heard:
            if number in self.gen.left:
                self.staff.why.append((1, f"replica {number} does not answer"))
                self._halt(number)
        left = {w for r in self.gen.left for w in replicas[r].crew.values()}
        self._give_up_on({w for w in left if self.members.workers[w].node in suspects})
        if self.phase == "parting":
            self.desk.set("park", self.policy.park_ns)

    def _lease_ended(self) -> None:
        if self.phase == "fencing":
            self.gen.prove("its lease has ended")
            self._resolve()

    def _resolve(self) -> None:
        """Return to gathering once it can be decided which step of the generation was the last."""
        if not self.gen.resolve():
            return
        assert self.form
        if self.committed > self.form.step:
            self._progress()
        # Those that leave after the last step may be gone before their peers have heard that it is committed.
        if not self.gen.quiet and self.committed < self.ending.steps:
            contained = bool(self.gen.standing())
            self.forming.be_patient(max(self.policy.wait_ns, 0 if contained else self.policy.start_ns))
            self._judge(contained=contained)

    def _progress(self) -> None:
        """Forgive earlier failures, because the generation has committed a step."""
        self.verdict.progress()
        self.finder.banned.clear()
        self.worlds.succeed(self.gen.worlds)

    def _judge(self, contained: bool = False, number: int = -1) -> None:
        """Decide whether to try again after something broke, and when. `contained`: the others can continue without it,
        unless many attempts have committed no step. `number`: the replica that broke, if one did. Its own attempts
        count then, because among a thousand replicas many may fail once, and alike."""
        cause, fatal = self.verdict.cause(), self.verdict.fatal()
        times = self.worlds.replicas[number].failures if number >= 0 else 0
        enough = self.verdict.close(self.policy, times)
        if fatal:
            self.ending.fail(fatal.sentence(), fatal)
            return
        if not self.policy.recover:
            lost = "; ".join(text for _, text in self.staff.why[:MOST_REASONS]) or "a worker was lost"
            self.ending.fail(cause.sentence() if cause else lost, cause)
            return
        if cause and cause.rank >= 0 and not cause.died and (times or self.verdict.seen(cause)) > 1:
            self._blame(cause)
        if contained and self.verdict.attempts < self.policy.attempts:
            return
        if self.phase == "gathering" and self.gen.form is None:
            self.verdict.attempts = max(self.verdict.attempts, times) if times else self.verdict.attempts + 1
        if enough:
            self.ending.fail(f"{enough[0].sentence()} ({enough[1]} times, and no step in between)", enough[0])
        elif self.verdict.attempts >= self.policy.attempts:
            lost = cause.sentence() if cause else next((text for _, text in self.staff.why), "")
            last = f"; the last: {lost}" if lost else ""
            self.ending.fail(f"{self.verdict.attempts} attempts in a row committed no step{last}", cause)
        else:
            self.forming.hold_back(self.policy.pause_before(self.verdict.attempts + 1))

    def _blame(self, cause: Evidence) -> None:
        """Replace the node of the rank that caused the same error again: another node may do better."""
        worker = self.members.workers.get(self.members.worker_at(cause.rank))
        if worker and self.members.spares:
            self.staff.fault(worker.node, 2, cause.failure.brief)

    # -- the next generation

    def _gather(self) -> None:
        """Form the next generation, if it can be."""
        if self.forming.waits:
            return
        self._take_over({})
        self.worlds.build()
        found = self.forming.gather()
        if isinstance(found, Form):
            self._form(found)
            return
        for number in found:
            self._halt(number)

    def _form(self, form: Form) -> None:
        self.commits.keep_only(self.lineage)
        self.commits.failures += form.rung >= 1
        self.verdict.attempts += 1
        self.staff.why, self.changes.rescaled = [], False
        self.gen.begin(form)

    def _on_held(self, event: messages.Held) -> bool:
        if not self._asks or event.generation != self.generation:
            return False
        if not self.finder.hear(event.node, event.copies):
            return False
        self._all_answered()
        return True

    def _all_answered(self) -> None:
        self.finder.stop_asking()
        if self.phase == "asking":
            self.desk.phase, self.finder.asked = "gathering", True
        elif self.phase == "flushing" and not self.finder.asked:
            self.finder.asked = True
            self.ending.flush()
        if self.ending.asks == self.generation:
            self.ending.flush()
            if self.phase == "running":  # they will change
                self.finder.close()

    @property
    def _asks(self) -> bool:
        """Return whether answers about snapshots in memory are wanted."""
        return self.phase in ("asking", "flushing") or self.ending.asks == self.generation > 0

    def _on_formed(self, event: messages.Formed) -> bool:
        if self.phase != "forming" or event.generation != self.generation:
            return False
        self.gen.hear_formed(event)
        if not self.gen.waiting:
            self._start()
        return not self.gen.waiting

    def _on_missing(self, event: messages.Missing) -> bool:
        worker = self.members.workers.get(event.worker)
        if self.phase != "forming" or event.generation != self.generation or worker is None:
            return False
        number = self.members.replica_of(worker.rank)
        if number not in self.gen.waiting:
            return False
        assert self.form
        source = self.form.source_of(worker.rank)
        name = f"rank {worker.rank}"
        text = f"cannot form its groups: {event.reason}" if event.groups else f"did not get its state: {event.reason}"
        worker.misses += 1
        if source and not event.groups:
            self.finder.fail(source, self.form.step, event.damaged)
            if source.node:
                self.staff.demerit(source.node)
            if source.kind == "start" and event.damaged:
                self.ending.fail(event.reason, Evidence(worker.rank, name, Failure(text=event.reason), False), "start")
                return True
        if worker.misses > 1:  # several sources failed it, so perhaps they are not to blame
            self.staff.demerit(event.node)
        if source is None or source.kind == "start" or event.groups:  # else there is another source
            self._hear_of(worker.rank, name, Failure(text=text), died=False)
        self.worlds.fail_to_join([number], self.gen.began_ns)
        self.staff.why.append((1, f"{name} {text}"))
        self._part()
        return True

    def _form_late(self) -> None:
        """Part from the generation if the replicas that it waits for make no progress."""
        if self.phase != "forming":
            return
        replicas = self.worlds.replicas
        waiting = {w for r in self.gen.waiting for w in replicas[r].crew.values()}
        if not self.staff.are_stuck(waiting):
            self.desk.set("form", self.policy.ask_ns)
            return
        text = f"{self.members.name_ranks(waiting)} were not ready in time, and none of them moved"
        self.staff.why.append((1, text))
        self._hear_of(-1, "the gang", Failure(text=text), died=False)
        self.worlds.fail_to_join((r for r in self.gen.waiting if replicas[r].failures), self.gen.began_ns)
        self._part()

    def _start(self) -> None:
        self.forming.patience_ns = self.desk.now_ns  # do not wait for full strength any longer
        self.finder.close()
        self.gen.start()
        if self.commits.version:
            self.desk.say(self._interval())
        self.changes.retire()

    # -- running

    def _on_steps_done(self, event: messages.StepsDone) -> bool:
        if event.generation != self.generation or self.phase not in ("forming", "running", "parting", "fencing"):
            return False
        if self.phase == "forming":
            self._start()
        self.gen.hear_steps(event)
        assert self.form
        if event.step > self.form.step:
            self._progress()
        return False

    # -- checkpoints

    def _on_written(self, event: messages.Written) -> bool:
        if self.commits.written(event, self.lineage) and self.phase in ("saving", "flushing"):
            self.ending.be_patient()
        self.ending.look()
        return True

    def _on_unwritten(self, event: messages.Unwritten) -> bool:
        self.commits.unwritten(event)
        self.ending.look()
        return True

    def _on_durable(self, event: messages.Durable) -> bool:
        if event.generation == self.generation and self.phase != "gathering":
            self.lineage.commit(event.step)
        news = self.commits.made(event, self.lineage)
        self.ending.look()
        return news

    def _on_link(self, event: messages.LinkLost | messages.LinkBack) -> bool:
        """Note that a link was lost or is back. Ranks react by themselves, and what breaks is a failure of their
        replicas like any other."""
        what = "has lost" if isinstance(event, messages.LinkLost) else "has again"
        self.desk.say(messages.Note(5, f"node {event.node} {what} its link {event.link}"))
        return False

    def _on_cost(self, event: messages.Cost) -> bool:
        if self.commits.cost(event, len(self.members.places)) and self.phase == "running":
            self.desk.say(self._interval())
        return False

    def _on_trace(self, event: messages.Trace) -> bool:
        self.desk.say(messages.Profile(event.first, event.last, event.ranks, EVERYONE))
        return False

    def _interval(self) -> messages.Interval:
        return messages.Interval(self.commits.version, *self.commits.interval, EVERYONE)


# A handler returns whether a change may let the gang move on.
HANDLERS: dict[type[Event], Callable[[Gang, Any], bool]] = {
    messages.NodeJoined: Gang._on_joined,
    messages.NodeSuspect: Gang._on_suspect,
    messages.NodeClear: Gang._on_clear,
    messages.NodeDead: Gang._on_dead,
    messages.WorkersUp: lambda gang, event: gang.staff.up(event),
    messages.WorkerDied: Gang._on_died,
    messages.ServiceDied: Gang._on_service,
    messages.Built: lambda gang, event: gang.worlds.hear_built(event),
    messages.Parked: Gang._on_parked,
    messages.Formed: Gang._on_formed,
    messages.Parted: Gang._on_parted,
    messages.Missing: Gang._on_missing,
    messages.Standing: Gang._on_standing,
    messages.Held: Gang._on_held,
    messages.StepsDone: Gang._on_steps_done,
    messages.Written: Gang._on_written,
    messages.Unwritten: Gang._on_unwritten,
    messages.Durable: Gang._on_durable,
    messages.Cost: Gang._on_cost,
    messages.DeviceWarning: lambda gang, event: gang.staff.warn(event),
    messages.LinkLost: Gang._on_link,
    messages.LinkBack: Gang._on_link,
    messages.Drain: lambda gang, event: gang.staff.drain(event),
    messages.Scale: lambda gang, event: gang.changes.scale(event),
    messages.Trace: Gang._on_trace,
    messages.Stop: lambda gang, event: gang.ending.stop(event),
    messages.TimerFired: Gang._on_timer,
}
TIMERS: dict[str, Callable[[Gang], None]] = {
    "resend": lambda gang: gang.desk.out.extend(gang.outstanding()),
    "launch": lambda gang: gang._lose(gang.staff.look_at_late()),
    "silence": lambda gang: gang._lose_silent(gang.staff.give_up_silent(waited=True)),
    "park": Gang._park_late,
    "form": Gang._form_late,
    "build": Gang._build_late,
    "leave": Gang._leave_late,
    "lease": Gang._lease_ended,
    "ask": Gang._all_answered,
    "hold": Gang._give_up_holding,
    "save": lambda gang: gang.commits.retry(),
    "saving": lambda gang: gang.ending.look_late(),
    "stop": lambda gang: gang.ending.look_at_time(),
    # The next look at the state takes the time into account.
    **dict.fromkeys(("wait", "again", "retry"), lambda gang: None),
}
