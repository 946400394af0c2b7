"""The state machine by itself: what it decides from what it hears, and whom it ignores."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx import control
from phalanx.control.gang import Gang
from phalanx.control.liveness import DEAD, SEEN, Edge, Liveness, Roster
from phalanx.control.member import Member, in_common
from phalanx.control.messages import (
    Ask,
    Build,
    Built,
    Commit,
    Cost,
    DeviceWarning,
    Drain,
    Durable,
    Ended,
    Failure,
    Fence,
    Form,
    Formed,
    Halt,
    Held,
    Interval,
    Kill,
    Launch,
    Leave,
    Missing,
    NodeClear,
    NodeDead,
    NodeJoined,
    NodeSuspect,
    Note,
    Part,
    Pause,
    Probe,
    Report,
    Save,
    Scale,
    Source,
    Standing,
    StepsDone,
    Stop,
    Unwritten,
    Welcome,
    WorkerDied,
    WorkersUp,
    Write,
    Written,
)  # fmt: skip
from phalanx.control.policy import Policy
from phalanx.control.sources import Copy, Lineage
from phalanx.core.layout import Layout
from tests.control.crew import Crew, S, died, of

EVERYONE = ("*",)


# -- which was the last step


LAST = [
    ([(4, 4), (4, 4)], 4),  # nobody voted: nobody can have applied it
    ([(4, 5), (4, 4)], 4),  # one did not vote: it never happened, and is redone
    ([(4, 5), (4, 5)], 5),  # all voted: the one that is gone may have applied it, so all do
    ([(5, 5), (4, 5)], 5),  # one has applied it, so all do
    ([(5, 6), (5, 5)], 5),
]


@pytest.mark.parametrize("survivors, step", LAST)
def test_a_step_counts_when_all_replicas_that_stand_have_voted_for_it(survivors, step):
    crew = Crew(replicas=3)
    (part,) = of(Part, crew.say(crew.dead(0)))
    assert (part.nodes, part.generation, len(part.worlds)) == (EVERYONE, 1, 3)
    assert not of(Form, crew.say(crew.parted(1, *survivors[0]))), "decided before the last has parted"
    (form,) = of(Form, crew.say(crew.parted(2, *survivors[1])))
    assert (form.generation, form.step, form.replicas, form.branch) == (2, step, (1, 2), False)
    assert form.sources == {} and crew.gang.phase == "running"


@pytest.mark.parametrize("survivors, step", LAST)
def test_of_a_broken_replica_a_step_counts_when_all_its_ranks_have_voted_for_it(survivors, step):
    """It is the only replica: the ranks that are left speak for themselves."""
    crew = Crew(replicas=1, shards=3)
    crew.mute = Halt
    assert len(of(Halt, crew.say(crew.dies(0)))) == 2
    crew.say(crew.parked(1, *survivors[0]))
    assert crew.gang.phase == "parting" and crew.gang.committed == 0, "decided before the last is parked"
    crew.say(crew.parked(2, *survivors[1]))
    assert crew.gang.committed == step


def test_a_replica_that_stands_speaks_for_itself_and_the_broken_one_is_not_waited_for():
    crew = Crew(replicas=2, shards=2)
    crew.mute = Halt
    told = crew.say(crew.dies(0))
    assert [halt.workers for halt in of(Halt, told)] == [(crew.worker(1),)]
    (form,) = of(Form, crew.say(crew.parted(1, 4, 5, kept=True)))
    assert (form.step, form.replicas, form.kept) == (5, (1,), ()), "its gradients have become the step"
    crew = Crew(replicas=2, shards=2)
    crew.mute = Halt
    (form,) = of(Form, crew.say(crew.dies(0), crew.parted(1, 4, kept=True)))
    assert (form.step, form.replicas, form.kept) == (4, (1,), (1,))


def test_a_second_death_while_forming_makes_another_generation_and_keeps_the_decision():
    crew = Crew(replicas=3)
    crew.mute = Form
    crew.say(crew.dead(0), crew.parted(1, 4, 5))
    assert of(Form, crew.say(crew.parted(2, 4, 5)))[0].step == 5
    crew.say(crew.dead(1))
    (form,) = of(Form, crew.say(crew.parted(2, 4, 5, made=1)))  # it never heard of generation 2
    assert (form.generation, form.step, form.replicas, form.branch) == (3, 5, (2,), False)


def test_when_nobody_is_left_what_comes_after_is_a_branch():
    crew = Crew(replicas=2, spares=2)
    crew.say(StepsDone(1, 7), Durable(5, 1))
    (ask,) = of(Ask, crew.say(crew.dead(0), crew.dead(1)))
    (form,) = of(Form, crew.say(*(Held(node, 1, 1, ()) for node in ask.nodes)))
    assert form.branch and (form.step, form.last, form.rung) == (5, 7, 4)


def test_memory_is_better_than_a_checkpoint_and_damaged_memory_is_passed_over():
    crew = Crew(replicas=1, spares=3)
    crew.mute = Form
    crew.say(StepsDone(1, 7), Durable(5, 1), crew.dead(0))
    told = crew.say(Held("n1", 1, 1, ((0, 7, 1),)), Held("n2", 1, 1, ((0, 6, 1),)), Held("n3", 1, 1, ()))
    (form,) = of(Form, told)
    assert (form.step, form.sources[0], form.branch) == (7, Source("memory", "n1", 0, 1), True)
    crew.say(Missing("n1", 1, 2, crew.worker(0), "its seal is broken", True))
    (form,) = of(Form, crew.say(crew.parted(0, -1, made=0)))
    assert (form.step, form.sources[0].node) == (6, "n2") and "its seal is broken" in form.reason


# -- who is ignored


def test_late_words_change_nothing():
    crew = Crew(replicas=2, shards=2)
    old = (crew.parted(1, 3), crew.parked(0, 3), Formed((1,), (crew.gang.worlds.replicas[1].world,), 1))
    old += (Built(("n0",), (1,), ((crew.worker(0),),), crew.gang.worlds.replicas[0].world), StepsDone(1, 90))
    crew.mute = Form
    crew.say(crew.dies(1), crew.parted(1, 4))
    before = crew.gang.to_bytes()
    assert crew.gang.phase == "forming" and crew.say(*old) == [] and crew.gang.committed == 4
    crew.gang.desk.now_ns -= len(old)
    assert crew.gang.to_bytes() == before


def test_a_replica_speaks_only_for_the_world_that_is_in_the_generation():
    crew = Crew(replicas=3)
    before = crew.parted(1, 4)
    crew.say(replace(before, worlds=(before.worlds[0] + 90,)))
    assert crew.gang.phase == "running" and crew.gang.gen.left == {0, 1, 2}
    crew.say(before)
    assert crew.gang.phase == "parting" and crew.gang.gen.left == {0, 2}


def test_a_world_stands_when_all_have_built_this_one():
    crew = Crew(replicas=2)
    crew.mute = Build
    ended = crew.gang.worlds.replicas[1].world
    crew.say(crew.dies(1), crew.parted(0, 4))
    found = crew.gang.worlds.replicas[1]
    built = Built(("n1",), (1,), ((crew.worker(1),),), ended)
    crew.say(built)
    assert found.phase == "building" and found.world > ended
    crew.say(replace(built, world=found.world))
    assert found.phase == "built"


def test_a_generation_runs_when_all_its_replicas_have_formed():
    crew = Crew(replicas=3)
    crew.mute = Form
    crew.say(*(crew.parted(replica, 4) for replica in range(3)))
    form = crew.gang.form
    crew.say(Formed(form.replicas[:2], form.worlds[:2], form.generation))
    assert crew.gang.phase == "forming" and crew.gang.gen.waiting == {2}
    crew.say(Formed(form.replicas[2:], form.worlds[2:], form.generation))
    assert crew.gang.phase == "running"


def test_a_checkpoint_of_steps_that_were_abandoned_does_not_count():
    """Its manifest may come late: taken for the last step, it would end the run with another state."""
    crew = Crew(replicas=2, steps=6)
    crew.say(StepsDone(1, 6), crew.dead(0), crew.dead(1))
    crew.say(NodeJoined("n0", 2, "rack"), NodeJoined("n1", 2, "rack"))
    crew.fire("ask")
    form = crew.gang.form
    assert form.branch and form.step == 0
    crew.say(Durable(6, 1))
    assert not crew.gang.commits.has(6) and crew.gang.commits.last == -1


def test_files_of_steps_that_were_abandoned_are_not_waited_for():
    crew = Crew(replicas=2, steps=9)
    crew.say(StepsDone(1, 6), Written("n0", 1, "step-6", 6, 1, 2, {0: (1, "root")}, "seal", 0))
    assert [draft.step for draft in crew.gang.commits.drafts.values()] == [6]
    crew.say(crew.dies(0), crew.dies(1))
    crew.fire("ask")
    assert crew.gang.form.branch and crew.gang.form.step == 0 and not crew.gang.commits.drafts


def test_the_last_step_is_saved_by_a_generation_of_which_nobody_is_lost():
    """Every rank is needed, because each writes a part."""
    crew = Crew(replicas=2, steps=6)
    crew.mute = Launch
    told = crew.say(StepsDone(1, 6), crew.parted(0, 6), crew.dies(1))
    assert not of(Save, told) and of(Form, told)[0].replicas == (0,) and crew.gang.phase == "running"
    assert of(Save, crew.say(crew.parted(0, 6))) == [Save(2, 6, EVERYONE)]


def test_a_manifest_is_written_by_another_node_when_the_one_that_was_to_write_it_is_lost():
    crew = Crew(replicas=2, steps=9)
    files = [Written(f"n{rank}", 1, "step-4", 4, 1, 2, {rank: (1, "root")}, "seal", 0) for rank in range(2)]
    assert [commit.node for commit in of(Commit, crew.say(StepsDone(1, 4), *files))] == ["n0"]
    assert [commit.node for commit in of(Commit, crew.say(crew.dead(0)))][:1] == ["n1"]


def test_a_node_is_taken_over_from_at_a_step_boundary_and_not_before():
    crew = Crew(replicas=2, spares=1)
    crew.say(StepsDone(1, 4))
    told = crew.say(Drain("n1"))
    assert [launch.node for launch in of(Launch, told)] == ["n2"] and of(Pause, told)
    assert not of(Halt, told) and crew.gang.phase == "running"
    assert [halt.node for halt in of(Halt, crew.say(crew.parted(0, 5), crew.parted(1, 5)))] == ["n1"]


def test_an_order_to_kill_is_no_proof_that_nobody_votes_any_more():
    crew = Crew(replicas=1)
    crew.mute = (Form, Halt, Kill)
    crew.say(crew.parted(0, 4))
    crew.fire("form")
    crew.fire("form")
    stuck = crew.worker(0)
    crew.fire("park")
    assert of(Kill, crew.fire("leave")) == [Kill("n0", (stuck,))] and crew.gang.phase == "fencing"
    crew.say(WorkerDied("n0", 1, stuck, Failure(signal="SIGKILL")))
    assert crew.gang.phase != "fencing"


def test_a_kill_is_said_again_until_the_end_is_confirmed():
    crew = Crew(replicas=2, shards=2)
    crew.mute = (Halt, Kill)
    stuck = crew.worker(0)
    crew.say(crew.parted(1, 4))
    crew.fire("park")
    crew.say(replace(crew.parked(1, 4), made=1))
    crew.fire("leave")
    assert Kill("n0", (stuck,)) in crew.gang.outstanding()
    crew.say(WorkerDied("n0", 1, stuck, Failure(signal="SIGKILL")))
    assert not of(Kill, crew.gang.outstanding())


def test_a_node_that_was_declared_dead_is_fenced_and_an_old_incarnation_ignored():
    crew = Crew(replicas=2)
    crew.say(crew.dead(1), crew.parted(0, 4))
    assert crew.say(NodeJoined("n1", 1, "rack"), WorkersUp("n1", 1, (2,), (2,))) == [Fence("n1", 1)] * 2
    assert crew.say(NodeJoined("n1", 2, "rack"))[0] == Welcome("n1", 2)
    assert crew.say(WorkersUp("n1", 1, (2,), (2,)), died("n1", 3), NodeJoined("n1", 1, "rack")) == []


def test_an_aggregator_does_not_speak_for_a_node_that_has_moved_to_another():
    roster, about = Roster(), ("n0", 1)
    assert roster.take("h0", Edge(*about, 1, SEEN).to_item()) and roster.take("h1", Edge(*about, 2, SEEN).to_item())
    assert not roster.take("h0", Edge(*about, 1, DEAD).to_item()) and roster.home("n0") == "h1"
    assert not roster.take("h0", Edge(*about, 1, SEEN).to_item()), "it comes late"
    assert roster.take("h1", Edge(*about, 2, DEAD).to_item()) and roster.home("n0") == ""


def test_only_the_connection_that_the_controller_knows_of_is_given_a_lease():
    live = Liveness(S)
    (first,), (second,) = live.beat("n0", 1, 1, 0), live.beat("n0", 1, 2, S)
    assert live.confirm(first.to_item()) == "" and live.lease("n0", 9 * S) == 0
    assert live.confirm(second.to_item()) == "n0" and live.lease("n0", 9 * S) == 9 * S


def test_a_stranger_is_not_listened_to():
    crew = Crew()
    assert crew.say(WorkersUp("n9", 1, (1,), (1,)), NodeDead("n9", 1, "x"), DeviceWarning("n9", 1, "ecc", 99)) == []


def test_a_worker_that_should_be_gone_is_ended():
    crew = Crew()
    parked = crew.parked(1, 3)
    crew.say(crew.dies(1))
    assert Kill("n1", parked.workers[0]) in crew.say(parked)


def test_a_node_speaks_for_its_own_workers():
    crew = Crew(replicas=1, shards=3)
    crew.mute = Halt
    crew.say(crew.dies(0))
    crew.say(replace(crew.parked(1, 4), workers=((crew.worker(1), crew.worker(2)),)))
    assert crew.gang.worlds.replicas[0].waiting == {crew.worker(2)}


# -- places


def test_one_spare_goes_to_one_place():
    crew = Crew(replicas=3, spares=1)
    launched = of(Launch, crew.say(crew.dead(0), crew.dead(1), crew.parted(2, 4)))
    assert [launch.node for launch in launched] == ["n3"]


def test_the_replica_that_lacks_least_is_made_whole_first():
    crew = Crew(replicas=3, shards=2)
    crew.say(*[crew.dead(rank) for rank in (0, 1, 4)], crew.parted(1, 4))
    (launch,) = of(Launch, crew.say(NodeJoined("new", 1, "rack")))
    assert launch.workers.keys() == {4}


def test_a_spare_of_the_same_domain_is_taken_first():
    crew = Crew(replicas=2)
    crew.say(NodeJoined("far", 1, "another rack"), NodeJoined("near", 1, "rack"))
    assert of(Launch, crew.say(crew.dead(0)))[0].node == "near"


def test_the_spare_with_the_most_switches_in_common_is_taken():
    crew = Crew(replicas=2)
    crew.gang.members.places[0].domain = "core.spine1.leaf2"
    for name, domain in (("a", "core.spine2.leaf2"), ("b", "core.spine1.leaf1"), ("c", "other.spine1.leaf2")):
        crew.say(NodeJoined(name, 1, domain))
    assert of(Launch, crew.say(crew.dead(0)))[0].node == "b"


def late(spares=1, **more):
    """Return a crew in which a rank was killed beside another that trains, and takes too long to restart on its
    node."""
    crew = Crew(spares=spares, **more)
    crew.mute = Launch
    (again,) = of(Launch, crew.say(crew.dies(1), crew.parted(0, 4)))
    assert again.node == "n1" and crew.gang.phase == "running"
    return crew, again


def ups(launch):
    workers = tuple(launch.workers.values())
    return WorkersUp(launch.node, 1, workers, workers)


def test_beside_a_rank_that_takes_long_to_start_a_spare_starts_and_the_first_one_ready_stays():
    crew, _ = late()
    (beside,) = of(Launch, crew.fire("again"))
    assert beside.node == "n2" and list(beside.workers) == [1]
    told = crew.say(ups(beside))  # at once: no other event may come for a long time
    assert {command.node for command in of(Build, told)} == {"n2"}
    assert of(Pause, told), "it joins the other"
    (form,) = of(Form, crew.say(crew.parted(0, 5)))
    assert form.replicas == (0, 1) and "n2 takes place 1 over from n1: its ranks take long to start" in form.reason
    assert crew.gang.members.spares == {"n1"} and not crew.gang.staff.killed


def test_the_spare_is_let_go_when_the_late_rank_is_up_before_it():
    crew, again = late()
    (beside,) = of(Launch, crew.fire("again"))
    told = crew.say(ups(again))
    assert of(Kill, told) == [Kill("n2", tuple(beside.workers.values()))]
    assert {command.node for command in of(Build, told)} == {"n1"} and crew.gang.members.spares == {"n2"}
    assert not crew.gang.staff.leaving


def test_no_spare_starts_beside_ranks_that_are_in_time_or_at_a_beginning():
    crew, again = late()
    assert not of(Launch, crew.say(ups(again))) and not of(Launch, crew.fire("again"))
    crew, _ = late(spares=0)
    assert not of(Launch, crew.fire("again"))
    assert [launch.node for launch in of(Launch, crew.say(NodeJoined("n9", 1, "rack")))] == ["n9"], "it came later"


@pytest.mark.parametrize("switched", [False, True])
def test_a_node_beside_a_late_one_fills_a_place_that_has_none(switched):
    crew = Crew(replicas=1, shards=2, spares=1)
    crew.mute = Launch
    (again,) = of(Launch, crew.say(crew.dies(1)))
    (beside,) = of(Launch, crew.fire("again"))
    if switched:
        crew.say(ups(beside))
    told = crew.say(NodeDead("n0", 1, "burnt"))
    (moved,) = of(Launch, told)
    assert (moved.node, list(moved.workers)) == ("n1" if switched else "n2", [0])
    crew.say(ups(moved), *(() if switched else (ups(again),)))
    crew.fire("ask")  # nobody has what n0 had
    assert crew.gang.phase == "running", "the run would wait for a node, and end"
    assert not crew.gang.members.vacant and not crew.gang.staff.leaving and not crew.gang.members.paired


def test_a_replica_is_whole_again_with_the_late_node_at_another_place():
    crew = Crew(replicas=2, shards=2, spares=1)
    crew.mute = Launch
    crew.say(crew.dies(3), crew.parted(0, 4))
    (beside,) = of(Launch, crew.fire("again"))
    told = crew.say(NodeDead("n2", 1, "burnt"))
    (moved,) = of(Launch, told)
    assert (moved.node, list(moved.workers)) == ("n4", [2]) and of(Kill, told)[0].node == "n4"
    assert crew.gang.members.places[3].now.node == "n3" and beside.node == "n4"


def test_a_late_node_whose_ranks_are_up_stays_when_the_spare_is_lost():
    crew = Crew(spares=1)
    crew.mute = (Launch, Build)
    (again,) = of(Launch, crew.say(crew.dies(1), crew.parted(0, 4)))
    (beside,) = of(Launch, crew.fire("again"))
    crew.say(ups(beside), NodeClear("n0", 1))
    crew.say(NodeDead("n2", 1, "burnt"))
    crew.mute = Launch
    if of(Pause, crew.say(ups(again))):
        crew.say(crew.parted(0, 5))
    assert not crew.gang.staff.leaving
    crew.now += 3600 * S
    assert not of(Launch, crew.say(NodeJoined("n9", 1, "rack"))), "it would swap a good node"


def test_an_order_of_the_operator_ends_no_run_that_a_death_would():
    crew = Crew(spares=1, recover=False)
    crew.say(Scale(1))
    crew.say(crew.parted(0, 1), crew.parted(1, 1))
    crew.mute = Build
    crew.say(Scale(2))
    assert crew.gang.worlds.replicas[1].phase == "building"
    crew.say(Drain("n1"))
    assert crew.gang.phase == "running" and crew.gang.members.places[1].now.node == "n2"
    crew.say(crew.dies(1))
    assert crew.gang.phase == "flushing", "recovery is off: what is saved is looked for, and the run ends"


def test_a_replica_that_is_wanted_again_leaves_a_node_that_others_were_moved_from():
    crew = Crew(replicas=2, per_node=2, spares=1)
    crew.say(Scale(1), Drain("n0"))
    crew.mute = Form
    crew.say(crew.parted(0, 1), crew.parted(1, 1))
    crew.mute = ()
    crew.say(Scale(2), *crew.answers(crew.gang.form))
    crew.say(crew.parted(0, 2))
    assert crew.gang.form.replicas == (0, 1) and crew.node(0) == crew.node(1) == "n1"


def test_nodes_fill_the_places_they_were_given_in_whatever_order_they_come():
    gang = Gang.of(Layout(replica=3, ranks_per_node=1), 10, Policy(), homes=("x", "y", "z"))
    launched = {}
    for name in ("z", "x", "spare", "y"):
        for launch in of(Launch, gang.apply(1, NodeJoined(name, 1, "rack"))):
            launched |= dict.fromkeys(launch.workers, launch.node)
    assert launched == {2: "z", 0: "x", 1: "spare"}, "a node without a home takes what is vacant"
    assert gang.members.spares == {"y"}, "whose home is taken stands by"


def test_no_replica_idles_because_a_batch_does_not_divide():
    crew = Crew(replicas=4)
    crew.mute = (Launch,)  # nobody replaces it
    told = crew.say(crew.dies(3), *(crew.parted(replica, 5) for replica in range(3)))
    assert of(Form, told)[-1].replicas == (0, 1, 2) and crew.gang.phase == "running"


def test_a_death_in_a_pause_is_not_waited_for_as_a_beginning_is():
    """A new run waits for all nodes; a gang that has run does not, even if a node dies as it pauses."""
    crew = Crew(replicas=2, gather_ns=300 * S)
    crew.say(Stop(60 * S))
    crew.say(crew.parted(0, 4))
    assert crew.gang.gen.quiet
    crew.say(crew.dead(1))
    assert crew.gang.phase != "gathering", "it waits for the node that died"


def test_when_none_stands_workers_that_are_being_started_are_waited_for_a_moment():
    crew = Crew(replicas=2, start_ns=S)
    crew.mute = (Launch,)
    first, second = of(Launch, crew.say(crew.dies(0), crew.dies(1)))
    told = crew.say(WorkersUp(first.node, 1, *[tuple(first.workers.values())] * 2))
    assert of(Build, told) and crew.gang.desk.timers["wait"] == crew.gang.forming.patience_ns
    told = crew.say(WorkersUp(second.node, 1, *[tuple(second.workers.values())] * 2))
    told += crew.say(*(Held(node, 1, 1, ()) for ask in of(Ask, told) for node in ask.nodes))
    assert [form.replicas for form in of(Form, told)] == [(0, 1)]


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


def test_suspicion_alone_changes_nothing_but_with_peers_parted_it_does():
    crew = Crew(replicas=4)
    assert crew.say(NodeSuspect("n0", 1)) == []
    crew.say(*(crew.parted(replica, 4) for replica in (1, 2, 3)))
    (form,) = of(Form, crew.fire("park"))
    assert form.replicas == (1, 2, 3) and "n0 is silent" in form.reason


def test_a_replica_that_does_not_part_leaves_its_world_and_a_rank_that_does_not_is_ended():
    crew = Crew(replicas=3, shards=2)
    crew.mute = Halt
    stuck = crew.worker(0)
    crew.say(crew.parted(1, 4), crew.parted(2, 4))
    told = crew.fire("park")
    assert {halt.node for halt in of(Halt, told)} == {"n0", "n1"}, "the others keep their worlds"
    assert of(Form, told)[0].replicas == (1, 2)
    crew.say(replace(crew.parked(1, 4), made=1))
    told = crew.fire("leave")
    assert of(Kill, told) == [Kill("n0", (stuck,))] and of(Pause, told), "it is whole again, and joins"


def test_when_most_do_not_leave_their_worlds_none_of_them_is_ended():
    crew = Crew(replicas=8, shards=2, per_node=2)
    crew.mute = Halt
    told = crew.say(crew.dead(0)) + crew.fire("park")
    assert len(of(Halt, told)) == 7, "they do not part"
    assert not of(Kill, crew.fire("leave")) and crew.gang.phase == "parting"
    assert crew.gang.desk.said == "7 nodes do not answer: it may be the network" and "leave" in crew.gang.desk.timers


# What takes long: a gang forming, a replica building its world. (muted, ended by, timer, events that begin it)
LONG = {"form": (Form, Part), "build": (Build, Halt)}


@pytest.mark.parametrize("timer", LONG)
def test_who_moves_is_waited_for_and_who_does_not_begins_again_and_nobody_is_ended(timer):
    """Workers that stand still wait for each other, or for something that is gone."""
    muted, ended = LONG[timer]
    crew = Crew(replicas=2, shards=2)
    crew.mute = muted
    crew.say(crew.dies(0), crew.parted(1, 4))
    for counter in range(1, 20):
        (probe,) = of(Probe, crew.fire(timer))
        waits = crew.worker(0 if timer == "build" else 2)
        assert crew.gang.members.workers[waits].node in probe.nodes
        crew.say(Standing(crew.gang.members.workers[waits].node, 1, {waits: counter}))
    assert crew.gang.generation == 2
    assert of(Probe, crew.fire(timer))
    told = crew.fire(timer)
    assert of(ended, told) and not of(Kill, told), "it does not move any more"
    if timer == "form":
        crew.mute = ()
        (form,) = of(Form, crew.say(crew.parted(1, 4, made=1)))
        assert (form.generation, form.step) == (3, 4) and "were not ready in time" in form.reason
    else:
        assert of(Build, told), "it is built again"


# -- what a rank holds


def test_a_worker_enters_a_generation_only_from_the_world_that_is_in_it():
    member = Member(1, steps=9)
    assert member.build(2)
    member.built()
    assert not member.form(4, 1, None) and not member.form(4, 3, None)
    assert (member.phase, member.generation) == ("built", 0)


def test_a_late_order_to_part_does_not_take_a_worker_out_of_the_next_generation():
    member = Member(1, steps=9)
    assert member.build(1)
    member.built()
    assert member.form(5, 1, None) and member.formed(3)
    assert not member.part(4) and member.phase == "running"
    assert member.part(5) and member.phase == "built"


def test_a_state_that_was_taken_counts_like_the_steps_of_its_generation():
    """If it counted for an older generation, which may be abandoned, it would be abandoned too."""
    member = Member(1, steps=9)
    assert member.build(1)
    member.built()
    assert member.form(4, 1, Source("live", "n1", 2))
    member.restored(3)
    assert (member.step, member.prepared, member.made) == (3, 3, 4)


def test_ranks_that_took_a_state_and_ranks_that_did_not_have_nothing_in_common():
    """Otherwise their replica would hide the newer state, and the gang would go back behind it."""
    assert in_common(2, 3, 1, last_made=1) == (2, 3, 1)
    assert in_common(2, 2, 1, last_made=2) == (-1, -1, 0)


# -- the end


def test_the_last_step_is_saved_before_all_leave():
    crew = Crew(steps=10)
    told = crew.say(crew.parted(0, 10), crew.parted(1, 9, 10))
    assert of(Save, told) == [Save(1, 10, EVERYONE)] and not of(Leave, told)
    told = crew.say(Durable(10, 1))
    assert of(Leave, told) == [Leave("done after step 10", ("n0", "n1"))]
    assert [(e.ok, e.durable, e.cause) for e in of(Ended, told)] == [(True, 10, "")]
    assert crew.say(NodeJoined("late", 1, "")) == [Leave("done after step 10", ("late",))]


def stopped(grace_s=40):
    crew = Crew(replicas=1, shards=2, per_node=2)
    crew.say(StepsDone(1, 50), Durable(10, 1), Stop(grace_s * S))
    return crew, crew.now


def test_a_stop_of_a_broken_gang_writes_what_is_in_memory():
    crew, began = stopped()
    crew.mute = (Launch,)
    crew.say(crew.dies(0))
    (asked,) = of(Ask, crew.fire("stop"))
    assert crew.now - began < 20.1 * S and asked in crew.gang.outstanding()
    (write,) = of(Write, crew.say(Held("n0", 1, 1, ((0, 49, 1), (1, 49, 1)))))
    assert write == Write(49, 1, ("n0",)) and write in crew.gang.outstanding()
    crew.say(Durable(49, 1))
    assert not of(Write, crew.gang.outstanding()) and crew.gang.phase == "gathering", "it may come back"
    (ended,) = of(Ended, crew.fire("stop"))
    assert (ended.durable, ended.cause) == (49, "") and "step 49 is saved" in ended.reason
    assert crew.now - began < 40.1 * S


def test_a_broken_gang_whose_last_step_was_in_memory_has_nothing_to_wait_for():
    crew, _ = stopped()
    crew.mute = (Launch,)
    crew.say(crew.dies(0))
    crew.fire("stop")
    crew.say(Held("n0", 1, 1, ((0, 50, 1), (1, 50, 1))))
    assert [(e.ok, e.durable) for e in of(Ended, crew.say(Durable(50, 1)))] == [(True, 50)]


@pytest.mark.parametrize("ends", ["stop", "failure"])
def test_what_an_earlier_generation_left_in_memory_is_written(ends):
    """The next generation could not begin, so it has nothing in memory."""
    crew, _ = stopped()
    crew.mute = (Form,)
    crew.say(crew.dies(0))
    held = ((0, 49, 1), (1, 49, 1))
    assert of(Form, crew.say(Held("n0", 1, 1, held))) and crew.gang.phase == "forming"
    if ends == "stop":
        assert of(Ask, crew.fire("stop"))
    else:
        crew.say(WorkerDied("n0", 1, crew.worker(1), Failure(kind="UserError", text="it does not fit")))
        assert crew.gang.phase == "flushing"
    assert of(Write, crew.say(Held("n0", 1, 2, held))) == [Write(49, 1, ("n0",))]


def test_a_stop_ends_in_time_if_memories_cannot_be_written():
    crew, began = stopped()
    crew.mute = (Launch,)
    crew.say(crew.dies(0))
    crew.fire("stop")
    crew.say(Held("n0", 1, 1, ((0, 49, 1), (1, 49, 1))))
    (ended,) = of(Ended, crew.fire("stop"))
    assert crew.now - began < 40.1 * S and ended.durable == 10 and "step 10 is saved" in ended.reason


def test_a_gang_that_comes_back_in_the_second_half_saves_its_last_step():
    crew, _ = stopped()
    crew.fire("stop")
    crew.say(Held("n0", 1, 1, ((0, 49, 1), (1, 49, 1))), Durable(49, 1))
    assert of(Save, crew.say(crew.parted(0, 51)))
    assert [(e.ok, e.durable) for e in of(Ended, crew.say(Durable(51, 1)))] == [(True, 51)]


def test_a_checkpoint_that_a_newer_one_has_overtaken_is_reported_too():
    """Otherwise the user's hook would not hear of it."""
    crew = Crew(replicas=2)
    crew.say(StepsDone(1, 4))
    crew.say(*(Written("n0", 1, f"step-{step}", step, 1, 2, {0: (8, "h"), 1: (8, "h")}, "seal", 0) for step in (2, 4)))
    told = [*crew.say(Durable(4, 1)), *crew.say(Durable(2, 1)), *crew.say(Durable(6, 1))]
    assert sorted(json.loads(r.body)["step"] for r in of(Report, told) if r.about == "checkpoint") == [2, 4]
    assert not crew.gang.commits.drafts


