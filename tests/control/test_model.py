"""The membership protocol, in every order there is: no step done twice or undone in silence, no two workers for one
rank, and an end that can be reached from wherever it has got to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.control.gang import Gang
from phalanx.control.member import Member
from tests.control.model import Broken, Model


@pytest.mark.parametrize("budget", [dict(steps=2, deaths=1), dict(steps=1, deaths=0, lies=1)], ids=str)
def test_two_replicas_and_a_spare_in_every_order(budget):
    states, _, _ = Model(replicas=2, **budget).explore()
    assert states > 10_000, "the model has become tame"


@pytest.mark.parametrize("replicas, depth", [(2, 6), (3, 4)])
def test_whatever_can_go_wrong_in_a_few_moves(replicas, depth):
    states, _, _ = Model(replicas, deaths=2, lies=1, hurries=1, repeats=1).explore(depth)
    assert states > 5000


@pytest.mark.slow
@pytest.mark.parametrize("budget", [dict(replicas=3, deaths=1), dict(replicas=2, deaths=1, repeats=1)], ids=str)
def test_three_replicas_and_a_spare_in_every_order(budget):
    states, _, _ = Model(steps=1, **budget).explore()
    assert states > 90_000


# -- planted bugs


def test_a_commit_before_the_last_vote_is_found(monkeypatch):
    monkeypatch.setattr(Model, "may_commit", staticmethod(lambda votes, peers: votes >= peers - 1))
    with pytest.raises(Broken):
        Model(replicas=2, steps=1).explore(depth=12)


def test_a_controller_that_accepts_an_old_generation_is_found(monkeypatch):
    original = Gang._on_Parked
    monkeypatch.setattr(Gang, "_on_Parked", lambda g, e: original(g, replace(e, generation=g.generation)))
    with pytest.raises(Broken):
        Model(replicas=2, steps=2, repeats=1).explore()


@pytest.mark.slow
def test_a_worker_that_accepts_an_old_generation_is_found(monkeypatch):
    def form(self, generation, step, source):
        self.generation = min(self.generation, generation - 1)
        return original(self, generation, step, source)

    original = Member.form
    monkeypatch.setattr(Member, "form", form)
    with pytest.raises(Broken):
        Model(replicas=2, steps=2, repeats=1).explore()


def test_a_decision_before_the_last_is_parked_is_found(monkeypatch):
    def halt(self, quiet=False):
        original(self, quiet)
        if self.phase == "halting" and len(self.waiting) == 1:
            found = self.members.workers[worker := self.waiting.pop()]
            self._roll.park(found.rank, (worker,), found.copy)
            self._resolve()

    original = Gang._halt
    monkeypatch.setattr(Gang, "_halt", halt)
    with pytest.raises(Broken):
        Model(replicas=3, steps=1).explore()
