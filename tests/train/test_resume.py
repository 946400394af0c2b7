"""Restoring a state and continuing gives the bits of the run that was never interrupted, on every layout of the parity
table and with dropout; and a checkpoint loads into any other layout."""

import pytest

from tests.cases import CASES, MOE, MOE_DEEP, make_job

# These run by default, the others with `make test-slow`.
DEFAULT = {
    "single",
    "shard 3, uneven rows",
    "tp 2, odd vocabulary, tied",
    "replica 3",
    "shard 2 x tp 2",
    "shard 2 x pp 2, ZB-V, ZeRO-3",
    "everything offloaded, moe: shard 2, ep 2",
}


def _param(name, layout, options):
    marks = [] if name in DEFAULT else [pytest.mark.slow]
    return pytest.param(layout, options, id=name, marks=marks)


@pytest.mark.parametrize("layout, options", [_param(*case) for case in CASES])
def test_going_on_gives_the_same_bits(pool, tmp_path, layout, options):
    job = make_job(layout, **options)
    for rank, got in enumerate(pool.run("tests.train.resume_cases:case_resume", job, dir=str(tmp_path))):
        for how in ("file", "memory"):
            assert got[how]["norms"] == got["straight"]["norms"], (rank, how)
            assert got[how]["digest"] == got["straight"]["digest"], (rank, how)
            assert got[how]["rng"] == got["straight"]["rng"], (rank, how)


def test_what_a_layer_draws_depends_on_the_micro_batch_alone(pool, tmp_path):
    """What was drawn before does not matter: another replica draws the same when it computes a micro-batch again."""
    job = make_job((1, 2, 1))
    got = pool.run("tests.train.resume_cases:case_resume", job, dir=str(tmp_path), forget_rng=True)
    assert all(rank["file"]["digest"] == rank["straight"]["digest"] for rank in got)


def test_imported_weights_count_the_updates_that_were_made(pool, tmp_path):
    """They do not count the steps: Adam corrects its moments by the number of updates."""
    job = make_job((1, 2, 1), precision="fp32", steps=2000)
    for got in pool.run("tests.train.resume_cases:case_import", job, dir=str(tmp_path)):
        assert got["about"]["updates"] == 3 and got["about"]["cursor"] == 3 * job.train.global_batch
        assert got["again"] == got["straight"] and got["counted"] == 5


DENSE, EXPERTS = dict(model=make_job().model), dict(model=MOE_DEEP)
PAIRS = {
    "shard 4 -> replica 2 x tp 2": (DENSE, ((1, 4, 1), {}), ((2, 1, 2), {})),
    "tp 2 x pp 2 -> shard 3": (DENSE, ((1, 1, 2), dict(axes=dict(pp=2))), ((1, 3, 1), dict(global_batch=6))),
    "replica 2 x shard 2 x tp 2 -> 1": (DENSE, ((2, 2, 2), {}), ((1, 1, 1), {})),
    "1 -> replica 2 x shard 2 x cp 2": (DENSE, ((1, 1, 1), {}), ((2, 2, 1), dict(axes=dict(cp=2)))),
    "moe: all axes at once": (
        EXPERTS,
        ((1, 2, 2), dict(axes=dict(pp=2, ep=4))),
        ((2, 2, 1), dict(axes=dict(cp=2, ep=2), zero=1)),
    ),
    "moe: ZB-V -> shard 2": (
        EXPERTS,
        ((1, 1, 2), dict(axes=dict(pp=2, cp=2, ep=2, schedule="zbv"))),
        ((1, 2, 1), dict(axes=dict(ep=2))),
    ),
}


SLOW = {"moe: all axes at once", "moe: ZB-V -> shard 2", "replica 2 x shard 2 x tp 2 -> 1", "tp 2 x pp 2 -> shard 3"}


@pytest.mark.parametrize(
    "model, source, target",
    [pytest.param(*pair, id=name, marks=[pytest.mark.slow] if name in SLOW else []) for name, pair in PAIRS.items()],
)
def test_it_loads_into_another_layout(pool, tmp_path, model, source, target):
    saved = make_job(source[0], **source[1], **model)
    name = pool.run("tests.train.resume_cases:case_resume", saved, dir=str(tmp_path))[0]["name"]
    job = make_job(target[0], **target[1], **model)
    for got in pool.run("tests.train.resume_cases:case_load", job, dir=str(tmp_path), name=name):
        assert got["wrong"] == []
        assert got["step"] == 2


def test_a_rank_reads_little_more_than_its_slices(pool, tmp_path):
    name = pool.run("tests.train.resume_cases:case_resume", make_job((1, 4, 1), model=MOE), dir=str(tmp_path))[0][
        "name"
    ]
    job = make_job((1, 8, 1), model=MOE)
    sizes = [r["bytes_read"] for r in pool.run("tests.train.resume_cases:case_load", job, dir=str(tmp_path), name=name)]
    whole = sum(f.stat().st_size for f in tmp_path.glob("*/rank-*.bin"))
    assert max(sizes) < whole / 2, (sizes, whole)
