"""The exact reduction on one accelerator: two runs from the same weights over the same batches end with the same bits,
at 1 and at 4 micro-batches, and its step is timed against the fast one's, in turns.

Bar: same bits; a step takes at most 1.10 times the fast one's (upper end of the 95 % interval).

    benchmarks/gpu_exact.py [--shape 1.5b] [--rounds 3] [--smoke]"""

from common import SMOKE, finish, machine, options  # isort: skip  (first: it makes tests/ importable)

import random
import statistics
import time
from dataclasses import replace

import torch
import xxhash

from benchmarks.gpu_step_cases import SHAPES, Ours, job_of
from phalanx.core.layout import Coord
from phalanx.model import load_family
from phalanx.parallel.device import Device
from phalanx.parallel.groups import Groups
from phalanx.train.engine import Engine
from phalanx.train.state import State

BAR, NUMBERS, SAME, STEPS = 1.10, (1, 4), 3, 2 if SMOKE else 5


class Run(Ours):
    """An engine that keeps its place on the device while the other one takes turns with it."""

    def __init__(self, shape, number, reduction, device, groups):
        job = job_of(shape, precision="bf16", reduction=reduction, moments="bf16")
        train = replace(job.train, global_batch=number * shape.batch)
        self.shape, self.job, self.number, self.done = shape, replace(job, train=train), number, 0
        family, coord = load_family(shape.model.family), Coord(0, 0, 0)
        self.device, self.state = device, State.create(self.job, family, coord, device)
        self.engine = Engine(self.job, family, coord, groups, self.state, device)

    def step(self):
        batches = [self.prepare(self.number * self.done + i, 0) for i in range(self.number)]
        self.device.choose_kernels(self.job.deterministic)
        self.device.synchronize()
        began = time.perf_counter()
        float(self.engine.step(batches).grad_norm)
        self.device.synchronize()
        self.done += 1
        return time.perf_counter() - began

    def digest(self):
        out = xxhash.xxh3_128()
        for name in self.state.params:
            for part in (self.state.master(name), *self.state.moments(name).values()):
                out.update(part.contiguous().view(-1).view(torch.uint8).cpu().numpy())
        return out.hexdigest()


def ratio(exact, fast, draws=4000):
    """Return the ratio of the medians, with its 95 % interval."""
    rng = random.Random(0)
    drawn = sorted(
        statistics.median(rng.choices(exact, k=len(exact))) / statistics.median(rng.choices(fast, k=len(fast)))
        for _ in range(draws)
    )
    return statistics.median(exact) / statistics.median(fast), drawn[int(0.025 * draws)], drawn[int(0.975 * draws)]


def main():
    parser = options(__doc__)
    parser.add_argument("--shape", default="smoke" if SMOKE else "1.5b")
    parser.add_argument("--rounds", type=int, default=1 if SMOKE else 2)
    args = parser.parse_args()
    shape, device, rows = SHAPES[args.shape], Device.pick("auto", 0, 1), []
    groups = Groups.form(torch.distributed.HashStore(), 0, job_of(shape).layout, Coord(0, 0, 0), device, False)
    print(f"{device.describe()}; {machine()}\n")
    print(f"{'micro-batches':>14}{'exact, ms':>11}{'fast, ms':>10}{'ratio':>8}{'95 % interval':>16}  same bits")
    for number in NUMBERS:
        digests = []
        for last in (False, True):
            exact = Run(shape, number, "exact", device, groups)
            for _ in range(SAME):
                exact.step()
            digests.append(exact.digest())
            if not last:
                exact.engine.close()
                del exact
        fast, times = Run(shape, number, "fast", device, groups), {"exact": [], "fast": []}
        fast.step()
        for _ in range(args.rounds):
            for name, run in (("exact", exact), ("fast", fast)):
                run.step()
                times[name] += [run.step() for _ in range(STEPS)]
        middle, low, high = ratio(times["exact"], times["fast"])
        same = digests[0] == digests[1]
        ms = {f"{name}_ms": round(1e3 * statistics.median(some), 1) for name, some in times.items()}
        rows.append({"micro_batches": number, **ms, "ratio": round(middle, 3), "low": round(low, 3),
                     "high": round(high, 3), "same_bits": same, "ok": same and high <= BAR})  # fmt: skip
        print(f"{number:14}{ms['exact_ms']:11}{ms['fast_ms']:10}{middle:8.3f}{low:9.3f}-{high:.3f}  {same}", flush=True)
        for run in (exact, fast):
            run.engine.close()
        del exact, fast, run
    finish("gpu_exact", not device.is_cpu and all(row["ok"] for row in rows), device=device.describe(), rows=rows)


if __name__ == "__main__":
    main()
