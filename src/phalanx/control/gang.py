"""The gang: from what is heard, what is done about it. `apply` takes one event and returns commands; nothing else
changes the state, so whoever folds the same events has the same state, and `outstanding` says again what was not yet
answered.

    gathering   nobody trains: until enough replicas are whole
    asking      a state is wanted that no worker holds: which node has it in memory?
    forming     Form was said; until all are Ready
    running     Start was said; steps are done and committed without the controller
    halting     until all that are left of the generation are Parked
    saving      all are Parked at the last step; until it is Durable
    ended
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from phalanx.control import codec, messages
from phalanx.control.forming import Forming
from phalanx.control.membership import Membership
from phalanx.control.messages import Command, Event
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout

KEPT_CHECKPOINTS = 4


@dataclass
class Gang(Forming):
    stop_ns: int = -1  # by when to be gone

    @staticmethod
    def of(layout: Layout, steps: int, policy: Policy, start: int = 0) -> Gang:
        """`start`: the step that the run begins from."""
        members = Membership(layout.replica_size, layout.ranks_per_node or layout.world_size)
        members.want(list(range(layout.replica)))
        most = policy.max_replicas or layout.replica
        return Gang(policy, members, most, steps=steps, committed=start, durable=[(start, 0)])

    def to_bytes(self) -> bytes:
        return codec.to_bytes(self)

    @staticmethod
    def from_bytes(data: bytes) -> Gang:
        return codec.from_bytes(Gang, data)

    # -- what the shell calls

    def apply(self, now_ns: int, event: Event) -> list[Command]:
        self.now_ns = max(self.now_ns, now_ns)
        self._out = []
        if isinstance(event, messages.Many):
            for part in event.parts():
                self._take(part)
        else:
            self._take(event)
        return self._out

    def _take(self, event: Event) -> None:
        if self.phase == "ended":
            if isinstance(event, messages.NodeJoined):
                self._say(messages.Leave(self.said, (event.node,)))
        elif not self._refuses(event) and getattr(self, "_on_" + type(event).__name__)(event):
            self._advance()

    @property
    def calm(self) -> bool:
        """Nothing is under way."""
        return self.phase == "ended" or (self.phase == "running" and self.stepped and not self.pausing)

    def outstanding(self) -> list[Command]:
        """What was said and not answered. To be said again after a while, and by a new controller at once."""
        out: list[Command] = []
        launched: dict[str, dict[int, int]] = defaultdict(dict)
        for worker in sorted(self.starting):
            found = self.members.workers[worker]
            launched[found.node][found.rank] = worker
        for node, workers in sorted(launched.items()):
            out.append(messages.Launch(node, self.members.nodes[node].incarnation, workers))
        doomed: dict[str, list[int]] = defaultdict(list)
        for worker, node in sorted(self.killed.items()):
            doomed[node].append(worker)
        out += [messages.Kill(node, tuple(numbers)) for node, numbers in sorted(doomed.items())]
        if self.phase in ("forming", "halting"):
            waited = {self.members.workers[worker].node for worker in self.waiting}
            if self.phase == "forming":
                assert self.form
                waited |= {s.node for r, s in self.form.sources.items() if s.node and self.form.crew[r] in self.waiting}
                out.append(replace(self.form, nodes=tuple(sorted(waited))))
            else:
                kind = messages.Pause if self.quiet else messages.Halt
                out.append(kind(self.generation, tuple(sorted(waited))))
        elif self.phase == "asking":
            out.append(messages.Ask(self.generation, tuple(sorted(self.unanswered))))
        elif self.phase == "saving":
            out.append(messages.Save(self.generation, self.committed, self._crew_nodes()))
        elif self.phase == "running":
            if not self.stepped:
                out.append(messages.Start(self.generation, self._crew_nodes()))
            if self.pausing:
                out.append(messages.Pause(self.generation, self._crew_nodes()))
        return out

    def set_timers(self) -> list[Command]:
        """For a new controller."""
        return [messages.SetTimer(name, at_ns) for name, at_ns in sorted(self.timers.items())]

    # -- time

    def _on_TimerFired(self, event: messages.TimerFired) -> bool:
        if self.timers.get(event.timer, self.now_ns + 1) > self.now_ns:
            return False  # it was put off, or is not needed any more
        del self.timers[event.timer]
        getattr(self, "_timer_" + event.timer)()
        return True

    def _timer_resend(self) -> None:
        self._out += self.outstanding()

    def _timer_wait(self) -> None:
        pass  # `_gather` looks at the time

    def _advance(self) -> None:
        """After a change: what can be done now?"""
        if self.phase == "ended":
            return
        self._fill()
        ending = self.stop_ns >= 0 or self.committed >= self.steps
        if self.phase == "gathering":
            if not (ending and self._save()):
                self._gather()
        elif self.phase == "running" and not self.pausing:
            self.pausing = self._why_pause()
            if self.pausing:
                self._say(messages.Pause(self.generation, self._crew_nodes()))
        busy = self.phase in ("forming", "halting", "asking", "saving") or self.starting or self.killed
        if (busy or (self.phase == "running" and (self.pausing or not self.stepped))) and "resend" not in self.timers:
            self._timer("resend", self._again_ns)

    # -- running

    def _on_StepsDone(self, event: messages.StepsDone) -> bool:
        if event.generation == self.generation and self.ran:
            self.stepped = True
            self.committed = max(self.committed, event.step)
        return False

    def _on_Durable(self, event: messages.Durable) -> bool:
        if not self.lineage.counts(event.step, event.generation) or (event.step, event.generation) in self.durable:
            return False
        if event.generation == self.generation and self.ran:
            self.committed = max(self.committed, event.step)
        first, *others = self.durable
        self.durable = [first, *sorted([*others, (event.step, event.generation)])[-KEPT_CHECKPOINTS:]]
        if self.phase == "saving" and event.step == self.committed:
            self._end(f"done after step {self.committed}")
        return True

    def _why_pause(self) -> str:
        """What a step boundary is wanted for."""
        assert self.form
        members, active = self.members, self.form.replicas
        if self.stop_ns >= 0:
            return "the run is to stop"
        for name in sorted(self.leaving):
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
        return "links changed" if self.relink else ""

    def _on_Scale(self, event: messages.Scale) -> bool:
        count = max(self.policy.min_replicas, min(event.replicas, self.most))
        wanted, active = self.members.wanted, self.form.replicas if self.form else ()
        best = sorted(wanted, key=lambda r: (r not in active, self.members.down[r] > 0, r))
        others = [r for r in range(self.most) if r not in wanted]
        self.members.want((best + others)[:count])
        self.why.append((-1, f"{count} replicas are wanted"))
        self.rescaled = self.surplus = True
        return True

    def _on_Stop(self, event: messages.Stop) -> bool:
        self.stop_ns = self.now_ns + event.grace_ns
        self._timer("stop", event.grace_ns)
        return True

    def _timer_stop(self) -> None:
        self._end(f"stopped after step {self.committed}; the time for a checkpoint was too short")

    def _on_LinkLost(self, event: messages.LinkLost) -> bool:
        if not super()._on_LinkLost(event):
            return False
        used = {*self._crew_nodes()} if self.phase in ("forming", "running") else set()
        if used.issuperset(name for name in (event.a, event.b) if name):
            self.why.append((5, f"the link between {event.a} and {event.b or 'all'} is down, and is avoided"))
            self._halt()
        return True

    def _timer_link(self) -> None:
        super()._timer_link()
        self.relink = self.form is not None and set(self.form.avoid) != self.links

    # -- the end

    def _save(self) -> bool:
        """Whether what is left of the generation is all that is needed to end."""
        workers = self.members.workers
        if self.form is None or not all(worker in workers for worker in self.form.crew.values()):
            return False
        copies = [workers[worker].copy for worker in self.form.crew.values()]
        applied = all(copy and copy.step == self.committed for copy in copies)
        saved = any(step == self.committed for step, _ in self.durable)
        if saved or (applied and not self.policy.save):
            self._end(f"done after step {self.committed}")
        elif self.policy.save and all(self.lineage.step_of(copy) == self.committed for copy in copies):
            self.phase = "saving"
            self._say(messages.Save(self.generation, self.committed, self._crew_nodes()))
        return self.phase != "gathering"

    def _end(self, reason: str) -> None:
        self.phase, self.said, self.timers = "ended", reason, {}
        self._say(messages.Leave(reason, tuple(sorted(n for n, node in self.members.nodes.items() if not node.dead))))
