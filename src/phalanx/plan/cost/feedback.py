"""Correct predictions from finished runs. Each run appends a line to a local file: predicted and measured time, also by
phase of the step. The next plan for that chip uses these lines to correct its pace and narrow its interval."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.plan.cost.profiles import Profile

FORMAT = "phalanx-feedback-2"
NOISE = 0.04  # ln: difference between two runs of one job on one machine
MOST = 200  # newest lines that count
NOTICED = 0.05  # of a step: a phase is not named if it is slower by less
PHASES = {"dp": "reduce", "optimizer": "optimizer", "fixed": "between"}  # of the terms; all others are passes
TELLING_BYTES = 10e9  # a smaller peak reflects what every process holds more than the model
REMAINS = 0.05  # ln: difference between jobs that no number of other runs removes


@dataclass(frozen=True, slots=True)
class Record:
    """One finished run. Its phases are `passes` (forward and backward, with communication and waits), `reduce` (the
    part of the gradient reduction that passes do not hide), `optimizer`, and `data` (the wait for samples), which is
    measured but not predicted."""

    chip: str
    ranks: int
    model: str
    predicted_s: float  # without corrections from earlier runs
    measured_s: float
    predicted: dict[str, float]  # seconds of a step, by phase
    measured: dict[str, float] = field(default_factory=dict)
    predicted_bytes: float = 0.0  # of the device's allocator
    measured_bytes: float = 0.0  # 0: not measured

    @property
    def slower(self) -> float:
        """Return ln(measured / predicted)."""
        return math.log(self.measured_s / self.predicted_s)

    def slowest_phase(self) -> tuple[str, float] | None:
        """Return the phase that exceeds its plan most, and by how many seconds; None if no phase is much slower."""
        excess = {name: seconds - self.predicted.get(name, 0.0) for name, seconds in self.measured.items()}
        if not excess:
            return None
        name = max(excess, key=lambda key: excess[key])
        return (name, excess[name]) if excess[name] > NOTICED * self.predicted_s else None


def by_phase(seconds: Mapping[str, float]) -> dict[str, float]:
    """Sum a plan's terms by the phase of a step in which they appear."""
    phases: dict[str, float] = {}
    for term, value in seconds.items():
        phase = PHASES.get(term, "passes")
        phases[phase] = phases.get(phase, 0.0) + value
    return phases


def append(record: Record, file: Path) -> None:
    """Append a run to the file, creating it if necessary."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"format": FORMAT, **asdict(record)}) + "\n")


def records(file: Path) -> list[Record]:
    """Return the newest runs of the file, or none if it does not exist."""
    if not file.exists():
        return []
    return list(_read(file))[-MOST:]


def _read(file: Path) -> Iterator[Record]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            assert row.pop("format") == FORMAT
            record = Record(**row)
            assert record.predicted_s > 0 and record.measured_s > 0
        except (ValueError, TypeError, KeyError, AssertionError, AttributeError):
            remedy = f"delete line {number}, or the whole file: it only makes predictions better"
            raise UserError(
                "a line cannot be read", field="feedback", value=f"{file}:{number}", remedy=remedy
            ) from None
        yield record


def learned(profile: Profile, chip: str, file: Path) -> Profile:
    """Correct the profile from the runs on this chip. One pace scales every term, and is drawn towards 1 when there are
    few runs; the interval narrows as runs accumulate."""
    mine = [record for record in records(file) if record.chip == chip]
    if not mine:
        return profile
    low, high = profile.interval(False, "bf16")
    pace, spread = _posterior(np.array([r.slower for r in mine]), (high - low) / 2 / 1.64)
    half = 1.64 * spread
    changed = replace(
        profile, pace=profile.pace * math.exp(pace), error=(-half, half), name=f"{profile.name}, corrected",
        evidence=f"{profile.evidence}; {len(mine)} runs here took {math.exp(pace):.2f} times the prediction",
    )  # fmt: skip
    bytes_seen = [
        math.log(r.measured_bytes / r.predicted_bytes)
        for r in mine
        if r.measured_bytes and r.predicted_bytes >= TELLING_BYTES
    ]
    if not bytes_seen:
        return changed
    below, above = profile.memory_interval
    middle, _ = _posterior(np.array(bytes_seen), (above - below) / 2 / 1.64)
    widest = 1.5 * max(REMAINS, *(abs(b - middle) for b in bytes_seen))  # safe: every run seen lies inside
    return replace(changed, memory_error=(middle - widest, middle + widest))


def _posterior(seen: NDArray, prior: float) -> tuple[float, float]:
    """Return the mean difference of runs here, given the standard deviation of predictions elsewhere (`prior`), and the
    standard deviation of the next run: from the uncertainty of the mean, the scatter of runs and the difference between
    jobs."""
    # One run says little about the scatter: until there are several, half of the prior counts as one more run.
    squares = (prior / 2) ** 2 + float(np.sum((seen - np.mean(seen)) ** 2))
    scatter = max(math.hypot(NOISE, REMAINS), math.sqrt(squares / len(seen)))
    weight = prior**2 / (prior**2 + scatter**2 / len(seen))
    return weight * float(np.mean(seen)), math.hypot(prior * math.sqrt(1 - weight), scatter)
