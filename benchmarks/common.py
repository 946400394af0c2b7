"""Shared parts of the benchmarks: the options, the machine in one line, a bootstrap interval, the closing JSON line.

Every benchmark has a smoke mode, which `make test` runs: the same code at sizes (`... if SMOKE else ...`) that take
seconds, to show that it still works. Its figures mean nothing, so a smoke run is never `ok`, and ends with status 0."""

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # tests.pool serves the benchmarks too
from tests.signals import give_children_defaults

give_children_defaults()

SMOKE = "--smoke" in sys.argv


def options(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for the options that all benchmarks have; a benchmark may add its own."""
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=kind, allow_abbrev=False)
    parser.add_argument("--smoke", action="store_true", help="run all of it in seconds, at sizes that show no figure")
    return parser


def machine() -> str:
    model = "unknown CPU"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {model}, Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"


def bootstrap(values, rounds=4000, seed=0) -> tuple[float, float, float]:
    """Return the median with its 95 % bootstrap interval."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(rounds))
    return statistics.median(values), medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


def finish(name: str, ok: bool, **figures) -> None:
    """Print the last line as JSON, and exit with a status."""
    print(json.dumps({"name": name, "ok": ok and not SMOKE, "smoke": SMOKE, **figures}))
    sys.exit(0 if ok or SMOKE else 1)
