"""First values: the same numbers for any cut and any number of threads, and the same as in older versions."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.model import init
from phalanx.model.family import Init
from phalanx.model.init import Slice, draw_all


def drawn(shape, rows=None, cols=None, seed=3, name="layers.0.wq.weight"):
    rows, cols = rows or slice(0, shape[0]), cols or slice(0, shape[1] if len(shape) > 1 else 1)
    size = (rows.stop - rows.start, *((cols.stop - cols.start, *shape[2:]) if len(shape) > 1 else ()))
    out = torch.full(size, torch.nan)
    draw_all(seed, [Slice(name, shape, Init(0.02, 0.5), rows, cols, out)], lambda: None)
    return out


@pytest.mark.parametrize("shape", [(4096, 512), (70_000, 3), (5,), (3, 200_000)], ids=str)
def test_a_new_run_of_an_old_job_begins_where_the_old_one_did(shape):
    """Write the rule down once more: 65,536 numbers (or a row, if that is longer) come from one generator."""
    want = torch.empty(shape)
    rows = max(1, 65536 // max(1, want[0].numel()))
    for block, start in enumerate(range(0, shape[0], rows)):
        key = hashlib.blake2b(f"3/layers.0.wq.weight/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little") >> 1)
        size = want[start : start + rows].shape
        want[start : start + rows] = torch.empty(size).normal_(0.5, 0.02, generator=generator)
    assert torch.equal(drawn(shape), want)


@pytest.mark.parametrize("shape", [(4096, 512), (70_000, 3), (3, 200_000)], ids=str)
def test_a_slice_holds_what_the_whole_holds_there(shape):
    whole = drawn(shape)
    for first, last in ((0, 1), (1, 3), (shape[0] // 3, shape[0])):
        cols = slice(shape[1] // 3, shape[1])
        assert torch.equal(drawn(shape, slice(first, last), cols), whole[first:last, cols])


@given(st.integers(1, 400), st.integers(1, 300), st.data())
@settings(max_examples=30, deadline=None)
def test_so_does_any_slice(rows, cols, data):
    whole = drawn((rows, cols))
    r0 = data.draw(st.integers(0, rows - 1))
    r1 = data.draw(st.integers(r0, rows))
    c0 = data.draw(st.integers(0, cols - 1))
    c1 = data.draw(st.integers(c0, cols))
    assert torch.equal(drawn((rows, cols), slice(r0, r1), slice(c0, c1)), whole[r0:r1, c0:c1])


def test_names_seeds_and_blocks_draw_different_numbers():
    def values(seed, name):
        return (drawn((1000, 100), seed=seed, name=name) - 0.5) / 0.02

    a = values(1, "a")
    assert abs(a.std() - 1) < 0.02 and abs(a.mean()) < 0.02
    for other in (values(2, "a"), values(1, "b"), a.roll(655, 0)):
        assert abs((a * other).mean()) < 0.02


def test_threads_change_nothing(monkeypatch):
    with_threads = drawn((4096, 512))
    monkeypatch.setattr(init, "RUN_NUMEL", 1 << 40)
    assert torch.equal(drawn((4096, 512)), with_threads)


def test_an_error_in_a_thread_is_raised(monkeypatch):
    monkeypatch.setattr(init, "_key", lambda *_: "no number")
    with pytest.raises((TypeError, RuntimeError)):
        drawn((4096, 512))
