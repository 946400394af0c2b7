"""Replace a model's layers by kernels that compute the same in fewer passes over memory, or in fp8."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.kernels import fp8, fp8_experts, swiglu
from phalanx.model.attention import Attend
from phalanx.model.dense import Attention, FeedForward
from phalanx.model.grouped import grouped_feed_forward
from phalanx.model.moe import Experts
from phalanx.parallel.device import Device
from phalanx.parallel.shard import COMPUTE_DTYPE
from phalanx.parallel.tensor import OpenLinear, RowLinear

# Average rows per expert from which its products gain more in fp8 than rounding its weights costs: 6 bytes a weight at
# 4 TB/s, against 6 FLOP a weight and row at 900 instead of 620 TFLOP/s, less the cost of its rows.
FP8_ROWS = 1024


def apply_kernels(model: nn.Module, units: list[nn.Module], job: Job, device: Device) -> None:
    """Choose attention kernels and swap in the fused layers. A schedule that splits the backward keeps the plain
    layers, because it defers weight gradients layer by layer."""
    packed = not device.is_cpu and COMPUTE_DTYPE[job.train.precision] == torch.bfloat16
    for module in model.modules():
        if isinstance(module, Attend):
            module.packed = packed
            module.two_kernels = packed and job.deterministic and device.has_cudnn
            module.flexible = not device.is_cpu and job.train.precision != "fp64"  # Triton has no fp64 products
    if job.layout.splits_backward:
        return
    low = job.train.precision == "fp8"
    if low and not device.has_fp8:
        raise UserError(
            f"{device.describe()} has no products in fp8",
            field="train.precision",
            value="fp8",
            remedy='set train.precision = "bf16"',
        )
    for module in [m for unit in units for m in unit.modules()]:
        if isinstance(module, FeedForward) and module.activation == "silu" and module.w1.bias is None:
            module.__class__ = FusedFeedForward
            module.function = feed_forward_fp8 if low else swiglu.feed_forward
        elif isinstance(module, Experts):
            module.__class__ = FusedExperts
            module.low = low and device.has_grouped_fp8 and rows_of_an_expert(job) >= FP8_ROWS
        elif low and isinstance(module, Attention):
            module.multiply = projections_fp8
        elif low and isinstance(module, nn.Linear):
            module.multiply = multiply_fp8
            if type(module) is nn.Linear:
                module.__class__ = OpenLinear


class FusedFeedForward(FeedForward):
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def forward(self, x_BLD: Tensor) -> Tensor:
        out_BLD = self.function(x_BLD, self.w1.weight, self.w2.weight, self.w3.weight)
        return self.w2.scatter(out_BLD) if isinstance(self.w2, RowLinear) else out_BLD


def rows_of_an_expert(job: Job) -> float:
    """Return the average in a micro-batch. It follows from the job alone, so a choice by it is the same in every
    step."""
    layout, model = job.layout, job.model
    tokens = job.train.micro_batch * job.train.seq_len / (layout.cp * layout.tp)
    return tokens * model.top_k * layout.ep / model.num_experts


class FusedExperts(Experts):
    low: bool  # in fp8, where the widths allow it

    def forward(self, x_ND: Tensor, counts_E: Tensor) -> Tensor:
        low = self.low and fp8_experts.fits(x_ND, self.w1, counts_E.shape[0])
        function = fp8_experts.feed_forward if low else grouped_feed_forward
        return function(x_ND, self.w1, self.w2, self.w3, counts_E)


def projections_fp8(x: Tensor, layers: Sequence[nn.Linear]) -> list[Tensor]:
    if not all(fp8.fits(_rows(x), layer.weight) for layer in layers):
        return [layer(x) for layer in layers]
    outs = fp8.linears(x, *(layer.weight for layer in layers))
    return [y if layer.bias is None else y + layer.bias for y, layer in zip(outs, layers, strict=True)]


def multiply_fp8(x: Tensor, weight: Tensor) -> Tensor:
    return fp8.linears(x, weight)[0] if fp8.fits(_rows(x), weight) else F.linear(x, weight)


def feed_forward_fp8(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    low = all(fp8.fits(_rows(x), weight) for weight in (w1, w2, w3))
    return (fp8 if low else swiglu).feed_forward(x, w1, w2, w3)


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]
