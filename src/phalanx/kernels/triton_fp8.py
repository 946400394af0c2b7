"""Triton kernels of fp8.py: each reads a matrix once, and writes everything that is wanted of it. Largest values are
found by atomic maxima, which give the same bits in any order. Sizes are constants of a kernel: it must know that rows
begin at whole words, or it reads byte by byte."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton


@triton.jit
def _round_both(
    x,
    scale,
    plain,
    transposed,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOP: tl.constexpr,
    PLAIN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    r = tl.program_id(1) * R + tl.arange(0, R)
    c = tl.program_id(0) * C + tl.arange(0, C)
    inside = (r < ROWS)[:, None] & (c < COLUMNS)[None, :]
    inverse = 1.0 / tl.load(scale)
    value = tl.load(x + r[:, None].to(tl.int64) * COLUMNS + c[None, :], inside, 0).to(tl.float32) * inverse
    value = tl.minimum(tl.maximum(value, -TOP), TOP).to(plain.dtype.element_ty)
    if PLAIN:
        tl.store(plain + r[:, None].to(tl.int64) * COLUMNS + c[None, :], value, inside)
    if TRANSPOSED:
        out = transposed + c[:, None].to(tl.int64) * ROWS + r[None, :]
        tl.store(out, tl.trans(value), (c < COLUMNS)[:, None] & (r < ROWS)[None, :])


def round_both(x: Tensor, scale: Tensor, dtype: torch.dtype, plain: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    rows, columns = x.shape
    straight = torch.empty((rows, columns) if plain else (0,), dtype=dtype, device=x.device)
    turned = torch.empty((columns, rows) if transposed else (0,), dtype=dtype, device=x.device)
    r, c = (128, 64) if transposed else (32, 256)
    wrap_triton(_round_both)[(triton.cdiv(columns, c), triton.cdiv(rows, r))](
        x,
        scale,
        straight,
        turned,
        ROWS=rows,
        COLUMNS=columns,
        TOP=torch.finfo(dtype).max,
        PLAIN=plain,
        TRANSPOSED=transposed,
        R=r,
        C=c,
    )
    return straight, turned


@triton.jit
def _gate_largest(a, b, out, largest, numel, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    x = tl.load(a + i, inside, 0).to(tl.float32)
    y = tl.load(b + i, inside, 0).to(tl.float32)
    h = (x * tl.sigmoid(x) * y).to(out.dtype.element_ty)
    tl.store(out + i, h, inside)
    tl.atomic_max(largest, tl.max(tl.abs(h.to(tl.float32)), 0))
    tl.atomic_max(largest + 1, tl.max(tl.abs(x), 0))
    tl.atomic_max(largest + 2, tl.max(tl.abs(y), 0))


def gate_largest(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a, b = a.contiguous(), b.contiguous()
    out, largest = torch.empty_like(a), torch.zeros(3, dtype=torch.float32, device=a.device)
    wrap_triton(_gate_largest)[(triton.cdiv(a.numel(), 4096),)](a, b, out, largest, a.numel(), BLOCK=4096)
    return out, largest


@triton.jit
def _rounded(value, scale, like, TOP: tl.constexpr):
    value = value * (1.0 / tl.load(scale))
    return tl.minimum(tl.maximum(value, -TOP), TOP).to(like.dtype.element_ty)


@triton.jit
def _gate_backward_rounded(
    a,
    b,
    grad,
    h_scale,
    da_scale,
    db_scale,
    da,
    da_turned,
    db,
    db_turned,
    h_turned,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    H_TOP: tl.constexpr,
    TOP: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    r = tl.program_id(1) * R + tl.arange(0, R)
    c = tl.program_id(0) * C + tl.arange(0, C)
    inside = (r < ROWS)[:, None] & (c < COLUMNS)[None, :]
    at = r[:, None].to(tl.int64) * COLUMNS + c[None, :]
    turned = c[:, None].to(tl.int64) * ROWS + r[None, :]
    inside_turned = (c < COLUMNS)[:, None] & (r < ROWS)[None, :]
    x = tl.load(a + at, inside, 0).to(tl.float32)
    y = tl.load(b + at, inside, 0).to(tl.float32)
    g = tl.load(grad + at, inside, 0).to(tl.float32)
    s = tl.sigmoid(x)
    silu = x * s
    dx = _rounded((g * y * (s + silu * (1 - s))).to(grad.dtype.element_ty).to(tl.float32), da_scale, da, TOP)
    tl.store(da + at, dx, inside)
    tl.store(da_turned + turned, tl.trans(dx), inside_turned)
    dy = _rounded((g * silu).to(grad.dtype.element_ty).to(tl.float32), db_scale, db, TOP)
    tl.store(db + at, dy, inside)
    tl.store(db_turned + turned, tl.trans(dy), inside_turned)
    h = _rounded((silu * y).to(grad.dtype.element_ty).to(tl.float32), h_scale, h_turned, H_TOP)
    tl.store(h_turned + turned, tl.trans(h), inside_turned)


def gate_backward_rounded(
    a: Tensor, b: Tensor, grad: Tensor, hs: Tensor, das: Tensor, dbs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    a, b, grad = a.contiguous(), b.contiguous(), grad.contiguous()
    rows, columns = a.shape
    low, high = torch.float8_e5m2, torch.float8_e4m3fn
    da, db = (torch.empty(rows, columns, dtype=low, device=a.device) for _ in range(2))
    da_turned, db_turned = (torch.empty(columns, rows, dtype=low, device=a.device) for _ in range(2))
    h_turned = torch.empty(columns, rows, dtype=high, device=a.device)
    r, c = 64, 64
    wrap_triton(_gate_backward_rounded)[(triton.cdiv(columns, c), triton.cdiv(rows, r))](
        a,
        b,
        grad,
        hs,
        das,
        dbs,
        da,
        da_turned,
        db,
        db_turned,
        h_turned,
        ROWS=rows,
        COLUMNS=columns,
        H_TOP=torch.finfo(high).max,
        TOP=torch.finfo(low).max,
        R=r,
        C=c,
        num_warps=8,
    )
    return da, da_turned, db, db_turned, h_turned
