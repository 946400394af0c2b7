"""The end of a generation: whoever is left of it parks, and what they hold decides which step was its last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.control import messages
from phalanx.control.messages import Form
from phalanx.control.roll import Roll
from phalanx.control.sources import Copy, Lineage
from phalanx.control.staffing import Staffing

EACH_NS = 1_000_000  # of patience, per node


@dataclass
class Halting(Staffing):
    steps: int = 0  # of the whole run
    committed: int = 0  # the last step that is known to have been
    certain: bool = True  # no later one can have been
    lineage: Lineage = field(default_factory=Lineage)
    phase: str = "gathering"
    generation: int = 0
    form: Form | None = None  # of the generation
    ran: bool = False  # Start was said in it
    waiting: set[int] = field(default_factory=set)  # workers whose Ready or Parked is awaited
    quiet: bool = False  # halting: they stop after a step, by themselves
    pausing: str = ""  # why Pause was said
    patience_ns: int = -1  # until when full strength is waited for

    def __post_init__(self) -> None:
        super().__post_init__()
        self._roll = Roll.of(self.form, self.members.workers) if self.form else None

    def _gone(self, workers: dict[int, int]) -> None:
        super()._gone(workers)
        self.waiting.difference_update(workers.values())
        if self.form is None or not any(self.form.crew.get(rank) == w for rank, w in workers.items()):
            return
        assert self._roll
        for rank, worker in workers.items():
            self._roll.lose(rank, worker)
        if self.phase in ("forming", "running") or (self.phase == "halting" and self.quiet):
            self._halt()
        elif self.phase == "halting" and not self.waiting:
            self._resolve()
        elif self.phase == "saving":
            self.phase = "gathering"

    def _on_Parked(self, event: messages.Parked) -> bool:
        self._end_strangers(event.node, event.workers)
        if event.generation != self.generation or self.phase not in ("forming", "running", "halting"):
            return False
        new = self._park(event)
        if not new:
            return False
        if self.phase != "halting":
            planned = self.phase == "running" and (bool(self.pausing) or event.step >= self.steps)
            if not planned and not self.why:
                self.why.append((1, f"the worker of rank {new[0]} has lost its peers"))
            self._halt(quiet=planned)
        elif not self.waiting:
            self._resolve()
        return self.phase == "gathering"

    def _park(self, event: messages.Parked) -> list[int]:
        """The ranks that leave the generation with this."""
        assert self._roll
        copy = Copy(event.step, event.prepared, event.made) if event.step >= 0 else None
        workers, generation, left = self.members.workers, self.generation, self._roll.left
        new, ranks = [], []
        for worker in event.workers:
            if worker in left and (found := workers[worker]).node == event.node:
                found.parked, found.copy = generation, copy
                new.append(worker)
                ranks.append(found.rank)
        if new:
            self.waiting.difference_update(new)
            self._roll.park(ranks[0], new, copy)
        return ranks

    def _halt(self, quiet: bool = False) -> None:
        assert self._roll
        self.phase, self.quiet = "halting", quiet
        self.timers.pop("form", None)
        self.waiting = set(self._roll.left)
        self._timer("park", self.policy.pause_ns if quiet else self.policy.park_ns)
        if not self.waiting:
            self._resolve()
        elif not quiet:
            self._say(messages.Halt(self.generation, self._roll.nodes()))
        if "resend" not in self.timers:
            self._timer("resend", self._again_ns)

    @property
    def _again_ns(self) -> int:
        """Until what is not answered is said again: many take longer to answer, and would only be kept from it."""
        return self.policy.resend_ns + len(self.members.nodes) * EACH_NS

    def _resolve(self) -> None:
        """All that are left of the generation are parked: which was its last step? A step counts when all of them have
        voted for it, as those that are gone may have seen it committed. If one has not, nobody can have."""
        assert self.form and self._roll
        g = self.generation
        if self._roll.copies:
            votes = (c.prepared if c and c.made == g else self.form.step for c in self._roll.copies)
            self.committed = max(self.committed, min(votes))
        elif self.ran:
            self.certain = False
        self.lineage.end(g, self.committed)
        self.phase, self.ran, self.pausing = "gathering", False, ""
        self.timers.pop("park", None)
        if not self.quiet:
            self._be_patient(max(self.policy.wait_ns, self.policy.start_ns if self.starting else 0))

    def _timer_park(self) -> None:
        if self.quiet:
            self._halt()
            return
        nodes = self._nodes_of(self.waiting)
        if not self._give_up_waiting():
            self._hold(f"{len(nodes)} nodes do not answer: it must be the network")
        if self.phase == "halting":
            self._timer("park", self.policy.park_ns)

    def _timer_form(self) -> None:
        nodes = self._nodes_of(self.waiting)
        if not self._give_up_waiting():
            self.why.append((1, f"{len(nodes)} nodes were not ready in time"))
            self._halt()
        elif self.phase == "forming":
            self._timer("form", self.policy.form_ns)

    def _give_up_waiting(self) -> bool:
        """Whoever does not answer, on a node that does, hangs. Not when many do not: they wait for something else, or
        cannot be reached."""
        nodes = {self.members.workers[worker].node for worker in self.waiting}
        if len(nodes | self.suspects) > max(1, self._most_silent()):
            return False
        self.silent |= nodes & self.suspects
        for worker in sorted(self.waiting):
            if worker in self.waiting and self.members.workers[worker].node not in self.suspects:
                self._lose_worker(worker, "does not answer", kill=True)
        self._give_up_silent()
        return True

    def _be_patient(self, for_ns: int) -> None:
        self.patience_ns = self.now_ns + for_ns
        if for_ns:
            self._timer("wait", for_ns)

    # -- names

    def _crew_nodes(self) -> tuple[str, ...]:
        assert self._roll
        return self._roll.crew_nodes

    def _nodes_of(self, workers: Iterable[int]) -> tuple[str, ...]:
        return tuple(sorted({self.members.workers[worker].node for worker in workers}))
