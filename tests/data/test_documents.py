"""The documents of any set of files: each once, in one order, however they are cut into parts."""

import bz2
import gzip
import io
import lzma
import os
import zipfile
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.core.errors import UserError
from phalanx.data import documents
from phalanx.data.documents import Text, plan, read
from tests.data.texts import lines, words, write_all_kinds


def all_texts(*paths, raw=False, field="text", limit=None, left_out=()):
    parts = plan([("s", str(p)) for p in paths], field, raw, left_out)
    return [text for part in parts for text, _ in read(part, field, raw, limit)]


@pytest.mark.parametrize("part_bytes", [50, 1000, 1 << 20])
def test_every_kind_gives_the_same_documents(tmp_path, monkeypatch, part_bytes):
    monkeypatch.setattr(documents, "PART_BYTES", part_bytes)
    texts = write_all_kinds(tmp_path / "in")
    found = all_texts(tmp_path / "in")
    assert found == [Text(t.encode(), True) for t in texts] * 4


@settings(max_examples=60)
@given(st.lists(st.text(max_size=30), max_size=12), st.integers(1, 80), st.booleans(), st.booleans())
def test_a_cut_file_loses_and_repeats_no_line(tmp_path_factory, texts, part_bytes, ended, blank):
    path = tmp_path_factory.mktemp("in") / "a.jsonl"
    data = lines(texts).replace(b"\n", b"\n\n" if blank else b"\n")
    path.write_bytes(data if ended else data.rstrip(b"\n"))
    with pytest.MonkeyPatch.context() as m:
        m.setattr(documents, "PART_BYTES", part_bytes)
        found = all_texts(path)
    assert found == [Text(t.encode("utf-8", "replace"), True) for t in texts if t]


def test_a_text_file_is_one_document_and_may_be_cut_if_raw(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"x" * 95 + b"\xff" * 5)
    (tmp_path / "b").write_bytes(b"")
    monkeypatch.setattr(documents, "PART_BYTES", 30)
    found = all_texts(tmp_path, raw=True)
    assert b"".join(t.data for t in found) == b"x" * 95 + b"\xff" * 5
    assert [t.ends for t in found] == [False, False, False, True]
    with pytest.raises(UserError, match=r"a\.txt is not UTF-8: byte 0xff at 95"):
        all_texts(tmp_path)


def test_small_files_share_a_part(tmp_path):
    for i in range(50):
        (tmp_path / f"{i:02d}.txt").write_text(f"text {i}")
    parts = plan([("s", str(tmp_path))], "text", True)
    assert len(parts) == 1 and [p.path[-6:-4] for p in parts[0].pieces] == [f"{i:02d}" for i in range(50)]


@pytest.mark.parametrize("limit, kept", [(1, ""), (2, "ü"), (3, "üa"), (4, "üa"), (6, "üa日"), (100, "üa日")])
def test_a_limit_cuts_at_a_whole_character(tmp_path, limit, kept):
    (tmp_path / "a").write_text("üa日")
    assert b"".join(t.data for t in all_texts(tmp_path / "a", limit=limit)).decode() == kept
    raw = all_texts(tmp_path / "a", raw=True, limit=limit)
    assert b"".join(t.data for t in raw) == "üa日".encode()[:limit] and raw[-1].ends


