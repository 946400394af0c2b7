"""Warnings from the devices of a node, as counts that only grow: the signs of `control.policy.WARNINGS` that NVML
knows. Without its Python package, or without a GPU, there is nothing to report.

A driver's library may crash, and may hang while a device falls off the bus, so NVML is asked in a process of its own
(`python -m phalanx.runtime.health`): a node that loses it only knows less. There are many counters of links, so each
look reads those of one device.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from phalanx.control.policy import WARNINGS
from phalanx.runtime import kernel

# NVIDIA's Xid errors that speak of the device and not of the program on it.
XIDS_MEMORY = {48, 63, 64, 92, 94, 95}  # double-bit errors, rows that were or could not be remapped, contained errors
XIDS_LINK = {74, 79}  # NVLink; the device fell off the bus

LOOK_S, STALE_S = 1.0, 30.0
LIVES, PAUSE_S = 4, 10.0  # how often the process is started, and how long the first pause is


class Monitor:
    """The process, as its node sees it: `look` yields (sign, count) for what has grown, `readings` returns the last
    readings of each device. Neither waits."""

    def __init__(self, command: tuple[str, ...] = (sys.executable, "-P", "-m", __name__), lives: int | None = None):
        """`lives`: how often the process is started at most; None: LIVES times, or never without the package."""
        self.counts = dict.fromkeys(WARNINGS, 0)
        self._command, self._lives = command, (LIVES if can_ask() else 0) if lives is None else lives
        self._process: subprocess.Popen[bytes] | None = None
        self._again_at, self._heard_at, self._text = float("-inf"), float("-inf"), b""
        self._last, self._devices = dict.fromkeys(WARNINGS, 0), list[dict[str, float]]()

    def look(self) -> Iterator[tuple[str, int]]:
        for said in self._hear():
            self._heard_at, self._devices = time.monotonic(), said["devices"]
            for sign, count in said["counts"].items():
                grown, self._last[sign] = count - self._last[sign], count
                if grown > 0:
                    self.counts[sign] += grown
                    yield sign, self.counts[sign]

    @property
    def alive(self) -> bool:
        """Return whether there is more to hear, now or after a pause."""
        return self._process is not None or self._lives > 0

    def readings(self) -> list[dict[str, float]]:
        return self._devices if time.monotonic() < self._heard_at + STALE_S else []

    def close(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout
            self._process.stdout.close()
        self._process, self._lives = None, 0

    def _hear(self) -> Iterator[dict[str, Any]]:
        if self._process is None and self._lives and time.monotonic() >= self._again_at:
            self._start()
        if self._process is None:
            return
        assert self._process.stdout
        try:
            data = os.read(self._process.stdout.fileno(), 1 << 20)
        except BlockingIOError:
            return
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            if (said := json.loads(line)) is None:  # nothing to say, now or later
                self._lives = 0
            else:
                yield said
        if not data:
            self._process.stdout.close()
            self._process.wait()  # unless its node has reaped it with its other children
            self._process, self._devices = None, []

    def _start(self) -> None:
        self._lives -= 1
        with contextlib.suppress(OSError):  # as if it had ended at once
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
            assert self._process.stdout
            os.set_blocking(self._process.stdout.fileno(), False)
        self._last, self._text = dict.fromkeys(WARNINGS, 0), b""
        self._again_at = time.monotonic() + PAUSE_S * 4 ** (LIVES - self._lives)


def can_ask() -> bool:
    return importlib.util.find_spec("pynvml") is not None


def main() -> None:
    """Print what devices report, a line of JSON each second, until nobody reads it; null: there is nothing to report.
    If NVML's library crashes, the stack goes to the log."""
    kernel.die_with_parent(os.getppid())
    faulthandler.enable()
    health = Health()
    with contextlib.suppress(BrokenPipeError):
        while health.devices:
            for _ in health.look():
                pass
            print(json.dumps({"counts": health.counts, "devices": health.readings()}), flush=True)
            time.sleep(LOOK_S)
        print("null", flush=True)


