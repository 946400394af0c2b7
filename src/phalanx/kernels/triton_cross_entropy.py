"""Triton kernels of cross_entropy.py. One program has one row. Its second reading finds the row in the L2 cache."""

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
    WIDTH: tl.constexpr,
    READ: tl.constexpr,
    WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """READ: the largest logit, the sum of exponentials relative to it, and the target's logit. WRITE: the gradient in
    place of the logits. Both: the loss too."""
    r = tl.program_id(0).to(tl.int64)
    row = logits + r * WIDTH
    target = tl.load(targets + r)
    if READ:
        top = float("-inf")
        total = 0.0
        for first in range(0, WIDTH, BLOCK):
            i = first + tl.arange(0, BLOCK)
            x = tl.load(row + i, i < WIDTH, float("-inf")).to(tl.float32)
            highest = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - highest) + tl.sum(tl.exp(x - highest), 0)
            top = highest
        inside = (target >= 0) & (target < WIDTH)
        wanted = tl.load(row + tl.where(inside, target, 0)).to(tl.float32)
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
        share = factor / total
        for first in range(0, WIDTH, BLOCK):
            i = first + tl.arange(0, BLOCK)
            x = tl.load(row + i, i < WIDTH, float("-inf")).to(tl.float32)
            g = tl.exp(x - top) * share - tl.where(i == target, factor, 0.0)
            tl.store(row + i, g.to(logits.dtype.element_ty), i < WIDTH)


def loss_in_place(logits: Tensor, targets: Tensor, factors: Tensor) -> Tensor:
    losses = _per_row(logits)
    none = losses
    _row[(len(logits),)](
        logits,
        targets,
        factors.float(),
        none,
        none,
        none,
        losses,
        WIDTH=logits.shape[1],
        READ=True,
        WRITE=True,
        **OPTIONS,
    )
    return losses


def statistics(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    top, total, wanted = (_per_row(logits) for _ in range(3))
    _row[(len(logits),)](
        logits, targets, top, top, total, wanted, top, WIDTH=logits.shape[1], READ=True, WRITE=False, **OPTIONS
    )
    return top, total, wanted


def gradient_in_place(logits: Tensor, targets: Tensor, factors: Tensor, top: Tensor, total: Tensor) -> None:
    _row[(len(logits),)](
        logits, targets, factors.float(), top, total, top, top, WIDTH=logits.shape[1], READ=False, WRITE=True, **OPTIONS
    )


def _per_row(logits: Tensor) -> Tensor:
    return torch.empty(len(logits), dtype=torch.float32, device=logits.device)
