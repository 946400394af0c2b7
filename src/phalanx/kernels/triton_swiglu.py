"""Triton kernels of swiglu.py: one pass over memory each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

BLOCK = 1024  # 8 elements a thread


@triton.jit
def _gate(a, b, out, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    x = tl.load(a + i, inside, 0).to(tl.float32)
    y = tl.load(b + i, inside, 0).to(tl.float32)
    tl.store(out + i, (x * tl.sigmoid(x) * y).to(out.dtype.element_ty), inside)


@triton.jit
def _gate_backward(a, b, grad, da, db, out, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    x = tl.load(a + i, inside, 0).to(tl.float32)
    y = tl.load(b + i, inside, 0).to(tl.float32)
    g = tl.load(grad + i, inside, 0).to(tl.float32)
    s = tl.sigmoid(x)
    silu = x * s
    tl.store(da + i, (g * y * (s + silu * (1 - s))).to(da.dtype.element_ty), inside)
    tl.store(db + i, (g * silu).to(db.dtype.element_ty), inside)
    tl.store(out + i, (silu * y).to(out.dtype.element_ty), inside)


def gate(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(a)
    wrap_triton(_gate)[(triton.cdiv(a.numel(), BLOCK),)](a, b, out, a.numel(), BLOCK=BLOCK)
    return out


def gate_backward(a: Tensor, b: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b, grad = a.contiguous(), b.contiguous(), grad.contiguous()
    da, db, out = (torch.empty_like(a) for _ in range(3))
    wrap_triton(_gate_backward)[(triton.cdiv(a.numel(), BLOCK),)](a, b, grad, da, db, out, a.numel(), BLOCK=BLOCK)
    return da, db, out
