"""In a run of many ranks the top keeps only blocks; a reader that zooms into one finds its ranks in the aggregators'
tables."""

from __future__ import annotations

import shutil

import numpy as np

from phalanx.observe import fold
from phalanx.observe.near import NearTables
from phalanx.observe.prometheus import exposition
from phalanx.observe.record import RunRecord
from phalanx.observe.story import Story
from phalanx.observe.tiles import FOLDER, NEAR, TileReader, decode
from phalanx.observe.words import describe
from phalanx.runtime.aggregator import COMMANDS, PASSED, Aggregator
from phalanx.runtime.secret import Identity
from phalanx.runtime.transport import Link, Loop, Server
from tests.observe.records import Written
from tests.runtime.test_aggregator import SECRET

RANKS, STEPS, NODE = 1_200, 20, 8
SLOW_RANK, SLOW_STEP = 777, 13


def node_folds(first, step):
    """Return what one node reports of a step, folded as an agent does."""
    whole = {"loss_sums": [1.0], "tokens": 1, "data_digest": "0"}
    said = {"type": "step", "step": step, "grad_norm": 1.0, "lr": 1e-3, "whole": whole}
    times = {rank: 0.3 if (rank, step) == (SLOW_RANK, SLOW_STEP) else 0.1 for rank in range(first, first + NODE)}
    return fold.folded([fold.fold_of(rank, {**said, "time_s": time_s}) for rank, time_s in times.items()])


def written(tmp_path, first, last):
    """Write a record with blocks of all ranks, and near tables of two aggregators for the ranks from `first` to
    `last`."""
    record = RunRecord.create(tmp_path, "many", {}, {"job": {}})
    near = [NearTables(record.path, name) for name in ("one", "two")]
    middle = (first + last) // 2 // NODE * NODE
    blocks = np.full(RANKS, 0.1)
    for step in range(STEPS):
        for rank in range(first, last, NODE):
            for each in node_folds(rank, step):
                near[rank >= middle]._gather(each)  # as its thread does, and nothing is dropped
        blocks[SLOW_RANK] = 0.3 if step == SLOW_STEP else 0.1
        times = [1, {str(rank): time_s for rank, time_s in enumerate(blocks)}]
        record.rank_times(step, fold.merged_times([1, {}], times), RANKS)
    for each in near:
        each.close()
    record.close()
    return TileReader(record.path / FOLDER), near


def test_a_block_opens_into_its_ranks(tmp_path):
    reader, near = written(tmp_path, 768, 832)
    assert reader.each > 1 and [each.dropped for each in near] == [0, 0]
    whole = reader.picture((0, RANKS), (0, STEPS), 256, 800)
    assert whole["ranks"] == [0, RANKS] and float(decode(whole["codes"].max())) > 2.9, "it shows from afar"
    close = reader.picture((776, 808), (0, STEPS), 256, 800)
    assert close["ranks"] == [776, 808] and close["codes"].shape[0] == 32, "one row for each rank"
    slow = np.argwhere(decode(close["codes"]) > 2.0)
    ends = np.linspace(*close["steps"], close["codes"].shape[1] + 1)
    assert {776 + row for row, _ in slow} == {SLOW_RANK}
    assert all(ends[column] <= SLOW_STEP < ends[column + 1] for _, column in slow) and len(slow) == 1
    assert (close["codes"] > 0).all(), "the ranks of both aggregators are there"


def test_ranks_that_no_aggregator_keeps_are_shown_as_blocks(tmp_path):
    reader, _ = written(tmp_path, 768, 776)
    both = reader.picture((752, 784), (0, STEPS), 256, 800)["codes"]
    assert both.shape == (32, STEPS) and (both > 0).all()
    shutil.rmtree(reader.folder / NEAR)
    blocks = reader.picture((752, 784), (0, STEPS), 256, 800)["codes"]
    assert len(blocks) == 32 // reader.each
    assert (both[24:] == np.repeat(blocks, reader.each, axis=0)[24:]).all(), "776 to 783"


def test_what_was_dropped_is_told_to_who_reads_the_record(tmp_path):
    run = Written(tmp_path).begin().steps(0, 4)
    assert describe(Story(run.path))["near_dropped"] == 0
    near = NearTables(run.path, "one")
    for step in (7, 8, 3):
        near.take({"generation": 1, "step": step, "times": [4, {"0": 1.0}]})  # of blocks
    near.take(node_folds(0, 9)[0])
    near.close()
    about = describe(Story(run.path))
    assert about["near_dropped"] == near.dropped == 3
    assert f'phalanx_rank_times_dropped_total{{job="job",run="{run.path.name}"}} 3.0' in exposition([about])


def test_what_cannot_be_kept_is_dropped_and_counted_and_nobody_waits(tmp_path):
    near = NearTables(tmp_path, "one")
    near.close()  # the queue has no reader any more
    for step in range(300):
        near.take(node_folds(0, step)[0])
    assert near.dropped == 300 - 256


def test_an_aggregator_keeps_what_its_nodes_say_of_steps(tmp_path):
    loop, near = Loop(), NearTables(tmp_path, "one")
    top = Server(loop, SECRET, Identity("controller", "controller", 1), PASSED, lambda session, number, body: None)
    made = Aggregator(loop, SECRET, Identity("aggregator", "one", 1), [top.address], near=near)
    agent = Link(loop, SECRET, Identity("agent", "node-0", 1), [made.server.address], COMMANDS, lambda *said: None)
    while not agent.tell({"type": "said", "upto": 9, "items": [each for s in range(9) for each in node_folds(0, s)]}):
        loop.turn(0.02)
    while not made.folder._items:
        loop.turn(0.02)
    for each in (agent, made, top):
        each.close()
    (table,) = near.folder.iterdir()
    found = TileReader(table).picture((0, NODE), (0, 9), NODE, 9)
    assert near.dropped == 0 and found["codes"].shape == (NODE, 9) and (found["codes"] > 0).all()
