"""The cost of a layout: every term of a step's seconds and a rank's bytes, in closed form, for columns of candidates.
docs/planner.md has each formula. Time on the chip is computed only for each distinct (tp, cp, ep, etp, micro-batch,
precision) and spread over the rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from phalanx.plan.cost import rank_bytes as mem
from phalanx.plan.cost.bubbles import F1B, GPIPE, bubble_s, divides, stage_layers
from phalanx.plan.cost.candidates import CHUNK, FP32, Candidates
from phalanx.plan.cost.layers import Layers, layers_of
from phalanx.plan.cost.links import Group, hide
from phalanx.plan.cost.machine import Machine
from phalanx.plan.cost.profiles import Profile
from phalanx.plan.cost.sizes import CONVENTIONS, ModelShape, Num
from phalanx.plan.cost.volumes import state_gathers, state_scatters

if TYPE_CHECKING:
    from phalanx.hardware import Cluster

OPTIMIZER_BYTES = 12  # for each local parameter: gradient and master read, master written; moments come on top, twice
COPY_BYTES = 2  # the copy that products read, written as well, except in fp32

TERMS = {  # seconds of a step, on the rank that takes longest
    "matmul": "products with weights, forward and backward, tile and wave efficiency, x micro-batches",
    "attention": "scores and their use, 3.5 x forward, half when causal, x micro-batches",
    "elementwise": "norms, residuals, activation functions, casts, dispatch: bytes / HBM, x micro-batches",
    "head": "logits and loss on the last stage, x micro-batches",
    "recompute": "full: the forward pass again; selective: its cheap part",
    "launch": "what the host needs to launch a layer beyond what the layer takes",
    "tp": "all-gather and reduce-scatter around attention and FFN, what matmuls do not hide",
    "cp": "keys and values around the ring, what attention does not hide",
    "ep": "all-to-all to the experts and back, forward and backward",
    "fsdp": "weights gathered and gradients scattered per micro-batch (zero 3), what compute does not hide",
    "pp": "activations to the next stage, what is not hidden",
    "bubble": "the pipeline filling and draining, by schedule",
    "dp": "gradients reduced, weights gathered (zero 1, 2), what the last backward and first forward do not hide",
    "optimizer": "30 B (22 with moments in bf16) x parameters of the rank / HBM",
    "straggler": "the slowest of N nodes: straggle x ln N / ln 16 of the above",
    "fixed": "host work per step",
}


@dataclass(frozen=True)
class Costs:
    """One column for each term; `seconds` add up to the step, `memory` to what a rank reserves."""

    seconds: dict[str, Num]
    memory: dict[str, Num]
    micro_batches: Num
    valid: Num  # the batch and the degrees divide as they must
    capacity_bytes: Num
    chips: Num
    tokens: Num  # in a step
    flops: dict[str, Num]  # for each token, by convention
    peak: Num  # FLOP/s of a chip in the candidate's precision
    setup_s: Num  # communicators, once per start

    @cached_property
    def step_s(self) -> Num:
        return sum(self.seconds.values())

    @cached_property
    def memory_bytes(self) -> Num:
        return sum(self.memory.values())

    def memory_interval(self, profile: Profile) -> tuple[Num, Num]:
        """Return P5 and P95 of the bytes; the device's context is known exactly."""
        low, high = profile.memory_interval
        context = self.memory["context"]
        rest = self.memory_bytes - context
        return np.exp(low) * rest + context, np.exp(high) * rest + context

    def fits(self, profile: Profile, margin: float = 0.0) -> Num:
        """Return whether the upper end of the memory interval leaves `margin` of the chip's memory free."""
        return self.memory_interval(profile)[1] <= (1 - margin) * self.capacity_bytes

    @property
    def tokens_per_s_per_chip(self) -> Num:
        return self.tokens / self.step_s / self.chips

    def mfu(self, convention: str = "causal") -> Num:
        """Return the share of the peak in the precision that the matmuls run in."""
        return self.flops[convention] * self.tokens_per_s_per_chip / self.peak


def evaluate(
    shape: ModelShape, cluster: Cluster | Machine, candidates: Candidates, global_batch: Num, profile: Profile
) -> Costs:
    """Compute the costs of every candidate, in chunks that stay in cache. `global_batch` is in samples. Shape, machine
    and profile may be columns with a row per candidate (published runs); then all rows are one chunk."""
    machine = cluster if isinstance(cluster, Machine) else Machine.of(cluster)
    if np.ndim(shape.layers) or len(candidates) <= CHUNK:
        return _evaluate(shape, machine, candidates, global_batch, profile)
    return _join([_evaluate(shape, machine, part, global_batch, profile) for part in candidates.chunks()])


def step_seconds(
    shape: ModelShape, machine: Machine, c: Candidates, global_batch: Num, profile: Profile
) -> dict[str, Num]:
    """Compute only the terms of a step's time."""
    return _seconds(shape, machine, c.as_floats(), global_batch, profile, layers_of(shape, machine, profile, c))


