"""The ladder, one rung at a time, in a simulated gang whose network is reliable: what is tried, what is kept, and what
people are told."""

from __future__ import annotations

import pytest

from phalanx.control.messages import Drain, Scale, Stop
from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from tests.control.sim.world import MS, QUICK, S, Setting, World


def a_gang(replicas=2, shards=1, per_node=1, nodes=2, steps=20, snapshot_every=1, durable_every=5, domains=2, **policy):
    layout = Layout(replica=replicas, shard=shards, ranks_per_node=per_node)
    set_ = Setting(
        layout=layout, steps=steps, nodes=nodes, domains=domains, policy=Policy(**{**QUICK, **policy}),
        snapshot_every=snapshot_every, durable_every=durable_every,
    )  # fmt: skip
    world = World(set_, seed=7)
    until_step(world, 4)
    return world


def until_step(world, step):
    world.run(stop=lambda: len(world.ledger.history) >= step)
    assert len(world.ledger.history) >= step, (world.gang.phase, world.gang.desk.said)


def until(world, true, seconds=100):
    world.run(until=world.now + seconds * S, stop=true)
    assert true(), (world.gang.phase, world.gang.desk.said)


def to_the_end(world):
    world.run(until=world.now + 300 * S)
    assert world.over, (world.gang.phase, world.gang.desk.said, world.gang.committed)
    final = {c: world.ledger.states[c, world.gang.ending.steps] for c in range(world.size)}
    world.ledger.finish(world.gang.ending.steps, world.now, final)
    return world.controller.forms


def the_worker(world, rank):
    return next(proc for proc in world.procs() if proc.rank == rank)


def homes(world, form):
    """Return the nodes of the ranks that take part."""
    return world.ledger.homes[form.generation]


def tell(world, event):
    world.controller.ask(event)


def warn(world, name, sign, count):
    world.nodes[name].agent.warn(sign, count)
    world.nodes[name].act()


def test_undisturbed_there_is_one_generation():
    (form,) = to_the_end(a_gang())
    assert (form.replicas, form.rung, form.branch) == ((0, 1), -1, False)


# -- rung 0


def test_a_device_that_warns_is_swapped_at_a_step_boundary_and_nothing_is_lost():
    world = a_gang(replicas=1, nodes=2)
    warned = the_worker(world, 0).node.name
    warn(world, warned, "ecc", 100)
    first, swapped = to_the_end(world)
    assert swapped.rung == 0 and "ecc at 100" in swapped.reason
    assert warned in homes(world, first) and warned not in homes(world, swapped)
    assert swapped.source_of(0).kind == "live" and not swapped.branch and not world.ledger.undone


def test_without_a_spare_it_is_kept():
    world = a_gang(nodes=2)
    warn(world, "n0", "ecc", 100)
    assert len(to_the_end(world)) == 1
    assert (0, "node n0 should be replaced: ecc at 100") in world.controller.notes


def test_a_few_errors_are_no_warning():
    world = a_gang(nodes=3)
    warn(world, "n0", "ecc", 2)
    assert len(to_the_end(world)) == 1


# -- rung 1


def test_a_worker_dies_and_the_others_go_on_at_once_while_it_is_restarted_in_place():
    world = a_gang()
    survivor, victim = the_worker(world, 0), the_worker(world, 1)
    victim.die("SIGKILL")
    _, degraded, healed = to_the_end(world)
    assert degraded.replicas == (0,) and degraded.rung == 1 and "rank 1" in degraded.reason
    assert the_worker(world, 0) is survivor, "survivors keep their processes"
    assert healed.replicas == (0, 1) and homes(world, healed)[1] == victim.node.name
    assert healed.source_of(1).kind == "live" and healed.source_of(1).number == survivor.number
    assert not world.ledger.undone


def test_the_only_copy_comes_back_from_the_nodes_own_memory():
    world = a_gang(replicas=1, nodes=1)
    the_worker(world, 0).die("SIGKILL")
    _, again = to_the_end(world)
    assert again.rung == 1 and again.source_of(0).kind == "memory" and again.source_of(0).node == "n0"
    assert again.step >= 4


def test_a_worker_that_hangs_is_ended_and_restarted():
    world = a_gang()
    until(world, lambda: not the_worker(world, 1).applying)
    the_worker(world, 1).hang()
    _, degraded, healed = to_the_end(world)
    assert degraded.rung == 1 and "hangs: it stands still in its step" in degraded.reason
    assert healed.replicas == (0, 1)


