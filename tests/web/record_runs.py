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
SIZES = "model.dim=32 model.num_layers=2 model.num_heads=2 model.num_kv_heads=2 model.ffn_dim=64 train.seq_len=64"
RUN = "train.steps=160 train.global_batch=8 train.micro_batch=2 data.max_mb=0.2 layout.tp=1 layout.replica=4"
FAST = "run.hang_timeout_s=2 recovery.restart_s=1 recovery.beat_s=0.5 checkpoint.memory_every_steps=20"
KEPT = ("job.json", "meta.json", "summary.json", "data.json", "metrics.jsonl", "events.jsonl", "ledger.jsonl")
OF_THIS_MACHINE = ("command", "folder", "user", "process", "code")
OF_A_HOST = ("interfaces", "system", "python", "memlock_bytes")


def main(folder: Path) -> None:
    runs = folder / "runs"
    if not runs.is_dir():
        command = [sys.executable, "-m", "phalanx.cli.main", "chaos", "run", "--seed", "3", "--faults", "5"]
        command += ["--kinds", "worker,node,hang,controller"]
        for field in f"{SIZES} {RUN} {FAST}".split():
            command += ["--set", field]
        subprocess.run(command, cwd=folder, check=True)
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
        text = path.read_text(errors="replace")
        path.write_text(re.sub(r"(?<=\")/[^\"\s]*?/(?=runs/|lib/python|src/phalanx/)", "/", text))


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
