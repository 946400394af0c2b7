"""A run always ends: done, or with a reason. Each case was once a run that never ended, or that lost what it had. Each
comes with the bug that caused it, planted again: then the case must fail."""

from __future__ import annotations

import pytest

from phalanx.control import gang as gang_module
from phalanx.control.agent import Agent
from phalanx.control.commits import Commits
from phalanx.control.ending import Ending
from phalanx.control.finding import Finder
from phalanx.control.gang import Gang
from phalanx.control.generation import Generation
from phalanx.control.journaled import Plan, Poison, State
from phalanx.control.liveness import Liveness, Orphans
from phalanx.control.membership import Membership, Node
from phalanx.control.messages import Drain, Missing, NodeJoined, StepsDone, Stop
from phalanx.control.policy import Policy, beat_ns
from phalanx.control.staffing import Staff
from phalanx.control.verdict import Verdict
from phalanx.control.worlds import Worlds
from phalanx.core.layout import Layout
from phalanx.twin.agenda import Agenda
from tests.control.sim.world import BEAT_NS, MS, QUICK, S, Setting, World

BOUND_NS = 600 * S


def world_of(replicas=2, shards=1, nodes=2, steps=12, before=4, **more):
    policy = {name: more.pop(name) for name in list(more) if name in Policy.__dataclass_fields__}
    set_ = Setting(
        layout=Layout(replica=replicas, shard=shards, ranks_per_node=1), steps=steps, nodes=nodes,
        policy=Policy(**{**QUICK, "buddies": replicas == 1, **policy}), **more,
    )  # fmt: skip
    world = World(set_, seed=5)
    world.run(until=BOUND_NS, stop=lambda: len(world.ledger.history) >= before)
    return world


def end(world):
    world.run(until=world.now + BOUND_NS)
    assert world.over, f"it is {world.gang.phase} for ever, in generation {world.gang.generation}"
    return world.controller.ended


def rank(world, number):
    return next(proc for proc in world.procs() if proc.rank == number)


def kill_all(node):
    for proc in [*node.procs.values()]:
        proc.die("SIGKILL")


# -- the cases


def the_last_checkpoint_fails_once():
    world = world_of(durable_every=0)
    world.full.update(world.nodes)
    world.run(until=world.now + BOUND_NS, stop=lambda: world.gang.phase == "saving" and world.gang.commits.drafts)
    world.full.clear()
    ended = end(world)
    assert ended.ok and ended.durable == 12


def the_last_checkpoint_fails_for_good():
    world = world_of(durable_every=4)
    world.run(stop=lambda: world.gang.commits.last >= 4)
    world.full.update(world.nodes)
    ended = end(world)
    assert not ended.ok and "no space" in ended.reason and 4 <= ended.durable < 12


def what_the_run_begins_from_is_damaged():
    world = World(Setting(policy=Policy(**QUICK)), seed=5)
    world.unreadable.add(-1)
    ended = end(world)
    assert ended.cause == "start" and "damaged" in ended.reason and world.gang.generation == 1


def a_donor_that_keeps_failing():
    """Another replica has the state too, then memory, then the checkpoint."""
    world = world_of(replicas=3, nodes=3, steps=30)
    deaf = rank(world, 2).node.name  # the next rank of its coordinate, which is asked first
    world.deaf.add(deaf)
    rank(world, 1).die("SIGKILL")
    assert end(world).ok and not world.ledger.undone
    donors = [found.node for form in world.controller.forms[1:] if (found := form.source_of(1))]
    assert donors.count(deaf) == 1 and len(set(donors)) == 2
    assert any(deaf in text for _, text in world.controller.notes) or world.gang.members.nodes[deaf].deaths


def a_rank_that_cannot_enter_and_does_not_say_why():
    """Each generation with it breaks before it begins."""
    world = world_of(replicas=4, nodes=4, steps=100)
    world.mute.add(rank(world, 1).node.name)
    rank(world, 1).die("SIGKILL")
    assert end(world).ok


