"""Many layouts at once, one numpy column per choice. The axes follow the order of core.layout.Layout, innermost first:
tp, cp, shard, pp, replica. Experts are spread over ep of a stage's shard x cp x tp ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

RECOMPUTE = ("none", "selective", "full")
# The schedules of core.layout, and published ones that the planner can judge but the engine cannot run.
SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved-zb", "zbv", "zb-h1", "zb-h2", "dualpipe")
PRECISIONS = ("bf16", "fp8", "mxfp8", "nvfp4", "fp32")
FP32 = PRECISIONS.index("fp32")
CHUNK = 10_000  # rows costed together, so that their columns stay in cache


@dataclass(frozen=True, slots=True)
class Candidates:
    tp: NDArray
    pp: NDArray
    vpp: NDArray  # model chunks on a pipeline rank
    cp: NDArray
    ep: NDArray
    etp: NDArray  # tensor parallelism inside an expert
    replica: NDArray
    shard: NDArray  # ranks that state is sharded over, as `zero` says (times cp)
    zero: NDArray  # 0: nothing sharded; 1: optimizer; 2: and gradients; 3: and weights
    micro_batch: NDArray  # samples
    recompute: NDArray  # index in RECOMPUTE
    schedule: NDArray  # index in SCHEDULES
    precision: NDArray  # index in PRECISIONS
    bucket_bytes: NDArray

    @classmethod
    def of(cls, **columns: Any) -> Candidates:
        """Build candidates from columns, numbers, or names of a recompute mode, schedule or precision. The defaults are
        1, ZeRO-1, no recomputation, 1f1b (interleaved where vpp > 1), bf16 and buckets of 40 MB."""
        names = {"recompute": RECOMPUTE, "schedule": SCHEDULES, "precision": PRECISIONS}
        unknown = set(columns) - {f.name for f in fields(cls)}
        assert not unknown, unknown
        given = {k: _codes(v, names[k]) if k in names else np.asarray(v) for k, v in columns.items()}
        given.setdefault("zero", np.asarray(1))
        given.setdefault("recompute", np.asarray(0))
        given.setdefault("precision", np.asarray(0))
        given.setdefault("bucket_bytes", np.asarray(40e6))
        vpp = given.setdefault("vpp", np.asarray(1))
        given.setdefault("schedule", np.where(vpp > 1, SCHEDULES.index("interleaved"), SCHEDULES.index("1f1b")))
        filled = [given.get(f.name, np.asarray(1)) for f in fields(cls)]
        return cls(*(np.atleast_1d(c).copy() for c in np.broadcast_arrays(*filled)))

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: Any) -> Candidates:
        """Select rows by a slice, a mask or row numbers."""
        return Candidates(*(getattr(self, f.name)[rows] for f in fields(self)))

    def as_floats(self) -> Candidates:
        """Convert all columns to floats once, so that no operation has to convert them again."""
        return Candidates(*(getattr(self, f.name).astype(float) for f in fields(self)))

    def chunks(self, size: int = CHUNK) -> Iterator[Candidates]:
        for start in range(0, len(self), size):
            yield self.take(slice(start, start + size))

    @staticmethod
    def concat(parts: list[Candidates]) -> Candidates:
        return Candidates(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Candidates)))

    def row(self, index: int) -> dict[str, Any]:
        """Return one row with names in place of codes, in the form that `of` takes."""
        out = {f.name: getattr(self, f.name)[index].item() for f in fields(self)}
        named = (("recompute", RECOMPUTE), ("schedule", SCHEDULES), ("precision", PRECISIONS))
        return out | {key: names[out[key]] for key, names in named}

    @property
    def item_bytes(self) -> NDArray:
        """Bytes per element of activations and gathered weights; products may round their operands further."""
        return np.where(self.precision == FP32, 4.0, 2.0)

    @property
    def world(self) -> NDArray:
        return self.tp * self.pp * self.cp * self.shard * self.replica

    @property
    def data_ranks(self) -> NDArray:
        """Number of ranks that see different samples."""
        return self.replica * self.shard


def _codes(value: Any, names: tuple[str, ...]) -> NDArray:
    if isinstance(value, str):
        return np.asarray(names.index(value))
    column = np.asarray(value)
    return np.array([names.index(v) for v in column]) if column.dtype.kind in "UO" else column
