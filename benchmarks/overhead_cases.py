"""The rank's part of benchmarks/engine_overhead.py."""

import resource
import time

import torch
import torch.distributed as dist

from benchmarks.plain_fsdp2 import PlainFSDP2
from phalanx.model.dense import Decoder
from phalanx.train.schedule import learning_rate
from tests.cases import connect


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def interleaved(args):
    rank = connect(args)
    job, c = rank.job, rank.job.optimizer
    model = Decoder(job.model)
    with torch.no_grad():  # the same first weights
        whole = {k: v.full_tensor() for k, v in dict(rank.engine.model.named_parameters()).items()}
        model.load_state_dict(whole)
    mesh = rank.groups.mesh["shard"]
    plain = PlainFSDP2(model, mesh, c.lr, (c.beta1, c.beta2), c.eps, c.weight_decay, c.clip)
    out = {"ours": [], "plain": [], "ours_wall": [], "plain_wall": [], "loss_difference": 0.0}

    def timed(kind, work):
        dist.barrier()
        cpu, wall = _cpu_s(), time.perf_counter()
        result = work()
        dist.barrier()
        out[kind].append(_cpu_s() - cpu)
        out[kind + "_wall"].append(time.perf_counter() - wall)
        return result

    warm_up = 3
    for i in range(args["pairs"] + warm_up):
        batches = rank.batches(i)
        lr = learning_rate(c, i, job.train.steps)
        runs = [
            ("plain", lambda b=batches, lr=lr: float(plain.step(b, lr)[0])),
            ("ours", lambda b=batches: float(rank.engine.step(b).loss_sums.sum())),
        ]
        losses = [timed(kind, work) for kind, work in (runs if i % 2 else runs[::-1])]
        if i < warm_up:
            out["loss_difference"] = max(out["loss_difference"], abs(losses[0] - losses[1]) / abs(losses[0]))
            for kind in ("ours", "plain", "ours_wall", "plain_wall"):
                out[kind].clear()
    rank.close()
    return out
