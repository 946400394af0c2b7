"""`phalanx checkpoint` in real processes: what it shows of whole and of damaged checkpoints."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.checkpoint.catalog import Catalog
from phalanx.checkpoint.files import Reader
from phalanx.cli.commands import app
from phalanx.control.interval import Measured, mtbf_ns
from phalanx.core.checkpoint import CHUNK_BYTES, MANIFEST, file_name
from phalanx.core.errors import UserError
from phalanx.core.job import Job
from phalanx.core.layout import Layout
from phalanx.core.shape import ModelConfig
from phalanx.core.store import Folder, ObjectStore
from phalanx.observe.record import RunRecord
from tests import forked
from tests.checkpoint.test_catalog import flip, make

PHALANX = Path(sys.executable).with_name("phalanx")
S = 10**9


def phalanx(*args):
    return forked.phalanx("checkpoint", *args)


def good(*args):
    done = phalanx(*args)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "run" / "checkpoints")


@pytest.fixture
def record(tmp_path):
    def create(checkpoint=None, layout=Layout(4, ranks_per_node=2)):  # noqa: B008
        job = {**Job(layout=layout).to_dict(), "checkpoint": checkpoint or {}}
        return RunRecord.create(tmp_path / "runs", "job", {}, job={"job": job})

    return create


def test_ls(folder):
    old, bad, torn, new = (make(folder, step) for step in (10, 20, 30, 40))
    Catalog(folder).quarantine(bad, "it has [brackets]")
    (folder.path / torn / MANIFEST).unlink()
    flip(folder.path / old / MANIFEST, 80)
    head, *rows = good("ls", folder.path).splitlines()
    assert head.split() == ["step", "name", "size", "ranks", "age", "layout", "state"]
    assert [row.split()[:2] for row in rows] == [["40", new], ["30", torn], ["20", bad], ["10", old]]
    assert "replica 1 x shard 2 x tp 1" in rows[0] and rows[0].endswith("  good")
    assert rows[1].endswith("  incomplete") and rows[2].endswith("  quarantined: it has [brackets]")
    assert "BAD" in rows[3] and "torn or damaged" in rows[3]
    assert not (folder.path / old / "quarantined.json").exists()  # looking changes nothing


def test_show(folder):
    make(folder, 10)
    name = make(folder, 1500, cursor=12_000, data_version="dv", ledger="abcd", generation=3)
    for path in (folder.path, folder.path / name, folder.path.parent):
        said = good("show", path)
        for text in (name, "1,500", "12,000", "dv", "abcd", "2 ranks", "exp_avg_sq float32", "1 tensors, 120 bytes"):
            assert text in said, text
        assert "weights/w" not in said
    rows = [line.split() for line in good("show", folder.path, "--tensors").splitlines() if "/w " in line]
    assert rows == [[f"{kind}/w", "float32", "6x5"] for kind in ("weights", "exp_avg", "exp_avg_sq")]


def test_verify_finds_nothing_wrong_with_what_is_whole(folder):
    names = [make(folder, step) for step in (1, 2)]
    said = good("verify", folder.path)
    assert said.startswith("good") and all(name in said for name in names)
    assert names[0] not in good("verify", folder.path / names[1])


def test_verify_names_what_is_bad(folder):
    names = [make(folder, step, rows=200_000) for step in (1, 2, 3)]
    flip(folder.path / names[0] / file_name(0), CHUNK_BYTES + 7)
    flip(folder.path / names[0] / file_name(1), 7)
    (folder.path / names[1] / file_name(1)).unlink()
    done = phalanx("verify", folder.path)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    missing, first, second, verdict, _, away, _ = done.stdout.splitlines()
    assert missing == f"{names[1]}/{file_name(1)}: is missing"
    for line, rank, start in ((first, 0, CHUNK_BYTES), (second, 1, 0)):
        where = f"chunk {start // CHUNK_BYTES}, bytes {start} to {start + CHUNK_BYTES} "
        assert line.startswith(f"{names[0]}/{file_name(rank)}: {where}")
        found, want = line.split("xxh3 ")[1].split(" instead of ")
        assert len(found) == len(want) == 32 and found != want
    assert verdict == f"1 BAD: {names[0]}" and away == f"1 CANNOT BE READ NOW: {names[1]}"
    assert good("verify", folder.path / names[2]).startswith("good")
    assert good("show", folder.path / names[0])  # nothing was marked


def test_scrub_marks_what_is_bad(folder):
    names = [make(folder, step) for step in (1, 2)]
    flip(folder.path / names[1] / file_name(0), 7)
    done = phalanx("scrub", folder.path)
    assert done.returncode == 1 and f"1 BAD: {names[1]}" in done.stdout
    assert "quarantined: " in good("ls", folder.path) and names[0] in good("show", folder.path)
    assert good("scrub", folder.path).startswith("good")
    assert phalanx("verify", folder.path / names[1]).returncode == 1


def test_release_lifts_a_quarantine_when_all_bytes_are_right(folder):
    kept, mended = (make(folder, step) for step in (1, 2))
    for name in (kept, mended):
        flip(folder.path / name / file_name(0), 7)
    assert phalanx("scrub", folder.path).returncode == 1
    flip(folder.path / mended / file_name(0), 7)
    done = phalanx("release", folder.path)
    assert done.returncode == 1 and f"released: {mended}" in done.stdout and f"1 BAD: {kept}" in done.stdout
    assert f"{mended}/" not in done.stdout and [f.name for f in Catalog(folder).good()] == [mended]
    done = phalanx("release", folder.path / mended)
    assert done.returncode == 2 and "nothing of it is in quarantine" in done.stderr
    assert "it is a folder, which needs no index" in phalanx("reindex", folder.path).stderr


def test_reindex_finds_what_a_bucket_has(tmp_path, monkeypatch):
    from phalanx.checkpoint.index import CATALOG
    from phalanx.cli.checkpoint import reindex_command

    store = ObjectStore(f"memory://{tmp_path.name}-index")
    name = make(store, 7)
    store.write(CATALOG, b"{")
    reindex_command(store.url)
    assert [f.name for f in Catalog(store).good()] == [name]


def test_a_run_names_its_checkpoints(tmp_path, record):
    """It finds them in the run's folder, or where the job keeps them."""
    run = record()
    inside = make(Folder(run.path / "checkpoints"), 1)
    assert inside in good("ls", run.path)
    elsewhere = Folder(tmp_path / "elsewhere")
    name = make(elsewhere, 2)
    assert name in good("ls", record({"dir": str(elsewhere.path)}).path)
    relative = subprocess.run([PHALANX, "checkpoint", "ls", "."], cwd=elsewhere.path, capture_output=True, text=True)
    assert name in relative.stdout
    assert name in good("ls", f"file://{elsewhere.path}")


