"""Profile: what a chip and its software reach in practice. Rates are shares of a data-sheet figure; they follow from
the fitted numbers, the chip's generation and watts, and the facts of the software. Every field may be a column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from phalanx.hardware import Chip
from phalanx.plan.cost.intervals import evidence, interval, kind_of, memory_interval, seen
from phalanx.plan.cost.numbers import RATE, values
from phalanx.plan.cost.sizes import Num
from phalanx.plan.cost.software import OWN, Software, costs, software

GENERATIONS = {
    "ampere": ("a100-40", "a100-80", "a800"),
    "hopper": ("h100", "h100-hbm2e", "h800", "h200", "gh200", "gh200-144"),
    "blackwell": ("b200", "b300", "gb200", "gb300"),
    "tpu": ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x"),
}
WATTS = {"ampere": 400.0, "hopper": 700.0, "blackwell": 1200.0}  # at which each generation's share is given
# Share of the peak for chips without a published best product: between the published shares (0.51-0.87).
DEFAULT_CEILING = 0.75
# Best measured product over the bf16 peak (MAMF of the catalogue) of A100, H100 and GB200.
BEST = {"ampere": 0.869, "hopper": 0.803, "blackwell": 0.729}
FUSED = 0.3  # share of the experts' passes and casts that remains when their products do them


@dataclass(frozen=True, slots=True)
class Kind:
    """The facts about a chip that decide its shares."""

    generation: Num  # one of GENERATIONS, or other
    watts: Num  # relative to its generation
    ceiling: Num  # measured best product over the peak, bf16

    @classmethod
    def of(cls, chip: Chip) -> Kind:
        generation = next((name for name, chips in GENERATIONS.items() if chip.name in chips), "other")
        watts = chip.watts / WATTS[generation] if generation in WATTS and chip.watts else 1.0
        ceiling = chip.mamf["bf16"] / chip.peak["bf16"] if "bf16" in chip.mamf else DEFAULT_CEILING
        return cls(generation, watts, ceiling)

    @classmethod
    def stack(cls, kinds: list[Kind]) -> Kind:
        return cls(*(np.array([getattr(k, f.name) for k in kinds]) for f in fields(cls)))


@dataclass(frozen=True, slots=True)
class Profile:
    # Shares of a data-sheet rate.
    gemm: Num  # large products, a row per precision
    attention_fwd: Num  # of the bf16 peak
    attention_bwd: Num
    memory: Num
    up: Num  # of the scale-up links
    nic: Num  # of the network cards
    exchange: Num  # of both, in the exchange of experts
    # What products and attention lose through their shape.
    k_half: Num
    quantised: Num
    grouped: Num
    length_half: Num
    # Passes over memory, relative to fused code; bytes.
    casts: Num  # a row per precision
    passes: Num
    loss_passes: Num
    permute_passes: Num
    expert_passes: Num
    expert_casts: Num
    scan_bytes: Num
    copy_bytes: Num
    # Seconds.
    kernel_s: Num
    layer_s: Num
    experts_s: Num
    stall_s: Num
    call_s: Num
    up_hop_s: Num
    out_hop_s: Num
    fixed_s: Num
    # Shares of communication that is hidden, and what hiding takes from compute.
    hides_tp: Num
    hides_ep: Num
    interference: Num
    fsdp_interference: Num
    straggle: Num
    host_s: Num = 0.0  # once a step, on top of the layers' own; seen only where the device waits for the host
    width_half: Num = 0.0  # head width at which attention reaches half its speed: the exponentials cost as much
    pace: float = 1.0  # factor for the whole step, from runs on such chips here
    software: Software = field(default_factory=Software)
    engine: str = OWN
    generation: str = "other"  # of the chip
    error: tuple[float, float] | None = None  # ln(measured / predicted) at 5 % and 95 %, where it was measured here
    memory_error: tuple[float, float] | None = None
    name: str = "default"
    evidence: str = ""  # what the interval rests on

    def interval(self, experts: bool, precision: str) -> tuple[float, float]:
        """Return ln(measured / predicted) at 5 % and 95 % for the step of such a run."""
        if self.error:
            return self.error
        kind = kind_of(experts, precision, self.generation)
        return interval(kind, seen(self.engine, self.generation), self.generation != "other")

    @property
    def memory_interval(self) -> tuple[float, float]:
        """Return ln(peak / predicted) at 5 % and 95 % for a rank's memory."""
        return self.memory_error or memory_interval(self.engine)

    def take(self, rows: Num) -> Profile:
        """Return some rows of the columns."""

        parts = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("software", "error")}
        parts = {name: value[..., rows] if isinstance(value, np.ndarray) and value.ndim and name != "casts" else value
                 for name, value in parts.items()}  # fmt: skip
        return Profile(**parts, software=self.software.take(rows))


