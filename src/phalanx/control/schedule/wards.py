"""Node health: which nodes may be used. A failed node that comes back is watched first, for longer the more often it
has failed. A drained node stays out, and a node under maintenance is out for that time."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.control.schedule.asks import Maintain, Rules

DAY_NS = 86_400 * 10**9
MOST_DOUBLINGS = 8


@dataclass(slots=True)
class Ward:
    """The health of one node. Events end `down` and `drained`; the watch (`until_ns`) ends by time."""

    down: bool = False
    drained: bool = False
    until_ns: int = 0
    failures: list[int] = field(default_factory=list)  # times within the last day
    why: str = ""


class Wards:
    def __init__(self, rules: Rules):
        self.rules, self.wards = rules, dict[int, Ward]()
        self.windows: list[tuple[int, int, tuple[int, ...]]] = []  # (begin, end, nodes)

    def usable(self, node: int, now_ns: int) -> bool:
        ward = self.wards.get(node)
        if ward and (ward.down or ward.drained or now_ns < ward.until_ns):
            return False
        return not any(self.begins(window) <= now_ns < window[1] and node in window[2] for window in self.windows)

    def fail(self, node: int, now_ns: int, why: str) -> None:
        ward = self.wards.setdefault(node, Ward())
        if not ward.down:
            ward.failures = [*(at for at in ward.failures if now_ns - at < DAY_NS), now_ns]
        ward.down, ward.why = True, why

    def come_back(self, node: int, now_ns: int) -> None:
        ward = self.wards.setdefault(node, Ward())
        if ward.down:
            ward.down = False
            ward.until_ns = now_ns + (self.rules.burn_ns << min(len(ward.failures) - 1, MOST_DOUBLINGS))

    def drain(self, node: int, off: bool) -> None:
        self.wards.setdefault(node, Ward()).drained = not off

    def maintain(self, event: Maintain, nodes: tuple[int, ...]) -> None:
        self.windows.append((event.begin_ns, event.end_ns, nodes))

    def begins(self, window: tuple[int, int, tuple[int, ...]]) -> int:
        """Return when its nodes must be left so that they are empty in time."""
        return window[0] - self.rules.grace_ns - self.rules.restart_ns

    def wanted(self, node: int, from_ns: int, to_ns: int) -> bool:
        """Return True if a node has maintenance in that time."""
        return any(begin < to_ns and from_ns < end and node in nodes for begin, end, nodes in self.windows)

    def next_ns(self, now_ns: int) -> int:
        """Return when something next changes by itself; 0: never."""
        times = [ward.until_ns for ward in self.wards.values() if not ward.down]
        times += [at for window in self.windows for at in (self.begins(window), window[1])]
        return min((at for at in times if at > now_ns), default=0)

    def said(self, node: int, now_ns: int) -> str:
        ward = self.wards.get(node, Ward())
        if ward.down:
            return f"down: {ward.why}"
        if ward.drained:
            return "drained"
        if now_ns < ward.until_ns:
            return f"watched after a failure ({ward.why}), {(ward.until_ns - now_ns) // 10**9} s more"
        return "up" if self.usable(node, now_ns) else "in maintenance"