def a_replica_whose_sums_break():
    """It forms its groups each time, and no step is committed with it."""
    world = world_of(replicas=4, nodes=5, steps=100)
    world.frail.add(rank(world, 1).node.name)
    assert end(world).ok
    assert (0, 2, 3) in {form.replicas for form in world.controller.forms}


def ranks_that_hang_as_they_start():
    """Ranks hang on several nodes, one after the other, so that one is always starting."""
    world = world_of(replicas=4, nodes=4, steps=40, min_replicas=4)
    for number in range(4):
        world.after(number * 11 * S, world.duds.add, f"n{number}")
        world.after(number * 11 * S, kill_all, world.nodes[f"n{number}"])
    ended = end(world)
    assert not ended.ok and "0 replicas are whole" in ended.reason


def a_rank_that_hangs_and_cannot_be_killed():
    """The kernel holds the rank. The others do without it, and its place gets another node."""
    world = world_of(replicas=2, nodes=3, steps=100)
    held = rank(world, 1)
    world.undead.add(held.node.name)
    held.hang()
    assert end(world).ok and held.alive
    assert world.gang.form.replicas == (0, 1) and world.gang.worlds.replicas[1].nodes == ("n2",)


def sums_that_break_everywhere():
    world = world_of(replicas=2, nodes=2, steps=100, min_replicas=2)
    world.frail.update(world.nodes)
    ended = end(world)
    assert not ended.ok and "the last: replica" in ended.reason


def every_memory_fails():
    world = world_of(replicas=1, shards=2, nodes=2, steps=20, before=9, durable_every=3)
    world.run(stop=lambda: world.gang.commits.last >= 6)
    world.deaf.update(world.nodes)
    for proc in world.procs():
        proc.die("SIGKILL")
    assert end(world).ok
    kinds = [{s.kind for s in form.by_rank().values() or [form.every]} for form in world.controller.forms[1:]]
    assert {"memory"} in kinds and kinds[-1] == {"durable"} and len(kinds) <= 4


def groups_that_cannot_form():
    world = World(Setting(Layout(shard=2, ranks_per_node=1), policy=Policy(**QUICK), nodes=3), seed=5)
    world.lonely.update(dict.fromkeys(world.nodes, "there is no such interface: eth9"))
    ended = end(world)
    assert not ended.ok and "rank" in ended.reason and "no such interface: eth9" in ended.reason
    assert world.gang.generation == 0 and world.gang.worlds.last <= 4 * world.gang.policy.strikes


def one_node_that_cannot_form_groups():
    world = World(Setting(policy=Policy(**QUICK), nodes=3, steps=12), seed=5)
    world.run(stop=lambda: world.gang.phase == "gathering" and len(world.gang.members.workers) == 2)
    bad = next(iter(world.gang.members.workers.values())).node
    world.lonely[bad] = "there is no such interface: eth9"
    assert end(world).ok and bad not in world.ledger.homes[world.gang.generation]


def a_restore_that_takes_longer_than_every_limit():
    world = world_of(replicas=1, steps=8, before=2, nodes=1, restore_ms=(40_000, 41_000))
    rank(world, 0).die("SIGKILL")
    assert end(world).ok and world.gang.generation == 2


def a_start_that_takes_longer_than_every_limit():
    """Workers that take minutes to draw their first values do come up in the end."""
    world = World(Setting(policy=Policy(**{**QUICK, "gather_ns": 100 * S}), nodes=2, start_ms=(40_000, 41_000)), seed=5)
    assert end(world).ok and world.gang.generation == 1


