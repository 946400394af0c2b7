"""Ranks and controller report by different ways, so that their words may come in another order than they were said."""

import pytest

from phalanx.observe.incidents import Incidents, clock

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


def placed(rank: int, node: str) -> dict:
    return {"type": "started", "time": 0.5, "rank": rank, "node": node, "service": ""}


def test_what_takes_no_part_stops_nobody():
    """A spare that died at hour one and a worker at hour ninety made eighty-nine hours of recovery."""
    incidents = Incidents(replicas=2)
    died = {"type": "node", "node": "spare", "what": "died: was killed by SIGKILL"}
    for event in [placed(0, "node-0"), placed(1, "node-1"), *BEFORE[:3], {**died, "time": 2.0}, {**died, "time": 3.0}]:
        incidents.add(event)
    (spare,) = incidents.all
    assert not spare.stops and not spare.open and not spare.phases()
    assert "It happened 2 times. It took no part" in spare.verdict()
    for event in [*BEFORE[3:], {**STARTED, "time": 6.0}, {**COMMITTED, "time": 6.1}]:
        incidents.add(event)
    assert incidents.windows == [(5.0, 6.0)], "the gang stood still from the death of rank 1 on"


def test_a_node_with_ranks_at_work_stops_the_gang():
    incidents = Incidents(replicas=2, replica_size=2)
    for event in [placed(rank, f"node-{rank // 2}") for rank in range(4)] + BEFORE[:3]:
        incidents.add(event)
    incidents.add({"type": "node", "time": 5.0, "node": "node-1", "what": "died: was killed by SIGKILL"})
    (one,) = incidents.all
    assert one.stops and one.open


def test_a_replica_that_dies_again_before_it_is_back_is_the_same_incident():
    """The others train meanwhile: only until they were formed anew did they stand still."""
    incidents = Incidents(replicas=2)
    again = {"type": "exit", "time": 8.0, "rank": 1, "node": "node-0", "signal": "SIGKILL"}
    for event in [
        placed(0, "node-0"), placed(1, "node-1"), *BEFORE[:4], {**BEFORE[4], "replicas": [0]},
        {**STARTED, "time": 6.0}, {**COMMITTED, "time": 6.1}, again,
        {**FORM, "time": 9.0, "generation": 3, "step": 20, "last": 20, "replicas": [0, 1], "rung": -1},
        {**STARTED, "time": 9.5, "generation": 3}, {**COMMITTED, "time": 9.9, "generation": 3, "step": 21},
    ]:  # fmt: skip
        incidents.add(event)
    (one,) = incidents.all
    assert again in one.evidence and one.healed == 9.9
    assert incidents.windows == [(5.0, 6.0), (9.0, 9.5)]


def test_a_failure_that_is_answered_before_it_is_reported_is_one_of_its_own():
    """It vanished in the incident before it, which still waited for its replica."""
    incidents, form = Incidents(replicas=3), {**FORM, "step": 20, "last": 20}
    for event in [
        *(placed(rank, f"node-{rank}") for rank in range(3)),
        {**BEFORE[0], "replicas": [0, 1, 2]}, *BEFORE[1:4], {**BEFORE[4], "replicas": [0, 2]},
        {**STARTED, "time": 6.0}, {**COMMITTED, "time": 6.1},
        {**form, "time": 9.0, "generation": 3, "replicas": [0]},
        {"type": "exit", "time": 9.0, "rank": 2, "node": "node-2", "signal": "SIGKILL"},
        {**STARTED, "time": 9.5, "generation": 3}, {**COMMITTED, "time": 9.9, "generation": 3, "step": 21},
    ]:  # fmt: skip
        incidents.add(event)
    first, second = incidents.all
    assert first.subject == "Rank 1 on node-0" and len(first.evidence) == 2
    assert second.verdict().startswith(f"{clock(9.0)}: Rank 2 on node-2 was killed by SIGKILL. Training went on 900 ms")
