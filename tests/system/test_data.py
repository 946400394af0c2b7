"""Data in real runs: what a rank trained on can be found, and damage is found, handled and recorded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from phalanx.data.build import build
from phalanx.data.tokenizer import Bytes
from tests.system.command import TINY, Command, phalanx, sets, train

FAMILY = f"{Path(__file__).parent / 'logging_family.py'}:FAMILY"
STEPS, SEQ = 4, 32


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """Train on the standard library's sources, with two shard ranks that log their tokens."""
    directory = tmp_path_factory.mktemp("where") / "run"
    values = TINY | {"layout.shard": 2, "layout.tp": 1, "train.steps": STEPS, "train.global_batch": 8}
    values |= {"model.family": FAMILY}
    ended = train(directory, *sets(values))
    assert ended.code == 0, ended.err
    return directory, ended


def logged(run, rank):
    (log,) = (run / "logs").glob(f"*/rank-{rank:05d}.log")
    lines = log.read_text().splitlines()
    return [json.loads(line.removeprefix("TOKENS ")) for line in lines if line.startswith("TOKENS ")]


def test_where_prints_the_very_text_that_a_rank_trained_on(quickstart):
    directory, ended = quickstart
    for rank in (0, 1):
        trained = logged(ended.runs[0], rank)  # a micro-batch each, two per step
        assert len(trained) == 2 * STEPS
        for step in (0, STEPS - 1):
            told = phalanx(directory, "data", "where", ended.runs[0], "--step", step, "--rank", rank, "--json")
            assert told.returncode == 0, told.stderr
            rows = [json.loads(line) for line in told.stdout.splitlines()]
            tokens = [sequence for micro in trained[2 * step : 2 * step + 2] for sequence in micro]
            assert [row["tokens"][:-1] for row in rows] == tokens
            texts = [bytes(t for t in sequence if t < 256).decode("utf-8", "replace") for sequence in tokens]
            assert [row["text"] for row in rows] == texts
            shard = directory / "runs" / ".data"
            for row in rows:  # and the tokens are where the row says
                file = next(shard.glob(f"*/{row['shard']}"))
                ids = np.fromfile(file, "<u2", SEQ + 1, offset=2 * row["offset"])
                assert ids.tolist() == row["tokens"]


def test_where_compares_a_whole_step_with_what_the_ranks_reported(quickstart):
    directory, _ = quickstart
    told = phalanx(directory, "data", "where", "--step", 2)  # the newest run
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("place ") == 8
    assert told.stdout.rstrip().endswith("these are the bytes that the ranks trained on")


@pytest.mark.parametrize(
    "args, parts",
    [
        (["--step", "9"], ["--step = 9", "the run has 4 steps", "remedy: name a step from 0 to 3"]),
        (["--step", "0", "--rank", "7"], ["--rank = 7", "remedy: name a rank from 0 to 1"]),
        (["elsewhere", "--step", "0"], ["RUN = 'elsewhere'", "there is no such run"]),
    ],
)
def test_where_refuses_what_is_not_there(quickstart, args, parts):
    told = phalanx(quickstart[0], "data", "where", *args)
    assert told.returncode == 2 and all(part in told.stderr for part in parts), told.stderr


def test_the_record_carries_version_and_cursor(quickstart):
    _, ended = quickstart
    data = json.loads((ended.runs[0] / "data.json").read_text())
    assert len(data["version"]) == 64 and data["order"]["version"] == 1
    assert [row["cursor"] for row in ended.rows] == [8, 16, 24, 32]
    assert all(row["served"] == {"python-stdlib": 8} for row in ended.rows)
    assert all(row["data_ready"] >= 1 and row["data_wait_s"] >= 0 for row in ended.rows)


# -- damage during the run

CHUNK = 64  # items, two sequences: 500 steps of two sequences each meet every chunk


def data_set(root):
    (root / "text").mkdir(parents=True)
    rng = np.random.default_rng(1)
    (root / "text" / "a.txt").write_bytes(rng.integers(32, 127, 32_000, np.uint8).tobytes())
    build([("a", str(root / "text"))], root / "set", Bytes(), workers=1, chunk_items=CHUNK, shard_chunks=32)
    return root / "set"


