"""One failure is one failure, however large the gang: its whole work, from the death to full strength, grows with the
ranks of a replica and with the number of replicas, but not with all ranks. Work is counted, not timed: instructions of
the machine, plus each item that it takes out of its own tables, which the interpreter may do in one instruction."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from phalanx.control import codec
from phalanx.control.gang import Gang
from phalanx.control.generation import Generation
from phalanx.control.messages import (
    DeviceWarning,
    Durable,
    Launch,
    NodeJoined,
    NodeSuspect,
    Parked,
    StepsDone,
    TimerFired,
)
from phalanx.control.staffing import MANY, Staff
from phalanx.control.verdict import MOST_EVIDENCE
from tests.control.crew import Crew

PER_NODE = 4
TABLES = ("nodes", "places", "workers")


class Table(dict):
    """A dictionary that counts the items taken out of it one by one; a look-up costs nothing."""

    taken = 0

    def __iter__(self):
        for key in dict.__iter__(self):
            Table.taken += 1
            yield key

    def keys(self):
        return Keys(self)

    def values(self):
        return [self[key] for key in self]

    def items(self):
        return [(key, self[key]) for key in self]


class Keys(list):
    """A view of a table's keys, as far as it is used."""

    def __init__(self, table):
        self.table = table

    def __iter__(self):
        return iter(self.table)

    def __contains__(self, key):
        return key in self.table

    def __and__(self, other):
        return {key for key in other if key in self.table}

    __rand__ = __and__

    def __rsub__(self, other):
        return {key for key in other if key not in self.table}


class Worked(Crew):
    """A crew that counts the work of its gang, and the bytes of its commands."""

    def __init__(self, *args, **kwargs):
        self.work = self.said = 0
        super().__init__(*args, check=lambda gang: None, **kwargs)

    def say(self, *events):
        apply, members = self.gang.apply, self.gang.members
        for name in TABLES:
            if not isinstance(getattr(members, name), Table):
                setattr(members, name, Table(getattr(members, name)))
        self.gang.apply = lambda now, event: self.count(apply, now, event)
        told = super().say(*events)
        self.gang.apply = apply
        return told

    def count(self, apply, now, event):
        Table.taken = 0
        sys.settrace(self.enter)
        try:
            commands = apply(now, event)
        finally:
            sys.settrace(None)
        self.work += Table.taken
        self.said += sum(len(json.dumps(codec.encode(command))) for command in commands)
        return commands

    def enter(self, frame, kind, arg):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, frame, kind, arg):
        self.work += kind == "opcode"
        return self.step


def failure(replicas, shards):
    """Return the work of one failure, and the bytes sent: a rank dies, the others continue without its replica, and it
    joins them again."""
    crew = Worked(replicas, shards, PER_NODE)
    crew.say(StepsDone(1, 4))
    crew.work = crew.said = 0
    ended = crew.gang.worlds.replicas[1].world
    crew.say(crew.dies(shards + 1), *(crew.parted(r, 4, kept=True) for r in range(replicas) if r != 1))
    assert crew.gang.form.replicas == (0, *range(2, replicas)) and crew.gang.gen.pausing
    crew.say(StepsDone(2, 5), *(crew.parted(r, 5) for r in crew.gang.form.replicas))
    crew.say(StepsDone(3, 6))
    assert len(crew.gang.form.replicas) == replicas and crew.gang.calm and crew.gang.worlds.replicas[1].world > ended
    return crew.work, crew.said


