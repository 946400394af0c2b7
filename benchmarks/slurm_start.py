"""From `phalanx train --on slurm` to the first step on 16 nodes, by phase: 15 that train and a spare, virtual nodes of
a real Slurm on this machine (root, Debian's slurm-wlm and munge).

Bar: every phase is reported, and all 15 ranks are on their nodes in the order of the topology.
"""

from __future__ import annotations

import os
import tempfile
import time
from datetime import datetime
from pathlib import Path

from common import SMOKE, finish, machine, options
from first_step import PHASES, phases_of

from tests.engines.submitted import Training
from tests.engines.virtual_slurm import VirtualSlurm, why_not

NODES = 3 if SMOKE else 16


def measure(folder: Path) -> tuple[dict[str, float], bool]:
    os.environ["OMP_NUM_THREADS"] = "1"  # the nodes share the cores of this machine
    (folder / "slurm").mkdir()
    values = {"train.steps": 3, "layout.replica": NODES - 1, "recovery.spares": 1, "checkpoint.every_steps": -1}
    with VirtualSlurm(folder / "slurm", NODES) as slurm:
        submitted = time.time()
        run = Training(folder / "work", "start", "--on", "slurm", env=slurm.env, **values)
        assert run.end() == 0, run.told()
        job = slurm.run("squeue", "--noheader", "--states=all", "--format=%i %S").split()
    began = max(submitted, datetime.fromisoformat(job[1]).timestamp())  # Slurm reports whole seconds
    found = {"submit and queue": began - submitted} | phases_of(run.read("events.jsonl"), began)
    order = [run.at_work()[rank] for rank in range(NODES - 1)]
    return found, order == slurm.names[: NODES - 1]


def main() -> None:
    options(__doc__).parse_args()
    print(machine())
    if lacking := why_not():
        print(f"not measured: {lacking}")
        finish("slurm_start", False, reason=lacking)
    with tempfile.TemporaryDirectory() as folder:
        phases, in_order = measure(Path(folder))
    for name, spent in phases.items():
        print(f"{name:<20} {spent:8.2f} s")
    told = set(phases) == {"submit and queue", *PHASES}
    finish("slurm_start", told and in_order, nodes=NODES, in_order=in_order, **{f"{k} s": v for k, v in phases.items()})


if __name__ == "__main__":
    main()