def profile_of(kind: Kind, soft: Software, v: Mapping[str, float]) -> Profile:
    """Build a profile from the numbers `v`; kind and software may be columns of equal length."""
    generation, attention = np.asarray(kind.generation), np.asarray(soft.attention)
    known = {name: generation == name for name in GENERATIONS}
    power = np.asarray(kind.watts, float) ** v["power"]
    # Chips without a published run lose from their best product what the others do, and attend as much slower.
    lost = np.mean([v[f"gemm.{name}"] / best for name, best in BEST.items()])
    other = np.where(generation == "other", np.asarray(kind.ceiling, float) / BEST["hopper"], 1.0)
    gemm = np.select(
        list(known.values()), [v[f"gemm.{name}"] for name in GENERATIONS], np.asarray(kind.ceiling, float) * lost
    )
    eight = np.select([known["hopper"], known["tpu"]], [v["fp8.hopper"], 1.0], v["fp8.blackwell"])
    gemm = gemm * power
    shares = np.clip(np.stack([gemm, gemm * eight, gemm * eight, gemm * v["nvfp4"], gemm]), 0.4, RATE[1])
    shares[:3] = np.maximum(shares[:3], RATE[0])
    forward = power * other * np.select(
        [
            known["ampere"] & (attention == "triton"), known["ampere"], attention == "triton",
            known["blackwell"], attention == "flash2",
        ],
        [
            v["attention.triton.ampere"], v["attention.flash2.ampere"], v["attention.triton.hopper"],
            v["attention.new.blackwell"], v["attention.flash2.hopper"],
        ],
        v["attention.new.hopper"],
    )  # fmt: skip
    fused, graphs = np.asarray(soft.fused, bool), np.asarray(soft.graphs)
    flash, flex = attention != "scores", np.asarray(soft.dispatcher) == "flex"
    nothing = np.zeros(np.shape(fused))
    full = graphs == "full"
    fused_experts = np.asarray(soft.fused_experts, bool)
    exchange = np.where(flex, v["exchange.flex"], v["exchange.alltoall"])
    return Profile(
        gemm=shares,
        attention_fwd=forward,
        attention_bwd=forward * v["attention.backward"],
        memory=v["memory"] + nothing,
        up=np.where(known["tpu"], v["ici"], v["up"]),
        nic=v["nic"] + nothing,
        exchange=np.where(known["tpu"], v["ici"], exchange),
        k_half=v["k_half"],
        quantised=v["quantised"],
        grouped=v["grouped"],
        length_half=v["length_half"],
        casts=np.array([0.0, v["cast.fp8"], v["cast.mx"], v["cast.mx"], 0.0]),
        passes=np.where(fused, 1.0, v["eager"]),
        loss_passes=np.where(fused, 1.0, v["loss.eager"]),
        permute_passes=np.where(flex, v["permute.flex"], v["permute.alltoall"]),
        expert_passes=np.where(fused_experts, FUSED, v["expert_passes"]),
        expert_casts=np.where(fused_experts, FUSED, 1.0),
        scan_bytes=v["scan_bytes"],
        copy_bytes=np.where(np.asarray(soft.copies, bool), v["copies"], 0.0),
        kernel_s=v["kernel_s"],
        layer_s=np.where(full, 0.0, np.where(fused & flash, v["layer_s"], v["layer_s.eager"])),
        experts_s=np.select([full, graphs == "partial"], [0.0, v["experts_s.graphs"]], v["experts_s"]),
        stall_s=np.where(full, 0.0, v["stall_s"]),
        call_s=v["call_s"],
        up_hop_s=v["up_hop_s"],
        out_hop_s=v["out_hop_s"],
        fixed_s=v["fixed_s"],
        hides_tp=np.where(np.asarray(soft.overlaps_tp, bool), v["hides_tp"], 0.0),
        hides_ep=np.where(np.asarray(soft.overlaps_ep, bool), v["hides_ep"], 0.0),
        interference=v["interference"],
        fsdp_interference=v["interference.fsdp"],
        straggle=v["straggle"],
        software=soft,
    )


def default_profile(chip: Chip, engine: str = OWN, **facts: Any) -> Profile:
    """Return the profile for an unmeasured cluster, from published runs of such software on such chips. `facts` are
    those of the job."""
    kind = Kind.of(chip)
    soft = software(engine, **facts)
    profile = replace(profile_of(kind, soft, values()), **costs(engine, bool(soft.fused)))
    return replace(
        profile, engine=engine, generation=str(kind.generation), name=f"{engine} on {chip.name}",
        evidence=evidence(engine, str(kind.generation), chip.name),
    )  # fmt: skip
