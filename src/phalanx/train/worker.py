"""A worker: one rank of one job, from assignment to the last step. It reports each step to its node
one step late, so that nothing waits for the device."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it; here the ranks get it with the fork

from phalanx.core.job import Job
from phalanx.core.layout import Coord
from phalanx.data.source import Source, open_source
from phalanx.model.family import Batch, check_family, load_family
from phalanx.observe.progress import Phase
from phalanx.parallel.device import Device
from phalanx.parallel.groups import Groups, connect_store
from phalanx.parallel.shard import COMPUTE_DTYPE
from phalanx.train.engine import Engine, StepResult
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
    store = connect_store(args["store"]["host"], args["store"]["port"])
    groups = Groups.form(store, args["generation"], job.layout, coord, device, bool(family.experts), job.collectives)
    engine = Engine(job, family, coord, groups, state, device, mark=channel.progress.mark)
    source = open_source(job, Path(args["run_dir"]))
    channel.send({"type": "facts", **_facts(job, engine, device)})
    channel.send({"type": "ready"})
    previous: tuple[int, float, StepResult] | None = None
    while state.step < job.train.steps:
        began, step = time.perf_counter(), state.step
        channel.progress.mark(Phase.loading, step=step)
        batches = [micro_batch(job, source, step, i) for i in engine.indices]
        result = engine.step(batches)
        if previous:
            _report(channel, coord, *previous)
        previous = (step, time.perf_counter() - began, result)
    if previous:
        _report(channel, coord, *previous)
    channel.progress.mark(Phase.done)
    channel.send({"type": "done", "digest": state.digest(), "step": state.step})
    engine.close()
    groups.close()


def num_threads(job: Job, local_ranks: int) -> int:
    """CPU threads of a rank. A matrix product's last bits depend on them, so the exact reduction does
    not let them follow the number of ranks."""
    if job.run.threads or job.train.reduction == "exact":
        return job.run.threads or 1
    return max(1, len(os.sched_getaffinity(0)) // local_ranks)


def micro_batch(job: Job, source: Source, step: int, index: int) -> Batch:
    """Micro-batch `index` of a step: a function of the job alone, not of the rank."""
    first = step * job.train.global_batch + index * job.train.micro_batch
    s = source.samples(range(first, first + job.train.micro_batch))
    masked = job.train.document_mask and s.documents_BL is not None
    documents = torch.from_numpy(s.documents_BL) if masked else None
    return Batch(
        torch.from_numpy(s.tokens_BL), torch.from_numpy(s.targets_BL), torch.from_numpy(s.weights_BL), documents
    )


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


def _report(channel: Any, coord: Coord, step: int, time_s: float, result: StepResult) -> None:
    loss_sums, norm = [float(x) for x in result.loss_sums.tolist()], float(result.grad_norm)
    if not (math.isfinite(norm) and all(map(math.isfinite, loss_sums))):
        raise FloatingPointError(
            f"step {step}: the loss is {math.fsum(loss_sums)} and the gradient norm {norm}; "
            "lower optimizer.lr, lengthen optimizer.warmup_steps, or look at the samples of this step"
        )
    counts = coord.tp == 0  # its peers have the same losses; cp ranks have parts of them, other stages none
    channel.send(
        {
            "type": "step",
            "step": step,
            "time_s": time_s,
            "loss_sums": loss_sums if counts else [],
            "tokens": result.local_tokens if counts and coord.cp == 0 and loss_sums else 0,
            "grad_norm": norm,
            "lr": result.lr,
        }
    )
