"""How many layouts a second the planner costs in full (memory, time, communication, every term of them) on one core: a
million distinct layouts of Llama 3 405B on 1,048,576 H100, in chunks of 10,000 as the search takes them.

For comparison: Calculon (SC'23), which costs one layout at a time: about 240 a second and core, measured at commit
caa4b11 on a 2-core EPYC; measured again here when its sources can be imported (`pip install` from calculon-ai/calculon,
with its models/, systems/ and examples/ folders beside the package).

And a whole search on 1,000,000 H100, a dense model of 1T parameters and DeepSeek-V3: every layout of the space is
either costed in full or behind a bound that is worse than the best.

Bars: >= 1,000,000 layouts/s and <= 3 s a search, of CPU time, in the best of three passes (the machine may have other
work)."""

from common import SMOKE, finish, machine, options  # isort: skip

import itertools
import json
import logging
import time
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from phalanx.hardware import load
from phalanx.plan.cost.candidates import CHUNK, PRECISIONS, SCHEDULES, Candidates
from phalanx.plan.cost.evaluate import evaluate
from phalanx.plan.cost.machine import Machine
from phalanx.plan.cost.profiles import default_profile
from phalanx.plan.cost.sizes import ModelShape
from phalanx.plan.known_models import published_shape
from phalanx.plan.planner import Request, find, usual_batch
from phalanx.plan.report.arithmetic import DENSE_1T
from phalanx.plan.search.exhaustive import Found
from phalanx.plan.search.space import Ask

BAR = 1_000_000
SEARCH_BAR_S = 3.0
PASSES = 1 if SMOKE else 3
CALCULON = 240  # evaluations per CPU-second, see above
SHAPE = ModelShape.of(126, 16384, 128, 53248, 128256, 8192, kv_heads=8)
GPUS, BATCH = 1_048_576, 131_072


def layouts() -> Candidates:
    """Return every combination of these that fills the cluster: distinct by construction, valid or not."""
    interleaved, plain = SCHEDULES.index("interleaved"), SCHEDULES.index("1f1b")
    powers = (1, 8) if SMOKE else (1, 2, 4, 8, 16, 32, 64)
    degrees = [
        (tp, pp, cp, GPUS // (tp * pp * cp)) for tp, pp, cp in itertools.product(powers, powers, (1, 2, 4, 8, 16))
    ]
    rows = [
        (tp, pp, vpp, cp, data // shard, shard, zero, micro, mode, interleaved if vpp > 1 else plain, precision, bucket)
        for (tp, pp, cp, data) in degrees
        for vpp in (1, 2, 4)
        for shard in (1, 2, 4, 8)
        for zero in (0, 1, 2, 3)
        for micro in (1, 2, 4, 8)
        for mode in (0, 1, 2)
        for precision in range(len(PRECISIONS) - 1)
        for bucket in (40e6, 200e6)
    ]
    columns = np.array(rows).T
    names = ("tp", "pp", "vpp", "cp", "replica", "shard", "zero", "micro_batch", "recompute", "schedule", "precision")
    whole = {name: column.astype(np.int64) for name, column in zip(names, columns[:-1], strict=True)}
    return Candidates.of(**whole, bucket_bytes=columns[-1])


def costed_per_s(candidates: Candidates) -> tuple[float, int]:
    cluster, profile = load().cluster("h100", GPUS), default_profile(load().chip("h100"))
    where = Machine.of(cluster)
    fitting, began = 0, time.process_time()
    for part in candidates.chunks(CHUNK):
        costs = evaluate(SHAPE, where, part, BATCH, profile)
        fitting += int(np.count_nonzero(costs.fits(profile) & costs.valid & (costs.step_s > 0)))
    return len(candidates) / (time.process_time() - began), fitting


def search_s(name: str, shape: ModelShape) -> tuple[float, Found]:
    """Return the time of the fastest pass, and the result."""
    cluster, profile = load().cluster("h100", 1_000_000), default_profile(load().chip("h100"))
    request = Request(name, Ask(shape, cluster, profile, usual_batch(1_000_000, 8192)), 15e12)
    took = []
    for _ in range(PASSES):
        began = time.process_time()
        found = find(request)
        took.append(time.process_time() - began)
    return min(took), found


def calculon_per_s(seconds: float = 0.1 if SMOKE else 5.0) -> float | None:
    """Cost Calculon's own 1T example repeatedly; None: it is not installed."""
    try:
        import calculon
        from calculon.llm import Llm, System
    except ImportError:
        return None
    root, log = Path(calculon.__file__).parent.parent, logging.getLogger("calculon")
    app, execution, system = (
        json.loads((root / name).read_text())
        for name in ("models/megatron-1T.json", "examples/3072_t4_p64_d12_mbs4_full.json", "systems/a100_80e.json")
    )
    count, began = 0, time.process_time()
    while time.process_time() - began < seconds:
        model, machine = Llm(Llm.Application(app), log), System(system)
        model.compile(machine, Llm.Execution.from_json(execution))
        model.run(machine)
        count += 1
    return count / (time.process_time() - began)


def main() -> None:
    options(__doc__).parse_args()
    print(machine())
    candidates = layouts()
    distinct = len({tuple(row) for row in np.stack([getattr(candidates, f.name) for f in fields(candidates)], 1)[::97]})
    assert distinct == len(range(0, len(candidates), 97))
    passes = [costed_per_s(candidates) for _ in range(PASSES)]
    best, fitting = max(passes)
    peer = calculon_per_s()
    print(f"{len(candidates):,} distinct layouts, {fitting:,} of them valid and fitting")
    print(f"phalanx:  {best:>12,.0f} layouts per CPU-second (passes: {', '.join(f'{p:,.0f}' for p, _ in passes)})")
    print(f"calculon: {peer or CALCULON:>12,.0f} ({'measured now' if peer else 'cited'})")
    searches = {}
    dense = replace(DENSE_1T, tied=False)  # a tied embedding rules out pipelines, which leaves little
    for name, shape in (("dense 1T", dense), ("deepseek-v3", published_shape("deepseek-v3", 8192))):
        searches[name], found = search_s(name, shape)
        print(f"search at 1,000,000 GPUs, {name}: {searches[name]:.2f} s of CPU time for {found.considered:,} layouts, "
              f"{found.costed:,} of them costed in full")  # fmt: skip
    ok = best >= BAR and max(searches.values()) <= SEARCH_BAR_S
    finish("planner_speed", ok, layouts=len(candidates), per_s=round(best), bar=BAR, calculon_per_s=peer or CALCULON,
           calculon_measured=peer is not None, times_calculon=round(best / (peer or CALCULON)),
           search_s={name: round(s, 3) for name, s in searches.items()}, search_bar_s=SEARCH_BAR_S)  # fmt: skip


if __name__ == "__main__":
    main()
