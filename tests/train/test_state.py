"""Weights in bf16 with remainders. When this fails, a resumed or repaired run is another run."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from phalanx.core.layout import Coord
from phalanx.model import load_family
from phalanx.train.state import State
from tests.cases import CPU, make_job


def create(precision="bf16") -> State:
    return State.create(make_job(precision=precision), load_family("dense"), Coord(0, 0, 0), CPU)


def update(state: State, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    grads = {p: torch.randn(p.shape, generator=generator).to(p.dtype) for p in state.params.values()}
    state.optimizer.update(grads, 1e-3, torch.tensor(0.5), torch.tensor(True))
    state.updates += 1


def copy(of: State, into: State) -> None:
    """Copy a state by way of a checkpoint's entries."""

    def fill(room):
        for name in of.names():
            room(name).copy_(of.get(name))

    into.restore(fill, step=2, updates=2)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_checkpoint_holds_the_masters_to_the_bit(precision):
    state, other = create(precision), create(precision)
    for seed in range(2):
        update(state, seed)
    copy(state, other)
    assert other.digest() == state.digest() != create(precision).digest()
    for each in (state, other):
        update(each, 7)
    assert other.digest() == state.digest()


def test_masters_begin_as_in_fp32_and_keep_what_bf16_would_round_away():
    state, wide = create(), create("fp32")
    for name, param in state.params.items():
        assert param.dtype == torch.bfloat16 and torch.equal(state.master(name), wide.params[name].detach())
    (name, *_) = (n for n, p in state.params.items() if p.dim() > 1)
    before = state.master(name).clone(), state.params[name].detach().clone()
    grads = {p: torch.full_like(p, 1e-4) for p in state.params.values()}
    state.optimizer.update(grads, 1e-7, None, torch.tensor(True))
    moved = (state.master(name) != before[0]).float().mean()
    rounded = (state.params[name] != before[1]).float().mean()
    assert moved > 0.9 and rounded < 0.2, (moved, rounded)


def test_one_rank_runs_without_fsdp2(pool):
    for layout, sharded in (((1, 1, 1), False), ((2, 1, 1), False), ((1, 2, 1), True)):
        answers = pool.run("tests.train.test_state:wraps", make_job(layout))
        assert answers == [sharded] * len(answers), layout


def wraps(args):
    from tests.cases import connect

    rank = connect(args)
    found = any(isinstance(module, FSDPModule) for module in rank.engine.model.modules())
    rank.close()
    return found
