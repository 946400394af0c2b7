"""Experts on one accelerator: grouped products against a dense product of the same FLOPs; the whole feed-forward of the
experts with its roundings; and a training step of the engine on DeepSeek's and Mixtral's experts, in bf16, in fp8, and
in fp8 with the experts left in bf16. All of them take turns, so that the card is equally warm for each.

Bar: grouped products in bf16 reach 0.72 of the dense product's speed, evenly filled or skewed (log-normal, 0.7); first
losses in bf16 and fp8 agree to 0.01; a step in fp8 is no slower than in bf16.

    benchmarks/gpu_experts.py [--shapes deepseek,mixtral] [--rounds 4] [--smoke]"""

from common import SMOKE, bootstrap, finish, machine, options  # isort: skip  (first: it makes tests/ importable)

import gc
import statistics
import time
from typing import NamedTuple

import torch

from benchmarks import gpu_step_cases
from benchmarks.gpu_step_cases import SHAPES, Ours, Shape, job_of
from phalanx.core.layout import Coord
from phalanx.core.shape import ModelConfig
from phalanx.kernels import fp8_experts
from phalanx.model import init, load_family
from phalanx.model.grouped import grouped_feed_forward, grouped_linear, input_gradient, weight_gradient
from phalanx.parallel import fused
from phalanx.parallel.device import Device
from phalanx.parallel.fused import FusedExperts
from phalanx.parallel.groups import Groups
from phalanx.train import state
from phalanx.train.engine import Engine
from phalanx.train.state import State

EFFICIENCY, LOSS, SKEW = 0.72, 1e-2, 0.7
REPEATS, STEPS = (1, 1) if SMOKE else (6, 4)
TINY = ModelConfig(
    family="moe", vocab_size=256, dim=64, num_heads=4, num_kv_heads=2, num_layers=2, ffn_dim=128, num_experts=4,
    top_k=2, expert_dim=32,
)  # fmt: skip


class Timer:
    """Times functions in turns, so that the card is equally warm for each."""

    def __init__(self, device: Device):
        self.device = device

    def milliseconds(self, functions: dict, rounds: int) -> dict[str, float]:
        for function in functions.values():
            function()
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(rounds):
            for name, function in functions.items():
                begin = self.device.moment()
                for _ in range(REPEATS):
                    function()
                end = self.device.moment()
                times[name].append(1e3 * self.device.seconds_between(begin, end) / REPEATS)
        return {name: statistics.median(some) for name, some in times.items()}


def counts_of(rows: int, experts: int, skewed: bool, where: torch.device) -> torch.Tensor:
    """Return how many rows each expert has: evenly, or by a log-normal distribution."""
    weight = torch.randn(experts, generator=torch.Generator().manual_seed(2)).mul(SKEW if skewed else 0.0).exp()
    ends = (weight.cumsum(0) / weight.sum() * rows).round().long()
    ends[-1] = rows
    return torch.diff(ends, prepend=ends.new_zeros(1)).to(where)


class Sizes(NamedTuple):
    rows: int
    experts: int
    width: int
    inner: int


def sizes_of(shape: Shape) -> Sizes:
    m = shape.model
    return Sizes(shape.batch * shape.seq_len * m.top_k, m.num_experts, m.dim, m.expert_width)


def products(sizes: Sizes, timer: Timer, rounds: int) -> list[dict]:
    """Return one row per product and filling: TFLOP/s of dense, grouped and grouped fp8 products."""
    where, out = timer.device.torch, []
    for name, i, o in (("up", sizes.width, sizes.inner), ("down", sizes.inner, sizes.width)):
        x, grad = (torch.randn(sizes.rows, n, device=where, dtype=torch.bfloat16) for n in (i, o))
        w = torch.randn(sizes.experts * o, i, device=where, dtype=torch.bfloat16)
        for skewed in (False, True):
            counts = counts_of(sizes.rows, sizes.experts, skewed, where)
            for kind, functions in three_ways(x, grad, w, counts).items():
                ms = timer.milliseconds(functions, rounds)
                speed = {key: 2e-9 * sizes.rows * i * o / value for key, value in ms.items()}
                out.append({"product": f"{name}, {kind}", "filled": "skewed" if skewed else "even",
                            **{f"{key}_tflops": round(value, 1) for key, value in speed.items()},
                            "efficiency": round(speed["grouped"] / speed["dense"], 3)})  # fmt: skip
    return out


