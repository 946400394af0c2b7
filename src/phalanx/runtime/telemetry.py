"""Readings of a node's host, from /proc, and of its devices, from NVML (see `observe.readings`)."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import mean

from phalanx.observe.readings import READINGS
from phalanx.runtime.health import Health, Monitor


class Telemetry:
    """`values`: the last readings. Several devices are combined by their mean, or by the value that shows trouble
    first."""

    def __init__(self, health: Health | Monitor, proc: Path = Path("/proc"), every_s: float = 5.0):
        self.values: dict[str, float] = {}
        self._health, self._proc, self._every_s = health, proc, every_s
        self._at = float("-inf")
        self._before: tuple[float, float, float, float] | None = None  # seconds, bytes, ticks busy and in all

    def look(self) -> None:
        now = time.monotonic()
        if now < self._at + self._every_s:
            return
        self._at = now
        try:
            found = self._host(now)
        except (OSError, ValueError, IndexError):  # another kernel than we know
            found = {}
        devices = self._health.readings()
        for name in (name for name in READINGS if name.startswith("device_")):
            of_devices = [readings[name] for readings in devices if name in readings]
            if of_devices:
                worst = {"min": min, "max": max}[READINGS[name].worst]
                found[name] = (mean if name in ("device_busy", "device_tensor") else worst)(of_devices)
        if devices:  # what a node's devices have counted since it joined
            found |= {f"device_{sign}": float(count) for sign, count in self._health.counts.items()}
        self.values = {name: value for name, value in found.items() if name in READINGS}

    def _host(self, now: float) -> dict[str, float]:
        memory = dict(line.split(":") for line in (self._proc / "meminfo").read_text().splitlines())
        total, free = (float(memory[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
        ticks = [float(each) for each in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        idle = ticks[3] + ticks[4]  # idle, and waiting for a disk
        sent = 0.0
        for line in (self._proc / "net" / "dev").read_text().splitlines()[2:]:
            name, _, counts = line.partition(":")
            if name.strip() != "lo":
                sent += float(counts.split()[0]) + float(counts.split()[8])
        before, self._before = self._before, (now, sent, sum(ticks) - idle, sum(ticks))
        found = {"host_memory": 1 - free / total}
        if before and self._before[3] > before[3]:
            found["host_cpu"] = (self._before[2] - before[2]) / (self._before[3] - before[3])
            found["host_network"] = max(0.0, sent - before[1]) / (now - before[0])
        return found
