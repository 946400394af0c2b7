"""Tiles: an operator sees the one slow rank at every zoom, and a picture never shows more or less than was measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.observe.tiles import LEAST, MOST, TileReader, TileWriter, decode, encode


def test_a_code_is_at_most_one_and_a_half_percent_above_its_value():
    ratios = np.geomspace(LEAST * 1.001, MOST * 0.999, 5000).astype(np.float32)
    back = decode(encode(ratios * 0.25, 0.25))
    assert ((back / ratios >= 1 - 1e-5) & (back / ratios < 1.014)).all()
    ends = decode(encode(np.array([0, 1e-9, 1e9, np.inf, np.nan], np.float32), 1.0))
    assert ends[:4].tolist() == [LEAST, LEAST, MOST, MOST] and np.isnan(ends[4])


def written(folder, table, first=0):
    writer = TileWriter(folder, table.shape[1], first)
    for step, times in enumerate(table):
        writer.add(first + step, times)
    writer.close()
    return TileReader(folder)


def expected(table, picture, first=0):
    """The same picture from the whole table."""
    codes = np.stack([encode(row, float(np.median(row[np.isfinite(row)]))) for row in table])
    (r0, r1), (s0, s1) = picture["ranks"], picture["steps"]
    return codes[s0 - first : s1 - first, r0:r1].T


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_picture_keeps_the_largest_value_of_every_cell(tmp_path_factory, data):
    ranks, steps = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 150))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    table = (0.1 * rng.lognormal(0, 0.5, (steps, ranks))).astype(np.float32)
    first = data.draw(st.integers(0, 30))
    reader = written(tmp_path_factory.mktemp("tiles"), table, first)
    some = lambda most: tuple(sorted(data.draw(st.tuples(st.integers(0, most), st.integers(0, most)))))  # noqa: E731
    height, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    picture = reader.picture(some(ranks), some(first + steps), height, width)
    codes, whole = picture["codes"], expected(table, picture, first)
    assert codes.shape[0] <= height and codes.shape[1] <= width and codes.max() == whole.max()
    assert set(codes.flat) <= set(whole.flat)
    if codes.shape == whole.shape:
        assert (codes == whole).all()


def test_one_slow_rank_shows_at_every_zoom(tmp_path):
    table = np.full((600, 5000), 0.1, np.float32)
    table[321, 4321] = 0.3
    reader = written(tmp_path, table)
    for span in (5000, 1000, 100, 10):
        first = 4321 // span * span
        for width in (600, 100, 7, 1):
            picture = reader.picture((first, first + span), (0, 600), 50, width)
            assert decode(picture["codes"]).max() == pytest.approx(3.0, rel=0.014)
    around = reader.picture((4300, 4330), (320, 330), 64, 64)
    (row,), (column,) = np.nonzero(decode(around["codes"]) > 2)
    assert around["ranks"][0] + row == 4321 and around["steps"][0] + column == 321


def test_the_slowest_ranks_are_found_by_name(tmp_path):
    writer = TileWriter(tmp_path, 5000)
    for step in range(20):
        times = np.full(5000, 0.1, np.float32)
        times[[7, 4321]] = 0.2 + 0.01 * step, 0.3 if step == 4 else 0.1
        writer.add(step, times)
    writer.close()
    reader = TileReader(tmp_path)
    assert [one["ranks"] for one in reader.slowest((0, 20), 2)] == [[7, 8], [4321, 4322]]
    assert reader.slowest((0, 5), 1) == [{"ranks": [4321, 4322], "ratio": pytest.approx(3.0, rel=0.014)}]


def test_steps_that_are_done_again_leave_nothing_of_the_abandoned_ones(tmp_path):
    table = np.full((200, 30), 0.1, np.float32)
    table[150, 7] = 1.0
    writer = TileWriter(tmp_path, 30)
    for step in range(160):
        writer.add(step, table[step])
    for step in range(77, 200):
        writer.add(step, np.full(30, 0.1, np.float32))
    writer.close()
    reader = TileReader(tmp_path)
    assert reader.steps == 200
    for width in (200, 20, 3, 1):
        assert decode(reader.picture((0, 30), (0, 200), 4, width)["codes"]).max() == pytest.approx(1.0, rel=0.014)


def test_what_does_not_fit_is_dropped_and_counted(tmp_path):
    writer = TileWriter(tmp_path, 3, first_step=5)
    writer.add(4, [1, 1, 1])
    writer.add(5, [1, 1])
    writer.add(5, [np.nan] * 3)
    writer.add(5, [1, np.nan, 2])
    assert writer.dropped == 3 and TileReader(tmp_path).picture((0, 3), (0, 9), 9, 9)["codes"][1, 0] == 0


def test_a_full_disk_costs_rows_and_no_step(tmp_path, monkeypatch):
    writer = TileWriter(tmp_path, 3)
    writer.add(0, [1, 1, 1])

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        writer.add(1, [1, 1, 1])
    writer.add(2, [1, 1, 2])
    assert writer.dropped == 1 and TileReader(tmp_path).picture((0, 3), (0, 3), 3, 3)["codes"].shape == (3, 3)


def test_rows_may_be_blocks_of_ranks(tmp_path):
    """Beyond some hundred ranks the top keeps the slowest of each block."""
    writer = TileWriter(tmp_path, 5, 0, each=4, in_all=18)
    for step in range(6):
        writer.add(step, [1.0, 1.0, 3.0 if step == 2 else 1.0, 1.0, 1.0])
    writer.close()
    reader = TileReader(tmp_path)
    assert (reader.ranks, reader.each) == (18, 4)
    whole = reader.picture((0, 18), (0, 6), 100, 100)
    assert whole["ranks"] == [0, 18] and whole["codes"].shape == (5, 6) and whole["codes"].argmax() == 2 * 6 + 2
    part = reader.picture((9, 11), (2, 3), 100, 100)
    assert part["ranks"] == [8, 12] and part["codes"] == whole["codes"][2, 2]
