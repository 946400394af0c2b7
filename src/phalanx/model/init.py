"""First values that do not depend on the layout. A parameter's rows are drawn in blocks, each from a
generator keyed by (seed, name, block), so a rank draws only the blocks that its own slice touches
and gets the very numbers a single process would. Drawn on the host, in fp32, on every device."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from phalanx.model.family import Init

BLOCK_NUMEL = 1 << 16


def _key(seed: int, name: str, block: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}/{block}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw(seed: int, name: str, shape: tuple[int, ...], init: Init, rows: slice, cols: slice, out: Tensor) -> None:
    """Fill `out` with rows x cols of parameter `name` of the given full shape. `cols` cuts dim 1."""
    if init.std == 0.0 or out.numel() == 0:
        out.fill_(init.mean)
        return
    row_numel = max(1, math.prod(shape[1:]))
    per_block = max(1, BLOCK_NUMEL // row_numel)
    for block in range(rows.start // per_block, -(-rows.stop // per_block)):
        start, stop = block * per_block, min((block + 1) * per_block, shape[0])
        generator = torch.Generator().manual_seed(_key(seed, name, block))
        values = torch.empty(stop - start, *shape[1:]).normal_(init.mean, init.std, generator=generator)
        first, last = max(start, rows.start), min(stop, rows.stop)
        part = values[first - start : last - start]
        if len(shape) > 1:
            part = part[:, cols]
        out[first - rows.start : last - rows.start].copy_(part)