@pytest.mark.parametrize(
    "line, said",
    [
        (b'{"text": "a"', r"line 3: Expecting"),
        (b"[1]", "line 3: it is not an object"),
        (b'{"text": 7}', "line 3: 'text' is not a text"),
        (b'{"texts": "a"}', r"(?s)line 3: there is no field 'text'.*it has texts"),
        (b'"\xff"', "line 3"),
        (b"[" * 100_000, "line 3: it is nested too deeply"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_malformed_line_is_named(tmp_path, monkeypatch, line, said, packed):
    monkeypatch.setattr(documents, "PART_BYTES", 16)
    data = lines(["a", "b"]) + line + b"\n" + lines(["c"])
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(data) if packed else data)
    with pytest.raises(UserError, match=said) as caught:
        all_texts(path)
    assert str(path) in str(caught.value) and "line 1" not in str(caught.value)


@pytest.mark.parametrize("kind", ["b.jsonl.gz", "c.jsonl.zst", "d.parquet"])
@pytest.mark.parametrize("how", ["cut", "junk"])
def test_a_damaged_file_is_refused(tmp_path, kind, how):
    write_all_kinds(tmp_path / "in")
    path = tmp_path / "in" / kind
    path.write_bytes(path.read_bytes()[:-20] if how == "cut" else b"junk" * 100)
    with pytest.raises(UserError, match=f"{kind} is damaged"):
        all_texts(path)


def test_a_parquet_column_must_be_text_and_whole(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"n": [1, 2], "text": ["a", None]}), tmp_path / "a.parquet", row_group_size=1)
    with pytest.raises(UserError, match=r"row 1: 'text' is null"):
        all_texts(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="it has n, text"):
        all_texts(tmp_path / "a.parquet", field="body")
    with pytest.raises(UserError, match="of type int64"):
        all_texts(tmp_path / "a.parquet", field="n")


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"SRC = .*No such file"):
        all_texts(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        all_texts(tmp_path / "pipe")


def test_what_cannot_be_read_in_a_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "lost.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"cannot read .*lost\.txt: No such file"):
        all_texts(tmp_path)
    (tmp_path / "lost.txt").unlink()
    (tmp_path / "sub").mkdir()
    real = os.scandir

    def scandir(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)  # root may read everything
    with pytest.raises(UserError, match=r"cannot read the folder .*sub: Permission denied"):
        all_texts(tmp_path)


def test_what_is_left_out_is_counted(tmp_path):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "a.jsonl").write_bytes(lines(["a", "", "b", ""]) + b"\n\n")
    (tmp_path / "in" / "empty.txt").write_bytes(b"")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "in" / "sub")
    (tmp_path / "in" / "linked.txt").symlink_to(tmp_path / "in" / "a.jsonl")
    counts = Counter()
    parts = plan([("s", str(tmp_path / "in"))], "text", True, counts=counts)
    list(read(parts[0], "text", True, counts=counts))
    linked = f"the linked folder {tmp_path.resolve() / 'in' / 'link'}"
    assert counts == {"empty document": 2, "empty file": 1, linked: 1}
    assert documents.told(counts) == f"2 empty documents, 1 empty file, {linked}"
    assert documents.told(Counter(f"the linked folder {i}" for i in range(9))).endswith("folder 7 and 1 more")


def zipped(data):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("a.txt", data)
    return out.getvalue()


def zstd(data):
    import zstandard

    return zstandard.ZstdCompressor().compress(data)


PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zip": zipped, "zst": zstd}


@pytest.mark.parametrize("how", PACKERS)
@pytest.mark.parametrize("name", ["plain", "a.txt", "a.jsonl", "A.md.PACKED", "x.html.packed"])
@pytest.mark.parametrize("raw", [False, True])
def test_what_is_packed_is_not_read_as_text(tmp_path, how, name, raw):
    path = tmp_path / name.replace("PACKED", how.upper()).replace("packed", how)
    path.write_bytes(PACKERS[how](b"some text that nobody should see as bytes"))
    with pytest.raises(UserError, match=r"(?s)is packed.*remedy: unpack it"):
        all_texts(path, raw=raw)


def test_other_endings_and_parquet_by_another_name(tmp_path):
    (tmp_path / "a.jsonl.bz2").write_bytes(b"")
    with pytest.raises(UserError, match=r"is packed \(\.bz2\)"):
        all_texts(tmp_path)
    write_all_kinds(tmp_path / "in")
    (tmp_path / "in" / "d.parquet").rename(tmp_path / "in" / "d.pq")
    with pytest.raises(UserError, match=r"let its name end in \.parquet"):
        all_texts(tmp_path / "in" / "d.pq")
    (tmp_path / "b.txt").write_bytes(b"BZhe is no bzip2, PK no zip")
    assert len(all_texts(tmp_path / "b.txt")) == 1


