"""Invariants of the scheduler's state. They are cheap enough to check after every event in tests; a violation is a
bug."""

from __future__ import annotations

from collections import Counter

from phalanx.control.schedule.gangs import CLAIMING, ENDED, LEAVING, RUNNING, WAITING, Gang
from phalanx.control.schedule.lending import only_guests
from phalanx.control.schedule.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    cells, held = scheduler.cells, Counter[int]()
    used, watts = Counter[str](), 0
    for gang in scheduler.gangs.values():
        _check_gang(gang)
        for node, gpus in gang.spots():
            held[node] += gpus
            assert gang.job in scheduler.at[node] or node in gang.owed, f"node {node} does not know {gang.job}"
        held.subtract(gang.owed)
        for node, gpus in gang.target.spots if gang.target else ():
            held[node] += gpus
            assert gang.job in scheduler.at[node], f"node {node} does not know that {gang.job} moves there"
        used[gang.ask.tenant] += gang.gpus
        watts += gang.gpus * scheduler.rules.watts_per_gpu
    for node, free in enumerate(cells.free):
        assert held[node] + free == cells.size, f"node {node} has {held[node]} GPUs in use and {free} free"
    for name, account in scheduler.accounts.items():
        assert account.used == used[name], f"{name} is charged {account.used} GPUs and has {used[name]}"
        most = account.tenant.most
        assert not most or account.used <= most, f"{name} uses {account.used} of {most} GPUs"
    assert watts == scheduler.watts
    leaving = sum(g.gpus for g in scheduler.gangs.values() if g.state == LEAVING) * scheduler.rules.watts_per_gpu
    cap = scheduler.cap_watts
    stubborn = any(not gang.ask.preemptible for gang in scheduler.running.values())
    assert not cap or stubborn or watts - leaving <= cap, f"{watts} W are drawn of {cap}"
    _check_counts(scheduler)


def _check_gang(gang: Gang) -> None:
    ask = gang.ask
    assert gang.gpus == sum(gpus for _, gpus in gang.spots()), f"{gang.job} is charged {gang.gpus} GPUs"
    if gang.state in (WAITING, ENDED):
        assert not gang.spots() and not gang.owed, f"{gang.job} is {gang.state} and has GPUs"
        return
    assert gang.state in (CLAIMING, RUNNING, LEAVING), gang.state
    assert not gang.target or (gang.state == LEAVING and gang.again), f"{gang.job} is {gang.state} and moves"
    assert bool(gang.owed) == (gang.state == CLAIMING), f"{gang.job} is {gang.state} and is owed {gang.owed}"
    if gang.state != LEAVING:
        assert ask.fewest <= len(gang.replicas) <= ask.replicas, f"{gang.job} has {len(gang.replicas)} replicas"
    for number, spots in [*gang.replicas.items(), *gang.shrinking.items()]:
        sizes = [gpus for _, gpus in spots]
        assert sizes == [ask.gpus] * ask.nodes + [ask.rest] * bool(ask.rest), f"{gang.job}.{number} has {spots}"
        assert len({node for node, _ in spots}) == len(spots), f"{gang.job}.{number} has a node twice"


def _check_counts(scheduler: Scheduler) -> None:
    cells = scheduler.cells
    for level, domains in enumerate(cells.nodes_of):
        for domain, nodes in enumerate(domains):
            counts = Counter(cells.free[node] for node in nodes if not cells.closed[node])
            assert cells.counts[level][domain] == [counts[free] for free in range(cells.size + 1)]
        assert cells.sorted[level] == sorted((count[-1], d) for d, count in enumerate(cells.counts[level]))
    for holder in scheduler.gangs.values():
        for job in holder.guests:
            guest = scheduler.gangs[job]
            assert holder.state == CLAIMING and guest.visit and holder.job in guest.visit.holders
            kept = guest.state == RUNNING and only_guests(holder, scheduler.gangs)
            assert not kept, f"{holder.job} waits for nobody but its guests"
    for node, debts in scheduler.debtors.items():
        for job in debts:
            assert scheduler.gangs[job].owed[node] > 0
    for name, state in (("running", RUNNING), ("claiming", CLAIMING)):
        found = {gang.job for gang in scheduler.gangs.values() if gang.state == state}
        assert getattr(scheduler, name).keys() == found, f"{name} is out of step"
    waiting = {g.job for g in scheduler.gangs.values() if g.state == WAITING}
    assert {g.job for g in scheduler.lines.waiting()} | scheduler.held.keys() == waiting
    assert not (waiting or scheduler.claiming) or scheduler.timer_ns, "nothing will ever happen again"
