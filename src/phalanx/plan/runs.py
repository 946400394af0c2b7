"""Published training runs: the columns of their tables, and what a row of one becomes: a shape, a cluster, the layouts
it may have run with, and the step time it took."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.hardware import Cluster
from phalanx.plan.model import ModelShape

COLUMNS = (
    "source", "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "gpu",
    "num_gpus", "tp", "pp", "vpp", "cp", "ep", "dp", "zero_stage", "micro_batch", "global_batch", "precision",
    "recompute", "tflops_per_gpu", "mfu", "tokens_per_s_per_gpu", "step_time_s", "notes",
)  # fmt: skip
STRATA = ("dense bf16, complete", "dense bf16, incomplete", "fp8", "MoE", "TPU", "LoRA")


@dataclass(frozen=True, slots=True)
class Option:
    """One layout that a run may have had, and how much it counts before memory is looked at."""

    layout: dict[str, int | str | float]
    weight: float


@dataclass(frozen=True, slots=True)
class Run:
    row: int  # line of the file
    source: str
    model: str
    framework: str  # the software; "-moe" when experts take another path through it
    family: str  # of the model, where the registry knows it
    chip: str
    shape: ModelShape
    cluster: Cluster
    options: tuple[Option, ...]
    global_batch: int
    step_s: float  # as published; not a number for a run that went out of memory
    stratum: str
    traits: dict[str, float | bool]  # of the software, that the notes state
    peak_bytes: float | None  # of memory, as published
    out_of_memory: bool


@dataclass(frozen=True, slots=True)
class BadRow:
    row: int
    source: str
    reason: str


class RowError(ValueError):
    """A row that cannot be read; the others can."""
