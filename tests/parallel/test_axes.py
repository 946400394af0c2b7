"""Single axes, each where it is most easily wrong."""

import dataclasses

import pytest

from phalanx.core.errors import UserError
from phalanx.model import Attend, Family, load_family
from phalanx.parallel.context import apply_context_parallel, local_positions
from tests.cases import MOE, make_job
from tests.feature_cases import BASE

CASES = "tests.parallel.axis_cases:"


# 32 positions over 2 or 4 ranks: pieces of 8 or 4 (ring), 16 or 8 (Ulysses). No document but the first and
# the last fits into a piece.
@pytest.mark.parametrize("style", ["ring", "ulysses"])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_documents_packed_across_the_boundaries_of_ranks(pool, style, cp, causal):
    job = make_job(axes=dict(cp=cp, cp_style=style))
    for answer in pool.run(CASES + "attention", job, documents=[3, 10, 7, 9, 3], causal=causal):
        assert answer["error"] < 1e-12, answer
        assert answer["mask matters"] > 0.1 and len(answer["documents here"]) > 1, answer


@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_gives_every_rank_the_same_causal_work(cp):
    layout = make_job(axes=dict(cp=cp)).layout
    work = [int((local_positions(layout, 64, rank) + 1).sum()) for rank in range(cp)]  # keys that its queries see
    assert len(set(work)) == 1
    held = sorted(i for rank in range(cp) for i in local_positions(layout, 64, rank).tolist())
    assert held == list(range(64))


def test_a_model_that_hides_its_attention_cannot_be_cut_along_the_sequence():
    import torch
    from torch import nn

    with pytest.raises(UserError, match=r"layout\.cp.*phalanx\.Attend"), torch.device("meta"):
        apply_context_parallel(nn.Linear(2, 2), make_job(axes=dict(cp=2)).layout, None)
    assert isinstance(load_family("dense"), Family) and Attend().causal


@pytest.mark.parametrize("experts, some", [(4, True), (5, True), (4, False)], ids=["even", "uneven", "no rows at all"])
def test_rows_reach_their_experts_and_come_back(pool, experts, some):
    for sent, seen, width in pool.run(
        CASES + "exchange", make_job((1, 2, 2), model=MOE, axes=dict(ep=4)), experts=experts, some=some
    ):
        assert sent == seen and width == 4


def test_torch_loses_gradients_when_it_splits_the_backward_of_a_resharded_module(pool):
    """This is why the split is our own (parallel/deferred.py). If this ever fails, torch has fixed it."""
    job = make_job((1, 2, 1))
    assert pool.run(CASES + "torch_split_backward", job, reshard=False) == [4, 4]
    assert pool.run(CASES + "torch_split_backward", job, reshard=True) != [4, 4]


@pytest.mark.parametrize(
    "options",
    [
        dict(recompute="selective"),
        *(pytest.param(options, marks=pytest.mark.slow) for options in ({}, dict(recompute="full"))),
    ],
    ids=str,
)
def test_blocks_are_really_compiled(pool, options):
    job = make_job((1, 2, 1), compile="aot_eager", **options)
    assert pool.run(CASES + "compiled_graphs", job) == [1, 1], "one compilation serves all layers"
    assert pool.run(CASES + "compiled_graphs", make_job((1, 2, 1), **options)) == [0, 0]


def test_a_compiled_function_returns_a_tensor_that_one_operation_gave(pool):
    """A function silently loses its gradients when torch 2.11 compiles it and a second operation gave its result too,
    in place or because it had nothing to do. Other versions get them right, and would not show it."""
    model = dataclasses.replace(BASE, qk_norm="all")
    for found in pool.run(CASES + "results_of_functions", make_job((1, 1, 2), model=model, compile="look")):
        assert len(found) >= 6, "gathers, sums and scatters of attention and feed-forward"
        assert all(len(operations) == 1 for operations in found), found
