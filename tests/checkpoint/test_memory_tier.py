"""Snapshots in memory: a slot is whole or does not count. A snapshot that changed after it was sealed is never written
to a disk. A copy on another node is identical bit for bit, or it is refused."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.checkpoint import files, memory
from phalanx.checkpoint.buddy import BuddyServer, fetch, push
from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.index import CATALOG
from phalanx.checkpoint.keeper import Rank
from phalanx.checkpoint.memory import SEAL_BYTES, Slot
from phalanx.core.checkpoint import BadCheckpoint, buddies
from phalanx.core.errors import UserError, WireError
from phalanx.core.store import Folder
from phalanx.gate.peers import Peers, Stream
from tests.checkpoint import faults
from tests.checkpoint.faults import wait_for

ENTRIES = faults.entries_of()
PLANS = faults.plans_of(ENTRIES)
OLD, NEW = 7, 8


def a_slot(step=NEW, rank=0, entries=ENTRIES):
    plan = faults.plans_of(entries)[rank]
    slot = Slot(plan.image_bytes, plan.own_bytes)
    faults.fill(slot, entries, plan, rank, step)
    return slot


# -- the seal


def test_a_sealed_slot_is_whole():
    slot = a_slot()
    assert slot.header() == faults.header_of(0, NEW)
    slot.verify()
    assert bytes(slot.image) == faults.image_of(ENTRIES, PLANS[0], NEW).tobytes()


@given(st.integers(0, 10_000), st.integers(0, 7))
@settings(max_examples=200)
def test_no_bit_of_a_seal_or_of_the_hashes_can_change_unseen(at, bit):
    slot = a_slot()
    table = slice(slot.image_bytes, slot.image_bytes + 16 * len(slot.bounds))
    size = int.from_bytes(slot._seal[:8], "little")
    places = [*range(table.start, table.stop), *range(slot._seal_at, slot._seal_at + 40 + size)]
    slot.memory[places[at % len(places)]] ^= 1 << bit
    assert slot.header() is None


@given(st.data())
@settings(max_examples=100)
def test_a_torn_seal_is_none(data):
    """After a crash while the next snapshot's seal is written, only some of its bytes are there, over those of the old
    seal, whose head was removed first."""
    slot, after = a_slot(OLD), a_slot(NEW)
    size = 40 + int.from_bytes(after._seal[:8], "little")
    new = bytes(after._seal[:size])
    slot.break_seal()
    slot.array()[:] = after.array()
    slot._table[:] = after._table
    there = data.draw(st.sets(st.integers(0, size - 1)))
    for at in there:
        slot._seal[at] = new[at]
    assert (slot.header() is not None) == (bytes(slot._seal[:size]) == new)
    if slot.header():
        assert slot.header() == after.header()


def test_a_seal_that_says_it_is_longer_than_there_is_room_is_none():
    slot = a_slot()
    slot._seal[:8] = (SEAL_BYTES * 2).to_bytes(8, "little")
    assert slot.header() is None


@given(st.integers(0, 2**31), st.integers(0, 7))
@settings(max_examples=50)
def test_no_bit_of_the_image_can_change_unseen(at, bit):
    slot = a_slot()
    slot.memory[at % slot.image_bytes] ^= 1 << bit
    assert slot.header() is not None, "the seal does not cover it"
    with pytest.raises(BadCheckpoint, match=r"bytes .* have the xxh3 .* instead of"):
        slot.verify()


# -- a rank and its keeper


@pytest.fixture
def keeper(tmp_path):
    with faults.a_keeper(tmp_path / "checkpoints", serve=True) as keeper:
        yield keeper


@pytest.fixture
def lines(keeper):
    lines = faults.lines_to(keeper, ENTRIES)
    yield lines
    for line in lines:
        line.close()


def snapshot(line, rank, number, step, durable=True, spoil=lambda slot: None):
    line.wait_free(number)
    faults.fill(line.slots[number], ENTRIES, PLANS[rank], rank, step)
    spoil(line.slots[number])
    line.done(number, durable, faults.about(step))


def commit(keeper, step):
    shards = [m for m in keeper.channel.of("shard") if m["step"] == step]
    keeper.order(faults.order_of(shards, step))
    wait_for(lambda: [m for m in keeper.channel.of("committed") if m["step"] == step])


def test_sealed_snapshots_become_a_checkpoint(keeper, lines):
    for rank, line in enumerate(lines):
        snapshot(line, rank, 0, NEW)
    wait_for(lambda: len(keeper.channel.of("shard")) == 2)
    commit(keeper, NEW)
    assert faults.load_newest(Catalog(keeper.store)) == (f"step-{NEW:09d}-aa", faults.state_of(ENTRIES, NEW))
    assert Catalog(keeper.store).newest_good().file(1).rng == faults.RNG


@pytest.mark.parametrize("where", ["first", "last", "seal", "hashes"])
def test_a_byte_that_changed_after_the_seal_is_never_written(keeper, lines, where):
    """The byte changes between the seal and the drain."""

    def spoil(slot):
        places = {"first": 0, "last": slot.own_bytes - 1, "seal": slot._seal_at + 60, "hashes": slot.image_bytes + 3}
        slot.memory[places[where]] ^= 16

    snapshot(lines[0], 0, 0, NEW)
    snapshot(lines[1], 1, 0, NEW, spoil=spoil)
    (failed,) = wait_for(lambda: keeper.channel.of("checkpoint_failed"))
    lines[1].wait_free(0)  # the rank is told, and goes on
    assert failed["rank"] == 1
    if where in ("first", "last"):
        assert failed["checkpoint"] == f"step-{NEW:09d}-aa" and "the snapshot in memory: bytes 0 to" in failed["reason"]
    else:
        assert "seal" in failed["reason"]
    wait_for(lambda: keeper.channel.of("shard"))
    assert [m["rank"] for m in keeper.channel.of("shard")] == [0], "so the launcher has nothing to commit"
    assert Catalog(keeper.store).newest_good() is None
    snapshot(lines[1], 1, 1, NEW)  # the next one is good
    wait_for(lambda: len(keeper.channel.of("shard")) == 2)


def test_a_byte_that_changes_while_it_is_written_is_found_when_it_is_loaded(keeper, lines, monkeypatch):
    """It changes after the keeper has checked it and before it is on the disk. The hashes are those of the checked
    bytes."""
    real = os.pwrite

    def late(fd, data, at):
        lines[1].slots[0].memory[10] ^= 1
        return real(fd, data, at)

    snapshot(lines[0], 0, 0, NEW)
    wait_for(lambda: keeper.channel.of("shard"))
    monkeypatch.setattr(os, "pwrite", late)
    snapshot(lines[1], 1, 0, NEW)
    wait_for(lambda: len(keeper.channel.of("shard")) == 2)
    monkeypatch.undo()
    commit(keeper, NEW)
    events = []
    assert faults.load_newest(Catalog(keeper.store), events.append) is None
    assert "rank-000001.bin: chunk 0, bytes 0 to" in events[0]["reason"]


# -- copies of an accelerator, which the keeper seals


def sum_on_device(entries, plan, image):
    """Sum as the trainer does on the device: the widest words that fit, with a different weight for every segment."""
    words = {0: np.int64, 4: np.int32, 2: np.int16, 6: np.int16}
    sums = [
        image[s.offset : s.offset + s.size].view(words.get(s.size % 8, np.uint8)).astype(object).sum()
        for s in plan.segments
    ]
    assert all(entry.dtype == "float32" for entry in entries)
    total = sum((2 * i + 1) * each for i, each in enumerate(sums)) % (1 << 64)
    return total - (1 << 64) if total >> 63 else total


def copied(line, rank, number, step, spoil=lambda image: None):
    """Let a device fill a slot, without hashes or seal."""
    line.wait_free(number)
    slot, image = line.slots[number], faults.image_of(ENTRIES, PLANS[rank], step)
    slot.break_seal()
    slot.array()[:] = image
    spoil(slot.array())
    line.done(
        number,
        True,
        faults.about(step),
        {"header": faults.header_of(rank, step), "sum": sum_on_device(ENTRIES, PLANS[rank], image)},
    )


def test_what_a_device_has_copied_is_sealed_by_the_keeper(keeper, lines):
    for rank, line in enumerate(lines):
        copied(line, rank, 0, NEW)
    wait_for(lambda: len(keeper.channel.of("shard")) == 2)
    for rank, line in enumerate(lines):
        assert line.slots[0].header() == faults.header_of(rank, NEW)
        line.slots[0].verify()
    commit(keeper, NEW)
    assert faults.load_newest(Catalog(keeper.store)) == (f"step-{NEW:09d}-aa", faults.state_of(ENTRIES, NEW))


def swapped(image):
    """Swap two segments of one size, each of them whole: a plain sum would not notice."""
    a, b = next(
        (a, b)
        for i, a in enumerate(PLANS[1].segments)
        for b in PLANS[1].segments[i + 1 :]
        if a.size == b.size and a.entry != b.entry
    )
    first = image[a.offset : a.offset + a.size].copy()
    image[a.offset : a.offset + a.size] = image[b.offset : b.offset + b.size]
    image[b.offset : b.offset + b.size] = first


def flipped(image):
    image[PLANS[1].segments[-1].offset] ^= 1


def missing(image):
    """Leave what the slot held before, as if the copy never came."""
    segment = PLANS[1].segments[0]
    image[segment.offset : segment.offset + segment.size] = faults.image_of(ENTRIES, PLANS[1], OLD)[
        segment.offset : segment.offset + segment.size
    ]


@pytest.mark.parametrize("spoil", [flipped, swapped, missing])
def test_what_did_not_arrive_as_it_was_on_the_device_is_never_sealed(keeper, lines, spoil):
    copied(lines[1], 1, 0, OLD)
    lines[1].wait_free(0)
    copied(lines[0], 0, 1, NEW)
    copied(lines[1], 1, 1, NEW, spoil)
    (failed,) = wait_for(lambda: keeper.channel.of("checkpoint_failed"))
    assert failed["rank"] == 1 and failed["checkpoint"] == f"step-{NEW:09d}-aa"
    assert "what the device copied has the sum" in failed["reason"]
    lines[1].wait_free(1)  # the rank is told, and goes on
    assert lines[1].slots[1].header() is None
    assert lines[1].slots[0].header()["step"] == OLD, "the one before stays"
    assert [m["step"] for m in keeper.channel.of("shard") if m["rank"] == 1] == [OLD]


def held(keeper):
    keeper.channel.sent.clear()
    keeper.order({"type": "held"})
    return [(rank, step) for rank, step, _ in keeper.channel.of("held")[0]["copies"]]


def test_a_rank_that_dies_in_a_snapshot_leaves_the_one_before(keeper, lines):
    for rank, line in enumerate(lines):
        snapshot(line, rank, 0, OLD, durable=False)
        snapshot(line, rank, 1, OLD + 1, durable=False)
    for line in lines:
        line.wait_free(0)
    assert held(keeper) == [(0, OLD), (0, OLD + 1), (1, OLD), (1, OLD + 1)]
    slot = lines[1].slots[0]  # the older one is overwritten, but only half of it
    slot.break_seal()
    slot.array()[: slot.image_bytes // 2] = 255
    lines[1].close()
    assert held(keeper) == [(0, OLD), (0, OLD + 1), (1, OLD + 1)]
    keeper.order({"type": "write", "step": OLD + 1, "generation": 0})
    wait_for(lambda: len(keeper.channel.of("shard")) == 2)
    commit(keeper, OLD + 1)
    assert faults.load_newest(Catalog(keeper.store))[1] == faults.state_of(ENTRIES, OLD + 1)


def test_a_rank_that_comes_again_finds_its_snapshot(keeper, lines):
    snapshot(lines[0], 0, 1, OLD, durable=False)
    lines[0].wait_free(1)
    lines[0].close()
    (again, _) = faults.lines_to(keeper, ENTRIES)
    assert again.newest == 1 and again.slots[1].header()["step"] == OLD
    again.slots[1].verify()
    assert bytes(again.slots[1].image) == faults.image_of(ENTRIES, PLANS[0], OLD).tobytes()


def test_a_line_that_ends_after_its_rank_has_come_again_does_no_harm(keeper, lines):
    """The keeper may learn of a worker's death after its successor has connected."""
    again = faults.lines_to(keeper, ENTRIES)
    for line in lines:
        line.close()
    time.sleep(0.2)
    for rank, line in enumerate(again):
        snapshot(line, rank, 0, NEW)
    wait_for(lambda: len(keeper.channel.of("shard")) == 2, 5)


