"""Calibrated: what `phalanx calibrate` measured, as the planner's nouns. `machine_from` is that very machine, one node;
`profile_from` fits how well it does what the formulas expect of it, or of a machine of the catalogue that it is one of.
The file is written by `train.calibrate`."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import UserError
from phalanx.plan.candidates import PRECISIONS
from phalanx.plan.compute import Chip
from phalanx.plan.machine import TIERS, Machine
from phalanx.plan.model import Num
from phalanx.plan.network import Group
from phalanx.plan.profiles import CONSTANTS, OWN, Constants, Profile, traits_of

FORMAT = "phalanx-calibration-1"
SEARCH = (1e-4, 1e4)  # of a fitted factor
K_HALVES = (0.0, 32.0, 64.0, 128.0, 256.0, 512.0)
LEAST_ERROR = 0.1  # ln: a step is more than the calls that were timed


@dataclass(frozen=True, slots=True)
class Timed:
    median_s: float
    low_s: float  # quartiles
    high_s: float


@dataclass(frozen=True, slots=True)
class Product(Timed):
    """(m x k) by (k x n)."""

    dtype: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Attention(Timed):
    """Causal, in bf16."""

    batch: int
    heads: int
    seq: int
    head_dim: int
    backward: bool

    @property
    def flops(self) -> float:
        """As plan/compute.py counts: half of the scores; backward computes them again."""
        forward = 2.0 * self.batch * self.seq * (self.seq / 2) * 2 * self.heads * self.head_dim
        return forward * (2.5 if self.backward else 1.0)


@dataclass(frozen=True, slots=True)
class Stream(Timed):
    size_bytes: int  # read and written


@dataclass(frozen=True, slots=True)
class Call(Timed):
    kind: str
    ranks: int
    size_bytes: int  # of the whole buffer

    @property
    def sent_bytes(self) -> float:
        """By one rank in a ring."""
        return (2 if self.kind == "all-reduce" else 1) * (self.ranks - 1) / self.ranks * self.size_bytes


@dataclass(frozen=True, slots=True)
class Node:
    """The machine."""

    device: str
    host: str
    backend: str
    ranks: int
    memory_bytes: int  # of one rank
    units: int  # that tiles of a product are dealt to
    peak_flops: float  # bf16, as published; 0: not


@dataclass(frozen=True, slots=True)
class Calibration:
    path: str
    date: str
    machine: Node
    matmul: list[Product]
    attention: list[Attention]
    memory: list[Stream]
    collectives: list[Call]  # none: there is one rank


NAMES = {"dtype": PRECISIONS, "kind": ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")}
Predict = Callable[[Any, Machine, Profile, Constants], NDArray]
KINDS: dict[str, Any] = {"matmul": Product, "attention": Attention, "memory": Stream, "collectives": Call}


def read(path: str | Path) -> Calibration:
    """The file of a calibration; UserError if it is not one."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise _refusal(path, f"it cannot be read: {error.strerror}") from None
    except ValueError:
        raise _refusal(path, "it is not JSON") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _refusal(path, f"its format is not {FORMAT!r}")
    sections = {name: _rows(path, name, kind, data.get(name)) for name, kind in KINDS.items()}
    node = _row(path, "machine", Node, data.get("machine"))
    calibration = Calibration(str(path), str(data.get("date", "")), node, **sections)
    if not any(p.dtype == "bf16" for p in calibration.matmul) or not calibration.attention or not calibration.memory:
        raise _refusal(path, "products in bf16, attention or memory are missing")
    if node.ranks > 1 and not calibration.collectives:
        raise _refusal(path, f"there are {node.ranks} ranks and no collectives")
    return calibration


def _rows(path: str | Path, section: str, kind: Any, rows: Any) -> list[Any]:
    if not isinstance(rows, list):
        raise _refusal(path, f"{section} is missing")
    return [_row(path, f"{section}[{number}]", kind, row) for number, row in enumerate(rows)]


