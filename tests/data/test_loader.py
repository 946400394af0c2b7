"""What the run serves: the rows that the order names, from good chunks, and the samples that replace bad ones."""

import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.core.manifest import Cut, Extent, Manifest
from phalanx.core.store import Folder
from phalanx.data.fetch import Corrupt
from phalanx.data.loader import DataLost, make_order, unserved
from phalanx.data.order import Order
from tests.data.sets import TOKENS, Memory, Remote, flip, make_loader, ramp, threads_named, write_set


@pytest.fixture
def load():
    open_ = []

    def make(store, manifest, **more):
        open_.append(make_loader(store, manifest, **more))
        return open_[-1]

    yield make
    for loader, _ in open_:
        loader.close()
    until = time.monotonic() + 10
    while (left := threads_named("phalanx-")) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left, "threads end on close"


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 4), st.integers(0, 300), st.data())
def test_rows_are_what_the_order_says(seq_len, groups, cursor, data):
    store = Memory()
    extents = [("a", ramp(400)), ("b", ramp(150, 1000)), ("a", ramp(90, 2000))]
    manifest, _ = write_set(store, extents, chunk_items=data.draw(st.integers(4, 20)), shard_chunks=12)
    loader, events = make_loader(store, manifest, seq_len=seq_len, groups=groups)
    rows = loader.rows(range(cursor, cursor + 64))
    for row, extent, sample in zip(rows, *loader.order.locate(np.arange(cursor, cursor + 64)), strict=True):
        shard, chunk, item = (int(x[0]) for x in loader.cuts[extent].place(manifest, np.array([sample])))
        first = (shard * 12 + chunk) * manifest.chunk_items + item
        assert row.tolist() == extents[extent][1][first : first + seq_len + 1].tolist()
    assert events == []
    loader.close()


def test_stages_and_growth_through_a_manifest():
    store = Memory()
    old, _ = write_set(store, [("a", ramp(400)), ("b", ramp(150, 1000))])
    new, _ = write_set(store, [("a", ramp(400)), ("b", ramp(150, 1000)), ("b", ramp(200, 2000))])
    before = make_order(old, 8, 1, 2)
    after = make_order(new, 8, 1, 2, stages=[(0, {}), (100, {"a": 1, "b": 3})], extents=[2, 3])
    served = [np.stack(o.locate(np.arange(300))) for o in (before, after)]
    assert np.array_equal(served[0][:, :100], served[1][:, :100])
    assert (served[1][0, 100:] == 2).any()
    assert sum(after.stages[1].quotas[1:]) == 3 * after.stages[1].quotas[0], (
        "a source's weight is shared by its extents"
    )
    with pytest.raises(UserError, match="it has a, b"):
        make_order(new, 8, 1, 2, stages=[(0, {"c": 1.0})])
    with pytest.raises(UserError, match="too small"):
        make_order(new, 8, 1, 2, stages=[(0, {"a": 1.0, "b": 1e-6})])


def test_too_long_sequences_are_refused():
    manifest, _ = write_set(Memory(), [("a", ramp(100))])
    with pytest.raises(UserError, match="longer than a shard of 64"):
        make_order(manifest, 65, 1, 1)
    small, _ = write_set(Memory(), [("b", ramp(9)), ("a", ramp(20))])
    with pytest.raises(UserError, match="source a has 20 tokens; one sample takes 31"):
        make_order(small, 30, 1, 1)


def test_an_extent_without_a_sample_is_not_served():
    extents = [("a", ramp(400)), ("b", ramp(7)), ("a", ramp(5))]
    manifest, _ = write_set(Memory(), extents)
    order = make_order(manifest, 8, 1, 2)
    assert order.stages[0].quotas == (4096, 0, 0) and set(order.locate(np.arange(5000))[0]) == {0}
    assert Order.from_dict(order.to_dict()) == order
    alone = make_order(write_set(Memory(), extents[:1])[0], 8, 1, 2)
    assert np.array_equal(order.locate(np.arange(500)), alone.locate(np.arange(500)))
    assert list(unserved(manifest, order, [])) == [
        "not served: extent 1 (b), which holds 7 items, less than one sample",
        "not served: extent 2 (a), which holds 5 items, less than one sample",
    ]
    weights = {"a": 1.0, "b": 0.5}
    with pytest.raises(UserError, match=r"(?s)data\.stages = 'b': it holds less than one sample.*weight 0"):
        make_order(manifest, 8, 1, 2, stages=[(0, weights)])
    order = make_order(manifest, 8, 1, 2, stages=[(0, {"a": 1.0})])
    assert len(list(unserved(manifest, order, [{"weights": {"a": 1.0}}]))) == 1  # nothing of b was asked for