def three_ways(x: torch.Tensor, grad: torch.Tensor, w: torch.Tensor, counts: torch.Tensor) -> dict[str, dict]:
    """Return the three products of a linear layer, each dense, grouped, and grouped in fp8 with rounded operands."""
    experts, i = counts.shape[0], x.shape[1]
    o = w.shape[0] // experts
    one, groups = w[:o], fp8_experts.by_counts(counts, len(x))
    ends = groups.ends_E
    (x8, xs), (g8, gs) = fp8_experts.round_rows(x), fp8_experts.round_rows(grad)
    xs_E, gs_E = fp8_experts.largest_scales(xs, ends), fp8_experts.largest_scales(gs, ends)
    x8_turned, g8_turned = fp8_experts.turn(x, xs_E, groups), fp8_experts.turn(grad, gs_E, groups)
    weight = fp8_experts.forward_weight(w, experts)
    w8, ws = fp8_experts.backward_weight(w, weight.turned_E)
    assert w8.shape == (experts, o, i)
    return {
        "forward": {
            "dense": lambda: x @ one.T,
            "grouped": lambda: grouped_linear(x, w, counts),
            "fp8": lambda: fp8_experts.by_weights(x8, weight.w8_EIJ, xs, weight.scale_EJ, ends),
        },
        "input gradient": {
            "dense": lambda: grad @ one,
            "grouped": lambda: input_gradient(grad, w, counts),
            "fp8": lambda: fp8_experts.by_weights(g8, w8, gs, ws, ends),
        },
        "weight gradient": {
            "dense": lambda: grad.T @ x,
            "grouped": lambda: weight_gradient(x, grad, counts),
            "fp8": lambda: fp8_experts.over_rows(g8_turned, x8_turned, gs_E, xs_E, groups.padded_E),
        },
    }


def feed_forwards(sizes: Sizes, timer: Timer, rounds: int) -> list[dict]:
    """Time forward and backward of all experts of a layer, roundings included."""
    where, out = timer.device.torch, []
    shapes = [(sizes.rows, sizes.width), (sizes.experts * sizes.inner, sizes.width),
              (sizes.experts * sizes.width, sizes.inner), (sizes.experts * sizes.inner, sizes.width)]  # fmt: skip
    leaves = [torch.randn(s, device=where, dtype=torch.bfloat16).mul_(0.02).requires_grad_() for s in shapes]
    grad = torch.randn(shapes[0], device=where, dtype=torch.bfloat16)
    for skewed in (False, True):
        counts = counts_of(sizes.rows, sizes.experts, skewed, where)
        both = {"bf16": grouped_feed_forward, "fp8": fp8_experts.feed_forward}
        ms = timer.milliseconds(
            {n: lambda f=f, c=counts: torch.autograd.grad(f(*leaves, c), leaves, grad) for n, f in both.items()}, rounds
        )
        out.append({"filled": "skewed" if skewed else "even", **{f"{n}_ms": round(v, 3) for n, v in ms.items()}})
    return out


class Run(Ours):
    """An engine that keeps its place on the device while others take turns with it."""

    def __init__(self, shape, precision, device, groups):
        self.shape, self.job = shape, job_of(shape, precision=precision, moments="bf16")
        family, coord = load_family(shape.model.family), Coord(0, 0, 0)
        device.seed(gpu_step_cases.SEED)  # first values are drawn on the device, in the same order in all runs
        self.device, self.state = device, State.create(self.job, family, coord, device)
        self.engine = Engine(self.job, family, coord, groups, self.state, device)
        self.experts = [m for m in self.engine.model.modules() if isinstance(m, FusedExperts)]
        self.done, self.losses = 0, []

    def step(self, low: bool) -> float:
        for module in self.experts:
            module.low = low
        batch = self.prepare(self.done, 0)
        self.device.synchronize()
        began = time.perf_counter()
        self.losses.append(float(self.run(self.done, batch)))
        self.device.synchronize()
        self.done += 1
        return time.perf_counter() - began