@pytest.mark.parametrize("overtaken", [True, False])
def test_a_checkpoint_that_fails_when_a_newer_one_is_durable_is_no_loss(overtaken):
    crew = Crew(replicas=2)
    crew.say(StepsDone(1, 4))
    crew.say(Written("n0", 1, "step-2", 2, 1, 2, {0: (8, "h"), 1: (8, "h")}, "seal", 0))
    told = crew.say(Durable(4, 1)) if overtaken else []
    for _ in range(crew.gang.policy.save_tries):
        told += crew.say(Unwritten("n0", 1, "step-2", 2, 1, -1, "503"))
        told += crew.fire("save") if "save" in crew.gang.desk.timers else []
    assert not crew.gang.commits.drafts
    told = [r for r in of(Report, told) if r.about == "checkpoint_failed"] + of(Note, told)
    assert len(told) == (0 if overtaken else crew.gang.policy.save_tries + 1)


def test_what_was_given_up_is_told_once_however_often_it_is_answered():
    """A journal that found room again once sent every order of an hour, and each answer was another failure."""
    crew = Crew(replicas=2)
    crew.say(StepsDone(1, 40))
    told = []
    for _ in range(3):
        for step in range(1, 41):
            told += crew.say(Unwritten("n0", 1, "", step, 1, 0, "no snapshot of it is in memory any more", True))
    assert len([r for r in of(Report, told) if r.about == "checkpoint_failed"]) == 40


