"""Gangs move to give another one its GPUs in one piece: only when that pays, to a place that is held for them, and
seldom."""

import pytest

from phalanx.control.schedule import asks, moving, scheduler
from phalanx.control.schedule.asks import S
from phalanx.control.schedule.explain import why
from phalanx.control.schedule.gangs import LEAVING, RUNNING, WAITING
from phalanx.control.schedule.promises import check
from tests.control.schedule.test_complaints import Bench
from tests.control.schedule.world import World

HOUR = 3600


def in_pieces(**more) -> Bench:
    """Build a bench of two nodes of 8 GPUs with 4 in use on each, for over an hour, where no gang has to yield."""
    bench = Bench(nodes=2, first_level=10**9, patience_ns=24 * HOUR * S)
    for job in ("left", "gone", "right"):
        bench.submit(job, gpus=4, **(more if job != "gone" else {}))
    bench.tell(asks.Ended("gone"), HOUR + 1)
    assert bench.nodes("left") != bench.nodes("right")
    return bench


def test_a_gang_moves_as_soon_as_that_pays_and_not_before():
    bench = in_pieces()
    bench.submit("big", gpus=8)
    said = " ".join(why(bench.scheduler, "big", bench.now_ns))
    assert "8 GPUs are free, but in pieces: it needs 1 x 1 nodes with 8 GPUs" in said
    # Moving one costs 4 GPUs for 180 s, and big holds 4 for 60 s: as much as 8 GPUs for 120 s.
    assert "right can move to make one place of them: they do so in 2 min 0 s" in said
    bench.wait(100)
    assert bench.count(asks.Stop) == 0
    bench.wait(300)
    assert bench.state("left") == bench.state("right") == bench.state("big") == RUNNING
    assert bench.count(asks.Stop) == 1 and bench.nodes("left") == bench.nodes("right") != bench.nodes("big")
    assert any("big needs the room in one piece" in line for line in why(bench.scheduler, "right", bench.now_ns))
    assert any("waits for right to move" in line for line in why(bench.scheduler, "big", bench.now_ns))


@pytest.mark.parametrize(
    "more", [{"preemptible": False}, {"priority": 1}, {"limit_ns": (HOUR + 400) * S}], ids=["fixed", "higher", "ending"]
)
def test_those_stay_who_matter_more_or_leave_soon(more):
    bench = in_pieces(**more)
    bench.submit("big", gpus=8)
    bench.wait(350)
    assert bench.count(asks.Stop) == 0 and bench.state("big") == WAITING


def test_a_gang_that_has_just_moved_stays():
    bench = in_pieces()
    bench.submit("big", gpus=8)
    bench.wait(300)
    mover, big, rules = bench.scheduler.gangs["right"], bench.scheduler.gangs["big"], bench.scheduler.rules
    assert mover.moves == 1
    assert not moving.may_move(mover, big, rules, mover.safe_ns)
    assert moving.may_move(mover, big, rules, bench.now_ns + HOUR * S)


def leaving() -> tuple[Bench, str]:
    """Return a bench with a gang that was asked to move and has not left yet, and its destination node."""
    bench = in_pieces()
    bench.submit("big", gpus=8)
    bench.now_ns += 301 * S
    (stop,) = [c for c in bench.scheduler.apply(bench.now_ns, asks.Tick()) if isinstance(c, asks.Stop)]
    gang = bench.scheduler.gangs[stop.job]
    assert stop.job == "right" and gang.state == LEAVING and gang.target
    check(bench.scheduler)
    return bench, f"n{gang.target.spots[0][0]}"


def test_its_place_is_held_while_it_moves():
    bench, _ = leaving()
    bench.submit("late", gpus=4)
    assert bench.state("late") == WAITING
    bench.tell(asks.Stopped("right"))
    assert bench.state("right") == bench.state("big") == RUNNING and bench.state("late") == WAITING


def test_a_gang_whose_new_node_dies_while_it_moves_waits_like_others():
    bench, node = leaving()
    bench.tell(asks.NodeDown(node))
    bench.tell(asks.Stopped("right"))
    assert bench.scheduler.gangs["right"].target is None and bench.state("right") == WAITING


@pytest.mark.parametrize("event", [asks.Cancel("right"), asks.Ended("right")])
def test_a_gang_that_ends_while_it_moves_leaves_nothing(event):
    bench, _ = leaving()
    bench.tell(event)
    bench.tell(asks.Stopped("right"))
    assert bench.state("big") == RUNNING and bench.scheduler.cells.free_gpus == 4


def test_a_gang_keeps_its_replicas_and_does_not_spread_when_it_moves():
    """No gang is spread over more leaves than before."""
    bench = Bench(nodes=4, leaf=2, first_level=10**9, patience_ns=24 * HOUR * S)
    for n in range(8):
        bench.submit(f"s{n}", gpus=4)
    for n in (1, 3, 5, 7):
        bench.tell(asks.Ended(f"s{n}"), 1)
    bench.wait(HOUR)
    bench.submit("pair", nodes=2, gpus=8, level="leaf")
    before = {job: len(bench.leaves(job)) for job in ("s0", "s2", "s4", "s6")}
    bench.wait(HOUR)
    assert bench.state("pair") == RUNNING and len(bench.leaves("pair")) == 1
    assert {job: len(bench.leaves(job)) for job in before} == before
    assert bench.count(asks.Stop) == 2


PLANTED = {
    "a loop of moves": (moving, "may_move", lambda gang, head, rules, now_ns: gang.state == RUNNING
                        and gang.ask.preemptible and gang.gpus < head.ask.needs_gpus and not gang.shrinking
                        and gang.ask.priority <= head.ask.priority and now_ns >= gang.safe_ns, "has moved"),
    "moves that do not pay": (scheduler, "pays", lambda *_: True, "cost more than its wait"),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_the_worlds_catch_a_planted_bug(monkeypatch, bug):
    where, name, broken, said = PLANTED[bug]
    monkeypatch.setattr(where, name, broken)
    with pytest.raises(AssertionError, match=said):
        for seed in range(100):
            World(seed, in_pieces=True).run()
