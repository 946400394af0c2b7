"""The dense family against the independent implementation, and its masks."""

import dataclasses

import pytest
import torch

from phalanx.core.layout import Coord, Layout
from phalanx.model.dense import Decoder
from phalanx.train.state import State
from tests import reference
from tests.cases import CPU, EVEN, ODD, TIED, load_family, make_batch, make_job
from tests.feature_cases import BASE, FEATURES


def whole_model(config):
    job = make_job(model=config)
    params = State.create(job, load_family("dense"), Coord(0, 0, 0), CPU).params
    model = Decoder(config).double()
    model.load_state_dict(params, strict=not config.tied)
    return job, model, {k: v.detach() for k, v in params.items()}


@pytest.mark.parametrize("config", [EVEN, ODD, TIED], ids=["even", "odd", "tied"])
@pytest.mark.parametrize("masked", [True, False])
def test_logits_are_those_of_plain_pytorch(config, masked):
    job, model, params = whole_model(config)
    batch = make_batch(dataclasses.replace(job, train=dataclasses.replace(job.train, document_mask=masked)), 0, 0)
    want = reference.forward(params, dataclasses.asdict(config), batch.tokens_BL, batch.documents_BL)
    torch.testing.assert_close(model(batch), want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("masked", [True, False])
def test_every_feature_is_what_plain_pytorch_computes(feature, masked):
    """The weights are nowhere zero or one, so that none can be left out."""
    config = dataclasses.replace(BASE, **FEATURES[feature])
    job, model, params = whole_model(config)
    random = torch.Generator().manual_seed(3)
    params = {k: v + 0.3 * torch.randn(v.shape, generator=random, dtype=v.dtype) for k, v in params.items()}
    model.load_state_dict(params, strict=not config.tied)
    assert sum(p.numel() for p in model.parameters()) == config.num_params
    batch = make_batch(dataclasses.replace(job, train=dataclasses.replace(job.train, document_mask=masked)), 0, 0)
    want = reference.forward(params, dataclasses.asdict(config), batch.tokens_BL, batch.documents_BL)
    torch.testing.assert_close(model(batch), want, rtol=1e-10, atol=1e-10)


def test_a_document_does_not_see_its_neighbour():
    _, model, _ = whole_model(ODD)
    batch = make_batch(make_job(), 0, 0)
    batch.documents_BL = torch.tensor([[0] * 10 + [1] * 6])
    before = model(batch)
    batch.tokens_BL = batch.tokens_BL.clone()
    batch.tokens_BL[:, :10] = (batch.tokens_BL[:, :10] + 1) % ODD.vocab_size
    after = model(batch)
    assert torch.equal(before[:, 10:], after[:, 10:])
    assert not torch.equal(before[:, :10], after[:, :10])


def test_nobody_sees_the_future():
    _, model, _ = whole_model(EVEN)
    batch = make_batch(make_job(model=EVEN, document_mask=False), 0, 0)
    before = model(batch)
    batch.tokens_BL = batch.tokens_BL.clone()
    batch.tokens_BL[:, 12:] = (batch.tokens_BL[:, 12:] + 1) % EVEN.vocab_size
    assert torch.equal(before[:, :12], model(batch)[:, :12])


def test_initial_weights_do_not_depend_on_the_layout():
    family, whole = load_family("dense"), None
    for layout in (Layout(), Layout(1, 4, 1), Layout(2, 3, 2)):
        job = make_job((layout.replica, layout.shard, layout.tp))
        for rank in range(layout.world_size):
            coord = layout.coord(rank)
            state = State.create(job, family, coord, CPU)
            whole = whole or {k: v.detach() for k, v in state.params.items()}
            for info in state.infos:
                rows, cols = info.local_slice(layout, coord)
                want = whole[info.name][(rows, cols)[: len(info.shape)]]
                assert torch.equal(state.params[info.name].detach(), want), (layout, rank, info.name)
