"""Rows to experts and back. When this fails, tokens get other tokens' rows, or wrong gradients."""

import pytest
import torch

from phalanx.kernels import expert_rows
from phalanx.kernels.expert_rows import combine_rows, spread_rows, sum_rows, take_rows

T, K, D = 11, 3, 40


def draw(dtype, device="cpu"):
    generator = torch.Generator().manual_seed(4)
    order = torch.randperm(T * K, generator=generator)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(T * K)).view(T, K)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((T, D), (T * K, D), (T, K), (T, D))]
    x, out, weights, grad = (v.to(device, dtype) for v in values)
    return order.to(device), places.to(device), x, out, weights, grad


def test_a_round_trip_and_its_gradients():
    order, places, x, out, weights, grad = draw(torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, out, weights)]
    taken = take_rows(leaves[0], order // K, places)
    assert torch.equal(taken, x[order // K])
    combined = combine_rows(taken * leaves[1], places, leaves[2])
    got = torch.autograd.grad(combined, leaves, grad)
    plain = [t.clone().requires_grad_() for t in (x, out, weights)]
    rows_TKD = (plain[0][order // K] * plain[1])[places.view(-1)].view(T, K, D)
    want = (rows_TKD * plain[2].unsqueeze(-1)).sum(1)
    torch.testing.assert_close(combined, want)
    for a, b in zip(got, torch.autograd.grad(want, plain, grad), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_compute_the_formulas(triton_kernels, monkeypatch, dtype, device):
    from phalanx.kernels import triton_rows

    monkeypatch.setattr(triton_rows, "BLOCK", 32)
    _, places, _, out, weights, grad = draw(dtype, device)
    weights = weights.float()
    got = [triton_rows.sum_rows(out, places, None), triton_rows.sum_rows(out, places, weights)]
    got += triton_rows.spread_rows(grad, out, places, weights)
    wide = [t.double() for t in (out, weights, grad)]
    monkeypatch.setattr(expert_rows, "has_kernel", lambda t: False)
    want = [sum_rows(wide[0], places), sum_rows(wide[0], places, wide[1])]
    want += spread_rows(wide[2], wide[0], places, wide[1])
    for a, b in zip(got, want, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < (1e-6 if dtype == torch.float32 else 5e-3)