def test_a_worker_that_dies_again_and_again_makes_a_bad_node():
    world = a_gang(nodes=3, steps=60)
    node = the_worker(world, 1).node
    for _ in range(3):
        until(world, lambda: 1 in {p.rank for p in world.procs() if p.member.phase == "running"})
        the_worker(world, 1).die("SIGKILL")
    forms = to_the_end(world)
    assert forms[-1].rung == 2 and node.name not in homes(world, forms[-1])
    assert any("it failed 3 times" in text for _, text in world.controller.notes)


# -- rungs 2 and 3


def test_a_node_dies_and_the_spare_takes_its_place():
    world = a_gang(nodes=3)
    (spare,) = world.gang.members.spares
    the_worker(world, 1).node.power_off(proved=True)
    _, degraded, healed = to_the_end(world)
    assert degraded.rung == 2 and degraded.replicas == (0,)
    assert homes(world, healed)[1] == spare and healed.source_of(1).kind == "live" and not world.ledger.undone


def test_a_node_that_merely_falls_silent_is_given_up_after_a_while():
    world = a_gang(nodes=4)
    the_worker(world, 1).node.power_off()
    _, degraded, healed = to_the_end(world)
    assert degraded.rung == 2 and "is silent" in degraded.reason and healed.replicas == (0, 1)


def test_without_a_spare_the_others_go_on_and_a_node_that_returns_is_taken_back():
    world = a_gang(steps=60)
    the_worker(world, 0).node.power_off(proved=True, back=10 * S)
    _, degraded, healed = to_the_end(world)
    assert degraded.rung == 3 and degraded.replicas == (1,) and "there is no spare" in degraded.reason
    assert healed.replicas == (0, 1) and healed.step > degraded.step + 5 and not world.ledger.undone


def test_a_replica_over_several_nodes_is_left_out_as_a_whole_and_its_survivors_stay():
    world = a_gang(shards=2, nodes=5)
    stays = the_worker(world, 3)
    the_worker(world, 2).node.power_off(proved=True)
    _, degraded, healed = to_the_end(world)
    assert degraded.replicas == (0,)
    assert the_worker(world, 3) is stays and {s.kind for s in healed.by_rank().values()} == {"live"}


def test_two_broken_replicas_make_one_whole_state():
    """Rank 0 of one and rank 1 of the other are gone. One copy of each coordinate is left, and it is used."""
    world = a_gang(shards=2, nodes=4)
    committed = len(world.ledger.history)
    for rank in (0, 3):
        the_worker(world, rank).die("SIGKILL")
    forms = to_the_end(world)
    assert forms[1].step >= committed and not world.ledger.undone
    assert {s.kind for s in forms[1].by_rank().values()} == {"live"}


def test_a_job_may_ask_to_wait_for_the_spare():
    world = a_gang(nodes=3, wait_ns=20 * S)
    the_worker(world, 1).node.power_off(proved=True)
    _, healed = to_the_end(world)
    assert healed.replicas == (0, 1)


def test_but_not_for_ever():
    world = a_gang(wait_ns=5 * S)
    the_worker(world, 1).node.power_off(proved=True)
    _, degraded = to_the_end(world)
    assert degraded.replicas == (0,)


# -- rung 4


def test_the_buddys_memory_serves_when_all_replicas_lose_a_coordinate():
    world = a_gang(replicas=1, nodes=3, domains=3, shards=2, buddies=True)
    the_worker(world, 0).node.power_off(proved=True)
    forms = to_the_end(world)
    assert forms[1].source_of(0).kind == "memory" and forms[1].source_of(0).node in world.nodes


def test_when_memory_is_lost_too_all_go_back_to_the_checkpoint_and_what_is_abandoned_is_named():
    world = a_gang(replicas=1, shards=2, nodes=2, steps=30)
    until(world, lambda: len(world.ledger.history) >= 8 and any(step == 5 for step, _ in world.gang.commits.durable))
    for node in list(world.nodes.values()):
        node.power_off(proved=True, back=2 * S)
    forms = to_the_end(world)
    back = forms[1]
    assert back.rung == 4 and back.branch and back.step == 5
    assert back.every.kind == "durable" and not back.sources
    assert world.ledger.undone >= 3


