"""The cost to a rank of planning a save as the world grows to 100,000: Llama 3 405B, tp 8, pp up to 16, weights and
both moments in fp32. For comparison: the coordinator's part of planning in torch's DCP, on local plans made by hand.

Ours is core.checkpoint.Plan.of, in CPU-seconds and peak memory of one rank (the median and the worst of a few spread
over the world), per tensor that the rank holds: a pipeline rank holds fewer of them. That is all the planning there is:
it sends no message, which an audit hook on sockets, files and processes verifies. Neither our figures nor DCP's include
each rank's report that its file is on disk.

DCP's is create_global_plan on rank 0 over all ranks' plans; the pickled bytes of those plans, which go to rank 0 and
back; and the rest of the work with enable_plan_caching from the second save on: a rank compares its plan, and rank 0
sees that none changed. The cost of its ranks' local plans is left out.

Bar: CPU time per tensor held at 100,000 ranks <= 1.5x that at 8; peak memory of a rank no more than at 8 (per tensor it
grows with the number of segments, which is 3 at most: what others write before and after its own rows); no message; the
plans of all ranks together have as many bytes as the state (worlds up to 4,096)."""

from common import SMOKE, finish, machine, options  # isort: skip

import gc
import os
import pickle
import statistics
import sys
import time
import tracemalloc

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _compare_save_plans

from phalanx.core.checkpoint import Entry, Plan
from phalanx.core.held import Held
from phalanx.core.layout import Layout

BAR = 1.5
LAYERS, DIM, FFN, KV, VOCAB = 126, 16384, 53248, 1024, 128256
KINDS = ("weights", "exp_avg", "exp_avg_sq")
BLOCK = {  # name: rows, columns, the dim that tp cuts
    "attention.wq": (DIM, DIM, 0),
    "attention.wk": (KV, DIM, 0),
    "attention.wv": (KV, DIM, 0),
    "attention.wo": (DIM, DIM, 1),
    "ffn.w1": (FFN, DIM, 0),
    "ffn.w2": (DIM, FFN, 1),
    "ffn.w3": (FFN, DIM, 0),
    "attention_norm": (DIM, None, None),
    "ffn_norm": (DIM, None, None),
}
WORLDS = {  # tp 8 everywhere
    8: Layout(tp=8),
    64: Layout(tp=8, pp=8),
    512: Layout(tp=8, pp=16, shard=4),
    4096: Layout(tp=8, pp=16, shard=32),
    32768: Layout(tp=8, pp=16, shard=32, replica=8),
    100_000: Layout(tp=8, pp=10, shard=25, replica=50),
}
CHECKED = 4096
DCP_WORLDS = {world: WORLDS[world] for world in (8, 64, 512)} | {2048: Layout(tp=8, pp=16, shard=16)}
ROUNDS, SAMPLES = 9, 7
if SMOKE:
    LAYERS, ROUNDS, SAMPLES = 10, 1, 2  # a layer for each of the ten stages of the largest world
    CHECKED, DCP_WORLDS = 64, {8: WORLDS[8]}


def entries_of(layout: Layout) -> list[Entry]:
    def held(name, rows, cols, tp_dim, stage):
        return Held(name, (rows,) if cols is None else (rows, cols), tp_dim, stage)

    last = layout.num_stages - 1
    tensors = [held("tok_embeddings", VOCAB, DIM, 0, 0)]
    for layer in range(LAYERS):
        stage = layer * layout.num_stages // LAYERS
        tensors += [held(f"layers.{layer}.{name}", *how, stage) for name, how in BLOCK.items()]
    tensors += [held("norm", DIM, None, None, last), held("output", VOCAB, DIM, 0, last)]
    return [Entry(Held(f"{kind}/{h.name}", h.shape, h.tp_dim, h.stage), "float32") for kind in KINDS for h in tensors]


def sample(layout: Layout) -> list[int]:
    """Return ranks spread over the world, including the first and the last."""
    return sorted({(layout.world_size - 1) * i // (SAMPLES - 1) for i in range(SAMPLES)})


class Talk:
    """Counts a process's contacts with the outside world. Audit hooks cannot be removed, so it has a switch."""

    def __init__(self):
        self.on, self.count = False, 0
        sys.addaudithook(self._hook)

    def _hook(self, event, _args):
        if self.on and event.startswith(("socket.", "open", "os.", "subprocess.", "mmap.")):
            self.count += 1


def cpu_s(entries: list[Entry], layout: Layout, rank: int) -> float:
    coord = layout.coord(rank)
    began = time.process_time()
    Plan.of(entries, layout, coord)
    return time.process_time() - began


def peak_bytes(entries: list[Entry], layout: Layout, rank: int) -> int:
    coord = layout.coord(rank)
    tracemalloc.start()
    Plan.of(entries, layout, coord)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def ours() -> dict[int, dict]:
    talk = Talk()
    worlds = {world: (layout, entries_of(layout), sample(layout)) for world, layout in WORLDS.items()}
    times: dict[int, dict[int, list[float]]] = {w: {r: [] for r in ranks} for w, (_, _, ranks) in worlds.items()}
    gc.collect()
    gc.disable()  # its pauses depend on other objects in this process
    for _ in range(ROUNDS):
        for i in range(SAMPLES):
            for world, (layout, entries, ranks) in worlds.items():
                times[world][ranks[i]].append(cpu_s(entries, layout, ranks[i]))
    gc.enable()
    out = {}
    for world, (layout, entries, ranks) in worlds.items():
        talk.on, talk.count = True, 0
        plans = {rank: Plan.of(entries, layout, layout.coord(rank)) for rank in ranks}
        talk.on = False
        per_rank = {r: statistics.median(t) for r, t in times[world].items()}
        held = {r: len({s.entry for s in plan.segments}) for r, plan in plans.items()}
        total = None
        if world <= CHECKED:
            plans = (Plan.of(entries, layout, layout.coord(rank)) for rank in range(world))
            total = sum(s.size for plan in plans for s in plan.own)
        out[world] = {
            "entries": len(entries),
            "held": statistics.median(held.values()),
            "ms": 1e3 * statistics.median(per_rank.values()),
            "worst_ms": 1e3 * max(per_rank.values()),
            "us_each": 1e6 * statistics.median(per_rank[r] / held[r] for r in ranks),
            "peak_kb": max(peaks := [peak_bytes(entries, layout, r) for r in ranks]) / 1e3,
            "bytes_each": statistics.median(p / held[r] for p, r in zip(peaks, ranks, strict=True)),
            "messages": talk.count,
            "covered": None if total is None else total == sum(e.held.numel * e.item_bytes for e in entries),
        }
    return out


def local_plan(entries: list[Entry], layout: Layout, rank: int) -> SavePlan:
    """Build the plan that DCP makes from a rank's DTensors; every holder lists its copy of a tensor."""
    coord, items = layout.coord(rank), []
    for entry in entries:
        held = entry.held
        if not held.held_by(layout, coord):
            continue
        r0, r1, c0, c1 = held.bounds(layout, coord)
        two = len(held.shape) > 1
        offsets = torch.Size([r0, c0] if two else [r0])
        sizes = torch.Size([r1 - r0, c1 - c0] if two else [r1 - r0])
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype=torch.float32), torch.Size(held.shape)
        )
        items.append(WriteItem(MetadataIndex(held.name, offsets), WriteItemType.SHARD, tensor_data=data))
    return SavePlan(items, planner_data={})