def the_link_to_a_gang_of_one_replica_is_cut():
    """The gang continues until its lease ends, and nobody takes its place before that."""
    world = world_of(replicas=1, nodes=3, steps=200, before=6, durable_every=3)
    old = rank(world, 0)
    world.cut.add(old.node.name)
    cut, last = world.now, old.member.step
    world.run(until=BOUND_NS, stop=lambda: world.gang.generation > 1)
    assert world.gang.generation == 2 and world.now - cut >= world.gang.policy.lease_ns
    assert old.member.phase == "built" and old.member.step > last + 5, "it trained meanwhile, and has stopped"
    stopped = old.member.step
    world.run(until=world.now + 30 * S)
    assert old.member.step == stopped
    world.cut.clear()
    assert end(world).ok


def a_node_that_was_given_up_is_back_for_one_beat():
    """The node is cut off again before it hears that it was given up: its lease must not have been renewed
    meanwhile."""
    world = world_of(replicas=1, nodes=3, steps=2000, before=6, durable_every=3)
    node = rank(world, 0).node
    world.cut.add(node.name)
    world.run(until=BOUND_NS, stop=lambda: world.gang.phase == "fencing")
    lapses, home, cut_off = world.gang.desk.timers["lease"], world.homes[node.home], world.now
    world.after(lapses - world.now - 6 * S, world.cut.discard, node.name)
    world.run(until=lapses, stop=lambda: home.beats[node.name] > cut_off)
    assert cut_off < home.beats[node.name] < lapses, "it has been heard"
    world.run(until=world.now + 5 * MS)  # an answer has arrived
    assert not node.agent.fenced, "it has heard everything"
    world.cut.add(node.name)
    world.run(until=lapses + 60 * S)
    assert world.gang.generation == 2


def the_controller_is_gone_for_longer_than_the_lease():
    world = world_of(nodes=2, steps=120)
    world.controller.alive = False
    world.controller.life += 1
    before = len(world.ledger.history)
    world.run(until=world.now + 15 * S)
    assert len(world.ledger.history) > before + 10, "nothing stops at once"
    world.run(until=world.now + 30 * S)
    assert {proc.member.phase for proc in world.procs()} == {"built"}
    pids = {proc.number for proc in world.procs()}
    world.controller.restart()
    assert end(world).ok and pids == {proc.number for proc in world.procs()}, "their processes and states were kept"


def a_rack_dies_with_its_aggregator():
    world = world_of(replicas=4, nodes=6, steps=60, aggregators=3)
    home = rank(world, 0).node.home
    gone = [node for node in world.nodes.values() if node.home == home]
    began = world.now
    for node in gone:
        node.power_off()
    world.homes[home].die(back=None)
    until = began + 4 * BEAT_NS + 2 * world.gang.policy.silence_ns
    world.run(until=until, stop=lambda: all(world.gang.members.nodes[n.name].dead for n in gone))
    assert all(world.gang.members.nodes[n.name].dead for n in gone), f"unknown after {(world.now - began) / S} s"
    assert end(world).ok


def a_connection_is_lost_for_a_moment():
    world = world_of(nodes=2, steps=20)
    for node in world.nodes.values():
        node.hang_up()
    assert end(world).ok and world.gang.generation == 1 and not world.gang.members.nodes["n0"].dead


def the_controller_hangs():
    world = world_of(nodes=2, steps=60)
    world.controller.hang(10 * S)
    world.run(until=world.now + S)
    rank(world, 1).die("SIGKILL")
    assert end(world).ok


def the_controllers_code_raises_on_events():
    """What the events were about is asked again, or starts anew; a timer fires later."""
    world = world_of(nodes=3, steps=60, before=2)
    for word in ("WorkerDied", "Parted", "Built", "Formed", "TimerFired"):
        world.controller.poisoned = [word]
        before = len(world.ledger.history)
        if word == "WorkerDied":
            victim = rank(world, 1)
            victim.die("SIGKILL")
            world.run(until=world.now + BOUND_NS, stop=lambda: world.controller.state.aside)
            assert world.gang.members.nodes[victim.node.name].dead, "what it said is forgotten, and it counts as there"
        elif world.procs():
            world.procs()[0].die("SIGKILL")
        world.run(until=world.now + BOUND_NS, stop=lambda before=before: len(world.ledger.history) > before + 3)
        assert len(world.ledger.history) > before, f"nothing happens after {word} was set aside"
    assert end(world).ok and world.controller.state.aside >= 3


