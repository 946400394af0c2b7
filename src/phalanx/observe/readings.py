"""Readings of hosts and devices (load, memory, power, heat, errors): their names, and how those of many nodes are
merged. They travel with the steps (`observe.fold`), so they need no messages of their own."""

from __future__ import annotations

from typing import Any, NamedTuple

Readings = dict[str, list[float]]  # name -> count, sum, least, its rank, most, its rank


class About(NamedTuple):
    help: str
    metric: str  # its name for Prometheus, with the unit
    unit: str  # Grafana's name of it
    worst: str  # "min" or "max": the end at which trouble shows


READINGS = {
    "host_cpu": About("Share of a host's cores that is busy.", "host_cpu_ratio", "percentunit", "max"),
    "host_memory": About("Share of a host's memory that is used.", "host_memory_ratio", "percentunit", "max"),
    "host_network": About("Bytes that a host sends and receives.", "host_network_bytes_per_second", "Bps", "max"),
    "device_busy": About("Share of time in which a device computes.", "device_busy_ratio", "percentunit", "min"),
    "device_memory": About("Share of a device's memory that is used.", "device_memory_ratio", "percentunit", "max"),
    "device_power": About("Power that a device draws.", "device_power_watts", "watt", "max"),
    "device_heat": About("Temperature of a device.", "device_temperature_celsius", "celsius", "max"),
    "device_clock": About("Clock of a device's processors.", "device_clock_hertz", "hertz", "min"),
    "device_tensor": About("Share of time in which tensor cores compute.", "device_tensor_ratio", "percentunit", "min"),
    "device_throttle": About("Looks at which a node's devices were slowed down.", "device_throttles", "short", "max"),
    "device_ecc": About("Memory errors and Xids of a node's devices, weighted.", "device_ecc_errors", "short", "max"),
    "device_link_errors": About("Link errors and Xids of a node's devices.", "device_link_errors", "short", "max"),
}


def of_rank(rank: int, values: dict[str, float]) -> Readings:
    """Return the readings of a rank's node as those of one rank."""
    return {name: [1, value, value, rank, value, rank] for name, value in values.items() if name in READINGS}


def merged(a: Readings, b: Readings) -> Readings:
    """Merge the readings of all ranks of both. If two ends are equal, the lower rank is named."""
    out = dict(a)
    for name, theirs in b.items():
        mine = a.get(name)
        if mine:
            low, high = min(mine[2:4], theirs[2:4]), min(mine[4:], theirs[4:], key=lambda end: (-end[0], end[1]))
            theirs = [mine[0] + theirs[0], mine[1] + theirs[1], *low, *high]
        out[name] = theirs
    return out


def row_of(readings: Readings) -> dict[str, dict[str, Any]]:
    """Format readings as a row of the run record."""
    return {
        name: {"mean": total / count, "min": low, "min_rank": int(low_at), "max": high, "max_rank": int(high_at)}
        for name, (count, total, low, low_at, high, high_at) in readings.items()
    }


def worst(row: dict[str, Any], name: str) -> float | None:
    """Return the extreme of a reading at which trouble shows first, from a row of the record."""
    found = (row.get("readings") or {}).get(name)
    return found[READINGS[name].worst] if found else None
