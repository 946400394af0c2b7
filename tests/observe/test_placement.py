"""Which node holds which ranks, and which step is safe where."""

from __future__ import annotations

import time

from phalanx.observe import durability, placement
from phalanx.observe.provenance import provenance
from phalanx.observe.story import Story
from tests.observe.records import Written


def started(run, node, *ranks):
    run.event("node", node=node, what="joined", incarnation=1, cores=8, topology=f"spine.leaf.{node}")
    for rank in ranks:
        run.event("started", rank=rank, pid=rank, service="", worker=rank, node=node)


def live(root, **more):
    run = Written(root, process=provenance()["process"], started=time.time(), **more)
    run.now = time.time()
    return run


def test_a_rank_is_on_the_node_that_started_it_last(tmp_path):
    run = live(tmp_path, replicas=4).begin()
    started(run, "a", 0, 1)
    started(run, "b", 2, 3)
    started(run, "spare")
    run.steps(0, 2)
    run.event("node", node="b", what="died: was killed by SIGKILL")
    run.form(2, replicas=2)
    found = placement.fleet(Story(run.path).part)
    assert {node["name"]: node["state"] for node in found["nodes"]} == {
        "node-0": "spare", "a": "part", "b": "dead", "spare": "spare",
    }  # fmt: skip
    assert found["unplaced"] == [[2, 4]] and found["replicas"] == [[0, 2]]
    assert placement.headline(found).startswith("Now 2 of 4 replicas take part")
    started(run, "spare", 2, 3)
    now = {node["name"]: node for node in placement.fleet(Story(run.path).part)["nodes"]}
    assert now["spare"]["state"] == "out" and now["spare"]["ranks"] == [[2, 4]], "it loads, and takes no part yet"
    run.form(2)
    now = {node["name"]: node for node in placement.fleet(Story(run.path).part)["nodes"]}
    assert now["spare"]["state"] == "part" and now["b"]["deaths"] == 1 and now["a"]["about"]["cores"] == 8


def test_each_tier_says_what_would_be_done_again(tmp_path):
    run = live(tmp_path).begin().steps(0, 20)
    story = Story(run.path)
    assert durability.headline(durability.tiers(story), story.done).startswith("Nothing is durable yet")
    run.event("checkpoint", step=5, checkpoint="c", bytes=1, stall_s=0.0, slowdown_s=0.0, drain_s=0.1)
    story.update()
    tiers = {tier["tier"]: tier for tier in durability.tiers(story)}
    assert {name: tier["step"] for name, tier in tiers.items()} == {"live": 20, "memory": 16, "buddy": 16, "disk": 5}
    assert tiers["disk"]["behind"] == 15 and 1.4 < tiers["disk"]["redo_s"] < 1.6
    assert tiers["memory"]["since"] == story.rows[-4]["time"], "since the row that said it first"
    assert "15 of 20 steps are done again" in durability.headline(durability.tiers(story), story.done)
    run.end()
    over = Story(run.path)
    assert [tier["tier"] for tier in durability.tiers(over)] == ["disk"], "memory is gone with its processes"


def test_a_bucket_is_a_store(tmp_path):
    run = Written(tmp_path).begin()
    story = Story(run.path)
    assert durability.place(story) == "disk"
    story.part.settings["checkpoint"] = {"dir": "s3://bucket/run"}
    assert durability.place(story) == "store"
