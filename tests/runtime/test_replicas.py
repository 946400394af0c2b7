"""A failure stops its replica and nobody else, with real nodes, workers and a controller, and real kills. The workers
of other replicas stay in their worlds, and continue to train."""

from __future__ import annotations

import os
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from phalanx.control.policy import Policy
from phalanx.core.layout import Layout
from phalanx.runtime.journal import read
from tests.runtime.cluster import QUICK, kill, wait_for

GOES_ON = Policy(**{**QUICK, "wait_ns": 0})  # do not wait for broken replicas
PAIRS = dict(shard=2, ranks_per_node=2)  # a replica per node
ALONE = dict(ranks_per_node=3)  # replicas of one rank, on one node


@contextmanager
def nobody_builds(c):
    """Make worlds take long to build: the others must not wait for it."""
    gate = Path(c.worker["gate"])
    gate.touch()
    yield
    gate.unlink()


@pytest.fixture
def gang(cluster, tmp_path):
    return partial(cluster, policy=GOES_ON, gate=str(tmp_path / "gate"))


def entered(c, generation):
    """Return, by rank, the world from which it entered a generation, and where its state came from."""
    ranks = {f["worker"]: f["rank"] for f in c.bodies("born")}
    return {ranks[b["worker"]]: b for b in c.bodies("enters") if b["generation"] == generation}


