"""A failure stops its replica and nobody else: the others keep their worlds, redo only the missing part of the step,
and are stopped once more, when it joins them. This holds even if another failure comes while it joins."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from phalanx.control.gang import Gang
from phalanx.control.messages import Build, Failure, Halt, Launch, NodeJoined, Parked, Pause, TimerFired, WorkersUp
from phalanx.control.policy import Policy
from phalanx.control.worlds import Worlds
from phalanx.core.layout import Layout
from tests.control.sim.seeds import JOINING
from tests.control.sim.world import MS, S
from tests.control.test_recovery import a_gang, the_worker, to_the_end, until

REPLICAS, SIZE = 4, 2


def gang_in_a_pass(steps=40, **more):
    """Return a gang of four replicas of two ranks, in the middle of a step."""
    world = a_gang(replicas=REPLICAS, shards=SIZE, nodes=REPLICAS * SIZE, steps=steps, **more)
    world.run(until=world.now + 200 * MS)
    return world


def kill(world, *replicas):
    for replica in replicas:
        the_worker(world, replica * SIZE + 1).die("SIGKILL")


def worlds(world):
    """Return, by replica, the worlds that it was told to build."""
    found = defaultdict(set)
    for command in world.controller.told:
        if isinstance(command, Build):
            found[command.replica].add(command.world)
    return found


def finish(world, broken):
    """Run to the end, and check that it is at full strength and that nothing intact was touched."""
    procs = {proc.rank: proc for proc in world.procs() if proc.rank // SIZE not in broken}
    forms = to_the_end(world)
    built = worlds(world)
    whole = {replica: numbers for replica, numbers in built.items() if replica not in broken}
    assert all(len(numbers) == 1 for numbers in whole.values()), f"a replica that was not broken was built: {whole}"
    halted = {command.world for command in world.controller.told if isinstance(command, Halt)}
    assert halted.isdisjoint(set().union(*whole.values())), "a replica that was not broken was halted"
    assert all(the_worker(world, rank) is proc for rank, proc in procs.items()), "a survivor lost its process"
    assert forms[-1].replicas == tuple(range(REPLICAS)) and not world.ledger.undone
    return forms


def pauses(world):
    """Return the generations that were stopped for a join."""
    return {command.generation for command in world.controller.told if isinstance(command, Pause)}


# -- failures


@pytest.mark.parametrize("broken", [{1}, {1, 2}, {0, 2, 3}], ids=str)
def test_the_others_keep_their_worlds_and_redo_only_what_is_missing(broken):
    world = gang_in_a_pass()
    step = world.gang.gen.step_seen[0]
    kill(world, *broken)
    _, degraded, *joined = finish(world, broken)
    stay = tuple(r for r in range(REPLICAS) if r not in broken)
    assert degraded.replicas == stay and degraded.step >= step and not degraded.by_rank()
    assert degraded.kept == stay, "what they had computed is not thrown away"
    for before, form in pairwise([degraded, *joined]):
        assert f"replicas {sorted({*form.replicas}.difference(before.replicas))} join" in form.reason
    assert {rank // SIZE for form in joined for rank in form.by_rank()} == broken
    assert all(source.kind == "live" for form in joined for source in form.by_rank().values())
    assert all(form.joins for form in joined) and not degraded.joins, "after a join all compare their states"
    assert len(pauses(world)) == len(joined) <= len(broken), "each join stops the gang once"


def test_a_node_that_is_replaced_stops_its_replica_only():
    world = a_gang(replicas=3, shards=2, nodes=7, steps=40)
    the_worker(world, 2).node.power_off(proved=True)
    _, degraded, joined = to_the_end(world)
    assert (degraded.replicas, joined.replicas) == ((0, 2), (0, 1, 2)) and len(pauses(world)) == 1
    assert {replica: len(built) for replica, built in worlds(world).items()} == {0: 1, 1: 2, 2: 1}


# -- while a replica joins

JOINER = 1


@pytest.mark.parametrize("victim", ["the joiner", "its donor", "another"])
@pytest.mark.parametrize("phase", JOINING)
def test_a_second_failure_while_a_replica_joins(phase, victim):
    """The next death hits the joiner, the replica that it takes the state from, or another one, at each stage of the
    join."""
    world = gang_in_a_pass()
    kill(world, JOINER)
    until(world, lambda: (p := the_worker(world, JOINER * SIZE)).member.world > REPLICAS and JOINING[phase](p))
    second = {"the joiner": JOINER, "its donor": JOINER + 1, "another": JOINER + 2}[victim]
    kill(world, second)
    finish(world, {JOINER, second})
    assert len(pauses(world)) <= 3


@pytest.mark.parametrize("fault, attempts, steps", [("deaf", 10, 60), ("walled", 4, 20)])
def test_a_joiner_that_fails_does_not_stop_the_others_again_and_again(fault, attempts, steps, monkeypatch):
    """Either no donor can be reached, or the joiner waits for the others in vain and nobody is told why."""
    tried, done = a_minute(fault)
    assert tried <= attempts and done >= steps
    monkeypatch.setattr(Worlds, "fail_to_join", lambda self, numbers, since_ns: None)
    tried, done = a_minute(fault)
    assert tried > attempts or done < steps, "nothing holds it back, and nobody sees it"


def a_minute(fault):
    """Count the attempts to join, and the steps meanwhile. When all is well again, the joiner is taken back."""
    world = gang_in_a_pass(steps=400, deaths=100)
    before, bad = len(world.ledger.history), getattr(world, fault)
    bad.update(world.nodes if fault == "deaf" else [the_worker(world, JOINER * SIZE).node.name])
    kill(world, JOINER)
    world.run(until=world.now + 60 * S)
    forms, done = world.controller.forms, len(world.ledger.history) - before
    bad.clear()
    until(world, lambda: world.gang.phase == "running" and len(world.gang.gen.worlds) == REPLICAS)
    assert {r: len(built) for r, built in worlds(world).items()} == {0: 1, JOINER: 2, 2: 1, 3: 1}
    return len([form for form in forms[1:] if JOINER in form.replicas]), done


@pytest.mark.parametrize("each, ends", [(1, False), (4, False), (5, True)])
def test_many_replicas_that_cannot_be_built_are_not_one_that_never_can(each, ends):
    """At the start all fail alike: a run of many replicas gets as many attempts as one of few."""
    replicas = 40
    gang, now, failed = Gang.of(Layout(replica=replicas, ranks_per_node=1), 100, Policy()), 0, [0] * replicas
    todo = [NodeJoined(f"n{i}", 1, "rack") for i in range(replicas)]
    while gang.phase != "ended" and (todo or min(failed) < each):
        now += 1
        event = todo.pop(0) if todo else TimerFired("again")
        if event == TimerFired("again"):
            now = max(now, gang.desk.timers["again"])
        for command in gang.apply(now, event):
            if isinstance(command, Launch):
                todo.append(WorkersUp(command.node, 1, *[tuple(command.workers.values())] * 2))
            elif isinstance(command, Build) and failed[command.replica] < each:
                failed[command.replica] += 1
                why, workers = Failure("RuntimeError", "no such interface"), tuple(command.crew.values())
                todo.append(Parked((command.node,), (1,), (workers,), command.world, -1, -1, 0, why))
    assert (gang.phase == "ended") == ends


# -- planted bugs


def test_a_failure_that_halts_all_is_seen(monkeypatch):
    def halt_all(self, quiet=False):
        part(self, quiet)
        for number in sorted(self.gen.left):
            self._halt(number)

    part = Gang._part
    monkeypatch.setattr(Gang, "_part", halt_all)
    world = gang_in_a_pass()
    kill(world, 1)
    with pytest.raises(AssertionError, match="was not broken"):
        finish(world, {1})


def test_gradients_that_are_thrown_away_are_seen(monkeypatch):
    form = Gang._form
    monkeypatch.setattr(Gang, "_form", lambda self, made: form(self, replace(made, kept=())))
    with pytest.raises(AssertionError):
        test_the_others_keep_their_worlds_and_redo_only_what_is_missing({1})
