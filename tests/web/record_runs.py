"""Make recorded.tar.gz: the records of two real runs of one job, one of them with faults. Run it again when the
format of a record changes:

    python -m tests.web.record_runs"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ARCHIVE = Path(__file__).with_name("recorded.tar.gz")
# A mixture of experts on two sources, whose shares change on the way, with a held-out part of both.
JOB = """
name = "quickstart"
[model]
preset = "tiny"
family = "moe"
dim = 64
num_layers = 4
num_heads = 4
num_kv_heads = 4
ffn_dim = 128
expert_dim = 64
[layout]
replica = 4
ranks_per_node = 2
[train]
steps = 160
seq_len = 128
global_batch = 8
micro_batch = 2
reduction = "exact"
[optimizer]
lr = 3e-3
[data]
source = "set"
[[data.stages]]
at = 0
weights = { prose = 0.75, code = 0.25 }
[[data.stages]]
at = 640
weights = { prose = 0.25, code = 0.75 }
[validation]
held_out = 0.05
every_steps = 40
sequences = 16
[recovery]
spares = 1
restart_s = 1
beat_s = 0.5
[checkpoint]
memory_every_steps = 20
[run]
hang_timeout_s = 4
share_devices = true
"""
SOURCES = ("prose=docs/recovery.md", "code=src/phalanx/core")
KEPT = ("job.json", "meta.json", "summary.json", "data.json", "metrics.jsonl", "events.jsonl", "ledger.jsonl")
OF_THIS_MACHINE = ("command", "folder", "user", "process", "code")
OF_A_HOST = ("interfaces", "system", "python", "memlock_bytes")


def main(folder: Path) -> None:
    runs = folder / "runs"
    if not runs.is_dir():
        phalanx = [sys.executable, "-m", "phalanx.cli.main"]
        build = [*phalanx, "data", "build", *SOURCES, "--out", str(folder / "set"), "--tokenizer", "byte"]
        subprocess.run(build, cwd=ARCHIVE.parents[2], check=True)
        (folder / "job.toml").write_text(JOB)
        chaos = [*phalanx, "chaos", "run", "job.toml", "--seed", "3", "--faults", "5"]
        subprocess.run([*chaos, "--kinds", "worker,node,hang,controller"], cwd=folder, check=True)
    with tarfile.open(ARCHIVE, "w:gz", compresslevel=9) as archive:
        for run in sorted(path for path in runs.iterdir() if path.is_dir() and not path.name.startswith(".")):
            _scrub(run)
            kept = [run / name for name in KEPT] + sorted(run.glob("ranks/*")) + sorted(run.glob("logs/*/rank-*.log"))
            for path in kept:
                archive.add(path, str(path.relative_to(runs)), filter=_anonymous)


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _scrub(run: Path) -> None:
    """Leave out what is about the machine, not about the run."""
    meta = json.loads((run / "meta.json").read_text())
    (run / "meta.json").write_text(json.dumps({k: v for k, v in meta.items() if k not in OF_THIS_MACHINE}, indent=2))
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lines = [{k: v for k, v in line.items() if k not in OF_A_HOST} for line in lines]
    (run / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for path in (*run.glob("*.json*"), *run.glob("logs/*/*.log")):
        text = path.read_text(errors="replace").replace(f"{run.parent.parent}/", "/")
        path.write_text(re.sub(r"(?<=[\"(])/[^\"\s]*?/(?=runs/|lib/python|src/phalanx/)", "/", text))


def unpack(folder: Path) -> Path:
    """The recorded runs, in a folder of the caller's."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