@pytest.mark.parametrize("name", ["UP.JSONL", "a.ndjson", "A.NdJson.GZ", "a.JSONL.zst"])
def test_endings_are_read_in_any_case(tmp_path, name):
    data, how = lines(["a", "b"]), name.lower().rpartition(".")[2]
    (tmp_path / name).write_bytes(PACKERS[how](data) if how in PACKERS else data)
    assert all_texts(tmp_path / name, raw=True) == [Text(b"a", True), Text(b"b", True)]


@pytest.mark.parametrize("how", ["gz", "zst"])
@pytest.mark.parametrize("size", [0, 5, 3000])
def test_packed_text_is_one_document(tmp_path, monkeypatch, how, size):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 1000)
    (tmp_path / f"a.txt.{how}").write_bytes(PACKERS[how](b"x" * size))
    whole, cut = all_texts(tmp_path), all_texts(tmp_path, raw=True)
    assert whole == [Text(b"x" * size, True)] * (size > 0)
    assert b"".join(t.data for t in cut) == b"x" * size and [t.ends for t in cut][-1:] == [True] * (size > 0)
    assert not any(t.ends for t in cut[:-1])
    (tmp_path / f"a.txt.{how}").write_bytes(PACKERS[how](b"\xff"))
    with pytest.raises(UserError, match="is not UTF-8"):
        all_texts(tmp_path)


def test_a_dictionary_of_strings_is_text(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    column = pa.array(["a", "b", "a"]).dictionary_encode()
    pq.write_table(pa.table({"text": column, "n": pa.array([1, 2, 1]).dictionary_encode()}), tmp_path / "a.parquet")
    assert [t.data for t in all_texts(tmp_path)] == [b"a", b"b", b"a"]
    with pytest.raises(UserError, match="of type int64"):
        all_texts(tmp_path, field="n")


def test_a_file_that_changes_is_noticed(tmp_path):
    (tmp_path / "a").write_text("abc")
    parts = plan([("s", str(tmp_path))], "text", True)
    (tmp_path / "a").write_text("abcd")
    with pytest.raises(UserError, match="has changed"):
        list(read(parts[0], "text", True))


def test_folders_inside_that_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text(words(1, 5))
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "log").write_text("not for training")
    assert len(all_texts(tmp_path, left_out=[tmp_path / "runs"])) == 1
    assert len(all_texts(tmp_path / "runs", left_out=[tmp_path / "runs"])) == 1  # it is what was asked for


def test_the_library_that_came_with_python():
    files = documents.files(documents.STDLIB)
    assert any(f.name == "argparse.py" for f in files) and len(files) > 300
    assert not any({"site-packages", "test"} & set(f.parts[-4:]) for f in files) and files == sorted(files)


@pytest.mark.parametrize(
    "content", [lines(["one", "two"]), b'{\n  "text": "one document"\n}\n'], ids=["lines", "document"]
)
def test_json_is_read_alike_packed_and_not(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(content))
    plain, packed = (all_texts(tmp_path / name) for name in ("a.json", "b.json.gz"))
    assert plain == packed
    assert [t.data for t in plain] == ([b"one", b"two"] if content.startswith(b'{"') else [content])


@pytest.mark.parametrize("name", ["a.bin", "a", "a.txt", "a.txt.gz"])
def test_binary_files_are_not_read_as_text_without_being_asked_for(tmp_path, name):
    data = b"\x7fELF\0\0\0\1" * 20
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    for raw in (True, False):
        with pytest.raises(UserError, match=rf"{name} is binary.*\n.*--force"):
            plan([("s", str(tmp_path))], "text", raw)
        assert plan([("s", str(tmp_path))], "text", raw, force=True)


def test_characters_that_are_replaced_are_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud800b\\udc00"}\n{"text": "\\ud83d\\ude00"}\n')
    counts = Counter()
    (part,) = plan([("s", str(tmp_path))], "text", False)
    found = [text.data for text, _ in read(part, "text", False, counts=counts)]
    assert found == [b"a?b?", "\U0001f600".encode()] and counts[documents.REPLACED] == 2
