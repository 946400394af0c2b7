"""Incidents: what broke during a run, derived from its events. Each has phases, evidence and a verdict in plain words.
Events are read once and in order, so following a live run costs only the new ones."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

#: Events that are incidents in themselves and do not stop training: their kind, and the text to show.
NOTICES = {
    "checkpoint_failed": ("checkpoint", "could not be written"),
    "checkpoint_quarantined": ("checkpoint", "is damaged and was put aside"),
    "checkpoint_unreadable": ("checkpoint", "cannot be read and is left as it is"),
    "checkpoint_not_removed": ("checkpoint", "could not be removed"),
    "retention_refused": ("checkpoint", "was kept although it is old"),
    "data_quarantine": ("data", "is damaged; other samples took the place of its samples"),
    "grad_norm differs": ("numbers", "has another gradient norm on some ranks"),
    "step skipped": ("numbers", "was skipped"),
    "ledger gap": ("numbers", "is missing in the ledger"),
    "record dropped": ("record", "is the first after the disk of the record was full"),
}
SOURCES = {
    "live": "from the live state of another replica",
    "memory": "from a snapshot in memory",
    "start": "from the checkpoint or the first weights",
}


@dataclass
class Incident:
    number: int
    kind: str  # worker, hang, node, controller, service, generation, or a kind in NOTICES
    at: float  # when it was noticed
    subject: str
    what: str
    since: float = 0.0  # when the last step before it ended
    undone_since: float = 0.0  # when the first step that it undid began
    step: int = -1  # where the run stood
    rung: int = -1
    stops: bool = True  # whether training waited for it
    decided: float = 0.0
    started: float = 0.0
    committed: float = 0.0
    joined: float = 0.0  # when the gang was formed at full strength again
    join_s: float = 0.0  # how long everyone stood still for that
    healed: float = 0.0
    restore_s: float = 0.0
    sources: set[str] = field(default_factory=set)
    lost_steps: int = 0
    generation: int = 0  # the generation that it led to
    ended_run: bool = False
    to_the_end: bool = False  # the run ended before it was healed
    evidence: list[Event] = field(default_factory=list)
    lost_gpu_s: float = 0.0  # set by the account of the run
    dollars: float | None = None
    kwh: float | None = None

    @property
    def open(self) -> bool:
        return not self.healed and not self.ended_run and not self.to_the_end

    def phases(self) -> dict[str, float]:
        """Seconds spent in each phase that is known."""
        marks = {
            "detect": self.at if self.stops and self.since else 0.0,
            "decide": self.decided,
            "re-form": self.started,
            "first step": self.committed,
            "heal": self.joined if self.stops else self.healed,
            "join": self.healed if self.healed > self.committed > 0 else 0.0,
        }
        out, last = {}, self.since or self.at
        for name, mark in marks.items():
            if mark and (name != "heal" or mark > last):
                out[name] = max(0.0, mark - last)
                last = max(last, mark)
        return out

    def verdict(self) -> str:
        """Say what happened, what was done, and what it cost."""
        said = [f"{clock(self.at)}: {self.subject} {self.what}."]
        if not self.stops:
            if self.kind == "controller":
                said.append(
                    f"It was back after {seconds(self.healed - self.at)}; training did not wait for it."
                    if self.healed
                    else "It is being started again; training does not wait for it."
                )
            elif self.kind == "service" and self.healed:
                said.append(f"It was started again after {seconds(self.healed - self.at)}.")
            elif self.kind in ("worker", "hang", "node"):
                again = f"It happened {len(self.evidence):,} times. " if len(self.evidence) > 1 else ""
                said.append(f"{again}It took no part in training, which did not wait for it.")
            return " ".join(said)
        if self.sources:
            said.append(f"The ranks that joined took their state {' and '.join(sorted(self.sources))}.")
        if self.committed:
            text = f"Training went on {seconds(self.committed - self.at)} later"
            if self.healed > self.committed:
                text += f", at full strength after {seconds(self.healed - self.at)}"
                if self.join_s:
                    text += f": for {seconds(self.join_s)} all stood still for those that joined"
            elif not self.healed:
                text += f", with fewer replicas {'to the end of the run' if self.to_the_end else 'so far'}"
            said.append(f"{text}.")
        elif not self.ended_run:
            said.append("Training has not gone on yet.")
        if self.lost_steps:
            said.append(f"{self.lost_steps:,} finished {plural(self.lost_steps, 'step')} had to be done again.")
        elif self.committed:
            said.append("No finished step was lost.")
        if self.ended_run:
            said.append("It ended the run.")
        if self.lost_gpu_s:
            cost = f", {money(self.dollars)}" if self.dollars is not None else ""
            said.append(f"{figure(self.lost_gpu_s)} GPU-seconds lost{cost}.")
        return " ".join(said)

    def to_dict(self) -> dict[str, Any]:
        names = (
            "number", "kind", "at", "since", "subject", "what", "step", "rung", "stops", "decided", "started",
            "committed", "joined", "join_s", "healed", "restore_s", "lost_steps", "generation", "ended_run", "evidence",
            "lost_gpu_s", "dollars", "kwh", "open", "to_the_end",
        )  # fmt: skip
        out = {name: getattr(self, name) for name in names}
        return {**out, "sources": sorted(self.sources), "phases": self.phases(), "verdict": self.verdict()}


class Incidents:
    """Fold events into incidents. `windows` are the times when the gang stood still: (from, until)."""

    def __init__(self, replicas: int, replica_size: int = 1):
        self.replicas, self.replica_size = replicas, replica_size
        self.all: list[Incident] = []
        self.forms: list[Event] = []  # one for each generation, in order
        self.changes: list[Event] = []  # generations that were not caused by a failure
        self.windows: list[tuple[float, float]] = []
        self.ready = 0.0  # when the first generation began to train
        self.ended: Event | None = None
        self.step = -1
        self._nodes: dict[int, str] = {}  # rank -> the node where it was last started
        self._form: Event | None = None
        self._begun = False  # whether the latest generation is known to train

    def add(self, event: Event) -> None:
        kind, at = str(event.get("type", "")), _number(event.get("time"))
        if kind in NOTICES:
            self._notice(kind, at, event)
        elif kind == "exit" and self.ended is None:
            self._exit(at, event)
        elif kind == "hang" and self.ended is None:
            self._hang(at, event)
        elif kind == "node" and self.ended is None:
            self._node(at, event)
        elif kind == "started" and event.get("service"):
            self._heal("service", at, f"{event['service']} of {event.get('node')}")
        elif kind == "started":
            self._nodes[_int(event.get("rank"))] = str(event.get("node"))
        elif kind == "control state":
            self._heal("controller", at, "The controller")
        elif kind == "control form":
            self._formed(at, event)
        elif kind == "control started":
            self._began(at, event)
        elif kind == "entered":
            for each in self._waiting() if self.ready else ():
                each.restore_s = max(each.restore_s, _number(event.get("restore_s")))
                if (source := str(event.get("source"))) in SOURCES:
                    each.sources.add(SOURCES[source])
        elif kind == "first commit":
            self._committed(at, event)
        elif kind == "ended":
            self.ended = event
            for each in self._waiting():
                each.to_the_end = bool(each.committed)
                each.ended_run = not each.committed and not event.get("ok")
                each.evidence.append(event)

    # -- failures

    def _exit(self, at: float, event: Event) -> None:
        signal, code, node = event.get("signal"), event.get("code"), event.get("node")
        if not signal and not code:
            return
        how = f"was killed by {signal}" if signal else f"ended with code {code}"
        if event.get("service"):
            self._open("service", at, f"{event['service']} of {node}", how, event, stops=False)
        elif _int(event.get("rank")) >= 0:
            self._fail("worker", at, f"Rank {event['rank']} on {node}", how, event, [_int(event["rank"])])

    def _hang(self, at: float, event: Event) -> None:
        how = f"hung: it {event.get('reason')}"
        rank, name = _int(event.get("rank")), f"Rank {event.get('rank')} on {event.get('node')}"
        one = self._fail("hang", at, name, how, event, [rank] if rank >= 0 else None)
        if event.get("final") and one.kind == "hang":  # the others are only waiting for this one
            one.subject, one.what = name, how
        progress = event.get("progress")
        if isinstance(progress, dict):
            one.step = max(one.step, _int(progress.get("step")))

    def _node(self, at: float, event: Event) -> None:
        name, what = str(event.get("node")), str(event.get("what"))
        how = what.removeprefix("died: ") if what.startswith(("died: was ", "died: ended ")) else what
        if name == "controller":
            if what.startswith(("died", "is silent")):
                self._open("controller", at, "The controller", how, event, stops=False)
            elif what == "started":
                self._heal("controller", at, "The controller")
        elif what.startswith("died"):
            held = [rank for rank, node in self._nodes.items() if node == name] if self._nodes else None
            self._fail("node", at, f"Node {name}", how, event, held)

    def _notice(self, kind: str, at: float, event: Event) -> None:
        name = next((name for name in ("checkpoint", "shard", "step") if name in event), "")
        about = f"{name.capitalize()} {event[name]}" if name else "The run"
        group, text = NOTICES[kind]
        for one in reversed(self.all):
            if one.subject == about and one.what.startswith(text):  # the same again
                one.evidence.append(event)
                return
        reason = event.get("reason") or (f"ranks {event['ranks']}" if "ranks" in event else "")
        self._open(group, at, about, f"{text}: {reason}" if reason else text, event, stops=False).healed = at

    def _fail(self, kind: str, at: float, subject: str, what: str, event: Event, ranks: list[int] | None) -> Incident:
        """Open an incident that stops the gang, or add to the one that the gang is waiting for. `ranks`: those that
        failed; None: unknown. Ranks outside the gang do not stop it, but an incident may need them back to heal."""
        there = (self._form or {}).get("replicas")
        stops = ranks is None or there is None or any(rank // self.replica_size in there for rank in ranks)
        for one in reversed(self._waiting()):
            if not one.committed or (ranks and not stops):
                if one.kind == "generation":  # the controller reported it before the agent did
                    one.kind, one.subject, one.what = kind, subject, what
                one.evidence.append(event)
                return one
        for one in self.all if not stops else ():
            if not one.stops and (one.kind, one.subject) == (kind, subject):  # the same again
                one.evidence.append(event)
                return one
        one = self._open(kind, at, subject, what, event, stops)
        one.healed = 0.0 if stops else at
        return one

    def _open(self, kind: str, at: float, subject: str, what: str, event: Event, stops: bool = True) -> Incident:
        one = Incident(len(self.all) + 1, kind, at, subject, what, step=self.step, stops=stops, evidence=[event])
        self.all.append(one)
        return one

    def _heal(self, kind: str, at: float, subject: str) -> None:
        for one in self.all:
            if one.kind == kind and one.subject == subject and not one.healed:
                one.healed = at

    # -- recovery

    def _waiting(self) -> list[Incident]:
        return [one for one in self.all if one.stops and one.open]

    def _formed(self, at: float, event: Event) -> None:
        first = not self.forms
        self._form, self._begun = event, False
        self.forms.append(event)
        lost = max(0, _int(event.get("last")) - _int(event.get("step"))) if event.get("branch") else 0
        if _int(event.get("rung")) >= 1 and all(one.committed for one in self._waiting()):
            self._open("generation", at, "The gang", f"was formed anew: {event.get('reason')}", event)
        elif not self._waiting():
            if not first:
                self.changes.append(event)
            return
        for one in self._waiting():
            if one.committed or (one.started and _int(event.get("rung")) < 1):
                # It is only waiting for its replicas, which may or may not come back with this generation. (The first
                # step without them may be reported after this decision.)
                one.joined = at if self._is_whole(event) else one.joined
                continue
            one.decided = one.decided or at
            one.rung = max(one.rung, _int(event.get("rung")))
            one.generation = _int(event.get("generation"))
            one.step = _int(event.get("step"))
            one.lost_steps = max(one.lost_steps, lost)
            if event not in one.evidence:
                one.evidence.append(event)

    def _began(self, at: float, event: Event) -> None:
        if self._begun:
            return
        self._begun = True
        if not self.ready:
            self.ready = at
        elif self._form:
            begins = [_number(self._form.get("time"))] + [one.at for one in self._waiting() if not one.started]
            self.windows.append((min(begins), at))
        for one in self._waiting():
            one.started = one.started or at
            one.join_s = at - one.joined if one.joined else 0.0

    def _committed(self, at: float, event: Event) -> None:
        self.step = max(self.step, _int(event.get("step")))
        form = next((f for f in reversed(self.forms) if f.get("generation") == event.get("generation")), {})
        late = [one for one in self._waiting() if not one.started and one.at <= _number(form.get("time"))]
        if late and form is self._form:
            self._began(at, event)  # the ranks reported before the controller did
        for one in self._waiting():
            if not one.started:
                continue
            one.committed = one.committed or at
            if self._is_whole(form):
                one.healed = at
                if form not in one.evidence:
                    one.evidence.append(form)

    def _is_whole(self, form: Event) -> bool:
        return len(form.get("replicas") or ()) >= self.replicas


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _int(value: object) -> int:
    return int(value) if isinstance(value, int | float) else -1


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def figure(value: float) -> str:
    """Format a number with at most three significant figures."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.3g} µs" if value > 0 else "0 s"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def money(value: float) -> str:
    if value >= 10_000:
        return f"${value / 1e3:,.3g} k"
    if value >= 100:
        return f"${float(f'{value:.3g}'):,.0f}"
    return f"${value:,.2f}" if value >= 0.1 else f"${value:.2g}"


def plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