def dcp(world: int) -> dict:
    layout = DCP_WORLDS[world]
    entries = entries_of(layout)
    gc.disable()  # it would only traverse the objects being created
    plans = [local_plan(entries, layout, rank) for rank in range(world)]
    pickled = [pickle.dumps(plan) for plan in plans]
    gc.enable()
    began = time.process_time()
    for data in pickled:
        pickle.loads(data)
    unpickle_s = time.process_time() - began

    planner = DefaultSavePlanner(enable_plan_caching=True)
    planner._cached_plans_key = f"world-{world}"
    gc.collect()
    began = time.process_time()
    planner.create_global_plan(plans)
    first_s = time.process_time() - began
    again = local_plan(entries, layout, 0)
    began = time.process_time()
    assert _compare_save_plans(again, plans[0])
    planner.create_global_plan([SavePlan([], usable=False)] * world)
    cached_s = time.process_time() - began
    return {
        "items": sum(len(plan.items) for plan in plans),
        "mb": sum(map(len, pickled)) / 1e6,
        "unpickle_s": unpickle_s,
        "global_s": first_s,
        "cached_ms": 1e3 * cached_s,
    }


def main():
    options(__doc__).parse_args()
    print(f"{machine()}\nLlama 3 405B: {len(entries_of(WORLDS[8]))} tensors of weights and moments\n")
    mine = ours()
    print("ours, per rank; median of the ranks sampled, each the median of rounds in turns")
    print(
        f"{'ranks':>8}  {'layout':42}{'tensors':>8}{'CPU ms':>8}{'worst':>7}{'us/tensor':>10}"
        f"{'peak KB':>9}{'B/tensor':>9}{'messages':>9}  all bytes"
    )
    for world, row in mine.items():
        covered = {None: "not counted", True: "yes", False: "NO"}[row["covered"]]
        print(
            f"{world:>8,}  {WORLDS[world].describe().split(' = ')[0]:42}{row['held']:8.0f}{row['ms']:8.2f}"
            f"{row['worst_ms']:7.2f}{row['us_each']:10.2f}{row['peak_kb']:9.0f}{row['bytes_each']:9.0f}"
            f"{row['messages']:9}  {covered}"
        )
    print("\nDCP, on the coordinator, for all ranks")
    print(f"{'ranks':>8}{'items':>10}{'plans MB':>10}{'unpickle s':>12}{'global plan s':>15}{'cached ms':>11}")
    peer = {}
    for world in DCP_WORLDS:
        row = peer[world] = dcp(world)
        print(
            f"{world:>8,}{row['items']:>10,}{row['mb']:10.1f}{row['unpickle_s']:12.2f}{row['global_s']:15.2f}"
            f"{row['cached_ms']:11.2f}"
        )
        gc.collect()
    first, last = mine[8], mine[100_000]
    time_ratio, memory_ratio = last["us_each"] / first["us_each"], last["peak_kb"] / first["peak_kb"]
    messages = sum(row["messages"] for row in mine.values())
    covered = all(row["covered"] is not False for row in mine.values())
    print(
        f"\nfrom 8 to 100,000 ranks: {time_ratio:.2f}x the CPU time per tensor held, {last['ms'] / first['ms']:.2f}x "
        f"per rank;\n{memory_ratio:.2f}x the peak memory of a rank, "
        f"{last['bytes_each'] / first['bytes_each']:.2f}x per tensor"
    )
    finish(
        "checkpoint_planning",
        time_ratio <= BAR and memory_ratio <= 1 and messages == 0 and covered,
        time_ratio=round(time_ratio, 2),
        memory_ratio=round(memory_ratio, 2),
        messages=messages,
        ours={w: {"ms": round(r["ms"], 2), "peak_kb": round(r["peak_kb"])} for w, r in mine.items()},
        dcp={w: {"global_s": round(r["global_s"], 2), "mb": round(r["mb"], 1)} for w, r in peer.items()},
        cores=len(os.sched_getaffinity(0)),
    )


if __name__ == "__main__":
    main()
