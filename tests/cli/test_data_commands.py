"""`phalanx data` in real processes: what a user sees of a data set, whole and damaged."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.sets import flip
from tests.data.texts import lines, train_bpe, words

PHALANX = Path(sys.executable).with_name("phalanx")


def phalanx(*args):
    return subprocess.run([PHALANX, "data", *map(str, args)], capture_output=True, text=True, timeout=60)


def info(out):
    return json.loads(phalanx("info", out, "--json").stdout)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(3):
        (folder / f"{i}.jsonl").write_bytes(lines([words(10 * i + k, 4000) for k in range(100)], "body"))
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory, texts):
    out = tmp_path_factory.mktemp("built") / "out"
    args = ["--out", out, "--tokenizer", "byte", "--field", "body", "--shard-mb", "2.2", "--workers", "1"]
    done = phalanx("build", f"web={texts / '0.jsonl'}", f"books={texts / '1.jsonl'}", *args)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


@pytest.fixture
def copy(built, tmp_path):
    import shutil

    return Path(shutil.copytree(built[0], tmp_path / "copy"))


def test_build_and_info(built):
    out, said = built
    found = info(out)
    assert found["version"] in said and f"{found['items']:,}" in said and "byte: 257 ids" in said
    assert [e["source"] for e in found["extents"]] == ["web", "books"] and found["parent"] == ""
    assert found["shards"] > 2 and found["fields"] == [{"name": "tokens", "dtype": "<u2", "shape": []}]
    assert found["bytes"] == sum(p.stat().st_size for p in (out / "shards").iterdir())
    assert phalanx("info", out).stdout in said


def test_append_with_a_tokenizer_file(tmp_path, texts):
    train_bpe(tmp_path / "t.json")
    args = ["--out", tmp_path / "out", "--tokenizer", tmp_path / "t.json", "--field", "body", "--max-mb", "0.01"]
    assert phalanx("build", texts, *args).returncode == 0
    old = info(tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "t.json").read_bytes()
    done = phalanx("build", texts / "2.jsonl", *args, "--append", "--source", "more")
    assert done.returncode == 0 and old["version"] in done.stdout
    new = info(tmp_path / "out")
    assert new["parent"] == old["version"] and [e["source"] for e in new["extents"]] == ["text", "more"]
    old_again = phalanx("info", tmp_path / "out", "--json", "--version", old["version"][:16])
    assert json.loads(old_again.stdout) == old
    assert phalanx("verify", tmp_path / "out").returncode == 0


def test_verify_finds_nothing_wrong_with_what_is_whole(built):
    for more in ([], ["--fast"], ["--threads", "1"]):
        done = phalanx("verify", built[0], *more)
        assert done.returncode == 0 and done.stdout.startswith("good"), done.stderr


def test_verify_names_every_bad_chunk(copy):
    first, second = (copy / "shards" / f"web-000-00000{n}.shard" for n in (0, 1))
    flip(first, 100)
    flip(first, (1 << 20) + 5)
    flip(second, 7)
    done = phalanx("verify", copy)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    told = [line for line in done.stdout.splitlines() if "expected" in line]
    names = [line.partition(":")[0] for line in told]
    assert names == [f"shards/{first.name} chunk 0", f"shards/{first.name} chunk 1", f"shards/{second.name} chunk 0"]
    assert all(t.count("xxh3") == t.count("blake3") == 2 for t in told)
    assert "3 BAD" in done.stdout
    assert phalanx("verify", copy, "--fast").returncode == 0  # it says that it does not read chunks


@pytest.mark.parametrize("more", [[], ["--fast"]])
def test_verify_finds_what_is_cut_or_gone(copy, more):
    first, second, third, *_ = sorted((copy / "shards").iterdir())
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    flip(third, third.stat().st_size - 1)
    done = phalanx("verify", copy, *more)
    assert done.returncode == 1
    for path, said in [(first, "its size is wrong"), (second, "missing"), (third, "its footer is not the one")]:
        assert any(path.name in line and said in line for line in done.stdout.splitlines()), said


def test_verify_finds_a_wrong_manifest_and_tokenizer(copy):
    manifest = next(copy.glob("manifest-*.jsonl"))
    manifest.write_bytes(manifest.read_bytes().replace(b"web", b"wob"))
    done = phalanx("verify", copy)
    assert done.returncode == 1 and manifest.name in done.stdout


def test_a_stopped_build_goes_on(tmp_path, texts):
    args = ["build", texts, "--out", tmp_path / "out", "--tokenizer", "byte", "--field", "body", "--workers", "2"]
    process = subprocess.Popen([PHALANX, "data", *map(str, args)], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 20
    while not list(tmp_path.glob("out/.staging/*/state.json")) and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode in (0, 130) and "Traceback" not in said
    done = phalanx(*args)
    assert done.returncode == 0 and not (tmp_path / "out" / ".staging").exists()
    other = phalanx(*args[:2], "--out", tmp_path / "other", *args[4:-1], "1")
    assert other.returncode == 0 and info(tmp_path / "other")["version"] == info(tmp_path / "out")["version"]


def test_import(tmp_path):
    np.arange(5000, dtype="i4").tofile(tmp_path / "a.bin")
    np.save(tmp_path / "p.npy", np.ones((9, 4), "f4"))
    np.save(tmp_path / "t.npy", np.arange(9))
    args = [tmp_path / "a.bin", "--out", tmp_path / "ids", "--vocab-size", "5000", "--dtype", "int32"]
    assert phalanx("import", *args).returncode == 0
    assert info(tmp_path / "ids")["items"] == 5000 and phalanx("verify", tmp_path / "ids").returncode == 0
    fields = [f"patches={tmp_path / 'p.npy'}", f"target={tmp_path / 't.npy'}"]
    assert phalanx("import", *fields, "--records", "--out", tmp_path / "r", "--source", "im").returncode == 0
    found = info(tmp_path / "r")
    assert found["kind"] == "records" and [f["name"] for f in found["fields"]] == ["patches", "target"]


@pytest.mark.parametrize(
    "args, said",
    [
        (["build", "missing", "--out", "OUT", "--tokenizer", "byte"], "remedy: name a readable text file"),
        (["build", "README.md", "--out", "OUT", "--tokenizer", "none.json"], "name a tokenizer.json, or 'byte'"),
        (["build", "README.md", "--out", "/proc/x", "--tokenizer", "byte"], "name a folder that you may write to"),
        (["build", "README.md", "--out", "ftp://x/y", "--tokenizer", "byte"], "there is no store 'ftp'"),
        (["build", "README.md", "--out", "OUT", "--tokenizer", "byte", "--append"], "there is no data set"),
        (["import", "missing.npy", "--out", "OUT", "--vocab-size", "9"], "No such file"),
        (["import", "missing.npy", "--out", "OUT"], "--vocab-size N"),
        (["import", "a.npy", "--out", "OUT", "--vocab-size", "9", "--eos-id", "9"], "there is no such id"),
        (["import", "a.npy", "--out", "OUT", "--vocab-size", "9", "--eos", "x"], "--eos-id"),
        (["build", "README.md", "--out", "OUT", "--tokenizer", "byte", "--max-mb", "nan"], "more than 0"),
        (["info", "OUT"], "there is no data set"),
        (["verify", "OUT", "--version", "0" * 64], "there is no version"),
        (["verify", "OUT", "--version", "abc"], "too short"),
    ],
)
def test_a_mistake_is_told_with_its_remedy(tmp_path, args, said):
    done = phalanx(*(str(tmp_path / "out") if a == "OUT" else a for a in args))
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not list(tmp_path.rglob("manifest*"))
