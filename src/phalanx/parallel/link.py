"""The link to the other replicas in one generation of the gang: the cross-replica groups, the thread that uses them and
the buckets in flight. It only reads its inputs and sums into its own memory, so after a failure the replica's gradients
are intact and another link can sum them again. Failures are recorded, not raised: this rank's shard peers are inside
collectives of their own and must get through them."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.core.job import TrainConfig
from phalanx.parallel.cross import Cross
from phalanx.parallel.device import Device
from phalanx.parallel.tiers import size_bytes
from phalanx.parallel.tree import Node, Part

CLOSE_LIMIT_S = 0.5
Nodes = list[list[Node]]  # of the exact tree: what each replica of the group brings
Sums = list[tuple[Any, Tensor]]  # a unit, and its sum over all replicas
Slices = list[tuple[int, bool]]  # of a unit's parameters: number of elements, padded, and whether they travel whole


@dataclass(slots=True)
class BucketTrace:
    size_bytes: int
    issued_ns: int  # handed to the thread
    started_ns: int = 0  # its first collective called
    done_ns: int = 0


class Link:
    def __init__(self, cross: Cross, train: TrainConfig, device: Device):
        self.cross, self.device = cross, device
        self.error: BaseException | None = None
        self.trace: list[BucketTrace] = []  # the buckets of the step
        self.stream = device.new_stream()
        self._codec, self._limit_bytes = train.compress, train.bucket_mb * 1e6
        self._bucket: list[tuple[Any, list[Part], Slices]] = []
        self._nodes: Nodes = []
        self._flying: list[Future[Sums]] = []
        self._thread = ThreadPoolExecutor(1, "cross-replica")

    def add(self, unit: Any, parts: list[Part], slices: Slices, nodes: Nodes, feedback: bool) -> None:
        """Add the next unit. All replicas must add the same ones in the same order. `nodes` belong to an exact sum;
        without them the sum is fast, of one part. With `feedback`, rounding errors are made up for in the next step."""
        if nodes != self._nodes:
            self.flush(feedback)
        self._nodes = nodes
        for _, part in parts:
            self.device.hold(part, self.stream)
        self._bucket.append((unit, parts, slices))
        if sum(size_bytes(p[0][1]) for _, p, _ in self._bucket) >= self._limit_bytes:
            self.flush(feedback)

    def flush(self, feedback: bool) -> None:
        if not self._bucket:
            return
        bucket, self._bucket, nodes = self._bucket, [], self._nodes
        trace = BucketTrace(sum(size_bytes(p[0][1]) for _, p, _ in bucket), time.perf_counter_ns())
        slot = len(self.trace) if feedback else None
        self.trace.append(trace)
        ready = self.device.mark()

        def run() -> Sums:
            with self.device.on(self.stream):
                self.device.wait(self.stream, ready)
                trace.started_ns = time.perf_counter_ns()
                total = self.guard(lambda: self._sum(bucket, nodes, slot))
            trace.done_ns = time.perf_counter_ns()
            if total is None:
                return []
            sizes = [parts[0][1].numel() for _, parts, _ in bucket]
            return [(unit, part) for (unit, _, _), part in zip(bucket, total.split(sizes), strict=True)]

        self._flying.append(self._thread.submit(run))

    def _sum(self, bucket: list[tuple[Any, list[Part], Slices]], nodes: Nodes, slot: int | None) -> Tensor:
        parts = [parts for _, parts, _ in bucket]
        if nodes:
            joined = parts[0]
            if len(parts) > 1:
                joined = [(ps[0][0], torch.cat([t for _, t in ps])) for ps in zip(*parts, strict=True)]
            return self.cross.tree_sum(joined, nodes)
        total = torch.cat([t for ((_, t),) in parts])  # copies even a single part
        if self._codec == "none":
            self.cross.sum_(total)
        else:
            units = total.split([t.numel() for ((_, t),) in parts])
            params = [part for flat, (_, _, of) in zip(units, bucket, strict=True) for part in _cut(flat, of)]
            self.cross.sum_parts_(params, self._codec, slot)
        return total

    def wait(self) -> Sums:
        """Return the sums of everything that was added, except for buckets that failed."""
        flying, self._flying = self._flying, []
        sums = [pair for flight in flying for pair in flight.result()]
        if self.stream is not None:
            self.device.wait(None, self.stream.record_event())
        return sums

    def guard(self, work: Callable[[], Any]) -> Any:
        """Run `work` and return its result, or None if the link has failed, now or before."""
        if self.error is not None:
            return None
        try:
            return work()
        except RuntimeError as error:  # what torch raises when a peer is gone
            self.error = error
            traceback.clear_frames(error.__traceback__)  # the frames hold the group, and so its sockets
            self.cross.close()  # so that peers waiting for us fail at once
            return None

    def does(self, work: Callable[[], None]) -> bool:
        """Run `work` and return whether the link is still intact."""
        self.guard(work)
        return self.error is None

    def close(self, limit_s: float = CLOSE_LIMIT_S) -> None:
        """Stop the thread; wait at most `limit_s` for a silent peer. Nobody reads what its bucket still writes to."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        wait(self._flying, timeout=limit_s)


def _cut(flat: Tensor, slices: Slices) -> list[tuple[Tensor, bool]]:
    """Cut a flat sum into parameters. If one has no gradient, no places are known, and all parameters travel whole."""
    if sum(size for size, _ in slices) != flat.numel():
        return [(flat, True)]
    parts = flat.split([size for size, _ in slices])
    return [(part, whole) for part, (_, whole) in zip(parts, slices, strict=True) if part.numel()]
