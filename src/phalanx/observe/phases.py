"""The phases of a step: their names, and how those of many ranks are merged. Some are a rank's own work. In the others
it waits for its peers, so the shortest wait among the ranks is the time of the phase itself."""

from __future__ import annotations

Phases = dict[str, float]  # seconds

#: phase -> what it means, in the order of a step and of every table and chart.
PHASES = {
    "data": "waits for samples",
    "forward": "computes forward",
    "backward": "computes backward; reductions are hidden behind it",
    "gaps": "between passes: copies inputs, waits for pipeline neighbours",
    "reduce": "sums gradients that the passes did not hide, or waits for slower ranks",
    "vote": "exchanges losses and agrees that the step counts",
    "optimizer": "updates the weights",
    "checkpoint": "takes a snapshot, or waits for one",
}
VOTE = "vote"
WAITS = frozenset({"gaps", "reduce", VOTE})  # for other ranks


def merged(a: Phases, b: Phases) -> Phases:
    """Merge two groups of ranks: keep the longest work and the shortest wait, which roughly add up to the step."""
    if not a or not b:
        return a or b
    return {name: (min if name in WAITS else max)(a[name], b[name]) for name in a if name in b}


def work_s(phases: Phases) -> float:
    """Return the time that a rank worked itself. Ranks end a step together, so only this identifies the slow one."""
    return sum(seconds for name, seconds in phases.items() if name not in WAITS)


def as_planned(phases: Phases) -> Phases:
    """Group phases by the terms that a plan predicts; data and checkpoints belong to none and keep their names."""
    terms = dict.fromkeys(("forward", "backward", "gaps"), "passes") | {"vote": "between"}
    out: Phases = {}
    for name, seconds in phases.items():
        term = terms.get(name, name)
        out[term] = out.get(term, 0.0) + seconds
    return out
