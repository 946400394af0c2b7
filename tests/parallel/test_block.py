"""Attention in blocks: the device's kernel against the formulas, and merging against the whole."""

import os

import pytest
import torch

from phalanx.parallel import block
from phalanx.parallel.block import attend_backward, attend_block, merge

DEVICE = os.environ.get("PHALANX_TEST_DEVICE", "cpu")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


def draw(dtype, heads=4, kv_heads=2, queries=32, keys=64, width=16):
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, heads, queries, width), (2, kv_heads, keys, width), (2, kv_heads, keys, width)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for s in shapes]


def some_mask(queries, keys):
    mask = torch.rand(2, 1, queries, keys, generator=torch.Generator().manual_seed(2)) < 0.4
    mask[:, :, 3] = False  # a query that sees none of these keys
    return mask.to(DEVICE)


def error(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def by_formula(monkeypatch):
    monkeypatch.setattr(block, "_cpu_kernel", lambda q: False)
    monkeypatch.setattr(block, "_device_kernel", lambda q, k: False)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("masked, causal", [(False, False), (False, True), (True, False)])
def test_the_kernel_is_the_formula(monkeypatch, dtype, masked, causal):
    q, k, v = draw(dtype, queries=64)
    mask = some_mask(64, 64) if masked else None
    out, lse = attend_block(q, k, v, mask, causal)
    grad = torch.ones_like(q)
    if masked:  # the rest of the keys, which the query above does see
        lse = lse.nan_to_num(neginf=0.0)
    got = attend_backward(grad, q, k, v, out.to(dtype), lse, mask, causal)
    by_formula(monkeypatch)
    q, k, v, grad = (t.double() for t in (q, k, v, grad))
    want_out, want_lse = attend_block(q, k, v, mask, causal)
    want = attend_backward(grad, q, k, v, want_out, want_lse.nan_to_num(neginf=0.0), mask, causal)
    assert error(out, want_out) < TOLERANCE[dtype]
    assert all(error(a, b) < TOLERANCE[dtype] for a, b in zip(got, want, strict=True))


def test_a_query_that_sees_nothing_gets_nothing():
    q, k, v = draw(torch.float32)
    out, lse = attend_block(q, k, v, some_mask(32, 64), False)
    assert out[:, :, 3].eq(0).all() and lse[:, :, 3].eq(float("-inf")).all()
    assert torch.isfinite(out).all() and torch.isfinite(lse[:, :, 4:]).all()


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_blocks_merge_to_the_whole_in_any_order(order):
    q, k, v = draw(torch.float64)
    mask = some_mask(32, 64)
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], float("-inf"), dtype=q.dtype, device=q.device)
    for i in order:
        part = slice(16 * i, 16 * (i + 1))
        merge(out, lse, *attend_block(q, k[:, :, part], v[:, :, part], mask[..., part], False))
    whole, whole_lse = attend_block(q, k, v, mask, False)
    seen = torch.isfinite(whole_lse)
    assert torch.allclose(out, whole, atol=1e-12) and torch.allclose(lse[seen], whole_lse[seen], atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_backward_is_what_autograd_gives(masked):
    q, k, v = (t.requires_grad_() for t in draw(torch.float64, kv_heads=4, queries=64))
    mask = some_mask(64, 64) if masked else None
    if mask is not None:
        mask[:, :, 3, 0] = True  # torch has no answer for a query without keys
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    grad = torch.randn_like(out)
    want = torch.autograd.grad(out, (q, k, v), grad)
    with torch.no_grad():
        got_out, lse = attend_block(q, k, v, mask, False)
        got = attend_backward(grad, q, k, v, got_out, lse, mask, False)
    assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(got, want, strict=True))
