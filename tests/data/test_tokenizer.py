"""Ids can be read as the same text with the data set alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.core.manifest import Field, Manifest
from phalanx.core.store import Folder
from phalanx.data.tokenizer import TOKENIZER, Bytes, Vocabulary, make_tokenizer, tokenizer_of
from tests.data.texts import train_bpe


@given(st.lists(st.tuples(st.binary(max_size=20), st.booleans()), max_size=8))
def test_bytes_are_bytes(pieces):
    ids = Bytes().encode([data for data, _ in pieces], [ends for _, ends in pieces])
    assert ids.dtype == np.dtype("<u2")
    assert ids.tolist() == [i for data, ends in pieces for i in [*data, *([256] if ends else [])]]


def test_bytes_are_read_as_text():
    ids = Bytes().encode(["grüß".encode(), b"\xff!"], [True, True])
    assert Bytes().decode(ids) == "grüß\ufffd!"


def test_a_file_gives_text_back(tmp_path):
    made = make_tokenizer(str(train_bpe(tmp_path / "t.json")))
    texts = ["the cat sat on the mat", "grüß dich", "x"]
    ids = made.encode([t.encode() for t in texts], [True, False, True])
    v = made.vocabulary
    assert v.eos == 0 and v.name == f"bpe-{v.size}" and ids.max() < v.size
    assert ids.tolist().count(0) == 2 and ids[-1] == 0
    assert made.decode(ids) == "".join(texts)


def test_what_looks_like_an_end_in_a_text_is_text(tmp_path):
    made = make_tokenizer(str(train_bpe(tmp_path / "t.json")))
    ids = made.encode([b"a<|endoftext|>b"], [True])
    assert ids.tolist().count(made.vocabulary.eos) == 1
    assert made.decode(ids) == "a<|endoftext|>b"


def test_truncation_and_a_template_in_the_file_do_nothing(tmp_path):
    plain = make_tokenizer(str(train_bpe(tmp_path / "t.json")))
    cut = make_tokenizer(str(train_bpe(tmp_path / "cut.json", truncation=3)))
    text = b"the cat sat on the mat"
    assert cut.encode([text, b"x"], [True, True]).tolist() == plain.encode([text, b"x"], [True, True]).tolist()


def test_the_end_of_a_document_is_found_or_named(tmp_path):
    path = str(train_bpe(tmp_path / "t.json", special=["<stop>"]))
    with pytest.raises(UserError, match=r"(?s)\(<\|endoftext\|> .*</s> .*\).*--eos TOKEN"):
        make_tokenizer(path)
    assert make_tokenizer(path, "<stop>").vocabulary.eos == 0
    with pytest.raises(UserError, match="no such token"):
        make_tokenizer(path, "<stopp>")
    with pytest.raises(UserError, match="leave --eos out"):
        make_tokenizer("byte", "</s>")


def test_a_large_vocabulary_gets_wider_ids():
    assert Vocabulary("", "", 65536, 0).dtype == "<u2"
    assert Vocabulary("", "", 65537, 0).dtype == "<u4"


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"model": 3}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
        make_tokenizer(str(tmp_path / "t.json"))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        make_tokenizer(str(tmp_path / "t.json"))


def test_the_tokenizer_of_a_data_set_is_checked(tmp_path):
    made = make_tokenizer(str(train_bpe(tmp_path / "t.json")))
    v = made.vocabulary
    m = Manifest((Field("tokens", v.dtype),), (), np.empty((0, 32)), 1, 1, v.name, v.hash, v.size, v.eos)
    store = Folder(tmp_path / "set")
    assert tokenizer_of(store, replace(m, tokenizer_hash="")) is None
    with pytest.raises(UserError, match="cannot be read"):
        tokenizer_of(store, m)
    store.write(TOKENIZER, made.file)
    assert tokenizer_of(store, m).vocabulary == v
    store.write(TOKENIZER, made.file + b" ")
    with pytest.raises(UserError, match="not the one it was built with"):
        tokenizer_of(store, m)
