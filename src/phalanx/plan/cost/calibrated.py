"""Turn the measurements of `phalanx calibrate` into a machine and a profile for the planner. `machine_from` describes
the measured node itself. `profile_from` refits the few constants that the measurements determine, for that node or for
a catalogue cluster that contains it; the others keep their values from published runs. `train.calibrate` writes the
file; `measurements` reads it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.cost.candidates import PRECISIONS, Candidates
from phalanx.plan.cost.chip import BACKWARD, Chip
from phalanx.plan.cost.evaluate import step_seconds
from phalanx.plan.cost.links import Group
from phalanx.plan.cost.machine import TIERS, Machine
from phalanx.plan.cost.measurements import Attention, Calibration, Call, Grouped, Product, Step, Stream, read
from phalanx.plan.cost.numbers import values
from phalanx.plan.cost.profiles import Kind, Profile, default_profile, profile_of
from phalanx.plan.cost.sizes import ModelShape
from phalanx.plan.cost.software import OWN, costs, software

if TYPE_CHECKING:
    from phalanx.hardware import Cluster

SEARCH, HALVINGS = (1e-4, 1e4), 18  # of a fitted share, and of its logarithm's range
K_HALVES = (0.0, 32.0, 64.0, 128.0, 256.0, 512.0)
HALVES = tuple((length, width) for length in (0.0, 128.0, 256.0, 512.0, 768.0, 1024.0)
               for width in (0.0, 16.0, 32.0, 48.0, 64.0, 80.0, 96.0))  # fmt: skip
LINKS = ("up", "nic", "exchange", "call_s", "up_hop_s", "out_hop_s")
FEW_TOKENS = 2048  # a step with at most this many tokens waits for the host
LEAST_ERROR = 0.1  # ln: a step is more than the calls that were timed


def known_profile(cluster: Cluster, engine: str = OWN, **facts: Any) -> Profile:
    """Return the profile for a cluster that was not measured here. This engine takes the catalogue's calibration of the
    chip, if it has one; anything else is predicted from published runs. Links, and the error of a plan for more chips
    than were calibrated, always come from published runs."""
    default, file = default_profile(cluster.node.chip, engine, **facts), _stored(cluster.node.chip.name)
    if engine != OWN or not file.is_file():
        return default
    with resources.as_file(file) as path:
        profile, ranks = profile_from(path, Machine.of(cluster), **facts), read(path).machine.ranks
    links = {name: getattr(default, name) for name in LINKS}
    profile = replace(profile, **links, name=f"{default.name}, {profile.name}")
    if cluster.num_chips > ranks:
        profile = replace(profile, error=None, generation=default.generation, evidence=default.evidence)
    return profile


def _stored(chip: str) -> Any:
    return resources.files("phalanx.hardware").joinpath("calibrations", f"{chip}.json")


def machine_from(calibration: Calibration) -> Machine:
    """Return the measured node as a machine with one chip per rank. Each figure is the best that was measured; for
    products the published peak replaces it if it is higher."""
    c, node = calibration, calibration.machine
    best = {p: max((x.flops / x.median_s for x in c.matmul if x.dtype == p), default=0.0) for p in PRECISIONS}
    rates = np.array([best[p] or best["bf16"] for p in PRECISIONS])
    link = max((x.sent_bytes / x.median_s for x in c.collectives), default=1e9)
    return Machine(
        peak=rates * max(1.0, node.peak_flops / best["bf16"]),
        memory_bytes=float(node.memory_bytes),
        memory_bytes_per_s=max(x.size_bytes / x.median_s for x in c.memory),
        sms=node.units,
        domain=node.ranks,
        up_bytes_per_s=link,
        nvls=False,
        torus=False,
        nic_bytes_per_s=link,  # there is no other node; nothing may divide by zero
        sharp=False,
        node=node.ranks,
        chips=node.ranks,
        span_chips=np.full(TIERS, float(node.ranks)),
        tier_factor=np.ones(TIERS),
        tier_latency_s=np.zeros(TIERS),
    )


def profile_from(path: str | Path, machine: Machine | None = None, **facts: Any) -> Profile:
    """Fit a profile for plans on `machine`, which contains the calibrated node; None: that node alone. Each share is
    chosen so that half of the calls take longer than predicted and half take less; calls that mostly wait for launches
    and hops are left out. Also fitted are the inner width at which products reach half of their speed (a CPU differs
    from the tiles of an accelerator), and the length and head width at which attention does. `facts` are the job's
    facts about the software."""
    c = read(path)
    machine = machine or machine_from(c)
    soft = software(OWN, **facts)
    start = profile_of(Kind("other", 1.0, 1.0), replace(soft, fused=True), values())
    if not c.machine.device.startswith("cpu"):
        start = replace(start, **costs(OWN, fused=True))
    length, width = min(HALVES, key=lambda halves: _scatter(c, machine, start, *halves))
    start = replace(start, length_half=length, width_half=width)
    products = replace(c, attention=[], grouped=[], collectives=[])
    found = [_fitted(products, machine, replace(start, k_half=inner)) for inner in K_HALVES]
    took = np.array([x.median_s for x in c.matmul])
    near = min(found, key=lambda p: float(np.median(np.abs(np.log(took / _products(c.matmul, machine, p))))))
    best = _fitted(c, machine, replace(start, k_half=near.k_half))
    return _trained(c, machine, best, bool(soft.fused), replace(best, software=soft))


def _scatter(c: Calibration, machine: Machine, profile: Profile, length: float, width: float) -> float:
    """Return how far attention scatters around its best share if it reaches half of its speed at this length and
    width."""
    profile, off = replace(profile, length_half=length, width_half=width), 0.0
    for backward in (False, True):
        rows = [x for x in c.attention if x.backward == backward]
        logs = np.log([x.median_s for x in rows] / _attentions(rows, machine, profile))
        off += float(np.mean(np.abs(logs - np.median(logs))))
    return off


def _trained(c: Calibration, machine: Machine, profile: Profile, fused: bool, asked: Profile) -> Profile:
    """Fit what only whole steps of small models show. Compiled steps give the speed of products among other work, the
    passes of experts and the host's time; unless the job is `fused`, eager steps then refit the passes and the host's
    time."""
    few = [x for x in c.steps if x.seq * x.batch <= FEW_TOKENS]
    many = [x for x in c.steps if x not in few]

    def speed(p: Profile, share: float) -> Profile:
        return replace(p, gemm=share * np.asarray(profile.gemm))

    def passes(p: Profile, share: float) -> Profile:
        return replace(p, passes=1 / share)

    def layer(p: Profile, share: float) -> Profile:
        return replace(p, layer_s=1e-3 / share)

    def experts(p: Profile, share: float) -> Profile:
        return replace(p, experts_s=1e-3 / share)

    compiled: list[tuple[Change, list[Step]]] = [
        (layer, [x for x in few if x.compiled and not x.experts]),
        (experts, [x for x in few if x.compiled and x.experts]),
        (speed, [x for x in many if x.compiled and not x.experts]),
        (lambda p, share: replace(p, permute_passes=1 / share, expert_passes=1 / share),
         [x for x in many if x.compiled and x.experts]),
    ]  # fmt: skip
    for change, rows in compiled:
        profile = _changed(profile, change, _steps, rows, machine) if rows else profile
    if off := [math.log(x.median_s / float(_steps([x], machine, profile)[0])) for x in many if x.compiled]:
        profile = replace(profile, error=(min(*off, -LEAST_ERROR), max(*off, LEAST_ERROR)))
    if fused:
        return replace(profile, software=asked.software)
    eager = {} if c.machine.device.startswith("cpu") else costs(OWN, fused=False)
    profile = replace(profile, **eager, software=asked.software)
    plain, sparse = ([x for x in few if bool(x.experts) == wanted] for wanted in (False, True))
    for change, rows in ((layer, plain), (experts, sparse), (passes, many)):
        rows = [x for x in rows if not x.compiled]
        profile = _changed(profile, change, _steps, rows, machine) if rows else profile
    return profile


def _fitted(c: Calibration, machine: Machine, profile: Profile) -> Profile:
    profile = replace(
        profile, generation="calibrated",
        name=f"calibrated on {c.machine.device}, {c.date}", evidence=f"measurements of {c.date}",
    )  # fmt: skip
    if c.collectives:
        hop_s, call_s = _latencies(c.collectives)
        profile = replace(profile, up_hop_s=hop_s, call_s=call_s)
    errors: list[NDArray] = []
    for change, predict, rows in _parts(c):
        if not rows:
            continue
        took, floor = np.array([x.median_s for x in rows]), predict(rows, machine, change(profile, math.inf))
        telling = [x for x, above in zip(rows, took > 2 * floor, strict=True) if above]
        if not telling:
            continue
        took = np.array([x.median_s for x in telling])
        profile = _changed(profile, change, predict, telling, machine)
        if change is not _with_links:
            errors.append(np.log(took / predict(telling, machine, profile)))
    low, high = np.quantile(np.concatenate([*errors, [0.0]]), [0.05, 0.95])
    return replace(profile, error=(min(float(low), -LEAST_ERROR), max(float(high), LEAST_ERROR)))


def _latencies(calls: list[Call]) -> tuple[float, float]:
    """Return the seconds of a hop and the fixed cost of a collective, from the smallest messages: a ring's all-reduce
    has twice the hops of an all-gather."""
    least = min(x.size_bytes for x in calls)
    took = {x.kind: x.median_s for x in calls if x.size_bytes == least}
    hops = calls[0].ranks - 1
    gather = min(took.get("all-gather", math.inf), took.get("reduce-scatter", math.inf))
    if not math.isfinite(gather):
        gather = took.get("all-reduce", 1e-4) / 2
    hop = max(0.0, (took.get("all-reduce", gather) - gather) / hops) if hops else 0.0
    return min(hop, gather / max(1, hops)), max(1e-6, gather - hops * hop)


Predict = Callable[[Any, Machine, Profile], NDArray]
Change = Callable[[Profile, float], Profile]


def _parts(c: Calibration) -> list[tuple[Change, Predict, list[Any]]]:
    """List what is fitted, in this order. Memory comes first because products wait for it too."""
    forward = [x for x in c.attention if not x.backward]
    return [
        (lambda p, share: replace(p, memory=share), _streams, c.memory),
        (_with_gemm(("bf16", "fp8", "mxfp8", "nvfp4")), _products, [x for x in c.matmul if x.dtype == "bf16"]),
        (_with_gemm(("fp8", "mxfp8", "nvfp4")), _products, [x for x in c.matmul if x.dtype == "fp8"]),
        (_with_gemm(("fp32",)), _products, [x for x in c.matmul if x.dtype == "fp32"]),
        (lambda p, share: replace(p, attention_fwd=share), _attentions, forward),
        (lambda p, share: replace(p, attention_bwd=share), _attentions, [x for x in c.attention if x.backward]),
        (lambda p, share: replace(p, grouped=share), _groups, c.grouped),
        (_with_links, _calls, c.collectives),
    ]


def _with_gemm(names: tuple[str, ...]) -> Change:
    rows = [PRECISIONS.index(name) for name in names]

    def change(profile: Profile, share: float) -> Profile:
        table = np.array(profile.gemm, dtype=float)
        table[rows] = share
        return replace(profile, gemm=table)

    return change


def _with_links(profile: Profile, share: float) -> Profile:
    return replace(profile, up=share, exchange=share)


def _changed(profile: Profile, change: Change, predict: Predict, rows: list[Any], machine: Machine) -> Profile:
    """Apply the share with which half of the rows take longer than predicted. The prediction falls as the share grows,
    so bisection finds it."""
    took = np.array([x.median_s for x in rows])
    low, high = (math.log(bound) for bound in SEARCH)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        slow = np.median(predict(rows, machine, change(profile, math.exp(middle))) / took) > 1
        low, high = (middle, high) if slow else (low, middle)
    return change(profile, math.exp((low + high) / 2))


def _products(rows: list[Product], machine: Machine, profile: Profile) -> NDArray:
    precision = np.array([PRECISIONS.index(x.dtype) for x in rows])
    m, n, inner = (np.array([getattr(x, side) for x in rows], float) for side in ("m", "n", "k"))
    return Chip(machine, profile, precision).gemm_s(m, n, inner)


def _attentions(rows: list[Attention], machine: Machine, profile: Profile) -> NDArray:
    """Predict attention with the formula of chip.py."""
    chip = Chip(machine, profile, np.zeros(len(rows), dtype=int))
    rate = np.where([x.backward for x in rows], chip.attention_b / BACKWARD, chip.attention_f)
    length = np.array([x.seq for x in rows], float)
    width = np.array([x.head_dim for x in rows], float)
    speed = length / (length + profile.length_half) * width / (width + profile.width_half)
    return np.array([x.forward_flops for x in rows]) / (rate * speed)


def _groups(rows: list[Grouped], machine: Machine, profile: Profile) -> NDArray:
    chip = Chip(machine, profile, np.zeros(len(rows), dtype=int))
    number, every, n, inner = (np.array([getattr(x, s) for x in rows], float) for s in ("experts", "rows", "n", "k"))
    return chip.gemm_s(every / number, n, inner, number) / profile.grouped


def _steps(rows: list[Step], machine: Machine, profile: Profile) -> NDArray:
    """Predict whole steps. The host's fixed work once a step counts only where tokens are few; otherwise the device
    hides it."""
    out = []
    for x in rows:
        shape = ModelShape.of(
            x.layers, x.dim, x.heads, x.ffn, x.vocab, x.seq, kv_heads=x.kv_heads, experts=x.experts, top_k=x.top_k,
            expert_ffn=x.expert_ffn,
        )  # fmt: skip
        whole = x.batch * x.micro_batches
        seconds = step_seconds(shape, machine, Candidates.of(micro_batch=x.batch), whole, profile)
        hidden = ("fixed",) if x.seq * x.batch > FEW_TOKENS else ()
        out.append(sum(float(np.ravel(s)[0]) for name, s in seconds.items() if name not in hidden))
    return np.array(out)


def _streams(rows: list[Stream], machine: Machine, profile: Profile) -> NDArray:
    chip = Chip(machine, profile, np.zeros(len(rows), dtype=int))
    return chip.stream_s(np.array([x.size_bytes for x in rows], float), 1)


def _calls(rows: list[Call], machine: Machine, profile: Profile) -> NDArray:
    ranks, size = (np.array([getattr(x, name) for x in rows], float) for name in ("ranks", "size_bytes"))
    kind = np.array([x.kind for x in rows])
    group = Group.of(machine, ranks, 1, profile)
    sums, exchanges = group.reduce_s(size), group.exchange_s(size, 1.0)
    return np.select([kind == "all-reduce", kind == "all-to-all"], [sums, exchanges], group.gather_s(size))
