"""Run the commands that a page shows and update their output and the table of picks in it. Run `python -m
phalanx.plan.lab.transcripts docs/planning.md` in the root of the repository. A block begins with `$ phalanx`; a command
ends with its line, or continues after a backslash."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from phalanx.hardware.catalogue import load_packaged
from phalanx.plan.lab.picks import picks
from phalanx.plan.lab.reading import packaged

TABLE = re.compile(r"(\| model \| chips [^\n]*\n\|---[^\n]*\n)(?:\|[^\n]*\n)*")
BLOCK = re.compile(r"```\n\$ (phalanx (?:[^\n]*\\\n)*[^\n]*)\n.*?```", re.S)


def refreshed(page: str) -> str:
    page = TABLE.sub(lambda table: table[1] + _picks(), page)
    return BLOCK.sub(lambda block: f"```\n$ {block[1]}\n{_output(block[1])}```", page)


def _picks() -> str:
    rows = (
        f"| {p.model} | {p.gpus:,} x {p.chip} | {p.layouts} | +{p.spread:.0%} | +{p.regret:.1%} |\n"
        for p in picks(packaged(), load_packaged())
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
