"""The five-axis example through the command: eight ranks and one train alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.command import sets, train

EXAMPLE = Path(__file__).parents[2] / "examples" / "moe-5-axes.toml"
SHORT = {"train.steps": 3, "train.precision": "fp64", "train.seq_len": 64, "train.global_batch": 8, "data.max_mb": 1}
ONE = {"layout.pp": 1, "layout.cp": 1, "layout.tp": 1, "layout.ep": 1}


@pytest.mark.slow
def test_the_loss_curve_is_that_of_one_process(tmp_path):
    eight = train(tmp_path / "eight", EXAMPLE, *sets(SHORT))
    one = train(tmp_path / "one", EXAMPLE, *sets(SHORT | ONE))
    for ended in (eight, one):
        ended.check_clean()
        assert ended.code == 0, ended.err
    assert "pp 2 x shard 1 x cp 2 x tp 2, ep 4 = 8 ranks" in eight.out
    assert "= 1 rank" in one.out
    for key in ("loss", "grad_norm", "target_tokens", "lr"):
        curves = [[row[key] for row in ended.rows] for ended in (eight, one)]
        assert len(curves[0]) == 3 and curves[0] == pytest.approx(curves[1], rel=1e-10), key
