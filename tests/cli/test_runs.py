"""`phalanx runs`: what the records hold, in words and as JSON, and an error that helps for what is not there."""

from __future__ import annotations

import csv
import json
import struct

import pytest
from typer.testing import CliRunner

from phalanx.cli.commands import app
from phalanx.core.errors import UserError
from phalanx.observe.tensorboard import _masked
from tests.observe.records import Written
from tests.observe.test_story import broken

HOSTILE = "x\x1b[31m<script>alert(1)</script>"


def ask(*words):
    out = CliRunner().invoke(app, ["runs", *map(str, words)])
    if isinstance(out.exception, UserError):
        raise out.exception
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    broken(root).end()
    Written(root, "quiet").begin().steps(0, 30).end()
    return root


def test_ls_and_show(root):
    table = ask("ls", root).output
    assert "job-" in table and "quiet-" in table and "40/40" in table and "30/40" in table
    rows = json.loads(ask("ls", root, "--json").output)
    assert {row["name"]: row["incidents"] for row in rows} == {"job": 1, "quiet": 0}
    text = ask("show", "job", "--dir", root, "--price", 2).output
    assert "incident 1, worker" in text and "productive" in text and "$" in text
    story = json.loads(ask("show", "job", "--dir", root, "--json").output)
    assert sum(row["share"] for row in story["goodput"]["states"]) == pytest.approx(1)
    assert story["record"]["job"]["job"]["name"] == "job" and "started" in story["record"]["meta"]
    assert story["incidents"][0]["verdict"].split(": ")[1].startswith("Rank 1 on node-0 was killed")


def test_one_damaged_record_hides_no_other(tmp_path):
    run = Written(tmp_path, "damaged").begin()
    run.event("control form", replicas=5)
    Written(tmp_path, "quiet").begin().steps(0, 30).end()
    table = ask("ls", tmp_path).output
    assert "30/40" in table and "Cannot be read: TypeError" in table


def test_ranks_names_the_slowest_of_the_last_steps(tmp_path):
    run = Written(tmp_path, "ranks").begin().steps(0, 20)
    assert "no rank has told" in ask("ranks", "last", "--dir", tmp_path).output
    for step in range(20):
        run.record.rank_times(step, [1, {"0": 0.1, "1": 0.4 if step == 3 else 0.1}], 2)
    run.end()
    (first, *_) = json.loads(ask("ranks", "last", "--dir", tmp_path, "--json").output)
    assert first["ranks"] == [1, 2] and first["ratio"] > 1.5
    assert "1.00 x" in ask("ranks", "last", "--dir", tmp_path, "--last", 10).output.splitlines()[0]


def test_diff_says_by_its_exit_code_whether_they_part(root):
    same = ask("diff", "job", "quiet", "--dir", root)
    assert same.exit_code == 0 and "equal to the bit" in same.output and "name" in same.output
    Written(root, "apart").begin().steps(0, 5).steps(5, 9, loss=1.0).end()
    apart = ask("diff", "apart", "quiet", "--dir", root, "--json")
    assert apart.exit_code == 1 and json.loads(apart.output)["part"]["step"] == 5


@pytest.mark.parametrize("suffix", ["csv", "json", "parquet"])
def test_export_writes_one_row_for_each_step(root, tmp_path, suffix):
    out = tmp_path / f"steps.{suffix}"
    assert "40 steps" in ask("export", "job", "--dir", root, "--out", out).output
    if suffix == "csv":
        rows = list(csv.DictReader(out.open()))
    elif suffix == "json":
        rows = json.loads(out.read_text())
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        rows = parquet.read_table(out).to_pylist()
    assert [int(row["step"]) for row in rows] == list(range(40)) and float(rows[3]["loss"]) == pytest.approx(1.97)


def test_an_event_file_has_the_records_and_checksums_of_tensorboard(root, tmp_path):
    out = tmp_path / "run.tfevents"
    ask("export", "job", "--dir", root, "--out", out)
    data, steps = out.read_bytes(), []
    while data:  # each record: length, its checksum, the message, its checksum
        (size,) = struct.unpack("<Q", data[:8])
        message = data[12 : 12 + size]
        for covered, said in ((data[:8], data[8:12]), (message, data[12 + size : 16 + size])):
            assert struct.unpack("<I", said)[0] == _masked(covered)
        steps.append(message[9:])
        data = data[16 + size :]
    assert len(steps) == 41 and b"brain.Event:2" in steps[0] and b"loss" in steps[-1]
    # The published check value of CRC-32C, of the digits 1 to 9, before and after the rotation of TFRecord.
    crc = 0xE3069283
    assert _masked(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["show", "nothing"], "RUN"),
        (["show", "../../etc"], "RUN"),
        (["diff", "job", "nothing"], "OTHER"),
        (["export", "job", "--out", "x.docx"], "--out"),
        (["export", "job", "--out", "/nowhere/x.csv"], "--out"),
    ],
)
def test_a_mistake_is_told_with_a_remedy(root, words, field):
    with pytest.raises(UserError, match="remedy") as told:
        ask(*words, "--dir", root)
    assert field in str(told.value)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="RUNS_DIR"):
        ask("ls", tmp_path / "no")
    assert "`phalanx train` makes one" in ask("ls", tmp_path).output


def test_names_with_escapes_are_printed_without_them(tmp_path):
    run = Written(tmp_path, HOSTILE).begin().steps(0, 3)
    run.event("exit", rank=1, signal=HOSTILE, node=HOSTILE, service="")
    run.end(reason=HOSTILE)
    for words in (["ls", tmp_path], ["show", "last", "--dir", tmp_path]):
        assert "\x1b" not in ask(*words).output
