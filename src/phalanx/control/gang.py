"""The gang: from what is heard, what is done about it. `apply` takes one event and returns commands; nothing else
changes the state, so folding the same events gives the same state, and `outstanding` repeats what was not answered.

    gathering   nobody trains: until enough replicas are whole
    asking      a state is wanted that no worker holds: which node has it in memory?
    forming     Form was said; until all are Ready
    running     Start was said; steps are done and committed without the controller
    halting     until all that are left of the generation are Parked
    fencing     nobody of the generation answers, and nothing proves that it is over: until its lease has ended
    saving      all are Parked at the last step; until it is Durable
    flushing    the run has failed: until the newest snapshots in memory are Durable
    ended

The parts: `staffing` knows who is there, `generation` who is in the groups, `finding` where state is, `commits` which
checkpoints exist, `verdict` when to give up. This module decides what follows from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from phalanx.control import codec, messages
from phalanx.control.commits import Commits
from phalanx.control.desk import Desk
from phalanx.control.finding import Finder
from phalanx.control.generation import Generation
from phalanx.control.membership import Membership
from phalanx.control.messages import Command, Event, Failure, Form, Source
from phalanx.control.policy import Policy
from phalanx.control.sources import Lineage
from phalanx.control.staffing import Gone, Staff
from phalanx.control.verdict import Evidence, Verdict
from phalanx.core.checkpoint import buddies
from phalanx.core.layout import Layout

EACH_NS = 1_000_000  # of patience with answers, per node
MOST_REASONS = 16  # in a Form: every node is told
STEPS_TO_PAUSE = 4  # in which a pause must come


@dataclass
class Gang:
    policy: Policy
    members: Membership
    most: int  # replicas that Scale may ask for
    steps: int  # of the whole run
    committed: int  # the last step that is known to have been
    certain: bool = True  # no later one can have been
    phase: str = "gathering"
    desk: Desk = field(default_factory=Desk)
    staff: Staff = field(default_factory=Staff)
    gen: Generation = field(default_factory=Generation)
    lineage: Lineage = field(default_factory=Lineage)
    finder: Finder = field(default_factory=Finder)
    commits: Commits = field(default_factory=Commits)
    verdict: Verdict = field(default_factory=Verdict)
    patience_ns: int = -1  # until when full strength is waited for
    retry_ns: int = 0  # no Form before this
    step_seen: tuple[int, int] = (0, 0)  # a step, and when it was heard of
    step_ns: int = 0  # as far as is known
    rescaled: bool = False  # the gang may have other replicas than those that are wanted
    surplus: bool = False  # there may be workers of replicas that are not wanted
    stop_ns: int = -1  # by when to be gone
    begun: bool = False  # a generation has run
    ending: messages.Ended | None = None  # how it ends, while flushing and after
    flush: messages.Write | None = None  # what is written meanwhile

    def __post_init__(self) -> None:
        self.staff.bind(self.desk, self.members, self.policy)
        self.gen.bind(self.members)
        self.commits.bind(self.desk, self.policy)
        self.finder.bind(self.members, self.lineage, self.commits)

    @staticmethod
    def of(layout: Layout, steps: int, policy: Policy, start: int = 0, generation: int = 0) -> Gang:
        """`start`: the step that the run begins from; `generation`: the one in which that was made."""
        members = Membership(layout.replica_size, layout.ranks_per_node or layout.world_size)
        members.want(list(range(layout.replica)))
        gang = Gang(policy, members, policy.max_replicas or layout.replica, steps, start)
        gang.gen.number, gang.commits.durable = generation, [(start, generation)]
        return gang

    def to_bytes(self) -> bytes:
        return codec.to_bytes(self)

    @staticmethod
    def from_bytes(data: bytes) -> Gang:
        return codec.from_bytes(Gang, data)

    # -- what the shell calls

    def apply(self, now_ns: int, event: Event) -> list[Command]:
        desk = self.desk
        desk.now_ns, desk.out = max(desk.now_ns, now_ns), []
        if isinstance(event, messages.Many):
            for part in event.parts():
                self._take(part)
        else:
            self._take(event)
        return desk.out

    def _take(self, event: Event) -> None:
        if self.phase == "ended":
            if isinstance(event, messages.NodeJoined):
                self.desk.say(messages.Leave(self.desk.said, (event.node,)))
        elif self.staff.refuses(event):
            self._hear_ghost(event)
        elif HANDLERS[type(event)](self, event):
            self._advance()

    @property
    def generation(self) -> int:
        return self.gen.number

    @property
    def form(self) -> Form | None:
        return self.gen.form

    @property
    def calm(self) -> bool:
        """Nothing is under way."""
        return self.phase == "ended" or (self.phase == "running" and self.gen.stepped and not self.gen.pausing)

    def outstanding(self) -> list[Command]:
        """What was said and not answered. To be said again after a while, and by a new controller at once."""
        if self.phase == "ended":
            return self._last_words()
        out: list[Command] = []
        launched: dict[str, dict[int, int]] = defaultdict(dict)
        for worker in sorted(self.staff.starting):
            found = self.members.workers[worker]
            launched[found.node][found.rank] = worker
        for node, workers in sorted(launched.items()):
            out.append(messages.Launch(node, self.members.nodes[node].incarnation, workers))
        doomed: dict[str, list[int]] = defaultdict(list)
        for worker, node in sorted(self.staff.killed.items()):
            doomed[node].append(worker)
        out += [messages.Kill(node, tuple(numbers)) for node, numbers in sorted(doomed.items())]
        if self.phase in ("forming", "halting"):
            waited = {self.members.workers[worker].node for worker in self.gen.waiting}
            if self.phase == "forming":
                assert self.form
                sources = self.form.sources.items()
                waited |= {s.node for r, s in sources if s.node and self.form.crew[r] in self.gen.waiting}
                out.append(replace(self.form, nodes=tuple(sorted(waited))))
            else:
                kind = messages.Pause if self.gen.quiet else messages.Halt
                out.append(kind(self.generation, tuple(sorted(waited))))
        elif self.phase in ("asking", "flushing") and self.finder.unanswered:
            out.append(messages.Ask(self.generation, tuple(sorted(self.finder.unanswered))))
        elif self.phase == "flushing" and self.flush:
            out.append(self.flush)
        elif self.phase == "saving":
            out.append(messages.Save(self.generation, self.committed, self.gen.nodes))
        elif self.phase == "running":
            if not self.gen.stepped:
                out.append(messages.Start(self.generation, self.gen.nodes))
            if self.gen.pausing:
                out.append(messages.Pause(self.generation, self.gen.nodes))
        return out + self.commits.outstanding()

    def set_timers(self) -> list[messages.SetTimer]:
        """For a new controller."""
        return [messages.SetTimer(name, at_ns) for name, at_ns in sorted(self.desk.timers.items())]

    # -- nodes

    def _on_joined(self, event: messages.NodeJoined) -> bool:
        if self.patience_ns < 0:
            self._be_patient(self.policy.gather_ns)
            self.commits.began_ns = self.desk.now_ns
        known = self.members.nodes.get(event.node)
        again = known is not None and event.incarnation > known.incarnation
        new, gone = self.staff.join(event)
        if again:
            self.finder.lose_node(event.node)
            self._lose(gone, proof=f"node {event.node} came back as a new incarnation")
            self._prove(event.node, f"node {event.node} came back as a new incarnation")
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
            self._lose_silent(lambda: self.staff.give_up(event.node))
        return True

    def _lose_silent(self, give_up: Callable[[], dict[str, Gone]]) -> None:
        for name, gone in give_up().items():
            self._lose_node(name, gone, "")

    def _lose_node(self, name: str, gone: Gone, proof: str) -> None:
        self.finder.lose_node(name)
        alive = [n for n in (self.gen.nodes if self.form else ()) if not self.members.nodes[n].dead]
        self.commits.lose_node(name, tuple(alive))
        self._lose(gone, proof)
        if proof:
            self._prove(name, proof)
        if self.phase == "asking" and not self.finder.unanswered:
            self._all_answered()

    def _prove(self, name: str, proof: str) -> None:
        """A node that was given up for its silence has ended: no member on it votes any more."""
        if self.phase == "fencing" and self.form and name in self.form.places.values():
            self.gen.over = self.gen.over or proof
            self._resolve()

    def _hear_ghost(self, event: Event) -> None:
        """From a node that was declared dead. That its workers have left the groups for good counts all the same."""
        if isinstance(event, messages.NodeDead) and event.proof:
            self._prove(event.node, event.proof)
            self._advance()
        elif self.phase == "fencing" and isinstance(event, messages.Parked) and event.generation >= self.generation:
            assert self.form
            if {*event.workers} & {*self.form.crew.values()}:
                self.gen.over = self.gen.over or "acknowledged"
                self._resolve()
                self._advance()

    # -- workers

    def _on_up(self, event: messages.WorkersUp) -> bool:
        return self.staff.up(event)

    def _on_died(self, event: messages.WorkerDied) -> bool:
        self.staff.killed.pop(event.worker, None)
        if event.worker in self.gen.doomed:
            self.gen.doomed.discard(event.worker)
            self.gen.over = self.gen.over or "proven"
            if self.phase == "fencing":
                self._resolve()
        found = self.members.workers.get(event.worker)
        if found is None:
            return self.phase == "gathering"
        self._hear_of(found.rank, f"rank {found.rank}", event.failure)
        self._lose(self.staff.lose_worker(event.worker, event.failure.brief), proof="proven")
        return self._goes_on()

    def _on_service(self, event: messages.ServiceDied) -> bool:
        self._hear_of(-1, f"the {event.service} of {event.node}", event.failure)
        self.staff.demerit(event.node)
        return self._goes_on()

    def _hear_of(self, rank: int, name: str, failure: Failure, died: bool = True) -> None:
        self.verdict.hear(self.desk.now_ns, rank, name, failure, died)

    def _goes_on(self) -> bool:
        """Fail at once if what was heard makes every further attempt useless."""
        if self.phase in ("flushing", "ended"):
            return False
        if found := self.verdict.fatal():
            self._fail(found.sentence(), found)
        elif self.phase == "gathering" and self.verdict.evidence:  # no generation is broken by it
            self._judge()
        return True

    def _kill(self, worker: int, why: str) -> None:
        if self.members.workers[worker].rank in (self.form.crew if self.form else {}):
            self.gen.doomed.add(worker)
        self._lose(self.staff.lose_worker(worker, why, kill=True))

    def _lose(self, gone: Gone, proof: str = "") -> None:
        """Workers are gone, by rank. `proof`: how it is known that they cannot vote any more."""
        if not gone or not self.gen.lose(gone):
            return
        self.gen.over = self.gen.over or proof
        if self.phase in ("forming", "running") or (self.phase == "halting" and self.gen.quiet):
            self._halt()
        elif self.phase == "halting" and not self.gen.waiting:
            self._resolve()
        elif self.phase == "saving":
            self.phase = "gathering"

    def _on_standing(self, event: messages.Standing) -> bool:
        moved = self.staff.standing(event)
        if self.phase == "forming" and moved & self.gen.waiting:
            self.staff.patience.doubted -= self.gen.waiting
            self.desk.set("form", self.policy.form_ns)
        return False

    # -- time

    def _on_timer(self, event: messages.TimerFired) -> bool:
        if not self.desk.due(event.timer):
            return False
        TIMERS[event.timer](self)
        return True

    def _resend(self) -> None:
        self.desk.out += self.outstanding()

    @property
    def _again_ns(self) -> int:
        """Until what is not answered is said again: many take longer to answer, and would only be kept from it."""
        return self.policy.resend_ns + len(self.members.nodes) * EACH_NS

    def _look_at_late(self) -> None:
        self._lose(self.staff.look_at_late())

    def _silence(self) -> None:
        self._lose_silent(lambda: self.staff.give_up_silent(waited=True))

    def _advance(self) -> None:
        """After a change: what can be done now?"""
        if self.phase == "ended":
            return
        if self.phase != "flushing":
            self._move_on()
        if self.desk.said_ns >= 0 and "hold" not in self.desk.timers:
            self.desk.set("hold", max(0, self.desk.said_ns + self.policy.hold_ns - self.desk.now_ns))
        asked = self.staff.starting or self.staff.killed or self.commits.drafts
        told = self.phase == "running" and (self.gen.pausing or not self.gen.stepped)
        busy = asked or told or self.phase not in ("gathering", "running", "ended")
        if busy and "resend" not in self.desk.timers:
            self.desk.set("resend", self._again_ns)

    def _move_on(self) -> None:
        self.staff.fill()
        ending = self.stop_ns >= 0 or self.committed >= self.steps
        if self.phase == "gathering":
            if not (ending and self._save()):
                self._gather()
        elif self.phase == "running" and not self.gen.pausing:
            self.gen.pausing = self._why_pause()
            if self.gen.pausing:
                self.desk.say(messages.Pause(self.generation, self.gen.nodes))

    def _give_up_holding(self) -> None:
        if self.phase in ("gathering", "halting", "asking", "fencing") and self.desk.said_ns >= 0:
            self._fail(f"the run cannot go on: {self.desk.said}")
        else:
            self.desk.resume()

    def _be_patient(self, for_ns: int) -> None:
        self.patience_ns = self.desk.now_ns + for_ns
        if for_ns:
            self.desk.set("wait", for_ns)

    def _look(self) -> None:
        """`_advance` looks at the time."""

    # -- the end of a generation

    def _on_parked(self, event: messages.Parked) -> bool:
        self.staff.end_strangers(event.node, event.workers)
        if event.generation != self.generation or self.phase not in ("forming", "running", "halting"):
            return False
        ranks = self.gen.park(event)
        if not ranks:
            return False
        if event.why:
            self._hear_of(ranks[0], f"rank {ranks[0]}", event.why, died=False)
        if self.phase != "halting":
            planned = self.phase == "running" and (bool(self.gen.pausing) or event.step >= self.steps)
            planned = planned and not event.why
            if not planned and not self.staff.why:
                self.staff.why.append((1, f"the worker of rank {ranks[0]} has lost its peers"))
            self._halt(quiet=planned)
        elif not self.gen.waiting:
            self._resolve()
        return self.phase == "gathering"

    def _halt(self, quiet: bool = False) -> None:
        assert self.gen.roll
        self.phase, self.gen.quiet = "halting", quiet
        self.desk.drop("form")
        self.desk.resume()
        self.gen.waiting = set(self.gen.roll.left)
        self.desk.set(
            "park", max(self.policy.pause_ns, STEPS_TO_PAUSE * self.step_ns) if quiet else self.policy.park_ns
        )
        if not self.gen.waiting:
            self._resolve()
        elif not quiet:
            self.desk.say(messages.Halt(self.generation, self.gen.roll.nodes()))
        if "resend" not in self.desk.timers:
            self.desk.set("resend", self._again_ns)

    def _resolve(self) -> None:
        """All that are left of the generation are parked: which was its last step? Commits are unanimous, so one member
        that has left, or is proven dead, ends it for all; without any, its agents' lease does."""
        assert self.form and self.gen.roll
        self.desk.drop("park")
        if self.gen.ran and not self.gen.over:
            if self.phase != "fencing":
                self.phase = "fencing"
                self.desk.resume()
                self.desk.hold(f"nobody of generation {self.generation} answers: it may go on until its lease ends")
                self.desk.set("lease", self.policy.lease_ns)
            return
        self.desk.drop("lease")
        g, vote = self.generation, self.gen.last_vote()
        if vote is not None:
            self.committed = max(self.committed, vote)
        elif self.gen.ran:
            self.certain = False
        self.lineage.end(g, self.committed)
        if self.committed > self.form.step:
            self._progress()
        self.phase, self.gen.ran, self.gen.pausing = "gathering", False, ""
        if not self.gen.quiet:
            self._judge()
            self._be_patient(max(self.policy.wait_ns, self.policy.start_ns if self.staff.starting else 0))

    def _lease_ended(self) -> None:
        if self.phase == "fencing":
            self.gen.over = "its lease has ended"
            self._resolve()

    def _judge(self) -> None:
        """A generation was broken: is it worth another attempt, and when?"""
        cause = self.verdict.cause()
        enough = self.verdict.close(self.policy)
        if not self.policy.recover:
            lost = "; ".join(text for _, text in self.staff.why[:MOST_REASONS]) or "a worker was lost"
            self._fail(cause.sentence() if cause else lost, cause)
        elif enough:
            self._fail(f"{enough[0].sentence()} ({enough[1]} times, and no step in between)", enough[0])
        elif self.verdict.attempts >= self.policy.attempts:
            last = f"; the last: {cause.sentence()}" if cause else ""
            self._fail(f"{self.verdict.attempts} attempts in a row committed no step{last}", cause)
        else:
            if cause and cause.rank >= 0 and not cause.died and self.verdict.seen(cause) > 1:
                self._blame(cause)
            pause_ns = self.policy.pause_before(self.verdict.attempts + 1)
            self.retry_ns = self.desk.now_ns + pause_ns
            if pause_ns:
                self.desk.set("again", pause_ns)

    def _blame(self, cause: Evidence) -> None:
        """The same error again, first heard from this rank: another node may do better."""
        worker = self.members.workers.get(self.members.at.get(cause.rank, 0))
        if worker and self.members.spares:
            self.staff.fault(worker.node, 2, cause.failure.brief)

    def _progress(self) -> None:
        self.verdict.progress()
        self.finder.banned.clear()

    def _park_late(self) -> None:
        if self.phase != "halting":
            return
        if self.gen.quiet:
            self._halt()
            return
        if not self.policy.recover:
            self._judge()
            return
        nodes = {self.members.workers[worker].node for worker in self.gen.waiting}
        if not self._give_up_waiting():
            self.desk.hold(f"{len(nodes)} nodes do not answer: it may be the network")
        if self.phase == "halting":
            self.desk.set("park", self.policy.park_ns)

    def _form_late(self) -> None:
        """Who is not ready is asked how far it is. While anybody moves, the others may be waiting for that one."""
        waiting = set(self.gen.waiting)
        if self.phase != "forming":
            return
        if not waiting <= self.staff.patience.doubted:
            self.staff.doubt(waiting)
            self.desk.set("form", self.policy.ask_ns)
            return
        self.staff.patience.doubted -= waiting
        ranks = sorted(self.members.workers[worker].rank for worker in waiting)
        if self._give_up_waiting():
            if self.phase == "forming":
                self.desk.set("form", self.policy.form_ns)
            return
        text = f"ranks {_some(ranks)} were not ready in time, and none of them moved"
        self.staff.why.append((1, text))
        self._hear_of(-1, "the gang", Failure(text=text), died=False)
        self._halt()

    def _give_up_waiting(self) -> bool:
        """A worker that does not answer, on a node that does, hangs. Not when many do not: they wait for something
        else, or cannot be reached."""
        nodes = {self.members.workers[worker].node for worker in self.gen.waiting}
        if len(nodes | self.staff.suspects) > max(1, self.staff.most_silent()):
            return False
        self.staff.silent |= nodes & self.staff.suspects
        for worker in sorted(self.gen.waiting):
            if worker in self.gen.waiting and self.members.workers[worker].node not in self.staff.suspects:
                rank = self.members.workers[worker].rank
                self._hear_of(rank, f"rank {rank}", Failure(hang="does not answer"))
                self._kill(worker, "does not answer")
        self._lose_silent(self.staff.give_up_silent)
        return True

    # -- the next generation

    def _gather(self) -> None:
        """Form the next generation, if it can be."""
        members, staff = self.members, self.staff
        for name in sorted(staff.leaving):
            node = members.nodes[name]
            if members.can_switch(node.place):
                members.switch(node.place)
                seat = members.places[node.place].now
                assert seat
                text = node.fault or "it is drained"
                staff.why.append((node.rung, f"node {seat.node} takes place {node.place} over from {name}: {text}"))
        chosen, full = sorted(members.whole), len(members.wanted)
        for name in sorted(staff.leaving):
            if self._can_do_without(name, chosen):
                there = members.replicas_at(members.nodes[name].place)
                chosen = [replica for replica in chosen if replica not in there]
                full -= len(there)
        if self.desk.now_ns < self.retry_ns or (len(chosen) < full and self.desk.now_ns < self.patience_ns):
            return
        chosen = chosen[: self.policy.usable(len(chosen))]
        if len(chosen) < self.policy.min_replicas:
            vacant = f"; {len(members.vacant)} places have no node" if members.vacant else ""
            if not staff.starting or members.vacant:
                self.desk.hold(f"{len(chosen)} replicas are whole, and {self.policy.min_replicas} must be{vacant}")
            return
        crew, places = members.crew(chosen)
        step, sources = self.finder.plan(crew, self.gen.roll, self.committed, self.certain)
        kept = all(source.kind == "live" for source in sources.values())
        if self.begun and not self.finder.asked and not (kept and step == self.committed and self.certain):
            self.phase = "asking"
            self._ask()
            return
        self._form(chosen, step, crew, places, sources)

    def _ask(self) -> None:
        self.finder.ask({name for name, node in self.members.nodes.items() if not node.dead})
        self.desk.set("ask", self.policy.ask_ns)
        self.desk.say(messages.Ask(self.generation, tuple(sorted(self.finder.unanswered))))

    def _on_held(self, event: messages.Held) -> bool:
        if self.phase not in ("asking", "flushing") or event.generation != self.generation:
            return False
        if not self.finder.hear(event.node, event.copies):
            return False
        self._all_answered()
        return True

    def _all_answered(self) -> None:
        """A node that has not answered has nothing."""
        self.desk.drop("ask")
        self.finder.unanswered = set()
        if self.phase == "asking":
            self.phase, self.finder.asked = "gathering", True
        elif self.phase == "flushing" and not self.finder.asked:
            self.finder.asked = True
            self._flush()

    def _can_do_without(self, name: str, replicas: list[int]) -> bool:
        """A drained node that nobody is going to take over from."""
        node = self.members.nodes[name]
        place = self.members.places[node.place]
        if not node.drained or place.next or not place.now or place.now.node != name:
            return False
        there = self.members.replicas_at(node.place)
        return bool(there & set(replicas)) and len(set(replicas) - there) >= self.policy.min_replicas

    def _form(
        self, chosen: list[int], step: int, crew: dict[int, int], places: dict[int, str], sources: dict[int, Source]
    ) -> None:
        members, staff = self.members, self.staff
        if self.begun and any(source.kind in ("durable", "start") for source in sources.values()):
            staff.why.append((4, f"step {step} is in a checkpoint only"))
        if len(chosen) < len(members.wanted):
            staff.why.append((-1, f"replicas {sorted({*members.wanted}.difference(chosen))} are left out"))
        branch, last = step < self.committed or not self.certain, max(step, self.committed)
        if branch:
            staff.why.append((-1, f"back to step {step}: no later one is left of every rank"))
        number = self.generation + 1
        if branch:
            self.lineage.branch(number, step)
        self.commits.keep_only(self.lineage)
        self.committed, self.certain = step, True
        rung = max((rung for rung, _ in staff.why), default=-1)
        self.commits.failures += rung >= 1
        names = sorted(dict.fromkeys(places.values()))
        meet = members.nodes[names[self.verdict.attempts % len(names)]]  # another one after a failure
        form = Form(
            generation=number,
            step=step,
            replicas=tuple(chosen),
            crew=crew,
            places=places,
            ranks_per_place=members.ranks_per_place,
            store=meet.address,
            sources=sources,
            buddies=self._buddies(names),
            branch=branch,
            last=last,
            rung=rung,
            reason=self._reason(),
            nodes=tuple(sorted({*names, *(s.node for s in sources.values() if s.node)})),
        )
        self.gen.begin(form)
        self.verdict.attempts += 1
        staff.why, self.rescaled = [], False
        self.desk.resume()
        self.phase = "forming"
        self.desk.set("form", self.policy.form_ns)
        self.desk.say(form)

    def _buddies(self, names: list[str]) -> dict[str, str]:
        """Each node with another that keeps a copy of its snapshots; a spare, where there is no other."""
        if not self.policy.buddies:
            return {}
        nodes = self.members.nodes
        there = names if len(names) > 1 else sorted([*names, *self.members.spares])
        found = zip(there, buddies([nodes[name].domain for name in there]), strict=True)
        return {name: nodes[there[at]].memory for name, at in found if at is not None and name in names}

    def _reason(self) -> str:
        texts = [text for _, text in self.staff.why[:MOST_REASONS]]
        more = len(self.staff.why) - len(texts)
        return "; ".join(texts + [f"and {more} more"] * bool(more)) or "all are there"

    def _on_ready(self, event: messages.Ready) -> bool:
        self.staff.end_strangers(event.node, event.digests)
        if self.phase != "forming" or not self.form or event.generation != self.generation:
            return False
        if event.step != self.form.step or not self.gen.ready(event):
            return False
        for coordinate in sorted(self.gen.disputed):
            for worker in self.gen.wrong(coordinate):
                self._kill(worker, "has another state than its peers")
        if self.phase == "forming":
            self._start()
        return True

    def _on_missing(self, event: messages.Missing) -> bool:
        gen = self.gen
        if self.phase != "forming" or event.generation != self.generation or event.worker not in gen.waiting:
            return False
        assert self.form
        worker = self.members.workers[event.worker]
        source = self.form.sources.get(worker.rank)
        name, text = f"rank {worker.rank}", f"did not get its state: {event.reason}"
        worker.misses += 1
        if source is None:
            worker.copy = None
        else:
            self.finder.fail(source, self.form.step, event.damaged)
            if source.node:
                self.staff.demerit(source.node)
            if source.kind == "start" and event.damaged:
                self._fail(event.reason, Evidence(worker.rank, name, Failure(text=event.reason), False), "start")
                return True
        if worker.misses > 1:  # with several sources: perhaps it is not they
            self.staff.demerit(event.node)
        if source is None or source.kind == "start":  # else there is another source
            self._hear_of(worker.rank, name, Failure(text=text), died=False)
        self.staff.why.append((1, f"{name} {text}"))
        self._halt()
        return True

    def _start(self) -> None:
        self.phase, self.gen.ran, self.begun = "running", True, True
        self.finder.close()
        self.gen.digests, self.gen.agreed = {}, {}
        self.desk.drop("form")
        self.desk.say(messages.Start(self.generation, self.gen.nodes))
        if self.commits.version:
            self._announce()
        self._retire()

    def _retire(self) -> None:
        """Let go of those that the gang has started without and does not want: nodes that leave, or all that replicas
        have which are not wanted any more."""
        assert self.form
        members, size, active = self.members, self.members.replica_size, set(self.form.replicas)
        leaving = {members.nodes[name].place for name in self.staff.leaving}
        for number in sorted(members.places if self.surplus else leaving):
            place = members.places[number]
            if place.old:
                self.staff.release(number, "old")
            if place.now and not active & {rank // size for rank in place.now.workers}:
                unwanted = members.nodes[place.now.node].drained or not members.replicas_at(number)
                if place.next and not members.replicas_at(number):
                    self.staff.release(number, "next")  # or it would move up
                if unwanted:
                    self.staff.release(number, "now")
        if self.surplus:
            self.surplus = not active <= members.down.keys()
            kept = active | members.down.keys()
            for worker in sorted(w for w, found in members.workers.items() if found.rank // size not in kept):
                found = members.remove(worker)
                self.staff.starting.pop(worker, None)
                self.staff.kill(found.node, {found.rank: worker})

    # -- running

    def _on_steps_done(self, event: messages.StepsDone) -> bool:
        if event.generation == self.generation and self.gen.ran:
            step, at_ns = self.step_seen
            if self.gen.stepped and event.step > step:
                self.step_ns = (self.desk.now_ns - at_ns) // (event.step - step)
            self.step_seen = (event.step, self.desk.now_ns)
            self.gen.stepped = True
            self.committed = max(self.committed, event.step)
            assert self.form
            if event.step > self.form.step:
                self._progress()
        return False

    def _why_pause(self) -> str:
        """What a step boundary is wanted for."""
        assert self.form
        members, active = self.members, self.form.replicas
        if self.stop_ns >= 0:
            return "the run is to stop"
        for name in sorted(self.staff.leaving):
            place = members.nodes[name].place
            if members.can_switch(place):
                return f"place {place} has a new node"
            if self._can_do_without(name, list(active)):
                return f"node {name} is drained"
        if self.rescaled and any(r not in members.down for r in active):
            return f"{len(members.wanted)} replicas are wanted"
        more = self.rescaled or self.policy.usable(len(members.whole)) > len(active)  # those that are active are whole
        if more and (back := sorted(members.whole.difference(active))):
            return f"replicas {back} are whole again"
        return ""

    def _on_warning(self, event: messages.DeviceWarning) -> bool:
        return self.staff.warn(event)

    def _on_drain(self, event: messages.Drain) -> bool:
        return self.staff.drain(event)

    def _on_scale(self, event: messages.Scale) -> bool:
        count = max(self.policy.min_replicas, min(event.replicas, self.most))
        wanted, active = self.members.wanted, self.form.replicas if self.form else ()
        best = sorted(wanted, key=lambda r: (r not in active, self.members.down[r] > 0, r))
        others = [r for r in range(self.most) if r not in wanted]
        self.members.want((best + others)[:count])
        self.staff.why.append((-1, f"{count} replicas are wanted"))
        self.rescaled = self.surplus = True
        return True

    def _on_stop(self, event: messages.Stop) -> bool:
        self.stop_ns = self.desk.now_ns + event.grace_ns
        self.desk.set("stop", event.grace_ns)
        return True

    # -- checkpoints

    def _on_written(self, event: messages.Written) -> bool:
        if self.commits.written(event, self.lineage) and self.phase in ("saving", "flushing"):
            self.desk.set("saving", self.policy.save_ns)
        return self._look_at_save()

    def _on_unwritten(self, event: messages.Unwritten) -> bool:
        self.commits.unwritten(event)
        return self._look_at_save()

    def _on_durable(self, event: messages.Durable) -> bool:
        if event.generation == self.generation and self.gen.ran:
            self.committed = max(self.committed, event.step)
        news = self.commits.made(event, self.lineage)
        if self.phase == "saving" and self.commits.has(self.committed):
            self._done()
        elif self.phase == "flushing" and self.flush and self.commits.has(self.flush.step):
            self._end_flush()
        return news

    def _on_cost(self, event: messages.Cost) -> bool:
        if self.commits.cost(event, len(self.members.places)) and self.phase == "running":
            self._announce()
        return False

    def _announce(self) -> None:
        version, interval = self.commits.version, self.commits.interval
        self.desk.say(messages.Interval(version, *interval, self.gen.nodes))

    def _retry_save(self) -> None:
        self.commits.retry()

    def _save(self) -> bool:
        """Whether what is left of the generation is all that is needed to end."""
        workers = self.members.workers
        if self.form is None or not all(worker in workers for worker in self.form.crew.values()):
            return False
        copies = [workers[worker].copy for worker in self.form.crew.values()]
        applied = all(copy and copy.step == self.committed for copy in copies)
        if self.commits.has(self.committed) or (applied and not self.policy.save):
            self._done()
        elif self.policy.save and all(self.lineage.step_of(copy) == self.committed for copy in copies):
            self.phase = "saving"
            self.desk.set("saving", self.policy.save_ns)
            self.desk.say(messages.Save(self.generation, self.committed, self.gen.nodes))
            self._look_at_save()
        return self.phase != "gathering"

    def _look_at_save(self) -> bool:
        """Whether the last checkpoint was given up. (One of the same step, made in an earlier generation, may be.)"""
        if self.phase == "saving" and (lost := self.commits.why_lost(self.committed, self.generation)):
            self._not_durable(lost)
        write = self.flush
        if self.phase == "flushing" and write and self.commits.why_lost(write.step, write.generation):
            self._end_flush()
        return True

    def _save_late(self) -> None:
        if self.phase == "saving" and self.commits.is_open(self.committed, self.generation):
            self.desk.set("saving", self.policy.save_ns)
        elif self.phase == "saving":
            seconds = self.policy.save_ns // 10**9
            self._not_durable(f"nothing more of it was written in {seconds} s")
        elif self.phase == "flushing":
            self._end_flush()

    def _not_durable(self, reason: str) -> None:
        text = f"step {self.committed} was trained, but its checkpoint could not be written: {reason}"
        self._end(ok=False, reason=text, cause="failed")

    # -- the end

    def _done(self) -> None:
        verb = "done" if self.committed >= self.steps else "stopped"
        self._end(ok=True, reason=f"{verb} after step {self.committed}")

    def _out_of_time(self) -> None:
        text = f"stopped after step {self.committed}; the time for a checkpoint was too short"
        self._end(ok=False, reason=text)

    def _fail(self, reason: str, cause: Evidence | None = None, kind: str = "failed") -> None:
        """The run is over, and not done. What is in memory and newer than the last checkpoint is written first."""
        rank, failure = (cause.rank, cause.failure) if cause else (-1, Failure())
        self.ending = messages.Ended(False, reason, self.committed, self.commits.last, kind, rank, failure)
        self.desk.drop("form", "park", "lease", "again", "wait", "hold")
        self.phase, self.finder.asked = "flushing", False
        if self.policy.save and kind == "failed" and self.begun:
            self.desk.set("saving", self.policy.save_ns)
            self._ask()
        else:
            self._end_flush()

    def _flush(self) -> None:
        assert self.form
        homes = [self.form.places[rank // self.form.ranks_per_place] for rank in sorted(self.form.crew)]
        step = self.finder.newest_whole(homes, self.generation, self.commits.last)
        if step < 0:
            self._end_flush()
        else:
            self.flush = messages.Write(step, self.generation, tuple(sorted({*homes})))
            self.desk.say(self.flush)

    def _end_flush(self) -> None:
        e = self.ending
        assert e
        self._end(e.ok, e.reason, e.cause, e.rank, e.failure)

    def _end(self, ok: bool, reason: str, cause: str = "", rank: int = -1, failure: Failure | None = None) -> None:
        self.commits.tell_all()
        self.phase, self.desk.said, self.desk.timers = "ended", reason, {}
        about = (self.committed, self.commits.last, cause, rank, failure or Failure())
        self.ending = messages.Ended(ok, reason, *about)
        self.desk.out += self._last_words()

    def _last_words(self) -> list[Command]:
        assert self.ending
        alive = sorted(n for n, node in self.members.nodes.items() if not node.dead)
        return [self.ending, messages.Leave(self.ending.reason, tuple(alive))]


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"


HANDLERS: dict[type[Event], Callable[[Gang, Any], bool]] = {
    messages.NodeJoined: Gang._on_joined,
    messages.NodeSuspect: Gang._on_suspect,
    messages.NodeClear: Gang._on_clear,
    messages.NodeDead: Gang._on_dead,
    messages.WorkersUp: Gang._on_up,
    messages.WorkerDied: Gang._on_died,
    messages.ServiceDied: Gang._on_service,
    messages.Parked: Gang._on_parked,
    messages.Ready: Gang._on_ready,
    messages.Missing: Gang._on_missing,
    messages.Standing: Gang._on_standing,
    messages.Held: Gang._on_held,
    messages.StepsDone: Gang._on_steps_done,
    messages.Written: Gang._on_written,
    messages.Unwritten: Gang._on_unwritten,
    messages.Durable: Gang._on_durable,
    messages.Cost: Gang._on_cost,
    messages.DeviceWarning: Gang._on_warning,
    messages.Drain: Gang._on_drain,
    messages.Scale: Gang._on_scale,
    messages.Stop: Gang._on_stop,
    messages.TimerFired: Gang._on_timer,
}
TIMERS: dict[str, Callable[[Gang], None]] = {
    "resend": Gang._resend,
    "launch": Gang._look_at_late,
    "silence": Gang._silence,
    "park": Gang._park_late,
    "form": Gang._form_late,
    "lease": Gang._lease_ended,
    "ask": Gang._all_answered,
    "hold": Gang._give_up_holding,
    "save": Gang._retry_save,
    "saving": Gang._save_late,
    "stop": Gang._out_of_time,
    # The next look at the state takes the time into account.
    "wait": Gang._look,
    "again": Gang._look,
    "retry": Gang._look,
}