def a_node_that_nobody_has_listened_to():
    """Its outbox overflows: it starts anew."""
    world = world_of(nodes=2, steps=20)
    node = rank(world, 1).node
    node.agent.reset()
    node.act()
    assert end(world).ok and node.incarnation == 2


def a_drained_node_restarts():
    world = world_of(nodes=3, steps=60)
    drained = rank(world, 0).node
    world.controller.ask(Drain(drained.name))
    world.run(until=BOUND_NS, stop=lambda: not drained.procs)
    drained.power_off(proved=True, back=2 * S)
    world.run(until=world.now + 10 * S)
    rank(world, 1).node.power_off(proved=True)
    end(world)
    assert drained.name not in {
        node for form in world.controller.forms[2:] for node in world.ledger.homes[form.generation]
    }
    world.controller.alive = True


def the_first_loss_ends_a_run_without_recovery():
    world = world_of(recover=False, min_replicas=2, durable_every=3, before=8, steps=40)
    rank(world, 1).die("SIGKILL")
    began = world.now
    ended = end(world)
    assert not ended.ok and ended.rank == 1 and "SIGKILL" in ended.reason and world.gang.generation == 1
    assert ended.durable >= 7, "what was in memory is written"
    assert world.now - began < 30 * S


def a_stop_while_a_rank_is_dead():
    """The rank cannot be back in time: what is in memory is written at half of the time."""
    world = world_of(replicas=1, shards=2, nodes=2, steps=100, before=12, durable_every=5, start_ms=(300, 301))
    world.set.start_ms = (600_000, 600_001)
    world.run(until=BOUND_NS, stop=lambda: len(world.ledger.history) % 5 == 4)
    rank(world, 0).die("SIGKILL")
    world.run(until=world.now + 5 * S)
    whole = max(step for r, step, _ in world.nodes["n0"].memory if r == 0)
    assert world.gang.commits.last < whole, "there is nothing to lose"
    world.controller.ask(Stop(20 * S))
    began = world.now
    ended = end(world)
    assert ended.durable == whole and ended.cause == "" and f"step {whole}" in ended.reason
    assert world.now - began <= 20 * S


def a_stop_of_a_gang_that_trains():
    """The gang saves its last step as soon as that is done."""
    world = world_of(replicas=1, shards=2, nodes=2, steps=100, before=12)
    world.controller.ask(Stop(20 * S))
    began = world.now
    ended = end(world)
    assert ended.ok and ended.durable == ended.step and world.now - began < 5 * S


def every_host_falls_silent_for_good():
    world = world_of(nodes=3, steps=40)
    for node in world.nodes.values():
        node.power_off()
    ended = end(world)
    assert not ended.ok and "the run cannot continue" in ended.reason


def an_aggregator_dies_as_the_run_ends():
    """Its nodes hear of the end from another one."""
    world = world_of(steps=12, aggregators=2)
    world.run(until=BOUND_NS, stop=lambda: any(step == 12 for step, _ in world.durables))
    world.homes[world.nodes["n0"].home].die(back=None)
    assert end(world).ok
    Agenda.run(world, world.now + 60 * S, lambda: False)
    assert all(node.agent.left for node in world.nodes.values()), "an agent waits for ever"


def an_error_that_trying_again_cannot_mend():
    world = world_of()
    rank(world, 1).die(kind="UserError", text="the vocabulary is too small")
    ended = end(world)
    assert ended.failure.kind == "UserError" and "too small" in ended.reason and world.gang.generation == 1


