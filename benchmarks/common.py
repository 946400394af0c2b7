"""What the benchmarks share: the machine in one line, a bootstrap interval, the closing JSON line."""

import json
import os
import platform
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests.pool serves the benchmarks too


def machine() -> str:
    import torch

    model = "unknown CPU"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}, Python {platform.python_version()}, torch {torch.__version__}"


def bootstrap(values, rounds=4000, seed=0) -> tuple[float, float, float]:
    """Median with its 95 % bootstrap interval."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(rounds))
    return statistics.median(values), medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def finish(name: str, ok: bool, **figures) -> None:
    """The last line, for machines; the exit status, for scripts."""
    print(json.dumps({"name": name, "ok": ok, **figures}))
    sys.exit(0 if ok else 1)
