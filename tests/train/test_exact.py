"""The exact reduction: the same bits for any split of the data-parallel axis. When this fails, a run
that lost and regained a replica is no longer the run the user started."""

import math
from pathlib import Path

import pytest

from tests.cases import DEEP, MOE_ODD, ODD, assemble, fingerprint, make_job

LAYOUTS = [(1, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (4, 1, 1), (2, 4, 1), (1, 8, 1)]
TP_LAYOUTS = [(1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 4, 2), (2, 2, 2), (4, 1, 2)]


def run(pool, folder: Path, layout, steps=2, **options) -> dict:
    """Return fingerprints of one run, with the loss and norm bits of every step."""
    defaults = {"precision": "fp32", "reduction": "exact", "global_batch": 8}
    job = make_job(layout, **({"model": ODD} | defaults | options))
    stem = str(folder / "run")
    answers = pool.run("tests.cases:case_train", job, stem=stem, steps=steps)
    prints = [fingerprint(assemble(job, stem, r)) for r in range(job.layout.replica)]
    assert all(p == prints[0] for p in prints), f"the replicas of {layout} differ"
    assert all(a["norms"] == answers[0]["norms"] for a in answers)
    losses = [math.fsum(x for a in answers for x in a["loss_sums"][s]).hex() for s in range(steps)]
    return {**prints[0], "losses": losses, "norms": answers[0]["norms"]}


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    """Return one rank's run, with which the others are compared."""
    return run(pool, tmp_path_factory.mktemp("alone"), (1, 1, 1))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_same_bits_for_every_replica_and_shard_split(pool, tmp_path, precision):
    results = {layout: run(pool, tmp_path, layout, precision=precision) for layout in LAYOUTS}
    assert all(r == results[1, 1, 1] for r in results.values()), results


def test_same_bits_with_tensor_parallelism_held_at_two(pool, tmp_path):
    results = {layout: run(pool, tmp_path, layout) for layout in TP_LAYOUTS}
    assert all(r == results[1, 1, 2] for r in results.values()), results


def test_same_bits_for_every_pipeline(pool, tmp_path):
    """A stage computes what it would compute in one process, so pipelines need not even be held fixed."""
    layouts = [
        ((1, 1, 1), {}),
        ((1, 1, 1), dict(pp=2)),
        ((2, 2, 1), dict(pp=2, schedule="gpipe")),
        ((1, 2, 1), dict(pp=2, schedule="interleaved")),
        ((2, 1, 1), dict(pp=2, schedule="zbv")),
        ((1, 2, 1), dict(pp=4)),
    ]
    results = [run(pool, tmp_path, layout, model=DEEP, axes=axes) for layout, axes in layouts]
    assert all(r == results[0] for r in results), results


def test_same_bits_with_context_parallelism_held_at_two(pool, tmp_path):
    layouts = [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 1)]
    results = [run(pool, tmp_path, layout, axes=dict(cp=2), zero=1 + i % 3) for i, layout in enumerate(layouts)]
    assert all(r == results[0] for r in results), results


def test_same_bits_with_experts_and_a_bias_that_follows_their_load(pool, tmp_path):
    layouts = [(1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2)]
    results = [run(pool, tmp_path, layout, model=MOE_ODD, zero=1 + i % 3) for i, layout in enumerate(layouts)]
    assert all(r == results[0] for r in results), results


def test_same_bits_for_splits_that_are_not_powers_of_two(pool, tmp_path):
    layouts = [(1, 1, 1), (1, 3, 1), (3, 1, 1), (1, 6, 1), (2, 3, 1), (3, 2, 1), (2, 1, 1), (4, 1, 1)]
    results = {layout: run(pool, tmp_path, layout, global_batch=12) for layout in layouts}
    assert all(r == results[1, 1, 1] for r in results.values()), results


@pytest.mark.parametrize(
    "layout, options",
    [
        ((1, 4, 1), dict(zero=1)),
        ((2, 2, 1), dict(zero=1)),
        ((2, 2, 1), dict(zero=2)),
        ((4, 2, 1), dict(ranks_per_node=4)),
        ((4, 1, 1), dict(ranks_per_node=2)),
        ((2, 2, 1), dict(bucket_mb=1e-6)),
        ((2, 2, 1), dict(bucket_mb=25.0)),
        ((1, 2, 1), dict(recompute="full", prefetch=0)),
    ],
    ids=str,
)
def test_same_bits_whatever_the_zero_stage_the_nodes_the_buckets(pool, alone, tmp_path, layout, options):
    assert run(pool, tmp_path, layout, **options) == alone


def test_the_fast_reduction_is_not_exact_so_this_test_can_fail(pool, tmp_path):
    results = [run(pool, tmp_path, layout, reduction="fast") for layout in ((1, 1, 1), (1, 4, 1), (4, 1, 1))]
    assert len({r["weights"] for r in results}) > 1


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_two_runs_of_one_job_are_bit_identical(pool, tmp_path, reduction):
    first, second = (run(pool, tmp_path, (2, 2, 2), reduction=reduction) for _ in range(2))
    assert first == second