def flip(shard):
    """Flip a bit in place: a file that is written anew is shorter for a moment."""
    at = CHUNK * 2 * 3 + 5
    with open(shard, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def truncate(shard):
    shard.write_bytes(shard.read_bytes()[: -32 * 32 - 100])


def damage(directory, how, **more):
    """Damage the data set of a run once it trains. Return the shard's name, and how the run ended."""
    url = data_set(directory)
    values = TINY | {"data.source": url, "train.steps": 500, "data.buffer_steps": 2, "layout.tp": 1} | more
    command = Command(directory / "run", *sets(values))
    command.wait_until(lambda: len(command.rows()) >= 2)
    shard = sorted((url / "shards").glob("*"))[7]
    how(shard)
    return shard.name, command.end(timeout=600)


SCENARIOS = {
    "flipped": lambda d: damage(d, flip),
    "truncated": lambda d: damage(d, truncate, **{"data.quarantine_limit": 100}),
    "deleted": lambda d: damage(d, Path.unlink),
}


@pytest.mark.parametrize("name", ["flipped"])
def test_a_flipped_byte_is_found_replaced_and_recorded(outcomes, name):
    shard, ended = outcomes(name)
    ended.check_clean()
    assert ended.code == 0, ended.err
    events = [json.loads(line) for line in (ended.runs[0] / "events.jsonl").read_text().splitlines()]
    bad = [e for e in events if e["type"] == "data_quarantine"]
    assert len(bad) == 1 and bad[0]["shard"].endswith(shard) and bad[0]["chunk"] == 3
    assert bad[0]["expected"] != bad[0]["got"] and bad[0]["expected"].startswith("xxh3 ")
    assert "data: shard" in ended.out and "chunk 3" in ended.out
    served = [e for e in events if e["type"] == "data_substitute"]
    assert served, "its samples were served by others"
    place = served[0]["place"]
    told = phalanx(ended.runs[0], "data", "where", ended.runs[0], "--step", place // 2)
    assert "whose chunk was corrupt" in told.stdout, told.stderr
    assert told.stdout.rstrip().endswith("these are the bytes that the ranks trained on")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["truncated"])
def test_a_truncated_shard_is_found(outcomes, name):
    shard, ended = outcomes(name)
    assert ended.code == 0, ended.err
    events = [json.loads(line) for line in (ended.runs[0] / "events.jsonl").read_text().splitlines()]
    bad = [e for e in events if e["type"] == "data_quarantine"]
    assert bad and all(e["shard"].endswith(shard) for e in bad)


@pytest.mark.parametrize("name", ["deleted"])
def test_a_deleted_shard_stops_the_run_after_the_limit(outcomes, name):
    shard, ended = outcomes(name)
    ended.check_clean()
    assert ended.code == 1, ended.out
    for part in (
        "the data cannot be read any further",
        shard,
        "missing",
        "more than 8 are bad",
        "remedy: `phalanx data",
    ):
        assert part in ended.err, ended.err
    assert "File" not in ended.err  # it is not a bug, so there is no stack
    assert ended.summary["status"] == "failed"


def test_a_mixture_is_served_as_planned(tmp_path):
    rng = np.random.default_rng(2)
    for label in ("web", "code"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "a.txt").write_bytes(rng.integers(32, 127, 40_000, np.uint8).tobytes())
    inputs = [(label, str(tmp_path / label)) for label in ("web", "code")]
    build(inputs, tmp_path / "set", Bytes(), workers=1, chunk_items=256, shard_chunks=64)
    stages = "[{at=0,weights={web=0.75,code=0.25}},{at=401,weights={web=0.0,code=1.0}}]"
    values = TINY | {"data.source": tmp_path / "set", "train.steps": 300, "layout.tp": 1, "data.stages": stages}
    ended = train(tmp_path / "run", *sets(values))
    assert ended.code == 0, ended.err
    told = phalanx(tmp_path / "run", "data", "mix", "--json")
    assert told.returncode == 0, told.stderr
    rows = {(row["stage"], row["source"]): row for row in json.loads(told.stdout)}
    assert rows[0, "web"]["planned"] == 0.75 and abs(rows[0, "web"]["served"] - 0.75) < 0.1
    assert rows[0, "web"]["sequences"] + rows[0, "code"]["sequences"] == 401  # half a step
    assert rows[1, "web"]["sequences"] == 0 and rows[1, "code"]["sequences"] == 199