def steps(shape: Shape, device: Device, groups: Groups, rounds: int) -> dict:
    bf16, fp8 = (Run(shape, precision, device, groups) for precision in ("bf16", "fp8"))
    chosen = fp8.experts[0].low  # chosen by the rule
    kinds = {"bf16": (bf16, False), "fp8": (fp8, True), "fp8, experts in bf16": (fp8, False)}
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for run, low in kinds.values():
        run.step(low)
    for _ in range(rounds):
        for name, (run, low) in kinds.items():
            run.step(low)
            times[name] += [run.step(low) for _ in range(STEPS)]
    tokens = shape.batch * shape.seq_len
    ratio, least, most = bootstrap([a / b for a, b in zip(times["bf16"], times["fp8"], strict=True)])
    row = {f"{name}_ms": round(1e3 * statistics.median(some), 1) for name, some in times.items()}
    row |= {f"{name}_tokens_s": round(tokens / statistics.median(some)) for name, some in times.items()}
    row |= {"rule": "fp8" if chosen else "bf16", "fp8_over_bf16": round(ratio, 3), "low": round(least, 3)}
    row |= {"high": round(most, 3), "first_losses_apart": round(abs(bf16.losses[0] - fp8.losses[0]), 5)}
    for run in (bf16, fp8):
        run.engine.close()
    return row


def free(device: Device) -> None:
    """Free the memory of the last shape before the next one needs it."""
    gc.collect()
    if not device.is_cpu:
        torch.accelerator.empty_cache()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--shapes", default="tiny" if SMOKE else "deepseek,mixtral")
    parser.add_argument("--rounds", type=int, default=1 if SMOKE else 4)
    args = parser.parse_args()
    device, rows, ok, began = Device.pick("auto", 0, 1), {}, True, time.perf_counter()
    known = SHAPES | {"tiny": Shape(TINY, 32, 2)}
    timer, shapes = Timer(device), [known[name] for name in args.shapes.split(",")]
    state.draw_all = init.draw_all = gpu_step_cases._draw_on_device
    groups = Groups.form(torch.distributed.HashStore(), 0, job_of(shapes[0]).layout, Coord(0, 0, 0), device, True)
    print(f"{device.describe()}; {machine()}; in fp8 from {fused.FP8_ROWS} rows an expert\n", flush=True)
    for name, shape in zip(args.shapes.split(","), shapes, strict=True):
        sizes = sizes_of(shape)
        print(f"{name}: {sizes}\n{'':24}{'':8}{'dense':>8}{'grouped':>9}{'fp8':>8}  TFLOP/s; grouped / dense")
        grouped = products(sizes, timer, args.rounds)
        for r in grouped:
            speeds = f"{r['dense_tflops']:8}{r['grouped_tflops']:9}{r['fp8_tflops']:8}"
            print(f"{r['product']:24}{r['filled']:8}{speeds}  {r['efficiency']}", flush=True)
        layers = feed_forwards(sizes, timer, args.rounds)
        for r in layers:
            print(f"a layer's experts, {r['filled']}: {r['bf16_ms']} ms in bf16, {r['fp8_ms']} in fp8", flush=True)
        free(device)
        step = steps(shape, device, groups, args.rounds)
        free(device)
        print(f"step: {step}\n", flush=True)
        rows[name] = {"products": grouped, "layer": layers, "step": step}
        ok = ok and min(r["efficiency"] for r in grouped) >= EFFICIENCY
        ok = ok and step["first_losses_apart"] <= LOSS and step["fp8_over_bf16"] >= 1.0
    finish("gpu_experts", not device.is_cpu and ok, device=device.describe(), took_s=round(time.perf_counter() - began),
           rows=rows)  # fmt: skip


if __name__ == "__main__":
    main()
