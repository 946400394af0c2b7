"""The image family against the independent implementation; it is not causal."""

import dataclasses

import pytest
import torch

from phalanx.core.errors import UserError
from phalanx.core.layout import Coord
from phalanx.model.family import check_family, load_family
from phalanx.train.state import State
from tests import reference
from tests.cases import CPU, IMAGE, make_batch, make_job

FAMILY = load_family("image")


def whole_model():
    job = make_job(model=IMAGE, micro_batch=3)
    params = {k: v.detach() for k, v in State.create(job, FAMILY, Coord(0, 0, 0), CPU).params.items()}
    model = FAMILY.build(IMAGE).double()
    model.load_state_dict(params)
    return model, params, make_batch(job, 0, 0)


def test_logits_and_all_gradients_are_those_of_plain_pytorch():
    model, params, batch = whole_model()
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    want = reference.forward(leaves, dataclasses.asdict(IMAGE), batch.tokens_BL, batch.documents_BL)
    got = model(batch)
    assert got.shape == (3, 16, 7)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    pull = torch.randn(want.shape, dtype=want.dtype, generator=torch.Generator().manual_seed(0))
    got.backward(pull)
    want.backward(pull)
    for name, param in model.named_parameters():
        error = (param.grad - leaves[name].grad).norm() / leaves[name].grad.norm()
        assert error < 1e-12, (name, error)


def test_every_patch_sees_every_other():
    model, _, batch = whole_model()
    before = model(batch)
    batch.tokens_BL = batch.tokens_BL.clone()
    batch.tokens_BL[:, -1] += 1.0
    assert ((model(batch) - before).abs().amax(-1) > 0).all()


def test_positions_are_those_of_the_batch():
    """A rank that holds some patches of an image gets them and their positions, in any order."""
    model, _, batch = whole_model()
    before = model(batch)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    batch.tokens_BL, batch.positions_L = batch.tokens_BL[:, order], order
    torch.testing.assert_close(model(batch), before[:, order])


def test_a_later_stage_of_a_pipeline_takes_what_it_is_given():
    model, _, batch = whole_model()
    x = model.embed(batch.tokens_BL.double()) + model.position(batch.positions()[None])
    assert torch.equal(model(batch, x), model(batch))


@pytest.mark.parametrize("options", [{}, {"image": 12, "patch": 5, "channels": 1}, {"image": "12", "patch": 3}])
def test_sizes_that_make_no_image_are_refused(options):
    with pytest.raises(UserError, match=r"(?s)model\.options.*remedy: give image, patch and channels"):
        check_family(FAMILY, dataclasses.replace(IMAGE, options=options))
