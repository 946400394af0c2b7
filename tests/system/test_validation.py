"""A run that validates, and has a step that is not finite: both are in its record, and neither ends it. The validation
leaves no trace in what is trained."""

import hashlib
import json
from pathlib import Path

from phalanx.checkpoint.catalog import Catalog
from phalanx.core.store import Folder
from tests.system.command import TINY, sets, train

FAULTY = Path(__file__).with_name("faulty.py")


def test_a_run_validates_keeps_the_best_and_skips_a_step_that_is_not_finite(tmp_path):
    (tmp_path / "held.txt").write_text("def held(out):\n    return out\n" * 40)
    fault = {"model.family": f"{FAULTY}:FAULTY", "model.options.what": '"not a number"', "model.options.rank": 0}
    values = TINY | fault | {"model.options.step": 1, "train.steps": 6, "checkpoint.keep_last": 1}
    validated = {"validation.sources": f'["{tmp_path / "held.txt"}"]', "validation.every_steps": 2}
    ended = train(tmp_path / "run", *sets(values | validated))
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

    plain = train(tmp_path / "plain", *sets(values))
    assert plain.code == 0, plain.err
    assert state_of(plain.runs[0]) == state_of(ended.runs[0]), "a validation has changed the training"


def state_of(run: Path) -> tuple:
    """Return everything that the run has trained: the ledger with the bits of every loss and norm, the cursor, weights,
    moments."""
    reader = Catalog(Folder(run / "checkpoints")).newest_good()
    manifest = reader.manifest
    digests = {
        name: hashlib.sha256(reader.read(name).tobytes()).hexdigest()
        for name in (entry.held.name for entry in manifest.entries)
    }
    kinds = {name.partition("/")[0] for name in digests}
    assert "weights" in kinds and len(kinds) > 1, kinds
    return (run / "ledger.jsonl").read_text(), manifest.step, manifest.cursor, manifest.recent, digests
