"""`phalanx data` in real processes: what a user sees of a data set, whole and damaged."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phalanx.cli.data import _bar, data_app
from phalanx.cli.served import print_mix, print_where
from phalanx.core.errors import UserError
from phalanx.core.job import DataConfig, Job, TrainConfig
from phalanx.core.lease import Lease
from phalanx.core.store import Folder
from phalanx.data.build import BUILDING
from phalanx.data.samples import digest
from phalanx.data.selection import RunData
from tests import forked
from tests.data.sets import flip
from tests.data.texts import lines, train_bpe, words

PHALANX = Path(sys.executable).with_name("phalanx")


def phalanx(*args):
    return forked.phalanx("data", *args)


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


@pytest.mark.parametrize("command", ["build", "import"])
def test_a_build_that_waits_for_another_says_so_when_it_begins(tmp_path, command):
    """The other may take hours."""
    source = tmp_path / "a.npy"
    np.save(source, np.arange(100, dtype=np.uint16))
    more = ["--tokenizer", "byte", *["--force"] * (command == "build")]
    other = Lease(Folder(tmp_path / "out"), BUILDING, {})
    other.take()
    late = threading.Timer(30, other.close, (True,))
    late.start()
    arguments = [PHALANX, "data", command, source, "--out", tmp_path / "out", *more]
    waiting = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert f"waiting for the build of process {os.getpid()} on " in waiting.stderr.readline()
        assert waiting.poll() is None
    finally:
        late.cancel()
        other.close(remove=True)
        said = waiting.communicate(timeout=60)
    assert waiting.returncode == 0, said


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
    first, second = (next((copy / "shards").glob(f"web-000-00000{n}-*.shard")) for n in (0, 1))
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
        (["build", "README.md", "--out", "/proc/x", "--tokenizer", "byte"], "--out = '/proc/x': cannot be"),
        (["build", "README.md", "--out", "ftp://x/y", "--tokenizer", "byte"], "there is no store 'ftp'"),
        (["build", "README.md", "--out", "OUT", "--tokenizer", "byte", "--append"], "there is no data set"),
        (["import", "missing.npy", "--out", "OUT", "--vocab-size", "9"], "No such file"),
        (["import", "missing.npy", "--out", "OUT"], "--vocab-size N"),
        (["import", "a.npy", "--out", "OUT", "--vocab-size", "9", "--eos-id", "9"], "there is no such id"),
        (["import", "a.npy", "--out", "OUT", "--vocab-size", "9", "--eos", "x"], "--eos-id"),
        (["build", "README.md", "--out", "OUT", "--tokenizer", "byte", "--max-mb", "nan"], "more than 0"),
        (["info", "OUT"], "there is no data set"),
        (["verify", "OUT", "--version", "0" * 64], "there is no data set"),
        (["info", ""], "URL = '': it is empty"),
        (["info", "README.md"], "it is a file"),
        (["build", "README.md", "--out", "", "--tokenizer", "byte"], "--out = '': it is empty"),
        (["build", "", "--out", "OUT", "--tokenizer", "byte"], "SRC = '': it is empty"),
        (["build", "README.md", "--out", "memory://x", "--tokenizer", "byte"], "gone when this command ends"),
        (["import", "a.npy", "--out", "memory://x", "--vocab-size", "9"], "gone when this command ends"),
        (["bench", ""], "URL = '': it is empty"),
        (["verify", "OUT", "--version", "abc"], "too short"),
    ],
)
def test_a_mistake_is_told_with_its_remedy(tmp_path, args, said):
    done = phalanx(*(str(tmp_path / "out") if a == "OUT" else a for a in args))
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not list(tmp_path.rglob("manifest*"))


# -- where and mix, on a record made by hand


SEQ, BATCH, STEPS = 16, 8, 10


@pytest.fixture
def record(tmp_path):
    """Of a run whose third step straddles a change from web alone to code alone, on imported ids; its folder."""
    for label, n in (("web", 0), ("code", 1)):
        np.save(tmp_path / f"{label}.npy", np.full(5000, n, "u2"))
    inputs = [f"{label}={tmp_path / label}.npy" for label in ("web", "code")]
    done = phalanx("import", *inputs, "--out", tmp_path / "set", "--vocab-size", "9")
    assert done.returncode == 0, done.stderr
    stages = [{"at": 0, "weights": {"web": 1.0}}, {"at": 19, "weights": {"code": 1.0}}]
    train = TrainConfig(seq_len=SEQ, global_batch=BATCH, micro_batch=2, steps=STEPS)
    job = Job(train=train, data=DataConfig(source=str(tmp_path / "set"), stages=stages))
    run = tmp_path / "run"
    run.mkdir()
    data = RunData.plan(job, str(tmp_path / "set"))
    data.write(run)
    (run / "meta.json").write_text("{}")
    (run / "job.json").write_text(json.dumps({"job": job.to_dict()}))
    loader = data.open()
    with open(run / "metrics.jsonl", "w") as f:
        for step in range(STEPS - 1):
            rows = loader.rows(data.places(step))
            code = int(rows[:, 0].sum())
            served = {"web": BATCH - code, "code": code}
            row = {"step": step, "served": served, "data_digest": f"{digest(rows, data.places(step)):016x}"}
            f.write(json.dumps(row) + "\n")
    loader.close()
    return run


def test_mix_splits_a_step_at_a_change_of_stage(record):
    done = phalanx("mix", record, "--json")
    assert done.returncode == 0, done.stderr
    rows = {(r["stage"], r["source"]): r for r in json.loads(done.stdout)}
    assert {key: row["sequences"] for key, row in rows.items()} == {
        (0, "web"): 19,
        (0, "code"): 0,
        (1, "web"): 0,
        (1, "code"): 9 * BATCH - 19,
    }
    assert all(row["served"] == row["planned"] for row in rows.values())


def test_mix_counts_a_step_that_was_done_again_once(record):
    before = phalanx("mix", record, "--json").stdout
    rows = (record / "metrics.jsonl").read_text().splitlines(keepends=True)
    again = rows[4:]
    rows[4] = rows[4].replace('"data_digest": "', '"data_digest": "f')
    (record / "metrics.jsonl").write_text("".join([*rows, *again]))  # back to step 4 after the last one
    assert phalanx("mix", record, "--json").stdout == before
    assert phalanx("where", record, "--step", "4").stdout.endswith("these are the bytes that the ranks trained on\n")


def test_mix_counts_the_runs_that_a_run_continues(record, monkeypatch):
    """With another batch from the checkpoint on, and after the first run had come further than its checkpoint."""
    before = json.loads(phalanx("mix", record, "--json").stdout)
    data, runs = RunData.read(record), record.parent / "runs"
    first, second = (runs / f"job-2026010{day}T000000Z-000{day}" for day in (1, 2))
    shutil.copytree(record, first)
    shutil.copytree(record, second)
    half, rows = replace(data, first_step=6, first_place=6 * BATCH, global_batch=BATCH // 2), []
    half.write(second)
    resume = {"type": "resume", "time": 1.0, "step": 6, "name": "step-6", "url": str(first / "checkpoints")}
    (second / "events.jsonl").write_text(json.dumps(resume) + "\n")
    for step in range(6, 6 + 2 * (STEPS - 1 - 6)):
        rows.append({"step": step, "served": {"code": BATCH // 2}, "data_digest": "0"})
    (second / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert json.loads(phalanx("mix", second, "--json").stdout) == before
    monkeypatch.chdir(runs.parent)
    assert json.loads(phalanx("mix", second.name, "--json").stdout) == before, "by its name"


def test_where_without_a_tokenizer_prints_the_ids(record):
    done = phalanx("where", record, "--step", "2")
    assert done.returncode == 0, done.stderr
    assert "shards/web-000-000000-" in done.stdout and "\n" + "1 " * (SEQ - 1) + "1\n" in done.stdout
    assert done.stdout.endswith("these are the bytes that the ranks trained on\n")
    rows = [json.loads(line) for line in phalanx("where", record, "--step", "9", "--json").stdout.splitlines()]
    assert [(r["text"], r["tokens"]) for r in rows] == [(None, [1] * (SEQ + 1))] * BATCH


def test_where_finds_a_data_set_that_was_moved(record):
    moved = (record.parent / "set").rename(record.parent / "moved")
    lost = phalanx("where", record, "--step", "2")
    assert lost.returncode == 2 and "there is no data set there" in lost.stderr and "--data URL" in lost.stderr
    done = phalanx("where", record, "--step", "2", "--data", moved)
    assert done.returncode == 0 and "these are the bytes" in done.stdout, done.stderr
    assert "--data = '': it is empty" in phalanx("where", record, "--step", "2", "--data", "").stderr


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("job.json", "", "its job.json is damaged"),
        ("job.json", None, "its job.json is damaged"),
        ("job.json", "{}", "its job.json is damaged"),
        ("data.json", "{", "its data.json is damaged"),
        ("data.json", "{}", "its data.json is damaged"),
        ("data.json", None, "it has no data.json"),
        ("meta.json", None, "it has no meta.json"),
        ("metrics.jsonl", "garbage\n", "its metrics.jsonl is damaged"),
        ("metrics.jsonl", "5\n", "its metrics.jsonl is damaged"),
        ("events.jsonl", "garbage\n", "its events.jsonl is damaged"),
    ],
)
def test_a_damaged_record_is_named(record, capsys, name, content, said):
    (record / name).unlink(missing_ok=True)
    if content is not None:
        (record / name).write_text(content)
    calls = [lambda: print_where(record, 2, None, None, False), lambda: print_mix(record, False)]
    unread = {"job.json": 1, "events.jsonl": 1}  # by mix
    for call in calls[: unread.get(name, 2)]:
        with pytest.raises(UserError, match=said) as refused:
            call()
        assert refused.value.field == "RUN" and refused.value.remedy


def test_bench_says_what_it_cannot_measure(built):
    for args, said in [(["--seq-len", "2000000"], "--seq-len = 2000000"), (["--batch", "100000000"], "--batch = 1000")]:
        done = phalanx("bench", built[0], *args, "--seconds", "0.1")
        assert done.returncode == 2 and said in done.stderr and "train.seq_len" not in done.stderr, done.stderr
    done = phalanx("bench", built[0], "--seq-len", "64", "--seconds", "0.1")
    assert done.returncode == 0 and "fits into this machine's memory" in done.stdout, done.stderr


def test_a_damaged_manifest_is_told_by_info_and_verify(copy):
    manifest = copy / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes().replace(b'"items": ', b'"items": 1', 1))
    for command in ("info", "verify"):
        done = phalanx(command, copy)
        assert done.returncode == 2 and "URL = " in done.stderr and "manifest.jsonl is damaged" in done.stderr
        assert f"remedy: a whole copy lies beside it: cp {copy}/manifest-" in done.stderr


def test_an_empty_source_is_not_the_current_folder(tmp_path):
    done = forked.phalanx("train", "--set", "data.source=", cwd=tmp_path)
    assert done.returncode == 2 and "data.source = '': it is empty" in done.stderr and not list(tmp_path.iterdir())


def test_what_was_left_out_is_printed(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines(["a", "", "b"]))
    args = ["--out", tmp_path / "out", "--tokenizer", "byte", "--workers", "1", "--max-mb", "0.000002"]
    done = phalanx("build", tmp_path / "a.jsonl", *args)
    assert done.stdout.splitlines()[-2:] == [
        "cut by --max-mb: the first 2e-06 MB of text of text are used; its files hold 0.0 MB",
        "left out: 1 empty document",
    ], done.stderr


@pytest.mark.parametrize(
    "command, said", [("import", "nothing was added"), ("verify", "not all"), ("bench", "nothing")]
)
def test_a_command_that_is_stopped_says_a_word(tmp_path, capsys, monkeypatch, built, command, said):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("phalanx.cli.served.print_bench", interrupted)
    monkeypatch.setattr("phalanx.data.verify.verify", interrupted)
    monkeypatch.setattr("phalanx.data.build.write_arrays", interrupted)
    more = ["--out", str(tmp_path / "out"), "--vocab-size", "9"] if command == "import" else []
    with pytest.raises(SystemExit) as left:
        data_app([command, str(built[0]), *more])
    assert left.value.code == 130 and f"stopped; {said}" in capsys.readouterr().err


def test_the_progress_of_packed_input_is_that_of_its_text(capsys, monkeypatch):
    monkeypatch.setattr("phalanx.run.console.PLAIN_EVERY_S", -1.0)
    with _bar("building") as told:
        told(0, 2_000_000, "7.5 MB of text")
    assert capsys.readouterr().err == "building: 0.0 of 2.0 MB, 7.5 MB of text\n"
