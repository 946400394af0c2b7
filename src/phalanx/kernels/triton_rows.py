"""Triton kernels of expert_rows.py. One program handles one token, and reads its rows one after the other. The width is
a constant of a kernel: it must know that rows begin at whole words, or it reads element by element."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

BLOCK = 2048  # elements of a row


@triton.jit
def _sum_rows(
    rows,
    places,
    weights,
    out,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    for first in range(0, WIDTH, BLOCK):
        c = first + tl.arange(0, BLOCK)
        inside = c < WIDTH
        total = tl.zeros((BLOCK,), tl.float32)
        for k in tl.static_range(CHOICES):
            row = tl.load(places + t * CHOICES + k)
            value = tl.load(rows + row * WIDTH + c, inside, 0).to(tl.float32)
            if WEIGHTED:
                value *= tl.load(weights + t * CHOICES + k)
            total += value
        tl.store(out + t * WIDTH + c, total.to(out.dtype.element_ty), inside)


@triton.jit
def _spread_rows(
    grad, rows, places, weights, out, dots, WIDTH: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(CHOICES):
        row = tl.load(places + t * CHOICES + k)
        weight = tl.load(weights + t * CHOICES + k)
        dot = 0.0
        for first in range(0, WIDTH, BLOCK):
            c = first + tl.arange(0, BLOCK)
            inside = c < WIDTH
            g = tl.load(grad + t * WIDTH + c, inside, 0).to(tl.float32)
            value = tl.load(rows + row * WIDTH + c, inside, 0).to(tl.float32)
            dot += tl.sum(g * value, 0)
            tl.store(out + row * WIDTH + c, (g * weight).to(out.dtype.element_ty), inside)
        tl.store(dots + t * CHOICES + k, dot)


def sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    tokens, choices = places.shape
    out = torch.empty(tokens, rows.shape[1], dtype=rows.dtype, device=rows.device)
    given = rows if weights is None else weights.float()
    wrap_triton(_sum_rows)[(tokens,)](
        rows, places, given, out, WIDTH=rows.shape[1], CHOICES=choices, WEIGHTED=weights is not None, BLOCK=BLOCK
    )
    return out


def spread_rows(grad: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    tokens, choices = places.shape
    out, dots = torch.empty_like(rows), torch.empty(tokens, choices, dtype=torch.float32, device=rows.device)
    wrap_triton(_spread_rows)[(tokens,)](
        grad, rows, places, weights.float(), out, dots, WIDTH=rows.shape[1], CHOICES=choices, BLOCK=BLOCK
    )
    return out, dots.to(weights.dtype)
