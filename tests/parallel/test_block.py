"""Attention in blocks: the device's kernels against the formulas, and merging against the whole."""

import os

import pytest
import torch

from phalanx.core.layout import Layout
from phalanx.model.family import Batch
from phalanx.parallel import block, context
from phalanx.parallel.block import (
    Bend,
    attend_backward,
    attend_block,
    attend_documents,
    attend_documents_backward,
    flash_takes,
    merge,
)
from phalanx.parallel.context import RingAttend, local_positions

DEVICE = os.environ.get("PHALANX_TEST_DEVICE", "cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def draw(dtype, heads=4, kv_heads=2, queries=32, keys=64, width=16):
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, heads, queries, width), (2, kv_heads, keys, width), (2, kv_heads, keys, width)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for s in shapes]


def error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def by_formula(monkeypatch):
    for kernel in ("_cpu_kernel", "_device_kernel", "flash_takes"):
        monkeypatch.setattr(block, kernel, lambda q: False)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_is_the_formula(monkeypatch, dtype, causal):
    q, k, v = draw(dtype, queries=64)
    out, lse = attend_block(q, k, v, causal)
    grad = torch.ones_like(q)
    got = attend_backward(grad, q, k, v, out.to(dtype), lse, causal)
    by_formula(monkeypatch)
    q, k, v, grad = (t.double() for t in (q, k, v, grad))
    want_out, want_lse = attend_block(q, k, v, causal)
    want = attend_backward(grad, q, k, v, want_out, want_lse, causal)
    assert error(out, want_out) < TOLERANCE[dtype]
    assert all(error(a, b) < TOLERANCE[dtype] for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_blocks_merge_to_the_whole_in_any_order(order):
    q, k, v = draw(torch.float64)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], float("-inf"), dtype=q.dtype, device=q.device)
    for i in order:
        part = slice(16 * i, 16 * (i + 1))
        merge(out, lse, *attend_block(q, k[:, :, part], v[:, :, part], False))
    whole, whole_lse = attend_block(q, k, v, False)
    assert torch.allclose(out, whole, atol=1e-12) and torch.allclose(lse, whole_lse, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_backward_is_what_autograd_gives(causal):
    q, k, v = (t.requires_grad_() for t in draw(torch.float64, kv_heads=4, queries=64))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    grad = torch.randn_like(out)
    want = torch.autograd.grad(out, (q, k, v), grad)
    with torch.no_grad():
        got_out, lse = attend_block(q, k, v, causal)
        got = attend_backward(grad, q, k, v, got_out, lse, causal)
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_are_documents_one_by_one(monkeypatch, causal):
    q, k, v = draw(torch.bfloat16, queries=64)
    if not flash_takes(q):
        pytest.skip("needs an accelerator")
    grad = torch.randn_like(q)
    starts = [0, 10, 64, 65, 128, 128]  # in two rows of 64; the last document is empty
    offsets = (torch.tensor(starts, dtype=torch.int32, device=DEVICE), 63)
    out, lse = attend_documents(q, k, v, offsets, causal)
    got = attend_documents_backward(grad, q, k, v, out, lse, offsets, causal)
    by_formula(monkeypatch)
    for row, first, last in ((0, 0, 10), (0, 10, 64), (1, 0, 1), (1, 1, 64)):
        one = [t[row : row + 1, :, first:last].double() for t in (q, k, v, grad, out, lse, *got)]
        want_out, want_lse = attend_block(*one[:3], causal)
        want = attend_backward(one[3], *one[:3], want_out, want_lse, causal)
        assert error(one[4], want_out) < 3e-2 and error(one[5], want_lse) < 1e-3
        # A document of one token has no gradient of q and k but rounding.
        assert all(error(a, b) < 3e-2 for a, b in zip(one[6:], want, strict=True) if b.norm() > 1e-6)


class Ranks:
    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "width, window, causal", [(2, 5, True), (4, 1, True), (4, 40, True), (2, 99, True), (2, 0, False)]
)
def test_the_tiles_of_a_bent_ring_are_what_is_seen(width, window, causal, documents, monkeypatch):
    """The tiles hold every query and key that see each other once, and few that do not."""
    monkeypatch.setattr(context, "BENT_QUERIES", 3)
    length, rows = 16 * width, 2
    numbers = torch.tensor([[0] * 9 + [1] * (length - 12) + [2] * 3, [0] * (length - 1) + [1]])
    layout, seen = Layout(cp=width), torch.zeros(rows, length, length)
    for me in range(width):
        attend = RingAttend(causal, window, 30.0)
        attend.layout, attend.group = layout, Ranks(me, width)
        places = local_positions(layout, length, me)
        batch = Batch(*[torch.zeros(rows, len(places))] * 3, numbers if documents else None, places)
        for hop, tiles in enumerate(attend._tiles(batch, batch.documents_BL)):
            others = local_positions(layout, length, (me - hop) % width)
            for tile in tiles:
                q, k = places[tile.queries], others[tile.keys]
                gap = q[:, None] - k
                assert tile.bend.gap == int(gap[0, 0]) and len(q) <= 3
                may = (gap >= 0) | (not causal)
                may &= (gap < tile.bend.window) | (not tile.bend.window)
                assert may.any(), "a tile for nothing"
                seen[tile.rows, q[:, None], k] += may.float()
    at = torch.arange(length)
    want = (
        (numbers[:, :, None] == numbers[:, None]) if documents else torch.ones(rows, length, length, dtype=torch.bool)
    )
    want = want & ((at[:, None] >= at) | (not causal))
    want &= (at[:, None] - at < window) | (not 0 < window < length)
    assert torch.equal(seen, want.float())


@pytest.mark.parametrize("window, softcap", [(7, 0.0), (0, 0.5), (7, 0.5)])
def test_a_bent_block_and_its_gradients_are_those_of_autograd(window, softcap):
    q, k, v = (t.requires_grad_() for t in draw(torch.float64))
    gap = 20
    scores = q @ k.repeat_interleave(2, 1).mT / q.shape[-1] ** 0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    places = torch.arange(q.shape[2], device=DEVICE)[:, None] + gap - torch.arange(k.shape[2], device=DEVICE)
    hidden = (places < 0) | ((places >= window) if window else False)
    want = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v.repeat_interleave(2, 1)
    grad = torch.randn(want.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(DEVICE)
    wanted = torch.autograd.grad(want, (q, k, v), grad)
    with torch.no_grad():
        out, lse = attend_block(q, k, v, True, Bend(gap, window, softcap))
        got = attend_backward(grad, q, k, v, out, lse, True, Bend(gap, window, softcap))
        assert error(out, want) < 1e-12 and all(error(a, b) < 1e-12 for a, b in zip(got, wanted, strict=True))
        nothing = attend_block(q[:, :, :1], k, v, True, Bend(-1, window, softcap))
        assert not nothing[0].any() and nothing[1].isneginf().all()
        before = out.clone(), lse.clone()
        merge(out[:, :, :1], lse[:, :, :1], *nothing)
        assert torch.equal(out, before[0]) and torch.equal(lse, before[1]), "nothing was seen, nothing changes"
        merge(*nothing, *(t.clone() for t in nothing))
        assert not nothing[0].any() and nothing[1].isneginf().all(), "nor when nothing was seen before"
