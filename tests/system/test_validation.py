"""A run that validates, and meets a step that is not finite: both are in its record, and neither ends it."""

import json
from pathlib import Path

from tests.system.command import TINY, sets, train

FAULTY = Path(__file__).with_name("faulty.py")


def test_a_run_validates_keeps_the_best_and_skips_a_step_that_is_not_finite(tmp_path):
    (tmp_path / "held.txt").write_text("def held(out):\n    return out\n" * 40)
    fault = {"model.family": f"{FAULTY}:FAULTY", "model.options.what": '"not a number"', "model.options.rank": 0}
    values = TINY | fault | {"model.options.step": 1, "train.steps": 6, "checkpoint.keep_last": 1}
    values |= {"validation.sources": f'["{tmp_path / "held.txt"}"]', "validation.every_steps": 2}
    ended = train(tmp_path / "run", *sets(values))
    assert ended.code == 0, ended.err
    ended.check_clean()
    assert [row["step"] for row in ended.rows] == list(range(6))
    (skipped,) = [row for row in ended.rows if "skipped" in row]
    assert skipped["step"] == 1 and skipped["skipped"]["places"] == [[2, 4]]
    assert "step 1 was SKIPPED: the loss is nan" in ended.out and ended.summary["skipped_steps"] == 1
    (record,) = [line for line in (ended.runs[0] / "ledger.jsonl").read_text().splitlines() if "skipped" in line]
    assert json.loads(record)["step"] == 1

    events = [json.loads(line) for line in (ended.runs[0] / "events.jsonl").read_text().splitlines()]
    said = [event for event in events if event["type"] == "validation"]
    assert [event["step"] for event in said] == [2, 4, 6]
    assert all(event["tokens"] == said[0]["tokens"] and event["bits_per_byte"] > 0 for event in said)
    assert [row["validation_loss"] for row in ended.rows if "validation_loss" in row] == [e["loss"] for e in said]
    best = json.loads((ended.runs[0] / "checkpoints" / "best.json").read_text())
    assert best["loss"] == min(event["loss"] for event in said)
    kept = [path.name for path in (ended.runs[0] / "checkpoints").glob("step-*")]
    assert any(name.startswith(f"step-{best['step']:09d}") for name in kept)
    assert ended.summary["best_validation"]["step"] == best["step"]
