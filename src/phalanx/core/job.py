"""Job: everything a run was asked to do, resolved. Plain frozen dataclasses that travel as JSON
from the edge (`spec`) to the workers, which therefore need no pydantic."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.layout import Layout
from phalanx.core.shape import ModelConfig


@dataclass(frozen=True, slots=True)
class TrainConfig:
    steps: int = 200
    seq_len: int = 256
    global_batch: int = 16  # sequences per optimizer step
    micro_batch: int = 2  # sequences per forward/backward
    precision: str = "fp32"  # bf16 | fp32 | fp64
    reduction: str = "fast"  # fast | exact
    recompute: str = "none"  # none | selective | full
    offload_activations: bool = False
    prefetch: int = 1  # layers whose parameters are gathered ahead
    bucket_mb: float = 25.0
    compress: str = "none"  # none | bf16 | int8: cross-replica traffic
    document_mask: bool = True
    compile: str = "none"  # none | inductor | aot_eager: each unit by itself


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0  # 0: no clipping
    schedule: str = "cosine"  # cosine | wsd
    warmup_steps: int = -1  # -1: a tenth of the run
    decay_steps: int = 0  # wsd only: length of the final decay
    min_lr_ratio: float = 0.1
    state: str = "full"  # full | bf16: precision of the moments
    offload: str = "none"  # none | cpu | nvme: where they live
    offload_dir: str = ""  # nvme only; "": the folder for temporary files

    def warmup(self, total: int) -> int:
        return total // 10 if self.warmup_steps < 0 else self.warmup_steps


@dataclass(frozen=True, slots=True)
class CollectivesConfig:
    """Per axis, auto or the name of an algorithm (parallel/policy.py)."""

    replica: str = "auto"  # auto | flat | hierarchical
    shard: str = "auto"
    crossover_kb: int = -1  # auto: the size from which a message goes inside the nodes first; -1: as measured


@dataclass(frozen=True, slots=True)
class DataConfig:
    source: str = "python-stdlib"  # or a file or directory of text
    max_mb: float = 16.0


@dataclass(frozen=True, slots=True)
class RunConfig:
    dir: str = "runs"
    device: str = "auto"
    threads: int = 0  # CPU threads per rank; 0: cores / ranks
    hang_timeout_s: float = 0.0  # 0: derived from the measured step time


@dataclass(frozen=True, slots=True)
class Job:
    name: str = "quickstart"
    seed: int = 1
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: Layout = field(default_factory=Layout)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    collectives: CollectivesConfig = field(default_factory=CollectivesConfig)
    data: DataConfig = field(default_factory=DataConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def num_micro(self) -> int:
        """Micro-batches in one step, over all ranks: the length of the exact reduction's tree."""
        return self.train.global_batch // self.train.micro_batch

    @property
    def micro_per_rank(self) -> int:
        return self.num_micro // self.layout.data_ranks

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.train.seq_len

    @property
    def promise(self) -> str:
        """What determinism this run has (contract 8)."""
        if self.train.reduction == "exact":
            return "bit-identical for any replica x shard x pp split at this TP and CP degree and micro-batch"
        return "bit-identical for this layout; other layouts agree to rounding"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    @staticmethod
    def from_dict(d: dict[str, Any]) -> Job:
        kinds: dict[str, Any] = {
            f.name: f.default_factory for f in dataclasses.fields(Job) if callable(f.default_factory)
        }
        return Job(**{k: kinds[k](**v) if k in kinds else v for k, v in d.items()})
