"""python -m tests.control.sim SEED                       one seed, told in full
python -m tests.control.sim --seeds A:B --jobs N        many; exit status 1 if one fails"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from tests.control.sim import seeds


def attempt(seed):
    try:
        return seed, seeds.run(seed), ""
    except Exception:
        return seed, None, traceback.format_exc()


def tell(seed):
    result = seeds.run(seed)
    for fault in result.faults:
        print(fault)
    times = zip(("productive", "stalled", "lost", "idle"), map(sum, zip(*result.accounts, strict=True)), strict=True)
    print(", ".join(f"{name} {time_ns / 1e9:.3f} s" for name, time_ns in times))
    counts = f"{result.steps} steps, {result.generations} generations, {result.undone} undone, {result.events} events"
    print(f"seed {seed}: {result.cause}: {result.ended}; {counts}, digest {result.digest}")


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", default="0:1000")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args(argv)
    if args.seed is not None:
        return tell(args.seed)
    first, last = map(int, args.seeds.split(":"))
    began, failed, faults, rungs, ended, events, undone = time.monotonic(), [], 0, Counter(), Counter(), 0, 0
    with ProcessPoolExecutor(args.jobs) as pool:
        for seed, result, error in pool.map(attempt, range(first, last), chunksize=50):
            if result is None:
                failed.append(seed)
                print(f"python -m tests.control.sim {seed}\n{error}", flush=True)
            else:
                faults += len(result.faults)
                events += result.events
                undone += result.undone
                rungs.update(result.rungs)
                ended[result.cause] += 1
    print(f"{last - first} seeds in {time.monotonic() - began:.0f} s: {faults} faults, {events} events, {undone} steps "
          f"undone by a recorded branch; rungs {dict(sorted(rungs.items()))}; {dict(ended)}; "
          f"{len(failed)} failed {failed[:50]}")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
