"""Five hundred worlds, each with a mix of faults of its own, pass the judge; with a bug planted, some fail. `python -m
tests.control.sim SEED` prints what happens in a seed that fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from phalanx.control import agent, gang
from phalanx.control.gang import Gang
from phalanx.control.journaled import Poison
from phalanx.control.member import Member
from phalanx.control.membership import Membership
from phalanx.control.messages import Form, Parted
from phalanx.control.worlds import Worlds
from tests.control.sim import seeds
from tests.control.sim.__main__ import attempt, main
from tests.control.sim.nodes import Proc

ROOT = Path(__file__).parents[2]
forget = Worlds.forget


def test_a_late_form_does_not_make_a_worker_drop_what_it_has_voted_for():
    """The worker once served as a source of its own generation again, and a committed step was silently undone."""
    member = Member(1, steps=9)
    member.build(1)
    member.built()
    assert member.form(2, 1, None)
    assert not member.may_serve(2) and not member.may_serve(1) and member.may_serve(3)


def forget_all(self, number):
    found = self.replicas.get(number)
    if found:
        found.parted = -1
    forget(self, number)


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
    assert faults > 1500 and rungs == {-1, 0, 1, 2, 3, 4, 5, 6}, "the seeds have become tame"
    assert causes["done"] > 400 and causes["failed"] and causes["start"], causes


@pytest.mark.parametrize(
    "seed, without",
    [
        (26077, (Worlds, "unsaid", lambda self: [])),  # some ranks of a replica that parted with nothing held the step
        (64953, (Worlds, "forget", forget_all)),  # a replica lost its node; what its other ranks held was forgotten
        (70786, None),  # a state that was just received counted as abandoned
        (90448, None),  # a replica left after the last step before its peer knew that it was committed
    ],
)
def test_what_one_world_in_twenty_thousand_has_shown(seed, without, monkeypatch):
    seeds.run(seed)
    if without:
        monkeypatch.setattr(*without)
        with pytest.raises(AssertionError, match="is abandoned, though workers have it"):
            seeds.run(seed)


def test_a_seed_is_the_same_world_wherever_it_runs():
    """The digest is over everything that the controller heard and sent, and when."""
    code = "from tests.control.sim import seeds; print(*(seeds.run(s).digest for s in range(20)))"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "77")
    ]
    assert runs[0] == runs[1] == (" ".join(seeds.run(s).digest for s in range(20)) + "\n").encode()


def test_the_command_tells_of_a_seed_and_of_many(capsys):
    assert not main(["3"]) and not main(["--seeds", "0:4"])
    told = capsys.readouterr().out
    assert f"digest {seeds.run(3).digest}" in told and "4 seeds in" in told


# -- planted bugs


def caught(point=""):
    """Return the verdict on the first seed that fails, among those in which workers die at a point."""
    for seed in [s for s in range(2000) if not point or point in seeds.draw(Random(s)).points][:300]:
        try:
            seeds.run(seed)
        except (AssertionError, Poison) as error:
            return str(error) or repr(error)
    pytest.fail("nobody sees it")


def obey_late(m):
    """Plant a bug: an agent passes on a late Form, and its worker obeys."""

    def form_up(self, form):
        for mate in self.mates.values():
            mate.formed = 0
        pass_on(self, form)

    def form(self, generation, world, source):
        self.generation = min(self.generation, generation - 1)
        return obey(self, generation, world, source)

    pass_on, obey = agent.OBEY[Form], Member.form
    m.setitem(agent.OBEY, Form, form_up)
    m.setattr(Member, "form", form)


def decide_early(m):
    def part(self, quiet=False):
        original(self, quiet)
        if self.phase == "parting" and len(self.gen.left) == 1:
            self.gen.left.clear()
            self.gen.waiting.clear()
            self._resolve()

    original = Gang._part
    m.setattr(Gang, "_part", part)


def seat_twice(m):
    def sit(self, place, name, which="now"):
        original(self, place, name, which)
        self._free(name)

    original = Membership.sit
    m.setattr(Membership, "sit", sit)


def drop_prepared(m):
    def park(self, event):
        return parked(self, replace(event, prepared=event.step))

    parked = gang.HANDLERS[Parted]
    m.setattr(gang, "HANDLERS", {**gang.HANDLERS, Parted: park})


def record_no_loss(m):
    def resolve(self):
        original(self)
        self.lineage.certain = True

    original = Gang._resolve
    m.setattr(Gang, "_resolve", resolve)


def hold_too_long(m):
    def form(self, made):
        original(self, replace(made, kept=tuple(r for r in made.replicas if self.worlds.replicas[r].kept)))

    original = Gang._form
    m.setattr(Gang, "_form", form)


def compare_nothing(m):
    def formed(self, generation, values):
        if self.entering(generation):
            self.agree_to_enter(generation, values is not None)

    m.setattr(Proc, "formed", formed)


PLANTED = {
    "an old generation is accepted": (obey_late, ""),
    "a step is committed before the last vote": (
        lambda m: m.setattr(Proc, "may_commit", staticmethod(lambda seen: True)),
        "",
        "sum",
    ),
    "the last step is decided before the last has parted": (decide_early, ""),
    "a spare is given to two places": (seat_twice, "a spare is given to one place"),
    "a prepared step is thrown away": (drop_prepared, "undone|abandoned|another state", "apply"),
    "a loss is not recorded": (record_no_loss, "silently undone"),
    "gradients of a committed step are used again": (hold_too_long, "are to be gradients", "vote"),
    "states are not compared": (compare_nothing, "another state"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_caught(bug, monkeypatch):
    plant, said, *point = PLANTED[bug]
    plant(monkeypatch)
    assert re.search(said, caught(*point))


def test_a_state_that_depends_on_the_order_of_a_fold_is_caught(monkeypatch):
    """It is as if something were kept outside the journal."""
    monkeypatch.setattr(Gang, "from_bytes", staticmethod(lambda data: Gang.of(*WHERE)))
    original = Gang.of

    def of(layout, steps, policy, *more):
        WHERE[:] = [layout, steps, policy]
        return original(layout, steps, policy, *more)

    monkeypatch.setattr(Gang, "of", staticmethod(of))
    assert "folds to another state" in caught()


WHERE: list = []
