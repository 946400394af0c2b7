"""What a layout costs: seconds of a step and bytes of a rank, every term of them, for columns of candidates. Closed
form; docs/planner.md has each formula. Time on the chip is computed for the distinct (tp, cp, ep, etp, micro-batch,
precision) only and spread over the rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from phalanx.plan import memory as mem
from phalanx.plan.candidates import CHUNK, Candidates
from phalanx.plan.layers import Layers, layers_of
from phalanx.plan.machine import Machine
from phalanx.plan.model import CONVENTIONS, ModelShape, Num
from phalanx.plan.network import Group, hide
from phalanx.plan.profiles import CONSTANTS, Constants, Profile
from phalanx.plan.schedule import F1B, GPIPE, bubble_s, divides, stage_layers

if TYPE_CHECKING:
    from phalanx.hardware import Cluster

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
    "optimizer": "30 B x parameters of the rank / HBM",
    "straggler": "E[max] over nodes: sigma sqrt(2 ln nodes) of the above",
    "fixed": "host work per step",
}


@dataclass(frozen=True)
class Costs:
    """A column per term; `seconds` add up to the step, `memory` to what a rank reserves."""

    seconds: dict[str, Num]
    memory: dict[str, Num]
    micro_batches: Num
    valid: Num  # the batch and the degrees divide as they must
    capacity_bytes: Num
    chips: Num
    tokens: Num  # of a step
    flops: dict[str, Num]  # of a token, by convention
    peak: Num  # FLOP/s of a chip in the candidate's precision
    setup_s: Num  # communicators, once per start

    @cached_property
    def step_s(self) -> Num:
        return sum(self.seconds.values())

    @cached_property
    def memory_bytes(self) -> Num:
        return sum(self.memory.values())

    @property
    def margin(self) -> Num:
        """Share of the chip's memory that is left; negative: it does not fit."""
        return 1 - self.memory_bytes / self.capacity_bytes

    @property
    def possible(self) -> Num:
        """It would run, if only with all the rest of the memory: what is allocated fits, whatever is reserved."""
        return self.memory_bytes - self.memory["allocator"] <= self.capacity_bytes

    @property
    def tokens_per_s_per_chip(self) -> Num:
        return self.tokens / self.step_s / self.chips

    def mfu(self, convention: str = "causal") -> Num:
        """Of the peak of the precision that the matmuls run in."""
        return self.flops[convention] * self.tokens_per_s_per_chip / self.peak


def evaluate(
    shape: ModelShape,
    cluster: Cluster | Machine,
    candidates: Candidates,
    global_batch: Num,
    profile: Profile | None = None,
    k: Constants = CONSTANTS,
) -> Costs:
    """Costs of every candidate, in chunks that stay in cache. `global_batch` in samples. Shape, machine and profile
    may be columns with a row per candidate (published runs); then all rows are one chunk."""
    machine = cluster if isinstance(cluster, Machine) else Machine.of(cluster)
    profile = profile or Profile()
    if np.ndim(shape.layers) or len(candidates) <= CHUNK:
        return _evaluate(shape, machine, candidates, global_batch, profile, k)
    parts = [_evaluate(shape, machine, part, global_batch, profile, k) for part in candidates.chunks()]
    return _join(parts)


def step_seconds(
    shape: ModelShape, machine: Machine, c: Candidates, global_batch: Num, profile: Profile, k: Constants
) -> dict[str, Num]:
    """The terms of a step alone."""
    return _seconds(shape, machine, c.as_floats(), global_batch, profile, k, layers_of(shape, machine, profile, k, c))


def _seconds(
    shape: ModelShape, machine: Machine, c: Candidates, global_batch: Num, profile: Profile, k: Constants, on: Layers
) -> dict[str, Num]:
    m = _micro_batches(c, global_batch)
    whole = on.forward + on.backward + on.weights
    layers, has_head = stage_layers(shape.layers, c.pp, c.vpp, (on.head_f + on.head_b) * shape.layers / whole)
    part = layers / shape.layers
    extra = (on.tp + on.cp + on.ep + on.launch) * part
    head_w = has_head * on.head_b / 2
    f = part * on.forward + has_head * on.head_f + extra / 3
    d = part * on.backward + head_w + extra * (2 / 3)
    w = part * on.weights + head_w * profile.trained
    params = mem.rank_params(shape, c)
    groups = _groups(shape, c, machine, profile, k)
    local = np.where(c.zero >= 1, mem.sharded(c, *params), sum(params))
    part = m * part
    seconds = {
        "matmul": part * on.matmul,
        "attention": part * on.attention,
        "elementwise": part * on.elementwise,
        "head": m * has_head * (on.head_f + on.head_b),
        "recompute": part * on.again,
        "launch": part * on.launch,
        "tp": part * on.tp,
        "cp": part * on.cp,
        "ep": part * on.ep,
        "fsdp": _fsdp(c, profile, k, params, groups, f, d + w, m),
        "pp": _pipe(shape, machine, c, profile, k, m),
        "bubble": bubble_s(c.schedule, c.pp, c.vpp, m, f, d, w),
        "dp": _data(c, machine, profile, k, params, groups, f, d + w, m) * profile.trained,
        "optimizer": 30 * local * profile.trained / (machine.memory_bytes_per_s * k.memory) + 1e-3,
    }
    nodes = np.maximum(machine.chips / machine.node, 1.0)
    seconds["straggler"] = k.sigma * np.sqrt(2 * np.log(nodes)) * sum(seconds.values())
    seconds["fixed"] = np.broadcast_to(k.fixed_s, np.shape(m))
    return seconds


