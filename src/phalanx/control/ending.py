"""How a run ends. A run that is done, or is told to stop, saves its last step. A run that fails writes what is in
memory and newer than the last checkpoint. A stopping run that has not begun to save its last step when half of its
grace period is over does so too, as a fallback. Then all nodes are told to leave. The phases saving, flushing and ended
begin here."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.control import messages
from phalanx.control.commits import Commits
from phalanx.control.desk import Desk
from phalanx.control.finding import Finder
from phalanx.control.generation import Generation
from phalanx.control.membership import Membership
from phalanx.control.messages import EVERYONE, Command, Failure
from phalanx.control.policy import Policy
from phalanx.control.sources import Lineage
from phalanx.control.verdict import Evidence
from phalanx.control.worlds import Worlds


@dataclass
class Ending:
    steps: int  # of the whole run
    stop_ns: int = -1  # when the run must be gone; -1: it was not told to stop
    outcome: messages.Ended | None = None  # while flushing and after
    asks: int = 0  # the generation whose snapshots are to be written before the grace period ends
    write: messages.Write | None = None  # the order to write them

    def bind(
        self,
        desk: Desk,
        members: Membership,
        policy: Policy,
        worlds: Worlds,
        gen: Generation,
        lineage: Lineage,
        finder: Finder,
        commits: Commits,
    ) -> None:
        self._desk, self._members, self._policy, self._worlds = desk, members, policy, worlds
        self._gen, self._lineage, self._finder, self._commits = gen, lineage, finder, commits

    @property
    def due(self) -> bool:
        return self.stop_ns >= 0 or self._lineage.committed >= self.steps

    def stop(self, event: messages.Stop) -> bool:
        self.stop_ns = self._desk.now_ns + event.grace_ns
        self._desk.set("stop", event.grace_ns // 2)
        return True

    def look_at_time(self) -> None:
        """Act when part of the grace period is over. At half of it, have the snapshots in memory written in case the
        last step cannot be saved; at its end, give up."""
        left_ns = self.stop_ns - self._desk.now_ns
        if left_ns <= 0:
            self._end_flush()
            return
        self._desk.set("stop", left_ns)
        if self._desk.phase not in ("saving", "flushing") and self._policy.save and self._gen.begun:
            self.asks = self._gen.number
            self._finder.ask(self.asks)
            self._desk.set("ask", min(self._policy.ask_ns, left_ns // 2))

    # -- the last checkpoint

    def save(self) -> bool:
        """Save the last step, or end if that is done. Return False if the replicas left of the generation cannot do
        it."""
        standing, committed = self._gen.standing(), self._lineage.committed
        if not standing or len(standing) < len(self._gen.worlds):
            return False
        copies = [self._worlds.replicas[r].copy for r in standing]
        applied = all(copy and copy.step == committed for copy in copies)
        if self._commits.has(committed) or (applied and not self._policy.save):
            self._done()
        elif self._policy.save and all(self._lineage.step_of(copy) == committed for copy in copies):
            self._desk.phase = "saving"
            self.be_patient()
            self._desk.say(self._order_to_save())
            self.look()
        return self._desk.phase != "gathering"

    def _order_to_save(self) -> messages.Save:
        return messages.Save(self._gen.number, self._lineage.committed, EVERYONE)

    def be_patient(self) -> None:
        self._desk.set("saving", self._policy.save_ns)

    def look(self) -> None:
        """End when the awaited checkpoint is made or given up. (One of the same step, made in an earlier generation,
        may have been given up before.)"""
        phase, commits, step = self._desk.phase, self._commits, self._lineage.committed
        if phase == "saving" and commits.has(step):
            self._done()
        elif phase == "saving" and (lost := commits.why_lost(step, self._gen.number)):
            self._give_up(lost)
        elif phase == "flushing" and self.write and not self.is_writing:
            self._end_flush()
        elif phase == "gathering" and self.write and commits.has(step):
            self._done()

    @property
    def is_writing(self) -> bool:
        """Return whether the snapshots being written are neither durable nor given up yet."""
        write, commits = self.write, self._commits
        return write is not None and not (commits.has(write.step) or commits.why_lost(write.step, write.generation))

    def look_late(self) -> None:
        """Give up a checkpoint that makes no progress, unless it is being retried."""
        if self._desk.phase == "flushing":
            self._end_flush()
        elif self._desk.phase == "saving" and self._commits.is_open(self._lineage.committed, self._gen.number):
            self.be_patient()
        elif self._desk.phase == "saving":
            self._give_up(f"nothing more of it was written in {self._policy.save_ns // 10**9} s")

    def _give_up(self, reason: str) -> None:
        step = self._lineage.committed
        text = f"step {step} was trained, but its checkpoint could not be written: {reason}"
        self._end(ok=False, reason=text, cause="failed")

    # -- a failure

    def fail(self, reason: str, cause: Evidence | None = None, kind: str = "failed") -> None:
        """End a run that is not done. Snapshots in memory that are newer than the last checkpoint are written first."""
        rank, failure = (cause.rank, cause.failure) if cause else (-1, Failure())
        about = (self._lineage.committed, self._commits.last, kind, rank, failure)
        self.outcome = messages.Ended(False, reason, *about)
        self._desk.drop("form", "build", "leave", "park", "lease", "again", "wait", "hold")
        self._desk.phase, self._finder.asked, self.asks = "flushing", False, 0
        if self._policy.save and kind == "failed" and self._gen.begun:
            self.be_patient()
            self._finder.ask(self._gen.number)
        else:
            self._end_flush()

    def flush(self) -> None:
        """Write the newest step that all nodes hold in memory, from this generation or from the last that made any."""
        self.asks = 0
        for generation, seats in sorted(self._gen.seats.items(), reverse=True):
            homes = [node for replica, nodes in seats.items() for node in self._worlds.homes(replica, nodes)]
            step = self._finder.newest_whole(homes, generation, self._commits.last)
            if step >= 0:
                self.write = messages.Write(step, generation, tuple(sorted({*homes})))
                self._desk.say(self.write)
                return
        if self._desk.phase == "flushing":
            self._end_flush()

    def _end_flush(self) -> None:
        """End with the failure; for a run that could not save its last step in time, report which step is saved."""
        step, saved = self._lineage.committed, self._commits.last
        if e := self.outcome:
            self._end(e.ok, e.reason, e.cause, e.rank, e.failure)
        elif step == saved:
            self._done()
        else:
            what = f"step {saved} is saved" if saved >= 0 else "none of its steps is saved"
            self._end(ok=False, reason=f"stopped after step {step}; the time for its checkpoint was too short; {what}")

    # -- the end

    def _done(self) -> None:
        step = self._lineage.committed
        self._end(ok=True, reason=f"{'done' if step >= self.steps else 'stopped'} after step {step}")

    def _end(self, ok: bool, reason: str, cause: str = "", rank: int = -1, failure: Failure | None = None) -> None:
        self._commits.tell(before=self._lineage.committed + 1)
        self._desk.phase, self._desk.said, self._desk.timers = "ended", reason, {}
        about = (self._lineage.committed, self._commits.last, cause, rank, failure or Failure())
        self.outcome = messages.Ended(ok, reason, *about)
        self._desk.out += self.outstanding()

    def outstanding(self) -> list[Command]:
        if self._desk.phase == "saving":
            return [self._order_to_save()]
        if self._desk.phase != "ended":
            return [self.write] if self.write and self.is_writing else []
        assert self.outcome
        alive = sorted(name for name, node in self._members.nodes.items() if not node.dead)
        return [self.outcome, messages.Leave(self.outcome.reason, tuple(alive))]
