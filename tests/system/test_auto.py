"""`phalanx train` without a layout: the planner chooses one, and must keep to what it reported."""

from __future__ import annotations

from tests.system.command import TINY, sets, train


def test_a_job_without_a_layout_is_planned_and_compared(tmp_path):
    values = {name: value for name, value in TINY.items() if not name.startswith(("layout.", "recovery."))}
    values = {
        "layout": "auto",
        "layout.ranks": 2,
        "recovery.spares": 0,
        **values,
        "train.steps": 4,
        "train.global_batch": 4,
    }
    ended = train(tmp_path, *sets(values), HOME=str(tmp_path))
    assert ended.code == 0, ended.err
    assert "planned: " in ended.out and "= 2 ranks" in ended.out
    assert "guess" in ended.out, "nothing was calibrated"
    assert "predicted" in ended.out.partition("forecast")[2] and "measured" in ended.out.partition("forecast")[2]
