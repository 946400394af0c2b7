"""The loss whose gradient is made in the forward. When this fails, a model trains towards something else."""

import weakref
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from phalanx.kernels import cross_entropy as module
from phalanx.kernels.cross_entropy import Bend, cross_entropy, linear_cross_entropy, loss_in_place

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
T, D, V = 24, 16, 101
BENDS = [Bend(), Bend(softcap=3.0), Bend(z_loss=0.3), Bend(3.0, 0.3)]


def draw(dtype, device, biased=False):
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in ((2, T // 2, D), (V, D), (V,))]
    x, w, bias = (v.to(device, dtype) for v in values)
    targets = torch.randint(0, V, (2, T // 2), generator=generator).to(device)
    weights = (torch.rand(2, T // 2, generator=generator) < 0.7).long().to(device)
    return x, w, bias if biased else None, targets, weights


def plain(x, w, bias, targets, weights, scale, bend=BENDS[0]):
    """Compute loss and gradients with torch's own functions, in fp64."""
    leaves = [t.double().requires_grad_() for t in (x, w, bias) if t is not None]
    logits = F.linear(*leaves).flatten(0, 1)
    if bend.softcap:
        logits = bend.softcap * torch.tanh(logits / bend.softcap)
    loss = (F.cross_entropy(logits, targets.flatten(), reduction="none") * weights.flatten()).sum()
    beside = bend.z_loss * (logits.logsumexp(-1).square() * weights.flatten()).sum()
    return [loss.detach(), *torch.autograd.grad((loss + beside) * scale, leaves)]


def error(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("rows", [1 << 30, 7], ids=["one chunk", "chunks of 7 rows"])
@pytest.mark.parametrize("biased", [False, True])
def test_loss_and_gradients_are_those_of_plain_pytorch(dtype, rows, biased, device):
    x, w, bias, targets, weights = draw(dtype, device, biased)
    scale = torch.tensor(1 / 29, dtype=torch.float64, device=device)
    leaves = [t.clone().requires_grad_() for t in (x, w, bias) if t is not None]
    scaled, total = linear_cross_entropy(*leaves, *[None] * (not biased), targets, weights, scale, rows=rows)
    got = [total, *torch.autograd.grad(scaled, leaves)]
    errors = [error(a, b) for a, b in zip(got, plain(x, w, bias, targets, weights, scale), strict=True)]
    assert max(errors) < TOLERANCE[dtype], errors
    assert error(scaled.detach(), total * scale) < 1e-6


@pytest.mark.parametrize("bend", BENDS[1:], ids=str)
def test_bent_logits_and_z_loss(bend, device):
    """The reported loss leaves out the z-loss; the gradients include it."""
    x, w, _, targets, weights = draw(torch.float64, device)
    scale = torch.tensor(1 / 29, dtype=torch.float64, device=device)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    scaled, total = linear_cross_entropy(*leaves, None, targets, weights, scale, rows=7, bend=bend)
    got = [total, *torch.autograd.grad(scaled, leaves)]
    errors = [error(a, b) for a, b in zip(got, plain(x, w, None, targets, weights, scale, bend), strict=True)]
    assert max(errors) < 1e-12, errors


def test_no_more_logits_than_a_chunk_exist(monkeypatch):
    """Otherwise a vocabulary of 128,256 takes gigabytes."""
    seen = []
    monkeypatch.setattr(
        module, "_formula", lambda logits, *a, f=module._formula: seen.append(len(logits)) or f(logits, *a)
    )
    x, w, _, targets, weights = draw(torch.float32, "cpu")
    linear_cross_entropy(x, w, None, targets, weights, torch.tensor(1.0), rows=10)
    assert seen == [10, 10, 4]


def test_a_chunk_of_logits_is_gone_before_the_next_is_made(monkeypatch):
    """Two at a time took 4 GiB more than was planned for."""
    made, alive = [], []

    def linear(*operands):
        alive.append(sum(ref() is not None for ref in made))
        out = F.linear(*operands)
        made.append(weakref.ref(out))
        return out

    monkeypatch.setattr(module, "F", type("F", (), {"linear": staticmethod(linear)}))
    x, w, _, targets, weights = draw(torch.float32, "cpu")
    linear_cross_entropy(x, w, None, targets, weights, torch.tensor(1.0), rows=10)
    assert alive == [0, 0, 0]


def test_logits_that_are_there_already_stay_as_they_are():
    x, w, _, targets, weights = draw(torch.float64, "cpu")
    logits = (x @ w.T).requires_grad_()
    before, scale = logits.detach().clone(), torch.tensor(0.5, dtype=torch.float64)
    scaled, total = cross_entropy(logits, targets, weights, scale)
    (grad,) = torch.autograd.grad(scaled, logits)
    again = logits.detach().requires_grad_()
    want = (F.cross_entropy(again.flatten(0, 1), targets.flatten(), reduction="none") * weights.flatten()).sum()
    assert torch.equal(logits, before) and error(total, want.detach()) < 1e-12
    assert error(grad, torch.autograd.grad(want * scale, again)[0]) < 1e-12


def test_a_loss_that_is_not_the_root_of_the_backward_is_refused():
    x, w, _, targets, weights = draw(torch.float64, "cpu")
    scaled, _ = linear_cross_entropy(x.requires_grad_(), w, None, targets, weights, torch.tensor(1.0))
    with pytest.raises(AssertionError, match="root of the backward"):
        (2 * scaled).backward()


def split_over_ranks(loss, logits, targets, factor, parts, bend=BENDS[0]):
    """Call `loss` as ranks would that have a part of the vocabulary each. `reduce` is played by running twice: first
    with what each rank would send, then with the sums of that."""
    starts = [V * p // parts for p in range(parts + 1)]
    slices = [logits[:, a:b].contiguous() for a, b in pairwise(starts)]
    sent = {}

    def run(part, answers):
        calls = iter(range(9))

        def reduce(tensor, op):
            call = next(calls)
            sent[call, part] = (tensor.clone(), op)
            return answers.get(call, tensor)

        mine = slices[part].clone()
        return loss(mine, targets - starts[part], factor, reduce, bend), mine

    answers = {}
    for call in range(2):
        for part in range(parts):
            run(part, answers)
        tensors, op = [sent[call, p][0] for p in range(parts)], sent[call, 0][1]
        stacked = torch.stack(tensors)
        answers[call] = stacked.amax(0) if op == "max" else stacked.sum(0)
    ends = [run(part, answers) for part in range(parts)]
    return [end[0] for end in ends], torch.cat([end[1] for end in ends], 1)


@pytest.mark.parametrize("bend", BENDS, ids=str)
def test_a_split_vocabulary_gives_the_same(device, bend):
    x, w, _, targets, _ = draw(torch.float64, device)
    logits, targets = (x @ w.T).flatten(0, 1), targets.flatten()
    factor = torch.linspace(0.1, 1, T, dtype=torch.float64, device=device)
    whole = logits.clone()
    want = loss_in_place(whole, targets, factor, bend=bend)
    losses, grad = split_over_ranks(loss_in_place, logits, targets, factor, 3, bend)
    assert all(error(one, want) < 1e-12 for one in losses) and error(grad, whole) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [V, 20_003])
@pytest.mark.parametrize("bend", BENDS, ids=str)
def test_the_kernels_compute_the_formula(triton_kernels, monkeypatch, dtype, width, device, bend):
    monkeypatch.setattr(module, "has_kernel", lambda t: t.dtype != torch.float64)
    rows = 5
    generator = torch.Generator().manual_seed(3)
    logits = (8 * torch.randn(rows, width, generator=generator)).to(device, dtype)
    targets = torch.randint(0, width, (rows,), generator=generator).to(device)
    targets[0] = -100  # counts for nothing
    factor = torch.tensor([0.0, 1.0, 0.5, 0.25, 0.0], device=device)
    wide = logits.double()
    want = module._formula(wide, targets, factor, None, bend)
    got = logits.clone()
    losses = loss_in_place(got, targets, factor, bend=bend)
    assert error(losses[1:], want[1:]) < 1e-5 and error(got, wide) < TOLERANCE[dtype] / 4
    if width == V:
        split, grad = split_over_ranks(loss_in_place, logits, targets, factor, 3, bend)
        assert all(error(one[1:], want[1:]) < 1e-5 for one in split) and error(grad, wide) < TOLERANCE[dtype] / 4
