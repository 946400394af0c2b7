"""Places held for an overdue gang are lent to others, and the holder loses nothing by it."""

import pytest

from phalanx.control.schedule import asks
from phalanx.control.schedule.asks import S
from phalanx.control.schedule.explain import why
from phalanx.control.schedule.gangs import CLAIMING, ENDED, RUNNING, WAITING
from phalanx.control.schedule.scheduler import Scheduler
from tests.control.schedule.test_complaints import Bench
from tests.control.schedule.world import World

HOUR = 3600


def holding(**fixed) -> Bench:
    """Build a bench where `big` is overdue, holds three of four nodes, and waits for `fixed`, which has the other
    one."""
    bench = Bench(nodes=4, patience_ns=HOUR * S)
    bench.submit("fixed", gpus=8, preemptible=False, **fixed)
    bench.submit("big", nodes=4, gpus=8)
    bench.wait(HOUR + 300)
    assert bench.state("big") == CLAIMING and bench.scheduler.cells.free_gpus == 0
    return bench


def stops(bench):
    return [(command.job, command.grace_ns) for command in bench.said if isinstance(command, asks.Stop)]


def test_what_is_held_is_lent_and_given_back_at_once():
    bench = holding()
    bench.submit("guest", nodes=2, gpus=8)
    assert bench.state("guest") == RUNNING
    assert "as a guest until big can start" in why(bench.scheduler, "guest", bench.now_ns)[0]
    assert "fixed may stay for a while; until then it lends to guest" in why(bench.scheduler, "big", bench.now_ns)[0]
    came_ns = bench.now_ns
    bench.tell(asks.Ended("fixed"), 1000)
    assert stops(bench) == [("guest", 0)], "it has time to save, and the holder waits for it"
    assert bench.state("big") == RUNNING and bench.scheduler.gangs["big"].began_ns == bench.now_ns
    guest = bench.scheduler.gangs["guest"]
    assert bench.state("guest") == WAITING and (guest.since_ns, guest.served, guest.ran_ns) == (came_ns, 0, 0)


def test_a_guest_saves_while_those_do_whom_the_holder_waits_for():
    bench = Bench(nodes=4, patience_ns=HOUR * S)
    bench.submit("safe", gpus=8)
    bench.submit("big", nodes=4, gpus=8)
    bench.scheduler.gangs["safe"].safe_ns = 2 * HOUR * S
    bench.wait(HOUR + 300)
    bench.submit("guest", gpus=8)
    assert bench.state("big") == CLAIMING and bench.state("guest") == RUNNING
    bench.wait(HOUR)
    grace_ns = bench.scheduler.rules.grace_ns
    assert stops(bench) == [("safe", grace_ns), ("guest", grace_ns)] and bench.state("big") == RUNNING
    assert bench.scheduler.gangs["guest"].ran_ns > 0


@pytest.mark.parametrize("ask", [{"preemptible": False}, {"spares": 1}], ids=["fixed", "spares"])
def test_nobody_is_a_guest_who_cannot_leave_at_once(ask):
    bench = holding()
    bench.submit("other", gpus=8, **ask)
    assert bench.state("other") == WAITING


def test_nothing_is_lent_for_a_short_time():
    bench = holding(limit_ns=(HOUR + 300 + 500) * S)
    bench.submit("other", gpus=8)
    assert bench.state("other") == WAITING


def test_a_guest_stays_when_the_holder_is_gone():
    bench = holding()
    bench.submit("guest", gpus=8)
    bench.tell(asks.Cancel("big"))
    bench.tell(asks.Ended("fixed"), 1000)
    assert bench.state("big") == ENDED and bench.state("guest") == RUNNING and stops(bench) == []
    assert bench.scheduler.gangs["guest"].visit is None


def test_a_higher_priority_does_not_take_what_a_guest_must_give_back():
    bench = holding()
    for job in ("g0", "g1", "g2"):
        bench.submit(job, gpus=8)
    bench.submit("high", priority=1, gpus=8, after_s=700)
    assert stops(bench) == [] and bench.state("high") == WAITING


def test_the_worlds_catch_guests_that_do_not_leave(monkeypatch):
    monkeypatch.setattr(Scheduler, "_recall", lambda self: None)
    with pytest.raises(AssertionError, match="waits for nobody but its guests"):
        for seed in range(100):
            World(seed).run()
