"""`phalanx hardware`: the catalogue on a screen and for programs, and a user's own entries and mistakes."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests import forked


@pytest.fixture
def phalanx(tmp_path):
    def run(*args: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HOME": str(tmp_path)}
        return forked.phalanx("hardware", *args, env=env)

    return run


def test_ls_has_every_section_in_columns(phalanx):
    done = phalanx("ls")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line]
    assert next(line for line in lines if line[0] == "h100")[:4] == ["h100", "NVIDIA", "989", "1,979"]
    assert {"dgx-h100", "gb200-nvl72", "meta-llama3", "france"} <= {line[0] for line in lines}


def test_programs_get_si_units(phalanx):
    listed = json.loads(phalanx("ls", "--json").stdout)
    assert listed["nodes"]["dgx-h100"]["nic_bytes_per_s"] == 5e10 and listed["names"]["h100"] == "dgx-h100"
    shown = json.loads(phalanx("show", "H100", "--json").stdout)
    assert set(shown) == {"chip", "node"} and shown["chip"] == listed["chips"]["h100"]


def test_show_prints_figures_units_and_sources(phalanx):
    out = phalanx("show", "gb300").stdout
    assert "chip gb300" in out and "node gb300-nvl72" in out
    figures = {line.split()[0]: line.split()[1] for line in out.splitlines() if line.startswith("  ")}
    assert figures["scale_up.domain"] == "72" and figures["memory_gib"] == "276.5" and figures["price"] == "-"
    assert out.count("source: ") >= 4


def test_ones_own_entries_are_shown_too(phalanx, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[chips.mine]\nlike = "h100"\nwatts = 600\nsource = "our meter"\n')
    out = phalanx("show", "mine", "--hardware-file", str(path)).stdout
    assert "our meter" in out and "600" in out


@pytest.mark.parametrize(
    "args, said",
    [
        (("show", "h1000"), "did you mean h100"),
        (("ls", "--hardware-file", "none.toml"), "cannot be read"),
        (("show", "rail-ndr:x"), "no oversubscription"),
    ],
)
def test_mistakes_name_the_remedy(phalanx, args, said):
    done = phalanx(*args)
    assert done.returncode == 2 and said in done.stderr and "remedy:" in done.stderr
    assert "Traceback" not in done.stderr
