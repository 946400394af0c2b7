"""Triton kernels of cross_entropy.py. One program handles one row; its second read finds the row in the L2 cache."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
OPTIONS: dict[str, Any] = {"BLOCK": BLOCK, "num_warps": 16}


@triton.jit
def _row(
    logits,
    targets,
    factors,
    tops,
    totals,
    wanteds,
    losses,
    cap,
    z,
    WIDTH: tl.constexpr,
    CAPPED: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process one row. CAPPED: logits are c tanh(x / c). READ: find the largest logit, the sum of exponentials relative
    to it, and the target's logit. WRITE: put the gradient in place of the logits. Both: store the loss too."""
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * WIDTH
    target = tl.load(targets + r)
    if READ:
        top = float("-inf")
        total = 0.0
        for first in range(0, WIDTH, BLOCK):
            i = first + tl.arange(0, BLOCK)
            x = tl.load(row + i, i < WIDTH, float("-inf")).to(tl.float32)
            if CAPPED:
                x = tl.where(i < WIDTH, cap * (2 * tl.sigmoid(2 * x / cap) - 1), float("-inf"))
            highest = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - highest) + tl.sum(tl.exp(x - highest), 0)
            top = highest
        inside = (target >= 0) & (target < WIDTH)
        wanted = tl.load(row + tl.where(inside, target, 0)).to(tl.float32)
        if CAPPED:
            wanted = cap * (2 * tl.sigmoid(2 * wanted / cap) - 1)
        if WRITE:
            tl.store(losses + r, top + tl.log(total) - tl.where(inside, wanted, top))
        else:
            tl.store(tops + r, top)
            tl.store(totals + r, total)
            tl.store(wanteds + r, wanted)
    else:
        top = tl.load(tops + r)
        total = tl.load(totals + r)
    if WRITE:
        tl.debug_barrier()  # nobody writes before all have read the target's logit
        factor = tl.load(factors + r)
        share = factor / total * (1 + 2 * z * (top + tl.log(total)))
        for first in range(0, WIDTH, BLOCK):
            i = first + tl.arange(0, BLOCK)
            x = tl.load(row + i, i < WIDTH, float("-inf")).to(tl.float32)
            slope = 1.0
            if CAPPED:
                t = 2 * tl.sigmoid(2 * x / cap) - 1
                x = cap * t
                slope = 1 - t * t
            g = (tl.exp(x - top) * share - tl.where(i == target, factor, 0.0)) * slope
            tl.store(row + i, g.to(logits.dtype.element_ty), i < WIDTH)


def loss_in_place(logits: Tensor, targets: Tensor, factors: Tensor, bend: tuple[float, float]) -> Tensor:
    losses = _per_row(logits)
    none = losses
    _run(logits, targets, factors.float(), none, none, none, losses, bend, READ=True, WRITE=True)
    return losses


def statistics(logits: Tensor, targets: Tensor, bend: tuple[float, float]) -> tuple[Tensor, Tensor, Tensor]:
    top, total, wanted = (_per_row(logits) for _ in range(3))
    _run(logits, targets, top, top, total, wanted, top, bend, READ=True, WRITE=False)
    return top, total, wanted


def gradient_in_place(
    logits: Tensor, targets: Tensor, factors: Tensor, top: Tensor, total: Tensor, bend: tuple[float, float]
) -> None:
    _run(logits, targets, factors.float(), top, total, top, top, bend, READ=False, WRITE=True)


def _run(logits: Tensor, *tensors_and_bend: Any, **wanted: bool) -> None:
    *tensors, (cap, z) = tensors_and_bend
    _row[(len(logits),)](logits, *tensors, cap, z, WIDTH=logits.shape[1], CAPPED=cap > 0, **wanted, **OPTIONS)


def _per_row(logits: Tensor) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)
