"""Which kernels replace a model's layers. When this fails, a job in fp8 trains its experts in another precision than it
should, or slower than in bf16."""

import dataclasses

import pytest

from phalanx.kernels import fp8_experts
from phalanx.parallel import fused
from tests.cases import MOE, make_job
from tests.train.test_accelerator import error, gradients

# 512 tokens of a micro-batch go to 2 of 4 experts each.
SIZES = dict(model=dataclasses.replace(MOE, balance_loss=0.0), seq_len=256, micro_batch=2, global_batch=2, clip=0.0)


def case_experts(args):
    """Return how often experts ran in fp8 inside a pool worker, and the error of all gradients against fp64."""
    before, calls = (fused.FP8_ROWS, fp8_experts.feed_forward), []
    fused.FP8_ROWS = args["least"]
    fp8_experts.feed_forward = lambda *tensors: calls.append(1) or before[1](*tensors)
    try:
        ours, want, *_ = gradients(make_job(**SIZES, precision=args["precision"], document_mask=False))
    finally:
        fused.FP8_ROWS, fp8_experts.feed_forward = before
    names = [name for name in want if ".experts." in name]
    return len(calls), error(*({name: side[name] for name in names} for side in (ours, want)))


@pytest.mark.parametrize("precision, least, layers", [("fp8", 256, 2), ("fp8", 257, 0), ("bf16", 1, 0)])
def test_experts_are_in_fp8_where_it_pays(pool, precision, least, layers):
    """The average rows of an expert decide: 256 here. Gradients have the error of the precision."""
    ((calls, apart),) = pool.run("tests.parallel.test_fused:case_experts", make_job(), precision=precision, least=least)
    assert calls == layers
    assert apart < 0.2 if precision == "fp8" else apart < 0.05, apart


def test_rows_of_an_expert_are_counted_over_the_ranks_that_share_it():
    job = make_job((1, 2, 2), **SIZES | dict(global_batch=4), axes=dict(ep=2))
    assert fused.rows_of_an_expert(job) == 512 / 2 * 2 * 2 / 4  # half a sequence each, from two ranks
