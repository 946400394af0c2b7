"""Triton kernels of fp8_experts.py. Plain results are made row by row: a program finds the largest element, and the row
is still in the cache when it rounds it. Turned results are made tile by tile; a tile has rows of one expert, or zeros.
Widths are constants of a kernel, which must know that rows begin at whole words. Numbers of rows are not, since they
may differ every time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from phalanx.kernels.fp8_experts import Groups

LOW = torch.float8_e4m3fn
TOP = tl.constexpr(448.0)
TINY = tl.constexpr(1e-12)
WIDEST = 4096  # elements of a row at a time


@triton.jit
def _rounded(value, scale, out):
    value = value * (1.0 / scale)
    return tl.minimum(tl.maximum(value, -TOP), TOP).to(out.dtype.element_ty)


@triton.jit
def _scale_of(largest):
    return tl.div_rn(tl.maximum(largest, TINY), TOP)


@triton.jit
def _gated(a, b, at, inside):
    x = tl.load(a + at, inside, 0).to(tl.float32)
    return x * tl.sigmoid(x) * tl.load(b + at, inside, 0).to(tl.float32)


@triton.jit
def _gated_backward(a, b, grad, at, inside):
    """Return the gradients of a and of b, and silu(a) * b."""
    x = tl.load(a + at, inside, 0).to(tl.float32)
    y = tl.load(b + at, inside, 0).to(tl.float32)
    g = tl.load(grad + at, inside, 0).to(tl.float32)
    s = tl.sigmoid(x)
    silu = x * s
    return g * y * (s + silu * (1 - s)), g * silu, silu * y


@triton.jit
def _round_rows(x, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    largest = 0.0
    for first in range(0, WIDTH, BLOCK):
        c = first + tl.arange(0, BLOCK)
        value = tl.load(x + n * WIDTH + c, c < WIDTH, 0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(value), 0))
    scale = _scale_of(largest)
    tl.store(scales + n, scale)
    for first in range(0, WIDTH, BLOCK):
        c = first + tl.arange(0, BLOCK)
        value = tl.load(x + n * WIDTH + c, c < WIDTH, 0).to(tl.float32)
        tl.store(out + n * WIDTH + c, _rounded(value, scale, out), c < WIDTH)


@triton.jit
def _gate_rows(a, b, out, scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    largest = 0.0
    for first in range(0, WIDTH, BLOCK):
        c = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.max(tl.abs(_gated(a, b, n * WIDTH + c, c < WIDTH)), 0))
    scale = _scale_of(largest)
    tl.store(scales + n, scale)
    for first in range(0, WIDTH, BLOCK):
        c = first + tl.arange(0, BLOCK)
        value = _gated(a, b, n * WIDTH + c, c < WIDTH)
        tl.store(out + n * WIDTH + c, _rounded(value, scale, out), c < WIDTH)


@triton.jit
def _gate_backward_rows(a, b, grad, da, da_scales, db, db_scales, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64)
    largest_x = 0.0
    largest_y = 0.0
    for first in range(0, WIDTH, BLOCK):
        c = first + tl.arange(0, BLOCK)
        dx, dy, _ = _gated_backward(a, b, grad, n * WIDTH + c, c < WIDTH)
        largest_x = tl.maximum(largest_x, tl.max(tl.abs(dx), 0))
        largest_y = tl.maximum(largest_y, tl.max(tl.abs(dy), 0))
    x_scale = _scale_of(largest_x)
    y_scale = _scale_of(largest_y)
    tl.store(da_scales + n, x_scale)
    tl.store(db_scales + n, y_scale)
    for first in range(0, WIDTH, BLOCK):
        c = first + tl.arange(0, BLOCK)
        dx, dy, _ = _gated_backward(a, b, grad, n * WIDTH + c, c < WIDTH)
        tl.store(da + n * WIDTH + c, _rounded(dx, x_scale, da), c < WIDTH)
        tl.store(db + n * WIDTH + c, _rounded(dy, y_scale, db), c < WIDTH)


@triton.jit
def _largest_scales(scales, ends, out, BLOCK: tl.constexpr):
    e = tl.program_id(0)
    largest = tl.full((BLOCK,), TINY / TOP, tl.float32)
    first = tl.load(ends + e - 1, e > 0, 0)
    end = tl.load(ends + e)
    while first < end:
        n = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.load(scales + n, n < end, 0))
        first += BLOCK
    tl.store(out + e, tl.max(largest, 0))


@triton.jit
def _expert_of(padded, first, EXPERTS: tl.constexpr, POWER: tl.constexpr):
    """Return whose turned rows these are: the number of experts that end before them."""
    e = tl.arange(0, POWER)
    return tl.sum((tl.load(padded + e, e < EXPERTS, 0x7FFFFFFF) <= first).to(tl.int32), 0)


@triton.jit
def _place(ends, padded, e, first, WIDTH: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """Locate a tile: the offsets of its elements, which of them exist, and its columns."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    start = tl.load(ends + e - 1, e > 0, 0) - tl.load(padded + e - 1, e > 0, 0)
    n = start + first + tl.arange(0, R)
    inside = (n < tl.load(ends + e))[:, None] & (c < WIDTH)[None, :]
    return n[:, None].to(tl.int64) * WIDTH + c[None, :], inside, c