class Health:
    """`look` yields (sign, count) for what has grown since the last look. The first look is the reference: what a
    device has counted before this process is not held against it."""

    def __init__(self, nvml: Any = None):
        self.counts = dict.fromkeys(WARNINGS, 0)
        self._nvml, self.devices, self._turn = nvml, list[Any](), 0
        self._last: dict[tuple[str, int], int] = {}  # sign and device -> what it had counted
        self._xids: Any = None
        self._samples: dict[int, Any] = {}  # of GPM, by device: those of the last look
        self._without_gpm: set[int] = set()
        with contextlib.suppress(Exception):  # no package, no driver, no device: nothing to say
            self._nvml = nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self.devices = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
        with contextlib.suppress(Exception):  # some devices report no events
            if self.devices:
                self._xids = self._nvml.nvmlEventSetCreate()
                for device in self.devices:
                    self._nvml.nvmlDeviceRegisterEvents(device, self._nvml.nvmlEventTypeXidCriticalError, self._xids)

    def look(self) -> Iterator[tuple[str, int]]:
        before = dict(self.counts)
        try:
            self._count()
        except AttributeError:  # a release of the package with other names
            self.devices = []
        for sign, count in self.counts.items():
            if count > before[sign]:
                yield sign, count

    def readings(self) -> list[dict[str, float]]:
        """Return the load of each device (see `observe.readings`). What a device cannot tell is left out."""
        try:
            return list(self._read())
        except AttributeError:  # a release of the package with other names
            return []

    def _read(self) -> Iterator[dict[str, float]]:
        n = self._nvml
        for device in self.devices:
            found: dict[str, float] = {}
            if (use := self._get(n.nvmlDeviceGetUtilizationRates, device)) is not None:
                found["device_busy"] = use.gpu / 100
            if (memory := self._get(n.nvmlDeviceGetMemoryInfo, device)) is not None:
                found["device_memory"] = memory.used / memory.total
            if (milliwatts := self._get(n.nvmlDeviceGetPowerUsage, device)) is not None:
                found["device_power"] = milliwatts / 1e3
            if (heat := self._get(n.nvmlDeviceGetTemperature, device, n.NVML_TEMPERATURE_GPU)) is not None:
                found["device_heat"] = float(heat)
            if (megahertz := self._get(n.nvmlDeviceGetClockInfo, device, n.NVML_CLOCK_SM)) is not None:
                found["device_clock"] = megahertz * 1e6
            if (tensor := self._tensor(device)) is not None:
                found["device_tensor"] = tensor
            yield found

    def _tensor(self, device: Any) -> float | None:
        """Return the share of time since the last look in which the tensor cores computed, from NVML's GPM (Hopper and
        newer). NVML's utilisation only says that some kernel ran."""
        n, number = self._nvml, self.devices.index(device)
        if not hasattr(n, "nvmlGpmSampleAlloc") or number in self._without_gpm:
            return None
        support = self._get(n.nvmlGpmQueryDeviceSupport, device)
        if support is None or not support.isSupportedDevice:
            self._without_gpm.add(number)
            return None
        before, now = self._samples.pop(number, None), self._get(n.nvmlGpmSampleAlloc)
        if now is None or self._get(n.nvmlGpmSampleGet, device, now) is None:
            return None
        self._samples[number] = now
        if before is None:
            return None
        wanted = n.c_nvmlGpmMetricsGet_t()
        wanted.version, wanted.numMetrics, wanted.sample1, wanted.sample2 = (
            n.NVML_GPM_METRICS_GET_VERSION,
            1,
            before,
            now,
        )
        wanted.metrics[0].metricId = n.NVML_GPM_METRIC_ANY_TENSOR_UTIL
        got = self._get(n.nvmlGpmMetricsGet, wanted)
        self._get(n.nvmlGpmSampleFree, before)
        return float(got.metrics[0].value) / 100 if got is not None else None

    def _count(self) -> None:
        for number, device in enumerate(self.devices):
            self._grown("ecc", number, self._ecc(device))
            self.counts["throttle"] += self._throttled(device)
        if self.devices:
            number = self._turn = (self._turn + 1) % len(self.devices)
            self._grown("link_errors", number, self._link_errors(self.devices[number]))
            self._hear_xids()

    def _grown(self, sign: str, device: int, count: int | None) -> None:
        if count is not None:
            self.counts[sign] += max(0, count - self._last.get((sign, device), count))
            self._last[sign, device] = count

    def _ecc(self, device: Any) -> int | None:
        """Count memory errors. One that could not be corrected is as bad as many that could."""
        n = self._nvml
        kinds = ((n.NVML_MEMORY_ERROR_TYPE_CORRECTED, 1), (n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, WARNINGS["ecc"]))
        found = [
            (count, weight)
            for kind, weight in kinds
            if (count := self._get(n.nvmlDeviceGetTotalEccErrors, device, kind, n.NVML_VOLATILE_ECC)) is not None
        ]
        return sum(count * weight for count, weight in found) if len(found) == len(kinds) else None

    def _throttled(self, device: Any) -> bool:
        """Return whether the device is slowed down now, by heat or by its power supply; not by a limit that somebody
        set."""
        n = self._nvml
        bad = (
            n.nvmlClocksThrottleReasonHwSlowdown
            | n.nvmlClocksThrottleReasonHwThermalSlowdown
            | n.nvmlClocksThrottleReasonHwPowerBrakeSlowdown
            | n.nvmlClocksThrottleReasonSwThermalSlowdown
        )
        reasons = self._get(n.nvmlDeviceGetCurrentClocksThrottleReasons, device) or 0
        limit = self._get(n.nvmlDeviceGetTemperatureThreshold, device, n.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN) or 0
        heat = self._get(n.nvmlDeviceGetTemperature, device, n.NVML_TEMPERATURE_GPU) or 0
        return bool(reasons & bad) or 0 < limit <= heat

    def _link_errors(self, device: Any) -> int | None:
        n = self._nvml
        total = self._get(n.nvmlDeviceGetPcieReplayCounter, device)
        for link in range(n.NVML_NVLINK_MAX_LINKS):
            if not self._get(n.nvmlDeviceGetNvLinkState, device, link):
                continue
            for kind in (n.NVML_NVLINK_ERROR_DL_REPLAY, n.NVML_NVLINK_ERROR_DL_RECOVERY):
                total = (total or 0) + (self._get(n.nvmlDeviceGetNvLinkErrorCounter, device, link, kind) or 0)
        return total

    def _hear_xids(self) -> None:
        while self._xids is not None:
            event = self._get(self._nvml.nvmlEventSetWait_v2, self._xids, 0)
            if event is None:
                return  # none has come
            for sign, known in (("ecc", XIDS_MEMORY), ("link_errors", XIDS_LINK)):
                if event.eventData in known:
                    self.counts[sign] += WARNINGS[sign]

    def _get(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call NVML; None: this device cannot tell."""
        try:
            return call(*args)
        except self._nvml.NVMLError:
            return None


if __name__ == "__main__":
    main()
