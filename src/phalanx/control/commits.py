"""Checkpoints, from written files to a manifest. Keepers write the files of their ranks. When all files of a checkpoint
are there, one keeper is told to write the manifest. A file that could not be written is written again from the snapshot
in memory, with growing pauses and a limit. The cost of checkpoints decides how far apart they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phalanx.control import messages
from phalanx.control.desk import Desk
from phalanx.control.interval import Measured, durable_interval, memory_interval, mtbf_ns
from phalanx.control.policy import Policy, S
from phalanx.control.sources import Lineage

KEPT = 4  # checkpoints to fall back to
MOST_OPEN = 8
MOST_LOST = 64  # remembered: each may be asked for, and answered, more than once
PIECE = 20_000  # files in a command: 1.6 MB, and a frame holds 8
PAUSE_NS, MOST_PAUSE_NS = S, 20 * S


@dataclass
class Draft:
    """A checkpoint without a manifest."""

    checkpoint: str
    step: int
    generation: int
    ranks: int
    seal: str
    files: dict[int, tuple[int, str]] = field(default_factory=dict)
    node: str = ""  # whose keeper commits it
    drain_ns: int = 0
    begun_ns: int = 0
    failed: set[str] = field(default_factory=set)  # nodes that must write again
    tries: int = 0
    reason: str = ""  # of the last failure
    retry_ns: int = -1

    @property
    def whole(self) -> bool:
        """Return whether only the manifest is missing."""
        return bool(self.ranks) and len(self.files) == self.ranks


@dataclass
class Commits:
    durable: list[tuple[int, int]] = field(default_factory=list)  # step, generation; first what the run began from
    drafts: dict[str, Draft] = field(default_factory=dict)  # by step and generation
    untold: dict[int, str] = field(default_factory=dict)  # step -> what is reported of it, as JSON
    lost: dict[str, str] = field(default_factory=dict)  # step and generation that were given up -> why
    version: int = 0  # of the interval
    interval: tuple[int, int] = (0, 0)  # steps between checkpoints, and between snapshots
    failures: int = 0  # that the run has seen
    began_ns: int = 0

    def bind(self, desk: Desk, policy: Policy) -> None:
        self._desk, self._policy = desk, policy

    @property
    def last(self) -> int:
        """Return the newest step that has a checkpoint; -1: none but what the run began from."""
        return max((step for step, _ in self.durable[1:]), default=-1)

    def has(self, step: int) -> bool:
        return any(step == known for known, _ in self.durable)

    # -- files

    def written(self, event: messages.Written, lineage: Lineage) -> bool:
        """Record written files. Return whether any of them is new."""
        key = _key(event.step, event.generation)
        if not lineage.counts(event.step, event.generation) or (event.step, event.generation) in self.durable:
            return False
        draft = self.drafts.get(key)
        if draft is None:
            draft = self.drafts[key] = Draft(event.checkpoint, event.step, event.generation, event.ranks, event.seal)
            draft.begun_ns = self._desk.now_ns
            self.lost.pop(key, None)
            while len(self.drafts) > MOST_OPEN:
                self._give_up(next(iter(self.drafts.values())), "newer checkpoints have overtaken it")
        if not draft.ranks:  # so far only a failure was known of it
            draft.checkpoint, draft.ranks, draft.seal = event.checkpoint, event.ranks, event.seal
        if (event.seal, event.ranks) != (draft.seal, draft.ranks):
            self._give_up(draft, f"ranks disagree: {event.seal} on {event.node}, {draft.seal} elsewhere")
            return False
        known = len(draft.files)
        draft.files.update(event.files)
        draft.failed.discard(event.node)
        draft.drain_ns = max(draft.drain_ns, event.drain_ns)
        draft.node = min(draft.node or event.node, event.node)
        if draft.whole:
            self._commit(draft)
        return len(draft.files) > known

    def _commit(self, draft: Draft) -> None:
        self._desk.out += self._orders(draft)

    def _orders(self, draft: Draft) -> list[messages.Commit]:
        about = (draft.node, draft.checkpoint, draft.step, draft.generation, draft.ranks)
        cuts = [range(draft.ranks)[at : at + PIECE] for at in range(0, draft.ranks, PIECE)]
        return [messages.Commit(*about, cut[0], tuple(draft.files[rank] for rank in cut), draft.seal) for cut in cuts]

    def unwritten(self, event: messages.Unwritten) -> None:
        key = _key(event.step, event.generation)
        draft = self.drafts.get(key)
        if draft is None:
            if (event.step, event.generation) in self.durable or key in self.lost:
                return
            draft = self.drafts[key] = Draft(event.checkpoint, event.step, event.generation, 0, "")
            draft.begun_ns = self._desk.now_ns
        if event.rank >= 0:
            draft.failed.add(event.node)
        if draft.retry_ns > self._desk.now_ns:
            return  # it is about to be tried again
        draft.tries += 1
        draft.reason = event.reason
        if draft.step > self.last:  # else nothing is lost by it
            said = {"step": event.step, "rank": event.rank, "node": event.node, "reason": event.reason}
            name = event.checkpoint or draft.checkpoint
            self._report("checkpoint_failed", **said, checkpoint=name, tries=draft.tries)
        if event.gone or draft.tries >= self._policy.save_tries:
            self._give_up(draft, event.reason)
            return
        draft.retry_ns = self._desk.now_ns + min(MOST_PAUSE_NS, PAUSE_NS << (draft.tries - 1))
        self._set_timer()

    def _set_timer(self) -> None:
        waiting = [d.retry_ns for d in self.drafts.values() if d.retry_ns >= 0]
        if waiting:
            self._desk.set("save", max(0, min(waiting) - self._desk.now_ns))

    def retry(self) -> None:
        for draft in self.drafts.values():
            if 0 <= draft.retry_ns <= self._desk.now_ns:
                draft.retry_ns = -1
                self._again(draft)
        self._set_timer()

    def _again(self, draft: Draft) -> None:
        if draft.whole:
            self._commit(draft)
        elif draft.failed:
            self._desk.say(messages.Write(draft.step, draft.generation, tuple(sorted(draft.failed))))

    def _give_up(self, draft: Draft, reason: str) -> None:
        key = _key(draft.step, draft.generation)
        del self.drafts[key]
        self.lost[key] = reason
        for old in list(self.lost)[:-MOST_LOST]:
            del self.lost[old]
        if draft.step > self.last:
            self._desk.say(messages.Note(-1, f"the checkpoint of step {draft.step} was given up: {reason}"))

    def lose_node(self, name: str, other: Callable[[], str]) -> None:
        """Handle the loss of a node and of its keeper: another one, if there is any, commits what this one was to
        commit."""
        for draft in list(self.drafts.values()):
            if name in draft.failed or not (found := other()):
                self._give_up(draft, f"node {name}, which had to write, is gone")
            elif draft.node == name:
                draft.node = found
                self._again(draft)

    def is_open(self, step: int, generation: int) -> bool:
        """Return whether a checkpoint is about to be tried again."""
        draft = self.drafts.get(_key(step, generation))
        return draft is not None and draft.retry_ns >= 0

    def why_lost(self, step: int, generation: int) -> str:
        """Return why the checkpoint of a step was given up; "": it was not."""
        return self.lost.get(_key(step, generation), "")

    def made(self, event: messages.Durable, lineage: Lineage) -> bool:
        """Record that a checkpoint has its manifest. Return whether that is news, and the checkpoint counts."""
        made = (event.step, event.generation)
        draft = self.drafts.pop(_key(*made), None)
        if not lineage.counts(*made) or made in self.durable:
            return False
        first, *others = self.durable
        self.durable = [first, *sorted([*others, made], key=lambda d: (d[1], d[0]))[-KEPT:]]
        for key, old in list(self.drafts.items()):
            if (old.generation, old.step) < (event.generation, event.step) and not old.whole:
                del self.drafts[key]
        self.tell(before=event.step)
        if draft:
            size, drain_ns = sum(size for size, _ in draft.files.values()), self._desk.now_ns - draft.begun_ns
            drain_s = (draft.drain_ns + drain_ns) / 1e9
            self.untold[event.step] = json.dumps({"checkpoint": draft.checkpoint, "bytes": size, "drain_s": drain_s})
        return True

    def forget(self, step: int, generation: int) -> None:
        """Drop a checkpoint of this run that cannot be loaded. What the run began from stays."""
        first, *others = self.durable
        self.durable = [first, *(d for d in others if d != (step, generation))]

    def keep_only(self, lineage: Lineage) -> None:
        """Drop the checkpoints of abandoned steps, after a branch."""
        self.durable = [d for i, d in enumerate(self.durable) if i == 0 or lineage.counts(*d)]
        self.drafts = {k: d for k, d in self.drafts.items() if lineage.counts(d.step, d.generation)}

    # -- what they cost

    def cost(self, event: messages.Cost, nodes: int) -> bool:
        """Record what a checkpoint cost, and choose the interval anew. Return whether that was possible."""
        body = self.untold.pop(event.step, "")
        if body:
            said = {"stall_s": event.stall_ns / 1e9, "slowdown_s": event.slowdown_ns / 1e9}
            self._report("checkpoint", step=event.step, **json.loads(body), **said)
        if event.step_ns <= 0:
            return False
        node_ns = (self._desk.now_ns - self.began_ns) * nodes
        mtbf = mtbf_ns(nodes, self._policy.failures / 1000, self.failures, node_ns)
        stall_ns, slowdown_ns, drain_ns = (max(1, ns) for ns in (event.stall_ns, event.slowdown_ns, event.drain_ns))
        measured = Measured(event.step_ns, stall_ns, slowdown_ns, drain_ns, mtbf)
        steps = durable_interval(measured).steps
        memory = memory_interval(event.step_ns, stall_ns, stall_ns, mtbf).steps
        self.version += 1
        self.interval = (steps, min(steps, memory))
        figures = {
            "step_ns": event.step_ns, "stall_ns": stall_ns, "slowdown_ns": slowdown_ns, "drain_ns": drain_ns,
            "mtbf_ns": mtbf, "nodes": nodes, "node_ns": node_ns, "failures": self.failures,
            "failures_per_1000_node_days": self._policy.failures / 1000,
        }  # fmt: skip
        self._report("checkpoint_interval", steps=steps, memory_steps=self.interval[1], measured=figures)
        return True

    def tell(self, before: int) -> None:
        """Report the checkpoints of steps before `before`: their cost will never be known."""
        for step in [step for step in self.untold if step < before]:
            body = json.loads(self.untold.pop(step))
            self._report("checkpoint", step=step, **body, stall_s=0.0, slowdown_s=0.0)

    def _report(self, about: str, **body: Any) -> None:
        self._desk.say(messages.Report(about, json.dumps(body)))

    def outstanding(self) -> list[messages.Command]:
        """Return the commands that were not answered."""
        asked = [draft for draft in self.drafts.values() if draft.retry_ns < 0]
        whole = [draft for draft in asked if draft.whole]
        out: list[messages.Command] = [
            messages.Write(draft.step, draft.generation, tuple(sorted(draft.failed)))
            for draft in asked
            if draft.failed and not draft.whole
        ]
        if whole:  # once the newest has its manifest the others do not matter
            out += self._orders(max(whole, key=lambda draft: (draft.generation, draft.step)))
        return out


def _key(step: int, generation: int) -> str:
    return f"{step}/{generation}"
