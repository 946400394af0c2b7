"""The fleet: nodes that fail, one by one or many at once, and are repaired. All failures are drawn from one Poisson
process whose rate is the sum over all components, so that a GPU that does not fail costs nothing. This file does not
decide what a failure does to the job."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from phalanx.twin.agenda import Agenda, S
from phalanx.twin.assumed import DAY_S, Component
from phalanx.twin.draw import Draw, exp
from phalanx.twin.scenario import Scenario

YEAR_S = 365 * DAY_S
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Fault:
    name: str  # name of the component
    effect: str  # as in the assumptions; also: limp, planned, storage
    nodes: tuple[int, ...] = ()  # empty: any node of the job
    swap: bool = False  # unusable until it is repaired
    repair_ns: int = 0
    slow: float = 1.0
    cause: int = 0  # number of a common cause of several faults; 0: its own
    rank: int = -1  # for a script: the rank whose process or node fails, wherever it is then
    launch_ns: int = 0  # for a script: until a process runs in its place; 0: as usual
    proof: str = ""  # the proof that a silent node is dead; "": its silence


class Fleet:
    """`script`: faults and their times, instead of drawn ones."""

    def __init__(
        self,
        scenario: Scenario,
        agenda: Agenda,
        draw: Draw,
        strike: Callable[[Fault], None],
        script: Iterable[tuple[int, Fault]] | None = None,
    ):
        self.scenario, self.agenda, self.draw, self._strike = scenario, agenda, draw, strike
        self.assume = scenario.assumed
        self.per_node = scenario.gpus_per_node
        self.job_nodes = scenario.gpus // self.per_node
        self.nodes = self.job_nodes + (0 if scenario.policy == "shrink" else scenario.num_spares)
        self.up = bytearray(b"\1") * self.nodes
        if script is not None:
            for at_ns, fault in script:
                agenda.after(at_ns - agenda.now, strike, fault)
            return
        self._rollouts = 0
        self._lemons = self._draw_lemons()
        self._kinds = self._rates()
        self._sums = list(accumulate(rate for rate, _ in self._kinds))
        self._next()

    def _draw_lemons(self) -> list[int]:
        count = int(self.assume("spread.lemon_share") * self.nodes + self.draw.uniform())
        found: dict[int, None] = {}
        while len(found) < count:
            found[self.draw.below(self.nodes)] = None
        return list(found)

    # -- rates, in events of the whole fleet per second

    def _rates(self) -> list[tuple[float, Callable[[], None]]]:
        assume, nodes = self.assume, self.nodes
        quality = assume.quality(self.scenario.quality)
        share, factor = assume("spread.lemon_share"), assume("spread.lemon_factor")
        weight = nodes + (factor - 1) * len(self._lemons)
        self._of_lemons = factor * len(self._lemons) / weight
        spread = weight / (1 + share * (factor - 1))  # the mean over fleets is as calibrated
        units = {"gpu": self.per_node * spread, "node": spread, "job": 1.0}
        found: list[tuple[float, Callable[[], None]]] = []
        for component in assume.components():
            own = {"gpu": self.scenario.gpus, "job": 1.0} if component.effect == "job" else units
            # A worse fleet has worse hardware, but failures of the job itself stay as they are.
            rate = component.per_s * own[component.per] * (1.0 if component.per == "job" else quality)
            found.append((rate, partial(self._fail, component)))
        found.append((assume.planned_per_gpu_s() * self.scenario.gpus, self._plan))
        racks, halls = nodes / assume("correlated.rack_nodes"), nodes * self.per_node / assume("correlated.hall_gpus")
        found += [
            (racks * assume("correlated.rack_per_rack_year") / YEAR_S, self._rack),
            (halls * assume("correlated.hall_per_hall_year") / YEAR_S, self._hall),
            (assume("correlated.storage_per_day") / DAY_S, self._storage),
            (assume("correlated.rollout_per_day") / DAY_S, self._rollout),
            *(
                (assume(f"slow.{kind}_per_1000_node_days") / 1000 / DAY_S * nodes, partial(self._slow, kind))
                for kind in ("link", "chip")
            ),
        ]
        return found

    def _next(self) -> None:
        self._bound = self._young()
        self.agenda.after(self.draw.wait_ns(self._sums[-1] * self._bound), self._event)

    def _young(self) -> float:
        """Return how much more often nodes of this age fail. The factor only falls, so the current value bounds later
        ones."""
        age = self.scenario.age_days + self.agenda.now / S / DAY_S
        return 1 + self.assume("spread.young_factor") * exp(-min(age / self.assume("spread.young_days"), 700.0))

    def _event(self) -> None:
        if self.draw.chance(self._young() / self._bound):
            self._kinds[bisect(self._sums, self.draw.uniform() * self._sums[-1])][1]()
        self._next()

    # -- what happens

    def _victim(self) -> int:
        if self._lemons and self.draw.chance(self._of_lemons):
            return self._lemons[self.draw.below(len(self._lemons))]
        return self.draw.below(self.nodes)

    def _fail(self, component: Component) -> None:
        if component.effect == "job":
            self._strike(Fault(component.name, "worker"))
            return
        node, swap = self._victim(), self.draw.chance(component.swap)
        again, after_s = self.draw.chance(self.assume("spread.again_share")), HOUR_S * self.draw.uniform()
        kind = "repair.reboot_s" if component.effect in ("node", "switch") else "repair.reset_s"
        long = "repair.switch_h" if component.effect == "switch" else "repair.swap_h"
        repair_s = self._hours(long) if swap else self._seconds(kind)
        slow = self._factor()
        if not self.up[node]:
            return
        if component.effect == "switch":
            self._cut(component.name, node, repair_s)
            return
        self._strike(Fault(component.name, component.effect, (node,), swap, int(repair_s * S), slow))
        if component.effect in ("worker", "hang") and not swap and again:
            self.agenda.after(int(self.assume("spread.again_hours") * after_s * S), self._again, component, node)

    def _again(self, component: Component, node: int) -> None:
        if self.up[node]:
            repair_ns = int(self.assume("repair.reset_s") * S)
            self._strike(Fault(f"{component.name}, again", component.effect, (node,), False, repair_ns))

    def _cut(self, name: str, node: int, repair_s: float) -> None:
        size = self.scenario.switch_nodes
        if size:
            self._silence(name, self._block(node, size), repair_s)
        else:
            self._strike(Fault(name, "limp", (node,), False, int(repair_s * S), self.scenario.switch_slow))

    def _plan(self) -> None:
        node, repair_s = self.draw.below(self.nodes), self._hours("planned.hours")
        if self.up[node]:
            self._strike(Fault("maintenance", "planned", (node,), repair_ns=int(repair_s * S)))

    def _rack(self) -> None:
        size = int(self.assume("correlated.rack_nodes"))
        self._silence("rack power", self._block(self.draw.below(self.nodes), size), self._hours("repair.rack_h"))

    def _hall(self) -> None:
        size = int(self.assume("correlated.hall_gpus")) // self.per_node
        self._silence("hall", self._block(self.draw.below(self.nodes), size), self._hours("repair.hall_h"))

    def _storage(self) -> None:
        minutes = self._hours("correlated.storage_minutes") / 60
        self._strike(Fault("storage", "storage", repair_ns=int(minutes * S)))

    def _rollout(self) -> None:
        """Take out nodes all over the fleet within an hour."""
        self._rollouts += 1
        repair_s = self._hours("repair.rollout_h")
        for _ in range(int(self.assume("correlated.rollout_share") * self.nodes)):
            after_ns, node = int(HOUR_S * self.draw.uniform() * S), self.draw.below(self.nodes)
            self.agenda.after(after_ns, self._silence, "rollout", (node,), repair_s, self._rollouts)

    def _slow(self, kind: str) -> None:
        node, for_s, factor = self._victim(), self._hours(f"slow.{kind}_minutes") / 60, self._factor()
        if self.up[node]:
            self._strike(Fault(f"slow {kind}", "limp", (node,), False, int(for_s * S), factor))

    def _factor(self) -> float:
        return self.draw.between(self.assume("slow.factor_low"), self.assume("slow.factor_high"))

    def _block(self, node: int, size: int) -> tuple[int, ...]:
        first = node // size * size
        return tuple(range(first, min(first + size, self.nodes)))

    def _silence(self, name: str, nodes: tuple[int, ...], repair_s: float, cause: int = 0) -> None:
        nodes = tuple(node for node in nodes if self.up[node])
        if nodes:
            self._strike(Fault(name, "node", nodes, True, int(repair_s * S), cause=cause))

    # -- repairs

    def take_out(self, node: int, for_ns: int, back: Callable[[int], None]) -> None:
        """Make a node unusable for `for_ns`, then call `back`."""
        assert self.up[node], node
        self.up[node] = 0
        self.agenda.after(for_ns, self._bring_back, node, back)

    def _bring_back(self, node: int, back: Callable[[int], None]) -> None:
        self.up[node] = 1
        back(node)

    def _seconds(self, name: str) -> float:
        return self.draw.lognormal(self.assume(name), self.assume("repair.sigma"))

    def _hours(self, name: str) -> float:
        """Draw a duration given in hours, and return seconds. For a figure in minutes the caller divides by 60."""
        return self._seconds(name) * HOUR_S
