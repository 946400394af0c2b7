"""Places that are held are lent. An overdue gang holds places as they become free, and may have to wait for the last of
them for long: others are safe for a while, or only end by themselves. Until then other gangs are guests in its places.

The holder loses nothing. What it lends it is owed, and gets back first. A guest saves its state when the last of those
leave whom the holder waits for, as they do. Where they end by themselves, and only guests are left, these end at once,
without time to save: nobody can prove when others end, so none may count on it. A guest that loses what it did so is
where it was when it came: it has waited since then, and had no service.
"""

from __future__ import annotations

from phalanx.control.schedule.cells import Cells, Placing, Spot
from phalanx.control.schedule.gangs import RUNNING, Gang
from phalanx.control.schedule.moving import by_node

NEVER = 1 << 100
Loan = tuple[Gang, list[Spot]]


def waits_until(holder: Gang, gangs: dict[str, Gang]) -> int:
    """Until when those cannot be told to leave whom the holder waits for; 0: there is nobody."""
    last = 0
    for gang in (gangs[job] for job in holder.blockers):
        if gang.state == RUNNING and any(node in holder.owed for node, _ in gang.spots()):
            limit = gang.began_ns + gang.ask.limit_ns if gang.ask.limit_ns else NEVER
            last = max(last, min(limit, gang.safe_ns if gang.ask.preemptible else NEVER))
    return last


def only_guests(holder: Gang, gangs: dict[str, Gang]) -> bool:
    """Whether nobody else has a place that the holder is owed."""
    theirs = dict(by_node([spot for job in holder.guests for spot in gangs[job].spots()]))
    return all(gpus <= theirs.get(node, 0) for node, gpus in holder.owed.items())


def place_guest(gang: Gang, holders: list[Gang], cells: Cells) -> tuple[Placing, list[Loan]] | None:
    """Find places for a gang in what is free and what others hold; and what each of them lends."""
    held = [(h, [(n, g - h.owed.get(n, 0)) for n, g in by_node(h.spots()) if g > h.owed.get(n, 0)]) for h in holders]
    for _, spots in held:
        cells.give(spots)
    found = cells.place(gang.ask, gang.ask.fewest)
    for _, spots in held:
        cells.take(spots)
    if not found:
        return None
    missing = {n: g - cells.free[n] for n, g in by_node([spot for replica in found[0] for spot in replica])}
    loans = list[Loan]()
    for holder, spots in held:
        lent = [(node, min(gpus, missing.get(node, 0))) for node, gpus in spots if missing.get(node, 0) > 0]
        for node, gpus in lent:
            missing[node] -= gpus
        if lent:
            loans.append((holder, lent))
    return found[0], loans
