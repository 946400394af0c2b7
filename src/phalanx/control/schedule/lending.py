"""Lend places that are held. An overdue gang holds places as they become free, and may wait a long time for the last of
them: some occupants are safe for a while, others leave only when they end. Until then other gangs are guests in its
places.

The holder loses nothing: it is owed what it lends, and gets it back first. If the gangs that the holder waits for are
stopped, guests are stopped with them and save their state too. If those gangs end by themselves and only guests are
left, the guests end at once, without time to save: nobody can prove when a gang will end, so no guest may count on it.
A guest that loses its work this way is back where it was when it came, as if it had waited since then without
service.
"""

from __future__ import annotations

from phalanx.control.schedule.cells import Cells, Placing, Spot
from phalanx.control.schedule.gangs import RUNNING, Gang
from phalanx.control.schedule.moving import by_node

NEVER = 1 << 100
Loan = tuple[Gang, list[Spot]]


def waits_until(holder: Gang, gangs: dict[str, Gang]) -> int:
    """Return the time until which some gang that the holder waits for cannot be stopped; 0: there is none."""
    last = 0
    for gang in (gangs[job] for job in holder.blockers):
        if gang.state == RUNNING and any(node in holder.owed for node, _ in gang.spots()):
            limit = gang.began_ns + gang.ask.limit_ns if gang.ask.limit_ns else NEVER
            last = max(last, min(limit, gang.safe_ns if gang.ask.preemptible else NEVER))
    return last


def only_guests(holder: Gang, gangs: dict[str, Gang]) -> bool:
    """Return True if only guests occupy the places that the holder is owed."""
    theirs = dict(by_node([spot for job in holder.guests for spot in gangs[job].spots()]))
    return all(gpus <= theirs.get(node, 0) for node, gpus in holder.owed.items())


def place_guest(gang: Gang, holders: list[Gang], cells: Cells) -> tuple[Placing, list[Loan]] | None:
    """Find places for a gang among free GPUs and those that others hold, and return what each holder lends."""
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
