"""The exact norm: right, and the same bits wherever the tensors are cut."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist

from phalanx.parallel import norm
from phalanx.parallel.norm import exact_norm, fast_norm


@pytest.fixture(autouse=True)
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def values(dtype=torch.float32):
    return torch.randn(200_003, generator=torch.Generator().manual_seed(5), dtype=dtype) * 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_norms_are_right_and_leave_the_gradients_alone(dtype):
    g = values(dtype)
    before, want = g.clone(), math.sqrt(math.fsum(float(x) ** 2 for x in g))
    assert math.isclose(float(exact_norm([g], None, g, g.numel())), want, rel_tol=1e-14)
    assert math.isclose(float(fast_norm([g], None, g)), want, rel_tol=1e-5)
    assert torch.equal(g, before)


def test_the_exact_norm_does_not_depend_on_the_cut():
    g = values()
    norms = {float(exact_norm(list(g.chunk(n)), None, g, g.numel())).hex() for n in (1, 2, 3, 7, 100)}
    assert len(norms) == 1
    assert len({float(fast_norm(list(g.chunk(n)), None, g)).hex() for n in (1, 2, 3, 7, 100)}) > 1


def test_the_exact_norm_does_not_depend_on_how_a_kernel_deals_its_sum(monkeypatch):
    """Kernels carry from the low limb to the high one when it suits them, which would show once a sum has 53 bits."""
    g = values()
    for high in range((3 << 59) + 129, (3 << 59) + 129 + 50 * 256, 256):  # next to a tie of fp64
        norms = set()
        for carried in (0, 3):
            dealt = partial(_deal, high - carried, carried)
            monkeypatch.setattr(norm, "add_squares_", dealt)
            norms.add(float(exact_norm([g], None, g, g.numel())).hex())
        assert len(norms) == 1


def _deal(high, carried, limbs, x, scale, bits):
    limbs.copy_(torch.tensor([high, carried << bits]))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bad_gradient_shows_in_both_norms(bad):
    g = values()
    g[7] = bad
    assert not math.isfinite(float(exact_norm([g], None, g, g.numel())))
    assert not math.isfinite(float(fast_norm([g], None, g)))


def test_no_gradient_has_norm_zero():
    zero = torch.zeros(5)
    assert float(exact_norm([zero], None, zero, 5)) == 0.0
    assert float(fast_norm([], None, zero)) == 0.0
