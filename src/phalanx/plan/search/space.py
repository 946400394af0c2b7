"""The space of layouts: every combination of the axes that a model, a number of chips and a global batch allow. A
`core` fixes all but how the data ranks are split into replica x shard and what ZeRO shards; `children` adds those."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.layout import SPLIT_BACKWARD
from phalanx.hardware import Cluster
from phalanx.plan.cost.candidates import PRECISIONS, RECOMPUTE, SCHEDULES, Candidates
from phalanx.plan.cost.profiles import Profile
from phalanx.plan.cost.sizes import ModelShape
from phalanx.plan.search.runnable import splits_backward_in_fp8, takes_tied_pipelines

MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # used where the batch can be adapted to them
MOST_MICRO = 128
MOST_IDLE = 0.5  # share of the chips, if the given batch does not divide over more of them
MOST_CHUNKS = 24  # per pipeline rank, as published
BUCKETS = (25e6, 40e6, 100e6, 200e6)  # bytes
COLUMNS = (
    "tp", "cp", "pp", "replica", "vpp", "schedule", "micro_batch", "batch", "ep", "recompute", "precision",
)  # fmt: skip
# The schedules of core.layout that the engine compiles; it runs zbv and interleaved-zb in eager mode only.
COMPILED = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a user may ask of a layout."""

    margin: float = 0.0  # share of the chip's memory that must stay free above the upper end of the prediction
    use: float = 0.95  # least share of the chips; the rest can stand by as spares
    tolerance: float = 0.125  # how far the batch may be from the one asked for; 0: the user fixed it
    tp_domain: bool = True  # tensor parallelism inside one scale-up domain only
    schedules: tuple[str, ...] = COMPILED
    precisions: tuple[str, ...] = ("bf16",)
    engine: bool = True  # this engine's own rules: key/value heads are not copied over tp, state is sharded over cp
    pins: dict[str, Any] = field(default_factory=dict)  # fixed columns, such as {"tp": 8}; dp: replica x shard


@dataclass(frozen=True, slots=True)
class Ask:
    """A model, a cluster, the software on it, and a global batch in samples."""

    shape: ModelShape
    cluster: Cluster
    profile: Profile
    batch: int
    limits: Limits = field(default_factory=Limits)
    contains: bool = True  # the software lets other replicas continue when one fails
    failures: float = 0.0  # per 1000 node-days; 0: as published

    def at(self, cluster: Cluster) -> Ask:
        return replace(self, cluster=cluster)


