"""The planner's model of the engine: the same tensors, groups that add up, and calls that can be counted by hand.
tests/train/test_dryrun.py compares it with the program itself."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.core.job import Job, OptimizerConfig, TrainConfig
from phalanx.core.layout import CHUNKS, Layout
from phalanx.core.shape import ModelConfig
from phalanx.model import load_family
from phalanx.parallel import cross, shard, stages
from phalanx.parallel.schema import describe
from phalanx.parallel.tree import cover
from phalanx.plan.cost import traffic as engine
from phalanx.plan.cost import units
from phalanx.plan.cost.candidates import Candidates
from phalanx.plan.cost.rank_bytes import rank_params, sharded
from phalanx.plan.cost.sizes import ModelShape
from phalanx.plan.cost.traffic import Key, Volume, expect, num_nodes
from phalanx.plan.cost.units import AXES, members, tensors
from phalanx.train import optimizer

DENSE = ModelConfig(vocab_size=301, dim=48, num_layers=9, num_heads=6, num_kv_heads=2, ffn_dim=99)
MOE = dataclasses.replace(DENSE, family="moe", num_experts=6, top_k=2, shared_experts=1, dense_layers=2, expert_dim=21)
AXIS = st.integers(1, 4)
LAYOUTS = st.builds(
    lambda replica, shard, tp, pp, cp, ep: Layout(replica, shard, tp, pp=pp, cp=cp, ep=ep if shard % ep == 0 else 1),
    AXIS, AXIS, AXIS, AXIS, AXIS, AXIS,
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "pp"), [(DENSE, 1), (DENSE, 3), (MOE, 1), (MOE, 3), (dataclasses.replace(DENSE, tied=True), 1)]
)
def test_tensors_are_those_of_the_model(model, pp):
    """Otherwise every byte of a plan would belong to another model, or to other stages."""
    layout = Layout(pp=pp, schedule="interleaved")
    assert tensors(model, layout) == describe(load_family(model.family), model, layout)


@given(LAYOUTS, st.data())
def test_a_group_is_the_ranks_that_differ_in_its_axis_alone(layout, data):
    coord = layout.coord(data.draw(st.integers(0, layout.world_size - 1)))
    varies = {"tp": ("tp",), "cp": ("cp",), "shard": ("shard",), "pp": ("pp",), "state": ("shard", "cp")}
    varies["inside"] = ("pp", "shard", "cp", "tp")
    for axis, free in varies.items():
        fixed = {a: getattr(coord, a) for a in layout.AXES if a not in free}
        others = [layout.coord(rank) for rank in range(layout.world_size)]
        same = [layout.inside(c) for c in others if all(getattr(c, a) == v for a, v in fixed.items())]
        assert list(members(layout, coord, axis)) == same, axis
    meeting = set(members(layout, coord, "ep")) & set(members(layout, coord, "edp"))
    assert meeting == {layout.inside(coord)}
    assert len(members(layout, coord, "ep")) * len(members(layout, coord, "edp")) == layout.stage_size
    assert {*AXES} == {*varies, "ep", "edp"}


def test_figures_of_the_engine_that_the_plan_repeats():
    """The planner cannot read them from the engine because it does not import torch."""
    assert (engine.PARCEL_NUMEL, engine.PARCEL_ALIGN) == (optimizer.PARCEL_NUMEL, optimizer.ALIGN_NUMEL)
    assert (engine.CODEC_BLOCK, units.EMBEDDING_COST) == (cross.BLOCK, stages.EMBEDDING_COST)
    assert {p: dtype.itemsize for p, dtype in shard.MASTER_DTYPE.items()} == engine.MASTER_BYTES
    assert {p: dtype.itemsize for p, dtype in shard.COMPUTE_DTYPE.items()} == engine.COMPUTE_BYTES


@given(st.integers(0, 300), st.integers(0, 300))
def test_tree_nodes_are_counted_as_the_exact_sum_makes_them(start, length):
    assert num_nodes(start, start + length) == len(cover(range(start, start + length)))


def make_job(model=DENSE, micro=1, train=None, optimizer=None, **layout):
    where = Layout(**layout)
    sizes = {"global_batch": micro * where.data_ranks, "micro_batch": 1, "seq_len": 48, "precision": "bf16"}
    return Job(
        model=model,
        layout=where,
        train=TrainConfig(**sizes | (train or {})),
        optimizer=OptimizerConfig(**optimizer or {}),
    )


def test_calls_and_bytes_counted_by_hand():
    """A layer has 4 matrices of 4 x 4, 2 norms of 4 and 3 matrices of 4 x 6: 144 elements. Outside it are 2 matrices of
    8 x 4 and a norm, each by itself: 68. A layer is gathered twice in 2 bytes and the others once; gradients take 4
    bytes; then come two sums of 8 bytes."""
    model = ModelConfig(vocab_size=8, dim=4, num_layers=1, num_heads=2, num_kv_heads=2, ffn_dim=6)
    job = make_job(model, shard=2)
    got = expect(job, job.layout.coord(1))
    assert got.traffic == {
        Key("all-gather", "shard/inside", 2): Volume(5, 2 * (2 * 144 + 68)),
        Key("reduce-scatter", "shard/inside", 2): Volume(4, 4 * (144 + 68)),
        Key("all-reduce", "shard/inside", 2): Volume(2, 16),
    }
    assert (got.weight_bytes, got.gradient_bytes, got.moment_bytes) == (424, 424, 848)  # half of 212 elements


def test_zero_stages_and_micro_batches():
    """ZeRO-3 pays for every micro-batch, ZeRO-2 for its gradients, ZeRO-1 for neither."""
    calls = {}
    for zero in (1, 2, 3):
        for micro in (1, 4):
            job = make_job(replica=2, shard=3, micro=micro, zero=zero)
            traffic = expect(job, job.layout.coord(0)).traffic
            calls[zero, micro] = [
                traffic[Key(kind, "shard/inside", 3)].count for kind in ("all-gather", "reduce-scatter")
            ]
    beside = 3  # embedding, norm, head
    each = DENSE.num_layers + beside
    assert calls[1, 1] == calls[1, 4] == calls[2, 1] == [each, each]
    assert calls[2, 4] == [each, 4 * each]
    assert calls[3, 4] == [4 * (2 * DENSE.num_layers + beside), 4 * each] == [4 * n for n in calls[3, 1]]


@pytest.mark.parametrize("schedule", sorted(CHUNKS))
def test_what_is_sent_is_received(schedule):
    """This holds along a whole pipeline; the two ends of the model have no further neighbour."""
    job = make_job(micro=4, pp=4, tp=2, schedule=schedule)
    layout, sums = job.layout, {"send": 0, "receive": 0}
    for pp in range(layout.pp):
        coord = layout.coord(pp * layout.stage_size)
        for kind in sums:
            sums[kind] += expect(job, coord).traffic[Key(kind, "pp", 4)].count
    turns = 1 if schedule == "zbv" else 0  # two neighbouring stages are on one rank
    assert sums["send"] == sums["receive"] == 2 * 4 * (layout.num_stages - 1 - turns)


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_no_weight_is_lost_or_held_twice(model):
    """Weights that every tp rank holds whole are the exception."""
    job = make_job(model, replica=2, shard=3, tp=2, pp=2, cp=2, ep=3 if model is MOE else 1)
    held = sum(expect(job, job.layout.coord(rank)).weight_bytes for rank in range(job.layout.world_size))
    copies = {h.name: 2 if h.tp_dim is None and not h.experts else 1 for h in tensors(model, job.layout)}
    whole = sum(h.numel * copies[h.name] for h in tensors(model, job.layout))
    assert held == 2 * 4 * whole


LLAMA = ModelConfig(vocab_size=128256, dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14336)
MIXTRAL = dataclasses.replace(LLAMA, family="moe", vocab_size=32000, num_experts=8, top_k=2)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (LLAMA, {"shard": 64, "tp": 2}),
        (LLAMA, {"shard": 4, "cp": 2, "tp": 4, "pp": 4}),
        (MIXTRAL, {"shard": 16, "tp": 2, "ep": 4}),
        (MIXTRAL, {"shard": 8, "tp": 2, "pp": 4, "ep": 8}),
    ],
)
def test_the_cost_model_counts_the_state_of_the_fullest_rank(model, layout):
    """Master weight and moments take 12 bytes per parameter. With fewer, a layout that does not fit would be called
    fitting."""
    job = make_job(model, **layout)
    where, columns = job.layout, Candidates.of(**layout)
    ranks = [expect(job, where.coord(pp * where.stage_size)) for pp in range(where.pp)]
    fullest = max(rank.weight_bytes + rank.moment_bytes for rank in ranks)
    planned = 12 * float(sharded(columns, *rank_params(ModelShape.from_config(model, 8192), columns))[0])
    assert 0.999 < planned / fullest < 1.08


def test_a_bucket_is_sent_when_it_is_full():
    layer_bytes = {}
    for bucket_mb in (1e-6, 1000.0):
        job = make_job(replica=4, shard=2, train={"bucket_mb": bucket_mb})
        layer_bytes[bucket_mb] = expect(job, job.layout.coord(0)).traffic[Key("all-reduce", "replica", 4)]
    many, one = layer_bytes[1e-6], layer_bytes[1000.0]
    assert (many.count, one.count) == (1 + DENSE.num_layers + 3, 2)  # the count of tokens goes first
    assert many.size_bytes == one.size_bytes


def test_the_head_crosses_before_the_layers_and_the_embedding_after_them():
    """Otherwise the two largest matrices of a model would both wait for the end of backward. If tied, they are one
    matrix, which has no gradient before that."""
    layers = [f"layers.{i}" for i in reversed(range(DENSE.num_layers))]
    for ranks, tied, order in (
        (1, False, ["head", "rest", *layers, "embed"]),
        (2, False, ["head", *layers, "rest", "embed"]),
        (2, True, [*layers, "rest"]),
    ):
        job = make_job(dataclasses.replace(DENSE, tied=tied), replica=2, shard=ranks)
        held = tensors(job.model, job.layout)
        assert [unit.name for unit in units.units(held, job.layout, job.layout.coord(0))] == order


def test_an_unknown_family_is_refused():
    with pytest.raises(UserError, match=r"model\.family = 'image'") as refused:
        expect(make_job(dataclasses.replace(DENSE, family="image")), Layout().coord(0))
    assert refused.value.remedy
