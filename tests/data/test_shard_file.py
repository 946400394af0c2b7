"""What is written is what is read, wherever samples fall, and only the items read decide the result."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.core.manifest import Cut, Extent, Field, Manifest
from phalanx.data.fetch import Fetcher
from phalanx.data.loader import Loader, make_order
from phalanx.data.shard_file import version_of
from tests.data.sets import Memory, ramp, write_set

FIELDS = (Field("patches", "<f4", (2, 3)), Field("label", "<i8"), Field("weight", "|u1"))


@settings(max_examples=150)
@given(st.integers(1, 120), st.lists(st.integers(0, 10**6), max_size=8), st.integers(1, 20), st.integers(1, 4))
def test_shards_do_not_depend_on_the_pieces(n, pieces, chunk_items, shard_chunks):
    one, many = Memory(), Memory()
    write_set(one, [("a", ramp(n))], chunk_items, shard_chunks)
    write_set(many, [("a", ramp(n))], chunk_items, shard_chunks, pieces=pieces)
    assert one.files == many.files


@settings(max_examples=150)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(1, 60), st.integers(-1, 200))
@example(16, 4, 8, 0)  # the last shard is exactly full
@example(16, 4, 8, 1)  # and with one item over
@example(16, 4, 24, 7)  # a sequence longer than a chunk
@example(4, 3, 10, 40)  # in a shard whose chunks are not a power of two
def test_every_sample_is_readable(chunk_items, shard_chunks, seq_len, more):
    store = Memory()
    n = max(1, 2 * chunk_items * shard_chunks + more)
    manifest, _ = write_set(store, [("a", ramp(n))], chunk_items, shard_chunks)
    for shard in range(manifest.num_shards(0)):
        assert store.size(manifest.shard_name(0, shard)) == manifest.shard_bytes(0, shard)
    if seq_len > chunk_items * shard_chunks:
        with pytest.raises(ValueError, match="longer than a shard"):
            Cut.of(manifest, 0, seq_len)
        return
    cut = Cut.of(manifest, 0, seq_len)
    if not cut.num_samples:
        return
    fetcher = Fetcher(store, manifest)
    loader = Loader(manifest, make_order(manifest, seq_len, 1, 3), seq_len, fetcher)
    unit_items = cut.unit_chunks * chunk_items
    firsts = [s // cut.per_unit * unit_items + s % cut.per_unit * seq_len for s in range(cut.num_samples)]
    assert firsts[-1] + seq_len + 1 <= n
    for sample, first in enumerate(firsts):
        assert loader.read(0, sample).tolist() == ramp(seq_len + 1, first).tolist()
        shard, chunk, item = (int(x[0]) for x in cut.place(manifest, np.array([sample])))
        assert (shard * shard_chunks + chunk) * chunk_items + item == first
    rows = loader.rows(range(cut.num_samples))
    assert sorted(rows[:, 0].tolist()) == firsts, "an epoch serves each sample once"
    loader.close()


def test_little_of_a_chunk_is_not_served():
    items = 2048 * 65536 * 3
    manifest = Manifest((Field("tokens", "<u4"),), (Extent("a", items),), np.empty((0, 32), np.uint8), 65536, 2048)
    for seq_len in (1024, 2048, 3000, 4096, 8192, 40_000):
        assert Cut.of(manifest, 0, seq_len).num_samples * seq_len > items * 15 / 16 - 65536


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 3), st.integers(1, 5))
def test_records_of_any_fields(n, chunk_items, shard_chunks, groups):
    store = Memory()
    records = np.zeros(n, [(f.name, f.dtype, f.shape) for f in FIELDS])
    records["label"] = np.arange(n)
    records["patches"] = np.arange(n * 6).reshape(n, 2, 3)
    records["weight"] = np.arange(n) % 256
    manifest, _ = write_set(store, [("images", records)], chunk_items, shard_chunks, FIELDS)
    assert Manifest.decode(manifest.encode()).dtype == records.dtype
    fetcher = Fetcher(store, manifest, max_id=3)  # no tokens: no ids
    loader = Loader(manifest, make_order(manifest, 77, 1, groups), 77, fetcher)
    rows = loader.rows(range(n))
    assert rows.shape == (n, 1)
    by_label = rows[np.argsort(rows["label"][:, 0]), 0]
    assert by_label.tobytes() == records.tobytes()
    loader.close()


def test_manifest_round_trip_and_growth():
    store = Memory()
    old, version = write_set(store, [("a", ramp(100))], eos=3, vocab_size=70, tokenizer="byte")
    decoded = Manifest.decode(old.encode())
    assert version_of(decoded.encode()) == version and decoded.eos == 3 and decoded.roots.tolist() == old.roots.tolist()
    new, _ = write_set(store, [("a", ramp(100)), ("b", ramp(30))], eos=3)
    assert new.extends(old) and not old.extends(new)
    other, _ = write_set(store, [("a", ramp(100, 1)), ("b", ramp(30))], eos=3)
    assert not other.extends(old)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: b"", "Expecting value"),
        (lambda d: b"[1]\n" + d, "not a manifest"),
        (lambda d: d.replace(b'"phalanx_manifest": 2', b'"phalanx_manifest": 9'), "newer than this program"),
        (lambda d: d[:-65], "names 1 shards, but its extents make 2"),
        (lambda d: d[:-2] + b"\n", "hex"),
        (lambda d: d.replace(b'"items": 100', b'"items": "x"'), "'x' items"),
        (lambda d: d.replace(b'"chunk_items"', b'"chunky"'), "damaged"),
        (lambda d: d.replace(b'"source": "a"', b'"source": "../a"'), "is not a name"),
    ],
)
def test_a_damaged_manifest_says_what_is_wrong(change, message):
    manifest, _ = write_set(Memory(), [("a", ramp(100))])
    with pytest.raises(ValueError, match=message):
        Manifest.decode(change(manifest.encode()))
