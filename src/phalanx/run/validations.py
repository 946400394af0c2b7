"""Fold the ranks' validation reports into one result: loss, perplexity and bits per byte of each set and of all
together. The best result so far is kept in a file beside the checkpoints, where retention reads it
(`checkpoint.best`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from phalanx.checkpoint.best import Best
from phalanx.core.store import Store
from phalanx.data.validation import ValidationSet
from phalanx.observe import fold

Event = dict[str, Any]


class Validations:
    """Collects the reports of a run. `store`: the place of the checkpoints, if the best is to be kept."""

    def __init__(self, sets: Sequence[ValidationSet], every_steps: int, lineage: str, store: Store | None):
        self.sets, self._store = list(sets), store
        self.last: Event | None = None
        known = Best.read(store) if store else None
        self._best = known if known and known.lineage == lineage else Best(lineage, every_steps)
        self._best.every_steps = every_steps
        self._open: dict[tuple[int, int], fold.Fold] = {}
        self._fresh: float | None = None

    @property
    def best(self) -> Event | None:
        return {"step": self._best.step, "loss": self._best.loss} if self._best.step >= 0 else None

    def add(self, said: fold.Fold, world_size: int) -> Event | None:
        """Add reports, and return the result if they complete one."""
        key = (said["generation"], said["step"])
        known = self._open.get(key)
        whole = self._open[key] = fold.merged(known, said) if known else said
        if fold.size(whole["ranks"]) < world_size:
            return None
        self._open = {other: each for other, each in self._open.items() if other > key}
        total = {name: sum(each or 0 for each in whole[name].values()) for name in ("sums", "tokens")}
        lost = None in whole["sums"].values()
        joint = {**whole, "sums": {"all": None if lost else total["sums"]}, "tokens": {"all": total["tokens"]}}
        sizes = {each.name: each.target_bytes for each in self.sets}
        all_bytes = sum(sizes.values()) if all(sizes.values()) else 0
        self.last = {
            "type": "validation",
            "step": said["step"],
            "generation": said["generation"],
            **_figures(joint, "all", all_bytes),
            "time_s": whole["time_s"],
            "sets": {each.name: _figures(whole, each.name, each.target_bytes) for each in self.sets},
        }
        self._fresh = self.last["loss"]
        self._best.judge(said["step"], self.last["loss"])
        return self.last

    def remember(self) -> None:
        """Write the best result for retention. Raises OSError."""
        if self._store:
            self._best.write(self._store)

    def take(self) -> float | None:
        """Return the loss that has not been put in a row yet."""
        loss, self._fresh = self._fresh, None
        return loss


def _figures(whole: fold.Fold, name: str, target_bytes: int) -> Event:
    loss, tokens = fold.loss_of(whole, name), whole["tokens"].get(name, 0)
    out = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "tokens": tokens}
    if target_bytes:
        out["bits_per_byte"] = loss * tokens / math.log(2) / target_bytes
    return out


def told(event: Event) -> str:
    bits = f", {event['bits_per_byte']:.4f} bits per byte" if "bits_per_byte" in event else ""
    more = ""
    if len(event["sets"]) > 1:
        more = "; " + ", ".join(f"{name} {each['loss']:.4f}" for name, each in event["sets"].items())
    text = f"validation after step {event['step']:,}: loss {event['loss']:.4f}, perplexity {event['perplexity']:.2f}"
    return f"{text}{bits}{more}"
