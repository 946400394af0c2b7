"""The engine is disposable, the state is not; the replicas' group is not part of either."""

import dataclasses

import numpy as np
import pytest

from phalanx.core.held import travels_whole
from phalanx.core.shape import ModelConfig
from tests.cases import EVEN, MOE, TWO_LEVELS, make_job
from tests.train.engine_cases import listening_addresses

CASES = "tests.train.engine_cases:"


@pytest.mark.parametrize(
    "layout, reduction",
    [
        ((1, 2, 1), "fast"),
        pytest.param((2, 2, 1), "exact", marks=pytest.mark.slow),
        ((2, 1, 2), "exact"),
        pytest.param((2, 2, 2), "fast", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_after_a_fault_in_backward_a_rebuilt_engine_gives_the_clean_gradients(pool, layout, reduction):
    job = make_job(layout, model=ModelConfig(), precision="fp32", reduction=reduction, global_batch=8)
    for answer in pool.run(CASES + "rebuild", job, times=3):
        assert isinstance(answer, dict), answer


@pytest.mark.parametrize("layout", [(2, 2, 1), (2, 1, 1), (1, 1, 2)], ids=["sharded", "whole", "tp"])
def test_rebuilding_many_times_leaks_neither_threads_nor_descriptors(pool, layout):
    answers = pool.run(CASES + "rebuild", make_job(layout, precision="fp32"), times=8 if layout == (2, 2, 1) else 3)
    for answer in answers:
        *rebuilt, without, closed = answer["resources"]
        assert _no_more(rebuilt[-1], rebuilt[0]) and _no_more(closed, without), answer["resources"]


def _no_more(after, before):
    """Fewer is no leak: a connection of the case before may still have been closing."""
    return all(now <= then for now, then in zip(after, before, strict=True))


def test_redoing_the_step_on_the_half_run_engine_is_wrong(pool):
    """If this ever fails, torch has changed, and rebuilding may no longer be needed."""
    assert not all(pool.run(CASES + "retry_without_rebuild", make_job((1, 2, 1), precision="fp32", global_batch=8)))


@pytest.mark.parametrize("ranks_per_node", [0, 4])
def test_the_cross_replica_group_can_be_re_formed_between_steps(pool, ranks_per_node):
    job = make_job((4, 2, 1), precision="fp32", ranks_per_node=ranks_per_node)
    assert all(pool.run(CASES + "reform_cross", job))


def test_each_replica_is_a_world_of_its_own(pool):
    assert pool.run(CASES + "world_size", make_job((2, 2, 2))) == [4] * 8


def test_a_lost_replica_fails_the_step_and_changes_nothing(pool):
    answers = pool.run(CASES + "lose_cross", make_job((2, 2, 1), precision="fp32"), timeout=60)
    for answer in answers[:2]:
        assert "across replicas failed" in answer["failed"], answer
        assert answer["untouched"] and answer["step"] == 0


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_the_first_bucket_is_reduced_while_the_backward_still_runs(pool, reduction):
    deep = dataclasses.replace(EVEN, num_layers=12)
    job = make_job((2, 2, 1), model=deep, precision="fp32", reduction=reduction, bucket_mb=0.05, seq_len=128)
    for steps in pool.run(CASES + "overlap", job):
        for buckets in steps:
            assert len(buckets) >= 3
            assert all(size >= 0.05e6 for size, _, _ in buckets[:-1])
        # In some step: the thread may not get a core in time on a busy machine.
        assert min(buckets[0][1] for buckets in steps) < 0, "no first reduction started before the backward's end"
        assert min(buckets[0][2] for buckets in steps) < 0, "it never ended before the backward did"


def test_one_large_bucket_leaves_only_after_the_backward_so_the_test_above_can_fail(pool):
    job = make_job((2, 2, 1), model=EVEN, precision="fp32", bucket_mb=25.0)
    for steps in pool.run(CASES + "overlap", job):
        assert all(buckets[0][1] >= 0 for buckets in steps)


def test_zero_stages_communicate_as_they_should(pool):
    """Per step of 2 micro-batches and 5 FSDP2 modules (2 blocks, embedding, head and the root)."""
    counts = {}
    for zero in (1, 2, 3):
        job = make_job((1, 4, 1), model=EVEN, precision="fp32", zero=zero)
        counts[zero] = pool.run(CASES + "collectives", job)[0]
    assert counts[1] == {"gathers": 5, "scatters": 5}  # once per step
    assert counts[2] == {"gathers": 5, "scatters": 10}  # gradients every micro-batch
    assert counts[3] == {"gathers": 14, "scatters": 10}  # blocks twice per micro-batch, the others once


@pytest.mark.parametrize("compiler", ["none", "aot_eager"])
def test_recomputation_keeps_less(pool, compiler):
    kept = {}
    for mode in ("none", "selective", "full"):
        job = make_job((1, 1, 1), model=EVEN, precision="fp32", recompute=mode, compile=compiler)
        (kept[mode],) = pool.run(CASES + "saved_bytes", job)
    assert kept["full"] < kept["none"] / 2, kept
    assert kept["selective"] < kept["none"], kept


@pytest.mark.parametrize("codec, ratio, error", [("bf16", 0.5, 4e-3), ("int8", 0.27, 3e-2)])
@pytest.mark.parametrize("layout, nodes", [((2, 1, 1), 0), ((4, 1, 1), 2)], ids=str)
def test_compressed_traffic_is_small_and_its_error_does_not_stay(pool, tmp_path, codec, ratio, error, layout, nodes):
    options = dict(model=EVEN, precision="fp32", ranks_per_node=nodes, clip=0.0, bucket_mb=0.1)
    plain, packed = make_job(layout, **options), make_job(layout, compress=codec, **options)
    plain_bytes = pool.run(CASES + "compression", plain, steps=1, stem=str(tmp_path / "plain"))[0]
    packed_bytes = pool.run(CASES + "compression", packed, steps=8, stem=str(tmp_path / "packed"))[0]
    want = np.load(tmp_path / "plain-0.npz")["one"]
    got = [np.load(tmp_path / f"packed-{rank}.npz") for rank in range(layout[0])]
    assert all(np.array_equal(g["mean"], got[0]["mean"]) for g in got), "the replicas decoded different sums"
    once, mean = (np.linalg.norm(got[0][k] - want) / np.linalg.norm(want) for k in ("one", "mean"))
    assert once < error
    assert mean < once / 3, "what rounding takes must come back with the next step"
    if not nodes:
        assert packed_bytes < ratio * 1.1 * plain_bytes


@pytest.mark.parametrize("codec, bar", [("bf16", 8e-3), ("int8", 5e-2)])
@pytest.mark.parametrize("layout, nodes", [((2, 2, 1), 0), ((4, 1, 1), 2)], ids=str)
def test_no_parameter_pays_for_anothers_compression(pool, tmp_path, codec, bar, layout, nodes):
    """A norm's gradient in one block with an embedding's would be rounded away."""
    options = dict(model=MOE, precision="fp32", clip=0.0, ranks_per_node=nodes)
    if nodes:
        options["collectives"] = TWO_LEVELS
    stems = {name: str(tmp_path / name) for name in ("none", codec)}
    for name, stem in stems.items():
        pool.run(CASES + "first_gradients", make_job(layout, compress=name, **options), stem=stem)
    for rank in range(layout[0] * layout[1]):
        want, got = (np.load(f"{stem}-{rank}.npz") for stem in stems.values())
        for name in want.files:
            error = np.linalg.norm(got[name] - want[name]) / (np.linalg.norm(want[name]) or 1.0)
            whole = travels_whole(name, got[name].shape)
            assert error <= (1e-5 if whole else bar), (name, error)
        assert any(travels_whole(name, want[name].shape) for name in want.files)


def test_bf16_computes_in_bf16_over_fp32_masters_and_reduces_in_fp32(pool):
    for seen in pool.run(CASES + "dtypes", make_job((2, 2, 1), precision="bf16")):
        assert seen == {
            "activation": "torch.bfloat16",
            "grad": "torch.float32",
            "weight": "torch.bfloat16",
            "master": "torch.float32",
            "moment": "torch.float32",
        }


def test_on_one_machine_everything_listens_on_loopback_only(pool):
    for addresses in pool.run(CASES + "listening", make_job((2, 2, 1))):
        assert addresses and set(addresses) == {"0100007F"}, addresses
    assert listening_addresses(pool.store_pid) == [], "groups meet without a port"


@pytest.mark.parametrize("prefetch", [0, 1])
def test_the_next_blocks_parameters_are_gathered_ahead(pool, prefetch):
    job = make_job((1, 2, 1), precision="fp32", prefetch=prefetch)
    assert pool.run(CASES + "prefetched", job) == [prefetch == 1] * 2


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_a_step_that_is_not_finite_changes_nothing(pool, reduction):
    for answer in pool.run(CASES + "not_finite", make_job((1, 2, 1), precision="fp32", reduction=reduction)):
        assert answer == {"untouched": True, "goes on": True, "kept": 0}, answer


def test_closing_an_engine_does_not_wait_for_a_silent_replica(pool):
    """The replica comes only after the close, so an engine that waited for it would wait for ever."""
    assert pool.run(CASES + "close_with_silent_peer", make_job((2, 1, 1), precision="fp32")) == [True, True]


def test_a_group_that_could_not_be_formed_does_not_keep_the_next_from_it(pool):
    """torch counts groups, even those that failed, and a rank that has counted differently is never found."""
    assert pool.run(CASES + "formed_after_a_failure", make_job((1, 2, 1)), timeout=20) == [2, 2]
