"""Each line of the arithmetic of very large runs, against the figures that everyone quotes."""

from __future__ import annotations

import pytest

from phalanx.hardware.catalogue import load_packaged
from phalanx.plan.report.arithmetic import lines

EXPECTED = [
    ("100,000 H100", {"nodes": 12_500, "peak": 100e18, "sustained": 40e18}, 0.02),
    ("state per parameter", {"bytes": 16, "tb_1t": 16, "tb_175b": 2.8, "gpus": 200}, 1e-9),
    ("an H100", {"memory_gb": 80, "memory_tb_per_s": 3.35, "nvlink_gb_per_s": 900, "gbit_per_s": 400,
                 "node_tbit_per_s": 3.2}, 1e-9),
    ("training FLOPs", {"flops": 6 * 1e12 * 15e12}, 1e-9),
    ("1T parameters at 4e19 FLOP/s", {"tokens_per_s": 6.7e6, "tokens_per_day": 5.76e11, "days": 26}, 0.01),
    ("global batch", {"tokens": 4e6}, 0.05),
    ("layout", {"gpus": 99_968}, 1e-9),
    ("bubble of 1F1B", {"share": 15 / 47, "formula": 15 / 47}, 1e-9),
    ("ring all-reduce", {"sent_8": 14 / 8, "sent_1024": 2046 / 1024, "ring_steps": 2046, "tree_steps": 20}, 1e-9),
    ("recovery of 20 min every 2 h", {"lost": 0.17}, 0.03),
    ("fleet MTBF, if a node lasts 5e4 h", {"nodes_100k": 0.5, "gpus_100k": 4}, 1e-9),
    ("fleet MTBF, as published", {"hours": 24 / (12_500 * 3.79e-3)}, 1e-3),
]  # fmt: skip


@pytest.fixture(scope="module")
def table():
    return {line.quantity: line for line in lines(load_packaged())}


@pytest.mark.parametrize("quantity, figures, tolerance", EXPECTED, ids=[e[0] for e in EXPECTED])
def test_line(table, quantity, figures, tolerance):
    for name, value in figures.items():
        assert table[quantity].figures[name] == pytest.approx(value, rel=tolerance), name
    assert table[quantity].formula and table[quantity].result


def test_there_is_no_line_without_a_test(table):
    assert set(table) == {e[0] for e in EXPECTED}


def test_the_printed_text_says_what_the_figures_say(table):
    assert "12,500 nodes, 99 EFLOP/s peak, 40 EFLOP/s" in table["100,000 H100"].result
    assert "16 bytes; 1T: 16 TB; 175B: 2.8 TB; 1T needs 200 GPUs" in table["state per parameter"].result
    assert "6.7M tokens/s, 5.76e+11 tokens/day, 15T tokens in 26 days" in table["1T parameters at 4e19 FLOP/s"].result
    assert table["layout"].result == "99,968 GPUs"