def test_an_interval_is_said_again_to_those_who_may_have_missed_it():
    crew = Crew()
    assert not of(Interval, crew.gang.outstanding())
    (told,) = of(Interval, crew.say(Cost(5, S, S // 100, S // 100, S)))
    assert of(Interval, crew.gang.outstanding()) == [told]


def test_what_is_outstanding_is_said_again_until_it_is_answered():
    crew = Crew(replicas=2, shards=2)
    assert crew.gang.outstanding() == []
    crew.say(StepsDone(1, 1), Stop(60 * S))
    assert crew.gang.outstanding() == [Pause(1, EVERYONE)]
    crew.mute = (Halt, Launch, Form)
    crew.say(crew.dies(0))
    launch, halt, part = crew.gang.outstanding()
    assert (type(launch), launch.node) == (Launch, "n0") and (type(halt), halt.node) == (Halt, "n1")
    assert (type(part), part.nodes) == (Part, ("n2", "n3"))


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
    lineage.commit(5)
    lineage.end(1)
    assert lineage.step_of(Copy(4, 5, 1)) == 5
    lineage.branch(2, 4)
    assert lineage.step_of(Copy(4, 5, 1)) == 4
    lineage.branch(3, 2)
    assert lineage.step_of(Copy(4, 5, 1)) == -1 and lineage.step_of(Copy(4, 4, 3)) == 4


# -- purity


def test_control_is_pure():
    """Contract 1: what the simulator proves about control is true of the code that runs."""
    allowed = {"__future__", "dataclasses", "typing", "collections", "collections.abc", "contextlib", "functools"}
    allowed |= {"itertools", "json", "math", "heapq", "bisect", "operator", "re", "statistics"}
    allowed |= {"phalanx.core.layout", "phalanx.core.checkpoint", "phalanx.core.errors"}
    for path in Path(control.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        other = {name for name in imported if not name.startswith("phalanx.control")} - allowed
        assert not other, (path.name, other)


def test_each_wait_has_its_whole_time():
    """The timer of a wait that was over once ended the run a second into the next wait."""
    crew = Crew(replicas=2, min_replicas=2, hold_ns=300 * S)
    for incarnation in (1, 2):
        step = crew.gang.committed + 1
        crew.say(NodeDead("n1", incarnation, "burnt"), crew.parted(0, step))
        assert crew.gang.desk.timers["hold"] > crew.now + 299 * S, f"of wait {incarnation}"
        crew.now += 200 * S
        crew.say(NodeJoined("n1", incarnation + 1, "rack"))
        assert crew.gang.phase == "running" and "hold" not in crew.gang.desk.timers


def test_a_worker_is_asked_anew_in_its_next_world():
    crew = Crew(replicas=1, shards=2)
    crew.mute = Build
    crew.say(crew.dies(0))
    assert of(Probe, crew.fire("build")), "both are late"
    crew.say(crew.dies(0))
    world, (new, old) = crew.gang.worlds.replicas[0].world, (crew.worker(0), crew.worker(1))
    crew.say(Built((crew.node(0),), (1,), ((new,),), world))
    assert crew.gang.worlds.replicas[0].waiting == {old}
    told = crew.fire("build")
    assert of(Probe, told) and not of(Halt, told), "it was doubted in the world before"
