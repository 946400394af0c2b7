"""The parameters of a job's recovery. The defaults suit a gang whose steps take about a second; `beat_ns` follows from
the size of the fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

S = 10**9
DAY_NS = 86_400 * S
WARNINGS = {"ecc": 16, "throttle": 60, "link_errors": 100}
# Unexpected interruptions of Llama 3: 419 in 54 days on 16,384 GPUs, 8 in a node (arXiv:2407.21783).
FAILURES_PER_MILLION_NODE_DAYS = 3_790

MISSED_BEATS = 3  # a node that misses this many is dead
LOST_TO_SILENCE = 125  # at most one part in this many of the time may pass between failures and their detection
BEATS_NS = (S // 4, 5 * S)  # the shortest and the longest time between two beats


@dataclass(frozen=True, slots=True)
class Policy:
    recover: bool = True  # False: the first loss ends the run
    min_replicas: int = 1
    max_replicas: int = 0  # the most that Scale may ask for; 0: as many as the layout has
    gather_ns: int = 300 * S  # a new run waits this long for all nodes before it starts with those that are there
    start_ns: int = 0  # a broken gang waits this long for workers that are starting
    wait_ns: int = 0  # a broken gang waits this long for full strength
    hold_ns: int = 300 * S  # a gang that cannot continue waits this long before it ends
    lease_ns: int = 60 * S  # agents train this long without a word from the controller
    park_ns: int = 10 * S  # from Halt to Parked, and from Part to Parted
    pause_ns: int = 60 * S  # from Pause to Parted: a step, with room
    form_ns: int = 30 * S  # without progress, from Build to Built, and from Form to Formed
    launch_ns: int = 60 * S  # without progress, from Launch to WorkersUp
    late_ns: int = 5 * S  # if a rank takes longer to restart, a spare starts beside it, and the first one ready stays
    ask_ns: int = 5 * S  # from Ask to Held, from Probe to Standing
    resend_ns: int = 2 * S  # a command without an answer is sent again
    deaths: int = 3  # of workers on one node within `deaths_ns`: the node is bad
    deaths_ns: int = 600 * S
    burst_ns: int = 0  # deaths within this time have one cause and count once
    silence_percent: int = 25  # of the nodes: if more are silent at once, it may be the network
    silence_ns: int = 60 * S  # what counts as at once
    silence_rounds: int = 2  # of `silence_ns` that the gang waits for the network before it continues without them
    errors: int = 3  # equal exceptions of the program without a step in between: the run ends
    strikes: int = 5  # other equal failures without a step in between: the run ends
    attempts: int = 30  # generations without a step: the run ends
    backoff_ns: int = S // 4  # before the third attempt; doubled for each one after it
    backoff_most_ns: int = 10 * S
    save: bool = True  # a checkpoint at the end
    save_tries: int = 8  # of one checkpoint: for longer than a minute
    save_ns: int = 120 * S  # without progress, of the last checkpoint
    buddies: bool = False  # each node keeps a copy of another's snapshots
    failures: int = FAILURES_PER_MILLION_NODE_DAYS  # expected before the run has seen any of its own
    warnings: dict[str, int] = field(default_factory=lambda: dict(WARNINGS))  # sign -> count that gets a node replaced

    def pause_before(self, attempt: int) -> int:
        """Return how long to wait before an attempt to form, counted from 1 since the last committed step."""
        if attempt < 3:
            return 0
        return min(self.backoff_most_ns, self.backoff_ns << min(attempt - 3, 40))


def beat_ns(nodes: int, failures: int = FAILURES_PER_MILLION_NODE_DAYS) -> int:
    """Return the time between two heartbeats of a node.

    A silent node is known after MISSED_BEATS of them. With one failure of the fleet every M = 1 / (nodes x rate), the
    share of time lost to silence is MISSED_BEATS x beat / M, which is kept to 1 / LOST_TO_SILENCE. (125,000 nodes: M =
    182 s, a beat of 0.49 s, known in 1.5 s.)
    """
    between_ns = 10**6 * DAY_NS // max(1, failures * nodes)
    shortest, longest = BEATS_NS
    return max(shortest, min(longest, between_ns // (MISSED_BEATS * LOST_TO_SILENCE)))
