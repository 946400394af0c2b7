"""The order of the schedules, and how a model is cut into stages."""

import dataclasses

import pytest
import torch

from phalanx.core.errors import UserError
from phalanx.core.layout import CHUNKS, Layout
from phalanx.core.shape import ModelConfig
from phalanx.model import Family, load_family
from phalanx.parallel.pipeline import Kind, order
from phalanx.parallel.schema import describe
from phalanx.parallel.stages import cost, cut_stages
from tests.cases import DEEP, DEEPER, MOE

BACKWARDS = (Kind.FULL_BACKWARD, Kind.BACKWARD_INPUT)
SHAPES = [(2, 1), (2, 2), (2, 8), (3, 2), (3, 6), (4, 1), (4, 4), (4, 16), (8, 2), (8, 8), (8, 16)]


@pytest.mark.parametrize("schedule", CHUNKS)
@pytest.mark.parametrize("pp, num_micro", SHAPES)
def test_a_table_does_everything_once_and_in_order(schedule, pp, num_micro):
    layout = Layout(pp=pp, schedule=schedule)
    table = order(layout, num_micro)
    everything = sorted((s, m) for s in range(layout.num_stages) for m in range(num_micro))
    sent, received = [], []
    for rank, actions in table.items():
        seen: dict = {}
        for a in actions:
            seen.setdefault(a.computation_type, []).append((a.stage_index, a.microbatch_index))
            assert layout.rank_of_stage(a.stage_index) == rank
        mine = [(s, m) for s, m in everything if layout.rank_of_stage(s) == rank]
        back = [x for kind in BACKWARDS for x in seen.get(kind, [])]
        assert sorted(seen[Kind.FORWARD]) == mine and sorted(back) == mine
        assert seen.get(Kind.BACKWARD_WEIGHT, []) == [] or sorted(seen[Kind.BACKWARD_WEIGHT]) == sorted(
            seen[Kind.BACKWARD_INPUT]
        )
        for kind in (Kind.FORWARD, *BACKWARDS, Kind.BACKWARD_WEIGHT):  # what the exact sum stands on
            for stage in layout.stages_of(rank):
                micros = [m for s, m in seen.get(kind, []) if s == stage]
                assert micros == sorted(micros), (kind, stage)
        sent += [("F", s + 1, m) for s, m in seen.get(Kind.SEND_F, [])]
        sent += [("B", s - 1, m) for s, m in seen.get(Kind.SEND_B, [])]
        received += [("F", *x) for x in seen.get(Kind.RECV_F, [])] + [("B", *x) for x in seen.get(Kind.RECV_B, [])]
    assert sorted(sent) == sorted(received) and len(set(sent)) == len(sent)


@pytest.mark.parametrize("schedule, in_flight", [("gpipe", 8), ("1f1b", 4)])
def test_1f1b_keeps_as_many_micro_batches_as_stages_and_gpipe_all(schedule, in_flight):
    running = most = 0
    for action in order(Layout(pp=4, schedule=schedule), 8)[0]:
        running += (action.computation_type == Kind.FORWARD) - (action.computation_type in BACKWARDS)
        most = max(most, running)
    assert most == in_flight


def stages(config, **layout):
    family = load_family(config.family)
    with torch.device("meta"):
        model = family.build(config)
    return cut_stages(family, model, config, Layout(**layout))


def layers_of(where, num):
    return [sum(s == stage and name.startswith("layers.") for name, s in where.items()) for stage in range(num)]


def test_the_ends_count():
    """A head as heavy as three layers: the last stage has fewer of them."""
    plain = ModelConfig(vocab_size=8, num_layers=12)
    heavy = dataclasses.replace(plain, vocab_size=3 * (128 * 96 * 4 + 3 * 128 * 344) // 128)
    assert layers_of(stages(plain, pp=4), 4) == [3, 3, 3, 3]
    assert layers_of(stages(heavy, pp=4), 4)[-1] <= 2
    where = stages(heavy, pp=4)
    assert where["embed"] == 0 and where["norm"] == where["head"] == 3


def test_experts_count_by_what_a_token_meets():
    family = load_family("moe")
    with torch.device("meta"):
        few, many = (family.build(dataclasses.replace(MOE, num_experts=n)) for n in (4, 64))
    costs = [
        cost(model, family, dataclasses.replace(MOE, num_experts=n), "layers.2.moe.experts")
        for model, n in ((few, 4), (many, 64))
    ]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("config, layout", [(DEEP, dict(pp=2)), (DEEPER, dict(pp=4, schedule="zbv"))])
def test_names_do_not_depend_on_the_cut(config, layout):
    family = load_family("dense")
    whole, cut = describe(family, config), describe(family, config, Layout(**layout))
    assert [(i.name, i.shape, i.tp_dim) for i in whole] == [(i.name, i.shape, i.tp_dim) for i in cut]
    assert len({i.stage for i in cut}) == Layout(**layout).num_stages


def test_a_family_without_ends_is_told_what_to_do():
    dense = load_family("dense")
    family = Family(build=dense.build, init=dense.init, split=dense.split)
    with torch.device("meta"):
        model = family.build(DEEP)
    with pytest.raises(UserError, match=r"(?s)'embed\.weight' belongs to no stage.*Family\.first"):
        cut_stages(family, model, DEEP, Layout(pp=2))


def test_a_model_that_takes_no_input_from_another_stage_is_told_so():
    class Whole(load_family("dense").build):
        def forward(self, batch):
            return super().forward(batch)

    family = dataclasses.replace(load_family("dense"), build=Whole)
    with torch.device("meta"):
        model = family.build(DEEP)
    with pytest.raises(UserError, match=r"(?s)layout\.pp.*forward\(batch, x=None\)"):
        cut_stages(family, model, DEEP, Layout(pp=2))
