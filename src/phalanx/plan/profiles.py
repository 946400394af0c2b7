"""Profile: how well a cluster and its software do what the physics allows. Three numbers are fitted per cluster; the
traits are facts about the software. Those of published clusters lie in profiles.toml, with the figures that the
physics itself takes in `Constants`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.model import Num

BOUNDS = (np.log([0.2, 0.2, 0.05]), np.log([1.4, 3.0, 3.0]))  # of matmul, other, network


@dataclass(frozen=True, slots=True)
class Constants:
    """What holds for all clusters: with a source, or fitted on all published runs at once."""

    tile_m: float = 128  # rows and columns of a matmul tile (cuBLAS on Hopper)
    tile_n: float = 256
    k_half: float = 120  # inner width at which a tile's prologue costs as much as its products
    quantised: float = 0.3  # how much of what the last wave and edges of tiles leave idle is really lost
    attention_fwd: float = 0.75  # of the bf16 ceiling
    attention_bwd: float = 0.46
    scan: float = 0.15  # of the bf16 ceiling, Mamba-2 in chunks
    memory: float = 0.75  # of HBM bandwidth, elementwise kernels
    permute: float = 0.5  # of HBM bandwidth (SimuMax, measured on B200)
    kernel_s: float = 10e-6  # between two kernels
    layer_s: float = 0.65e-3  # host time to launch a layer, forward and backward
    eager: float = 4.0  # times as long where kernels are many and small
    moe_layer_s: float = 0.004  # and what a layer of experts adds
    grouped: float = 0.75  # grouped GEMM over one of the same shape
    fp8: float = 1.1  # share of the ceiling that products reach, over bf16's share, by precision
    mxfp8: float = 1
    nvfp4: float = 0.8
    fp8_cast: float = 0.85  # passes over an operand to quantise it that are not fused into others
    mx_cast: float = 0.85  # and with block scales
    up_share: float = 0.8  # of the scale-up links a ring reaches (H100: 367 of 450 GB/s)
    nic_share: float = 0.9  # of the network cards
    hop_s: float = 4e-6  # a ring's step inside a domain
    launch_s: float = 20e-6  # a collective's floor
    interference: float = 0.2  # of the communication that compute hides, what compute loses by it
    sigma: float = 0.01  # spread of a node's step time
    fixed_s: float = 0.008  # per step, outside it all: data, logging, host


@dataclass(frozen=True, slots=True)
class Profile:
    matmul: Num = 0.9  # of the chip's measured ceiling
    other: Num = 1.0  # speed of attention and memory-bound work, over the constants'
    network: Num = 1.0  # speed of communication, over the constants'
    # Traits.
    sequence_parallel: Num = True  # norms and residuals split over tp
    hides_tp: Num = 0.0  # share of the tensor-parallel communication behind matmuls
    fused: Num = True  # elementwise work in few kernels (compiled or hand-written), else eager
    attention: Num = 1.0  # speed of the attention kernel over the best for the chip
    flash: Num = True  # attention without the matrix of scores in memory
    grad_bytes: Num = 4.0
    logit_bytes: Num = 14.0  # per logit: bf16 and fp32 copies, softmax, gradients; a fused loss needs fewer
    kept_products: Num = 1.0  # share of the products' results that selective recomputation keeps
    pipeline_keeps: Num = True  # with a pipeline, zero 2 and 3 keep weights and gradients whole between micro-batches
    trained: Num = 1.0  # share of the weights that get gradients (LoRA: few)
    offload: Num = False  # optimizer and kept activations in host memory
    # How far off such predictions were: ln(measured / predicted) at 5 % and 95 %.
    low: float = -0.2
    high: float = 0.2
    name: str = "default"


CONSTANTS = Constants()
DEFAULT = Profile()

# What is assumed of the software of published runs (bytes: as published peaks and sizes of batches that ran have it);
# what is not said here is Profile's default.
FRAMEWORKS: dict[str, dict[str, float | bool]] = {
    "phalanx": {"pipeline_keeps": False},
    "torchtitan": {"kept_products": 0.5},
    "megatron": {"hides_tp": 0.6, "grad_bytes": 2.0, "logit_bytes": 6.0},
    "megascale": {"hides_tp": 0.8, "logit_bytes": 10.0},
    "megatron-2022": {"flash": False, "logit_bytes": 10.0},
    "zero3-2021": {"flash": False, "fused": False, "grad_bytes": 2.0},
    "llm-foundry": {"fused": False, "grad_bytes": 2.0, "logit_bytes": 4.0},
    "maxtext": {"grad_bytes": 2.0, "logit_bytes": 10.0},
    "deepspeed": {"flash": False, "fused": False, "grad_bytes": 2.0},
}
TRAITS = (
    "sequence_parallel", "hides_tp", "fused", "attention", "flash", "grad_bytes", "logit_bytes", "kept_products",
    "pipeline_keeps", "trained", "offload",
)  # fmt: skip
# FlashAttention-2 does not use what Hopper added: about half of FlashAttention-3's or cuDNN's rate there
# (arXiv:2407.08608, figure 5). On Ampere, llm-foundry's long samples show 0.8 of what others reach.
FLASH_2 = {"llm-foundry", "torchtitan", "phalanx"}
SLOWER = {"llm-foundry"}
HOPPER = {"h100", "h100-hbm2e", "h200", "h800", "gh200"}
SAME = {"h100-hbm2e": "h100", "a800": "a100-80"}  # chips with the other's processor
OWN = "phalanx"
LIKE = {OWN: "torchtitan"}  # no published runs of its own; built of the same parts: FSDP2, DTensor, torch.compile


def traits_of(framework: str, chip: str) -> dict[str, float | bool]:
    """What is known of a framework's software on a chip."""
    framework = framework.removesuffix("-moe")
    attention = 0.55 if framework in FLASH_2 and chip in HOPPER else 0.8 if framework in SLOWER else 1.0
    return {name: getattr(DEFAULT, name) for name in TRAITS} | {"attention": attention} | FRAMEWORKS.get(framework, {})


