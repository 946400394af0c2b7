"""Published training runs: the columns of their tables, and the run that a row becomes: a shape, a cluster, the layouts
it may have used, the facts about its software, and its step time."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.hardware import Cluster
from phalanx.plan.cost.sizes import ModelShape
from phalanx.plan.cost.software import Software

COLUMNS = (
    "source", "model", "params_b", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "gpu",
    "num_gpus", "tp", "pp", "vpp", "cp", "ep", "dp", "zero_stage", "micro_batch", "global_batch", "precision",
    "recompute", "tflops_per_gpu", "mfu", "tokens_per_s_per_gpu", "step_time_s", "notes",
)  # fmt: skip
FACTS = {  # optional columns; a table without them has these facts read from the prose of `notes` and `source`
    "software": "a name of cost/software.toml",
    "release": "of the software, year.month",
    "flops": "what tflops_per_gpu and mfu count: causal, full, 6N or hardware (SC21's formula, recomputation included)",
    "peak_tflops": "that mfu is a share of, where it is not the chip's",
    "experts": "routed experts of a layer",
    "top_k": "of them for a token",
    "expert_ffn": "inner width of one",
    "shared_experts": "for every token, as wide as a routed one",
    "dense_layers": "leading layers without experts",
    "mtp": "extra prediction heads",
    "etp": "tensor parallelism inside an expert",
    "shard": "ranks that ZeRO shards over, where they are not all data ranks",
    "sequence_parallel": "no, where norms are not split over tp",
    "compiled": "no: eager code",
    "overlaps_tp": "yes or no",
    "overlaps_ep": "yes or no",
    "dispatcher": "alltoall or flex",
    "fused_experts": "yes or no",
    "graphs": "none, partial or full",
    "trained": "share of the weights, if not all (LoRA)",
    "offload": "yes: optimizer and activations in host memory",
    "schedule": "of the pipeline, if not 1f1b or interleaved",
    "peak_gb": "of memory, 1e9 bytes",
    "out_of_memory": "yes: the run failed",
    "nic_gbit": "of network cards per chip, where the row states it",
    "memory_gb": "of the chip, where it is not the catalogue's",
    "memory_tb_per_s": "the same",
    "fabric": "of the catalogue",
}
STRATA = ("dense bf16, complete", "dense bf16, incomplete", "fp8", "MoE", "TPU", "LoRA")


@dataclass(frozen=True, slots=True)
class Option:
    """One layout that a run may have had, and its weight before memory is considered."""

    layout: dict[str, int | str | float]
    weight: float


@dataclass(frozen=True, slots=True)
class Run:
    row: int  # line of the file
    source: str
    model: str
    engine: str  # the software's name
    software: Software  # its facts in this run
    chip: str
    shape: ModelShape
    cluster: Cluster
    options: tuple[Option, ...]
    global_batch: int
    step_s: float  # as published; NaN for a run that ran out of memory
    stratum: str
    peak_bytes: float | None  # of memory, as published
    out_of_memory: bool

    @property
    def precision(self) -> str:
        return str(self.options[0].layout["precision"])

    @property
    def identity(self) -> tuple[object, ...]:
        """Key that is equal for the same published figure in any file."""
        return self.source, self.model, self.chip, self.cluster.num_chips, self.global_batch, round(self.step_s, 6)


@dataclass(frozen=True, slots=True)
class BadRow:
    row: int
    source: str
    reason: str


class RowError(ValueError):
    """A row that cannot be read. The other rows still can."""
