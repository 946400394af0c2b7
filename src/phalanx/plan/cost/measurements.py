"""Read and check a calibration file: what was timed and how long it took. `train.calibrate` writes the file."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.core.errors import UserError
from phalanx.plan.cost.candidates import PRECISIONS

FORMAT = "phalanx-calibration-1"


@dataclass(frozen=True, slots=True)
class Timed:
    median_s: float
    low_s: float  # quartiles
    high_s: float


@dataclass(frozen=True, slots=True)
class Product(Timed):
    """A product of (m x k) by (k x n)."""

    dtype: str
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Attention(Timed):
    """Causal attention in bf16."""

    batch: int
    heads: int
    seq: int
    head_dim: int
    backward: bool

    @property
    def forward_flops(self) -> float:
        """FLOPs forward, with half of the scores, as in chip.py."""
        return 2.0 * self.batch * self.seq * (self.seq / 2) * 2 * self.heads * self.head_dim

    @property
    def flops(self) -> float:
        """FLOPs of the timed pass; backward computes the scores a second time."""
        return self.forward_flops * (2.5 if self.backward else 1.0)


@dataclass(frozen=True, slots=True)
class Stream(Timed):
    size_bytes: int  # read and written


@dataclass(frozen=True, slots=True)
class Grouped(Timed):
    """A product of (rows x k) by (k x n), with one matrix per expert and the same number of rows for each."""

    experts: int
    rows: int
    n: int
    k: int


@dataclass(frozen=True, slots=True)
class Step(Timed):
    """A step of this engine on one rank, in bf16, without recomputation."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    experts: int
    top_k: int
    expert_ffn: int
    seq: int
    batch: int  # samples of a micro-batch
    micro_batches: int
    compiled: bool


@dataclass(frozen=True, slots=True)
class Call(Timed):
    kind: str
    ranks: int
    size_bytes: int  # of the whole buffer

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank of a ring sends."""
        return (2 if self.kind == "all-reduce" else 1) * (self.ranks - 1) / self.ranks * self.size_bytes


@dataclass(frozen=True, slots=True)
class Node:
    """The calibrated machine."""

    device: str
    host: str
    backend: str
    ranks: int
    memory_bytes: int  # of one rank
    units: int  # to which the tiles of a product are dealt
    peak_flops: float  # bf16, as published; 0: not published


@dataclass(frozen=True, slots=True)
class Calibration:
    path: str
    date: str
    machine: Node
    matmul: list[Product]
    attention: list[Attention]
    memory: list[Stream]
    collectives: list[Call]  # empty for a single rank
    grouped: list[Grouped]  # like `steps`, measured on accelerators only
    steps: list[Step]


NAMES = {"dtype": PRECISIONS, "kind": ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")}
KINDS: dict[str, Any] = {"matmul": Product, "attention": Attention, "memory": Stream, "collectives": Call}
KINDS |= {"grouped": Grouped, "steps": Step}
OPTIONAL = ("grouped", "steps")
ZERO = ("peak_flops", "experts", "top_k", "expert_ffn")  # fields that may be 0, for none


def read(path: str | Path) -> Calibration:
    """Read a calibration file; raise UserError if it is not one."""
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise _refusal(path, f"it cannot be read: {error.strerror}") from None
    except ValueError:
        raise _refusal(path, "it is not JSON") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise _refusal(path, f"its format is not {FORMAT!r}")
    sections = {name: _rows(path, name, kind, data.get(name, [] if name in OPTIONAL else None))
                for name, kind in KINDS.items()}  # fmt: skip
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
        if not fits or (number and value == 0 and field.name not in ZERO):
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
