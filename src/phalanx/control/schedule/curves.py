"""Choose when to run a job that has a deadline, if the hourly price of electricity or carbon is known."""

from __future__ import annotations

from phalanx.control.schedule.asks import HOUR

Slots = list[tuple[int, int]]


def choose(prices: list[int], now_ns: int, needs_ns: int, deadline_ns: int, pausable: bool, pause_ns: int) -> Slots:
    """Return the cheapest times to run for `needs_ns` before the deadline. A pausable job may run in several pieces;
    each further piece costs `pause_ns`. Run at once if the prices are unknown or time is short."""
    last = min(deadline_ns, len(prices) * HOUR)
    if last - now_ns <= needs_ns:
        return [(now_ns, now_ns + needs_ns)]
    best = _in_one(prices, now_ns, needs_ns, last)
    if pausable:
        pieces = _in_pieces(prices, now_ns, needs_ns, last, pause_ns)
        if pieces and cost(prices, pieces) < cost(prices, best):
            return pieces
    return best


def _in_one(prices: list[int], now_ns: int, needs_ns: int, last_ns: int) -> Slots:
    """Find the cheapest single slot. It begins now, begins on the hour, or ends on the hour: the optimum is among
    these."""
    hours = range(now_ns // HOUR + 1, last_ns // HOUR + 1)
    begins = {now_ns, *(h * HOUR for h in hours), *(h * HOUR - needs_ns for h in hours)}
    able = [b for b in begins if now_ns <= b <= last_ns - needs_ns]
    begin = min(able, key=lambda b: (cost(prices, [(b, b + needs_ns)]), b))
    return [(begin, begin + needs_ns)]


def _in_pieces(prices: list[int], now_ns: int, needs_ns: int, last_ns: int, pause_ns: int) -> Slots:
    """Return the cheapest hours, in order; every piece after the first begins with the cost of a pause."""
    hours = [(max(now_ns, h * HOUR), min(last_ns, (h + 1) * HOUR)) for h in range(now_ns // HOUR, -(-last_ns // HOUR))]
    order = sorted(hours, key=lambda hour: (prices[hour[0] // HOUR], hour[0]))
    for count in range(1, len(order) + 1):
        pieces = _joined(sorted(order[:count]))
        got = sum(end - begin for begin, end in pieces) - pause_ns * (len(pieces) - 1)
        if got >= needs_ns:
            begin, end = pieces[-1]
            kept = end - (got - needs_ns)
            return pieces if kept <= begin else [*pieces[:-1], (begin, kept)]
    return []


def _joined(hours: Slots) -> Slots:
    out: Slots = []
    for begin, end in hours:
        if out and out[-1][1] == begin:
            out[-1] = (out[-1][0], end)
        else:
            out.append((begin, end))
    return out


def cost(prices: list[int], slots: Slots) -> int:
    """Return price times nanoseconds."""
    total = 0
    for begin, end in slots:
        while begin < end:
            until = min(end, (begin // HOUR + 1) * HOUR)
            total += prices[min(begin // HOUR, len(prices) - 1)] * (until - begin)
            begin = until
    return total
