"""Who writes what: every element of the state is in exactly one file, and any part of it is found again from the
manifest alone, whatever the layout. A byte that nobody writes is a weight that is lost; one that two write is a disk
that is paid twice."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.checkpoint import ALIGN_BYTES, PAGE_BYTES, Entry, Manifest, Plan
from phalanx.core.held import Held
from phalanx.core.layout import CHUNKS, Layout


@st.composite
def layouts(draw):
    replica, shard, tp, cp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2, 3), (1, 2, 3), (1, 2, 4), (1, 2)))
    pp, schedule = draw(st.sampled_from((1, 1, 2, 3))), draw(st.sampled_from(sorted(CHUNKS)))
    ep = draw(st.sampled_from([e for e in range(1, 9) if shard * cp * tp % e == 0]))
    chunks = draw(st.sampled_from((0, 3))) if schedule == "interleaved" else 0
    return Layout(replica, shard, tp, pp=pp, cp=cp, ep=ep, schedule=schedule, chunks=chunks)


@st.composite
def tensors(draw, layout, min_size=1, max_size=6):
    """One of each kind may come: cut by tensor parallelism, of experts, whole everywhere; with fewer rows than ranks,
    with nothing in it."""
    out = []
    for i in range(draw(st.integers(min_size, max_size))):
        kind = draw(st.sampled_from(("plain", "plain", "tp 0", "tp 1", "experts", "whole")))
        stage = draw(st.integers(0, layout.num_stages - 1))
        dims = draw(st.integers(2 if kind == "tp 1" else 1, 3))
        shape = [draw(st.integers(0, 14)) for _ in range(dims)]
        experts = 0
        if kind == "experts":
            experts = draw(st.integers(1, 3)) * layout.ep
            shape[0] = experts * draw(st.integers(0, 3))
        tp_dim = {"tp 0": 0, "tp 1": 1}.get(kind)
        held = Held(f"t{i}", tuple(shape), tp_dim, stage, experts, kind == "whole")
        out.append(Entry(held, draw(st.sampled_from(("float32", "bfloat16", "uint8", "float64")))))
    return out


@st.composite
def states(draw):
    layout = draw(layouts())
    return layout, draw(tensors(layout))


def plans_of(layout, entries):
    return [Plan.of(entries, layout, layout.coord(rank)) for rank in range(layout.world_size)]


@given(states())
@settings(max_examples=150)
def test_every_element_is_written_once(state):
    layout, entries = state
    written = [np.zeros((e.held.num_rows, e.held.num_cols), int) for e in entries]
    for plan in plans_of(layout, entries):
        for s in plan.own:
            written[s.entry][s.r0 : s.r1, s.c0 : s.c1] += 1
    for entry, times in zip(entries, written, strict=True):
        if entry.held.numel:
            assert (times == 1).all(), (entry.held, times)


@given(states())
@settings(max_examples=100)
def test_a_rank_has_all_that_it_holds_and_nothing_overlaps(state):
    """In its image: what it must get back from memory alone."""
    layout, entries = state
    for rank, plan in enumerate(plans_of(layout, entries)):
        coord, at = layout.coord(rank), 0
        covered = Counter()
        for number, s in enumerate(plan.segments):
            assert s.offset >= at and s.offset % ALIGN_BYTES == 0 and s.size > 0
            assert (s.offset >= plan.own_bytes) == (number >= plan.num_own)
            at = s.offset + s.size
            covered[s.entry] += s.size
            r0, r1, c0, c1 = entries[s.entry].held.bounds(layout, coord)
            assert r0 <= s.r0 < s.r1 <= r1 and (s.c0, s.c1) == (c0, c1)
        assert at <= plan.image_bytes and plan.own_bytes % PAGE_BYTES == plan.image_bytes % PAGE_BYTES == 0
        assert sum(s.size for s in plan.own) <= plan.own_bytes
        for i, entry in enumerate(entries):
            shape = entry.held.local_shape(layout, coord) if entry.held.held_by(layout, coord) else (0,)
            assert covered[i] == int(np.prod(shape)) * entry.item_bytes
        bounds = plan.chunks()
        assert [a for a, _ in bounds[1:]] == [b for _, b in bounds[:-1]]
        assert not bounds or (bounds[0][0], bounds[-1][1]) == (0, plan.image_bytes)


def whole_of(entry, seed):
    held = entry.held
    shape = (held.num_rows, held.num_cols * held.inner * entry.item_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def files_of(layout, entries):
    """Of each rank its own bytes, and the tensors that they were cut from."""
    wholes = [whole_of(entry, i) for i, entry in enumerate(entries)]
    files = []
    for plan in plans_of(layout, entries):
        image = np.zeros(plan.own_bytes, np.uint8)
        for s in plan.own:
            col = entries[s.entry].held.inner * entries[s.entry].item_bytes
            image[s.offset : s.offset + s.size] = wholes[s.entry][s.r0 : s.r1, s.c0 * col : s.c1 * col].reshape(-1)
        files.append(image)
    return files, wholes


def gathered(manifest, files, name, r0, r1, c0, c1):
    """What blocks() says, put together; each element once."""
    entry = manifest.entries[manifest.index[name]]
    col = entry.held.inner * entry.item_bytes
    out = np.zeros((r1 - r0, (c1 - c0) * col), np.uint8)
    times = np.zeros((r1 - r0, c1 - c0), int)
    for b in manifest.blocks(name, r0, r1, c0, c1):
        s = b.segment
        rows = files[b.rank][s.offset : s.offset + s.size].reshape(s.r1 - s.r0, s.row_bytes)
        part = rows[b.r0 - s.r0 : b.r1 - s.r0, (b.c0 - s.c0) * col : (b.c1 - s.c0) * col]
        out[b.r0 - r0 : b.r1 - r0, (b.c0 - c0) * col : (b.c1 - c0) * col] = part
        times[b.r0 - r0 : b.r1 - r0, b.c0 - c0 : b.c1 - c0] += 1
    assert (times == 1).all(), (entry.held, manifest.layout, times)
    return out


@given(states(), st.data())
@settings(max_examples=100)
def test_any_block_is_found_from_the_manifest(state, data):
    layout, entries = state
    files, wholes = files_of(layout, entries)
    made = Manifest("step-000000001-aa", 1, layout, entries, [(len(f), "") for f in files], updates=1)
    manifest = Manifest.from_json(made.to_json())
    assert manifest == made
    for entry, whole in zip(entries, wholes, strict=True):
        held, col = entry.held, entry.held.inner * entry.item_bytes
        if not held.numel:
            continue
        r0 = data.draw(st.integers(0, held.num_rows - 1))
        r1 = data.draw(st.integers(r0 + 1, held.num_rows))
        c0 = data.draw(st.integers(0, held.num_cols - 1))
        c1 = data.draw(st.integers(c0 + 1, held.num_cols))
        for part in ((r0, r1, c0, c1), (0, held.num_rows, 0, held.num_cols)):
            out = gathered(manifest, files, held.name, *part)
            assert (out == whole[part[0] : part[1], part[2] * col : part[3] * col]).all()


@given(states(), st.data())
@settings(max_examples=80)
def test_any_other_layout_finds_its_slices(state, data):
    layout, entries = state
    files, wholes = files_of(layout, entries)
    manifest = Manifest("step-000000001-aa", 1, layout, entries, [(len(f), "") for f in files], updates=1)
    other = data.draw(layouts())
    for entry, whole in zip(entries, wholes, strict=True):
        old = entry.held
        if not old.numel or (old.experts and old.experts % other.ep):
            continue
        stage = data.draw(st.integers(0, other.num_stages - 1))
        held = Held(old.name, old.shape, old.tp_dim, stage, old.experts, old.whole)
        col = held.inner * entry.item_bytes
        ranks = [rank for rank in range(other.world_size) if held.held_by(other, other.coord(rank))]
        assert ranks
        for rank in ranks:
            r0, r1, c0, c1 = held.bounds(other, other.coord(rank))
            if r0 < r1 and c0 < c1:
                out = gathered(manifest, files, held.name, r0, r1, c0, c1)
                assert (out == whole[r0:r1, c0 * col : c1 * col]).all()


# -- the load is even


@given(states())
@settings(max_examples=80)
def test_ranks_that_hold_the_same_write_the_same_but_for_a_row(state):
    layout, entries = state
    for i, entry in enumerate(entries):
        rows: dict[tuple, list[int]] = {}
        for rank in range(layout.world_size):
            coord = layout.coord(rank)
            if entry.held.held_by(layout, coord):
                first, last = entry.held.own_rows(layout, coord, i)
                rows.setdefault(entry.held.bounds(layout, coord), []).append(last - first)
        for same in rows.values():
            assert max(same) - min(same) <= 1


@given(st.integers(1, 7), st.integers(1, 4), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.booleans())
def test_replicas_share_the_bytes(replica, tp, rows, whole):
    """Tensors that do not divide are not always the same rank's to write."""
    layout, copies = Layout(replica, 1, tp), replica * tp
    shapes = [(n, 8) for n in rows for _ in range(copies)]  # of each shape as many as there are ranks
    entries = [Entry(Held(f"t{i}", shape, whole=whole), "float32") for i, shape in enumerate(shapes)]
    sizes = [sum(s.size for s in plan.own) for plan in plans_of(layout, entries)]
    assert len(set(sizes)) == 1 and sum(sizes) == sum(n * 8 * 4 for n, _ in shapes)
    cut = entries[: len(entries) - copies // 2]
    sizes = [sum(s.size for s in plan.own) for plan in plans_of(layout, cut)]
    mean = sum(sizes) / len(sizes)
    assert all(abs(size - mean) <= len(cut) * 32 for size in sizes)