def _row(path: str | Path, where: str, kind: Any, row: Any) -> Any:
    if not isinstance(row, dict):
        raise _refusal(path, f"{where} is missing")
    values = {}
    for field in dataclasses.fields(kind):
        value, wanted = row.get(field.name), str(field.type)
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
        fits = {
            "float": number,
            "int": number and isinstance(value, int),
            "str": isinstance(value, str) and value in NAMES.get(field.name, (value,)),
            "bool": isinstance(value, bool),
        }[wanted]
        if not fits or (number and value == 0 and field.name != "peak_flops"):
            raise _refusal(path, f"{where}.{field.name} is {value!r}")
        values[field.name] = value
    return kind(**values)


def _refusal(path: str | Path, message: str) -> UserError:
    return UserError(
        message,
        field="calibration",
        value=str(path),
        remedy="name a file that `phalanx calibrate` wrote, or run it again",
    )


# -- the planner's nouns ----------------------------------------------------------------------------------------------


def machine_from(calibration: Calibration, k: Constants = CONSTANTS) -> Machine:
    """One node, its ranks the chips. Each figure is what was reached at best, over the share that the formulas expect
    to reach: with a profile of ones they give back what was measured."""
    c, node = calibration, calibration.machine
    best = {p: max((x.flops / x.median_s for x in c.matmul if x.dtype == p), default=0.0) for p in PRECISIONS}
    ceiling = np.array([best[p] or best["bf16"] for p in PRECISIONS])
    peak = ceiling * (max(1.0, node.peak_flops / best["bf16"]) if node.peak_flops else 1.0)
    speed, latency_s = _links(c.collectives, k)
    return Machine(
        ceiling=ceiling,
        peak=peak,
        memory_bytes=float(node.memory_bytes),
        memory_bytes_per_s=max(x.size_bytes / x.median_s for x in c.memory) / k.memory,
        sms=node.units,
        domain=node.ranks,
        up_bytes_per_s=speed,
        up_latency_s=latency_s,
        nvls=False,
        torus=False,
        nic_bytes_per_s=speed,  # there is no other node; nothing may divide by zero
        sharp=False,
        node=node.ranks,
        chips=node.ranks,
        span_chips=np.full(TIERS, float(node.ranks)),
        tier_factor=np.ones(TIERS),
        tier_latency_s=np.zeros(TIERS),
    )


def _links(calls: list[Call], k: Constants) -> tuple[float, float]:
    """Bytes/s of a rank from the largest messages, seconds per hop from the smallest, medians over the kinds."""
    if not calls:
        return 1e9, 0.0
    sizes = [x.size_bytes for x in calls]
    speeds = [x.sent_bytes / x.median_s for x in calls if x.size_bytes == max(sizes)]
    hops = {"all-reduce": 2.0, "all-to-all": math.log2(calls[0].ranks) / (calls[0].ranks - 1)}
    least = [x for x in calls if x.size_bytes == min(sizes)]
    waits = [(x.median_s - k.launch_s) / (hops.get(x.kind, 1.0) * (x.ranks - 1)) for x in least]
    return float(np.median(speeds)) / k.up_share, max(0.0, float(np.median(waits)) - k.hop_s)


def inputs_from(path: str | Path, machine: Machine | None = None) -> tuple[Machine, Profile, Constants]:
    """What `cost.evaluate` takes for this machine: the inner width at which products reach half of their speed is
    fitted too, which on a CPU is not what it is on tiles of an accelerator."""
    c = read(path)
    ways = [dataclasses.replace(CONSTANTS, k_half=width) for width in K_HALVES]
    found = [(machine or machine_from(c, k), profile_from(path, machine, k), k) for k in ways]
    took = np.array([x.median_s for x in c.matmul])
    return min(found, key=lambda f: float(np.median(np.abs(np.log(took / _products(c.matmul, *f))))))


