"""Policies on the Philly trace: 68,510 jobs of October and November 2017 on one pool of 576 and of 528 GPUs, in nodes
of 8. Mean completion times of FIFO, EASY with perfect estimates and SJF were computed independently; ours must agree
within 1 %. The gang scheduler, which knows no durations, must be at least as good as EASY, which knows them.

The trace is not shipped: a CSV file with the columns job_id, submit_s (0 is 2017-09-04 10:30:41), gpus, duration_s, vc,
as in siasosp23/artifacts, sia-simulator/traces/philly.csv, which is derived from msr-fiddle/philly-traces (CC-BY-4.0).
Without it a trace is drawn, whose figures are not judged."""

from common import SMOKE, finish, machine, options  # isort: skip

import random
from pathlib import Path

from phalanx.twin.replay import driver, figures, machines, trace

BEGIN_S, END_S = 2_294_959, 7_565_359  # October and November
KNOWN = {576: {"fifo": 111_132, "easy": 22_333, "sjf": 15_050}, 528: {"fifo": 235_942, "easy": 34_960, "sjf": 16_877}}
TOLERANCE = 0.01


def drawn() -> trace.Trace:
    draw = random.Random(0)
    rows = [
        f"{i},{draw.randrange(100_000)},{draw.choice((1, 1, 1, 2, 8))},{draw.randrange(60, 9000)}" for i in range(200)
    ]
    return trace.parse(["job_id,submit_s,gpus,duration_s", *rows], "drawn")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--trace", type=Path)
    asked = parser.parse_args()
    print(machine())
    real = bool(asked.trace) and not SMOKE
    jobs = trace.read(asked.trace).between(BEGIN_S, END_S) if real else drawn()
    found, ok = {}, real and len(jobs.jobs) == 68_510
    for gpus, known in KNOWN.items():
        where, means = machines.of_gpus(gpus if real else 32), {}
        for policy in (*known, driver.PHALANX):
            said = figures.report(jobs, where, policy, driver.replay(where, jobs.jobs, policy))
            means[policy] = said["completion_s"]["mean"]
            off = f", {means[policy] / known[policy] - 1:+.2%} of {known[policy]:,}" if policy in known and real else ""
            print(f"{gpus} GPUs, {policy}: {means[policy]:,.0f} s{off}", flush=True)
            ok = ok and abs(means[policy] / known.get(policy, means[policy]) - 1) <= TOLERANCE
        ok = ok and means[driver.PHALANX] <= min(means["easy"], known["easy"])
        found[gpus] = means
    finish("schedule_replay", ok, real_trace=real, jobs=len(jobs.jobs), mean_completion_s=found, tolerance=TOLERANCE)


if __name__ == "__main__":
    main()
