"""The invariants of a gang's state, cheap enough to check after every event in tests. A violation is a bug, never a
fault."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.control.gang import Gang
from phalanx.control.membership import top_of

PHASES = ("gathering", "asking", "forming", "running", "parting", "fencing", "saving", "flushing", "ended")


def check(gang: Gang, before: tuple[int, int] = (0, 0)) -> None:
    """Assert the invariants. `before`: generation and last worker of an earlier state."""
    members, replicas = gang.members, gang.worlds.replicas
    assert gang.phase in PHASES, gang.phase
    assert (gang.generation, members.last_worker) >= before, "generations and workers' numbers only grow"
    _check_nodes(gang)
    _check_workers(gang)
    if gang.form:
        assert gang.form.generation == gang.generation
        assert gang.gen.waiting <= gang.gen.left <= gang.gen.worlds.keys()
    if gang.phase in ("forming", "running"):
        assert gang.gen.left == gang.gen.worlds.keys(), "some have left, and the generation goes on"
        for replica, world in gang.gen.worlds.items():
            found = replicas[replica]
            assert (found.phase, found.world) == ("built", world), f"{replica} has another world"
        assert len(gang.gen.worlds) >= gang.policy.min_replicas
    assert gang.phase != "forming" or gang.gen.waiting, "all are formed, and nobody notices"
    if gang.phase == "parting" and not gang.gen.left:
        assert not gang.gen.standing(), "all have parted, and nobody decides"
        assert any(replicas[r].phase == "leaving" for r in gang.gen.worlds), "all are parked, and nobody decides"
    waits = gang.phase not in ("ended", "running") and gang.forming.patience_ns >= 0
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
    for has_fault, names, tops in zip((False, True), members.fit, members.fit_in, strict=True):
        known = {n: members.nodes[n] for n in free}
        fit = {
            n: top_of(node.domain) for n, node in known.items() if not node.drained and bool(node.fault) == has_fault
        }
        assert names == sorted(fit)
        assert {(name, top) for top, some in tops.items() for name in some} == fit.items()
    assert members.alive == sum(not node.dead for node in members.nodes.values())
    staff = gang.staff
    assert staff.silent <= staff.suspects <= {name for name, node in members.nodes.items() if not node.dead}
    assert staff.leaving <= {name for name, _ in seated}
    assert gang.finder.held.keys() <= {name for name, node in members.nodes.items() if not node.dead}


def _check_workers(gang: Gang) -> None:
    members, replicas = gang.members, gang.worlds.replicas
    seated = {w: (rank, s.node) for p in members.places.values() for s in p.seats() for rank, w in s.workers.items()}
    assert seated == {number: (w.rank, w.node) for number, w in members.workers.items()}
    assert {w for w, found in members.workers.items() if not found.up} == gang.staff.starting.keys()
    assert not gang.staff.killed.keys() & members.workers.keys()
    fresh = type(members)(members.replica_size, members.ranks_per_place, places=members.places, workers=members.workers)
    fresh.want(members.wanted)
    for name in ("down", "whole", "vacant", "short", "ready"):
        assert getattr(fresh, name) == getattr(members, name), f"{name} is out of step"
    _distinct("a world has one replica", (r.world for r in replicas.values() if r.phase != "out"))
    _distinct(
        "a worker is in one world",
        (w for r in replicas.values() if r.phase != "out" for w in r.crew.values()),
    )
    anew = type(gang.worlds)(replicas)
    anew.bind(gang.desk, members, gang.policy, gang.staff, gang.gen.worlds)
    for name in ("astir", "built", "aside", "failing"):
        assert getattr(anew, name) == getattr(gang.worlds, name), f"{name} is out of step"
    for replica, found in replicas.items():
        assert found.waiting <= {w for w in found.crew.values() if w in members.workers}
        assert bool(found.waiting) == (found.phase in ("building", "leaving")), f"{replica} waits for nobody"
        assert found.phase not in ("building", "built") or all(w in members.workers for w in found.crew.values())
    for number, place in members.places.items():
        drained = place.now and members.nodes[place.now.node].drained
        assert not (place.old and place.old.node not in gang.staff.leaving), (
            f"the old node of place {number} does not leave"
        )
        assert not (drained and place.now and place.now.node not in gang.staff.leaving), f"{place.now} does not leave"
        assert gang.changes.surplus or not place.now or members.ranks(number), f"place {number} is not wanted"


def _distinct(what: str, values: Iterable[object]) -> None:
    listed = list(values)
    assert len(listed) == len(set(listed)), f"{what}: {listed}"
