"""Five hundred worlds, each with a mix of faults of its own, and the judge sees nothing wrong; with a bug planted, it
does. A seed that fails is told in full by `python -m tests.control.sim SEED`."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from phalanx.control import agent, gang
from phalanx.control.fold import Poison
from phalanx.control.gang import Gang
from phalanx.control.generation import Generation
from phalanx.control.member import Member
from phalanx.control.membership import Membership
from phalanx.control.messages import Form, Ready
from phalanx.control.roll import Roll
from phalanx.control.sources import Copy, Lineage
from tests.control.sim import seeds
from tests.control.sim.__main__ import attempt, main
from tests.control.sim.nodes import Proc

ROOT = Path(__file__).parents[2]


def test_a_late_form_does_not_make_a_worker_drop_what_it_has_voted_for():
    """It served as a source of its own generation once more, and a committed step was silently undone."""
    member = Member(1, steps=9)
    member.form(2, 0, None)
    assert not member.may_serve(2) and not member.may_serve(1) and member.may_serve(3)


def test_five_hundred_seeds():
    failed, faults, rungs, causes = [], 0, set(), Counter()
    for seed in range(500):
        _, result, error = attempt(seed)
        if result is None:
            failed.append(f"python -m tests.control.sim {seed}\n{error}")
        else:
            faults += len(result.faults)
            rungs |= result.rungs
            causes[result.cause] += 1
    assert not failed, "\n".join(failed[:5])
    assert faults > 1500 and rungs == {-1, 0, 1, 2, 3, 4, 6}, "the seeds have become tame"
    assert causes["done"] > 400 and causes["failed"] and causes["start"], causes


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


def plant(monkeypatch, kind, make):
    """Another handler of a kind of events, made of the true one."""
    monkeypatch.setattr(gang, "HANDLERS", {**gang.HANDLERS, kind: make(gang.HANDLERS[kind])})


def caught(most=300):
    """The first seed that fails, and what the judge says."""
    for seed in range(most):
        try:
            seeds.run(seed)
        except (AssertionError, Poison) as error:
            return str(error) or repr(error)
    pytest.fail("nobody sees it")


def test_a_node_that_accepts_an_old_generation_is_caught(monkeypatch):
    """Its agent passes on a late Form, and its worker obeys."""

    def form_up(self, form):
        for mate in self.mates.values():
            mate.formed = 0
        pass_on(self, form)

    def form(self, generation, step, source):
        self.generation = min(self.generation, generation - 1)
        return obey(self, generation, step, source)

    pass_on, obey = agent.OBEY[Form], Member.form
    monkeypatch.setitem(agent.OBEY, Form, form_up)
    monkeypatch.setattr(Member, "form", form)
    caught()


def test_a_commit_before_the_last_vote_is_caught(monkeypatch):
    monkeypatch.setattr(Proc, "may_commit", staticmethod(lambda round_: len(round_.votes) >= len(round_.crew) - 1))
    caught()


def test_a_decision_before_the_last_is_parked_is_caught(monkeypatch):
    def halt(self, quiet=False):
        original(self, quiet)
        if self.phase == "halting" and len(self.gen.waiting) == 1:
            self.gen.waiting.clear()
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
    def early(on):
        def on_ready(self, event):
            changed = on(self, event)
            if self.phase == "forming" and len(self.gen.waiting) == 1:
                self.gen.waiting.clear()
                self._start()
            return changed

        return on_ready

    plant(monkeypatch, Ready, early)
    caught()


def test_a_prepared_step_that_is_thrown_away_is_caught(monkeypatch):
    def resolve(self):
        for worker in self.members.workers.values():
            if worker.copy:
                worker.copy = Copy(worker.copy.step, worker.copy.step, worker.copy.made)
        self.gen.roll = Roll.of(self.form, self.members.workers)
        original(self)

    original = Gang._resolve
    monkeypatch.setattr(Gang, "_resolve", resolve)
    assert "undone" in caught() or "abandoned" in caught()


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
    monkeypatch.setattr(Generation, "wrong", lambda self, coordinate: [])
    assert "another state" in caught()


def test_a_state_that_depends_on_the_order_of_a_fold_is_caught(monkeypatch):
    """As if something were kept outside the journal."""
    monkeypatch.setattr(Gang, "from_bytes", staticmethod(lambda data: Gang.of(*WHERE)))
    original = Gang.of

    def of(layout, steps, policy, start=0, generation=0):
        WHERE[:] = [layout, steps, policy]
        return original(layout, steps, policy, start, generation)

    monkeypatch.setattr(Gang, "of", staticmethod(of))
    assert "folds to another state" in caught()


WHERE: list = []
