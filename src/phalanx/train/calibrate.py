"""Measure in a few minutes what the ranks of this machine really reach. Matrix products by shape and precision,
attention, memory and collectives are timed on all ranks at once, as in training, each as often as the time allows. The
slowest rank's times are kept. A single accelerator also trains a few small models: where power is the limit, a product
among other work is faster than products one after the other. `plan.cost.calibrated` makes a machine and a profile of
the times."""

from __future__ import annotations

import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from phalanx.core.errors import UserError
from phalanx.core.job import Job, OptimizerConfig, TrainConfig
from phalanx.core.layout import Coord
from phalanx.core.limits import num_cores
from phalanx.core.shape import ModelConfig
from phalanx.kernels import fp8
from phalanx.model.family import Batch, load_family
from phalanx.model.grouped import grouped_linear
from phalanx.parallel.device import Device
from phalanx.parallel.groups import Groups
from phalanx.parallel.rendezvous import TIMEOUT, MeetingStore
from phalanx.plan.cost.measurements import FORMAT
from phalanx.train.engine import Engine
from phalanx.train.state import State

SAMPLE_S = 2e-3  # a sample repeats a short call until it lasts this long: clocks and launches take time
SAMPLES = (3, 40)  # at least, at most
SHARES = {"matmul": 0.4, "attention": 0.15, "memory": 0.05, "grouped": 0.05, "collectives": 0.35}  # shares of the time
WARM_UP_S = 2.0  # of products on an accelerator: its clocks and its temperature are then those of training
GROUP = 4  # query heads per key/value head
STEPS = (3, 4)  # samples of a model, steps in each
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Grid:
    """The shapes that are timed."""

    sides: tuple[int, ...]  # rows, columns and inner widths of products, in every combination
    sequences: tuple[int, ...]
    head_dims: tuple[int, ...]
    heads: int
    stream_bytes: tuple[int, ...]
    message_bytes: tuple[int, ...]
    precisions: tuple[str, ...] = ("bf16", "fp32")  # of products
    experts: tuple[tuple[int, int, int, int], ...] = ()  # their number, rows in all, columns, inner width
    # Tokens of a sample, samples of a micro-batch, micro-batches, compiled or not.
    trained: tuple[tuple[ModelConfig, int, int, int, bool], ...] = ()


def _model(dim: int, layers: int, heads: int, kv_heads: int, ffn: int, **more: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "dim": dim,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "ffn_dim": ffn,
    }
    return ModelConfig(vocab_size=32_768, **sizes, **more)


