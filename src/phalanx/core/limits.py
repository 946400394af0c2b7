"""Find how much memory and how many cores this process may use: the machine's, or what its control group is given (a
container, a Slurm step, a systemd slice), whichever is less. If groups are nested, the tightest limit counts."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
MEMINFO = Path("/proc/meminfo")
# The limit and its use, for control groups of version 2 and of version 1.
FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


def limit_bytes() -> int:
    """Return the memory that this process may ever use."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *(limit for limit, _ in _limits())])


def available_bytes() -> int:
    """Return the memory that is free for this process now."""
    return min([_machine_available(), *(max(0, limit - used) for limit, used in _limits())])


def num_cores() -> int:
    """Return the cores that this process may keep busy: those it may run on, or fewer if its group has a quota."""
    return max(1, min([len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in _quotas())]))


def _quotas() -> Iterator[float]:
    """Yield quotas as a number of cores, for control groups of version 2 and 1. No quota is "max", or below 0."""
    for folder in _folders("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            yield int(quota) / int(period)
        with contextlib.suppress(OSError, ValueError):
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                yield int(quota) / int(period)


def _machine_available() -> int:
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _limits() -> Iterator[tuple[int, int]]:
    for folder in _folders("memory"):
        for limit, used in FILES:
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                yield int((folder / limit).read_text()), _reclaimed(folder, int((folder / used).read_text()))


def _reclaimed(folder: Path, used: int) -> int:
    """Return the memory in use without the page cache, which gives way."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.split()[0] in ("inactive_file", "total_inactive_file"):
                return max(0, used - int(line.split()[1]))
    return used


def _folders(kind: str) -> list[Path]:
    """List the groups that this process is in, each inside the next. In a container only the first one is seen."""
    found = [CGROUPS, CGROUPS / kind]
    with contextlib.suppress(OSError):
        for line in OWN.read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds and kind not in kinds.split(","):
                continue
            here = (CGROUPS / kind if kinds else CGROUPS) / path.lstrip("/")
            found += [here, *here.parents]
    return list(dict.fromkeys(folder for folder in found if folder.is_relative_to(CGROUPS)))
