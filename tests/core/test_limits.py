"""What a control group allows. When this fails, a run in a container is killed for memory that the host has."""

from __future__ import annotations

import pytest

from phalanx.core import limits


@pytest.fixture
def group(tmp_path, monkeypatch):
    """A process in job/step; files of its groups by name."""
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    monkeypatch.setattr(limits, "OWN", tmp_path / "own")

    def make(own, **files):
        (tmp_path / "own").write_text(own)
        for path, text in files.items():
            file = tmp_path / path.replace("__", "/").replace("_DOT_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

    return make


def test_without_a_limit_it_is_the_machines(group):
    group("0::/job/step\n", memory_DOT_max="max", job__memory_DOT_max="max")
    assert limits.limit_bytes() > 1 << 28 and limits.available_bytes() > 1 << 20


def test_the_tightest_of_nested_groups_counts(group):
    files = {"job__step__memory_DOT_max": 9 << 20, "job__memory_DOT_max": 5 << 20}
    used = {"job__step__memory_DOT_current": 1 << 20, "job__memory_DOT_current": 2 << 20}
    group("0::/job/step\n", **files, **used)
    assert limits.limit_bytes() == 5 << 20 and limits.available_bytes() == 3 << 20


def test_page_cache_gives_way(group):
    group(
        "0::/\n", memory_DOT_max=8 << 20, memory_DOT_current=7 << 20, memory_DOT_stat=f"anon 1\ninactive_file {6 << 20}"
    )
    assert limits.available_bytes() == 7 << 20


def test_version_one_of_control_groups(group):
    group(
        "9:memory:/job\n8:cpu:/x\n",
        memory__job__memory_DOT_limit_in_bytes=4 << 20,
        memory__job__memory_DOT_usage_in_bytes=0,
    )
    assert limits.limit_bytes() == 4 << 20


def test_a_quota_of_time_is_a_number_of_cores(group, monkeypatch):
    """A container has all cores of its host to run on, and may keep busy only some: more threads would wait."""
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda pid: {*range(64)})
    group("0::/job/step\n", cpu_DOT_max="max 100000", job__cpu_DOT_max="max 100000")
    assert limits.num_cores() == 64
    group("0::/job/step\n", job__cpu_DOT_max="250000 100000", job__step__cpu_DOT_max="400000 100000")
    assert limits.num_cores() == 3
    group("0::/job/step\n", job__cpu_DOT_max="5000 100000")
    assert limits.num_cores() == 1
    group("0::/job/step\n", job__cpu_DOT_max="9900000 100000")
    assert limits.num_cores() == 4, "the tightest counts, and it was not changed"


def test_a_quota_in_version_one(group, monkeypatch):
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda pid: {*range(64)})
    group("1:cpu,cpuacct:/job\n", cpu__cpu_DOT_cfs_quota_us=-1, cpu__cpu_DOT_cfs_period_us=100000)
    assert limits.num_cores() == 64
    group("1:cpu,cpuacct:/job\n", cpu__job__cpu_DOT_cfs_quota_us=800000, cpu__job__cpu_DOT_cfs_period_us=100000)
    assert limits.num_cores() == 8