def joining(nodes):
    """Return the work of all nodes joining."""
    crew = Worked(nodes // 4, 4 * PER_NODE, PER_NODE)
    return crew.work, crew.said


def dying(nodes):
    """Return the work of one worker's death on each node, while none of them is restarted."""
    crew = Worked(1, nodes * PER_NODE, PER_NODE)
    crew.mute = Launch
    crew.work = crew.said = 0
    crew.say(*(crew.dies(rank) for rank in range(0, nodes * PER_NODE, PER_NODE)))
    assert len(crew.gang.staff.late_ns) == nodes
    return crew.work, crew.said


def one(event):
    """Return a function for the work of one event, in a gang of a number of replicas."""

    def work(replicas):
        crew = Worked(replicas, 2 * PER_NODE, PER_NODE)
        crew.say(StepsDone(1, 1))
        crew.work = crew.said = 0
        crew.say(event)
        return crew.work, crew.said

    return work


def grown(work, replicas, shards):
    """Return the work that grows with all ranks. Take the work of a gang of twice as many replicas, each twice as
    large, and subtract the growth with more replicas and that with larger ones."""
    small, wide, tall, both = (work(replicas * i, shards * j) for i, j in ((1, 1), (2, 1), (1, 2), (2, 2)))
    return [d - c - b + a for a, b, c, d in zip(small, wide, tall, both, strict=True)]


def bent(work, first, more):
    """Return the work that grows with the square of a number."""
    low, middle, high = (work(first + i * more) for i in range(3))
    return [c - 2 * b + a for a, b, c in zip(low, middle, high, strict=True)]


EVENTS = [
    StepsDone(1, 3),
    NodeSuspect("n1", 1),
    NodeJoined("n1", 1, ""),
    NodeJoined("new", 1, ""),
    Parked(("n1",), (1,), ((2,),), 0, 3, 3, 0),
    DeviceWarning("n1", 1, "ecc", 99),
    Durable(3, 1),
    TimerFired("resend"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_costs_the_same_in_a_gang_of_any_size(event):
    (few, _), (many, _) = map(one(event), (3, 12))
    assert many - few < 12, "it looks through the gang"


def test_a_failure_costs_as_much_as_its_replica_and_the_number_of_replicas():
    work, said = grown(failure, 4, 8)
    assert work < 4 * 8, "something looks at all ranks"
    assert said < 4 * 8, "all ranks are named"


def test_nodes_that_join_cost_as_much_as_there_are():
    work, said = bent(joining, first=MANY + 4, more=12)
    assert work < 12**2, "each looks at all"
    assert said < 12**2, "each is told of all"


def test_workers_that_die_everywhere_cost_as_much_as_there_are():
    work, _ = bent(dying, first=MOST_EVIDENCE + 4, more=12)
    assert work < 12**2, "each looks at all that start again"


# -- planted bugs


def before(cls, name, scan):
    def plant(monkeypatch):
        original = getattr(cls, name)

        def scanned(self, *args, **kwargs):
            scan(self)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(cls, name, scanned)

    return plant


def name_all(monkeypatch):
    order = Generation.order_to_part
    monkeypatch.setattr(
        Generation, "order_to_part", lambda self: replace(order(self), nodes=tuple(self._members.nodes))
    )


SCANS = {
    "all workers, for those that are not up": before(Staff, "fill", lambda s: sorted(s._members.workers)),
    "all ranks, for those of a replica": before(Gang, "_halt", lambda g: [w.rank for w in g.members.workers.values()]),
    "all nodes, for those that are dead": before(
        Gang, "_advance", lambda g: any(n.dead for n in g.members.nodes.values())
    ),
    "all nodes are told by name": name_all,
}


@pytest.mark.parametrize("scan", SCANS)
def test_a_planted_scan_is_seen(scan, monkeypatch):
    SCANS[scan](monkeypatch)
    with pytest.raises(AssertionError):
        test_a_failure_costs_as_much_as_its_replica_and_the_number_of_replicas()


def test_a_planted_scan_of_each_node_that_joins_is_seen(monkeypatch):
    before(Gang, "_gather", lambda gang: sorted(gang.members.nodes))(monkeypatch)
    with pytest.raises(AssertionError, match="each looks at all"):
        test_nodes_that_join_cost_as_much_as_there_are()


def test_a_planted_scan_of_all_that_start_again_is_seen(monkeypatch):
    before(Staff, "_look_at_slow", lambda staff: [at + 1 for at in staff.late_ns.values()])(monkeypatch)
    with pytest.raises(AssertionError, match="each looks at all"):
        test_workers_that_die_everywhere_cost_as_much_as_there_are()
