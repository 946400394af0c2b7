"""python -m tests.twin.soak --seeds A:B

Run small fleets with every kind of fault. Check the invariants of the control plane after every event, and at the end
that the waterfall adds up and that training continues. The exit status is 1 if one fails."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from random import Random

from phalanx.twin.gang_job import Job
from phalanx.twin.scenario import Scenario

HARSH = {
    "correlated.rack_per_rack_year": 200.0, "correlated.hall_per_hall_year": 400.0, "correlated.hall_gpus": 32.0,
    "correlated.storage_per_day": 6.0, "correlated.rollout_per_day": 6.0, "correlated.rollout_share": 0.3,
    "slow.link_per_1000_node_days": 2000.0, "slow.chip_per_1000_node_days": 500.0, "repair.swap_h": 0.5,
    "repair.switch_h": 0.2, "repair.rack_h": 0.2, "repair.hall_h": 0.2, "repair.rollout_h": 0.1, "planned.hours": 0.2,
    "contained.corrupt_detect_s": 120.0,
}  # fmt: skip


def draw(seed):
    rng = Random(seed)
    policy = rng.choice(["contained", "contained", "contained", "shrink", "hot", "restart"])
    return Scenario(
        name=f"seed {seed}", gpus=rng.choice([32, 64, 96]), hardware="h100", step_s=rng.choice([1.0, 5.0, 30.0]),
        days=0.1, policy=policy, quality=rng.choice([500.0, 2000.0, 6000.0]), spares=rng.choice([0.0, 0.1, 0.4]),
        age_days=rng.choice([0.0, 3650.0]), replica_gpus=rng.choice([8, 16]), params=1e9,
        micro_batches=rng.choice([1, 4]), switch_nodes=rng.choice([0, 1, 2, 3]), switch_slow=1.1,
        interval_s=rng.choice([0.0, 60.0, 600.0]), assume=HARSH,
    ).checked()  # fmt: skip


def run(seed):
    job = Job(draw(seed), seed, check=True)
    job.run()
    spent = job.progress.spent
    assert sum(spent.values()) == job.progress.now_ns, "the waterfall does not add up"
    assert min(spent.values()) >= 0, spent
    assert job.gang.phase != "ended", job.gang.desk.said
    return job


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:1000")
    first, last = map(int, parser.parse_args(argv).seeds.split(":"))
    began, failed, kinds, interruptions = time.monotonic(), [], Counter(), 0
    for seed in range(first, last):
        try:
            job = run(seed)
            interruptions += job.interruptions
            kinds.update(what for _, what, _ in job.incidents)
        except Exception:
            failed.append(seed)
            print(f"seed {seed}\n{traceback.format_exc()}", flush=True)
            if len(failed) >= 20:
                break
    took = time.monotonic() - began
    print(f"{last - first} seeds in {took:.0f} s: {interruptions} interruptions, {len(kinds)} kinds {dict(kinds)}; "
          f"{len(failed)} failed {failed[:50]}")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
