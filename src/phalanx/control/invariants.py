"""What is always true of a gang's state. Cheap enough for every event in tests; a violation is a bug, never a fault."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.control.gang import Gang
from phalanx.control.roll import Roll

PHASES = ("gathering", "asking", "forming", "running", "halting", "fencing", "saving", "flushing", "ended")


def check(gang: Gang, before: tuple[int, int] = (0, 0)) -> None:
    """`before`: generation and last worker of an earlier state."""
    members = gang.members
    assert gang.phase in PHASES, gang.phase
    assert (gang.generation, members.last_worker) >= before, "generations and workers' numbers only grow"
    _check_nodes(gang)
    _check_workers(gang)
    if gang.form:
        assert gang.form.generation == gang.generation
        _distinct("a worker has one slot", gang.form.crew.values())
        _distinct("a node fills one place", gang.form.places.values())
        if gang.phase in ("forming", "running", "halting"):
            assert gang.gen.waiting <= {w for w in gang.form.crew.values() if w in members.workers}
        if gang.phase in ("forming", "running"):
            lost = [w for w in gang.form.crew.values() if w not in members.workers]
            assert not lost, f"{lost} are gone, and the generation goes on"
            assert len(gang.form.replicas) >= gang.policy.min_replicas
    assert gang.phase != "halting" or gang.gen.waiting, "all are parked, and nobody decides"
    assert gang.phase != "forming" or gang.gen.waiting, "all are ready, and nobody starts"
    waits = gang.phase not in ("ended", "running") and gang.patience_ns >= 0
    assert not waits or gang.desk.timers, "nothing will ever happen again"
    durable = gang.commits.durable
    assert durable and all(gang.lineage.counts(*checkpoint) for checkpoint in durable[1:])


def _check_nodes(gang: Gang) -> None:
    members = gang.members
    seated = [(seat.node, number) for number, place in members.places.items() for seat in place.seats()]
    _distinct("a spare is given to one place", (name for name, _ in seated))
    for name, number in seated:
        node = members.nodes[name]
        assert not node.dead and node.place == number, f"{name} is not at place {number}"
    free = {name for name, node in members.nodes.items() if not node.dead} - {name for name, _ in seated}
    assert members.spares == free
    assert members.alive == sum(not node.dead for node in members.nodes.values())
    staff = gang.staff
    assert staff.silent <= staff.suspects <= {name for name, node in members.nodes.items() if not node.dead}
    assert staff.leaving <= {name for name, _ in seated}
    assert gang.finder.held.keys() <= {name for name, node in members.nodes.items() if not node.dead}


def _check_workers(gang: Gang) -> None:
    members = gang.members
    seated = {w: (rank, s.node) for p in members.places.values() for s in p.seats() for rank, w in s.workers.items()}
    assert seated == {number: (w.rank, w.node) for number, w in members.workers.items()}
    assert {w for w, found in members.workers.items() if not found.up} == gang.staff.starting.keys()
    assert not gang.staff.killed.keys() & members.workers.keys()
    fresh = type(members)(members.replica_size, members.ranks_per_place, places=members.places, workers=members.workers)
    fresh.want(members.wanted)
    for name in ("down", "whole", "vacant", "missing", "at"):
        assert getattr(fresh, name) == getattr(members, name), f"{name} is out of step"
    roll = Roll.of(gang.form, members.workers) if gang.form else None
    assert roll == gang.gen.roll, "the roll is out of step"
    if gang.phase == "halting":
        assert roll and gang.gen.waiting == roll.left
    for number, place in members.places.items():
        drained = place.now and members.nodes[place.now.node].drained
        assert not (place.old and place.old.node not in gang.staff.leaving), (
            f"the old node of place {number} does not leave"
        )
        assert not (drained and place.now and place.now.node not in gang.staff.leaving), f"{place.now} does not leave"
        assert gang.surplus or not place.now or members.ranks(number), f"place {number} is not wanted"


def _distinct(what: str, values: Iterable[object]) -> None:
    listed = list(values)
    assert len(listed) == len(set(listed)), f"{what}: {listed}"
