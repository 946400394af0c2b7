"""The micro-batches of a rank, which follow from the job, the step and their numbers. The data service fills lanes
ahead of time, one for every set of micro-batches that is asked for step after step. A share that grows keeps its lane,
and gets another for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.core.checkpoint import Facts
from phalanx.core.job import Job
from phalanx.data.feed import Feed
from phalanx.data.samples import digest, places_of, unpack
from phalanx.model.family import Batch


@dataclass(slots=True)
class _Lane:
    feed: Feed
    step: int  # the next step that it has


class Batches:
    def __init__(self, job: Job, connect: Callable[[list[int], int], Feed], facts: Facts | None = None):
        """`connect` opens the feed of the given micro-batches from the given step on."""
        self.job, self._connect, self.facts = job, connect, facts or Facts()
        self._lanes: list[_Lane] = []

    def prepare(self, step: int, indices: list[int]) -> None:
        """Let the service fill what will be taken next."""
        self._choose(step, indices)

    def take(self, step: int, indices: list[int]) -> tuple[list[Batch], dict[str, Any]]:
        """Return the micro-batches in the order of `indices`, and a report of how they were served. A step may be asked
        for again, with the same micro-batches or with others."""
        found: dict[int, Batch] = {}
        fed = {"data_wait_s": 0.0, "data_ready": self.job.data.buffer_steps, "data_digest": f"{0:016x}", "served": {}}
        for lane in self._choose(step, indices):
            self._take_from(lane, found, fed)
        return [found[i] for i in indices], fed

    def _choose(self, step: int, indices: list[int]) -> list[_Lane]:
        """Return the lanes that have the step and only wanted micro-batches, and a new lane for the rest. Close other
        lanes that are not ahead of the step."""
        rest, chosen = set(indices), []
        for lane in [lane for lane in self._lanes if lane.step <= step]:
            if lane.step == step and rest.issuperset(lane.feed.indices):
                rest.difference_update(lane.feed.indices)
                chosen.append(lane)
            else:
                lane.feed.close()
                self._lanes.remove(lane)
        if rest:
            chosen.append(_Lane(self._connect(sorted(rest), step), step))
            self._lanes.append(chosen[-1])
        return chosen

    def _take_from(self, lane: _Lane, found: dict[int, Batch], fed: dict[str, Any]) -> None:
        train, feed, step = self.job.train, lane.feed, lane.step
        got = feed.take(step)
        samples = unpack(got.rows, feed.eos)
        places = places_of(feed.indices, train.micro_batch) + self.facts.cursor(step, train.global_batch)
        total = int(fed["data_digest"], 16) + digest(got.rows, places.tolist())
        fed["data_digest"] = f"{total % (1 << 64):016x}"
        fed["data_wait_s"] += got.waited_s
        fed["data_ready"] = min(fed["data_ready"], got.ready)
        fed["served"] = {s: fed["served"].get(s, 0) + n for s, n in got.served.items()}
        feed.release(step)
        lane.step += 1
        parts = [samples.tokens_BL, samples.targets_BL, samples.weights_BL]
        if train.document_mask and samples.documents_BL is not None:
            parts.append(samples.documents_BL)
        cut = [torch.from_numpy(part).split(train.micro_batch) for part in parts]
        found |= {i: Batch(*tensors) for i, *tensors in zip(feed.indices, *cut, strict=True)}

    def close(self) -> None:
        for lane in self._lanes:
            lane.feed.close()
        self._lanes.clear()
