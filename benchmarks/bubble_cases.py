"""The rank's part of benchmarks/bubble.py: one step, with the time that the rank was idle."""

import time

import torch
import torch.distributed as dist

from phalanx.core.job import Job
from phalanx.parallel.groups import Groups
from phalanx.parallel.pipeline import Pipe, Stages
from phalanx.parallel.rendezvous import MeetingStore
from tests.cases import CPU, connect


class Watch:
    """Sums the time in which a rank waits for a neighbour, and records the time of each piece of work."""

    def __init__(self):
        self.idle, self.work = 0.0, []

    def waiting(self, take):
        def timed(*args):
            start = time.perf_counter()
            out = take(*args)
            self.idle += time.perf_counter() - start
            return out

        return timed

    def busy(self, kind, stage, micro, start):
        self.work.append([kind, stage, micro, time.perf_counter() - start])


def _meet(group):
    """Release all ranks together, on one clock (they share a host)."""
    dist.barrier(group)
    soon = torch.tensor([time.perf_counter() + 0.05], dtype=torch.float64)
    dist.all_reduce(soon, dist.ReduceOp.MAX, group=group)
    time.sleep(max(0.0, float(soon) - time.perf_counter()))
    return float(soon)


def _row(watch, start, group):
    end = time.perf_counter()
    last = torch.tensor([end], dtype=torch.float64)
    dist.all_reduce(last, dist.ReduceOp.MAX, group=group)
    total = float(last) - start
    idle = watch.idle + float(last) - end  # a rank that is done waits for the last one
    return {"idle": idle, "total": total, "work": watch.work}


def sleeps(args):
    """Run stages that sleep: F, then a backward of twice that, or its two halves of one F each."""
    job = Job.from_dict(args["job"])
    layout, coord = job.layout, job.layout.coord(args["rank"])
    store = MeetingStore(args["store"], ("case", args["generation"]))
    groups = Groups.form(store, args["generation"], layout, coord, CPU)
    group, rows = groups.axis("pp"), []
    for _ in range(args["times"]):
        watch = Watch()
        pipe = Pipe(layout, group, CPU, (16,), torch.float32)
        pipe.take = watch.waiting(pipe.take)

        def forward(stage, micro, x, watch=watch):
            start = time.perf_counter()
            time.sleep(args["seconds"])
            watch.busy("F", stage, micro, start)
            return (torch.zeros(16, requires_grad=True) if x is None else x) * 1.0

        def backward(stage, micro, run, half, watch=watch):
            start = time.perf_counter()
            time.sleep(args["seconds"] * (2 if half == "both" else 1))
            run()
            watch.busy(half, stage, micro, start)

        stages = Stages(layout, coord.pp, pipe, forward, lambda *a: backward(*a))
        if layout.num_stages - 1 in layout.stages_of(coord.pp):
            stages._forward = lambda s, m, x, f=forward: f(s, m, x).sum() if s == layout.num_stages - 1 else f(s, m, x)
        start = _meet(group)
        stages.run(job.micro_per_rank)
        rows.append(_row(watch, start, group))
    groups.close()
    return rows


def compute(args):
    """Run the engine's own steps on a model of equal layers. Equal layers do not take equal time to the millisecond,
    but the formula is about equal stages. So after two steps each kind of work is padded to `slot` times its CPU time
    on the slowest rank."""
    rank, rows, slots = connect(args), [], {}
    for step in range(args["times"] + 2):
        row, cpu = _computed_step(rank, step, slots)
        if step == 1:
            slots = _slowest(cpu, rank.groups.axis("pp"), args["slot"])
        if step > 1:
            rows.append(row)
    rank.close()
    return rows


def _slowest(cpu, group, factor):
    kinds = sorted(cpu)
    median = torch.tensor([sorted(cpu[k])[len(cpu[k]) // 2] for k in kinds], dtype=torch.float64)
    dist.all_reduce(median, dist.ReduceOp.MAX, group=group)
    return dict(zip(kinds, (median * factor).tolist(), strict=True))


def _computed_step(rank, step, slots):
    engine, group, watch, cpu = rank.engine, rank.groups.axis("pp"), Watch(), {}
    kind_of = type(engine)

    def padded(kind, stage, micro, work):
        start, before = time.perf_counter(), time.thread_time()
        out = work()
        cpu.setdefault(kind, []).append(time.thread_time() - before)
        time.sleep(max(0.0, slots.get(kind, 0.0) - (time.perf_counter() - start)))
        watch.busy(kind, stage, micro, start)
        return out

    row = {}

    def finish():
        row.update(_row(watch, start, group))
        type(engine.reducer).finish(engine.reducer)

    engine._forward = lambda *a: padded("F", a[0], a[1], lambda: kind_of._forward(engine, *a))
    engine._backward = lambda *a: padded(a[3], a[0], a[1], lambda: kind_of._backward(engine, *a))
    engine._pipe = lambda: _watched(kind_of._pipe(engine), watch)
    engine.reducer.finish = finish
    batches = rank.batches(step)
    start = _meet(group)
    engine.gradients(batches)
    return row, cpu


def _watched(pipe, watch):
    pipe.take = watch.waiting(pipe.take)
    return pipe
