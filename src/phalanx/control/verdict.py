"""Which failure is the cause, and which ends a run. A generation that ends without a step leaves evidence: deaths, and
the errors of workers that had to leave their groups. A failure that repeats, or an error that a retry cannot mend, ends
the run with the rank's own words."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from phalanx.control.messages import Failure
from phalanx.control.policy import Policy, S

FATAL = ("UserError", "FloatingPointError", "DataLost")  # a retry does not help
INCIDENT_NS = 30 * S  # older evidence belongs to another incident
MOST_EVIDENCE = 64
MOST_SIGNATURES = 256

# These texts only rank evidence for people: no decision depends on them.
_ECHO = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|timed out|timeout|ncclRemoteError|remote process|"
    r"DistNetworkError|DistStoreError|Halted|reduction across replicas|lost its peers",
    re.IGNORECASE,
)
_MEMORY = re.compile(r"can't allocate memory|out of memory|not enough memory|cannot allocate memory", re.IGNORECASE)
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")
MEMORY_REMEDY = 'lower train.micro_batch, set train.recompute = "full", or raise layout.shard or layout.tp'
NCCL_REMEDY = (
    "NCCL says more in the logs of the ranks with NCCL_DEBUG=INFO in the environment of the agents; NCCL_SOCKET_IFNAME "
    "names its interface, and RDMA needs `ulimit -l unlimited`"
)
HANG_REMEDY = "see where it stands in the stack above; if the step is only slow, set a larger run.hang_timeout_s"


@dataclass(frozen=True, slots=True)
class Evidence:
    rank: int  # -1: not a rank
    name: str  # for people
    failure: Failure
    died: bool = True  # False: it has left its groups, but lives
    at_ns: int = 0

    @property
    def severity(self) -> int:
        """Return a number that is lower the nearer the failure is to the first cause."""
        f = self.failure
        if f.signal not in ("", "SIGABRT") or f.hang:
            return 0
        if is_echo(f.kind, f.text) or f.signal == "SIGABRT":
            return 3
        return 1 if self.died else 2

    @property
    def signature(self) -> str:
        """Return a text that is equal for equal failures."""
        f = self.failure
        if f.kind or f.text or f.hang:
            return _NUMBERS.sub("#", f"{f.kind}: {f.hang or f.text}")[:500]
        return f"{self.name} {f.signal or f.code}"

    def sentence(self) -> str:
        f, where = self.failure, ""
        if f.phase:
            where = " while starting" if f.phase == "starting" else f" in {f.phase} of step {f.step}"
        if f.hang:
            return f"{self.name} hangs{where}: it {f.hang}"
        if f.kind:
            return f"{self.name} failed{where} with {f.kind}: {f.text.strip()[:1000]}"
        if f.text:
            return f"{self.name} failed{where}: {f.text.strip()[:1000]}"
        if f.signal == "SIGKILL":
            return (
                f"{self.name} was killed by SIGKILL{where}; if nobody did that, the kernel's out-of-memory killer did"
            )
        if f.signal:
            return f"{self.name} was killed by {f.signal}{where}"
        if f.code == 0:
            return f"{self.name} ended{where} before it was done"
        return f"{self.name} exited with code {f.code}{where}"


def is_echo(kind: str, text: str) -> bool:
    """Return whether an error reads like the consequence of a peer's end. It only ranks what people are told."""
    return bool(_ECHO.search(f"{kind}: {text}"))


def remedy(failure: Failure) -> str:
    if failure.kind in ("OutOfMemoryError", "MemoryError") or _MEMORY.search(failure.text):
        return MEMORY_REMEDY
    if "NCCL error" in failure.text:
        return NCCL_REMEDY
    if failure.hang.startswith("is stopped"):
        return "find out what stopped it; SIGCONT would let it continue"
    if failure.hang:
        return HANG_REMEDY
    return f"if memory ran out, as the kernel's log would say: {MEMORY_REMEDY}" if failure.signal == "SIGKILL" else ""


@dataclass(slots=True)
class Verdict:
    evidence: list[Evidence] = field(default_factory=list)  # of the incident under way
    strikes: dict[str, int] = field(default_factory=dict)  # signature -> times since the last step
    attempts: int = 0  # to form a generation, since the last step

    def hear(self, now_ns: int, rank: int, name: str, failure: Failure, died: bool = True) -> None:
        self.evidence = [e for e in self.evidence if e.at_ns > now_ns - INCIDENT_NS]
        if len(self.evidence) < MOST_EVIDENCE:
            self.evidence.append(Evidence(rank, name, failure, died, now_ns))

    def fatal(self) -> Evidence | None:
        """Return a failure that no new attempt can mend."""
        return next((e for e in self.evidence if e.failure.kind in FATAL), None)

    def cause(self) -> Evidence | None:
        """Return the first piece of evidence among the most severe."""
        return min(self.evidence, key=lambda e: e.severity, default=None)

    def close(self, policy: Policy, times: int = 0) -> tuple[Evidence, int] | None:
        """Close the incident. Return its cause and how often it was seen since the last step, if that is often enough
        to end the run. `times`: the caller's own count, which replaces that number."""
        found, self.evidence = self.cause(), []
        if found is None:
            return None
        count = self.strikes[found.signature] = self.strikes.get(found.signature, 0) + 1
        if len(self.strikes) > MOST_SIGNATURES:
            del self.strikes[next(iter(self.strikes))]
        most = policy.errors if found.died and found.failure.kind else policy.strikes
        count = times or count
        return (found, count) if count >= most else None

    def seen(self, evidence: Evidence) -> int:
        """Return how often this failure was the cause since the last step."""
        return self.strikes.get(evidence.signature, 0)

    def progress(self) -> None:
        """Reset the counts, because a step was committed. (Evidence stays: it may be of an incident that came after the
        step.)"""
        self.strikes, self.attempts = {}, 0
