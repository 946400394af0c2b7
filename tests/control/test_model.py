"""The protocol of both levels, in every possible order of events: no step is done twice or silently undone, no rank has
two workers, and an end can be reached from every state."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.control import gang
from phalanx.control.gang import Gang
from phalanx.control.messages import Parked, Parted
from tests.control.model import Broken, Model

# One replica of two, the ranks of a world, or everything is lost or believed to be lost. In the last case nobody of a
# generation answers: until its lease ends it may commit steps, and nobody else may.
WHOLE = [
    (dict(replicas=2, spares=0, deaths=1), 20_000),
    (dict(replicas=2, spares=0, lies=1), 7_000),
    (dict(replicas=1, shards=2, deaths=1), 8_000),
    (dict(replicas=1, shards=2, lies=1), 10_000),
    (dict(replicas=1, deaths=1, steps=2), 400),
    (dict(replicas=1, lies=1, steps=2), 100),
]


@pytest.mark.parametrize("budget, states", WHOLE, ids=str)
def test_every_order_there_is(budget, states):
    assert Model(**budget).explore()[0] > states, "the model has become tame"


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget",
    [
        dict(replicas=1, deaths=1, lies=1, steps=2),
        dict(replicas=2, deaths=1),
    ],
    ids=str,
)
def test_every_order_of_a_larger_gang(budget):
    assert Model(**budget).explore()[0] > 20_000


EVERYTHING = dict(deaths=2, lies=1, hurries=1, repeats=1)


@pytest.mark.parametrize(
    "budget, depth",
    [
        (dict(replicas=2, **EVERYTHING), 5),
        (dict(replicas=3, **EVERYTHING), 4),
        (dict(replicas=2, shards=2, **EVERYTHING), 4),
        (dict(replicas=2, deaths=1), 11),
        (dict(replicas=2, shards=2, spares=0, deaths=1), 6),
    ],
    ids=str,
)
def test_all_that_can_go_wrong_in_a_few_moves(budget, depth):
    assert Model(**budget).explore(depth)[0] > 2000


# -- planted bugs


def end_lease(m):
    def resolve(self):
        self.gen.over = self.gen.over or "it must be"
        original(self)

    original = Gang._resolve
    m.setattr(Gang, "_resolve", resolve)


def drop_prepared(kind):
    """Plant a bug: nobody hears that a step was voted for."""

    def plant(m):
        heard = gang.HANDLERS[kind]
        deaf = {kind: lambda g, event: heard(g, replace(event, prepared=event.step))}
        m.setattr(gang, "HANDLERS", {**gang.HANDLERS, **deaf})

    return plant


PLANTED = {
    "a generation is replaced before its lease ends": (end_lease, dict(replicas=1, steps=2, lies=1)),
    "a step is committed before the last vote": (
        lambda m: m.setattr(Model, "may_commit", staticmethod(lambda votes, replicas: votes >= replicas - 1)),
        dict(replicas=2, deaths=1),
    ),
    "what a replica has prepared is thrown away": (drop_prepared(Parted), dict(replicas=2)),
    "what a rank has prepared is thrown away": (drop_prepared(Parked), dict(replicas=1, shards=2, deaths=1)),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug, monkeypatch):
    plant, budget = PLANTED[bug]
    plant(monkeypatch)
    with pytest.raises(Broken):
        Model(**budget).explore(depth=20)