def _seconds(
    shape: ModelShape, machine: Machine, c: Candidates, global_batch: Num, profile: Profile, layers: Layers
) -> dict[str, Num]:
    soft, m = profile.software, _micro_batches(c, global_batch)
    whole = layers.forward + layers.backward + layers.weights
    head = layers.head_f + layers.head_b
    most, has_head = stage_layers(shape.layers, c.pp, c.vpp, head * shape.layers / whole)
    part = most / shape.layers
    around = layers.tp + layers.cp + layers.ep
    exposed = (around + layers.launch) * part
    head_w = has_head * layers.head_b / 2
    f = part * layers.forward + has_head * layers.head_f + exposed / 3
    d = part * layers.backward + head_w + exposed * (2 / 3)
    w = part * layers.weights + head_w * soft.trained
    params = mem.rank_params(shape, c)
    groups = _groups(shape, c, machine, profile)
    local = np.where(c.zero >= 1, mem.sharded(c, *params), sum(params))
    memory_rate = machine.memory_bytes_per_s * profile.memory
    part = m * part
    # Added up separately: the first micro-batch is copied (2 or 4 B read, 4 written), others are added (4 more read).
    passed = (8 + c.item_bytes) * m - 4
    added = np.where(np.asarray(soft.adds_apart, bool) & (m > 1), passed * sum(params) / memory_rate, 0.0)
    updated = OPTIMIZER_BYTES + np.where(c.precision == FP32, 0, COPY_BYTES) + 2 * soft.moment_bytes
    # If the host never waits inside a step, it delays only by what the whole step does not hide.
    late = np.maximum(0.0, part * (layers.host - whole - around) + profile.host_s - m * has_head * head)
    seconds = {
        "matmul": part * layers.matmul,
        "attention": part * layers.attention,
        "elementwise": part * layers.elementwise + added,
        "head": m * has_head * head,
        "recompute": part * layers.recompute,
        "launch": np.where(np.asarray(soft.runs_ahead, bool), late, part * layers.launch),
        "tp": part * layers.tp,
        "cp": part * layers.cp,
        "ep": part * layers.ep,
        "fsdp": _fsdp(c, profile, params, groups, most, f, d + w, m, memory_rate),
        "pp": _pipe(shape, machine, c, profile, m),
        "bubble": bubble_s(c.schedule, c.pp, c.vpp, m, f, d, w),
        "dp": _data(c, machine, profile, params, groups, f, d + w, m) * soft.trained,
        "optimizer": updated * local * soft.trained / memory_rate + 1e-3,
    }
    nodes = np.maximum(machine.chips / machine.node, 1.0)
    seconds["straggler"] = profile.straggle * np.log(nodes) / np.log(16) * sum(seconds.values())
    seconds["fixed"] = np.broadcast_to(profile.fixed_s, np.shape(m))
    return seconds if profile.pace == 1.0 else {name: profile.pace * s for name, s in seconds.items()}


def _micro_batches(c: Candidates, global_batch: Num) -> Num:
    return np.maximum(np.floor(global_batch / (c.data_ranks * c.micro_batch)), 1)


def _evaluate(shape: ModelShape, machine: Machine, c: Candidates, global_batch: Num, profile: Profile) -> Costs:
    layers = layers_of(shape, machine, profile, c)
    rows, precision = np.shape(c.tp), c.precision
    c = c.as_floats()
    m = _micro_batches(c, global_batch)
    valid = (m * c.data_ranks * c.micro_batch == global_batch) & (shape.layers >= c.pp * c.vpp) & (shape.heads >= c.tp)
    if np.any(shape.experts):
        valid = valid & divides(c.ep * c.etp, c.tp * c.cp * c.shard) & (shape.experts >= c.ep)
    return Costs(
        seconds=_seconds(shape, machine, c, global_batch, profile, layers),
        memory=mem.memory_bytes(shape, c, m, profile.software, layers.saved_bytes, layers.layer_bytes),
        micro_batches=m,
        valid=valid,
        capacity_bytes=np.broadcast_to(machine.memory_bytes, rows),
        chips=c.world,
        tokens=np.broadcast_to(global_batch * shape.seq, rows),
        flops={name: np.broadcast_to(shape.flops_per_token(name), rows) for name in CONVENTIONS},
        peak=machine.of_precision(machine.peak, precision),
        setup_s=setup_s(c.world),
    )


def setup_s(world: Num) -> Num:
    """Estimate the setup of a job's communicators: 14.5 s, 55.7 s, 265 s at 8k, 32k, 96k ranks with NCCL
    (arXiv:2510.20171), fitted by a linear and a quadratic term in the ranks."""
    return 1.0 + 1.3e-3 * world + 1.5e-8 * world * np.asarray(world, dtype=float)


