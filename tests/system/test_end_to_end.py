"""A short quickstart, twice, from the command to its record; and what a pipe gets of its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.observe.phases import PHASES
from phalanx.observe.record import RunRecord
from tests.runtime.conftest import wait_gone
from tests.system.command import PHALANX, TINY, sets, train

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 6
SHORT = {
    "train.steps": STEPS,
    "train.seq_len": 64,
    "train.global_batch": 4,
    "train.micro_batch": 2,
    "data.max_mb": 1,
}


def head(directory):
    """Run `phalanx train | head -1`: the reader goes away while the run starts."""
    command = f"set -o pipefail; {PHALANX} train {' '.join(sets(TINY))} | head -1"
    env = {**os.environ, "PHALANX_TOKEN": (token := f"head-{directory.name}-{os.getpid()}")}
    done = subprocess.run(["bash", "-c", command], cwd=directory, env=env, capture_output=True, text=True, timeout=300)
    return done, wait_gone(token, 3.0), [RunRecord.open(path) for path in (directory / "runs").glob("[!.]*")]


SCENARIOS = {
    "first": lambda d: train(d, *sets(SHORT)),
    "second": lambda d: train(d, *sets(SHORT), NO_COLOR="1"),
    "head": head,
}


@pytest.mark.parametrize("name", ["first"])
def test_a_run_from_its_command_to_its_record(outcomes, name):
    ended = outcomes(name)
    ended.check_clean()
    assert ended.code == 0, ended.err
    assert ended.err == ""
    record = RunRecord.open(ended.runs[0])
    rows = list(record.metrics())
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert rows[-1]["loss"] < rows[0]["loss"] - 1
    assert 0 < rows[0]["mfu"] < 1 and rows[0]["tokens_per_s"] > 0
    assert not rows[0]["phases"], "those of the step before it, on the device"
    assert list(rows[-1]["phases"]) == list(PHASES) and min(rows[-1]["phases"][n] for n in ("forward", "backward")) > 0
    summary = record.summary
    assert summary["status"] == "done" and summary["steps"] == STEPS
    assert [sorted(d) for d in summary["digests"]] == [["optimizer", "weights"]] * 4
    assert summary["first_loss"] == rows[0]["loss"]
    assert record.job["job"]["train"]["steps"] == STEPS and record.job["origins"]["train.steps"] == "--set"
    assert record.meta["promise"].startswith("bit-identical for any replica x shard x pp split")
    for part in ("4 ranks", record.path.name, "parameters", f"step {STEPS}/{STEPS}", "tokens/s", "MFU", "ETA"):
        assert part in ended.out
    assert f"unigram entropy  {summary['unigram_entropy']:.3f} nats; the loss is" in ended.out


@pytest.mark.parametrize("name", ["second"])
def test_the_same_job_gives_the_same_bits(outcomes, name):
    first, second = outcomes("first"), outcomes(name)
    assert [row["loss"].hex() for row in first.rows] == [row["loss"].hex() for row in second.rows]
    assert [row["grad_norm"].hex() for row in first.rows] == [row["grad_norm"].hex() for row in second.rows]
    assert first.summary["digests"] == second.summary["digests"]
    assert len(set(map(json.dumps, first.summary["digests"]))) == 2, "two replicas hold the same two slices"


@pytest.mark.parametrize("name", ["second"])
def test_output_that_is_no_terminal_is_plain_lines(outcomes, name):
    out = outcomes(name).out
    assert out.isprintable() or set(out) - {"\n"} <= set(map(chr, range(32, 127)))
    assert not [line for line in out.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("name", ["head"])
def test_a_reader_that_goes_away_stops_the_run(outcomes, name):
    done, left, records = outcomes(name)
    assert done.stdout == "quickstart on replica 1 x shard 1 x tp 2 = 2 ranks\n"
    assert done.stderr == "" and done.returncode != 0
    assert left == {}
    assert [r.summary["status"] for r in records] == ["stopped"]


def test_the_library_trains_a_model_of_ones_own(tmp_path):
    """A script calls `phalanx.train` without any guard around it, with the example's family."""
    options = {"dim": 16, "heads": 2, "layers": 1, "context": 32}
    job = {
        "model": {"family": f"{EXAMPLES / 'custom_model.py'}:FAMILY", "options": options},
        "layout": {"shard": 2, "tp": 2},
        "train": {"steps": 2, "seq_len": 32, "global_batch": 4},
        "data": {"max_mb": 0.1},
    }
    script = tmp_path / "script.py"
    script.write_text(f"import json, phalanx\nprint(json.dumps(phalanx.train({job!r}).summary))\n")
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["status"] == "done" and summary["steps"] == 2
    assert summary["last_loss"] < summary["first_loss"]
    assert "12,305 parameters in fp32" in done.stdout
    assert Path(tmp_path, summary["run_dir"], "summary.json").exists()


@pytest.mark.slow
def test_exact_gives_the_same_bits_over_splits_with_nothing_else_set(tmp_path):
    """With the command, a rank derives its number of threads from the number of ranks: that must not show."""
    options = {"train.steps": 3, "train.micro_batch": 2, "train.global_batch": 4, "data.max_mb": 1}
    options |= {"train.reduction": "exact", "layout.tp": 1}  # sequences long enough for threads to show
    seen = {}
    for replica, shard, per_node in ((1, 1, 0), (2, 1, 1)):
        directory = tmp_path / f"{replica}x{shard}"
        directory.mkdir()
        layout = {"layout.replica": replica, "layout.shard": shard, "layout.ranks_per_node": per_node}
        ended = train(directory, *sets({**options, **layout}))
        assert ended.code == 0, ended.err
        seen[replica, shard] = [(row["loss"], row["grad_norm"]) for row in ended.rows]
    assert len(seen[1, 1]) == 3 and all(rows == seen[1, 1] for rows in seen.values()), seen