@cache
def divisors(n: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*small, *(n // d for d in small)}))


def _pinned(ask: Ask, name: str, choices: list[int], valid: Callable[[int], bool] = lambda _: True) -> list[int]:
    """Return the choices, or the pinned value, which need not be among them but must be valid."""
    pin = ask.limits.pins.get(name)
    return choices if pin is None else [int(pin)] if valid(int(pin)) else []


def tensor_degrees(ask: Ask) -> list[int]:
    shape, chips = ask.shape, ask.cluster.num_chips
    most = min(chips, ask.cluster.node.scale_up.domain) if ask.limits.tp_domain else chips
    whole = math.gcd(int(shape.heads), int(shape.kv_heads)) if ask.limits.engine else int(shape.heads)
    able = [t for t in divisors(whole) if t <= chips and shape.seq % t == 0]
    return _pinned(ask, "tp", [t for t in able if t <= most], able.__contains__)


def stage_counts(ask: Ask) -> list[int]:
    """List the divisors of the layers, of the layers plus both ends (embedding and head count as one each) and of the
    chips, and powers of two. Only 1 if embedding and head are one matrix and the engine cannot cut between them."""
    layers, chips = int(ask.shape.layers), ask.cluster.num_chips
    most = min(layers, chips)
    if ask.limits.engine and ask.shape.tied and not takes_tied_pipelines():
        most = 1
    powers = {2**i for i in range(layers.bit_length())}
    counts = {*divisors(layers), *divisors(layers + 2), *divisors(chips), *powers}
    return _pinned(ask, "pp", sorted(p for p in counts if p <= most), lambda p: p <= most)


def chunk_counts(ask: Ask, pp: int) -> list[int]:
    """List the model chunks per pipeline rank: 1, and those that cut the layers, or the layers plus both ends, evenly.
    With uneven chunks, ranks wait for each other more than the bubble formula accounts for."""
    layers = int(ask.shape.layers)
    most = layers // pp
    even = [v for v in range(2, min(most, MOST_CHUNKS) + 1) if not layers % (pp * v) or not (layers + 2) % (pp * v)]
    usual = {1, *even}
    return _pinned(ask, "vpp", sorted(usual) if pp > 1 else [1], lambda v: v <= most if pp > 1 else v == 1)


def schedules_of(ask: Ask, pp: int, vpp: int) -> list[int]:
    many, two = ("interleaved", "interleaved-zb"), ("zbv",)
    pin = ask.limits.pins.get("schedule")
    if pp == 1:  # there is nothing to schedule, so a pinned schedule asks for a pipeline
        return [] if pin else [SCHEDULES.index("1f1b")]
    names = [n for n in ([pin] if pin else ask.limits.schedules) if (vpp > 1) == (n in many) or (n in two and vpp == 2)]
    return [SCHEDULES.index(n) for n in names if n not in two or vpp == 2]


def data_ranks(ask: Ask, size: int, idle: bool = True) -> list[int]:
    """List how many groups of `size` ranks work on different samples: as many as the chips allow, or a few less for a
    rounder number. A given batch must be a multiple of it; if that leaves chips over, take the largest number that
    divides the batch, down to half of the chips."""
    most = ask.cluster.num_chips // size
    if "dp" in ask.limits.pins:
        given = int(ask.limits.pins["dp"])
        return [given] if given <= most and (ask.limits.tolerance or ask.batch % given == 0) else []
    least = ask.limits.use * ask.cluster.num_chips / size
    if ask.limits.tolerance == 0:
        able = [d for d in divisors(ask.batch) if d <= most]
        used = [d for d in able if d >= least]
        enough = min(least, MOST_IDLE * ask.cluster.num_chips / size)
        return used or [d for d in able[-1:] if idle and d >= enough]
    return sorted({d for g in (1, 2, 4, 8, 16, 32, 64) if (d := most // g * g) >= least and d > 0})


def _batches(ask: Ask, data: int) -> list[tuple[int, int]]:
    """List (micro-batch, global batch) near enough to the batch asked for."""
    out, choices = [], list(MICRO_BATCHES)
    if ask.limits.tolerance == 0:
        choices = [micro for micro in divisors(ask.batch // data) if micro <= MOST_MICRO]
    for micro in _pinned(ask, "micro_batch", choices):
        rounds = max(1, round(ask.batch / (data * micro)))
        batch = rounds * data * micro
        if abs(batch - ask.batch) <= ask.limits.tolerance * ask.batch:
            out.append((micro, batch))
    return out


def cores(ask: Ask) -> tuple[Candidates, NDArray]:
    """List everything but replica x shard and zero, with the global batch of each; shard is 1 and zero is 0. An
    adjustable batch is kept as it is if it divides over nearly all of the chips."""
    if ask.limits.tolerance and "dp" not in ask.limits.pins:
        exact = _cores(replace(ask, limits=replace(ask.limits, tolerance=0.0)), idle=False)
        if len(exact[1]):
            return exact
    return _cores(ask)


def _cores(ask: Ask, idle: bool = True) -> tuple[Candidates, NDArray]:
    """`idle`: a given batch may leave chips over."""
    shape, limits = ask.shape, ask.limits
    experts = int(shape.experts)
    modes = [RECOMPUTE.index(limits.pins["recompute"])] if "recompute" in limits.pins else list(range(len(RECOMPUTE)))
    names = (limits.pins["precision"],) if "precision" in limits.pins else limits.precisions
    precisions = [PRECISIONS.index(p) for p in names]
    contexts = [c for c in divisors(int(shape.seq)) if c == 1 or (c.bit_count() == 1 and shape.seq // c >= 512)]
    contexts = _pinned(ask, "cp", contexts, lambda c: c == 1 or shape.seq % (2 * c) == 0)
    pipes = {pp: [(v, s) for v in chunk_counts(ask, pp) for s in schedules_of(ask, pp, v)] for pp in stage_counts(ask)}
    blocks = [np.zeros((0, len(COLUMNS)), dtype=np.int64)]
    for tp, cp, pp in itertools.product(tensor_degrees(ask), contexts, pipes):
        if cp > 1 and shape.seq % (2 * cp * tp):
            continue
        for data in data_ranks(ask, tp * cp * pp, idle):
            groups = [e for e in divisors(max(1, experts)) if (tp * cp * data) % e == 0]
            groups = _pinned(ask, "ep", groups, groups.__contains__)
            blocks.append(_product([(tp, cp, pp, data)], pipes[pp], _batches(ask, data), groups, modes, precisions))
    columns = np.concatenate(blocks).T
    c = dict(zip(COLUMNS, columns, strict=True))
    batches = c.pop("batch")
    found = Candidates.of(**c, shard=1, zero=0, bucket_bytes=BUCKETS[-1])
    keep = _rounds(found, batches)
    if limits.engine and not splits_backward_in_fp8():
        split = np.isin(found.schedule, [SCHEDULES.index(name) for name in SPLIT_BACKWARD])
        keep &= ~((found.precision == PRECISIONS.index("fp8")) & split)
    return found.take(keep), batches[keep]


def _product(*parts: Sequence[Any]) -> NDArray:
    """Return a row for each combination of rows of the parts."""
    out = np.zeros((1, 0), dtype=np.int64)
    for part in parts:
        rows = np.array(part, dtype=np.int64).reshape(len(part), -1) if len(part) else np.zeros((0, 1), dtype=np.int64)
        out = np.hstack([np.repeat(out, len(rows), axis=0), np.tile(rows, (len(out), 1))])
    return out if out.shape[1] == len(COLUMNS) else np.zeros((0, len(COLUMNS)), dtype=np.int64)


def _rounds(c: Candidates, batch: NDArray) -> NDArray:
    """Interleaved schedules take the micro-batches of a rank in equal rounds of about pp (core.compat, pp-rounds); with
    fewer than pp of them the ranks would wait for each other in every round."""
    m = batch // (c.data_ranks * c.micro_batch)
    looped = (c.schedule == SCHEDULES.index("interleaved")) | (c.schedule == SCHEDULES.index("interleaved-zb"))
    return ~looped | ((m >= c.pp) & (m % np.maximum(1, m // c.pp) == 0))


@cache
def _splits(data: int, multiple: int, alone: bool, once: bool, bare: bool, pins: tuple[int | None, ...]) -> NDArray:
    """List (shard, zero) for `data` ranks: all shards with ZeRO 1 to 3, or nothing sharded. For the experts, shard
    must be a multiple of `multiple`. `alone`: no cp, over which state is sharded as well. `once`: one micro-batch a
    step: ZeRO-2 scatters gradients in every micro-batch, and the cost model knows one scatter a step. `bare`: nothing
    need be sharded besides cp."""
    zero, shard, replica = pins
    rows = [
        (s, z)
        for s in divisors(data)
        for z in ((0, 1, 2, 3) if zero is None else (zero,))
        if (s == 1 and (alone or bare) if z == 0 else s > 1 or not alone) and (z != 2 or once) and s % multiple == 0
        if shard in (None, s) and replica in (None, data // s)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, 2)


def _groups(ask: Ask, core: Candidates, batch: NDArray) -> Iterator[tuple[NDArray, NDArray]]:
    """Yield rows of the cores that may split their data ranks in the same ways, with those ways."""
    multiple = core.ep // np.gcd(core.ep, core.tp * core.cp)
    alone, once = core.cp == 1, batch == core.replica * core.micro_batch
    key = ((core.replica * (int(multiple.max(initial=0)) + 1) + multiple) * 2 + alone) * 2 + once
    _, first, back = np.unique(key, return_index=True, return_inverse=True)
    pins = tuple(None if p is None else int(p) for p in map(ask.limits.pins.get, ("zero", "shard", "replica")))
    order = np.argsort(back, kind="stable")
    ends = np.cumsum(np.bincount(back, minlength=len(first)))
    for i, row in enumerate(first):
        same = order[ends[i - 1] if i else 0 : ends[i]]
        flags = bool(alone[row]), bool(once[row]), not ask.limits.engine
        yield same, _splits(int(core.replica[row]), int(multiple[row]), *flags, pins)


def children(ask: Ask, core: Candidates, batch: NDArray) -> tuple[Candidates, NDArray]:
    """List every split of the data ranks and every ZeRO stage of these cores, with the batch of each."""
    owners, pairs = [], []
    for rows, splits in _groups(ask, core, batch):
        owners.append(np.repeat(rows, len(splits)))
        pairs.append(np.tile(splits, (len(rows), 1)))
    owner, (shard, zero) = np.concatenate(owners), np.concatenate(pairs).T
    columns = {f.name: getattr(core, f.name)[owner] for f in fields(Candidates)}
    split = {"shard": shard, "replica": columns["replica"] // shard, "zero": zero}
    return Candidates(**columns | split), batch[owner]


def size_of(ask: Ask, core: Candidates, batch: NDArray) -> int:
    """Count the layouts that these cores stand for, with all buckets of each."""
    return len(BUCKETS) * sum(len(rows) * len(splits) for rows, splits in _groups(ask, core, batch))