def _fsdp(
    c: Candidates, profile: Profile, params: tuple[Num, Num], groups: list[Group], layers: Num, f: Num, b: Num, m: Num,
    memory_rate: Num,
) -> Num:  # fmt: skip
    """Zero 3: weights are gathered for each forward and each backward pass and gradients scattered, layer by layer,
    hidden as far as compute lasts; the first layer waits for its own. Gathers and scatters also cost copies."""
    soft = profile.software
    sharded = mem.zero_stage(c, soft) >= 3
    if not np.any(sharded):
        return np.zeros(np.shape(m))
    pairs = list(zip(groups, params, strict=False))
    gather = sum(group.gather_s(c.item_bytes * p, layers) for group, p in pairs)
    scatter = sum(group.gather_s(soft.scatter_bytes * p, layers) for group, p in pairs)
    lost = profile.fsdp_interference
    first = gather / layers
    forward = first + hide(gather - first, f, profile, lost)
    seconds = state_gathers(3, m) / 2 * (forward + hide(gather + scatter, b, profile, lost))
    copied = m * profile.copy_bytes * c.item_bytes / 2 * sum(params) / memory_rate
    return np.where(sharded, seconds + copied, 0.0)


def _data(
    c: Candidates, machine: Machine, profile: Profile, params: tuple[Num, Num], groups: list[Group],
    f: Num, b: Num, m: Num,
) -> Num:  # fmt: skip
    """Across data ranks: gradients are scattered over shard x cp (zero 0: reduced) and reduced over replica; weights
    are gathered. The last micro-batch's backward hides the gradients, the next step's first forward the weights. In an
    interleaved pipeline, most chunks are done before the last."""
    soft = profile.software
    down: Num = 0.0
    up: Num = 0.0
    bytes_each = soft.scatter_bytes
    for group, p in zip(groups, params, strict=False):
        calls = np.ceil(bytes_each * p / c.bucket_bytes)
        down = down + group.gather_s(bytes_each * p, calls)
        up = up + group.gather_s(c.item_bytes * p, calls)
    stage = mem.zero_stage(c, soft)
    if np.any(stage == 0):
        whole = bytes_each * sum(params)
        plain = groups[0].reduce_s(whole, np.ceil(whole / c.bucket_bytes))
        down, up = np.where(stage == 0, plain, down), np.where(stage == 0, 0.0, up)
    # Zero 2 scatters in every micro-batch, behind its own backward; only the last one's shows here.
    repeated = (state_scatters(stage, m) - 1) * hide(down, b, profile)
    stepwise = stage >= 3
    down, up = np.where(stepwise, 0.0, down), np.where(stepwise, 0.0, up)
    if np.any(c.replica > 1):
        outer = Group.of(machine, c.replica, c.tp * c.cp * c.shard * c.pp, profile)
        part = bytes_each * np.where(stage >= 1, mem.sharded(c, *params), sum(params))
        down = down + outer.reduce_s(part, np.ceil(part / c.bucket_bytes))
    window = 1 + (np.minimum(c.pp, m) - 1) * (c.vpp - 1) / c.vpp
    return hide(down, b * window, profile) + hide(up, f * window, profile) + np.where(stage == 2, repeated, 0.0)


def _groups(shape: ModelShape, c: Candidates, machine: Machine, profile: Profile) -> list[Group]:
    """List the groups with equal weights: shard x cp outside the experts, what ep and etp leave of a stage inside."""
    shards, inside = c.shard * c.cp, c.ep * c.etp
    groups = [Group.of(machine, shards, c.tp, profile)]
    if np.any(shape.experts):
        groups.append(Group.of(machine, np.maximum(1.0, c.tp * shards / inside), inside, profile))
    return groups


def _pipe(shape: ModelShape, machine: Machine, c: Candidates, profile: Profile, m: Num) -> Num:
    """Time the sends between stages: hidden behind the other chunk's work when interleaved, exposed otherwise."""
    if not np.any(c.pp > 1):
        return np.zeros(np.shape(m))
    group = Group.of(machine, c.pp, c.tp * c.cp * c.shard, profile)
    split = np.where(profile.software.sequence_parallel, c.tp, 1)
    size = c.item_bytes * c.micro_batch * shape.seq * shape.hidden / (c.cp * split)
    waited = np.where((c.schedule == GPIPE) | (c.schedule == F1B), 1.0, profile.interference)
    return np.where(c.pp > 1, 2 * group.send_s(size) * (m * c.vpp * waited + c.pp - 1), 0.0)


def _join(parts: list[Costs]) -> Costs:
    def together(get: object) -> Num:
        return np.concatenate([np.atleast_1d(get(p)) for p in parts])  # type: ignore[operator]

    columns = ("micro_batches", "valid", "capacity_bytes", "chips", "tokens", "peak", "setup_s")
    tables = ("seconds", "memory", "flops")
    return Costs(
        **{name: together(lambda p, n=name: getattr(p, n)) for name in columns},
        **{t: {key: together(lambda p, t=t, k=key: getattr(p, t)[k]) for key in getattr(parts[0], t)} for t in tables},
    )