# -- rung 6


def test_below_the_minimum_the_gang_waits_and_says_so():
    world = a_gang(min_replicas=2, steps=30)
    the_worker(world, 1).node.power_off(proved=True, back=60 * S)
    until(world, lambda: any(rung == 6 for rung, _ in world.controller.notes))
    held = len(world.ledger.history)
    assert world.gang.desk.said == "1 replicas are whole, and 2 must be; 1 places have no node"
    world.run(until=world.now + 20 * S)
    assert len(world.ledger.history) == held and the_worker(world, 0).member.phase == "built"
    forms = to_the_end(world)
    assert forms[-1].replicas == (0, 1) and not world.ledger.undone


# -- the network


def test_a_cut_between_the_controller_and_everybody_stops_nothing_until_the_lease_ends():
    world = a_gang(nodes=3, steps=60, lease_ns=60 * S)
    world.cut |= set(world.nodes)
    before = len(world.ledger.history)
    world.run(until=world.now + 25 * S)
    assert len(world.ledger.history) > before + 20
    assert world.gang.members.alive == 3 and world.gang.staff.noted
    world.cut.clear()
    assert len(to_the_end(world)) == 1


def test_a_slow_network_is_no_reason():
    world = a_gang(nodes=3, steps=60)
    world.slow = True
    world.run(until=world.now + 20 * S)
    world.slow = False
    assert len(to_the_end(world)) == 1


def test_a_node_that_was_given_up_and_lives_is_fenced_and_comes_back():
    world = a_gang(nodes=3, steps=60)
    cut = the_worker(world, 1).node
    world.cut.add(cut.name)
    until(world, lambda: world.gang.generation >= 3)
    assert world.gang.form.replicas == (0, 1)
    world.cut.clear()
    to_the_end(world)
    assert cut.incarnation == 2 and not cut.procs and cut.name in world.gang.members.spares


def test_a_dead_controller_stops_nothing():
    world = a_gang(nodes=3, steps=60)
    world.controller.crash()
    before = len(world.ledger.history)
    world.run(stop=lambda: world.controller.alive)
    assert len(world.ledger.history) > before
    assert len(to_the_end(world)) == 1


# -- by hand


def test_a_drained_node_is_taken_over_from_and_may_go():
    world = a_gang(nodes=3)
    drained = the_worker(world, 0).node.name
    tell(world, Drain(drained))
    _, *_, moved = to_the_end(world)
    assert drained not in homes(world, moved) and moved.replicas == (0, 1) and not world.ledger.undone


def test_without_a_spare_a_drained_node_takes_its_replica_along():
    world = a_gang()
    drained = the_worker(world, 1).node
    tell(world, Drain(drained.name))
    _, smaller = to_the_end(world)
    assert smaller.replicas == (0,) and not drained.procs and not world.ledger.undone


def test_the_last_replica_cannot_be_drained():
    world = a_gang(replicas=1, nodes=1)
    tell(world, Drain("n0"))
    assert len(to_the_end(world)) == 1


def test_scaling_down_frees_nodes_and_up_takes_them_back():
    world = a_gang(replicas=3, nodes=3, steps=60)
    tell(world, Scale(1))
    until(world, lambda: world.gang.form.replicas == (0,) and world.gang.phase == "running")
    assert len(world.gang.members.spares) == 2
    tell(world, Scale(2))
    until(world, lambda: world.gang.form.replicas == (0, 1) and world.gang.phase == "running")
    to_the_end(world)
    assert not world.ledger.undone


@pytest.mark.parametrize("durable_every", [0, 5])
def test_a_stop_saves_and_leaves(durable_every):
    world = a_gang(durable_every=durable_every)
    tell(world, Stop(30 * S))
    until(world, lambda: world.over)
    step = world.gang.committed
    assert 4 <= step < 20 and world.controller.ended.reason == f"stopped after step {step}"
    assert any(saved == step for saved, _ in world.durables)


def test_a_stop_that_cannot_save_leaves_in_time():
    world = a_gang()
    world.cut |= set(world.nodes)
    began = world.now
    tell(world, Stop(5 * S))
    until(world, lambda: world.over)
    assert world.now - began <= 5 * S + MS and "too short" in world.controller.ended.reason
