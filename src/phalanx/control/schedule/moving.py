"""Defragmentation by moving gangs. A gang may wait although enough GPUs are free, because they are scattered. Then a
few smaller running gangs move, through a checkpoint, to free pieces that are large enough for them.

It must pay. A move costs the moving gang its GPUs for `grace_ns + restart_ns`, plus the GPUs held for the waiting gang
meanwhile. Nobody knows how long that gang would wait otherwise, so it first waits until waiting has cost as much as the
moves will: the loss is at most twice that of a scheduler that knows the future. A gang spends at most 1/`move_share` of
its time on moves, and at most `moves` gangs move for another one, so that no gang is pushed around forever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from phalanx.control.schedule.asks import Rules
from phalanx.control.schedule.cells import Cells, Placing, Spot
from phalanx.control.schedule.gangs import RUNNING, Gang, Target

DOMAINS = 4  # how many are tried per level


@dataclass(slots=True)
class Moves:
    """Where a gang will be, which gangs move and where to, and the cost in GPU-ns."""

    placing: Placing
    spares: list[int]
    cost: int
    targets: list[tuple[Gang, Target]] = field(default_factory=list)


def may_move(gang: Gang, head: Gang, rules: Rules, now_ns: int) -> bool:
    """Return True if a gang can be asked to move for another one. It cannot if it is larger or has higher priority, has
    just started, will end soon anyway, or has moved often enough."""
    ask, once_ns = gang.ask, rules.grace_ns + rules.restart_ns
    if gang.state != RUNNING or not ask.preemptible or gang.shrinking or gang.visit or now_ns < gang.safe_ns:
        return False
    if ask.priority > head.ask.priority or gang.gpus >= head.ask.needs_gpus:
        return False
    if ask.limit_ns and gang.began_ns + ask.limit_ns - now_ns <= once_ns:
        return False
    return gang.ran_at(now_ns) >= rules.move_share * once_ns * (gang.moves + 1)


def plan_moves(
    head: Gang, at: Sequence[dict[str, None]], gangs: dict[str, Gang], cells: Cells, rules: Rules, now_ns: int
) -> Moves | None:
    """Find the cheapest few moves that make room for a waiting gang. The cells are unchanged when this returns. `at`:
    the jobs on each node."""
    need = head.ask.needs_gpus
    if not rules.moves or need > cells.free_gpus or head.ask.gpus > cells.size or cells.rack_most:
        return None
    movable = {job: g for job, g in gangs.items() if may_move(g, head, rules, now_ns)}
    if not movable:
        return None
    for level in range(len(cells.levels)):
        choices = list[tuple[int, int, list[Gang]]]()
        for domain, nodes in enumerate(cells.nodes_of[level]):
            movers = _clear(head, nodes, at, movable, cells)
            if movers and len(movers) <= rules.moves:
                choices.append((sum(gang.gpus for gang in movers), domain, movers))
        for _, _, movers in sorted(choices, key=lambda choice: choice[:2])[:DOMAINS]:
            found = _try(head, movers, cells, rules)
            if found:
                return found
    return None


def pays(head: Gang, moves: Moves, now_ns: int) -> bool:
    """Return True if waiting has cost as much as the moves will."""
    return head.ask.needs_gpus * (now_ns - head.idle_ns) >= moves.cost


def _clear(
    head: Gang, nodes: Sequence[int], at: Sequence[dict[str, None]], movable: dict[str, Gang], cells: Cells
) -> list[Gang]:
    """List the gangs that would have to leave so that enough nodes of a domain have room; []: no set of moves
    suffices."""
    ask = head.ask
    count = ask.fewest * (ask.nodes + bool(ask.rest)) + ask.spares
    if len(nodes) < count:
        return []
    offers = list[tuple[int, int, list[Gang]]]()
    for node in nodes:
        free, movers = cells.free[node], list[Gang]()
        if cells.closed[node]:
            continue
        there = [movable[job] for job in at[node] if job in movable] if free < ask.gpus else []
        for gang in sorted(there, key=lambda g: (g.gpus, g.number)):
            if free >= ask.gpus:
                break
            free += sum(gpus for n, gpus in gang.spots() if n == node)
            movers.append(gang)
        if free >= ask.gpus:
            offers.append((sum(gang.gpus for gang in movers), node, movers))
    if len(offers) < count:
        return []
    offers.sort(key=lambda offer: offer[:2])
    return list({gang.number: gang for _, _, movers in offers[:count] for gang in movers}.values())


def _try(head: Gang, movers: list[Gang], cells: Cells, rules: Rules) -> Moves | None:
    """Place the gang as if the movers were gone, and place the movers in what is free now."""
    for gang in movers:
        cells.give(gang.spots())
    found = cells.place(head.ask, head.ask.fewest)
    for gang in movers:
        cells.take(gang.spots())
    if not found:
        return None
    placing, spares = found
    wanted = by_node([spot for replica in placing for spot in replica] + [(n, head.ask.gpus) for n in spares])
    held = [(node, min(gpus, cells.free[node])) for node, gpus in wanted]
    cells.take(held)
    taken = list(held)
    moves: Moves | None = Moves(placing, spares, _cost(movers, sum(gpus for _, gpus in held), rules))
    assert moves
    for gang in sorted(movers, key=lambda g: (-g.gpus, g.number)):
        near = cells.place(gang.ask, len(gang.replicas))
        if not near or _leaves(near[0], cells) > _leaves(gang.replicas.values(), cells):
            moves = None
            break
        spots = [spot for replica in near[0] for spot in replica] + [(node, gang.ask.gpus) for node in near[1]]
        cells.take(spots)
        taken += spots
        moves.targets.append((gang, Target(dict(zip(sorted(gang.replicas), near[0], strict=True)), near[1], spots)))
    cells.give(taken)
    return moves


def _cost(movers: list[Gang], held: int, rules: Rules) -> int:
    return sum(gang.gpus for gang in movers) * (rules.grace_ns + rules.restart_ns) + held * rules.grace_ns


def _leaves(replicas: Iterable[list[Spot]], cells: Cells) -> int:
    return len({cells.domain[0][node] for spots in replicas for node, _ in spots})


def by_node(spots: list[Spot]) -> list[Spot]:
    counts: dict[int, int] = {}
    for node, gpus in spots:
        counts[node] = counts.get(node, 0) + gpus
    return list(counts.items())
