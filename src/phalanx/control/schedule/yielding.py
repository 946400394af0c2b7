"""Decide who makes room for whom. A gang yields one replica at a time while it can (the others train on), then as a
whole, with time to save. No gang yields unless that lets the other one start, and as few as possible do.

A gang yields
 * to a higher priority, at any time;
 * to a tenant within its quota, if the gang's own tenant borrows and still has its quota afterwards, so that two
   tenants cannot take turns at evicting each other;
 * to an overdue gang of the same priority, unless it is safe;
 * to a gang of the same priority that has had less service by a level, unless it is safe.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.control.schedule.asks import Rules
from phalanx.control.schedule.cells import Cells, Placing, Spot
from phalanx.control.schedule.gangs import CLAIMING, Account, Gang


@dataclass(slots=True)
class Sacrifice:
    """Gangs to stop and replicas to give up, with the places that the other gang gets."""

    placing: Placing
    spares: list[int]
    stops: list[Gang] = field(default_factory=list)
    shrinks: dict[str, tuple[Gang, list[int]]] = field(default_factory=dict)


NEVER = 1 << 100
Step = tuple[Gang, int, list[Spot]]  # a gang, the replica that it gives up (-1: all), and the spots that this frees


def make_room(
    head: Gang,
    running: list[Gang],
    cells: Cells,
    accounts: dict[str, Account],
    rules: Rules,
    now_ns: int,
    later: bool = False,
) -> Sacrifice | None:
    """Find the fewest gangs that must yield. The cells are unchanged when this returns. `later`: also count gangs that
    are safe for now, and those that only end by themselves."""
    ask, replicas = head.ask, head.ask.fewest
    need = ask.needs_gpus
    steps = _steps(head, running, accounts, rules, now_ns)
    if later:
        steps += _later(head, running, {gang.number for gang, replica, _ in steps if replica < 0})
    if not steps:
        return None
    free = cells.free_gpus
    if free + sum(gpus for _, _, spots in steps for node, gpus in spots if not cells.closed[node]) < need:
        return None
    used, found = list[Step](), None
    for step in steps:
        cells.give(step[2])
        used.append(step)
        free += sum(gpus for node, gpus in step[2] if not cells.closed[node])
        if free >= need and (found := cells.place(ask, replicas)):
            break
    if found:
        for step in [*used[:-1]]:  # the last one is needed; of the others, try to spare the dearest last
            cells.take(step[2])
            near = cells.place(ask, replicas)
            if near:
                found = near
                used.remove(step)
            else:
                cells.give(step[2])
        found = cells.place(ask, replicas)
    for step in used:
        cells.take(step[2])
    if not found:
        return None
    out = Sacrifice(*found)
    for gang, replica, _ in used:
        if replica < 0:
            out.stops.append(gang)
        else:
            out.shrinks.setdefault(gang.job, (gang, []))[1].append(replica)
    for gang in out.stops:
        out.shrinks.pop(gang.job, None)
    return out


def _steps(head: Gang, running: list[Gang], accounts: dict[str, Account], rules: Rules, now_ns: int) -> list[Step]:
    """List all that could be given up for this gang: dispensable replicas first, then whole gangs, each in order of
    increasing importance."""
    shrinks, stops = list[Step](), list[Step]()
    left = {name: account.used - account.tenant.quota for name, account in accounts.items()}
    able = [g for g in running if g.ask.priority <= head.ask.priority and (g.ask.least or g.ask.preemptible)]
    may = Claim(head, accounts, rules, now_ns)
    able = [g for g in able if g.ask.least or may.displace(g)]
    for gang in sorted(able, key=lambda g: _worth(g, accounts)):
        numbers = sorted(gang.replicas)
        for replica in numbers[: gang.ask.fewest - 1 : -1]:
            shrinks.append((gang, replica, _frees(gang, gang.replicas[replica])))
        if gang.ask.preemptible and may.displace(gang) and may.leaves(gang, left):
            rest = [spot for number in numbers[: gang.ask.fewest] for spot in gang.replicas[number]]
            stops.append((gang, -1, _frees(gang, rest + [(node, gang.ask.gpus) for node in gang.spares])))
    return [step for step in shrinks + stops if step[2]]


def _later(head: Gang, running: list[Gang], named: set[int]) -> list[Step]:
    """List the other gangs, beginning with those known to leave soonest."""
    left = [g for g in running if g.number not in named and g.ask.priority <= head.ask.priority]

    def leaves_ns(gang: Gang) -> tuple[int, int]:
        limit = gang.began_ns + gang.ask.limit_ns if gang.ask.limit_ns else NEVER
        return min(limit, gang.safe_ns if gang.ask.preemptible else NEVER), gang.number

    out = list[Step]()
    for gang in sorted(left, key=leaves_ns):
        kept = sorted(gang.replicas)[: gang.ask.fewest]
        rest = [spot for number in kept for spot in gang.replicas[number]]
        out.append((gang, -1, _frees(gang, rest + [(node, gang.ask.gpus) for node in gang.spares])))
    return out


def _frees(gang: Gang, spots: list[Spot]) -> list[Spot]:
    """Return the spots that others could have: a guest's lent places go back to their holder."""
    return [spot for spot in spots if spot[0] not in gang.visit.nodes] if gang.visit else spots


def _worth(gang: Gang, accounts: dict[str, Account]) -> tuple[int, ...]:
    """Return the sort key that puts the least important gang first."""
    account = accounts[gang.ask.tenant]
    borrows = account.used > account.tenant.quota
    return (gang.ask.priority, -borrows, -gang.level, -gang.since_ns, -gang.number)


class Claim:
    """Decides which gangs a waiting gang may displace."""

    def __init__(self, head: Gang, accounts: dict[str, Account], rules: Rules, now_ns: int):
        self.head, self.accounts, self.now_ns = head, accounts, now_ns
        need = 0 if head.state == CLAIMING else head.ask.fewest * head.ask.replica_gpus
        self.owns = accounts[head.ask.tenant].owns(need)
        self.late = head.late or head.overdue(now_ns, rules)

    def displace(self, gang: Gang) -> bool:
        if gang.ask.priority != self.head.ask.priority:
            return gang.ask.priority < self.head.ask.priority
        if self.reclaims(gang):
            return True
        return self.now_ns >= gang.safe_ns and (self.late or gang.level > self.head.level)

    def reclaims(self, gang: Gang) -> bool:
        account = self.accounts[gang.ask.tenant]
        return self.owns and gang.ask.tenant != self.head.ask.tenant and account.used > account.tenant.quota

    def leaves(self, gang: Gang, left: dict[str, int]) -> bool:
        """Return True if the gang's tenant keeps its quota, in the case that only quotas justify the displacement.
        `left`: how many GPUs each tenant may still lose this way."""
        same = gang.ask.priority == self.head.ask.priority
        if not same or (self.now_ns >= gang.safe_ns and (self.late or gang.level > self.head.level)):
            return True
        left[gang.ask.tenant] -= gang.gpus
        return left[gang.ask.tenant] >= 0