@triton.jit
def _store_turned(value, scale, out, c, first, columns, WIDTH: tl.constexpr, R: tl.constexpr):
    at = out + c[:, None].to(tl.int64) * columns + (first + tl.arange(0, R))[None, :]
    tl.store(at, tl.trans(_rounded(value, scale, out)), (c < WIDTH)[:, None])


@triton.jit
def _turn(
    x,
    scales,
    ends,
    padded,
    out,
    columns,
    EXPERTS: tl.constexpr,
    POWER: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    first = tl.program_id(1) * R
    e = _expert_of(padded, first, EXPERTS, POWER)
    if e < EXPERTS:  # nobody reads beyond the last expert's
        at, inside, c = _place(ends, padded, e, first, WIDTH, R, C)
        value = tl.load(x + at, inside, 0).to(tl.float32)
        _store_turned(value, tl.load(scales + e), out, c, first, columns, WIDTH, R)


@triton.jit
def _gate_backward_turn(
    a,
    b,
    grad,
    da_scales,
    db_scales,
    h_scales,
    ends,
    padded,
    da,
    db,
    h,
    columns,
    EXPERTS: tl.constexpr,
    POWER: tl.constexpr,
    WIDTH: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    first = tl.program_id(1) * R
    e = _expert_of(padded, first, EXPERTS, POWER)
    if e < EXPERTS:
        at, inside, c = _place(ends, padded, e, first, WIDTH, R, C)
        dx, dy, z = _gated_backward(a, b, grad, at, inside)  # zeros outside
        _store_turned(dx, tl.load(da_scales + e), da, c, first, columns, WIDTH, R)
        _store_turned(dy, tl.load(db_scales + e), db, c, first, columns, WIDTH, R)
        _store_turned(z, tl.load(h_scales + e), h, c, first, columns, WIDTH, R)


def _by_row(width: int) -> dict[str, Any]:
    block = min(triton.next_power_of_2(width), WIDEST)
    return {"WIDTH": width, "BLOCK": block, "num_warps": 8 if block == WIDEST else 4}


def _by_tile(groups: Groups, width: int, rows: int, columns: int) -> tuple[tuple[int, int], dict[str, Any]]:
    experts = groups.ends_E.shape[0]
    sizes = {"EXPERTS": experts, "POWER": triton.next_power_of_2(experts), "WIDTH": width, "R": rows, "C": columns}
    return (triton.cdiv(width, columns), groups.columns // rows), sizes


def _like(x: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate rows in fp8, and their scales."""
    return torch.empty_like(x, dtype=LOW), torch.empty(len(x), dtype=torch.float32, device=x.device)


def _room(x: Tensor, groups: Groups) -> Tensor:
    return torch.empty(x.shape[1], groups.columns, dtype=LOW, device=x.device)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    out, scales = _like(x)
    _round_rows[(len(x),)](x, out, scales, **_by_row(x.shape[1]))
    return out, scales


def gate_rows(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    out, scales = _like(a)
    _gate_rows[(len(a),)](a, b, out, scales, **_by_row(a.shape[1]))
    return out, scales


def gate_backward_rows(a: Tensor, b: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outs = (*_like(a), *_like(b))
    _gate_backward_rows[(len(a),)](a, b, grad, *outs, **_by_row(a.shape[1]))
    return outs


def largest_scales(scales: Tensor, ends: Tensor) -> Tensor:
    out = torch.empty(len(ends), dtype=torch.float32, device=ends.device)
    _largest_scales[(len(ends),)](scales, ends, out, BLOCK=1024)
    return out


def turn(x: Tensor, scales: Tensor, groups: Groups) -> Tensor:
    x, out = x.contiguous(), _room(x, groups)
    grid, sizes = _by_tile(groups, x.shape[1], 128, 64)
    _turn[grid](x, scales, groups.ends_E, groups.padded_E, out, groups.columns, **sizes)
    return out


def gate_backward_turn(
    a: Tensor, b: Tensor, grad: Tensor, das: Tensor, dbs: Tensor, hs: Tensor, groups: Groups
) -> tuple[Tensor, Tensor, Tensor]:
    outs = (_room(a, groups), _room(a, groups), _room(a, groups))
    grid, sizes = _by_tile(groups, a.shape[1], 64, 64)
    _gate_backward_turn[grid](
        a, b, grad, das, dbs, hs, groups.ends_E, groups.padded_E, *outs, groups.columns, **sizes, num_warps=8
    )
    return outs