def profile_from(path: str | Path, machine: Machine | None = None, k: Constants = CONSTANTS) -> Profile:
    """For plans on `machine`, of which the calibrated node is a part; None: on that node alone. Each efficiency is the
    one with which half of the calls take longer than predicted, and half less; calls that mostly wait for launches and
    hops tell nothing of it."""
    c = read(path)
    machine = machine or machine_from(c, k)
    traits: dict[str, Num] = dict(traits_of(OWN, ""))
    profile = Profile(**traits, name=f"calibrated on {c.machine.device}, {c.date}")
    errors: list[NDArray] = []
    for name, predict, rows in _parts(c):
        took, floor = np.array([x.median_s for x in rows]), predict(rows, machine, _with(profile, name, math.inf), k)
        telling = [x for x, above in zip(rows, took > 2 * floor, strict=True) if above]
        if telling:
            took = np.array([x.median_s for x in telling])
            profile = _fitted(profile, name, lambda p, f=predict, r=telling, t=took: f(r, machine, p, k) / t)
        if name in ("matmul", "attention") and telling:
            errors.append(np.log(took / predict(telling, machine, profile, k)))
    low, high = np.quantile(np.concatenate([*errors, [0.0]]), [0.05, 0.95])
    return dataclasses.replace(profile, low=min(float(low), -LEAST_ERROR), high=max(float(high), LEAST_ERROR))


def _parts(c: Calibration) -> list[tuple[str, Predict, list[Any]]]:
    """What is fitted, in this order: products wait for memory too, attention is some of `other`."""
    return [
        ("other", _streams, c.memory),
        ("matmul", _products, c.matmul),
        ("attention", _attentions, c.attention),
        ("network", _calls, c.collectives),
    ]


def _with(profile: Profile, name: str, efficiency: float) -> Profile:
    change: dict[str, Any] = {name: efficiency}
    return dataclasses.replace(profile, **change)


def _fitted(profile: Profile, name: str, over: Any) -> Profile:
    """`over` gives predicted over measured times: the more efficient, the less. So halving finds where its median is
    one."""
    low, high = (math.log(bound) for bound in SEARCH)
    for _ in range(60):
        middle = (low + high) / 2
        profile = _with(profile, name, math.exp(middle))
        low, high = (middle, high) if np.median(over(profile)) > 1 else (low, middle)
    return profile


def _products(rows: list[Product], machine: Machine, profile: Profile, k: Constants) -> NDArray:
    precision = np.array([PRECISIONS.index(x.dtype) for x in rows])
    m, n, inner = (np.array([getattr(x, side) for x in rows], float) for side in ("m", "n", "k"))
    return Chip(machine, profile, precision, k).gemm_s(m, n, inner)


def _attentions(rows: list[Attention], machine: Machine, profile: Profile, k: Constants) -> NDArray:
    """As in plan/compute.py."""
    chip = Chip(machine, profile, np.zeros(len(rows), dtype=int), k)
    share = np.array([k.attention_bwd if x.backward else k.attention_fwd for x in rows])
    narrow = np.array([min(1.0, x.head_dim / 128) ** 0.5 for x in rows])
    return np.array([x.flops for x in rows]) / (chip.attention * share * narrow)


def _streams(rows: list[Stream], machine: Machine, profile: Profile, k: Constants) -> NDArray:
    chip = Chip(machine, profile, np.zeros(len(rows), dtype=int), k)
    return chip.stream_s(np.array([x.size_bytes for x in rows], float), 1)


def _calls(rows: list[Call], machine: Machine, profile: Profile, k: Constants) -> NDArray:
    ranks, size = (np.array([getattr(x, name) for x in rows], float) for name in ("ranks", "size_bytes"))
    kind = np.array([x.kind for x in rows])
    group = Group.of(machine, ranks, 1, profile.network, k)
    sums, exchanges = group.reduce_s(size, k), group.exchange_s(size, 1.0, k)
    return np.select([kind == "all-reduce", kind == "all-to-all"], [sums, exchanges], group.gather_s(size, k))
