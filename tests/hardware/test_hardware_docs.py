from __future__ import annotations

import re
from pathlib import Path

from phalanx.hardware import load
from phalanx.hardware.docs import hardware_page

PAGE = Path(__file__).parents[2] / "docs" / "hardware.md"


def test_the_page_is_the_one_that_the_code_writes():
    assert PAGE.read_text(encoding="utf-8") == hardware_page(), "run `python -m phalanx.hardware.docs`"


def test_the_example_of_the_page_loads(tmp_path):
    example = re.search(r"```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert example
    path = tmp_path / "example.toml"
    path.write_text(example[1], encoding="utf-8")
    made = load(path).cluster("h100", 512, site="our-hall")
    assert made.node.name == "our-h100" and made.node.nics == 4
    assert made.fabric.tier_of(64).bytes_per_s_factor == 1 / 3
