"""First values that do not depend on the layout. A parameter's rows are drawn in blocks, each from a generator keyed by
(seed, name, block), so a rank draws only the blocks that its own slice touches and gets the same numbers as a single
process. Every device gets them from the host, drawn in fp32."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from phalanx.model.family import Init

BLOCK_NUMEL = 1 << 16
RUN_NUMEL = 1 << 20  # elements that a thread draws before it hands them to the device


def _key(seed: int, name: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Slice(NamedTuple):
    """Rows x cols of the parameter `name` of the given full shape, to be drawn into `out`. `cols` cuts dim 1."""

    name: str
    shape: tuple[int, ...]
    init: Init
    rows: slice
    cols: slice
    out: Tensor


def draw_all(
    seed: int, slices: list[Slice], prepare: Callable[[], None], progress: Callable[[], object] = lambda: None
) -> None:
    """Fill all slices, on as many threads as there are cores; each thread calls `prepare` first. Which thread draws
    what does not matter. `progress` is called now and then."""
    constant = [s for s in slices if s.init.std == 0.0]
    for s in constant:
        s.out.fill_(s.init.mean)
    runs = [run for s in slices if s.init.std != 0.0 for run in _runs(s)]
    if sum(run.out.numel() for run in runs) <= RUN_NUMEL:
        for run in runs:
            _draw(seed, run)
        return
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "draw", prepare) as threads:
        for _ in threads.map(partial(_draw, seed), runs):  # raises what a thread has raised
            progress()


def _runs(s: Slice) -> Iterator[Slice]:
    """Cut a slice into runs of whole blocks."""
    step = _rows_per_block(s.shape) * max(1, RUN_NUMEL // BLOCK_NUMEL)
    first = s.rows.start // step * step
    for start in range(first, s.rows.stop, step):
        rows = slice(max(start, s.rows.start), min(start + step, s.rows.stop))
        yield s._replace(rows=rows, out=s.out[rows.start - s.rows.start : rows.stop - s.rows.start])


def _rows_per_block(shape: tuple[int, ...]) -> int:
    return max(1, BLOCK_NUMEL // max(1, math.prod(shape[1:])))


def _draw(seed: int, s: Slice) -> None:
    if s.out.numel() == 0:
        return
    step = _rows_per_block(s.shape)
    blocks = range(s.rows.start // step, -(-s.rows.stop // step))
    first, last = blocks[0] * step, min((blocks[-1] + 1) * step, s.shape[0])
    values = torch.empty(last - first, *s.shape[1:], pin_memory=not s.out.is_cpu)
    for block, part in zip(blocks, values.split(step), strict=True):
        part.normal_(s.init.mean, s.init.std, generator=torch.Generator().manual_seed(_key(seed, s.name, block)))
    values = values[s.rows.start - first : s.rows.stop - first]
    s.out.copy_(values[:, s.cols] if len(s.shape) > 1 else values, non_blocking=True)