# -- why


def test_why_from_what_the_run_derived(record):
    run = record()
    m = Measured(S // 2, S // 10, 0, S, mtbf_ns(2))
    more = {"nodes": 2, "failures": 1, "node_ns": 0, "failures_per_1000_node_days": 3.79}
    for measured in (Measured(1, 1, 1, 1, 1), m):
        figures = {**dataclasses.asdict(measured), **more}
        run.event({"type": "checkpoint_interval", "steps": 1, "memory_steps": 4, "measured": figures})
    said = good("why", run.path)
    assert "C = 100 ms" in said and "sqrt(2 C M)" in said and "2 nodes: 1 failures" in said
    assert "memory every 4 steps" in said and "the job asks" not in said


@pytest.mark.parametrize("every, said", [(100, "asks for one every 100 steps"), (-1, "asks for none")])
def test_why_says_what_the_job_asks_for(record, every, said):
    run = record({"every_steps": every, "failures": 6.5})
    run.metric({"step": 0, "time_s": 2.0})
    run.event({"type": "checkpoint", "step": 1, "stall_s": 0.1, "drain_s": 5.0, "slowdown_s": 0.0, "bytes": 9})
    assert said in good("why", run.path) and "6.5 per 1000 node-days" in good("why", run.path)


def test_why_from_what_the_run_measured(record):
    run = record()
    for step, (stall, time_s) in enumerate([(0.1, 2.0), (0.3, 2.5), (90.0, 40.0)]):
        run.metric({"step": step, "time_s": time_s})
        more = {"stall_s": stall, "drain_s": 5.0, "slowdown_s": None, "bytes": 9}
        run.event({"type": "checkpoint", "step": step, **more})
    said = good("why", run.path)
    assert "medians of 3 checkpoints and 3 steps" in said and "C = 300 ms" in said and "5 s until it is durable" in said
    assert "of 2 nodes" in said and "step     2.5 s" in said


def test_why_before_there_is_a_checkpoint(record):
    run = record()
    assert "nothing follows yet" in good("why", run.path)
    run.metric({"step": 0, "time_s": 0.5})
    said = good("why", run.path)
    assert "has measured no checkpoint yet" in said and "if it costs 100 ms" in said


# -- convert


@pytest.fixture
def trained(tmp_path):
    """Write a checkpoint of a model, and return it with its manifest."""
    from phalanx.checkpoint.torch_foreign import Image, entry_of, params_of

    model = ModelConfig(vocab_size=64, dim=16, num_layers=1, num_heads=2, ffn_dim=32)
    entries = [entry_of("weights", held, "float32") for held in params_of(model)]
    image = Image(entries, Job(model=model).to_dict(), step=7)
    for entry in entries:
        image.tensor(entry.held.name).uniform_()
    return Folder(tmp_path / "trained"), image.commit(Folder(tmp_path / "trained"))


def here(*args):
    app(["checkpoint", *map(str, args)], standalone_mode=False)


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_convert_there_and_back(tmp_path, trained, kind, capsys):
    store, manifest = trained
    here("convert", store.path, tmp_path / kind, "--to", kind)
    here("convert", tmp_path / kind, tmp_path / "back", "--to", "phalanx")
    assert manifest.name in capsys.readouterr().out
    back = Catalog(Folder(tmp_path / "back")).newest_good()
    for entry in manifest.entries:
        assert (back.read(entry.held.name) == Reader(store, manifest.name).read(entry.held.name)).all()


def test_convert_to_another_precision_and_into_a_bucket(tmp_path, trained):
    here("convert", trained[0].path, tmp_path / "o", "--to", "hf", "--dtype", "bf16")
    here("convert", tmp_path / "o", "memory://converted", "--to", "phalanx")
    found = Catalog(ObjectStore("memory://converted")).newest_good()
    assert {e.dtype for e in found.manifest.entries} == {"bfloat16"}


@pytest.mark.parametrize("place", ["folder", "memory://with-assets"])
def test_what_is_not_weights_comes_back(tmp_path, trained, place, capsys):
    """A model needs its tokenizer, chat template, generation config and eos to generate text."""
    here("convert", trained[0].path, tmp_path / "hf")
    assert "no tokenizer" in capsys.readouterr().err
    files = {
        "tokenizer.json": '{"version": "1.0"}',
        "tokenizer_config.json": '{"eos_token": "<end>"}',
        "generation_config.json": '{"temperature": 0.6, "eos_token_id": [3, 5]}',
        "chat_template.jinja": "{{ messages }}",
    }
    for name, text in files.items():
        (tmp_path / "hf" / name).write_text(text)
    config = tmp_path / "hf" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": [3, 5]}))
    where = place if "://" in place else str(tmp_path / place)
    app(["convert", str(tmp_path / "hf"), where], standalone_mode=False)
    app(["convert", where, str(tmp_path / "out")], standalone_mode=False)
    assert {name: (tmp_path / "out" / name).read_text() for name in files} == files
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == [3, 5]
    assert "no tokenizer" not in capsys.readouterr().err
    for name in files:
        (tmp_path / "hf" / name).unlink()
    app(["convert", str(tmp_path / "hf"), where], standalone_mode=False)  # the newest there has no tokenizer
    app(["convert", where, str(tmp_path / "bare")], standalone_mode=False)
    assert not any((tmp_path / "bare" / name).exists() for name in files)


def test_convert_says_which_way_and_writes_a_job(tmp_path, trained, capsys):
    """Without --to it converts to transformers or from there. The job that it writes is valid and starts from the
    weights."""
    from phalanx.spec import load

    app(["convert", str(trained[0].path), str(tmp_path / "hf")], standalone_mode=False)
    (tmp_path / "data").mkdir()
    place, job = str(tmp_path / "in"), tmp_path / "jobs" / "job.toml"
    options = ["--job", str(job), "--data", str(tmp_path / "data")]
    app(["convert", str(tmp_path / "hf"), place, *options], standalone_mode=False)
    assert f"phalanx train {job}" in capsys.readouterr().out
    made = load(job).job
    assert made.checkpoint.start == place and made.data.source == str(tmp_path / "data")
    assert made.model == Job.from_dict(Catalog(Folder(tmp_path / "in")).newest_good().manifest.job).model
    with pytest.raises(UserError, match="such a file already"):
        app(["convert", str(tmp_path / "hf"), place, *options], standalone_mode=False)


# -- mistakes


def test_a_mistake_is_told_with_its_remedy(tmp_path, folder, record, trained):
    name, torn = make(folder, 1), make(folder, 2)
    (folder.path / torn / MANIFEST).unlink()
    all_bad = Folder(tmp_path / "all_bad")
    Catalog(all_bad).quarantine(make(all_bad, 3), "odd")
    damaged = Folder(tmp_path / "damaged")
    damaged_name = make(damaged, 4)
    flip(damaged.path / damaged_name / MANIFEST, 80)
    (tmp_path / "empty").mkdir()
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").touch()
    (tmp_path / "file").touch()
    os.rename(make_in(tmp_path / "renamed"), tmp_path / "renamed" / "mine")
    broken = record()
    (broken.path / "job.json").write_text("{")
    old = record()
    old.event({"type": "checkpoint_interval", "steps": 3, "measured": {"x": 1}})
    cases = [
        (["ls", tmp_path / "none"], "there is no such folder"),
        (["ls", tmp_path / "file"], "there is no such folder"),
        (["ls", tmp_path / "empty"], "there is no checkpoint in it"),
        (["ls", tmp_path / "hf"], "but one of hf"),
        (["ls", record().path], "there is no checkpoint in it"),
        (["ls", record({"dir": str(tmp_path / "gone")}).path], "there is no checkpoint in it"),
        (["ls", broken.path], "its job.json is damaged"),
        (["ls", "ftp://x/y"], "there is no store 'ftp'"),
        (["ls", "memory://x"], "there is no checkpoint in it"),
        (["show", tmp_path / "renamed" / "mine"], "rename it back"),
        (["show", folder.path / torn], "it was never committed"),
        (["show", folder.path / "step-000000009-zz"], "there is no such folder"),
        (["show", "memory://x/step-000000009-zz"], "there is no such checkpoint"),
        (["show", damaged.path / damaged_name], "torn or damaged"),
        (["verify", all_bad.path], "is quarantined"),
        (["scrub", folder.path / name], "a scrub reads all checkpoints of a folder"),
        (["why", folder.path], "it is not the record of a run"),
        (["why", broken.path], "its record is damaged"),
        (["why", old.path], "its record is damaged"),
        (["convert", folder.path, tmp_path / "o", "--to", "onnx"], "name hf, dcp or phalanx"),
        (["convert", folder.path, tmp_path / "o", "--to", "phalanx"], "the source is phalanx"),
        (["convert", tmp_path / "hf", tmp_path / "o", "--to", "dcp"], "convert it to phalanx first"),
        (["convert", tmp_path / "hf", tmp_path / "o", "--to", "phalanx", "--dtype", "x"], "leave it out"),
        (["convert", folder.path, tmp_path / "o", "--to", "dcp", "--dtype", "bf16"], "leave it out"),
        (["convert", trained[0].path, tmp_path / "o", "--to", "hf", "--dtype", "x"], "unknown precision"),
        (["convert", trained[0].path, tmp_path / "o", "--like", tmp_path / "none"], "--like = "),
        (["convert", trained[0].path, tmp_path / "o", "--job", tmp_path / "o"], "of use for phalanx only"),
        (["convert", trained[0].path, "s3://b/o", "--to", "hf"], "hf is written to a folder"),
        (["convert", trained[0].path, "/proc/o", "--to", "hf"], "DST may be written"),
        (["convert", tmp_path / "none", tmp_path / "o", "--to", "hf"], "there is no such folder"),
        (["convert", trained[0].path, folder.path, "--to", "hf"], "there is something already"),
        (["convert", folder.path, tmp_path / "o", "--to", "hf"], "does not say which model it holds"),
        (["convert", all_bad.path, tmp_path / "o", "--to", "hf"], "is quarantined"),
        (["convert", next(all_bad.path.iterdir()), tmp_path / "o", "--to", "hf"], "is quarantined: odd"),
    ]
    for args, said in cases:
        with pytest.raises(UserError) as told:
            here(*args)
        assert said in str(told.value) and "remedy: " in str(told.value), args
        assert not (tmp_path / "o").exists()
    done = phalanx("show", damaged.path)
    assert done.returncode == 2 and "torn or damaged" in done.stderr and "Traceback" not in done.stderr


def make_in(path):
    store = Folder(path)
    return path / make(store, 1)


@pytest.mark.parametrize("command", ["ls", "show", "verify", "scrub", "why"])
def test_no_torch_is_needed(folder, record, command):
    make(folder, 1)
    path = record().path if command == "why" else folder.path
    code = "import sys; sys.modules['torch'] = None; from phalanx.cli.main import run; run()"
    args = [sys.executable, "-c", code, "checkpoint", command, str(path)]
    done = subprocess.run(args, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout, done.stderr


def test_a_reader_that_has_gone_away_is_no_error(folder):
    make(folder, 1)
    reader, writer = os.pipe()
    os.close(reader)
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    args = [PHALANX, "checkpoint", "show", folder.path, "--tensors"]
    done = subprocess.run(args, stdout=writer, stderr=subprocess.PIPE, text=True, env=env)
    os.close(writer)
    assert done.stderr == ""
