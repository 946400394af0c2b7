"""The optimizer's kernel. When this fails, weights drift, or a step that nobody committed is applied."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.kernels.adamw import Rates, join, rates_now, split, update_

CONSTANTS = (0.9, 0.95, 1e-8, 0.1)
LR = 3e-3


class Slices:
    """A parameter of `numel` elements in the form that the kernel takes."""

    def __init__(self, numel, moments=torch.float32, device="cpu"):
        self.first = torch.randn(numel, generator=torch.Generator().manual_seed(1))
        self.weight, self.remainder = (t.to(device) for t in split(self.first))
        self.mean, self.square = (torch.zeros(numel, dtype=moments, device=device) for _ in range(2))
        self.updates = 0

    def update(self, grad, clip=1.0, gate=1, update=update_, cuts=()):
        self.updates += 1
        device = self.weight.device
        now = rates_now(LR, *CONSTANTS[:2], self.updates, torch.tensor(clip, device=device))
        held = (self.weight, self.remainder, grad.to(device), self.mean, self.square)
        for start, stop in zip((0, *cuts), (*cuts, len(grad)), strict=True):
            parts = [t[start:stop] for t in held]
            update(*parts, Rates(*CONSTANTS, now), torch.tensor([gate], dtype=torch.int32, device=device))

    def bits(self):
        return [t.clone().cpu() for t in (self.weight, self.remainder, self.mean, self.square)]


def gradients(number, numel=1003):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(numel, generator=generator).to(torch.bfloat16) for _ in range(number)]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_weight_and_remainder_are_the_master(value):
    master = torch.tensor([value], dtype=torch.float32)
    weight, remainder = split(master)
    assert torch.equal(join(weight, remainder).view(torch.int32), master.view(torch.int32))
    if abs(value) < 3e38:  # no other bf16 is nearer
        assert abs(weight.float() - master) <= abs(master.to(torch.bfloat16).float() - master)


def test_it_is_torchs_adamw():
    ours, grads = Slices(1003), gradients(20)
    plain = torch.nn.Parameter(ours.first.clone())
    torchs = torch.optim.AdamW([plain], lr=LR, betas=CONSTANTS[:2], eps=CONSTANTS[2], weight_decay=CONSTANTS[3])
    for grad in grads:
        ours.update(grad, clip=0.5)
        plain.grad = grad.float() * 0.5
        torchs.step()
    error = (join(ours.weight, ours.remainder) - plain).norm() / plain.norm()
    assert error < 1e-6, error


def test_moments_in_bf16_follow_those_in_fp32():
    whole, half = Slices(1003), Slices(1003, torch.bfloat16)
    for grad in gradients(20):
        whole.update(grad), half.update(grad)
    moved = join(whole.weight, whole.remainder) - whole.first
    error = (join(half.weight, half.remainder) - join(whole.weight, whole.remainder)).norm() / moved.norm()
    assert 0 < error < 0.02, error


def test_a_closed_gate_changes_nothing():
    ours = Slices(1003)
    ours.update(gradients(1)[0])
    before = ours.bits()
    ours.update(gradients(1)[0], gate=0)
    assert all(map(torch.equal, before, ours.bits()))


@pytest.mark.parametrize("cuts", [(1,), (64, 65, 700), (501,)], ids=str)
def test_bits_do_not_depend_on_where_a_tensor_is_cut(cuts):
    whole, parts = Slices(1003), Slices(1003)
    for grad in gradients(5):
        whole.update(grad), parts.update(grad, cuts=cuts)
    assert all(map(torch.equal, whole.bits(), parts.bits()))


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_computes_the_same_bits(triton_kernels, moments, device):
    from phalanx.kernels import triton_adamw

    if moments == torch.bfloat16 and device.type == "cpu":
        pytest.skip("Triton 3.6's interpreter cuts bf16 off instead of rounding it")
    here, there = Slices(5003, moments), Slices(5003, moments, device)
    for step, grad in enumerate(gradients(5, 5003)):
        here.update(grad, clip=0.3, gate=step != 3)
        there.update(grad, clip=0.3, gate=step != 3, update=triton_adamw.update_)
    assert all(map(torch.equal, here.bits(), there.bits()))
