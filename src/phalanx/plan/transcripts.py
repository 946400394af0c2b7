"""Runs the commands that a page shows and puts in what they print, and the table of picks, so that the page shows what
was just seen: `python -m phalanx.plan.transcripts docs/planning.md` in the root of the repository. A block begins with
`$ phalanx`; a command ends with its line, or goes on after a backslash."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import resources
from pathlib import Path

from phalanx.hardware.catalogue import load_packaged
from phalanx.plan.quality import picks

TABLE = re.compile(r"(\| model \| chips [^\n]*\n\|---[^\n]*\n)(?:\|[^\n]*\n)*")
BLOCK = re.compile(r"```\n\$ (phalanx (?:[^\n]*\\\n)*[^\n]*)\n.*?```", re.S)


def refreshed(page: str) -> str:
    page = TABLE.sub(lambda table: table[1] + _picks(), page)
    return BLOCK.sub(lambda block: f"```\n$ {block[1]}\n{_output(block[1])}```", page)


def _picks() -> str:
    with resources.as_file(resources.files("phalanx.plan") / "published_runs.csv") as path:
        found = picks(path, load_packaged())
    rows = (
        f"| {p.model} | {p.gpus:,} x {p.chip} | {p.layouts} | +{p.spread:.0%} | +{p.regret:.1%} | "
        f"+{p.left_out_regret:.0%} |\n"
        for p in found
    )
    return "".join(rows)


def _output(command: str) -> str:
    words = shlex.split(command.replace("\\\n", " "))
    program = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(program, capture_output=True, encoding="utf-8", env=env, check=False)
    return done.stdout + done.stderr


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