CPU = Grid((128, 512, 1536), (256, 1024), (64, 128), 4, (1 << 20, 1 << 25), tuple(1 << e for e in (12, 15, 18, 21, 24)))
ACCELERATOR = Grid(
    (2048, 4096, 12288), (2048, 8192, 32768), (64, 128), 16, (1 << 26, 1 << 30),
    tuple(1 << e for e in (12, 16, 20, 24, 28)), ("bf16", "fp8"),
    ((16, 32768, 1408, 1024), (64, 98304, 1408, 2048), (8, 32768, 14336, 4096)),
    (
        (_model(2048, 4, 32, 8, 8192), 4096, 4, 1, True), (_model(4096, 2, 32, 8, 14336), 8192, 2, 1, True),
        (_model(1024, 6, 16, 16, 2816), 2048, 16, 1, True), (_model(2048, 4, 32, 8, 8192), 4096, 4, 1, False),
        (_model(1024, 4, 16, 16, 2816, family="moe", num_experts=16, top_k=2, expert_dim=1408), 4096, 8, 1, True),
        (_model(256, 8, 4, 4, 704), 512, 1, 2, True), (_model(256, 8, 4, 4, 704), 512, 1, 2, False),
        (_model(256, 8, 4, 4, 704, family="moe", num_experts=8, top_k=2, expert_dim=256), 512, 1, 2, True),
        (_model(256, 8, 4, 4, 704, family="moe", num_experts=8, top_k=2, expert_dim=256), 512, 1, 2, False),
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    section: str
    what: dict[str, Any]  # goes into the file
    prepare: Callable[[], Callable[[], object]]  # makes the tensors; the result is what is timed


def cases(grid: Grid, device: Device, ranks: int) -> Iterator[Case]:
    where = device.torch
    dtypes = [dtype for dtype in grid.precisions if dtype != "fp8" or device.has_fp8]
    for dtype, (m, n, k) in itertools.product(dtypes, itertools.product(grid.sides, repeat=3)):
        yield Case("matmul", {"dtype": dtype, "m": m, "n": n, "k": k}, partial(_product, dtype, (m, n, k), where))
    for length, width, backward in itertools.product(grid.sequences, grid.head_dims, (False, True)):
        batch = max(grid.sequences) // 2 // length or 1
        what = {"batch": batch, "heads": grid.heads, "seq": length, "head_dim": width, "backward": backward}
        yield Case("attention", what, partial(_attention, (batch, grid.heads, length, width), backward, where))
    for number, rows, n, k in grid.experts:
        what = {"experts": number, "rows": rows, "n": n, "k": k}
        yield Case("grouped", what, partial(_grouped, number, rows, n, k, where))
    for size in grid.stream_bytes:
        yield Case("memory", {"size_bytes": 3 * size}, partial(_stream, size, where))
    for kind, size in itertools.product(COLLECTIVES, grid.message_bytes):
        if ranks > 1:
            numel = -(-size // (4 * ranks)) * ranks  # of fp32, in equal slices
            call = {"kind": kind, "ranks": ranks, "size_bytes": 4 * numel}
            yield Case("collectives", call, partial(_collective, kind, numel, ranks, where))


def _product(dtype: str, shape: tuple[int, int, int], where: torch.device) -> Callable[[], object]:
    m, n, k = shape
    if dtype == "fp8":
        one = torch.ones((), device=where)
        a, b = (torch.randn(*size, device=where).to(fp8.FORWARD) for size in ((m, k), (n, k)))
        return lambda: fp8.product(a, b, one, one)
    a, b = (torch.randn(*size, device=where).to(DTYPES[dtype]) for size in ((m, k), (n, k)))
    return lambda: F.linear(a, b)


def _grouped(number: int, rows: int, n: int, k: int, where: torch.device) -> Callable[[], object]:
    x, w = (torch.randn(*size, device=where).to(torch.bfloat16) for size in ((rows, k), (number * n, k)))
    counts = torch.full((number,), rows // number, device=where)
    return lambda: grouped_linear(x, w, counts)


def _attention(shape: tuple[int, ...], backward: bool, where: torch.device) -> Callable[[], object]:
    """Prepare causal attention in bf16, with several query heads per key/value head."""
    batch, heads, length, width = shape
    few = (batch, max(1, heads // GROUP), length, width)
    sizes = (shape, few, few)
    q, k, v = (torch.randn(s, device=where, dtype=torch.bfloat16, requires_grad=backward) for s in sizes)
    if not backward:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)


def _stream(size_bytes: int, where: torch.device) -> Callable[[], object]:
    """Prepare an addition that reads two tensors and writes one."""
    a, b, out = (torch.ones(size_bytes // 4, device=where) for _ in range(3))
    return lambda: torch.add(a, b, out=out)


def _collective(kind: str, numel: int, ranks: int, where: torch.device) -> Callable[[], object]:
    """Prepare a collective as FSDP2 and the reducer call it; the whole buffer has `numel` elements."""
    group: Any = dist.group.WORLD
    whole, other, part = (torch.zeros(n, device=where) for n in (numel, numel, numel // ranks))
    calls: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: group.allreduce([whole]),
        "all-gather": lambda: group._allgather_base(whole, part),
        "reduce-scatter": lambda: group._reduce_scatter_base(part, whole),
        "all-to-all": lambda: group.alltoall_base(other, whole, [], []),
    }
    return lambda: calls[kind]().wait()


class Stopwatch:
    """Times a call on all ranks. They agree on the number of calls, since a collective waits for everybody."""

    def __init__(self, device: Device, ranks: int):
        self.device, self.ranks = device, ranks

    def time(self, run: Callable[[], object], budget_s: float) -> dict[str, Any]:
        run()
        (once,) = self._slowest([self._sample(run, 1)])
        inner = max(1, math.ceil(SAMPLE_S / once))
        number = min(max(SAMPLES[0], int(budget_s / (once * inner))), SAMPLES[1])
        samples = sorted(self._sample(run, inner) for _ in range(number))
        low, median, high = self._slowest([samples[number * q // 4] for q in (1, 2, 3)])
        return {"median_s": median, "low_s": low, "high_s": high, "samples": number}

    def _sample(self, run: Callable[[], object], times: int) -> float:
        self.device.synchronize()
        start = time.perf_counter()
        for _ in range(times):
            run()
        self.device.synchronize()
        return (time.perf_counter() - start) / times

    def _slowest(self, seconds: list[float]) -> list[float]:
        values = torch.tensor(seconds, dtype=torch.float64, device=self.device.torch)
        if self.ranks > 1:
            dist.all_reduce(values, dist.ReduceOp.MAX)
        return values.tolist()


def measure(
    device: Device, ranks: int, grid: Grid, seconds: float, tell: Callable[[str, int, int], None]
) -> dict[str, list[dict[str, Any]]]:
    """Time every case; return by section what it was and how long it took."""
    watch, listed = Stopwatch(device, ranks), list(cases(grid, device, ranks))
    if not device.is_cpu:
        device.choose_kernels(False)  # those of training that is not exact
        _warm_up(device, max(grid.sides))
    found: dict[str, list[dict[str, Any]]] = {section: [] for section in SHARES}
    number = {section: sum(case.section == section for case in listed) for section in SHARES}
    for done, case in enumerate(listed):
        tell(case.section, done, len(listed))
        budget_s = seconds * SHARES[case.section] / number[case.section]
        found[case.section].append(case.what | watch.time(case.prepare(), budget_s))
    found["steps"] = []
    for done, model in enumerate(grid.trained if ranks == 1 else ()):
        tell("steps", done, len(grid.trained))
        found["steps"].append(_train(*model, device))
    return found


def _warm_up(device: Device, side: int) -> None:
    run, began = _product("bf16", (side, side, side), device.torch), time.perf_counter()
    while time.perf_counter() - began < WARM_UP_S:
        run()
        device.synchronize()


def _train(model: ModelConfig, seq: int, batch: int, micro: int, compiled: bool, device: Device) -> dict[str, Any]:
    """Time a step of this engine in bf16, with nothing recomputed and without reading the loss."""
    family, coord = load_family(model.family), Coord(0, 0, 0)
    compiler = "inductor" if compiled else "none"
    train = TrainConfig(
        seq_len=seq, global_batch=batch * micro, micro_batch=batch, precision="bf16", compile=compiler
    )  # fmt: skip
    job = Job(name="calibrate", model=model, train=train, optimizer=OptimizerConfig(lr=1e-4))
    state = State.create(job, family, coord, device)
    groups = Groups.form(dist.HashStore(), 0, job.layout, coord, device, bool(family.experts))
    engine = Engine(job, family, coord, groups, state, device)
    tokens = torch.randint(0, model.vocab_size, (batch, seq + 1))
    batches = [
        Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.ones_like(tokens[:, 1:]), None)
    ] * micro

    def sample(steps: int) -> float:
        device.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            engine.step(batches)
        device.synchronize()
        return (time.perf_counter() - began) / steps

    number, steps = STEPS
    sample(steps)  # compiles, and warms up
    low, median, high = sorted(sample(steps) for _ in range(number))
    engine.close()
    groups.close()
    experts = model.family == "moe"
    return {
        "layers": model.num_layers, "dim": model.dim, "heads": model.num_heads, "kv_heads": model.num_kv_heads,
        "ffn": model.ffn_dim, "vocab": model.vocab_size, "experts": model.num_experts if experts else 0,
        "top_k": model.top_k if experts else 0, "expert_ffn": model.expert_width if experts else 0,
        "seq": seq, "batch": batch, "micro_batches": micro, "compiled": compiled,
        "median_s": median, "low_s": low, "high_s": high, "samples": number,
    }  # fmt: skip


def describe(device: Device, ranks: int) -> dict[str, Any]:
    """Describe the machine well enough to know later which one it was."""
    total, units = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks, 1
    if not device.is_cpu:
        properties = torch.get_device_module(device.torch).get_device_properties(device.torch)
        total, units = properties.total_memory, getattr(properties, "multi_processor_count", 1)
    peak, source = (0.0, "none published") if device.is_cpu else device.peak_flops(torch.bfloat16)
    return {
        "device": device.describe(),
        "host": _processor(),
        "backend": device.backend,
        "ranks": ranks,
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": total,  # of one rank
        "units": units,  # units to which tiles of a product are dealt
        "peak_flops": peak,
        "peak_source": source,
    }


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor() or platform.machine()


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


# -- processes: started by `phalanx calibrate` -------------------------------------------------------------------------


def probe(channel: Any, args: dict[str, Any]) -> None:
    """Report how many ranks there may be."""
    refused, count = "", 0
    try:
        device = Device.pick(args["device"], 0, 1)
        count = 0 if device.is_cpu else torch.accelerator.device_count()
    except UserError as error:
        refused = error.message
    cores = num_cores()
    channel.send({"type": "probe", "accelerators": count, "cores": cores, "refused": refused})
    channel.send({"type": "done"})


def main(channel: Any, args: dict[str, Any]) -> None:
    rank, ranks = args["rank"], args["ranks"]
    torch.set_num_threads(max(1, num_cores() // ranks))
    device = Device.pick(args["device"], rank, ranks)
    if ranks > 1:
        store = MeetingStore(args["store"], ("calibrate", 1))
        dist.init_process_group(device.backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)

    def tell(section: str, done: int, total: int) -> None:
        if rank == 0:
            channel.send({"type": "progress", "section": section, "done": done, "total": total})

    found = measure(device, ranks, CPU if device.is_cpu else ACCELERATOR, args["seconds"], tell)
    if rank == 0:
        head = {"format": FORMAT, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        calibration = {**head, "machine": describe(device, ranks), "versions": versions, **found}
        channel.send({"type": "calibration", "calibration": calibration})
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    channel.send({"type": "done"})