@dataclass(frozen=True, slots=True)
class Fitted:
    """profiles.toml: a factor on (matmul, other, network) per level and key, and how far off predictions were."""

    start: tuple[float, ...]
    factors: dict[str, dict[str, list[float]]]
    left_out: dict[str, list[float]]  # cluster -> its efficiencies as fitted without its source
    error: dict[str, list[float]]  # "stratum|known" -> ln(published / predicted) at 5 % and 95 %

    def efficiency(self, keys: dict[str, str]) -> NDArray:
        """Product of the factors of the keys that are known."""
        logs = np.array(self.start)
        for level, key in keys.items():
            logs = logs + self.factors.get(level, {}).get(key, [0.0, 0.0, 0.0])
        return np.exp(np.clip(logs, *BOUNDS))

    def knows(self, keys: dict[str, str]) -> bool:
        return keys["cluster"] in self.factors.get("cluster", {})

    def error_of(self, stratum: str, known: bool) -> tuple[float, float]:
        """Of a prediction: ln(published / predicted) at 5 % and 95 %."""
        low, high = self.error.get(f"{stratum}|{'known' if known else 'new'}", [-0.3, 0.3])
        return low, high


@cache
def fitted() -> Fitted:
    text = resources.files("phalanx.plan").joinpath("profiles.toml").read_text()
    return Fitted(**tomllib.loads(text))


def keys_of(framework: str, chip: str, family: str = "", source: str = "") -> dict[str, str]:
    """The factors that a run's numbers are the product of, by level. A model of experts has one for the path that its
    software has for it."""
    chip = SAME.get(chip, chip)
    return {
        "all": "all",
        "software": framework,
        "chip": chip,
        "software and chip": f"{framework}|{chip}",
        "model": f"{framework}|{family}" if framework.endswith("-moe") else "",
        "cluster": f"{source}|{chip}|{framework}",
    }


def default_profile(chip: str, experts: bool = False, family: str = "", framework: str = OWN) -> Profile:
    """For a cluster that nobody measured: what runs of such software on such chips reached elsewhere."""
    table = fitted()
    name = LIKE.get(framework, framework) + ("-moe" if experts else "")
    if name not in table.factors["software"] and experts:
        name = "megatron-moe"
    keys = keys_of(name, chip, family)
    matmul, other, network = table.efficiency(keys)
    low, high = table.error_of("MoE" if experts else "TPU" if chip.startswith("tpu") else "dense bf16, complete", False)
    traits: dict[str, Num] = dict(traits_of(framework, chip))
    return Profile(matmul, other, network, **traits, low=low, high=high, name=f"{framework} on {chip}, default")