def test_what_is_being_written_may_be_asked_for_again(keeper, lines, monkeypatch):
    """This happens when ranks die while their last checkpoint is still being written to a slow disk. It is not a
    failure."""
    real = os.pwrite

    def slow(*args):
        time.sleep(0.2)
        return real(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    for rank, line in enumerate(lines):
        snapshot(line, rank, 0, NEW)
    wait_for(lambda: held(keeper) == [(0, NEW), (1, NEW)])
    keeper.order({"type": "write", "step": NEW, "generation": 0})
    wait_for(lambda: len({m["rank"] for m in keeper.channel.of("shard")}) == 2)
    keeper.channel.sent.clear()
    keeper.order({"type": "write", "step": NEW, "generation": 0})  # when it is written, it is reported again
    wait_for(lambda: len({m["rank"] for m in keeper.channel.of("shard")}) == 2)
    assert not keeper.channel.of("checkpoint_failed")


@pytest.mark.parametrize(
    "catalog, said",
    [(b'{"che', "catalog.json is damaged"), (b'{"format": 2, "checkpoints": {}}', "is newer than this program")],
    ids=["torn", "newer"],
)
def test_a_catalog_that_cannot_be_written_is_told_and_may_be_mended(catalog, said):
    """The snapshot is still in memory, so the checkpoint is not given up."""
    with faults.a_keeper(f"memory://keeper-{said[:12]}") as keeper:
        faults.adopt(keeper, ENTRIES, NEW)
        keeper.store.write(CATALOG, catalog)
        keeper._write(NEW, 0)
        (failed,) = wait_for(lambda: keeper.channel.of("checkpoint_failed"))
        assert said in failed["reason"] and not failed["gone"] and failed["rank"] == 0
        keeper.store.remove(CATALOG)
        keeper._write(NEW, 0)
        wait_for(lambda: {m["rank"] for m in keeper.channel.of("shard")} == {0, 1})


def test_a_buddy_that_answers_nonsense_costs_the_copy_only(keeper, lines, monkeypatch):
    def push(*args):
        raise WireError("nonsense")

    monkeypatch.setattr("phalanx.checkpoint.keeper.push", push)
    keeper.buddy = ("127.0.0.1", 1)
    for rank, line in enumerate(lines):
        snapshot(line, rank, 0, NEW)
    wait_for(lambda: len(keeper.channel.of("shard")) == 2)
    assert len(keeper.channel.of("buddy_failed")) == 2


def test_a_commit_that_is_asked_for_again_is_answered_again(keeper, lines):
    for rank, line in enumerate(lines):
        snapshot(line, rank, 0, NEW)
    wait_for(lambda: len(keeper.channel.of("shard")) == 2)
    order = faults.order_of(keeper.channel.of("shard"), NEW)
    keeper.order(order)
    wait_for(lambda: keeper.channel.of("committed"))
    keeper.order(order)
    wait_for(lambda: len(keeper.channel.of("committed")) == 2)
    keeper.committed.clear()  # as in a keeper that was restarted
    keeper.order(order)
    wait_for(lambda: len(keeper.channel.of("committed")) == 3)
    keeper.committed.clear()
    keeper.order({**order, "files": [(1, "another"), (1, "another")]})
    (failed,) = wait_for(lambda: keeper.channel.of("checkpoint_failed"))
    assert "another checkpoint has this name" in failed["reason"] and failed["rank"] == -1


def written(keeper, lines, number, step):
    """Write the files of a checkpoint, and return the order to commit it."""
    for rank, line in enumerate(lines):
        snapshot(line, rank, number, step)
    shards = wait_for(lambda: len(s := [m for m in keeper.channel.of("shard") if m["step"] == step]) == 2 and s)
    return faults.order_of(shards, step)


def test_a_slow_retention_holds_up_no_commit(keeper, lines, monkeypatch):
    """On a bucket it takes minutes, in which the next checkpoint would not become durable."""
    removing, real = threading.Event(), keeper.catalog.retain
    monkeypatch.setattr(keeper.catalog, "retain", lambda *args: removing.wait(60) and real(*args))
    orders = [written(keeper, lines, number, step) for number, step in ((0, OLD), (1, NEW))]
    try:
        for order in orders:
            keeper.order(order)
        wait_for(lambda: len(keeper.channel.of("committed")) == 2)
    finally:
        removing.set()


def test_the_last_checkpoint_is_reported_after_its_retention(keeper, lines, monkeypatch):
    """The report ends the run, and the keeper with it."""
    seen, real = [], keeper.catalog.retain

    def late(*args):
        time.sleep(0.2)
        seen.append(len(keeper.channel.of("committed")))
        return real(*args)

    monkeypatch.setattr(keeper.catalog, "retain", late)
    keeper.last = NEW
    for number, step in ((0, OLD), (1, NEW)):
        keeper.order(written(keeper, lines, number, step))
        wait_for(lambda number=number: len(keeper.channel.of("committed")) == number + 1)
    assert seen[-1] == 1, "the last one was reported before what it replaces was removed"


def test_a_commit_that_hangs_is_not_queued_again(keeper, lines, monkeypatch):
    """The command is sent again every two seconds, and names every file."""
    disk, real = threading.Event(), files.commit
    monkeypatch.setattr(files, "commit", lambda *args: disk.wait(60) and real(*args))
    first, second = (written(keeper, lines, number, step) for number, step in ((0, OLD), (1, NEW)))
    try:
        for order in (first, *3 * [second]):
            keeper.order(order)
        assert keeper.committer._work_queue.qsize() <= 2
    finally:
        disk.set()
    wait_for(lambda: len(keeper.channel.of("committed")) == 2)


def test_a_retention_that_finds_a_torn_index_says_so(keeper, monkeypatch):
    def torn(*args):
        raise BadCheckpoint("catalog.json is damaged")

    monkeypatch.setattr(keeper.catalog, "retain", torn)
    keeper._retain("step")
    assert [m["reason"] for m in keeper.channel.of("checkpoint_not_removed")] == ["catalog.json is damaged"]


@pytest.mark.parametrize("seal", [None, "{"], ids=["none", "torn"])
def test_an_order_that_cannot_be_understood_is_answered(keeper, lines, seal):
    """Otherwise the controller would wait for its answer for ever."""
    for rank, line in enumerate(lines):
        snapshot(line, rank, 0, NEW)
    wait_for(lambda: len(keeper.channel.of("shard")) == 2)
    order = faults.order_of(keeper.channel.of("shard"), NEW) | {"seal": seal}
    keeper.order(order if seal else {key: value for key, value in order.items() if key != "seal"})
    (failed,) = wait_for(lambda: keeper.channel.of("checkpoint_failed"))
    assert "could not be committed" in failed["reason"] and not keeper.committed


def test_a_run_that_lost_its_lease_commits_and_removes_nothing_more(keeper, lines):
    keeper.run, keeper.keep = "ours", (1, 0)
    first, second = (f"step-{step:09d}-aa" for step in (OLD, NEW))
    keeper.store.write("owner.json", json.dumps({"format": 1, "run": "ours", "host": "here"}).encode())
    for rank, line in enumerate(lines):
        snapshot(line, rank, 0, OLD)
    wait_for(lambda: len(keeper.channel.of("shard")) == 2)
    commit(keeper, OLD)
    keeper.store.write("owner.json", json.dumps({"format": 1, "run": "theirs", "host": "there"}).encode())
    for rank, line in enumerate(lines):
        snapshot(line, rank, 1, NEW)
    wait_for(lambda: len(keeper.channel.of("shard")) == 4)
    keeper.order(faults.order_of(keeper.channel.of("shard")[2:], NEW))
    (failed,) = wait_for(lambda: keeper.channel.of("checkpoint_failed"))
    assert failed["checkpoint"] == second and "belongs to a run on there now" in failed["reason"]
    assert [found.name for found in Catalog(keeper.store).good()] == [first], "there is no manifest"
    # Retention too asks: the lease may be lost after a commit.
    faults.make(keeper.store, NEW + 1)
    keeper._retain(second)
    (refused,) = keeper.channel.of("checkpoint_not_removed")
    assert "belongs to a run on there now" in refused["reason"] and not keeper.channel.of("checkpoints_removed")
    assert len(Catalog(keeper.store).good()) == 2
    keeper.store.write("owner.json", json.dumps({"format": 1, "run": "ours", "host": "here"}).encode())
    keeper._retain(second)
    assert [m["names"] for m in keeper.channel.of("checkpoints_removed")] == [[first]], "it would have gone"


def test_what_is_not_in_memory_any_more_cannot_be_written(keeper, lines):
    snapshot(lines[0], 0, 0, NEW, durable=False)
    lines[0].wait_free(0)
    keeper.order({"type": "write", "step": OLD, "generation": 0})
    (failed,) = wait_for(lambda: keeper.channel.of("checkpoint_failed"))
    assert failed["gone"] and failed["step"] == OLD


def test_a_rank_whose_snapshot_was_overwritten_is_told_beside_one_that_is_whole(keeper):
    """Otherwise the controller would wait for its file, and the checkpoint would stay open."""
    faults.adopt(keeper, ENTRIES, NEW)
    faults.fill(keeper.ranks[1].slots[0], ENTRIES, PLANS[1], 1, NEW + 1)
    keeper._write(NEW, 0)
    (shard,) = wait_for(lambda: keeper.channel.of("shard"))
    (failed,) = wait_for(lambda: keeper.channel.of("checkpoint_failed"))
    assert shard["rank"] == 0 and failed["rank"] == 1 and failed["gone"] and failed["step"] == NEW
    faults.fill(keeper.ranks[0].slots[0], ENTRIES, PLANS[0], 0, NEW + 1)
    keeper._write(NEW, 0)
    assert keeper.channel.of("shard") == [shard, shard], "what is written needs no snapshot"


def test_a_rank_that_has_not_come_so_far_is_not_given_up(keeper, lines):
    """One rank's file is tried again while the other's snapshot is still being sealed."""
    for rank, line in enumerate(lines):
        snapshot(line, rank, 0, OLD, durable=False)
        line.wait_free(0)
    snapshot(lines[0], 0, 1, NEW, durable=False)
    lines[0].wait_free(1)
    keeper.order({"type": "write", "step": NEW, "generation": 0})
    wait_for(lambda: keeper.channel.of("shard"))
    assert not keeper.channel.of("checkpoint_failed")
    snapshot(lines[1], 1, 1, NEW)
    wait_for(lambda: {m["rank"] for m in keeper.channel.of("shard")} == {0, 1})


def test_a_snapshot_that_is_overwritten_before_it_is_written_is_told(keeper):
    faults.adopt(keeper, ENTRIES, NEW)
    keeper._drain(0, keeper.ranks[0].slots[0], {"step": OLD, "generation": 0})
    (failed,) = keeper.channel.of("checkpoint_failed")
    assert failed["gone"] and failed["step"] == OLD and not keeper.channel.of("shard")


def test_a_stranger_is_sent_away_and_the_keeper_goes_on(keeper):
    for hello in (b"", b"{}", b"not json", b'{"rank": 0, "image_bytes": 4096, "own_bytes": 4096}'):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect("\0" + keeper.address)
        if hello:
            sock.send(hello)
        else:
            sock.close()
            continue
        assert sock.recv(1000) == b""
        sock.close()
    assert len(faults.lines_to(keeper, ENTRIES)) == 2


def test_another_user_of_the_machine_gets_no_memory(keeper, monkeypatch):
    """The keeper sends descriptors of the snapshots, so it must not welcome other users."""
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises((OSError, IndexError, ValueError)):
        faults.lines_to(keeper, ENTRIES)
    assert keeper.ranks == {}
    monkeypatch.undo()
    assert len(faults.lines_to(keeper, ENTRIES)) == 2


def test_a_rank_that_dies_before_it_is_welcome_does_no_harm(keeper, monkeypatch):
    gone, slots = threading.Event(), keeper._slots

    def late(*args):
        gone.wait(20)
        return slots(*args)

    monkeypatch.setattr(keeper, "_slots", late)
    plan = PLANS[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank, tempfile.TemporaryFile() as base:
        rank.connect("\0" + keeper.address)
        base.write(faults.manifest_of(ENTRIES, 0).to_json())
        base.seek(0)
        hello = {"rank": 0, "image_bytes": plan.image_bytes, "own_bytes": plan.own_bytes}
        socket.send_fds(rank, [json.dumps(hello).encode()], [base.fileno()])
    gone.set()
    socket.setdefaulttimeout(20.0)  # a keeper that has ended answers nobody
    try:
        assert faults.lines_to(keeper, ENTRIES)[0].slots, "the next one is welcome"
    finally:
        socket.setdefaulttimeout(None)


def test_a_host_holds_all_slots_or_one_or_refuses():
    assert memory.num_slots(4, 1000, False, available=12_000) == memory.SLOTS
    assert memory.num_slots(4, 1000, True, available=23_999) == 1
    assert memory.num_slots(4, 1000, True, available=24_000) == memory.SLOTS
    assert memory.num_slots(4, 1000, False, available=4000) == 1
    with pytest.raises(UserError, match="a snapshot of 4 ranks needs"):
        memory.num_slots(4, 1000, False, available=3999)


def test_with_room_for_one_snapshot_checkpoints_are_still_written(keeper, monkeypatch):
    size = memory.slot_bytes(PLANS[0].image_bytes, PLANS[0].own_bytes)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * size)
    lines = faults.lines_to(keeper, ENTRIES)
    assert [len(line.slots) for line in lines] == [1, 1]
    (said,) = keeper.channel.of("checkpoint_memory")
    assert (said["slots"], said["wanted"]) == (1, memory.SLOTS)
    for step in (OLD, NEW):
        for rank, line in enumerate(lines):
            snapshot(line, rank, 0, step)
        wait_for(lambda step=step: len([m for m in keeper.channel.of("shard") if m["step"] == step]) == 2)
        commit(keeper, step)
    for line in lines:
        line.close()
    with pytest.raises((OSError, BadCheckpoint)):
        push(keeper.peers, (ADDRESS, keeper.server.port), 7, a_slot(), None)


# -- the buddy

ADDRESS = "127.0.0.1"


@pytest.fixture
def server():
    server = BuddyServer(faults.PEERS)
    yield server
    server.close()


def address(server):
    return ADDRESS, server.port


def test_a_copy_is_the_same_bit_for_bit(server):
    for rank in (0, 1):
        push(faults.PEERS, address(server), rank, a_slot(OLD, rank))
        push(faults.PEERS, address(server), rank, a_slot(NEW, rank))
    for rank in (0, 1):
        back, _ = fetch(faults.PEERS, address(server), rank)
        assert back.header() == faults.header_of(rank, NEW)
        assert bytes(back.image) == faults.image_of(ENTRIES, PLANS[rank], NEW).tobytes()


def test_the_newest_three_are_kept_whatever_comes_in_which_order(server):
    for step in (4, 5, 9, 6):
        push(faults.PEERS, address(server), 0, a_slot(step))
    assert len(server.copies[0]) == 3
    assert fetch(faults.PEERS, address(server), 0)[0].header()["step"] == 9


def test_who_has_another_key_gets_and_leaves_nothing(server):
    push(faults.PEERS, address(server), 0, a_slot(OLD))
    stranger = Peers(key="ab" * 32)
    with pytest.raises(OSError, match="has not proven itself"):
        push(stranger, address(server), 0, a_slot(NEW))
    with pytest.raises(OSError, match="has not proven itself"):
        fetch(stranger, address(server), 0)
    assert fetch(faults.PEERS, address(server), 0)[0].header()["step"] == OLD
    assert len(server.copies[0]) == 1


def test_what_is_not_there_is_said(server):
    with pytest.raises(BadCheckpoint, match="no whole copy of rank 3"):
        fetch(faults.PEERS, address(server), 3)


def cut_push(server, slot, size):
    """A push whose connection ends after so many bytes of the slot."""
    with faults.PEERS.dial(address(server)) as conn:
        sizes = {"image_bytes": slot.image_bytes, "own_bytes": slot.own_bytes}
        conn.send({"type": "push", "rank": 0, **sizes})
        conn.sendall(slot.memory[:size])


@pytest.mark.parametrize("part", [0.0, 0.3, 0.8])
def test_a_push_that_is_cut_leaves_the_copy_before(server, part):
    entries = faults.entries_of(rows=20_000)
    plan = faults.plans_of(entries)[0]
    push(faults.PEERS, address(server), 0, a_slot(OLD, 0, entries))
    for step in (NEW, NEW + 1, NEW + 2):  # even when both places are taken
        slot = a_slot(step, 0, entries)
        assert 0.8 * slot.size < slot.image_bytes
        cut_push(server, slot, int(part * slot.size))
        wait_for(lambda: not [t for t in threading.enumerate() if "_attend" in t.name])
        back, _ = fetch(faults.PEERS, address(server), 0)
        assert back.header()["step"] == step - 1
        assert bytes(back.image) == faults.image_of(entries, plan, step - 1).tobytes()
        push(faults.PEERS, address(server), 0, slot)
    assert fetch(faults.PEERS, address(server), 0)[0].header()["step"] == NEW + 2


@pytest.mark.parametrize("at", ["image", "hashes", "seal"])
def test_a_copy_that_is_damaged_on_the_way_is_refused_and_the_one_before_stays(server, monkeypatch, at):
    slot = a_slot(NEW)
    place = {"image": 77, "hashes": slot.image_bytes + 1, "seal": slot._seal_at + 50}[at]
    push(faults.PEERS, address(server), 0, a_slot(OLD))
    real = Stream.fill

    def fill(conn, room):
        real(conn, room)
        if len(room) == slot.size:
            room[place] ^= 8

    monkeypatch.setattr(Stream, "fill", fill)
    with pytest.raises(BadCheckpoint, match=r"the copy at the buddy node is damaged: (the seal|.*xxh3)"):
        push(faults.PEERS, address(server), 0, slot)
    with pytest.raises(BadCheckpoint, match=r"seal|xxh3"):
        fetch(faults.PEERS, address(server), 0)  # and on the way back
    monkeypatch.undo()
    assert fetch(faults.PEERS, address(server), 0)[0].header()["step"] == OLD


def test_two_pushes_of_a_rank_at_once_are_both_whole(server):
    """Two slots of a rank may be on their way at once, over a slow network."""
    entries = faults.entries_of(rows=40_000)  # 1.3 MB each
    slots = [a_slot(step, 0, entries) for step in range(6)]
    for slot in slots[:2]:
        push(faults.PEERS, address(server), 0, slot)
    failed = []

    def run(slot):
        try:
            push(faults.PEERS, address(server), 0, slot)
        except (BadCheckpoint, OSError) as error:
            failed.append(error)

    for pair in (slots[2:4], slots[4:6]) * 3:
        threads = [threading.Thread(target=run, args=(slot,)) for slot in pair]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []
    back, _ = fetch(faults.PEERS, address(server), 0)
    assert back.header()["step"] in (4, 5) and bytes(back.image) == bytes(slots[back.header()["step"]].image)


KEEPER = """
import os, sys, threading
from tests.checkpoint import faults
from phalanx.checkpoint.keeper import Keeper, Rank
class Channel(faults.Channel):
    def send(self, message):
        super().send(message)
        print(message["type"], message.get("port", message.get("reason", "")), flush=True)
keeper = Keeper(Channel(), sys.argv[1], 2, (3, 0), faults.PEERS, True)
keeper.channel.send({"type": "keeper", "port": keeper.server.port})
if len(sys.argv) > 2:
    keeper.order({"type": "buddy", "host": "127.0.0.1", "port": sys.argv[2]})
    faults.adopt(keeper, faults.entries_of(), int(sys.argv[3]))
    for rank in (0, 1):
        keeper._copy(rank, keeper.ranks[rank].slots[0])  # what fails is printed
    print("copied", flush=True)
sys.stdin.read()
"""


def spawn(*args):
    process = subprocess.Popen(
        [sys.executable, "-c", KEEPER, *map(str, args)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().split()


def test_the_snapshots_of_a_node_that_is_gone_come_from_its_buddy(tmp_path):
    """Three real keepers: one has copied its ranks to another and is killed; a third takes its place."""
    second, (_, port) = spawn(tmp_path / "c")
    first, _ = spawn(tmp_path / "c", port, NEW)
    try:
        assert first.stdout.readline() == "copied\n"
        first.send_signal(signal.SIGKILL)
        first.wait()
        with faults.a_keeper(tmp_path / "c") as third:
            faults.adopt(third, ENTRIES, 1)  # it knows the run, but not this state
            third.ranks.clear()
            for rank, plan in enumerate(PLANS):
                slot, layout = fetch(faults.PEERS, (ADDRESS, int(port)), rank)
                third.ranks[rank] = Rank([slot], layout)
                assert slot.header() == faults.header_of(rank, NEW)
                assert bytes(slot.image) == faults.image_of(ENTRIES, plan, NEW).tobytes()
            third.order({"type": "write", "step": NEW, "generation": 0})
            wait_for(lambda: len(third.channel.of("shard")) == 2)
            third._commit(faults.order_of(third.channel.of("shard"), NEW))
        got = faults.load_newest(Catalog(Folder(tmp_path / "c")))
        assert got == (f"step-{NEW:09d}-aa", faults.state_of(ENTRIES, NEW))
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def test_a_buddy_that_is_gone_costs_the_copy_only(keeper, lines):
    gone = BuddyServer(faults.PEERS)
    gone.close()
    keeper.order({"type": "buddy", "host": ADDRESS, "port": gone.port})
    for rank, line in enumerate(lines):
        snapshot(line, rank, 0, NEW)
    wait_for(lambda: len(keeper.channel.of("shard")) == 2)
    assert len(keeper.channel.of("buddy_failed")) == 2 and not keeper.channel.of("checkpoint_failed")
    commit(keeper, NEW)


# -- the choice of buddies


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_a_buddy_is_never_in_the_same_failure_domain(domains):
    for node, other in enumerate(buddies(domains)):
        if other is None:
            assert len(set(domains)) == 1
        else:
            assert other != node and domains[other] != domains[node]


@given(st.integers(2, 5), st.integers(1, 4))
def test_every_node_keeps_as_many_copies_as_it_gives(num_domains, each):
    """This holds while the domains have the same size and their nodes take turns."""
    chosen = buddies([str(n % num_domains) for n in range(num_domains * each)])
    assert sorted(chosen) == list(range(num_domains * each))


def test_one_node_has_no_buddy():
    assert buddies(["a"]) == [None] and buddies(["a", "a"]) == [None, None]
