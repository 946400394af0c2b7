"""Fold the similar reports of many ranks into one message, so that the record keeper's cost per step does not grow with
the number of ranks. A node folds the reports of its ranks, an aggregator those of its nodes. Folding in several levels
gives the same result as folding all at once; only step times are counted in bins of 1 %, which give the median.

`ranks` of a fold are spans: [[first, after the last], ...], ascending."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from phalanx.observe import phases, readings

Fold = dict[str, Any]
Spans = list[list[int]]
Times = list[Any]  # ranks of a block, and the longest time in each: [1, {"rank": seconds}]
BIN = math.log(1.01)
MOST_NORMS = 16  # distinct norms that are kept apart
LOSS_UNITS = 2**48  # units per nat: validation losses are summed as integers, so that the order does not matter
MOST_TIMES = 256  # ranks, or blocks of ranks, whose times are kept individually
BLOCKS = 4  # ranks or blocks that are joined into one when there are more
SLOWEST = 4  # ranks that are named
LAST = (("ago_s", min), ("at", max))  # the last report of a rank ends a step


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


def fold_of(rank: int, said: Fold, read: dict[str, float] | None = None) -> Fold | None:
    """Return a rank's report as a fold of one, or None if its kind is not folded. `read`: its node's readings."""
    make = _MAKE.get(str(said.get("type")))
    if make is None:
        return None
    more = {"readings": readings.of_rank(rank, read)} if read and said["type"] == "step" else {}
    return {**make(rank, said), **more, "type": said["type"], "ranks": [[rank, rank + 1]]}


def folded(items: Iterable[Fold]) -> list[Fold]:
    """Merge the folds that can be merged, each into the first of its kind; leave everything else unchanged. Steps are
    put in order, so that a step from a node that is ahead does not overtake earlier ones that others report only
    now."""
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
    places = [place for key, place in at.items() if key[0] == "step"]
    steps = sorted((out[place] for place in places), key=lambda fold: (fold["generation"], fold["step"]))
    for place, fold in zip(sorted(places), steps, strict=True):
        out[place] = fold
    return out


def merged(a: Fold, b: Fold) -> Fold:
    """Merge two folds of one kind. A fold that was sent again is already part of the other one."""
    whole = size(union(a["ranks"] + b["ranks"]))
    for each in (a, b):
        if size(each["ranks"]) == whole:
            return each
    return {
        **_MERGE[a["type"]](*sorted((a, b), key=_first)),
        "type": a["type"],
        "ranks": union(a["ranks"] + b["ranks"]),
    }


def aged(item: Fold, by_s: float) -> Fold:
    """Add to a step's `ago_s` the time that it waited on its way. Durations are sent because clocks of hosts differ."""
    return {**item, "ago_s": round(item.get("ago_s", 0.0) + by_s, 4)} if item["type"] == "step" else item


def heard(item: Fold, now: float) -> Fold:
    """Add to a step the time at which it ended, by the receiver's clock."""
    return {**item, "at": now - item.get("ago_s", 0.0)} if item["type"] == "step" else item


def median(bins: dict[str, int]) -> float:
    """Return the median of step times, within 0.5 %."""
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
    time_s, spent = float(said["time_s"]), said.get("phases", {})
    own_s = phases.work_s(spent) or time_s
    return {
        "generation": int(said.get("generation", 0)),
        "step": int(said["step"]),
        "lr": said["lr"],
        "time_s": time_s,
        "time_min_s": time_s,
        "slowest": [[own_s, rank]],
        "bins": {str(round(math.log(time_s) / BIN)): 1} if time_s > 0 else {},
        "times": [1, {str(rank): own_s}],
        "norms": {float(said["grad_norm"]).hex(): [[rank, rank + 1]]},
        "data_wait_s": said.get("data_wait_s", 0.0),
        "data_ready": said.get("data_ready", 0),
        "phases": spent,
        "held": said.get("held", {}),
        "served": said.get("served", {}),
        "experts": said.get("experts", {}),
        "whole": said["whole"],
    }


