"""Play a pipeline schedule through to draw it. Forward takes one unit per rank and micro-batch, backward two; an
interleaved rank takes its chunks in rounds of pp (arXiv:2104.04473)."""

from __future__ import annotations

from typing import NamedTuple

DRAWN = ("gpipe", "1f1b", "interleaved")


class Block(NamedTuple):
    rank: int
    chunk: int
    micro: int
    backward: bool
    start: float
    end: float


def play(schedule: str, pp: int, vpp: int, micro_batches: int) -> list[Block]:
    """Return every piece of work with its start and end, in units of a rank's forward pass."""
    assert schedule in DRAWN, schedule
    todo = [_order(schedule, rank, pp, vpp, micro_batches) for rank in range(pp)]
    done: dict[tuple[bool, int, int], float] = {}  # (backward, stage, micro-batch) -> when
    free = [0.0] * pp
    at = [0] * pp
    blocks: list[Block] = []
    last = pp * vpp - 1
    while any(at[r] < len(todo[r]) for r in range(pp)):
        moved = False
        for rank in range(pp):
            while at[rank] < len(todo[rank]):
                backward, chunk, micro = todo[rank][at[rank]]
                stage = chunk * pp + rank
                needs = (
                    (True, stage + 1, micro) if backward and stage < last else (False, stage - (not backward), micro)
                )
                if stage - (not backward) >= 0 and needs not in done:
                    break
                start = max(free[rank], done.get(needs, 0.0))
                end = start + (2 if backward else 1) / vpp
                blocks.append(Block(rank, chunk, micro, backward, start, end))
                done[(backward, stage, micro)] = free[rank] = end
                at[rank] += 1
                moved = True
        assert moved, "the order of some rank waits for itself"
    return blocks


def _order(schedule: str, rank: int, pp: int, vpp: int, m: int) -> list[tuple[bool, int, int]]:
    """List a rank's work in order: (backward, chunk, micro-batch)."""
    count = m * vpp
    if schedule == "interleaved":
        forward = [((i % (pp * vpp)) // pp, i // (pp * vpp) * pp + i % pp) for i in range(count)]
        ahead = min(count, 2 * (pp - rank - 1) + (vpp - 1) * pp)
    else:
        forward = [(0, i) for i in range(m)]
        ahead = count if schedule == "gpipe" else min(count, pp - rank - 1)
    back = [(vpp - 1 - chunk, micro) for chunk, micro in forward]
    out = [(False, *work) for work in forward[:ahead]]
    for i in range(count - ahead):
        out += [(False, *forward[ahead + i]), (True, *back[i])]
    return out + [(True, *work) for work in back[count - ahead :]]
