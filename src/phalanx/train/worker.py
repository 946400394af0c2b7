"""A worker: one rank of one job, from assignment to the last step. It reports each step to its node
one step late, so that nothing waits for the device."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it; here the ranks get it with the fork

from phalanx.core.job import Job
from phalanx.core.layout import Coord
from phalanx.data.feed import Feed
from phalanx.data.samples import digest, places_of, unpack
from phalanx.model.family import Batch, check_family, load_family
from phalanx.observe.progress import Phase
from phalanx.parallel.device import Device
from phalanx.parallel.groups import Groups, connect_store
from phalanx.parallel.shard import COMPUTE_DTYPE
from phalanx.train.engine import Engine, StepResult
from phalanx.train.saving import Saver, resume
from phalanx.train.state import State


def main(channel: Any, args: dict[str, Any]) -> None:
    job, rank = Job.from_dict(args["job"]), int(args["rank"])
    coord = job.layout.coord(rank)
    local_ranks = int(args["local_ranks"])
    torch.set_num_threads(num_threads(job, local_ranks))
    torch.manual_seed(job.seed)
    device = Device.pick(job.run.device, int(args["local_rank"]), local_ranks)
    family = load_family(job.model.family)
    check_family(family, job.model)
    state = State.create(job, family, coord, device)
    if start := args.get("resume"):
        channel.send(resume(job, coord, state, device, start["url"], start["name"], local_ranks))
    store = connect_store(args["store"]["host"], args["store"]["port"])
    groups = Groups.form(store, args["generation"], job.layout, coord, device, bool(family.experts), job.collectives)
    engine = Engine(job, family, coord, groups, state, device, mark=channel.progress.mark)
    peers = job.layout.world_size // job.layout.data_ranks
    source = Batches(job, Feed(args["data"]["address"], engine.indices, state.step, peers))
    saver = None
    if keeper := args.get("keeper"):
        saver = Saver(job, coord, state, groups, device, channel, keeper)
    channel.send({"type": "facts", **_facts(job, engine, device)})
    channel.send({"type": "ready"})
    previous: tuple[int, float, StepResult, dict[str, Any]] | None = None
    while state.step < job.train.steps:
        began, step = time.perf_counter(), state.step
        channel.progress.mark(Phase.loading, step=step)
        batches, fed = source.take(step)
        result = engine.gradients(batches)
        channel.progress.mark(Phase.optimizer)
        if saver:
            fed |= saver.before_update()
        engine.update(result)
        if saver:
            saver.after_update(result.grad_norm)
        if previous:
            _report(channel, coord, *previous)
        previous = (step, time.perf_counter() - began, result, fed)
    if previous:
        _report(channel, coord, *previous)
    channel.progress.mark(Phase.done)
    if saver:
        saver.close()
    channel.send({"type": "done", "digest": state.digest(), "step": state.step})
    engine.close()
    groups.close()


def num_threads(job: Job, local_ranks: int) -> int:
    """CPU threads of a rank. A matrix product's last bits depend on them, so the exact reduction does
    not let them follow the number of ranks."""
    if job.run.threads or job.train.reduction == "exact":
        return job.run.threads or 1
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


class Batches:
    """The micro-batches of a rank, step by step: a function of the job alone, and of which micro-batches they are."""

    def __init__(self, job: Job, feed: Feed):
        self.job, self.feed, self.places = job, feed, places_of(feed.indices, job.train.micro_batch)

    def take(self, step: int) -> tuple[list[Batch], dict[str, Any]]:
        """And what is to be reported of how they came."""
        got = self.feed.take(step)
        samples = unpack(got.rows, self.feed.eos)
        places = self.places + step * self.job.train.global_batch
        fed = {
            "data_wait_s": got.waited_s,
            "data_ready": got.ready,
            "data_digest": f"{digest(got.rows, places.tolist()):016x}",
            "served": got.served,
        }
        self.feed.release(step)
        masked = self.job.train.document_mask and samples.documents_BL is not None
        parts = [samples.tokens_BL, samples.targets_BL, samples.weights_BL]
        cut = [torch.from_numpy(part).split(self.job.train.micro_batch) for part in parts]
        if masked:
            cut.append(torch.from_numpy(samples.documents_BL).split(self.job.train.micro_batch))
        return [Batch(*tensors) for tensors in zip(*cut, strict=True)], fed


def _facts(job: Job, engine: Engine, device: Device) -> dict[str, Any]:
    peak, source = device.peak_flops(COMPUTE_DTYPE[job.train.precision])
    return {
        "device": device.describe(),
        "backend": device.backend,
        "peak_flops": peak,
        "peak_source": source,
        "num_params": engine.num_params,
        "torch": torch.__version__,
    }


def _report(channel: Any, coord: Coord, step: int, time_s: float, result: StepResult, fed: dict[str, Any]) -> None:
    loss_sums, norm = [float(x) for x in result.loss_sums.tolist()], float(result.grad_norm)
    if not (math.isfinite(norm) and all(map(math.isfinite, loss_sums))):
        raise FloatingPointError(
            f"step {step}: the loss is {math.fsum(loss_sums)} and the gradient norm {norm}; "
            "lower optimizer.lr, lengthen optimizer.warmup_steps, or look at the samples of this step"
        )
    counts = coord.tp == 0  # its peers have the same losses; cp ranks have parts of them, other stages none
    if coord.tp or coord.cp or coord.pp:
        fed |= {"served": {}, "data_digest": "0"}  # its peer has had the same samples
    channel.send(
        {
            "type": "step",
            "step": step,
            "time_s": time_s,
            "loss_sums": loss_sums if counts else [],
            "tokens": result.local_tokens if counts and coord.cp == 0 and loss_sums else 0,
            "grad_norm": norm,
            "lr": result.lr,
            **fed,
        }
    )