def _merge_steps(a: Fold, b: Fold) -> Fold:
    norms = dict(a["norms"])
    for norm, ranks in b["norms"].items():
        if norm in norms or len(norms) < MOST_NORMS:
            norms[norm] = union(norms.get(norm, []) + ranks)
    return {
        **a,
        "time_s": max(a["time_s"], b["time_s"]),
        "slowest": sorted(a["slowest"] + b["slowest"], key=lambda each: (-each[0], each[1]))[:SLOWEST],
        "time_min_s": min(a["time_min_s"], b["time_min_s"]),
        "bins": _sum(a["bins"], b["bins"]),
        "times": merged_times(a["times"], b["times"]),
        "norms": norms,
        "data_wait_s": max(a["data_wait_s"], b["data_wait_s"]),
        "data_ready": min(a["data_ready"], b["data_ready"]),
        "phases": phases.merged(a["phases"], b["phases"]),
        "held": {tier: min(step, b["held"][tier]) for tier, step in a["held"].items() if tier in b["held"]},
        "served": _sum(a["served"], b["served"]),
        "experts": _fuller(a.get("experts", {}), b.get("experts", {})),
        "readings": readings.merged(a.get("readings", {}), b.get("readings", {})),
        "whole": a["whole"] or b["whole"],
        **{name: choose(a.get(name, 0.0), b.get(name, 0.0)) for name, choose in LAST if name in a or name in b},
    }


def _fuller(a: Fold, b: Fold) -> Fold:
    """Choose the fuller of the mixtures of two pipeline stages. All replicas report the same."""
    return max(a, b, key=lambda each: (each.get("load", 0.0), each.get("layer", "")))


def merged_times(a: Times, b: Times) -> Times:
    """Merge the times of both by rank; with many ranks, by block, keeping the longest time of each block."""
    if (a[0], len(a[1])) < (b[0], len(b[1])):
        a, b = b, a
    block, longest = a[0], dict(a[1])  # copy the larger one whole: a step is folded from many small ones
    _add_blocks(longest, b[1], block // b[0])
    while len(longest) > MOST_TIMES:
        block, finer, longest = block * BLOCKS, longest, {}
        _add_blocks(longest, finer, BLOCKS)
    return [block, longest]


def block_of(ranks: int) -> int:
    """Return the number of ranks in a block when this many ranks are folded."""
    block = 1
    while -(-ranks // block) > MOST_TIMES:
        block *= BLOCKS
    return block


def in_blocks(item: Fold, block: int) -> Fold:
    """Return a step with its times in blocks of at least this size, since the record keeps no smaller ones."""
    if item["type"] != "step" or item["times"][0] >= block:
        return item
    return {**item, "times": merged_times([block, {}], item["times"])}


def _add_blocks(longest: dict[str, float], times: dict[str, float], by: int) -> None:
    for number, time_s in times.items():
        at = str(int(number) // by) if by > 1 else number
        longest[at] = max(longest.get(at, 0.0), time_s)


def _sum(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {**a, **{key: a.get(key, 0) + count for key, count in b.items()}}


# -- reports that each rank sends once, or once per generation


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
    """Merge two ends of a run. Replicas hold the same, so there are as many digests as ranks in a replica."""
    digests = [[digest, list(ranks)] for digest, ranks in a["digests"]]
    for digest, ranks in b["digests"]:
        same = next((each for each in digests if each[0] == digest), None)
        if same:
            same[1] = union(same[1] + ranks)
        else:
            digests.append([digest, ranks])
    return {**a, "memory_bytes": max(a["memory_bytes"], b["memory_bytes"]), "digests": digests}


# -- a validation


def _validation(rank: int, said: Fold) -> Fold:
    return dict(said)


def _merge_validations(a: Fold, b: Fold) -> Fold:
    lost = [name for name in {**a["sums"], **b["sums"]} if None in (a["sums"].get(name), b["sums"].get(name))]
    sums = _sum(*({name: total or 0 for name, total in each["sums"].items()} for each in (a, b)))
    return {
        **a,
        "sums": {**sums, **dict.fromkeys(lost)},
        "tokens": _sum(a["tokens"], b["tokens"]),
        "time_s": max(a["time_s"], b["time_s"]),
    }


def loss_of(fold: Fold, name: str) -> float:
    """Return the nats per token of one set; NaN if some rank's loss was not finite."""
    total, tokens = fold["sums"].get(name), fold["tokens"].get(name)
    return math.nan if total is None or not tokens else total / (LOSS_UNITS * tokens)


_MAKE: dict[str, Callable[[int, Fold], Fold]] = {
    "step": _step,
    "facts": _facts,
    "entered": _entered,
    "done": _done,
    "validation": _validation,
}
_MERGE: dict[str, Callable[[Fold, Fold], Fold]] = {
    "step": _merge_steps,
    "facts": _merge_facts,
    "entered": _merge_entered,
    "done": _merge_done,
    "validation": _merge_validations,
}
