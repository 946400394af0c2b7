"""The machine by itself: what it decides from what it hears, whom it does not listen to, and that one event among many
ranks is still one event."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx import control
from phalanx.control import invariants
from phalanx.control.gang import Gang
from phalanx.control.messages import (
    Ask,
    DeviceWarning,
    Durable,
    Ended,
    Failure,
    Fence,
    Form,
    Halt,
    Held,
    Kill,
    Launch,
    Leave,
    ManyParked,
    ManyReady,
    Missing,
    NodeDead,
    NodeJoined,
    NodeSuspect,
    Parked,
    Pause,
    Probe,
    Ready,
    Save,
    SetTimer,
    Source,
    Standing,
    Start,
    StepsDone,
    Stop,
    TimerFired,
    Welcome,
    WorkerDied,
    WorkersUp,
)
from phalanx.control.policy import Policy
from phalanx.control.sources import Copy, Lineage
from phalanx.control.staffing import Staff
from phalanx.core.layout import Layout

S = 10**9


class Crew:
    """A gang and agents that do at once what they are told, but never stop by themselves. Node i fills place i."""

    def __init__(self, replicas=2, shards=1, per_node=1, spares=0, steps=100, **policy):
        self.gang = Gang.of(Layout(replica=replicas, shard=shards, ranks_per_node=per_node), steps, Policy(**policy))
        self.now, self.digests, self.mute = 0, {}, ()
        for i in range(replicas * shards // per_node + spares):
            self.say(NodeJoined(f"n{i}", 1, "rack"))
        assert self.gang.phase == "running" and self.gang.generation == 1

    def say(self, *events):
        """What is commanded, but for timers; those who can answer do."""
        told, todo = [], list(events)
        while todo:
            event = todo.pop(0)
            self.now += 1
            for command in self.gang.apply(self.now, event):
                invariants.check(self.gang)
                if not isinstance(command, SetTimer):
                    told.append(command)
                    todo += () if self.mute and isinstance(command, self.mute) else self.answers(command)
        return told

    def answers(self, command):
        if isinstance(command, Launch):
            yield WorkersUp(command.node, command.incarnation, tuple(command.workers.values()))
        elif isinstance(command, Form):
            for node, part in command.parts().items():
                if part.crew:
                    digests = {w: self.digests.get(w, "same") for w in part.crew.values()}
                    yield Ready(node, 1, part.generation, part.step, digests)
        elif isinstance(command, Kill):
            for worker in command.workers:
                yield died(command.node, worker)

    def parked(self, rank, step, prepared=None):
        g = self.gang.generation
        worker = self.gang.form.crew[rank]
        node = self.gang.form.places[rank // self.gang.members.ranks_per_place]
        return Parked(node, 1, g, (worker,), step, step if prepared is None else prepared, g)

    def dead(self, rank):
        return NodeDead(self.gang.form.places[rank // self.gang.members.ranks_per_place], 1, "burnt")


def died(node, worker):
    return WorkerDied(node, 1, worker, Failure(signal="SIGKILL"))


def of(kind, commands):
    return [command for command in commands if isinstance(command, kind)]


# -- which was the last step


@pytest.mark.parametrize(
    "survivors, step",
    [
        ([(4, 4), (4, 4)], 4),  # nobody voted: nobody can have applied it
        ([(4, 5), (4, 4)], 4),  # one did not vote: it never happened, and is redone
        ([(4, 5), (4, 5)], 5),  # all voted: the one that is gone may have applied it, so all do
        ([(5, 5), (4, 5)], 5),  # one has applied it, so all do
        ([(5, 6), (5, 5)], 5),
    ],
)
def test_a_step_counts_when_all_that_are_left_have_voted_for_it(survivors, step):
    crew = Crew(replicas=3, spares=0)
    (halt,) = of(Halt, crew.say(crew.dead(0)))
    assert halt.nodes == ("n1", "n2") and halt.generation == 1
    told = crew.say(*(crew.parked(rank, *at) for rank, at in zip((1, 2), survivors, strict=True)))
    (form,) = of(Form, told)
    assert (form.generation, form.step, form.replicas, form.branch) == (2, step, (1, 2), False)
    assert form.sources == {} and of(Start, told)


def test_nothing_is_decided_before_the_last_has_parked():
    crew = Crew(replicas=3)
    crew.say(crew.dead(0))
    assert not of(Form, crew.say(crew.parked(1, 4, 5)))
    assert crew.gang.phase == "halting" and len(crew.gang.gen.waiting) == 1


def test_a_second_death_while_forming_makes_another_generation_and_keeps_the_decision():
    crew = Crew(replicas=3)
    crew.say(crew.dead(0))
    crew.mute = Form
    crew.say(crew.parked(1, 4, 5))
    assert of(Form, crew.say(crew.parked(2, 4, 5)))[0].step == 5
    crew.say(crew.dead(1))
    stays = Parked("n2", 1, 2, (crew.gang.form.crew[2],), 4, 5, 1)  # it never heard of generation 2
    (form,) = of(Form, crew.say(stays))
    assert (form.generation, form.step, form.replicas, form.branch) == (3, 5, (2,), False)


def test_when_nobody_is_left_what_comes_after_is_a_branch():
    crew = Crew(replicas=2, spares=2)
    crew.say(StepsDone(1, 7), Durable(5, 1))
    (ask,) = of(Ask, crew.say(crew.dead(0), crew.dead(1)))
    told = crew.say(*(Held(node, 1, 1, ()) for node in ask.nodes))
    (form,) = of(Form, told)
    assert form.branch and (form.step, form.last, form.rung) == (5, 7, 4)


def test_memory_is_better_than_a_checkpoint():
    crew = Crew(replicas=1, spares=3)
    crew.say(StepsDone(1, 7), Durable(5, 1))
    crew.say(crew.dead(0))
    told = crew.say(Held("n1", 1, 1, ()), Held("n2", 1, 1, ((0, 7, 1), (0, 6, 1))), Held("n3", 1, 1, ()))
    (form,) = of(Form, told)
    assert (form.step, form.sources[0], form.branch) == (7, Source("memory", "n2", 0, 1), True)


def test_damaged_memory_is_passed_over():
    crew = Crew(replicas=1, spares=3)
    crew.mute = Form
    crew.say(StepsDone(1, 7))
    crew.say(crew.dead(0))
    crew.say(Held("n1", 1, 1, ((0, 7, 1),)), Held("n2", 1, 1, ((0, 6, 1),)), Held("n3", 1, 1, ()))
    worker = crew.gang.form.crew[0]
    crew.say(Missing("n1", 1, 2, worker, "its seal is broken", True))
    (form,) = of(Form, crew.say(Parked("n1", 1, 2, (worker,), -1, -1, 0)))
    assert (form.step, form.sources[0].node) == (6, "n2") and "its seal is broken" in form.reason


# -- who is not listened to


def test_late_words_of_an_old_generation_change_nothing():
    crew = Crew(replicas=2)
    old = crew.parked(0, 3)
    crew.say(crew.dead(1), crew.parked(0, 4))
    before = crew.gang.to_bytes()
    assert crew.say(old, StepsDone(1, 90), Ready("n0", 1, 1, 3, {1: "other"})) == []
    assert crew.gang.committed == 4
    crew.gang.desk.now_ns -= 3
    assert crew.gang.to_bytes() == before


def test_a_node_that_was_declared_dead_is_fenced_and_an_old_incarnation_ignored():
    crew = Crew(replicas=2)
    crew.say(crew.dead(1), crew.parked(0, 4))
    assert crew.say(NodeJoined("n1", 1, "rack"), WorkersUp("n1", 1, (2,))) == [Fence("n1", 1)] * 2
    assert crew.say(NodeJoined("n1", 2, "rack"))[0] == Welcome("n1", 2)
    assert crew.say(WorkersUp("n1", 1, (2,)), died("n1", 3), NodeJoined("n1", 1, "rack")) == []


def test_a_stranger_is_not_listened_to():
    crew = Crew()
    assert crew.say(WorkersUp("n9", 1, (1,)), NodeDead("n9", 1, "x"), DeviceWarning("n9", 1, "ecc", 99)) == []


def test_a_worker_that_should_be_gone_is_ended():
    crew = Crew()
    crew.say(died("n1", 2))
    assert Kill("n1", (2,)) in crew.say(Parked("n1", 1, 1, (2,), 3, 3, 1))


# -- many at once


def test_many_at_once_are_as_if_each_had_said_it():
    """Strangers, late ones and the last of all among them."""
    one, other = Crew(replicas=4, spares=1), Crew(replicas=4, spares=1)
    one.mute = other.mute = Form
    for crew in (one, other):
        crew.say(crew.dead(0))
    events = [one.parked(rank, 4) for rank in (1, 2)]
    events += [Parked("n9", 1, 1, (9,), 4, 4, 1), Parked("n1", 2, 1, (2,), 4, 4, 1), Parked("n0", 1, 1, (1,), 4, 4, 1)]
    events += [one.parked(3, 4), Parked("n3", 1, 1, (4, 77), 4, 4, 1)]
    told = one.say(*events)
    assert of(Form, told) and of(Fence, told) and of(Kill, told)
    assert other.say(ManyParked.of(events)) == told
    ready = [e for e in one.answers(one.gang.form) if isinstance(e, Ready)]
    told = one.say(*ready)
    assert of(Start, told) and other.say(ManyReady.of(ready)) == told
    one.gang.desk, one.gang.patience_ns = other.gang.desk, other.gang.patience_ns  # each event takes a nanosecond here
    one.gang.retry_ns = other.gang.retry_ns
    assert one.gang == other.gang


def test_a_node_speaks_for_its_own_workers():
    crew = Crew(replicas=3)
    crew.say(crew.dead(0))
    crew.say(Parked("n1", 1, 1, (2, 3), 4, 4, 1))
    assert crew.gang.gen.waiting == {3}


# -- states that differ


def test_the_one_that_differs_from_most_is_ended():
    crew = Crew(replicas=3)
    crew.digests = {3: "another"}
    crew.say(died("n0", 1), crew.parked(1, 4))
    (kill,) = of(Kill, crew.say(crew.parked(2, 4)))
    assert kill.workers in ((2,), (3,))  # one against one, and both kept what they had


def test_of_two_the_one_that_was_restored_is_ended():
    crew = Crew(replicas=2)
    crew.digests = {3: "another"}
    told = crew.say(died("n1", 2), crew.parked(0, 4))
    assert of(Pause, told)
    (kill,) = of(Kill, crew.say(crew.parked(0, 5)))
    assert kill.workers == (3,)


# -- places


def test_one_spare_goes_to_one_place():
    crew = Crew(replicas=3, spares=1)
    launched = of(Launch, crew.say(crew.dead(0), crew.dead(1), crew.parked(2, 4)))
    assert [launch.node for launch in launched] == ["n3"]


def test_the_replica_that_lacks_least_is_made_whole_first():
    crew = Crew(replicas=3, shards=2)
    crew.say(crew.dead(0), crew.dead(1), crew.dead(4), crew.parked(2, 4), crew.parked(3, 4), crew.parked(5, 4))
    (launch,) = of(Launch, crew.say(NodeJoined("new", 1, "rack")))
    assert launch.workers.keys() == {4}


def test_a_spare_of_the_same_domain_is_taken_first():
    crew = Crew(replicas=2)
    crew.say(NodeJoined("far", 1, "another rack"), NodeJoined("near", 1, "rack"))
    assert of(Launch, crew.say(crew.dead(0)))[0].node == "near"


# -- silence


@pytest.mark.parametrize("silent, given_up", [(1, True), (2, True), (3, False), (8, False)])
def test_only_so_many_are_given_up_for_their_silence(silent, given_up):
    crew = Crew(replicas=8, silence_percent=25)
    for i in range(silent):
        crew.say(NodeSuspect(f"n{i}", 1))
    crew.say(*(NodeDead(f"n{i}", 1) for i in range(silent)))
    assert crew.gang.members.alive == 8 - silent * given_up
    assert ("silence" in crew.gang.desk.timers) is not given_up


def test_the_only_node_is_never_given_up_for_its_silence():
    crew = Crew(replicas=1)
    crew.say(NodeSuspect("n0", 1), NodeDead("n0", 1))
    assert crew.gang.members.alive == 1 and crew.gang.phase == "running"


def test_suspicion_alone_changes_nothing_but_with_peers_parked_it_does():
    crew = Crew(replicas=4)
    assert crew.say(NodeSuspect("n0", 1)) == []
    crew.say(*(crew.parked(rank, 4) for rank in (1, 2, 3)))
    crew.now = crew.gang.desk.timers["park"]
    (form,) = of(Form, crew.say(TimerFired("park")))
    assert form.replicas == (1, 2, 3) and "n0 is silent" in form.reason


def test_a_worker_that_does_not_park_on_a_node_that_lives_is_ended():
    crew = Crew(replicas=2)
    crew.say(crew.parked(1, 4))
    crew.now = crew.gang.desk.timers["park"]
    told = crew.say(TimerFired("park"))
    assert of(Kill, told)[0] == Kill("n0", (1,)) and of(Form, told)[0].replicas == (1,)


def test_when_most_do_not_answer_none_of_them_is_ended():
    crew = Crew(replicas=8)
    crew.say(crew.dead(0))
    crew.now = crew.gang.desk.timers["park"]
    assert not of(Kill, crew.say(TimerFired("park"))) and crew.gang.phase == "halting"
    assert crew.gang.desk.said == "7 nodes do not answer: it may be the network" and "park" in crew.gang.desk.timers


def test_when_most_are_not_ready_in_time_all_form_again_and_nobody_is_ended():
    """They wait for each other, or for something that is gone."""
    crew = Crew(replicas=8)
    crew.mute = Form
    crew.say(crew.dead(0), *(crew.parked(rank, 4) for rank in range(1, 8)))
    crew.now = crew.gang.desk.timers["form"]
    (probe,) = of(Probe, crew.say(TimerFired("form")))
    assert len(probe.nodes) == 7 and crew.gang.phase == "forming"
    crew.now = crew.gang.desk.timers["form"]
    told = crew.say(TimerFired("form"))
    assert of(Halt, told) and not of(Kill, told)
    (form,) = of(Form, crew.say(*(crew.parked(rank, 4) for rank in range(1, 8))))
    assert form.generation == 3 and form.step == 4 and "were not ready in time" in form.reason


def test_while_one_of_them_moves_all_are_waited_for():
    crew = Crew(replicas=2)
    crew.mute = Form
    crew.say(died("n0", 1), crew.parked(1, 4))
    for counter in range(1, 20):
        crew.now = crew.gang.desk.timers["form"]
        (probe,) = of(Probe, crew.say(TimerFired("form")))
        crew.say(Standing(probe.nodes[0], 1, {max(crew.gang.gen.waiting): counter}))
    assert crew.gang.phase == "forming" and crew.gang.generation == 2
    crew.now = crew.gang.desk.timers["form"]
    crew.say(TimerFired("form"))
    crew.now = crew.gang.desk.timers["form"]
    assert of((Kill, Halt), crew.say(TimerFired("form"))), "it does not move any more"


# -- the end


def test_the_last_step_is_saved_before_all_leave():
    crew = Crew(steps=10)
    told = crew.say(crew.parked(0, 10), crew.parked(1, 9, 10))
    assert of(Save, told) == [Save(1, 10, ("n0", "n1"))] and not of(Leave, told)
    told = crew.say(Durable(10, 1))
    assert of(Leave, told) == [Leave("done after step 10", ("n0", "n1"))]
    assert [(e.ok, e.durable, e.cause) for e in of(Ended, told)] == [(True, 10, "")]
    assert crew.say(NodeJoined("late", 1, "")) == [Leave("done after step 10", ("late",))]


def test_what_is_outstanding_is_said_again_until_it_is_answered():
    crew = Crew(replicas=2)
    assert crew.gang.outstanding() == [Start(1, ("n0", "n1"))]
    crew.say(StepsDone(1, 1))
    assert crew.gang.outstanding() == []
    crew.say(Stop(60 * S))
    assert crew.gang.outstanding() == [Pause(1, ("n0", "n1"))]
    crew.say(died("n0", 1))
    assert Halt(1, ("n1",)) in crew.gang.outstanding()


# -- where state is


generations = st.integers(0, 5)


@given(st.lists(st.tuples(generations, st.integers(0, 9)), max_size=5), st.integers(0, 9), generations)
def test_a_step_counts_unless_it_was_abandoned_after_it_was_made(branches, step, made):
    lineage = Lineage()
    branches = [(g, s) for i, (g, s) in enumerate(branches) if all(g > before for before, _ in branches[:i])]
    for branch in branches:
        lineage.branch(*branch)
    assert lineage.counts(step, made) == all(made >= g or step <= last for g, last in branches)


def test_what_a_copy_is_worth():
    lineage = Lineage()
    assert lineage.step_of(None) == -1
    assert lineage.step_of(Copy(4, 5, 1)) == 4  # nobody has decided yet
    lineage.end(1, 5)
    assert lineage.step_of(Copy(4, 5, 1)) == 5
    lineage.branch(2, 4)
    assert lineage.step_of(Copy(4, 5, 1)) == 4
    lineage.branch(3, 2)
    assert lineage.step_of(Copy(4, 5, 1)) == -1 and lineage.step_of(Copy(4, 4, 3)) == 4


# -- size


class Counted(dict):
    """Counts what is taken out of it one by one; a look-up costs nothing."""

    looked = 0

    def __iter__(self):
        for key in dict.__iter__(self):
            Counted.looked += 1
            yield key

    def keys(self):
        return list(self)

    def values(self):
        return [self[key] for key in self]

    def items(self):
        return [(key, self[key]) for key in self]


def looks(gang, event):
    """How many nodes, places and workers an event makes the gang look at."""
    members = gang.members
    for name in ("nodes", "places", "workers", "at"):
        setattr(members, name, Counted(getattr(members, name)))
    Counted.looked = 0
    gang.apply(1, event)
    return Counted.looked


EVENTS = [
    StepsDone(1, 3),
    NodeSuspect("n1", 1),
    NodeJoined("n1", 1, ""),
    NodeJoined("new", 1, ""),
    Parked("n1", 1, 0, (2,), 3, 3, 0),
    DeviceWarning("n1", 1, "ecc", 99),
    Durable(3, 1),
    TimerFired("resend"),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_costs_the_same_in_a_gang_of_any_size(event):
    gang = Crew(replicas=64).gang
    gang.apply(1, StepsDone(1, 1))
    assert looks(gang, event) < 8, "it looks through the gang"


def test_a_scan_that_is_planted_is_counted(monkeypatch):
    monkeypatch.setattr(Staff, "fill", lambda self: sorted(self._members.workers))
    gang = Crew.__new__(Crew), Gang.of(Layout(replica=64, ranks_per_node=1), 9, Policy())
    crew = gang[0]
    crew.gang = gang[1]
    crew.gang.members.workers.update(dict.fromkeys(range(64)))
    assert looks(crew.gang, NodeJoined("new", 1, "")) >= 64


# -- purity


def test_control_is_pure():
    """Contract 1: what the simulator proves about it is true of what runs."""
    allowed = {"__future__", "dataclasses", "typing", "collections", "collections.abc", "contextlib", "functools"}
    allowed |= {"itertools", "json", "math", "heapq", "bisect", "operator", "re", "statistics"}
    allowed |= {"phalanx.core.layout", "phalanx.core.checkpoint", "phalanx.core.errors"}
    for path in Path(control.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        other = {name for name in imported if not name.startswith("phalanx.control")} - allowed
        assert not other, (path.name, other)


def test_only_as_many_replicas_as_the_batch_can_be_divided_among():
    crew = Crew(replicas=4, counts=(1, 2, 4))
    crew.mute = (Launch,)  # nobody replaces it
    told = crew.say(died("n3", crew.gang.form.crew[3]), *(crew.parked(rank, 5) for rank in range(3)))
    assert of(Form, told)[-1].replicas == (0, 1)  # the third could do nothing
    assert of(Pause, told) == [] and crew.gang.phase == "running"


def test_workers_that_are_being_started_are_waited_for_a_moment():
    crew = Crew(replicas=2, start_ns=S)
    crew.mute = (Launch,)
    told = crew.say(died("n1", crew.gang.form.crew[1]), crew.parked(0, 5))
    (launch,) = of(Launch, told)
    assert of(Form, told) == [] and crew.gang.desk.timers["wait"] == crew.gang.patience_ns
    told = crew.say(WorkersUp("n1", 1, tuple(launch.workers.values())))
    assert of(Form, told)[0].replicas == (0, 1)
    crew.mute = ()
    crew.say(*[Ready("n0", 1, 2, 5, {1: "same"})])
    crew.mute = (Launch,)
    told = crew.say(NodeDead("n1", 1, "burnt"), crew.parked(0, 6))
    assert of(Form, told)[0].replicas == (0,), "nobody is being started: there is nothing to wait for"