def large(*extents):
    """Make a manifest of this many items, without data."""
    shards = sum(-(-n // (1 << 24)) for _, n in extents)
    known = tuple(Extent(source, n) for source, n in extents)
    return Manifest(TOKENS, known, np.zeros((shards, 32), np.uint8), 1 << 14, 1 << 10)


def test_an_extent_that_is_worth_less_than_half_a_draw_is_not_served():
    """A single draw per largest block would serve its samples more than twice as often as all others."""
    manifest = large(("a", 3_000_000_000), ("b", 9), ("a", 9))
    order = make_order(manifest, 8, 1, 2)
    assert order.stages[0].quotas == (65536, 0, 0)
    assert [line.rpartition(", ")[2] for line in unserved(manifest, order, [])] == ["too small a share to be drawn"] * 2
    order = make_order(manifest, 8, 1, 2, stages=[(0, {"a": 3.0, "b": 1.0})])
    assert order.stages[0].quotas == (49152, 16384, 0)  # no error: a's weight falls to its large extent
    many = large(("a", 2_000_000_000), *[("b", 10_001)] * 4)  # each worth a third of a draw, together more than one
    assert make_order(many, 8, 1, 2).stages[0].quotas == (65535, 1, 0, 0, 0)


# Bad chunks. The set has 10 units of 2 samples and a short one of 1 (chunks of 16 items, 4 to a shard).


@pytest.fixture
def made(tmp_path):
    store = Folder(tmp_path / "set")
    manifest, _ = write_set(store, [("a", ramp(10 * 16 + 8 + 1))])
    assert Cut.of(manifest, 0, 8).num_samples == 21
    return store, manifest


def spoil(store, manifest, *chunks):
    for chunk in chunks:
        shard, chunk = divmod(chunk, 4)
        flip(store.path / manifest.shard_name(0, shard), chunk * 32 + 7)


def first_of(sample):
    return sample * 8


def served(loader, order=range(21)):
    """Ask for an epoch's places in `order`, and map each sample to the first token of the row that came for it."""
    found = {}
    for place in order:
        sample = int(loader.order.locate(np.array([place]))[1][0])
        found[sample] = int(loader.rows([place])[0, 0])
    return found


def test_one_bad_chunk(made, load):
    spoil(*made, 3)
    loader, events = load(*made)
    found = served(loader)
    assert found == {s: first_of({6: 8, 7: 9}.get(s, s)) for s in range(21)}
    quarantined, *substituted = sorted(events, key=lambda e: e["type"])
    assert quarantined["type"] == "data_quarantine"
    assert quarantined["shard"].startswith("shards/a-000-000000-") and quarantined["chunk"] == 3
    assert quarantined["expected"].startswith("xxh3") and quarantined["got"] != quarantined["expected"]
    assert sorted((e["type"], e["extent"], e["sample"], e["used"]) for e in substituted) == [
        ("data_substitute", 0, 6, 8),
        ("data_substitute", 0, 7, 9),
    ]
    for event in substituted:
        assert loader.order.locate(np.array([event["place"]]))[1][0] == event["sample"]


@settings(max_examples=25)
@given(st.sets(st.integers(0, 10), max_size=6), st.permutations(range(21)), st.sampled_from([8, 24]))
def test_substitutes_depend_on_what_is_bad_alone(bad, asked, seq_len):
    """Nodes read in different orders, and a run may resume in the middle: all must agree. With 24 tokens a sample lies
    in two chunks of a unit of several."""
    store = Memory()
    manifest, _ = write_set(store, [("a", ramp(10 * 16 + 8 + 1))])
    for chunk in bad:
        name, at = manifest.shard_name(0, chunk // 4), chunk % 4 * 32 + 7
        data = bytearray(store.files[name])
        data[at] ^= 1
        store.files[name] = bytes(data)
    loader, events = make_loader(store, manifest, seq_len=seq_len, quarantine_limit=99)
    cut = loader.cuts[0]
    places = [p for p in asked if p < cut.num_samples]
    results = {}
    try:
        for place in places:
            sample = int(loader.order.locate(np.array([place]))[1][0])
            results[sample] = loader.rows([place])[0].tolist()
    except DataLost as error:
        assert "no other of its source is good" in str(error)

    def good(sample):
        return not {s * 4 + c for _, s, c in loader._chunks(0, sample)} & bad

    whole = cut.num_samples // cut.per_unit
    for sample, row in results.items():
        unit, k = divmod(sample, cut.per_unit)
        others = [u for u in [*range(unit + 1, whole), *range(whole)] if u != unit]
        used = next(s for s in [sample, *(u * cut.per_unit + k for u in others)] if good(s))
        first = used // cut.per_unit * cut.unit_chunks * 16 + used % cut.per_unit * seq_len
        assert row == ramp(seq_len + 1, first).tolist()
    quarantined = [(e["shard"], e["chunk"]) for e in events if e["type"] == "data_quarantine"]
    assert len(quarantined) == len(set(quarantined)), "each is told once"
    loader.close()


def test_a_chain_and_the_end_wrap_around(made, load):
    spoil(*made, 8, 9, 0)
    loader, _ = load(*made)
    found = served(loader)
    assert {s: f for s, f in found.items() if f != first_of(s)} == {
        0: first_of(2),
        1: first_of(3),
        16: first_of(2),  # units 8 and 9 and 0 are bad: 1 is the next
        17: first_of(3),
        18: first_of(2),
        19: first_of(3),
    }


def test_the_short_last_unit_is_replaced_and_replaces_nothing(made, load):
    spoil(*made, 10, 9)
    loader, _ = load(*made)
    found = served(loader)
    assert (found[20], found[18], found[19]) == (first_of(0), first_of(0), first_of(1))


def test_after_the_limit_the_run_stops(made, load):
    spoil(*made, 1, 3, 5)
    loader, events = load(*made, quarantine_limit=3)
    served(loader)
    assert sum(e["type"] == "data_quarantine" for e in events) == 3
    loader, events = load(*made, quarantine_limit=2)
    with pytest.raises(DataLost, match=r"more than 2 are bad \(data.quarantine_limit\)") as caught:
        served(loader)
    assert "shards/a-000-00000" in str(caught.value) and str(caught.value).count("xxh3 ") == 2
    loader, _ = load(*made, quarantine_limit=0)
    with pytest.raises(DataLost, match="more than 0"):
        served(loader)


def test_a_missing_shard_is_told_chunk_by_chunk(made, load):
    (made[0].path / made[1].shard_name(0, 1)).unlink()
    loader, events = load(*made, quarantine_limit=4)
    found = served(loader)
    assert all(f == first_of(s if not 8 <= s < 16 else 16 + s % 2) for s, f in found.items())
    quarantined = [e for e in events if e["type"] == "data_quarantine"]
    assert sorted(e["chunk"] for e in quarantined) == [0, 1, 2, 3]
    assert {e["reason"] for e in quarantined} == {"the file is missing"}
    loader, _ = load(*made, quarantine_limit=3)
    with pytest.raises(DataLost, match="the file is missing"):
        served(loader)


def test_a_truncated_or_swapped_shard(made, load):
    store, manifest = made
    os.truncate(store.path / manifest.shard_name(0, 1), 40)
    loader, _ = load(*made, quarantine_limit=4)
    assert all(f == first_of(s if not 8 <= s < 16 else 16 + s % 2) for s, f in served(loader).items())
    os.replace(store.path / manifest.shard_name(0, 0), store.path / manifest.shard_name(0, 1))
    loader, _ = load(Folder(store.path), manifest, quarantine_limit=7)
    with pytest.raises(DataLost):
        served(loader)


def test_damage_during_a_run_is_found_and_nothing_is_silent(tmp_path, load):
    """Chunks are dropped from memory and read again; the second time one is bad."""
    store = Folder(tmp_path)
    manifest, _ = write_set(store, [("a", ramp(10 * 16 + 8 + 1))])
    loader, events = load(store, manifest, pool_bytes=40)
    good = served(loader)
    spoil(store, manifest, 3)
    later = served(loader, range(21))
    assert (
        {s for s in good if later[s] != good[s]}
        == {6, 7}
        == {e["sample"] for e in events if e["type"] == "data_substitute"}
    )


def test_when_nothing_is_good(load):
    store = Memory()
    manifest, _ = write_set(store, [("a", ramp(17))])
    name = manifest.shard_name(0, 0)
    store.files[name] = b"\xff" + store.files[name][1:]
    loader, _ = load(store, manifest)
    with pytest.raises(DataLost, match="no other of its source is good"):
        loader.rows([0])
    with pytest.raises(Corrupt):
        loader.read(0, 0)


def test_ids_are_checked_before_rows_are_handed_out(made, load):
    loader, _ = load(*made, max_id=50)
    with pytest.raises(UserError, match="the model knows ids from 0 to 49"):
        served(loader)


def test_a_remote_store_serves_the_same_rows(made, load):
    def flaky(name, start, count, data):
        if count == 1 and start % 3 == 0:
            raise OSError("503")
        return data[:-1] if count == 2 and start % 3 == 1 else data

    places = range(40)
    expected = load(*made)[0].rows(places)
    loader, events = load(Remote(made[0], flaky), made[1])
    assert np.array_equal(loader.rows(places), expected) and not events
    assert loader.fetcher.counters.retries > 0
