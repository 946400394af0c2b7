"""Samples as a function of the position."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.data import corpus
from phalanx.data.order import permute, sample_of


@given(st.integers(1, 3000), st.integers(0, 2**63))
def test_the_order_is_a_bijection(size, key):
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_every_epoch_sees_each_sample_once_in_another_order():
    epochs = [[sample_of(e * 100 + i, 100, seed=3) for i in range(100)] for e in range(3)]
    assert all(sorted(e) == list(range(100)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != [sample_of(i, 100, seed=4) for i in range(100)]


def test_consecutive_samples_are_not_correlated():
    n = 1 << 16
    order = np.array([sample_of(i, n, seed=11) for i in range(20_000)])
    r = np.corrcoef(order[:-1], order[1:])[0, 1]
    assert abs(r) * math.sqrt(len(order)) < 4
    assert abs(np.mean((order[:-1] ^ order[1:]) & 1) - 0.5) < 0.02


@pytest.fixture
def built(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"abcdef" * 10)
    (tmp_path / "text" / "b.txt").write_bytes(b"xyz" * 20)
    count = corpus.build(str(tmp_path / "text"), tmp_path / "corpus.bin", 10**6)
    return tmp_path / "corpus.bin", count


def test_documents_are_packed_and_told_apart(built):
    path, count = built
    assert count == 122
    c = corpus.Corpus(path, seq_len=121, seed=0)
    s = c.samples([0])
    assert bytes(s.tokens_BL[0, :60].tolist()) == b"abcdef" * 10
    assert s.tokens_BL[0, 60] == corpus.END_OF_DOCUMENT
    assert s.documents_BL[0].tolist() == [0] * 61 + [1] * 60
    assert s.weights_BL[0].tolist() == [1] * 60 + [0] + [1] * 60  # the first byte of b is not a target
    assert np.array_equal(s.targets_BL[0, :-1], s.tokens_BL[0, 1:])


def test_unigram_entropy_of_known_text(tmp_path):
    (tmp_path / "t").write_bytes(b"ab" * 5000)
    corpus.build(str(tmp_path / "t"), tmp_path / "c", 10**6)
    assert corpus.Corpus(tmp_path / "c", 8, 0).unigram_entropy() == pytest.approx(math.log(2), abs=2e-3)


def test_the_size_limit_is_kept(tmp_path):
    (tmp_path / "t").write_bytes(b"a" * 5000)
    assert corpus.build(str(tmp_path / "t"), tmp_path / "c", 1000) == 1001


@pytest.mark.parametrize("content, seq_len", [(b"", 8), (b"abc", 8)])
def test_too_little_text_is_refused_with_the_remedy(tmp_path, content, seq_len):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(UserError, match="remedy"):
        corpus.build(str(tmp_path / "t"), tmp_path / "c", 10**6)
        corpus.Corpus(tmp_path / "c", seq_len, 0)


def test_an_unreadable_source_leaves_no_corpus(tmp_path):
    with pytest.raises(UserError, match=r"data\.source"):
        corpus.build(str(tmp_path / "missing"), tmp_path / "c", 10**6)
    assert not (tmp_path / "c").exists()


def test_records_inside_the_source_are_not_read(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"words " * 100)
    sizes = []
    for name in ("first", "second"):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "rank.log").write_text("not for training")
        sizes.append(corpus.build(str(tmp_path), run / "corpus.bin", 10**6, left_out=(tmp_path / "runs", run)))
    assert sizes == [601, 601]


def test_a_source_inside_the_folder_of_runs_is_read(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"abc")
    assert corpus.build(str(tmp_path / "text"), tmp_path / "c", 10**6, left_out=(tmp_path, tmp_path / "r")) == 4
