"""The membership protocol, in every order there is: no step done twice or undone in silence, no two workers for one
rank, and an end that can be reached from wherever it has got to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.control import gang
from phalanx.control.gang import Gang
from phalanx.control.messages import Parked
from tests.control.model import Broken, Model


@pytest.mark.parametrize("budget", [dict(deaths=1), dict(deaths=0, lies=1)], ids=str)
def test_two_replicas_and_a_spare_in_every_order(budget):
    states, _, _ = Model(replicas=2, steps=1, **budget).explore()
    assert states > 10_000, "the model has become tame"


def test_the_only_replica_is_believed_dead_and_goes_on():
    """Nobody of its generation answers: until its lease ends it may commit steps, and nobody else may."""
    states, _, _ = Model(replicas=1, steps=2, deaths=1, lies=1).explore()
    assert states > 1000


def test_a_generation_that_is_replaced_before_its_lease_ends_is_found(monkeypatch):
    original = Gang._resolve

    def resolve(self):
        self.gen.over = self.gen.over or "it must be"
        original(self)

    monkeypatch.setattr(Gang, "_resolve", resolve)
    with pytest.raises(Broken):
        Model(replicas=1, steps=2, deaths=0, lies=1).explore()


@pytest.mark.parametrize("replicas, depth", [(2, 6), (3, 4)])
def test_whatever_can_go_wrong_in_a_few_moves(replicas, depth):
    states, _, _ = Model(replicas, deaths=2, lies=1, hurries=1, repeats=1).explore(depth)
    assert states > 5000


@pytest.mark.slow
@pytest.mark.parametrize(
    "budget",
    [dict(replicas=3, steps=1), dict(replicas=2, steps=1, repeats=1), dict(replicas=2, steps=2)],
    ids=str,
)
def test_three_replicas_and_a_spare_in_every_order(budget):
    states, _, _ = Model(deaths=1, **budget).explore()
    assert states > 90_000


# -- planted bugs


def test_a_commit_before_the_last_vote_is_found(monkeypatch):
    monkeypatch.setattr(Model, "may_commit", staticmethod(lambda votes, peers: votes >= peers - 1))
    with pytest.raises(Broken):
        Model(replicas=2, steps=1).explore(depth=12)


def test_a_controller_that_accepts_an_old_generation_is_found(monkeypatch):
    original = gang.HANDLERS[Parked]
    late = {Parked: lambda g, e: original(g, replace(e, generation=g.generation))}
    monkeypatch.setattr(gang, "HANDLERS", {**gang.HANDLERS, **late})
    with pytest.raises(Broken):
        Model(replicas=2, steps=2, repeats=1).explore()


def test_a_decision_before_the_last_is_parked_is_found(monkeypatch):
    def halt(self, quiet=False):
        original(self, quiet)
        if self.phase == "halting" and len(self.gen.waiting) == 1:
            found = self.members.workers[worker := self.gen.waiting.pop()]
            self.gen.roll.park(found.rank, (worker,), found.copy)
            self._resolve()

    original = Gang._halt
    monkeypatch.setattr(Gang, "_halt", halt)
    with pytest.raises(Broken):
        Model(replicas=3, steps=1).explore()