def _micro_batches(c: Candidates, global_batch: Num) -> Num:
    return np.maximum(np.floor(global_batch / (c.data_ranks * c.micro_batch)), 1)


def _evaluate(
    shape: ModelShape, machine: Machine, c: Candidates, global_batch: Num, profile: Profile, k: Constants
) -> Costs:
    on = layers_of(shape, machine, profile, k, c)
    rows, precision = np.shape(c.tp), c.precision
    c = c.as_floats()
    m = _micro_batches(c, global_batch)
    valid = (m * c.data_ranks * c.micro_batch == global_batch) & (shape.layers >= c.pp * c.vpp) & (shape.heads >= c.tp)
    if np.any(shape.experts):
        valid = valid & divides(c.ep * c.etp, c.tp * c.cp * c.shard) & (shape.experts >= c.ep)
    return Costs(
        seconds=_seconds(shape, machine, c, global_batch, profile, k, on),
        memory=mem.memory_bytes(shape, c, m, profile, on.saved_bytes, on.layer_bytes),
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
    """Communicators of a whole job: 14.5 s, 55.7 s, 265 s at 8k, 32k, 96k ranks with NCCL (arXiv:2510.20171): a share
    linear in the ranks and one quadratic."""
    return 1.0 + 1.3e-3 * world + 1.5e-8 * world * np.asarray(world, dtype=float)


def _fsdp(
    c: Candidates, profile: Profile, k: Constants, params: tuple[Num, Num], groups: list[Group], f: Num, b: Num, m: Num
) -> Num:
    """Zero 3: weights gathered for the forward and again for the backward pass, gradients scattered, each micro-batch,
    hidden as far as compute lasts."""
    on = mem.zero_stage(c, profile) >= 3
    if not np.any(on):
        return np.zeros(np.shape(m))
    gather = sum(group.gather_s(2 * p, k) for group, p in zip(groups, params, strict=False))
    return np.where(on, m * (hide(gather, f, k) + hide(2 * gather, b, k)), 0.0)


def _data(
    c: Candidates, machine: Machine, profile: Profile, k: Constants, params: tuple[Num, Num], groups: list[Group],
    f: Num, b: Num, m: Num,
) -> Num:  # fmt: skip
    """Across data ranks, once a step: gradients scattered over shard x cp (zero 0: reduced) and reduced over replica,
    weights gathered. The last micro-batch's backward hides the one, the next step's first forward the other; of an
    interleaved pipeline most chunks are done before the last."""
    down: Num = 0.0
    up: Num = 0.0
    bytes_each = profile.grad_bytes
    for group, p in zip(groups, params, strict=False):
        down = down + group.gather_s(bytes_each * p, k) + np.ceil(bytes_each * p / c.bucket_bytes) * k.launch_s
        up = up + group.gather_s(2 * p, k)
    stage = mem.zero_stage(c, profile)
    if np.any(stage == 0):
        plain = groups[0].reduce_s(bytes_each * sum(params), k)
        down, up = np.where(stage == 0, plain, down), np.where(stage == 0, 0.0, up)
    stepwise = stage >= 3
    down, up = np.where(stepwise, 0.0, down), np.where(stepwise, 0.0, up)
    if np.any(c.replica > 1):
        outer = Group.of(machine, c.replica, c.tp * c.cp * c.shard * c.pp, profile.network, k)
        part = np.where(stage >= 1, mem.sharded(c, *params), sum(params))
        down = down + outer.reduce_s(bytes_each * part, k)
    window = 1 + (np.minimum(c.pp, m) - 1) * (c.vpp - 1) / c.vpp
    return hide(down, b * window, k) + hide(up, f * window, k)


def _groups(shape: ModelShape, c: Candidates, machine: Machine, profile: Profile, k: Constants) -> list[Group]:
    """Who holds the same weights: outside the experts shard x cp, inside what ep and etp leave of a stage's ranks."""
    shards, inside = c.shard * c.cp, c.ep * c.etp
    groups = [Group.of(machine, shards, c.tp, profile.network, k)]
    if np.any(shape.experts):
        groups.append(Group.of(machine, np.maximum(1.0, c.tp * shards / inside), inside, profile.network, k))
    return groups


def _pipe(shape: ModelShape, machine: Machine, c: Candidates, profile: Profile, k: Constants, m: Num) -> Num:
    """Sends between stages: hidden behind the other chunk's work when interleaved, else waited for."""
    if not np.any(c.pp > 1):
        return np.zeros(np.shape(m))
    group = Group.of(machine, c.pp, c.tp * c.cp * c.shard, profile.network, k)
    size = 2 * c.micro_batch * shape.seq * shape.hidden / (c.cp * np.where(profile.sequence_parallel, c.tp, 1))
    waited = np.where((c.schedule == GPIPE) | (c.schedule == F1B), 1.0, k.interference)
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
