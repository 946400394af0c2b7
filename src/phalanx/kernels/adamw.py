"""AdamW in one pass over memory, on weights that are kept in bf16 with a 16-bit remainder. Together they are an exact
fp32 master, so no copy is cast for each step and nothing is lost. The same pass clips the gradients, and a gate on the
device decides whether the update happens, so nobody waits for the host.

Every operation is one of IEEE's, in a fixed order and unfused, so that an element's new value depends only on its own
values: not on where a tensor is cut, nor on the device.

    master bits = (bf16 bits << 16) + signed remainder"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.kernels import has_kernel

HALF = 0x8000


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest bf16, ties away from zero (the other choice's remainder would not fit), and the remainder."""
    bits = master.contiguous().view(torch.int32)
    high = (bits + HALF) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(weight: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 master."""
    bits = weight.view(torch.int16).to(torch.int32)
    return bits.bitwise_left_shift_(16).add_(remainder).view(torch.float32)


class Rates(NamedTuple):
    """The rates of an update. The constants are the job's. `now` changes every step, so it is a tensor on the device:
    learning rate, 1 / (1 - beta1^t), 1 / (1 - beta2^t), and the factor that clips the gradients."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    now: Tensor


def rates_now(lr: float, beta1: float, beta2: float, updates: int, clip: Tensor) -> Tensor:
    """Return `Rates.now` of the update whose number, from 1, is `updates`, on the device of `clip`."""
    host = torch.tensor([lr, 1 / (1 - beta1**updates), 1 / (1 - beta2**updates)], dtype=torch.float32)
    host = host if clip.is_cpu else host.pin_memory().to(clip.device, non_blocking=True)
    return torch.cat((host, clip.float().reshape(1)))


def update_(
    weight: Tensor, remainder: Tensor, grad: Tensor, mean: Tensor, square: Tensor, rates: Rates, gate: Tensor
) -> None:
    """Update contiguous tensors in place, unless `gate` (one integer) is 0. The moments are in fp32 or bf16."""
    if has_kernel(weight):
        from phalanx.kernels import triton_adamw

        triton_adamw.update_(weight, remainder, grad, mean, square, rates, gate)
        return
    lr, correct_mean, correct_square, clip = rates.now
    g = grad.float() * clip
    m = mean.float() * rates.beta1 + g * (1 - rates.beta1)
    v = square.float() * rates.beta2 + (g * g) * (1 - rates.beta2)
    master = join(weight, remainder)
    decayed = master * (1 - lr * rates.weight_decay)
    root = (v * correct_square).double().sqrt().float()  # torch's own fp32 root is sometimes off by the last bit
    moved = decayed - (lr * (m * correct_mean)) / (root + rates.eps)
    high, low = split(moved)
    for old, new in ((weight, high), (remainder, low), (mean, m.to(mean.dtype)), (square, v.to(square.dtype))):
        old.copy_(torch.where(gate != 0, new, old))
