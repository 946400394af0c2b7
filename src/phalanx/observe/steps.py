"""StepTable: folds what each rank says about a step into the one row that the run record keeps.
Memory holds the steps that some ranks have not reported yet, nothing else."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from phalanx.core.ledger import mean_loss


class StepTable:
    """`flops_per_token` and `peak_flops` (of all ranks together, FLOP/s) give the MFU; 0: unknown."""

    def __init__(self, world_size: int, tokens_per_step: int, flops_per_token: float = 0, peak_flops: float = 0):
        self.world_size, self.tokens_per_step = world_size, tokens_per_step
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.events: list[dict[str, Any]] = []  # what was noticed on the way; the caller takes them out
        self._open: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}  # generation, step -> by rank
        self._since = (0, 0)  # the generation, and the step that it goes on from

    def settle(self, generation: int, step: int, world_size: int) -> list[dict[str, Any]]:
        """A new generation goes on from `step` with so many ranks: rows of steps that counted and that somebody who is
        gone has not reported. What earlier ones said of later steps never happened."""
        self.world_size, self._since = world_size, (generation, step)
        counted: dict[int, dict[int, dict[str, Any]]] = {}
        for (_, at), reports in sorted(self._open.items()):
            if at < step:
                counted.setdefault(at, {}).update(reports)
        self._open = {key: reports for key, reports in self._open.items() if key[0] >= generation and key[1] >= step}
        return [self._row(at, dict(sorted(reports.items()))) for at, reports in sorted(counted.items())]

    def complete(self) -> list[dict[str, Any]]:
        """Rows of the new generation whose reports were there before anybody said that it had begun."""
        return [row for key in sorted(self._open) if (row := self._close(key))]

    def add(self, rank: int, message: dict[str, Any]) -> dict[str, Any] | None:
        """One rank's report of a step; the step's row when it was the last one missing."""
        key = (int(message.get("generation", 0)), int(message["step"]))
        if key[0] < self._since[0] or key[1] < self._since[1]:
            return None  # too late: it is settled
        self._open.setdefault(key, {})[rank] = message
        return self._close(key)

    def _close(self, key: tuple[int, int]) -> dict[str, Any] | None:
        if key[0] > self._since[0] or len(self._open[key]) < self.world_size:
            return None
        return self._row(key[1], dict(sorted(self._open.pop(key).items())))

    def _row(self, step: int, reports: dict[int, dict[str, Any]]) -> dict[str, Any]:
        self._compare_norms(step, reports)
        times = {rank: r["time_s"] for rank, r in reports.items()}
        slowest = max(times, key=times.__getitem__)
        whole = next((r["whole"] for r in reports.values() if r["whole"]), None)
        if whole is None:
            whole = {"loss_sums": [math.nan], "tokens": 0, "data_digest": "0"}
        tokens = whole["tokens"]
        tokens_per_s = self.tokens_per_step / times[slowest] if times[slowest] > 0 else 0.0
        any_report = next(iter(reports.values()))
        return {
            "step": step,
            "loss": mean_loss(whole["loss_sums"], tokens),
            "grad_norm": any_report["grad_norm"],
            "lr": any_report["lr"],
            "target_tokens": tokens,
            "time_s": times[slowest],
            "time_min_s": min(times.values()),
            "time_median_s": statistics.median(times.values()),
            "slowest_rank": slowest,
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * self.flops_per_token / self.peak_flops if self.peak_flops else None,
            "data_wait_s": max(r.get("data_wait_s", 0.0) for r in reports.values()),
            "phases": _phases([r.get("phases", {}) for r in reports.values()]),
            "data_ready": min(r.get("data_ready", 0) for r in reports.values()),
            "data_digest": whole["data_digest"],
            "generation": any_report.get("generation", 0),
            "record": whole.get("record", ""),
            "rank_times": times,
            "served": _merge(r.get("served", {}) for r in reports.values()),
        }

    def _compare_norms(self, step: int, reports: dict[int, dict[str, Any]]) -> None:
        """All ranks compute the same norm, to the bit. One that does not has gone its own way."""
        by_bits: dict[str, list[int]] = {}
        for rank, r in reports.items():
            by_bits.setdefault(float(r["grad_norm"]).hex(), []).append(rank)
        if len(by_bits) > 1:
            usual = max(by_bits.values(), key=len)
            ranks = sorted(rank for group in by_bits.values() if group is not usual for rank in group)
            norms = {str(rank): reports[rank]["grad_norm"] for rank in (usual[0], *ranks)}
            self.events.append({"type": "grad_norm differs", "step": step, "ranks": ranks, "grad_norms": norms})


def _phases(ranks: list[dict[str, float]]) -> dict[str, float]:
    """Seconds of the step before, by phase. Ranks that are early wait in the reduction for the last one, so that one's
    time is what the reduction takes."""
    known = [phases for phases in ranks if phases]
    if not known:
        return {}
    return {name: (min if name == "reduce" else max)(phases[name] for phases in known) for name in known[0]}


def _merge(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in counts:
        for source, count in part.items():
            total[source] = total.get(source, 0) + count
    return total
