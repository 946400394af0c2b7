"""A thousand worlds, each with a mix of faults of its own, and the judge sees nothing wrong; with a bug planted, it
does. A seed that fails is told in full by `python -m tests.control.sim SEED`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.control.gang import Gang
from phalanx.control.member import Member
from phalanx.control.membership import Membership
from phalanx.control.roll import Roll
from phalanx.control.sources import Copy, Lineage
from tests.control.sim import seeds
from tests.control.sim.__main__ import attempt, main
from tests.control.sim.world import Proc

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", [2077, 2737, 3773, 4421])
def test_fewer_replicas_while_a_node_is_being_replaced(seed):
    """The one that was to take over must not stay at a place that nobody wants."""
    seeds.run(seed)


def test_a_late_form_does_not_make_a_worker_drop_what_it_has_voted_for():
    """Seed 74477: it served as a source of its own generation once more, and a committed step was silently undone."""
    seeds.run(74477)
    member = Member(1, steps=9)
    member.form(2, 0, None)
    assert not member.may_serve(2) and not member.may_serve(1) and member.may_serve(3)


def test_a_thousand_seeds():
    failed, faults, rungs = [], 0, set()
    for seed in range(1000):
        _, result, error = attempt(seed)
        if result is None:
            failed.append(f"python -m tests.control.sim {seed}\n{error}")
        else:
            faults += len(result.faults)
            rungs |= result.rungs
    assert not failed, "\n".join(failed[:5])
    assert faults > 3000 and rungs == {-1, 0, 1, 2, 3, 4, 5, 6}, "the seeds have become tame"


def test_a_seed_is_the_same_world_wherever_it_runs():
    """The digest is over all that the controller heard and said, and when."""
    code = "from tests.control.sim import seeds; print(*(seeds.run(s).digest for s in range(20)))"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={"PYTHONHASHSEED": hash_seed}, capture_output=True, check=True
        ).stdout
        for hash_seed in ("1", "77")
    ]
    assert runs[0] == runs[1] == (" ".join(seeds.run(s).digest for s in range(20)) + "\n").encode()


def test_the_command_tells_of_a_seed_and_of_many(capsys):
    assert not main(["3"]) and not main(["--seeds", "0:4"])
    told = capsys.readouterr().out
    assert f"digest {seeds.run(3).digest}" in told and "4 seeds in" in told


# -- planted bugs


def caught(most=300):
    """The first seed that fails, and what the judge says."""
    for seed in range(most):
        try:
            seeds.run(seed)
        except AssertionError as error:
            return str(error) or repr(error)
    pytest.fail("nobody sees it")


def test_a_worker_that_accepts_an_old_generation_is_caught(monkeypatch):
    def form(self, generation, step, source):
        self.generation = min(self.generation, generation - 1)
        return original(self, generation, step, source)

    original = Member.form
    monkeypatch.setattr(Member, "form", form)
    caught()


def test_a_controller_that_accepts_an_old_generation_is_caught(monkeypatch):
    original = Gang._on_Parked
    monkeypatch.setattr(Gang, "_on_Parked", lambda g, e: original(g, replace(e, generation=g.generation)))
    caught()


def test_a_commit_before_the_last_vote_is_caught(monkeypatch):
    monkeypatch.setattr(Proc, "may_commit", staticmethod(lambda round_: len(round_.votes) >= len(round_.crew) - 1))
    caught()


def test_a_decision_before_the_last_is_parked_is_caught(monkeypatch):
    def halt(self, quiet=False):
        original(self, quiet)
        if self.phase == "halting" and len(self.waiting) == 1:
            self.waiting.clear()
            self._resolve()

    original = Gang._halt
    monkeypatch.setattr(Gang, "_halt", halt)
    caught()


def test_a_spare_given_to_two_places_is_caught(monkeypatch):
    def sit(self, place, name, which="now"):
        original(self, place, name, which)
        self.spares.add(name)

    original = Membership.sit
    monkeypatch.setattr(Membership, "sit", sit)
    assert "a spare is given to one place" in caught()


def test_a_start_before_the_last_is_ready_is_caught(monkeypatch):
    def on_ready(self, event):
        changed = original(self, event)
        if self.phase == "forming" and len(self.waiting) == 1:
            self.waiting.clear()
            self._start()
        return changed

    original = Gang._on_Ready
    monkeypatch.setattr(Gang, "_on_Ready", on_ready)
    caught()


def test_a_prepared_step_that_is_thrown_away_is_caught(monkeypatch):
    def resolve(self):
        for worker in self.members.workers.values():
            if worker.copy:
                worker.copy = Copy(worker.copy.step, worker.copy.step, worker.copy.made)
        self._roll = Roll.of(self.form, self.members.workers)
        original(self)

    original = Gang._resolve
    monkeypatch.setattr(Gang, "_resolve", resolve)
    assert "silently undone" in caught()


def test_a_prepared_step_that_was_redone_and_is_applied_is_caught(monkeypatch):
    monkeypatch.setattr(Lineage, "step_of", lambda self, copy: copy.prepared if copy else -1)
    caught()


def test_a_loss_that_is_not_recorded_is_caught(monkeypatch):
    def resolve(self):
        original(self)
        self.certain = True

    original = Gang._resolve
    monkeypatch.setattr(Gang, "_resolve", resolve)
    assert "silently undone" in caught()


def test_a_state_that_differs_and_is_not_compared_is_caught(monkeypatch):
    monkeypatch.setattr(Gang, "_wrong", lambda self, coordinate: [])
    assert "another state" in caught()


def test_a_state_that_depends_on_the_order_of_a_fold_is_caught(monkeypatch):
    """As if something were kept outside the journal."""
    monkeypatch.setattr(Gang, "from_bytes", staticmethod(lambda data: Gang.of(*WHERE)))
    original = Gang.of

    def of(layout, steps, policy, start=0):
        WHERE[:] = [layout, steps, policy]
        return original(layout, steps, policy, start)

    monkeypatch.setattr(Gang, "of", staticmethod(of))
    assert "folds to another state" in caught()


WHERE: list = []
