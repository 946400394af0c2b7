"""The waiting lines decide who is next. There is one line per tenant and shape: if the first gang of a line does not
fit, none behind it does. A decision therefore looks at lines, not at gangs.

The order: higher priority first; then overdue gangs, the oldest first; then gangs that have had less service, so that
short jobs finish soon although their length is unknown; then the tenant that has used less of its share.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from phalanx.control.schedule.asks import Rules
from phalanx.control.schedule.gangs import WAITING, Account, Gang

Line = tuple[object, ...]  # the shape comes last
Shape = object
Rank = tuple[int, ...]


class Lines:
    def __init__(self, rules: Rules, accounts: dict[str, Account]):
        self.rules, self.accounts = rules, accounts
        self.lines: dict[Line, list[tuple[Rank, int, Gang]]] = {}
        self.blocked: set[Line] = set()  # their first gang does not fit, as far as is known
        self.stuck: set[Line] = set()  # and no running gang makes room for it
        self.full: set[Shape] = set()  # shapes known not to fit
        self.count = 0
        self._entries: dict[int, Rank] = {}  # by gang: its valid entry
        self._oldest: list[tuple[int, int, Gang]] = []  # (waiting since, number): candidates for becoming overdue

    def line_of(self, gang: Gang) -> Line:
        return (gang.ask.tenant, gang.ask.priority, gang.ask.limit_ns if gang.ask.limit_ns else 0, gang.ask.shape)

    def add(self, now_ns: int, gang: Gang) -> None:
        line, late = self.line_of(gang), gang.overdue(now_ns, self.rules)
        if gang.number not in self._entries:
            self.count += 1
        first = (0, gang.since_ns) if late else (1, gang.level)
        rank = (*first, gang.submitted_ns)
        self._entries[gang.number] = rank
        heap = self.lines.setdefault(line, [])
        heappush(heap, (rank, gang.number, gang))
        if heap[0][2] is gang:
            self.free(line)
        if not late:
            heappush(self._oldest, (gang.since_ns, gang.number, gang))

    def remove(self, gang: Gang) -> None:
        if self._entries.pop(gang.number, None) is not None:
            self.count -= 1
            self.free(self.line_of(gang))

    def free(self, line: Line) -> None:
        """Reconsider a line, because its first gang has changed."""
        self.blocked.discard(line)
        self.stuck.discard(line)

    def look_again(self) -> None:
        """Forget what did not fit, because there is more room."""
        self.blocked.clear()
        self.full.clear()

    def age(self, now_ns: int) -> None:
        """Move gangs that have become overdue."""
        while self._oldest and now_ns - self._oldest[0][0] >= self.rules.patience_ns:
            since_ns, number, gang = heappop(self._oldest)
            if number in self._entries and gang.since_ns == since_ns and self._entries[number][0]:
                self.add(now_ns, gang)

    def head(self, line: Line) -> Gang | None:
        heap = self.lines[line]
        while heap:
            rank, number, gang = heap[0]
            if gang.state == WAITING and self._entries.get(number) == rank:
                return gang
            heappop(heap)
        del self.lines[line]
        self.free(line)
        return None

    def heads(self, free: int, fits: Callable[[Gang], bool]) -> list[tuple[Rank, Line]]:
        """Return the lines worth trying, ordered by the rank of their first gang. Skip blocked lines, and stuck lines
        whose gang does not fit into the `free` GPUs; one attempt per shape counts for all lines of that shape."""
        found, roomy = [], set[Shape]()
        blocked, stuck, full = self.blocked, self.stuck, self.full
        for line in [line for line in self.lines if line not in blocked and not (line in stuck and line[-1] in full)]:
            shape = line[-1]
            if shape in full and line in stuck:
                continue  # found to be full meanwhile
            gang = self.head(line)
            if not gang:
                continue
            if shape not in roomy and line in stuck:
                if gang.ask.fewest * gang.ask.replica_gpus > free or not fits(gang):
                    full.add(shape)
                    continue
                roomy.add(shape)
            found.append((self.order(gang), line))
        return found

    def order(self, gang: Gang) -> tuple[int, ...]:
        rank = self._entries[gang.number]
        share = self.accounts[gang.ask.tenant].share if rank[0] else 0
        return (-gang.ask.priority, *rank[:2], share, rank[-1], gang.number)

    def waiting(self) -> list[Gang]:
        """Return all waiting gangs in order, for display."""
        gangs = {number: gang for heap in self.lines.values() for _, number, gang in heap if number in self._entries}
        return sorted((gang for gang in gangs.values() if gang.state == WAITING), key=self.order)
