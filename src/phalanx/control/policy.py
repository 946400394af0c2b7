"""What a job may ask of its recovery. The defaults suit a gang whose steps take about a second; `runtime` derives the
time-outs from what it measures."""

from __future__ import annotations

from dataclasses import dataclass, field

S = 10**9
WARNINGS = {"ecc": 16, "throttle": 60, "link_errors": 100, "slow": 20}


@dataclass(frozen=True, slots=True)
class Policy:
    min_replicas: int = 1
    max_replicas: int = 0  # that Scale may ask for; 0: as many as the layout has
    counts: tuple[int, ...] = ()  # of replicas that a batch can be divided among; (): any
    gather_ns: int = 300 * S  # how long a beginning waits for all nodes, before it goes on with those that are there
    start_ns: int = 0  # how long it waits for workers that are being started
    wait_ns: int = 0  # how long a broken gang waits for full strength, before it goes on with whole replicas
    park_ns: int = 10 * S  # from Halt to Parked
    pause_ns: int = 60 * S  # from Pause to Parked: a step, with room
    form_ns: int = 30 * S  # from Form to Ready
    launch_ns: int = 60 * S  # from Launch to WorkersUp
    ask_ns: int = 5 * S  # from Ask to Held
    resend_ns: int = 2 * S  # what is not answered is said again
    deaths: int = 3  # of workers on one node
    burst_ns: int = 0  # deaths within that time are one: they have one cause
    deaths_ns: int = 600 * S  # in that time: the node is bad
    silence_percent: int = 25  # of the nodes: if more are silent at once, it is the network, and none is given up
    silence_ns: int = 60 * S  # what counts as at once
    link_ns: int = 60 * S  # a link that is down for longer does not come back by itself
    save: bool = True  # a checkpoint at the end
    warnings: dict[str, int] = field(default_factory=lambda: dict(WARNINGS))  # sign -> count from which a device goes

    def usable(self, replicas: int) -> int:
        """How many of them a batch can be divided among."""
        return max((n for n in self.counts if n <= replicas), default=0 if self.counts else replicas)