def check_untouched(c, before, *ranks):
    """Check that these ranks are the same processes in the same worlds, and that their replicas were told neither to
    leave nor to build."""
    after, workers = c.pids(), {c.facts()[rank]["worker"] for rank in ranks}
    assert {rank: after[rank] for rank in ranks} == {rank: before[rank] for rank in ranks}
    assert all(len(c.worlds(rank)) == 1 for rank in ranks)
    assert not [b for b in c.bodies("out_of_world") if b["worker"] in workers]
    worlds = {c.worlds(rank)[0] for rank in ranks}
    told = [d for e in read(c.control / "journal.db") for d in e.body.get("decisions", ())]
    assert not [d for d in told if d["kind"] == "Halt" and d["world"] in worlds]
    size = c.worker["replica_size"]
    assert {d["world"] for d in told if d["kind"] == "Build" and d["replica"] in {r // size for r in ranks}} == worlds


@pytest.mark.parametrize("layout", [PAIRS, ALONE], ids=["a node each", "on one node"])
def test_a_rank_that_is_killed_stops_its_replica_and_nobody_else(gang, layout):
    nodes = "abc" if layout is PAIRS else "a"
    c = gang(*nodes, layout=Layout(replica=3, **layout))
    c.running(1)
    before, size = c.pids(), c.worker["replica_size"]
    mine, others = [*range(size, 2 * size)], [*range(size), *range(2 * size, 3 * size)]
    with nobody_builds(c):
        kill(before[mine[-1]])
        form = c.running(2)
    assert form["replicas"] == [0, 2] and form["rung"] == 1 and not form["branch"], "they do not wait for it"
    assert f"rank {mine[-1]}" in form["reason"] and "SIGKILL" in form["reason"]
    assert "replicas [1] are left out" in form["reason"]
    again = c.full(3)
    assert again["reason"] == "replicas [1] join" and again["rung"] == -1 and again["step"] > form["step"]
    check_untouched(c, before, *others)
    for generation in (2, again["generation"]):
        stood = entered(c, generation)
        assert all(stood[rank]["source"] is None for rank in others), "they keep their state"
    sources = {rank: entered(c, again["generation"])[rank]["source"] for rank in mine}
    assert {source["kind"] for source in sources.values()} == {"live"}
    assert [c.pids()[rank] == before[rank] for rank in mine] == [True] * (size - 1) + [False]
    assert [len(c.worlds(rank)) for rank in mine] == [2] * size, "its other ranks have left with it"


def test_survivors_keep_the_gradients_of_the_step_that_they_were_in(gang):
    c = gang("a", layout=Layout(replica=3, **ALONE), waits_forever=2)
    votes = c.folder / "votes"
    c.until(lambda: all((votes / f"sum1-1-{rank}").exists() for rank in (0, 2)))  # they wait for it
    c.until(lambda: len(c.pids()) == 3)
    before = c.pids()
    assert c.facts()[1]["worker"] == 2
    kill(before[1])
    assert c.running(2)["step"] == 0
    assert {rank: b["kept"] for rank, b in entered(c, 2).items()} == {0: [0, 2], 2: [0, 2]}
    assert {b["kept"] == [] for b in entered(c, c.full(3)["generation"]).values()} == {True}
    check_untouched(c, before, 0, 2)


def test_a_node_of_a_replica_that_is_lost_is_replaced_and_the_others_train_on(gang):
    c = gang(*"abcde", layout=Layout(replica=2, shard=2, ranks_per_node=1))
    c.running(1)
    c.until(lambda: len(c.status()["nodes"]) == 5)
    spare = next(name for name, node in c.status()["nodes"].items() if node["spare"])
    before, lost = c.pids(), c.facts()[1]["node"]
    with nobody_builds(c):
        kill(c.nodes[lost].pid)
        form = c.running(2)
    assert form["replicas"] == [1] and form["rung"] == 2 and lost in form["reason"]
    assert c.full(2)["reason"].endswith("replicas [0] join")
    check_untouched(c, before, 2, 3)
    assert c.facts()[1]["node"] == spare and c.pids()[0] == before[0], "its peer has only left its world"
    assert len(c.worlds(0)) == 2


@pytest.mark.parametrize("away", [True, False], ids=["while it is away", "when it is back"])
def test_a_controller_that_dies_while_a_replica_is_built_goes_on_with_it(gang, away):
    """The replica becomes whole while no controller listens, or later."""
    c = gang("a", "b", layout=Layout(replica=2, **PAIRS))
    c.running(1)
    before = c.pids()
    with nobody_builds(c):
        kill(before[1])
        assert c.running(2)["replicas"] == [1]
        c.until(lambda: [b["world"] for b in c.bodies("builds")].count(3) == 2)
        c.controller.kill()
        done = c.trained()
        c.until(lambda: c.trained() > done + 5)
        if not away:
            c.start_controller()
            c.until(lambda: c.status()["step"] > done)
    if away:
        wait_for(lambda: all((c.folder / "votes" / f"w3-built-{rank}").exists() for rank in (0, 1)))
        c.start_controller()
    form = c.full(2)
    assert form["generation"] == 3 and form["reason"] == "replicas [0] join" and form["step"] > done
    (state,) = c.lines("state")
    assert (state["phase"], state["generation"]) == ("running", 2)
    check_untouched(c, before, 2, 3)
    assert len(c.worlds(0)) == 2, "the world that was being built"


def test_a_rank_that_dies_while_the_controller_is_away_stops_its_replica_and_nobody_else(gang):
    c = gang("a", layout=Layout(replica=3, **ALONE))
    c.running(1)
    before = c.pids()
    c.controller.kill()
    kill(before[2])
    wait_for(lambda: not os.path.exists(f"/proc/{before[2]}"))
    with nobody_builds(c):
        c.start_controller()
        assert c.running(2)["replicas"] == [0, 1]
    assert c.full(3)["reason"] == "replicas [2] join"
    check_untouched(c, before, 0, 1)


def test_a_node_that_starts_anew_while_the_controller_is_away_is_noticed(gang):
    """Nobody has seen it go, and it joins once there is a controller again."""
    c = gang("a", "b")
    c.running(1)
    before, lost = c.pids(), c.facts()[1]["node"]
    c.controller.kill()
    c.nodes.pop(lost).close()
    c.start_node(lost)
    with nobody_builds(c):
        c.start_controller()
        form = c.running(2)
    assert form["replicas"] == [0] and f"node {lost} came back as incarnation 2" in form["reason"]
    assert c.full(2)["reason"] == "replicas [1] join"
    check_untouched(c, before, 0)
    wait_for(lambda: c.status()["nodes"][lost]["place"] >= 0)
    assert c.facts()[1]["node"] == lost and c.pids()[1] != before[1]
