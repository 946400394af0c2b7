"""Job: everything a run was asked to do, resolved. Plain frozen dataclasses that travel as JSON
from the edge (`spec`) to the workers, which therefore need no pydantic."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.core import document
from phalanx.core.layout import Coord, Layout
from phalanx.core.shape import ModelConfig

SCHEMES = ("s3", "gs", "az", "http", "https", "memory")  # of URLs of data sets
STDLIB = "python-stdlib"  # data.source: the sources of Python's own library


@dataclass(frozen=True, slots=True)
class TrainConfig:
    steps: int = 200
    seq_len: int = 256
    global_batch: int = 16  # sequences per optimizer step
    micro_batch: int = 2  # sequences per forward/backward
    precision: str = "fp32"  # fp8 | bf16 | fp32 | fp64
    reduction: str = "fast"  # fast | exact
    deterministic: bool = False  # on accelerators; exact always is
    recompute: str = "none"  # none | selective | full
    offload_activations: bool = False
    prefetch: int = 1  # layers whose parameters are gathered ahead
    bucket_mb: float = 25.0
    compress: str = "none"  # none | bf16 | int8: cross-replica traffic
    document_mask: bool = True
    max_skips: int = 10  # steps in a row that are not applied because they are not finite, or a spike
    spike: float = 0.0  # deviations above the mean of the latest losses that make a step a spike; 0: none is
    compile: str = "auto"  # auto | none | inductor | aot_eager: each unit by itself


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
    """The algorithm of each axis, or auto (parallel/algorithms.py)."""

    replica: str = "auto"  # auto | flat | hierarchical
    shard: str = "auto"
    crossover_kb: int = -1  # auto: the size from which a message goes inside the nodes first; -1: as measured


@dataclass(frozen=True, slots=True)
class DataConfig:
    source: str = STDLIB  # or text that is made into a data set first, or the folder or URL of one
    version: str = ""  # of the data set; "": the newest
    max_mb: float = 16.0  # of text
    stages: list[dict[str, Any]] = field(default_factory=list)  # {"at": place, "weights": {source: x}, "version": …}
    skips: list[list[int]] = field(default_factory=list)  # [from, to) of places
    groups: int = 0  # 0: 8
    buffer_steps: int = 4  # steps that are ready before they are needed
    cache_dir: str = ""  # for chunks of remote data; "": the user's cache folder
    cache_gb: float = 10.0
    quarantine_limit: int = 8


@dataclass(frozen=True, slots=True)
class ValidationConfig:
    """Validation. It is off if there are no sources and no held-out share."""

    sources: list[str] = field(default_factory=list)  # as data.source
    held_out: float = 0.0  # share of the end of each source of the training data that is not trained on
    every_steps: int = 0  # 0: at the end alone
    sequences: int = 256  # of each set, at most; 0: all
    keep_best: bool = True  # save what is validated, and keep the best of it

    @property
    def on(self) -> bool:
        return bool(self.sources) or self.held_out > 0

    def is_due(self, step: int, steps: int) -> bool:
        """Return whether it is due after `step` of `steps` updates."""
        return self.on and (step >= steps or (self.every_steps > 0 and step > 0 and step % self.every_steps == 0))


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    dir: str = ""  # folder or URL; "": in the run record
    start: str = ""  # the checkpoint for a run that has none of its own; "": it begins with first weights
    every_steps: int = 0  # to the durable tier; 0: derived, -1: no checkpoints
    memory_every_steps: int = 0  # to the memory tier; 0: derived
    keep_last: int = 3
    keep_every: int = 0  # steps; 0: none besides the last
    failures: float = 3.79  # per 1000 node-days, before the run has seen any of its own


@dataclass(frozen=True, slots=True)
class RecoveryConfig:
    """How the run survives failures."""

    on: bool = True  # False: the first loss ends the run
    spares: int = 0  # nodes
    min_replicas: int = 1  # the fewest that the run continues with
    wait_s: float = 0.0  # how long to wait for full strength before it continues with fewer replicas
    hold_s: float = 300.0  # how long a run that cannot continue waits before it ends
    beat_s: float = 0.0  # between heartbeats; 0: derived from the number of nodes and the rate of failures
    restart_s: float = 5.0  # until a node process of this machine that died is started again
    grace_s: float = 30.0  # after SIGTERM, to save and leave
    deaths_per_node: int = 3  # deaths of workers within ten minutes, until the node is given up


@dataclass(frozen=True, slots=True)
class RunConfig:
    dir: str = "runs"
    device: str = "auto"
    threads: int = 0  # CPU threads per rank; 0: cores / ranks
    hang_timeout_s: float = 0.0  # 0: derived from the measured step time
    time_limit_s: float = 0.0  # after which the run saves and stops; 0: none
    share_devices: bool = False  # more ranks than devices
    networks: list[str] = field(default_factory=list)  # those that ranks use among themselves, the preferred first


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
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def num_micro(self) -> int:
        """Return the micro-batches in one step, over all ranks: the length of the exact reduction's tree."""
        return self.train.global_batch // self.train.micro_batch

    @property
    def micro_per_rank(self) -> int:
        return self.num_micro // self.layout.data_ranks

    @property
    def reduces_once(self) -> bool:
        """Return whether the exact sum over the shard axis waits for the last micro-batch. It does not when ranks share
        a micro-batch, because their leaves would not be neighbours."""
        return self.layout.zero == 1 and self.layout.cp * self.layout.tp == 1

    def micro_indices(self, coord: Coord, share: Sequence[int] | None = None) -> list[int]:
        """Return the global micro-batch indices that a rank works on, in order, from its replica's `share`
        (core/deal.py; None: that at full strength, a contiguous run). ZeRO-1 reduces once per step, so a rank takes a
        run; ZeRO-2/3 reduce every micro-batch, so the shard ranks take neighbours. TP, CP and PP ranks share theirs."""
        n, shards = self.micro_per_rank, self.layout.shard
        if share is None:
            share = range(coord.replica * n * shards, (coord.replica + 1) * n * shards)
        if self.reduces_once:
            n = len(share) // shards
            return list(share[coord.shard * n : (coord.shard + 1) * n])
        return list(share[coord.shard :: shards])

    @property
    def tokens_per_step(self) -> int:
        return self.train.global_batch * self.train.seq_len

    @property
    def deterministic(self) -> bool:
        """Return whether accelerators use only kernels that give the same bits twice. CPUs have no others."""
        return self.train.deterministic or self.train.reduction == "exact"

    @property
    def promise(self) -> str:
        """Describe the determinism of this run (contract 8)."""
        if self.train.reduction == "exact":
            return "bit-identical for any replica x shard x pp split at this TP and CP degree and micro-batch"
        where = "" if self.deterministic else " on CPUs, to rounding on accelerators"
        return f"bit-identical for this layout{where}; other layouts agree to rounding"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()[:16]

    @staticmethod
    def from_dict(d: dict[str, Any]) -> Job:
        kinds: dict[str, Any] = {
            f.name: f.default_factory for f in dataclasses.fields(Job) if callable(f.default_factory)
        }
        return document.make(Job, {k: document.make(kinds[k], v) if k in kinds else v for k, v in d.items()})
