"""Warnings and readings of devices, as NVML reports them."""

from __future__ import annotations

import ctypes
import sys
import time
from types import SimpleNamespace

import pytest

from phalanx.control.policy import WARNINGS
from phalanx.runtime import health, inventory
from phalanx.runtime.health import Health, Monitor


class NVMLError(Exception):
    pass


class Nvml:
    """A fake of the pynvml package, with two devices."""

    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
    nvmlClocksThrottleReasonHwSlowdown, nvmlClocksThrottleReasonHwThermalSlowdown = 8, 64
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown, nvmlClocksThrottleReasonSwThermalSlowdown = 128, 32
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN, NVML_TEMPERATURE_GPU = 1, 0
    NVML_NVLINK_MAX_LINKS, NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY = 2, 0, 1
    nvmlEventTypeXidCriticalError = 8
    NVMLError = NVMLError

    def __init__(self):
        self.ecc, self.reasons, self.heat = {0: [7, 0], 1: [0, 0]}, {0: 4, 1: 0}, {0: 40, 1: 40}
        self.replays, self.xids = {0: 5, 1: 0}, []

    def nvmlInit(self):
        pass

    def nvmlDeviceGetCount(self):
        return 2

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlEventSetCreate(self):
        return "set"

    def nvmlDeviceRegisterEvents(self, device, kinds, events):
        pass

    def nvmlEventSetWait_v2(self, events, timeout_ms):
        assert timeout_ms == 0, "the node has other things to do"
        if not self.xids:
            raise NVMLError("timeout")
        return SimpleNamespace(eventData=self.xids.pop())

    def nvmlDeviceGetTotalEccErrors(self, device, kind, counter):
        return self.ecc[device][kind]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device):
        return self.reasons[device]

    def nvmlDeviceGetTemperatureThreshold(self, device, kind):
        return 90

    def nvmlDeviceGetTemperature(self, device, kind):
        return self.heat[device]

    def nvmlDeviceGetPcieReplayCounter(self, device):
        return self.replays[device]

    def nvmlDeviceGetNvLinkState(self, device, link):
        raise NVMLError("not supported")


def test_what_devices_count_is_a_warning_when_it_grows():
    nvml = Nvml()
    health = Health(nvml)
    for _ in range(2):
        assert list(health.look()) == [], "what was before is not held against it, nor a limit that somebody set"
    nvml.ecc[1][0] += 2
    assert list(health.look()) == [("ecc", 2)] and list(health.look()) == []
    nvml.ecc[0][1] += 1
    assert list(health.look()) == [("ecc", 2 + WARNINGS["ecc"])], "one that was not corrected is enough"
    nvml.reasons[0], nvml.heat[1] = 64, 91
    assert list(health.look()) == [("throttle", 2)] and list(health.look()) == [("throttle", 4)]
    nvml.reasons[0], nvml.heat[1] = 4, 60
    nvml.replays[0] += 3
    assert dict([*health.look(), *health.look()]) == {"link_errors": 3}, "each device in its turn"
    nvml.xids = [31, 79]
    assert list(health.look()) == [("link_errors", 3 + WARNINGS["link_errors"])], "31 is the program's own fault"


@pytest.mark.parametrize("trouble", ["no package", "no driver"])
def test_without_devices_there_is_nothing_to_say(monkeypatch, trouble):
    nvml = Nvml()
    nvml.nvmlInit = lambda: exec("raise NVMLError('driver not loaded')", {"NVMLError": NVMLError})
    monkeypatch.setitem(sys.modules, "pynvml", nvml if trouble == "no driver" else None)
    assert list(Health().look()) == []


PROCESS = """
import json, sys
from pathlib import Path
life = Path(sys.argv[1])
number = int(life.read_text())
life.write_text(str(number + 1))
if number == 2:
    print("null", flush=True)
else:
    print(json.dumps({"counts": {"ecc": 3}, "devices": [{"device_busy": 0.5}]}), flush=True)
    if number == 0:
        import ctypes
        ctypes.string_at(0)  # a library that crashes
"""


def looks(monitor, until):
    found = []
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        found += monitor.look()
        time.sleep(0.01)
    return found


def test_a_library_that_crashes_takes_nobody_along(tmp_path, monkeypatch):
    monkeypatch.setattr(health, "PAUSE_S", 0.0)
    (tmp_path / "life").write_text("0")
    monitor = Monitor((sys.executable, "-c", PROCESS, str(tmp_path / "life")), lives=9)
    found = looks(monitor, lambda: (tmp_path / "life").read_text() == "3" and not monitor.alive)
    assert found == [("ecc", 3), ("ecc", 6)], "counts of the second process are added to those of the first"
    assert monitor.readings() == [] and list(monitor.look()) == [], "it has said that there is nothing to say"
    assert (tmp_path / "life").read_text() == "3"


def test_a_process_that_hangs_holds_nobody_up(tmp_path):
    monitor = Monitor((sys.executable, "-c", "import time; time.sleep(100)"), lives=1)
    assert list(monitor.look()) == [] == monitor.readings()
    monitor.close()


def test_the_process_has_nothing_to_say_without_devices():
    monitor = Monitor(lives=2)
    assert looks(monitor, lambda: monitor.counts and not monitor.alive) == []


class Fabric(ctypes.Structure):
    _fields_ = [("clusterUuid", ctypes.c_uint8 * 16), ("cliqueId", ctypes.c_uint32)]


def test_the_domain_is_asked_for_with_a_pointer(monkeypatch):
    """The package passes on its argument as it is: given a value, the library would write wherever that points to."""

    class Switched(Nvml):
        c_nvmlGpuFabricInfoV_t = Fabric

        def nvmlDeviceGetName(self, device):
            return b"NVIDIA H200"

        def nvmlDeviceGetGpuFabricInfoV(self, device, info):
            assert not isinstance(info, Fabric), "a structure, by value"
            found = ctypes.cast(info, ctypes.POINTER(Fabric)).contents
            found.clusterUuid[0], found.cliqueId = 0xAB, 3

    monkeypatch.setitem(sys.modules, "pynvml", Switched())
    names, domain = inventory._devices()
    assert names == ["NVIDIA H200"] * 2 and domain == f"ab{'00' * 15}/3"
