"""CPU seconds on one core for 54 days of a fleet with the real control machines: 16,384 GPUs and 1,000,000 GPUs in
replicas of 2,048; and how that grows with events. `--days N`: fewer days of the million, scaled up.

Bar: 16,384 GPUs in at most 10 s, 1,000,000 in at most 180 s.
"""

from __future__ import annotations

import time

import common
from common import SMOKE, finish

from phalanx.control import invariants
from phalanx.twin.gang_job import Job
from phalanx.twin.scenario import Scenario, load


def cost(scenario: Scenario) -> tuple[float, float, int]:
    """Return the CPU seconds for the start (with the last check of the invariants) and for the run, and the number of
    generations formed."""
    began = time.process_time()
    job = Job(scenario, 0)
    started = time.process_time()
    job.run()
    ended = time.process_time()
    invariants.check(job.gang)
    return started - began + time.process_time() - ended, ended - started, job.gang.generation


def main() -> None:
    parser = common.options(__doc__)
    parser.add_argument("--days", type=float, default=54.0)
    days = 0.02 if SMOKE else parser.parse_args().days
    cases = {
        "16,384, all stop": load("llama3-16k"),
        "16,384, contained": load("llama3-16k-contained"),
        "98,304, contained": load("100k-h100-1t").changed("days=5"),
    }
    if SMOKE:
        cases = {"16,384, all stop": load("llama3-16k").changed("days=1")}
    rows = {name: (*cost(case), case.days) for name, case in cases.items()}
    million = load("llama3-16k-contained" if SMOKE else "1m-gpus").changed(f"days={days}")
    rows["1,000,000, contained"] = (*cost(million), days)
    print(f"{'GPUs':22} {'days':>6} {'start s':>8} {'run s':>8} {'54 days s':>10} {'generations':>12} {'ms each':>8}")
    whole = {}
    for name, (start, run, generations, simulated) in rows.items():
        whole[name] = start + run * 54 / simulated
        each = f"{generations:12,} {1e3 * run / generations:8.2f}"
        print(f"{name:22} {simulated:6g} {start:8.2f} {run:8.2f} {whole[name]:10.1f} {each}")
    ok = (
        whole["16,384, all stop"] <= 10
        and whole.get("16,384, contained", 0) <= 10
        and whole["1,000,000, contained"] <= 180
    )
    finish("twin_speed", ok, cpu_s={name: round(s, 1) for name, s in whole.items()}, million_days=days)


if __name__ == "__main__":
    main()
