"""Folds what many ranks say alike into one message, so that what a step costs the process that keeps the record does
not grow with the ranks. A node folds what its ranks say, an aggregator what its nodes say. Folding what was folded
gives the same as folding all at once, except that step times are counted in bins of 1 %, from which the median comes.

`ranks` of a fold are spans: [[first, after the last], ...], ascending."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

Fold = dict[str, Any]
Spans = list[list[int]]
BIN = math.log(1.01)
MOST_NORMS = 16  # different ones that are told apart
MOST_TIMES = 64  # ranks whose step times are kept one by one


def spans(ranks: Iterable[int]) -> Spans:
    return union([[rank, rank + 1] for rank in sorted(ranks)])


def union(both: Spans) -> Spans:
    out: Spans = []
    for first, end in sorted(both):
        if out and first <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([first, end])
    return out


def size(of: Spans) -> int:
    return sum(end - first for first, end in of)


def members(of: Spans) -> list[int]:
    return [rank for first, end in of for rank in range(first, end)]


def overlap(a: Spans, b: Spans) -> bool:
    return size(union(a + b)) < size(a) + size(b)


def fold_of(rank: int, said: Fold) -> Fold | None:
    """What a rank said, as a fold of one; None: it is not of a kind that is folded."""
    make = _MAKE.get(str(said.get("type")))
    return {**make(rank, said), "type": said["type"], "ranks": [[rank, rank + 1]]} if make else None


def folded(items: Iterable[Fold]) -> list[Fold]:
    """Merge the folds that can be merged, each into the first of its kind; everything else stays as it is."""
    out, at = list[Fold](), dict[tuple[Any, ...], int]()
    for item in items:
        if "ranks" not in item:
            out.append(item)
            continue
        key = (item["type"], *(item.get(name) for name in ("generation", "step", "source")))
        if key not in at:
            at[key] = len(out)
            out.append(item)
        else:
            out[at[key]] = merged(out[at[key]], item)
    return out


def merged(a: Fold, b: Fold) -> Fold:
    """Two folds of one kind. What was sent again is in the other one already."""
    whole = size(union(a["ranks"] + b["ranks"]))
    for each in (a, b):
        if size(each["ranks"]) == whole:
            return each
    return {
        **_MERGE[a["type"]](*sorted((a, b), key=_first)),
        "type": a["type"],
        "ranks": union(a["ranks"] + b["ranks"]),
    }


def median(bins: dict[str, int]) -> float:
    """Of step times, within 0.5 %."""
    half, seen = (sum(bins.values()) + 1) // 2, 0
    for bin_ in sorted(map(int, bins)):
        seen += bins[str(bin_)]
        if seen >= half:
            return math.exp(bin_ * BIN)
    return 0.0


def _first(fold: Fold) -> int:
    return fold["ranks"][0][0]


# -- a step


def _step(rank: int, said: Fold) -> Fold:
    time_s = float(said["time_s"])
    return {
        "generation": int(said.get("generation", 0)),
        "step": int(said["step"]),
        "lr": said["lr"],
        "time_s": time_s,
        "time_min_s": time_s,
        "slowest_rank": rank,
        "bins": {str(round(math.log(time_s) / BIN)): 1} if time_s > 0 else {},
        "times": {str(rank): time_s},
        "norms": {float(said["grad_norm"]).hex(): [[rank, rank + 1]]},
        "data_wait_s": said.get("data_wait_s", 0.0),
        "data_ready": said.get("data_ready", 0),
        "phases": said.get("phases", {}),
        "served": said.get("served", {}),
        "whole": said["whole"],
    }


def _merge_steps(a: Fold, b: Fold) -> Fold:
    slower = b if b["time_s"] > a["time_s"] else a
    norms = dict(a["norms"])
    for norm, ranks in b["norms"].items():
        if norm in norms or len(norms) < MOST_NORMS:
            norms[norm] = union(norms.get(norm, []) + ranks)
    return {
        **a,
        "time_s": slower["time_s"],
        "slowest_rank": slower["slowest_rank"],
        "time_min_s": min(a["time_min_s"], b["time_min_s"]),
        "bins": _sum(a["bins"], b["bins"]),
        "times": _times(a, b),
        "norms": norms,
        "data_wait_s": max(a["data_wait_s"], b["data_wait_s"]),
        "data_ready": min(a["data_ready"], b["data_ready"]),
        "phases": _phases(a["phases"], b["phases"]),
        "served": _sum(a["served"], b["served"]),
        "whole": a["whole"] or b["whole"],
    }


def _times(a: Fold, b: Fold) -> dict[str, float]:
    """By rank; none of any, where there are many."""
    both = {**a["times"], **b["times"]}
    return both if a["times"] and b["times"] and len(both) <= MOST_TIMES else {}


def _phases(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    """Seconds of the step before, by phase. Ranks that are early wait in the reduction for the last one, so that one's
    time is what the reduction takes."""
    if not a or not b:
        return a or b
    return {name: (min if name == "reduce" else max)(a[name], b[name]) for name in a}


def _sum(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {**a, **{key: a.get(key, 0) + count for key, count in b.items()}}


# -- what each rank says once, or once in a generation


def _facts(rank: int, said: Fold) -> Fold:
    return dict(said)


def _merge_facts(a: Fold, b: Fold) -> Fold:
    return {**a, "peak_flops": a["peak_flops"] + b["peak_flops"]}


def _entered(rank: int, said: Fold) -> Fold:
    return dict(said)


def _merge_entered(a: Fold, b: Fold) -> Fold:
    return {**a, **{name: max(a[name], b[name]) for name in ("restore_s", "form_s")}}


def _done(rank: int, said: Fold) -> Fold:
    about = {"step": said["step"], "memory_bytes": said["memory_bytes"]}
    return {**about, "digests": [[said["digest"], [[rank, rank + 1]]]]}


def _merge_done(a: Fold, b: Fold) -> Fold:
    """Replicas hold the same, so there are as many digests as a replica has ranks."""
    digests = [[digest, list(ranks)] for digest, ranks in a["digests"]]
    for digest, ranks in b["digests"]:
        same = next((each for each in digests if each[0] == digest), None)
        if same:
            same[1] = union(same[1] + ranks)
        else:
            digests.append([digest, ranks])
    return {**a, "memory_bytes": max(a["memory_bytes"], b["memory_bytes"]), "digests": digests}


_MAKE: dict[str, Callable[[int, Fold], Fold]] = {"step": _step, "facts": _facts, "entered": _entered, "done": _done}
_MERGE: dict[str, Callable[[Fold, Fold], Fold]] = {
    "step": _merge_steps,
    "facts": _merge_facts,
    "entered": _merge_entered,
    "done": _merge_done,
}