CASES = [value for name, value in list(globals().items()) if callable(value) and value.__module__ == __name__][4:]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_it_ends(case):
    case()


# -- the bugs, planted again


def patch_handler(monkeypatch, kind, make):
    original = gang_module.HANDLERS[kind]
    monkeypatch.setattr(gang_module, "HANDLERS", {**gang_module.HANDLERS, kind: make(original)})


def unlimited(monkeypatch):
    monkeypatch.setattr(Policy, "pause_before", lambda self, attempt: 4 * S)
    for name in ("attempts", "strikes", "errors"):
        monkeypatch.setitem(QUICK, name, 10**9)


PLANTED = {
    "a failed file is not written again": (
        the_last_checkpoint_fails_once,
        lambda m: (
            m.setattr(Commits, "unwritten", lambda self, e: None),
            m.setattr(Ending, "look_late", lambda self: None),
        ),
    ),
    "a last checkpoint that fails is no failure": (
        the_last_checkpoint_fails_for_good,
        lambda m: m.setattr(Ending, "_give_up", lambda self, reason: self._done()),
    ),
    "damage of the first checkpoint is tried again": (
        what_the_run_begins_from_is_damaged,
        lambda m: (
            unlimited(m),
            patch_handler(
                m, Missing, lambda on: lambda g, e: on(g, Missing(e.node, e.incarnation, e.generation, e.worker))
            ),
        ),
    ),
    "the same donor is asked for ever": (
        a_donor_that_keeps_failing,
        lambda m: (unlimited(m), m.setattr(Finder, "fail", lambda self, source, step, damaged: None)),
    ),
    "a rank that does not say why it cannot enter is taken in again at once": (
        a_rank_that_cannot_enter_and_does_not_say_why,
        lambda m: m.setattr(Gang, "_hold_back", lambda self, parted, step: None),
    ),
    "a replica whose sums break is taken in again at once": (
        a_replica_whose_sums_break,
        lambda m: m.setattr(Gang, "_hold_back", lambda self, parted, step: None),
    ),
    "the same memory is asked for ever": (
        every_memory_fails,
        lambda m: (unlimited(m), m.setattr(Finder, "fail", lambda self, source, step, damaged: None)),
    ),
    "a rank that starts is waited for, however often it has hung": (
        ranks_that_hang_as_they_start,
        lambda m: m.setattr(Staff, "is_hopeful", property(lambda self: bool(self.starting))),
    ),
    "a process that does not end is waited for": (
        a_rank_that_hangs_and_cannot_be_killed,
        lambda m: m.setattr(Agent, "_outlived", lambda self, number: None),
    ),
    "groups are formed again for ever": (groups_that_cannot_form, unlimited),
    "no other node is tried": (
        one_node_that_cannot_form_groups,
        lambda m: m.setattr(Gang, "_blame", lambda self, cause: None),
    ),
    "a world is built again on a bad node while the next prepares": (
        one_node_that_cannot_form_groups,
        lambda m: m.setattr(Staff, "is_replacing", lambda self, names: False),
    ),
    "a contained failure is forgotten before it is found to be fatal": (
        an_error_that_trying_again_cannot_mend,
        lambda m: m.setattr(Verdict, "fatal", lambda self: None),
    ),
    "hosts without which the gang cannot continue are waited for": (
        every_host_falls_silent_for_good,
        lambda m: m.setitem(gang_module.TIMERS, "silence", lambda g: g.desk.set("silence", g.policy.silence_ns)),
    ),
    "what a dead worker left in memory is not written": (
        the_first_loss_ends_a_run_without_recovery,
        lambda m: m.setattr(Worlds, "homes", lambda self, number, nodes: [""] * len(self.replicas[number].crew)),
    ),
    "progress does not count while restoring": (
        a_restore_that_takes_longer_than_every_limit,
        lambda m: m.setattr(Agent, "counted", lambda self, now_ns, counters: None),
    ),
    "progress does not count while starting": (
        a_start_that_takes_longer_than_every_limit,
        lambda m: m.setattr(Agent, "counted", lambda self, now_ns, counters: None),
    ),
    "an old generation is not fenced": (
        the_link_to_a_gang_of_one_replica_is_cut,
        lambda m: m.setattr(Generation, "begin", _begun_over(Generation.begin)),
    ),
    "a lease is not kept": (
        the_link_to_a_gang_of_one_replica_is_cut,
        lambda m: m.setattr(Agent, "_lapse", lambda self: None),
    ),
    "a node is given a lease before the controller knows that it is back": (
        a_node_that_was_given_up_is_back_for_one_beat,
        lambda m: m.setattr(Liveness, "lease", lambda self, node, lease_ns: lease_ns),
    ),
    "nobody knows which aggregators live": (
        a_rack_dies_with_its_aggregator,
        lambda m: m.setattr(Orphans, "lose", lambda self, home, now_ns: None),
    ),
    "a lost connection is a proof": (
        a_connection_is_lost_for_a_moment,
        lambda m: m.setattr("tests.control.sim.world.GONE_NS", 10 * MS),
    ),
    "what was set aside is forgotten": (
        the_controllers_code_raises_on_events,
        lambda m: m.setattr(Gang, "disown", lambda self, now_ns, name, incarnation: None),
    ),
    "a node whose outbox is full says nothing more": (
        a_node_that_nobody_has_listened_to,
        lambda m: m.setattr(Agent, "reset", lambda self: None),
    ),
    "a controller that hangs is not noticed": (
        the_controller_hangs,
        lambda m: m.setattr("tests.control.sim.world.Controller.unhang", lambda self, life: None),
    ),
    "a drained node is forgotten": (a_drained_node_restarts, lambda m: m.setattr(Membership, "join", _forgetful)),
    "a stop of a broken gang writes nothing": (
        a_stop_while_a_rank_is_dead,
        lambda m: m.setattr(Ending, "flush", lambda self: None),
    ),
    "a loss does not end it": (
        the_first_loss_ends_a_run_without_recovery,
        lambda m: m.setattr(
            "tests.control.test_endings.world_of", lambda **more: _world_of(**{**more, "recover": True})
        ),
    ),
}
_world_of = world_of


