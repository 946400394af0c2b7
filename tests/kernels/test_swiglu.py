"""The feed-forward as one function. When this fails, a model trains on wrong gradients of its FFN."""

import pytest
import torch
import torch.nn.functional as F

from phalanx.kernels.swiglu import feed_forward, gate, gate_backward

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


def operands(dtype, device, *shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype) for s in shapes]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_output_and_gradients_are_those_of_the_formula(dtype, device):
    x, w1, w2, w3, grad = operands(dtype, device, (2, 24, 32), (48, 32), (32, 48), (48, 32), (2, 24, 32))
    leaves = [t.clone().requires_grad_() for t in (x, w1, w2, w3)]
    out = feed_forward(*leaves)
    got = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    wide = [t.double().requires_grad_() for t in (x, w1, w2, w3)]
    plain = (F.silu(wide[0] @ wide[1].T) * (wide[0] @ wide[3].T)) @ wide[2].T
    want = [plain.detach(), *torch.autograd.grad(plain, wide, grad.double())]
    errors = [error(a, b) for a, b in zip(got, want, strict=True)]
    assert max(errors) < TOLERANCE[dtype], errors


def test_the_product_that_the_backward_makes_again_is_not_kept():
    """Otherwise the function would save no memory."""
    x, w1, w2, w3 = operands(torch.float32, "cpu", (64, 8), (16, 8), (8, 16), (16, 8))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        feed_forward(x.requires_grad_(), w1.requires_grad_(), w2.requires_grad_(), w3.requires_grad_())
    assert kept.count((64, 16)) == 2, kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernels_compute_the_formulas(triton_kernels, dtype, device):
    from phalanx.kernels import triton_swiglu

    a, b, grad = operands(dtype, device, (37, 129), (37, 129), (37, 129))
    wide = [t.cpu().double() for t in (a, b, grad)]
    got = [triton_swiglu.gate(a, b), *triton_swiglu.gate_backward(a, b, grad)]
    want = [gate(*wide[:2]), *gate_backward(*wide)]
    errors = [error(x.cpu(), y) for x, y in zip(got, want, strict=True)]
    assert max(errors) < TOLERANCE[dtype] / 4, errors
