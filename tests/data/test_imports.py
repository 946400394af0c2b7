"""Imported data arrives whole: every id, every document's end, every record."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.core.store import Folder
from phalanx.data import imports
from phalanx.data.build import write_arrays
from phalanx.data.imports import record_blocks, token_blocks
from phalanx.data.tokenizer import Vocabulary
from tests.data.sets import make_loader

CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f4": 7, "u2": 8}
V = Vocabulary("", "", 100, 0)


def megatron(prefix, documents, dtype="u2", gap=0, code=None, borders=None):
    """`documents`: lists of sequences of ids. `gap`: ids between sequences that belong to none."""
    sequences = [np.array(s, f"<{dtype}") for d in documents for s in d]
    starts, at, data = [], 0, b""
    for s in sequences:
        starts.append(at)
        data += s.tobytes() + bytes(gap * s.itemsize)
        at = len(data)
    prefix.with_suffix(".bin").write_bytes(data)
    borders = np.cumsum([0, *(len(d) for d in documents)]) if borders is None else np.array(borders)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code or CODES[dtype], len(sequences), len(borders))
    lengths = np.array([len(s) for s in sequences], "<i4")
    prefix.with_suffix(".idx").write_bytes(
        head + lengths.tobytes() + np.array(starts, "<i8").tobytes() + borders.astype("<i8").tobytes()
    )
    return prefix.with_suffix(".bin")


def read(path, vocabulary=V, dtype=""):
    return [i for block in token_blocks(path, vocabulary, dtype) for i in block.tolist()]


ids = st.lists(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=4), max_size=6)


@settings(max_examples=150)
@given(ids, st.sampled_from(["u1", "i1", "i2", "i4", "i8", "u2"]), st.integers(1, 9), st.integers(0, 1))
def test_megatron_documents_end(tmp_path_factory, documents, dtype, block, gap):
    path = megatron(tmp_path_factory.mktemp("in") / "data", documents, dtype, gap)
    want = []
    for document in documents:
        whole = [i for sequence in document for i in sequence]
        want += whole + ([] if not whole or whole[-1] == 0 else [0])
    with pytest.MonkeyPatch.context() as m:
        m.setattr(imports, "BLOCK_ITEMS", block)
        assert read(path) == want
        assert read(path.with_suffix(".idx")) == want


def test_an_index_that_cannot_be_is_refused(tmp_path):
    documents = [[[1, 2, 3]], [[4], [5]]]
    bad = {
        "type 7": megatron(tmp_path / "a", documents, code=7),
        "do not cover": megatron(tmp_path / "b", documents, borders=[0, 1]),
        "ends before the sequences": megatron(tmp_path / "c", documents),
        "ends too early": megatron(tmp_path / "d", documents),
        "not an index": megatron(tmp_path / "e", documents),
    }
    (tmp_path / "c.bin").write_bytes((tmp_path / "c.bin").read_bytes()[:-4])
    (tmp_path / "d.idx").write_bytes((tmp_path / "d.idx").read_bytes()[:-4])
    (tmp_path / "e.idx").write_bytes(b"x" * 100)
    for said, path in bad.items():
        with pytest.raises(UserError, match=said):
            read(path)


def test_documents_that_could_not_be_told_apart_are_refused(tmp_path):
    path = megatron(tmp_path / "a", [[[1]]])
    with pytest.raises(UserError, match="--eos-id"):
        read(path, Vocabulary("", "", 100, -1))


@pytest.mark.parametrize("dtype", imports.INTEGERS)
def test_raw_files(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(imports, "BLOCK_ITEMS", 7)
    want = np.arange(60).astype(dtype)
    want.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", want)
    assert read(tmp_path / "a.bin", dtype=dtype) == read(tmp_path / "a.npy") == list(range(60))


def test_big_endian_is_turned(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(60, dtype=">i4"))
    np.save(tmp_path / "r.npy", np.arange(6, dtype=">f4").reshape(3, 2))
    assert read(tmp_path / "a.npy") == list(range(60))
    fields, blocks = record_blocks([("x", tmp_path / "r.npy")])
    assert fields[0].dtype == "<f4" and np.concatenate(list(blocks))["x"].tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("wrong", [100, -1])
def test_an_id_out_of_range_is_named(tmp_path, wrong):
    np.save(tmp_path / "a.npy", np.array([1, 2, wrong], "i4"))
    with pytest.raises(UserError, match=rf"id {wrong} at 2 is not in \[0, 100\)"):
        read(tmp_path / "a.npy")


def test_what_is_no_token_file_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"123")
    np.save(tmp_path / "f.npy", np.zeros(3))
    (tmp_path / "x.npy").write_bytes(b"junk")
    for path, dtype, said in [
        ("a.bin", "", "--dtype"),
        ("a.bin", "float32", "--dtype"),
        ("a.bin", "uint16", "has 3 bytes"),
        ("f.npy", "", "not of ids"),
        ("x.npy", "", "cannot be read"),
        ("missing.npy", "", "No such file"),
        ("missing.bin", "uint16", "No such file"),
    ]:
        with pytest.raises(UserError, match=said):
            read(tmp_path / path, dtype=dtype)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_records(tmp_path, save, monkeypatch):
    monkeypatch.setattr(imports, "BLOCK_BYTES", 100)
    patches = np.random.default_rng(0).standard_normal((50, 2, 3)).astype("f4")
    save(tmp_path / "a.npz", patches=patches[:20], target=np.arange(20))
    save(tmp_path / "b.npz", patches=patches[20:], target=np.arange(20, 50))
    fields, blocks = record_blocks([("", tmp_path / "a.npz"), ("", tmp_path / "b.npz")])
    manifest, version = write_arrays(tmp_path / "out", fields, [("s", blocks)], chunk_items=8, shard_chunks=2)
    loader, _ = make_loader(Folder(tmp_path / "out"), manifest)
    rows = loader.rows(range(50))[:, 0]
    loader.fetcher.close()
    assert sorted(rows["target"].tolist()) == list(range(50))
    assert np.array_equal(rows["patches"], patches[rows["target"]])
    np.save(tmp_path / "p.npy", patches)
    np.save(tmp_path / "t.npy", np.arange(50))
    fields, blocks = record_blocks([("patches", tmp_path / "p.npy"), ("target", tmp_path / "t.npy")])
    assert write_arrays(tmp_path / "two", fields, [("s", blocks)], chunk_items=8, shard_chunks=2)[1] == version


@pytest.mark.parametrize("at", [-400, 300, 100])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_damaged_archive_is_refused(tmp_path, save, at):
    save(tmp_path / "a.npz", x=np.random.default_rng(0).integers(0, 9, 5000))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[at : at + 40] = b"\xff" * 40
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(UserError, match="cannot be read"):
        list(record_blocks([("", tmp_path / "a.npz")])[1])


def test_arrays_that_are_no_records_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.zeros(4))
    np.savez(tmp_path / "b.npz", x=np.zeros((3, 2)))
    np.savez(tmp_path / "c.npz", x=np.zeros((3, 3)))
    np.save(tmp_path / "f.npy", np.asfortranarray(np.zeros((3, 2))))
    np.save(tmp_path / "o.npy", np.array([{}]), allow_pickle=True)
    (tmp_path / "z.npz").write_bytes(b"junk")
    for names, said in [
        (["a.npz"], "different lengths"),
        (["b.npz", "c.npz"], "two data sets"),
        (["f.npy"], "by rows"),
        (["o.npy"], "by rows|cannot be read"),
        (["b.npz", "f.npy"], "one kind"),
        (["f.npy", "f.npy"], "same field"),
        (["z.npz"], "cannot be read"),
    ]:
        with pytest.raises(UserError, match=said):
            record_blocks([("", tmp_path / name) for name in names])
