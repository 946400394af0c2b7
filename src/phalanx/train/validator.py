"""Validation in a worker: forward passes over its share of the sequences. Replicas divide the micro-batches of a set
among them and exchange nothing. Each rank reports its sums as integers, so that the total is the same in any order
(`observe.fold`). Ranks of a replica need the same number of passes, so shares are padded with sequences that do not
count."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from phalanx.checkpoint.torch_state import rng_state, set_rng_state
from phalanx.core.job import Job
from phalanx.core.layout import Coord
from phalanx.data.samples import unpack
from phalanx.data.validation import ValidationSet
from phalanx.model.family import Batch
from phalanx.observe.fold import LOSS_UNITS
from phalanx.train.engine import Engine

PASSES = 4  # micro-batches, times the stages, between two checks whether to continue


class Validator:
    def __init__(self, job: Job, coord: Coord, sets: Sequence[dict[str, Any]], on_event: Callable[[Any], None]):
        self.job, self.coord = job, coord
        self._sets = [ValidationSet.from_dict(said) for said in sets]
        self._on_event = on_event
        self._kept: dict[str, tuple[list[int], list[Batch]]] = {}  # by set: the share, and its batches

    def is_due(self, step: int) -> bool:
        return bool(self._sets) and self.job.validation.is_due(step, self.job.train.steps)

    def run(self, engine: Engine, replicas: Sequence[int], may_go_on: Callable[[], bool]) -> dict[str, Any] | None:
        """Return what this rank reports; None: `may_go_on` said no. All ranks of the replica ask it at the same points
        and get the same answer."""
        began, rng = time.perf_counter(), rng_state(engine.device)
        sums, tokens = dict[str, int | None](), dict[str, int]()
        at_once = PASSES * self.job.layout.num_stages
        for each in self._sets:
            batches, sums[each.name], tokens[each.name] = self._batches(each, replicas), 0, 0
            for first in range(0, len(batches), at_once):
                if not may_go_on():
                    return None
                part = batches[first : first + at_once]
                losses = engine.evaluate(part).tolist() if part else []
                if self.coord.tp == 0:  # tp peers have the same losses; cp ranks have parts of them
                    sums[each.name] = _add(sums[each.name], losses)
                if not (self.coord.tp or self.coord.cp or self.coord.pp):
                    tokens[each.name] += sum(int(b.weights_BL.sum()) for b in part)
        set_rng_state(engine.device, rng)
        return {"sums": sums, "tokens": tokens, "time_s": time.perf_counter() - began}

    def _batches(self, each: ValidationSet, replicas: Sequence[int]) -> list[Batch]:
        size, ranks = self.job.train.micro_batch, len(replicas) * self.job.layout.shard
        mine = replicas.index(self.coord.replica) * self.job.layout.shard + self.coord.shard
        num_micro = -(-each.count // size)
        share = [mine + i * ranks for i in range(-(-num_micro // ranks))]
        if self._kept.get(each.name, ([],))[0] != share:
            self._kept[each.name] = share, self._read(each, share)
        return self._kept[each.name][1]

    def _read(self, each: ValidationSet, share: list[int]) -> list[Batch]:
        size = self.job.train.micro_batch
        numbers = np.array([micro * size + i for micro in share for i in range(size)])
        loader = each.data.open(self._on_event)
        try:
            rows = each.rows(loader, np.minimum(numbers, each.count - 1).tolist())
        finally:
            loader.close()
        samples = unpack(rows, loader.manifest.eos)
        samples.weights_BL[numbers >= each.count] = 0
        parts = [samples.tokens_BL, samples.targets_BL, samples.weights_BL]
        if self.job.train.document_mask and samples.documents_BL is not None:
            parts.append(samples.documents_BL)
        return [Batch(*tensors) for tensors in zip(*(torch.from_numpy(p).split(size) for p in parts), strict=True)]


def _add(total: int | None, losses: list[float]) -> int | None:
    """Add losses in the units of `observe.fold`; None: one of them is not finite."""
    if total is None or not all(map(math.isfinite, losses)):
        return None
    return total + sum(round(loss * LOSS_UNITS) for loss in losses)
