"""The order serves every sample as often as promised, for any number of ranks, stages and resumes; and it is a shuffle.
The scalar functions here are its definition: a change to their results needs another `VERSION`."""

import json
import math
from collections import Counter
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx.data import order as order_module
from phalanx.data.order import BLOCK, MAX_BLOCK, Order, Stage, Stream, key_of, permute, quotas

MASK = 2**64 - 1


def scalar_mix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def scalar_key(*parts):
    key = 0
    for part in parts:
        key = scalar_mix(key ^ scalar_mix(part & MASK))
    return key


def scalar_permute(index, size, key, rounds=6):
    bits = max(2, (size - 1).bit_length())
    while True:
        low, high = bits // 2, bits - bits // 2
        for r in range(rounds):
            right = index % 2**low
            left = index >> low ^ scalar_mix(right ^ scalar_mix((key + r) & MASK)) % 2**high
            index = right << high | left
            low, high = high, low
        if index < size:
            return index


def scalar_order(o, count, block_size):
    """Yield the first positions, by counting."""
    drawn, seen = Counter(), Counter()
    for position in range(count):
        group = position % o.groups
        stage = max(s for s, x in enumerate(o.stages) if x.start <= position)
        block, place = divmod(seen[stage, group], block_size)
        seen[stage, group] += 1
        shuffled = scalar_permute(place, block_size, scalar_key(o.seed, 1, stage, group, block))
        ends = np.cumsum(o.stages[stage].quotas)
        stream = next(d for d, end in enumerate(ends) if shuffled < end)
        # The number of the group's draw from the stream: those of earlier places of the block come first.
        draw = drawn[stream, group]
        drawn[stream, group] += 1
        s, ordinal = o.streams[stream], draw * o.groups + group
        epoch, place = divmod(ordinal, s.num_samples)
        lane, step = place % o.groups, place // o.groups
        place = sum(len(range(k, s.num_samples, o.groups)) for k in range(lane)) + step
        window, inside = divmod(place, s.window * s.per_unit)
        first = window * s.window * s.per_unit
        size = min(s.window * s.per_unit, s.num_samples - first)
        place = first + scalar_permute(inside, size, scalar_key(o.seed, 2, stream, epoch, window))
        unit, k = divmod(place, s.per_unit)
        if unit < s.num_samples // s.per_unit:
            unit = scalar_permute(unit, s.num_samples // s.per_unit, scalar_key(o.seed, 3, stream, epoch))
        yield stream, unit * s.per_unit + k


def located(o, places):
    return list(zip(*(part.tolist() for part in o.locate(np.asarray(places, np.int64))), strict=True))


def small_blocks(size=16):
    return patch.object(order_module, "BLOCK", size)


def quotas_of(num, block):
    """Split a block among streams, some of which may get nothing."""
    return st.lists(st.integers(0, 3), min_size=num, max_size=num).map(
        lambda w: tuple(np.diff([0, *np.rint(np.cumsum([*w[:-1], w[-1] + 1]) * block / (sum(w) + 1)).astype(int)]))
    )


@st.composite
def orders(draw, block=16, max_streams=3, max_samples=60):
    num = draw(st.integers(1, max_streams))
    size = st.integers(1, max_samples)
    streams = [Stream(f"s{d}", draw(size), draw(st.integers(1, 5)), draw(st.integers(1, 4))) for d in range(num)]
    starts = [0, *sorted(draw(st.sets(st.integers(1, 150), max_size=3)))]
    stages = [Stage(start, tuple(int(q) for q in draw(quotas_of(num, block)))) for start in starts]
    seed, groups = draw(st.integers(0, 2**63)), draw(st.integers(1, 5))
    with small_blocks(block):
        return Order(seed, groups, tuple(streams), tuple(stages))


# The bijection.


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@example(1, 5)
@example(2, 5)
@example(3, 5)
@example(4, 5)
@example(1024, 5)
@example(1025, 5)
def test_permute_is_a_bijection(size, key):
    assert np.array_equal(np.sort(permute(np.arange(size), size, np.uint64(key))), np.arange(size))


@given(st.integers(1, 2**62), st.integers(0, 2**64 - 1), st.data())
@example(3_662_109_375, 1, None)
@example(2**32, 1, None)
@example(2**32 + 1, 1, None)
def test_permute_keeps_samples_of_a_large_domain_apart(size, key, data):
    first = data.draw(st.integers(0, max(0, size - 500))) if data else size // 3
    index = np.unique(np.concatenate([first + np.arange(min(size, 500)), np.arange(min(size, 500))]))
    out = permute(index, size, np.uint64(key))
    assert len(np.unique(out)) == len(index) and out.min() >= 0 and out.max() < size


@given(
    st.lists(st.tuples(st.integers(1, 2**62), st.integers(0, 2**62), st.integers(0, 2**64 - 1)), min_size=1, max_size=9)
)
def test_permute_of_many_is_that_of_each(cases):
    sizes, indices, keys = ([c[k] for c in cases] for k in range(3))
    indices = [i % n for i, n in zip(indices, sizes, strict=True)]
    many = permute(np.array(indices), np.array(sizes), np.array(keys, np.uint64)).tolist()
    assert many == [scalar_permute(i, n, k) for i, n, k in zip(indices, sizes, keys, strict=True)]
    assert many == [int(permute(i, n, np.uint64(k))[0]) for i, n, k in zip(indices, sizes, keys, strict=True)]


@given(st.lists(st.integers(0, 2**63), min_size=1, max_size=5))
def test_keys(parts):
    assert int(key_of(*parts)) == scalar_key(*parts)


# The order.


@settings(max_examples=40)
@given(orders(), st.integers(1, 300))
def test_the_order_is_its_definition(o, count):
    with small_blocks():
        assert located(o, range(count)) == list(scalar_order(o, count, 16))


def test_the_order_is_its_definition_with_blocks_of_full_size():
    streams = (Stream("a", 3000, 4, 128), Stream("b", 10**9, 64, 128), Stream("c", 70, 1, 2))
    o = Order(
        7, 3, streams, (Stage(0, quotas((6, 3, 1))), Stage(1501, quotas((1, 0, 0))), Stage(2500, quotas((1, 1, 1))))
    )
    assert located(o, range(4000)) == list(scalar_order(o, 4000, BLOCK))


@settings(max_examples=40)
@given(orders())
def test_each_sample_is_used_floor_or_ceil_times_at_whole_blocks(o):
    with small_blocks():
        o = Order(o.seed, o.groups, o.streams, o.stages[:1])
        for blocks in (1, 3):
            found = Counter(located(o, range(blocks * 16 * o.groups)))
            for d, stream in enumerate(o.streams):
                draws = blocks * 16 * o.groups * o.stages[0].quotas[d] // 16
                used = [found[d, sample] for sample in range(stream.num_samples)]
                assert sum(used) == draws
                assert {math.floor(draws / len(used)), math.ceil(draws / len(used))} >= set(used)


@given(orders(max_streams=1), st.integers(0, 400))
def test_each_sample_of_a_single_source_is_used_floor_or_ceil_times_at_any_point(o, count):
    with small_blocks():
        n = o.streams[0].num_samples
        found = Counter(located(o, range(count)))
        assert {count // n, -(-count // n)} >= {found[0, sample] for sample in range(n)}


@given(orders(), st.integers(0, 10**6), st.sampled_from([384, 768]))
@settings(max_examples=6)
def test_the_global_batch_is_the_same_for_every_number_of_ranks(o, step, batch):
    with small_blocks():
        whole = located(o, step * batch + np.arange(batch))
        for ranks in (1, 2, 3, 48, 384):
            fresh = Order.from_dict(o.to_dict())  # what one rank asks must not matter to another
            share = batch // ranks
            parts = {
                rank: located(fresh, step * batch + np.arange(rank * share, (rank + 1) * share))
                for rank in reversed(range(ranks))
            }
            assert [sample for rank in range(ranks) for sample in parts[rank]] == whole


@settings(max_examples=40)
@given(orders(), st.integers(0, 300), st.data())
def test_a_stage_change_loses_and_repeats_nothing(o, at, data):
    """A group draws from a stream, in order, what it would draw if there were no other stream."""
    with small_blocks():
        at += o.stages[-1].start + 1
        before = located(o, range(at))
        more = tuple(int(q) for q in data.draw(quotas_of(len(o.streams), 16)))
        changed = Order(o.seed, o.groups, o.streams, (*o.stages, Stage(at, more)))
        after = located(changed, range(at + 200))
        assert after[:at] == before
        assert_draws_are_continued(changed, after)


@settings(max_examples=40)
@given(orders(), st.integers(0, 200), st.integers(1, 50), st.data())
def test_an_appended_extent_leaves_what_was_served_unchanged(o, at, samples, data):
    with small_blocks():
        at += o.stages[-1].start + 1
        streams = (*o.streams, Stream("new", samples, 3, 2))
        more = tuple(int(q) for q in data.draw(quotas_of(len(streams), 16)))
        stages = [Stage(s.start, (*s.quotas, 0)) for s in o.stages]
        grown = Order(o.seed, o.groups, streams, (*stages, Stage(at, more)))
        after = located(grown, range(at + 200))
        assert after[:at] == located(o, range(at))
        assert_draws_are_continued(grown, after)


def assert_draws_are_continued(o, served):
    for d in range(len(o.streams)):
        alone = Order(o.seed, o.groups, o.streams, (Stage(0, tuple(16 * (e == d) for e in range(len(o.streams)))),))
        whole = located(alone, range(len(served)))
        for g in range(o.groups):
            drawn = [x for x in served[g :: o.groups] if x[0] == d]
            assert drawn == whole[g :: o.groups][: len(drawn)]


@settings(max_examples=40)
@given(orders(), st.lists(st.integers(0, 200), min_size=2, max_size=6, unique=True), st.integers(1, 200))
def test_skips_are_absolute_and_exact(o, ends, count):
    ends = sorted(ends)[: len(ends) // 2 * 2]
    skips = tuple(zip(ends[::2], ends[1::2], strict=True))
    with small_blocks():
        skipped = {p for first, end in skips for p in range(first, end)}
        left = [p for p in range(count + len(skipped)) if p not in skipped][:count]
        base = located(o, range(count + len(skipped)))
        with_skips = Order(o.seed, o.groups, o.streams, o.stages, skips)
        assert with_skips.position(np.arange(count)).tolist() == left
        assert located(with_skips, range(count)) == [base[p] for p in left]
        # Another one, ahead of what was served, changes nothing of it.
        ahead = max(left[-1] + 1, ends[-1])
        later = Order(o.seed, o.groups, o.streams, o.stages, (*skips, (ahead, ahead + 9)))
        assert located(later, range(count)) == located(with_skips, range(count))


@settings(max_examples=40)
@given(orders(), st.integers(0, 10**12), st.integers(1, 100))
def test_resume_from_a_cursor_equals_the_uninterrupted_order(o, cursor, count):
    with small_blocks():
        whole = located(o, cursor + np.arange(count))
        stored = json.loads(json.dumps(o.to_dict()))
        resumed = Order.from_dict(stored)
        assert resumed.to_dict() == stored
        at = count // 3
        assert located(resumed, cursor + np.arange(at, count)) == whole[at:]
        assert [located(Order.from_dict(stored), [p])[0] for p in range(cursor, cursor + min(5, count))] == whole[:5]


def test_another_version_is_refused():
    stored = Order(1, 1, (Stream("a", 5, 1, 1),), (Stage(0, (BLOCK,)),)).to_dict()
    with pytest.raises(ValueError, match=r"order version 999; this program knows version"):
        Order.from_dict(stored | {"version": 999})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skips": [[5, 9], [7, 12]]}, "skip"),
        ({"skips": [[9, 5]]}, "skip"),
        ({"stages": [[3, [BLOCK]]]}, "stage"),
        ({"stages": [[0, [BLOCK]], [9, [BLOCK]], [9, [BLOCK]]]}, "stage"),
        ({"stages": [[0, [BLOCK - 1]]]}, "quotas"),
        ({"stages": [[0, [BLOCK, 0]]]}, "quotas"),
        ({"groups": 0}, "group"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(change, message):
    stored = Order(1, 1, (Stream("a", 5, 1, 1),), (Stage(0, (BLOCK,)),)).to_dict()
    with pytest.raises(ValueError, match=message):
        Order.from_dict(stored | change)


# Whether it is a shuffle. A statistic is a z, which a random order keeps near 0.


def serial(x, lag=1):
    return np.corrcoef(x[:-lag], x[lag:])[0, 1] * math.sqrt(len(x) - lag)


def parity_flips(x):
    return (np.mean((x[:-1] ^ x[1:]) & 1) - 0.5) * 2 * math.sqrt(len(x) - 1)


def odd_share(x):
    return (np.mean(x & 1) - 0.5) * 2 * math.sqrt(len(x))


def coverage(x, size, regions=64):
    """Return the chi-square of how often each region was met, as a z (Wilson and Hilferty's cube root)."""
    found = np.bincount((x.astype(np.float64) * regions / size).astype(np.int64), minlength=regions)
    k, expected = regions - 1, len(x) / regions
    chi2 = float(((found - expected) ** 2 / expected).sum())
    return ((chi2 / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


def statistics(shuffled, size):
    """Compute the statistics of a scheme (indices, seed) -> places over many seeds: name -> z of each seed."""
    half = 2 ** ((size - 1).bit_length() // 2)
    index, found = np.arange(16_384), {}
    for seed in range(24):
        x = shuffled(index, seed)
        z = {"serial": serial(x), "serial 2": serial(x, 2), "serial 8": serial(x, 8), "parity": parity_flips(x)}
        # Where the halves of a Feistel network repeat.
        far = shuffled(np.concatenate([index[:4096], index[:4096] + half]), seed)
        z["lag"] = np.corrcoef(far[:4096], far[4096:])[0, 1] * 64
        for ranks in (2, 8):
            z[f"odd of {ranks}"] = odd_share(x[seed % ranks :: ranks])
            z[f"coverage of {ranks}"] = coverage(x[seed % ranks :: ranks], size)
        for name, value in z.items():
            found.setdefault(name, []).append(value)
    return found


def failures(found):
    """Return the statistics that no random order has: far off for one seed, or a little off for all."""
    combined = {name: sum(z) / math.sqrt(len(z)) for name, z in found.items()}
    return [name for name, z in found.items() if abs(combined[name]) >= 3 or np.abs(z).max() >= 4.2]


SIZES = [2**20, 1_000_003, 2**32, 3_662_109_375]


@pytest.mark.parametrize("size", SIZES)
def test_the_bijection_is_a_shuffle(size):
    found = statistics(lambda index, seed: permute(index, size, key_of(seed)), size)
    assert np.abs(found["serial"]).max() < 3
    assert failures(found) == [], {name: np.round(z, 1).tolist() for name, z in found.items()}


def weak_simon(index, seed, size, rounds=4):
    """A balanced Feistel network whose round function is that of SIMON, with too few rounds."""
    half = -(-(size - 1).bit_length() // 2)
    mask, x = (1 << half) - 1, index.copy()

    def turn(v, by):
        return ((v << by) | (v >> (half - by))) & mask

    todo = np.arange(len(x))
    while len(todo):
        left, right = x[todo] >> half, x[todo] & mask
        for r in range(rounds):
            key = scalar_key(seed, r) & mask
            left, right = right ^ (turn(left, 1) & turn(left, 8)) ^ turn(left, 2) ^ key, left
        x[todo] = left << half | right
        todo = todo[x[todo] >= size]
    return x


def weak_affine(index, seed, size, rounds=5):
    """A balanced Feistel network whose round function is a * x + b."""
    half = -(-(size - 1).bit_length() // 2)
    mask, x = (1 << half) - 1, index.copy()
    todo = np.arange(len(x))
    while len(todo):
        left, right = x[todo] >> half, x[todo] & mask
        for r in range(rounds):
            a, b = scalar_key(seed, r, 0) & mask | 1, scalar_key(seed, r, 1) & mask
            left, right = right, left ^ ((a * right + b) & mask)
        x[todo] = left << half | right
        todo = todo[x[todo] >= size]
    return x


@pytest.mark.parametrize("size", SIZES)
def test_the_gates_catch_weak_schemes(size):
    assert "serial" in failures(statistics(lambda index, seed: weak_simon(index, seed, size), size))
    assert "parity" in failures(statistics(lambda index, seed: weak_affine(index, seed, size), size))
    with patch.object(order_module, "ROUNDS", 2):
        found = statistics(lambda index, seed: permute(index, size, key_of(seed)), size)
    assert "lag" in failures(found)


@pytest.mark.parametrize("groups", [4, 8, 64])
def test_the_whole_order_is_a_shuffle(groups):
    size, per_unit = 2**20, 16
    streams, stages = (Stream("a", size, per_unit, 128),), (Stage(0, (BLOCK,)),)
    found = {}
    for seed in range(24):
        o = Order(seed, groups, streams, stages)
        x = o.locate(np.arange(16_384))[1]
        mine = o.locate(seed % 4 + 4 * np.arange(16_384))[1]  # what one of four ranks sees
        units = np.unique(mine // per_unit)  # a group reads its units to their end, so units are drawn
        values = (
            ("serial", serial(x)),
            ("parity", parity_flips(x)),
            ("odd", odd_share(mine)),
            ("coverage", coverage(units, size // per_unit, 32)),
        )
        for name, value in values:
            found.setdefault(name, []).append(value)
    assert failures(found) == [], {name: np.round(z, 1).tolist() for name, z in found.items()}


def test_one_group_alone_is_as_correlated_as_its_window_allows():
    """Samples of one window come from the same 128 units: r = 1/128, and no more."""
    o = Order(3, 1, (Stream("a", 2**24, 16, 128),), (Stage(0, (BLOCK,)),))
    r = [np.corrcoef(x[:-1], x[1:])[0, 1] for x in [o.locate(k * 10**5 + np.arange(10**5))[1] for k in range(10)]]
    assert abs(np.mean(r) - 1 / 128) < 3 / math.sqrt(10**6)


def test_a_block_mixes_its_streams():
    o = Order(5, 1, tuple(Stream(s, 10**6, 8, 128) for s in "ab"), (Stage(0, (BLOCK // 2, BLOCK // 2)),))
    stream = o.locate(np.arange(16 * BLOCK))[0]
    runs = 1 + sum(a != b for a, b in pairwise(stream.tolist()))
    assert abs(runs - len(stream) / 2) < 4 * math.sqrt(len(stream)) / 2


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=12).filter(lambda w: max(w) > 0))
def test_quotas_fill_a_block_and_forget_nobody(weights):
    got = quotas(weights)
    block, total = sum(got), sum(weights)
    assert BLOCK <= block <= MAX_BLOCK and block & (block - 1) == 0
    assert all(q > 0 or 2 * MAX_BLOCK * w < total for q, w in zip(got, weights, strict=True) if w > 0)
    assert all(not q for q, w in zip(got, weights, strict=True) if w == 0)
    assert all(abs(q - block * w / total) <= len(weights) for q, w in zip(got, weights, strict=True))


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=8).filter(any))
def test_what_had_quotas_keeps_them(sizes):
    """Weights that version 1 accepted keep their quotas; it refused a weight that was too small for a place."""
    total, block = sum(sizes), BLOCK
    while min(w for w in sizes if w > 0) * block < total / 2 and block < MAX_BLOCK:
        block *= 2
    exact = [block * w / total for w in sizes]
    want = [int(x) for x in exact]
    for i in sorted(range(len(exact)), key=lambda i: (want[i] - exact[i], i))[: block - sum(want)]:
        want[i] += 1
    for i, w in enumerate(sizes):
        if w > 0 and not want[i]:
            if 2 * block * w < total:
                return
            want[i], want[want.index(max(want))] = 1, max(want) - 1
    assert quotas(sizes) == tuple(want)


def test_a_small_source_gets_a_larger_block_and_its_exact_share():
    made = quotas([1.0, 1 / 20_000])
    o = Order(5, 2, (Stream("a", 10_000, 4, 8), Stream("b", 50, 4, 8)), (Stage(0, made),))
    streams, _ = o.locate(np.arange(2 * sum(made)))
    assert sum(made) == 16384 and np.bincount(streams).tolist() == [2 * q for q in made]
