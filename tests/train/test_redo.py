"""A replica is lost in the middle of a step. The others keep their engines and what they have computed, compute what is
missing and reduce again: gradients, weights and moments are those of the undisturbed run. When this fails, a failure
either costs everybody a rebuild or silently changes the run."""

import dataclasses

import pytest

from tests.cases import DEEP, MOE_ODD, ODD, TWO_LEVELS, make_job

CONTAINED = "tests.train.redo_cases:contained"
DROPOUT = dataclasses.replace(ODD, family="tests.train.redo_cases:DROPOUT")


def survivors(pool, layout, lost, at="pass", **options):
    defaults = {"precision": "fp32", "reduction": "exact", "steps": 3}
    job = make_job(layout, **(defaults | options))
    answers = pool.run(CONTAINED, job, lost=lost, at=at)
    gone = {r for some in lost for r in some}
    left = [a for a in answers if "lossy" in a]
    assert len(left) == (job.layout.replica - len(gone)) * job.layout.replica_size
    # They have the losses of all micro-batches, from the step of the loss on, those of the lost replica included.
    clean = {k: loss for a in answers for k, loss in a["clean"]["losses"].items() if k[0] != "0"}
    lossy = {k: loss for a in left for k, loss in a["lossy"]["losses"].items() if k[0] != "0"}
    assert lossy.keys() == clean.keys() and len(clean) == 2 * job.num_micro * job.layout.cp
    assert lossy == clean or job.train.reduction == "fast"
    return left


def check_bits(left):
    for answer in left:
        clean, lossy = answer["clean"], answer["lossy"]
        assert all(lossy[what] == clean[what] for what in ("grads", "norms", "loads"))
        assert lossy["digest"] == clean["digest"], "weights or moments differ"


SPLITS = {
    "2 x 1 rank": ((2, 1, 1), [[1]], dict(global_batch=6)),
    "first of 2": ((2, 1, 1), [[0]], dict(global_batch=8)),
    "9 over 3 to 2": ((3, 1, 1), [[1]], dict(global_batch=9)),
    "8 over 4 to 3": ((4, 1, 1), [[2]], dict(global_batch=8)),
    "two at once": ((4, 1, 1), [[0, 3]], dict(global_batch=12)),
    "one after the other": ((4, 1, 1), [[3], [1]], dict(global_batch=12)),
    "shard 2, ZeRO-1": ((3, 2, 1), [[1]], dict(zero=1, global_batch=18)),
    "shard 2, ZeRO-3": ((3, 2, 1), [[2]], dict(zero=3, global_batch=18)),
    "tp 2": ((3, 1, 2), [[0]], dict(global_batch=6)),
    "pp 2": ((2, 1, 1), [[1]], dict(model=DEEP, global_batch=6, axes=dict(pp=2))),
    "pp 2, ZB-V": ((3, 1, 1), [[0]], dict(model=DEEP, global_batch=9, axes=dict(pp=2, schedule="zbv"))),
    "pp 2, interleaved, 5 = 4 + 1": (
        (3, 1, 1),
        [[1]],
        dict(model=DEEP, global_batch=12, axes=dict(pp=2, schedule="interleaved")),
    ),
    "cp 2": ((2, 1, 1), [[0]], dict(global_batch=6, axes=dict(cp=2))),
    "experts, with a bias that follows their load": ((3, 1, 1), [[2]], dict(model=MOE_ODD, global_batch=9)),
    "experts, tp 2": ((2, 1, 2), [[0]], dict(model=MOE_ODD, global_batch=6)),
    "dropout": ((3, 1, 1), [[0]], dict(model=DROPOUT, global_batch=9, recompute="full")),
    "nodes of 2, of which one is lost": (
        (8, 1, 1),
        [[2, 3]],
        dict(ranks_per_node=2, global_batch=16, collectives=TWO_LEVELS),
    ),
}
IN_BF16 = ["9 over 3 to 2", "shard 2, ZeRO-3"]
SLOW_IN_BF16 = [pytest.param(name, marks=pytest.mark.slow) for name in ("shard 2, ZeRO-1", "tp 2", "pp 2, ZB-V")]


@pytest.mark.parametrize("name", SPLITS)
def test_only_what_is_missing_is_computed_again_and_the_bits_stay(pool, name):
    layout, lost, options = SPLITS[name]
    check_bits(survivors(pool, layout, lost, **options))


@pytest.mark.parametrize("name", [*IN_BF16, *SLOW_IN_BF16])
def test_the_same_in_bf16(pool, name):
    layout, lost, options = SPLITS[name]
    check_bits(survivors(pool, layout, lost, precision="bf16", **options))


@pytest.mark.parametrize("layout, lost", [((3, 1, 1), [[1]]), ((2, 2, 1), [[0]]), ((3, 1, 1), [[]])], ids=str)
def test_sums_that_were_there_and_clipped_leave_no_trace(pool, layout, lost):
    """The vote was lost, with a replica or without one: what was reduced and clipped is thrown away."""
    check_bits(survivors(pool, layout, lost, at="sums", global_batch=12, clip=1e-3))


@pytest.mark.parametrize("at", ["half", "half count"])
def test_ranks_of_a_replica_that_hear_different_things_agree(pool, at):
    """One rank is cut off, and its shard peer is not: none of them waits for the other."""
    check_bits(survivors(pool, (2, 2, 1), [[]], at=at, global_batch=8))


@pytest.mark.parametrize("at", ["pass", "sums"])
@pytest.mark.parametrize("bucket_mb", [1e-6, 25.0], ids=["a unit in a bucket", "one bucket"])
def test_the_fast_reduction_agrees_to_rounding(pool, at, bucket_mb):
    options = dict(reduction="fast", precision="fp64", global_batch=9, bucket_mb=bucket_mb)
    left = survivors(pool, (3, 1, 1), [[1]], at=at, **options)
    assert max(answer["difference"] for answer in left) < 1e-12
    assert all(answer["lossy"]["digest"] == left[0]["lossy"]["digest"] for answer in left), "the replicas differ"


@pytest.mark.parametrize("layout, zero", [((2, 2, 1), 1), ((2, 2, 1), 3), ((2, 1, 2), 3)], ids=str)
def test_the_fast_reduction_agrees_to_rounding_in_any_layout(pool, layout, zero):
    left = survivors(pool, layout, [[0]], reduction="fast", precision="fp64", zero=zero, global_batch=12)
    assert max(answer["difference"] for answer in left) < 1e-12


@pytest.mark.parametrize("lost", [[[1]], [[]]], ids=["a replica is lost", "all form a new generation"])
def test_compressed_traffic_is_redone_within_its_own_error(pool, lost):
    """Earlier rounding errors belong to the old membership: a new one begins with none."""
    options = dict(reduction="fast", compress="bf16", precision="fp32", global_batch=9)
    left = survivors(pool, (3, 1, 1), lost, at="sums", **options)
    for answer in left:
        ((before, after),) = answer["lossy"]["residuals"]
        assert before > 0 and after == 0
    assert max(answer["difference"] for answer in left) < 1e-2
    assert all(answer["lossy"]["digest"] == left[0]["lossy"]["digest"] for answer in left), "the replicas differ"
