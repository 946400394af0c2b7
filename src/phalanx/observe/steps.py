"""StepTable: the rows of the run record, one per committed step, made from the folded reports of its ranks
(`observe.fold`). Reports and the controller's decisions arrive by different paths, so a report may be late by a
generation. Memory holds only the steps that some ranks have not reported yet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import Any

from phalanx.core.ledger import mean_loss
from phalanx.observe.fold import Fold, median, members, merged, size
from phalanx.observe.readings import row_of

Row = dict[str, Any]
PATIENCE_S = 60.0  # how long rows wait for an older one, since no rank may be left to report it
NOBODY: dict[str, Any] = {"loss_sums": [math.nan], "tokens": 0, "data_digest": "0"}


class StepTable:
    """`flops_per_token` and `peak_flops` (of all ranks together, FLOP/s) give the MFU; 0: not known yet."""

    def __init__(
        self,
        world_size: int,
        tokens_per_step: int,
        flops_per_token: float = 0,
        peak_flops: float = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock, self._owed_at = clock, 0.0  # since when a row is owed
        self.world_size, self.tokens_per_step = world_size, tokens_per_step
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.events: list[Row] = []  # for the caller to take out
        self._open: dict[tuple[int, int], Fold] = {}  # by generation and step
        self._since = (0, 0)  # the generation, and the step that it continues from
        self._next: int | None = None  # the first step without a row
        self._owed: dict[int, Fold | None] = {}  # steps that counted but whose loss has not been reported yet
        self._held: list[Row] = []  # rows of later steps

    @property
    def unrecorded(self) -> Collection[tuple[int, int]]:
        """Generations and steps that some ranks have reported but that have no row yet."""
        return self._open.keys()

    def settle(self, generation: int, step: int, world_size: int) -> list[Row]:
        """Continue from `step` in a new generation of `world_size` ranks. Steps before it count, even if a rank that is
        gone has not reported them. Later steps of earlier generations never happened."""
        self.world_size, self._since = world_size, (generation, step)
        out: list[Row] = []
        for at in range(step if self._next is None else self._next, step):
            said = [fold for key, fold in sorted(self._open.items()) if key[1] == at and key[0] < generation]
            fold = said[0] if said else None
            for other in said[1:]:
                fold = merged(fold, other) if fold else other
            if fold and fold["whole"]:
                out += self._emit(fold)
            else:
                self._owed_at = self._owed_at if self._owed else self._clock()
                self._owed[at] = fold
        self._open = {key: fold for key, fold in self._open.items() if key[0] >= generation and key[1] >= step}
        self._next = step
        return out

    def complete(self) -> list[Row]:
        """Return the rows of the new generation whose reports arrived before the news that it had begun."""
        return [row for key in sorted(self._open) if key in self._open for row in self._close(key)]

    def add(self, fold: Fold) -> list[Row]:
        """Take reports of a step and return the rows that they complete."""
        key = (fold["generation"], fold["step"])
        if key[1] in self._owed and key[0] < self._since[0]:
            known = self._owed[key[1]]
            fold = merged(known, fold) if known else fold
            self._owed[key[1]] = fold
            return self._pay(key[1]) if fold["whole"] else []
        if key < (self._since[0], self._next or 0):
            return []  # it has its row, or never happened; a node that did not hear of its recording repeats it
        known = self._open.get(key)
        self._open[key] = merged(known, fold) if known else fold
        return self._close(key)

    def finish(self) -> list[Row]:
        """Return the rows still owed, with what is known of them, because no more reports will come."""
        return [row for at in sorted(self._owed) for row in self._pay(at)]

    def _close(self, key: tuple[int, int]) -> list[Row]:
        if key[0] > self._since[0] or size(self._open[key]["ranks"]) < self.world_size:
            return []
        self._next = key[1] + 1
        row = self._emit(self._open.pop(key))
        # Ranks report steps in order: an older one that is still open here was recorded elsewhere.
        self._open = {k: fold for k, fold in self._open.items() if k[0] != key[0] or k[1] > key[1]}
        return row

    def _emit(self, fold: Fold) -> list[Row]:
        """Return the step's row, or hold it back while an earlier one is owed, for PATIENCE_S at most."""
        row = self._row(fold)
        if not self._owed:
            return [row]
        self._held.append(row)
        return self.finish() if self._clock() > self._owed_at + PATIENCE_S else []

    def _pay(self, at: int) -> list[Row]:
        fold = self._owed.pop(at)
        row = self._row(fold) if fold else self._nobody(at)
        first, self._held = [r for r in self._held if r["step"] < at], [r for r in self._held if r["step"] > at]
        rows = [*first, row]
        if not self._owed:
            rows, self._held = rows + self._held, []
        return rows

    def _row(self, fold: Fold) -> Row:
        self._compare_norms(fold)
        whole = fold["whole"] or NOBODY
        tokens, time_s = whole["tokens"], fold["time_s"]
        tokens_per_s = self.tokens_per_step / time_s if time_s > 0 else math.nan  # no rank was left to report
        usual = max(fold["norms"], key=lambda norm: size(fold["norms"][norm]))
        return {
            **({"time": fold["at"]} if "at" in fold else {}),
            "step": fold["step"],
            "loss": mean_loss(whole["loss_sums"], tokens),
            "grad_norm": float.fromhex(usual),
            "lr": fold["lr"],
            "target_tokens": tokens,
            "time_s": time_s,
            "time_min_s": fold["time_min_s"],
            "time_median_s": min(time_s, max(fold["time_min_s"], median(fold["bins"]))),
            "slowest_rank": fold["slowest"][0][1],
            "slowest": fold["slowest"],
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * self.flops_per_token / self.peak_flops if self.peak_flops else None,
            "data_wait_s": fold["data_wait_s"],
            "phases": fold["phases"],
            "held": fold["held"],
            "readings": row_of(fold.get("readings", {})),
            "data_ready": fold["data_ready"],
            "data_digest": whole["data_digest"],
            "generation": fold["generation"],
            "record": whole.get("record", ""),
            "rank_times": fold["times"],
            "served": fold["served"],
            **({f"expert_{name}": value for name, value in fold.get("experts", {}).items()}),
            **({"skipped": whole["skipped"]} if "skipped" in whole else {}),
        }

    def _nobody(self, at: int) -> Row:
        """Return the row of a step that counted but that no remaining rank has reported."""
        empty: Row = {
            "norms": {"nan": []},
            "bins": {},
            "times": [1, {}],
            "slowest": [[0.0, -1]],
            "phases": {},
            "held": {},
            "served": {},
            "whole": None,
            "lr": 0.0,
        }
        times = {"time_s": 0.0, "time_min_s": 0.0, "data_wait_s": 0.0, "data_ready": 0}
        return self._row({"step": at, "generation": self._since[0], **empty, **times})

    def _compare_norms(self, fold: Fold) -> None:
        """Report ranks whose norm differs. All ranks compute the same norm to the bit, unless one has diverged."""
        norms = fold["norms"]
        if len(norms) > 1:
            usual = max(norms, key=lambda norm: size(norms[norm]))
            ranks = {rank: norm for norm in norms if norm != usual for rank in members(norms[norm])}
            told = {
                str(rank): float.fromhex(norm) for rank, norm in [(norms[usual][0][0], usual), *sorted(ranks.items())]
            }
            about = {"step": fold["step"], "ranks": sorted(ranks), "grad_norms": told}
            self.events.append({"type": "grad_norm differs", **about})
