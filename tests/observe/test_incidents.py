"""Ranks and controller report by different ways, so that their words may come in another order than they were said."""

import pytest

from phalanx.observe.incidents import Incidents

FORM = {"type": "control form", "rung": 1, "branch": False, "reason": "the worker of rank 1 was killed"}
BEFORE = [
    {**FORM, "time": 1.0, "generation": 1, "step": 0, "last": 0, "replicas": [0, 1], "rung": -1},
    {"type": "control started", "time": 1.1, "generation": 1},
    {"type": "first commit", "time": 1.2, "generation": 1, "step": 1},
    {"type": "exit", "time": 5.0, "rank": 1, "node": "node-0", "signal": "SIGKILL"},
    {**FORM, "time": 5.5, "generation": 2, "step": 9, "last": 9, "replicas": [0, 1]},
]
STARTED = {"type": "control started", "generation": 2}
COMMITTED = {"type": "first commit", "generation": 2, "step": 10}


@pytest.mark.parametrize("last", [(STARTED, COMMITTED), (COMMITTED, STARTED)], ids=["in order", "commit first"])
def test_an_incident_ends_with_the_commit_whoever_reports_first(last):
    """It stayed open until the next failure where the ranks were heard before the controller."""
    incidents = Incidents(replicas=2)
    for event in [*BEFORE, *({**event, "time": 6.0 + at} for at, event in enumerate(last))]:
        incidents.add(event)
    (one,) = incidents.all
    assert one.healed and one.committed
    assert incidents.windows == [(5.0, 6.0)], "counted once"


def test_a_late_commit_of_the_last_generation_heals_nothing():
    incidents = Incidents(replicas=2)
    for event in [*BEFORE[:2], BEFORE[3], {**BEFORE[2], "time": 5.1}]:
        incidents.add(event)
    (one,) = incidents.all
    assert not one.started and not one.committed


def test_a_join_that_is_decided_before_the_step_without_it_is_reported_is_told():
    """Where steps are short. The incident was called healed with the first step of the others."""
    incidents, joins = Incidents(replicas=2), {**FORM, "time": 6.2, "generation": 3, "step": 10, "last": 10, "rung": -1}
    for event in [
        *BEFORE[:4], {**BEFORE[4], "replicas": [0]}, {**STARTED, "time": 6.0},
        {**joins, "replicas": [0, 1]}, {**COMMITTED, "time": 6.3}, {**STARTED, "time": 6.4, "generation": 3},
    ]:  # fmt: skip
        incidents.add(event)
    (one,) = incidents.all
    assert one.committed == 6.3 and one.joined == 6.2 and one.open, "one replica of two is not full strength"
    incidents.add({**COMMITTED, "time": 7.0, "generation": 3, "step": 11})
    assert one.healed == 7.0 and one.join_s == pytest.approx(0.2) and one.generation == 2
    assert "at full strength after 2 s" in one.verdict()
