"""The readings of a node's host and devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from phalanx.runtime.health import Health
from phalanx.runtime.telemetry import Telemetry
from tests.runtime.test_health import Nvml, NVMLError

DEVICE = "  eth0: {} 0 0 0 0 0 0 0 {} 0 0 0 0 0 0 0\n    lo: 900000 0 0 0 0 0 0 0 900000 0 0 0 0 0 0 0\n"


class Busy(Nvml):
    NVML_CLOCK_SM = 1

    def nvmlDeviceGetUtilizationRates(self, device):
        return SimpleNamespace(gpu=[100, 50][device])

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(used=[10, 30][device], total=40)

    def nvmlDeviceGetPowerUsage(self, device):
        if device:
            raise NVMLError("not supported")
        return 650_000

    def nvmlDeviceGetClockInfo(self, device, kind):
        return [1980, 1410][device]


def write(proc, busy, idle, sent):
    (proc / "net").mkdir(exist_ok=True)
    (proc / "net" / "dev").write_text(f"Inter-| Receive\n face |bytes\n{DEVICE.format(sent, sent)}")
    (proc / "meminfo").write_text("MemTotal:       1000 kB\nMemFree:        100 kB\nMemAvailable:    250 kB\n")
    (proc / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1\n")


def test_shares_and_rates_are_those_between_two_looks(tmp_path, monkeypatch):
    now = iter([10.0, 12.0, 20.0])
    monkeypatch.setattr("phalanx.runtime.telemetry.time.monotonic", lambda: next(now))
    telemetry = Telemetry(Health(SimpleNamespace()), tmp_path)
    write(tmp_path, busy=1000, idle=1000, sent=5000)
    telemetry.look()
    assert telemetry.values == {"host_memory": 0.75}, "since the machine was started says nothing"
    write(tmp_path, busy=1300, idle=1100, sent=105_000)
    telemetry.look()
    assert telemetry.values == {"host_memory": 0.75}, "too early for another one"
    telemetry.look()
    assert telemetry.values == {"host_memory": 0.75, "host_cpu": 0.75, "host_network": 20_000.0}


def test_of_several_devices_the_one_in_trouble_is_told(tmp_path):
    telemetry = Telemetry(Health(Busy()), tmp_path / "missing")
    telemetry.look()
    assert telemetry.values == pytest.approx(
        {"device_busy": 0.75, "device_memory": 0.75, "device_power": 650.0, "device_heat": 40.0, "device_clock": 1.41e9}
        | dict.fromkeys(("device_ecc", "device_throttle", "device_link_errors"), 0.0)
    )


class Hopper(Busy):
    """GPM: each sample is the tensor cores' busy time so far, in percent-looks."""

    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_ANY_TENSOR_UTIL = 1, 5

    def __init__(self):
        super().__init__()
        self.taken, self.freed = 0, 0

    def nvmlGpmQueryDeviceSupport(self, device):
        return SimpleNamespace(isSupportedDevice=device == 0)

    def nvmlGpmSampleAlloc(self):
        return SimpleNamespace(at=0)

    def nvmlGpmSampleGet(self, device, sample):
        self.taken += 40
        sample.at = self.taken
        return sample

    def nvmlGpmSampleFree(self, sample):
        self.freed += 1
        return True

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, value=0.0)])

    def nvmlGpmMetricsGet(self, wanted):
        assert wanted.metrics[0].metricId == self.NVML_GPM_METRIC_ANY_TENSOR_UTIL and wanted.numMetrics == 1
        wanted.metrics[0].value = wanted.sample2.at - wanted.sample1.at
        return wanted


def test_tensor_cores_are_read_between_two_looks_where_there_is_gpm(tmp_path):
    nvml = Hopper()
    telemetry = Telemetry(Health(nvml), tmp_path / "missing", every_s=0.0)
    telemetry.look()
    assert "device_tensor" not in telemetry.values, "one sample says nothing"
    telemetry.look()
    telemetry.look()
    assert telemetry.values["device_tensor"] == pytest.approx(0.4) and nvml.freed == 2, "no sample is left behind"


def test_a_release_of_the_package_with_other_names_says_nothing(tmp_path):
    assert Health(Nvml()).readings() == []
