"""Messages in tiers give what the plain collectives give. When this fails, gradients or parameters end on
the wrong rank, or a job on several nodes hangs when one of them is lost."""

import math

import pytest

from tests.cases import BY_SIZE, FLAT, ODD, TWO_LEVELS, assemble, fingerprint, make_job

CASES = "tests.parallel.tier_cases:"


@pytest.mark.parametrize(
    "shard, per_node, algorithm",
    [(4, 2, "hierarchical"), (6, 2, "hierarchical"), (8, 4, "hierarchical"), (8, 2, "racks")],
)
def test_every_collective_gives_what_the_plain_one_gives(pool, shard, per_node, algorithm):
    job = make_job((1, shard, 1), ranks_per_node=per_node, collectives=FLAT, global_batch=2 * shard)
    for answer in pool.run(CASES + "collectives", job, algorithm=algorithm):
        assert all(answer.values()), answer


@pytest.mark.parametrize(
    "layout, options, replica, shard",
    [
        ((4, 1, 1), dict(), {"flat"}, set()),
        ((4, 1, 1), dict(ranks_per_node=2, collectives=FLAT), {"flat"}, set()),
        ((4, 1, 1), dict(ranks_per_node=2, collectives=TWO_LEVELS), {"hierarchical"}, set()),
        ((4, 1, 1), dict(ranks_per_node=2, collectives=BY_SIZE), {"flat", "hierarchical"}, set()),
        ((1, 4, 1), dict(collectives=TWO_LEVELS), set(), set()),
        ((1, 4, 1), dict(ranks_per_node=2, collectives=FLAT), set(), set()),
        ((1, 4, 1), dict(ranks_per_node=2, collectives=TWO_LEVELS), set(), {"hierarchical"}),
        ((2, 2, 1), dict(ranks_per_node=2, collectives=TWO_LEVELS), {"flat"}, set()),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),
)
def test_what_is_formed_is_used_and_one_node_forms_nothing(pool, layout, options, replica, shard):
    for answer in pool.run(CASES + "ways", make_job(layout, precision="fp32", **options)):
        assert set(answer["replica"]) == replica and set(answer["shard"]) == shard
        assert all(answer["replica"].values()) and all(answer["shard"].values()), answer


def _bits(pool, folder, layout, **options):
    job = make_job(layout, model=ODD, **(dict(precision="fp32", reduction="exact", global_batch=8) | options))
    answers = pool.run("tests.cases:case_train", job, stem=str(folder / "run"), steps=2)
    losses = [math.fsum(x for a in answers for x in a["loss_sums"][s]).hex() for s in range(2)]
    return fingerprint(assemble(job, str(folder / "run"))) | {"losses": losses, "norms": answers[0]["norms"]}


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        pytest.param(dict(precision="bf16"), marks=pytest.mark.slow),
        pytest.param(dict(zero=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_exact_tree_gives_the_same_bits_whichever_way_it_goes(pool, tmp_path, options):
    want = _bits(pool, tmp_path, (1, 1, 1), **options)
    for layout, per_node in (((4, 1, 1), 2), ((1, 4, 1), 2), ((1, 8, 1), 4), ((2, 4, 1), 2), ((4, 2, 1), 4)):
        for collectives in (FLAT, TWO_LEVELS, BY_SIZE):
            got = _bits(pool, tmp_path, layout, ranks_per_node=per_node, collectives=collectives, **options)
            assert got == want, (layout, collectives)


def test_the_fast_sum_goes_by_another_order_so_the_test_above_can_fail(pool, tmp_path):
    options = dict(reduction="fast", ranks_per_node=2)
    flat, two = (_bits(pool, tmp_path, (1, 4, 1), collectives=c, **options) for c in (FLAT, TWO_LEVELS))
    assert flat["weights"] != two["weights"]


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("collectives", [FLAT, TWO_LEVELS], ids=["flat", "two levels"])
def test_when_a_replica_is_lost_its_whole_axis_fails_soon(pool, reduction, collectives):
    job = make_job((4, 1, 1), precision="fp32", reduction=reduction, ranks_per_node=2, collectives=collectives)
    for answer in pool.run(CASES + "lose_one", job, timeout=60)[:3]:
        assert "across replicas failed" in answer["failed"], answer
        assert answer["step"] == 0


def test_rebuilding_with_tiers_leaks_neither_threads_nor_descriptors(pool):
    job = make_job((1, 4, 1), precision="fp32", ranks_per_node=2, collectives=TWO_LEVELS)
    for answer in pool.run("tests.train.engine_cases:rebuild", job, times=6):
        assert isinstance(answer, dict), answer
        assert answer["resources"][-1] <= answer["resources"][2], answer["resources"]