def _begun_over(begin):
    def begun(self, form):
        begin(self, form)
        self.over = "it must be"

    return begun


def _forgetful(self, name, incarnation, domain, address="", memory=""):
    self.nodes[name] = Node(incarnation, domain, address, memory)
    self.alive += 1
    self.spares.add(name)


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_bug_is_caught(name, monkeypatch):
    case, plant = PLANTED[name]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        case()


# -- what is not simulated


def test_an_event_that_the_gang_raises_on_is_told_apart(monkeypatch):
    state = State.of(Plan(Layout(), 5, 0, 0, Policy()))
    patch_handler(monkeypatch, StepsDone, lambda on: lambda g, e: 1 / 0)
    with pytest.raises(Poison, match="ZeroDivisionError"):
        state.take("event", {"event": StepsDone(1, 1).to_dict()}, 1)
    joined = NodeJoined("n0", 1).to_dict()
    item = {"type": "event", "node": "n0", "incarnation": 1, "number": 1, "event": joined}
    state.take("aside", {"kind": "reports", "body": {"from": "h", "items": [item]}, "why": "it raised"}, 2)
    assert not state.roster.take("h", item), "the sender need not send it again"
    assert "n0" not in state.gang.members.nodes


@pytest.mark.parametrize("nodes, known_s", [(1, 15.0), (2_000, 15.0), (12_500, 15.0), (125_000, 2.0)])
def test_a_silent_host_is_known_sooner_in_a_larger_fleet(nodes, known_s):
    tick_s = 0.1
    assert 3 * beat_ns(nodes) / S + tick_s <= known_s + tick_s * (known_s > 2)
