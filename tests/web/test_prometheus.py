"""Prometheus and Grafana: what is scraped is what the records say, and no panel asks for a metric that is not there."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from prometheus_client import parser

from phalanx.observe.prometheus import METRICS, exposition, grafana
from phalanx.observe.story import Story
from phalanx.observe.words import describe
from tests.observe.records import Written
from tests.observe.test_story import broken

NAMED = re.compile(r"phalanx_[a-z_]+")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    run = broken(root)
    run.event("checkpoint", step=40, checkpoint="step-40", bytes=5, stall_s=0.0, slowdown_s=0.0, drain_s=0.1)
    run.end()
    Written(root, 'quo"te\\d', rates={"dollars_per_gpu_hour": 3.0}).begin().steps(0, 5).end()
    return root


def scraped(root):
    runs = [describe(Story(path)) for path in sorted(root.iterdir())]
    samples = [s for family in parser.text_string_to_metric_families(exposition(runs)) for s in family.samples]
    return {run["name"]: run for run in runs}, samples


def test_what_is_scraped_is_what_the_records_say(root):
    runs, samples = scraped(root)
    by = {(s.name, s.labels["job"], s.labels.get("state")): s.value for s in samples}
    assert by["phalanx_step", "job", None] == 40 and by["phalanx_loss", 'quo"te\\d', None] == pytest.approx(1.96)
    states = [by["phalanx_gpu_seconds", "job", row["state"]] for row in runs["job"]["goodput"]["states"]]
    assert sum(states) == pytest.approx(runs["job"]["goodput"]["gpu_s"])
    assert by["phalanx_cost_dollars_total", 'quo"te\\d', None] > 0 and by["phalanx_failures_total", "job", None] == 1
    cpu = {
        s.labels["stat"]: s.value for s in samples if s.name == "phalanx_host_cpu_ratio" and s.labels["job"] == "job"
    }
    assert cpu == {"mean": 0.5, "min": 0.25, "max": 0.75}
    assert not any("rank" in s.labels for s in samples), "a rank as a label is a series for each of a million"


def test_every_metric_has_a_sample_and_grafana_names_only_those(root):
    there = {sample.name for sample in scraped(root)[1]}
    assert there == {metric.full_name for metric in METRICS}
    asked = set(NAMED.findall(json.dumps(grafana())))
    assert asked and asked <= there


def test_names_follow_the_conventions_of_prometheus():
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", metric.name) and metric.help.endswith(".")
        assert not re.search(r"_(ms|minutes|hours|percent|kb|mb)(_|$)", metric.name), "base units"


@pytest.mark.slow
def test_a_real_prometheus_scrapes_a_run(root, tmp_path):
    program = shutil.which("prometheus")
    if not program:
        pytest.skip("apt install prometheus")
    ports = [_free(), _free()]
    address = f"127.0.0.1:{ports[1]}"
    config = {"scrape_configs": [{"job_name": "phalanx", "scrape_interval": "1s", "honor_labels": True,
                                  "static_configs": [{"targets": [f"127.0.0.1:{ports[0]}"]}]}]}  # fmt: skip
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    dash = [sys.executable, "-m", "phalanx.cli.main", "dash", str(root), "--port", str(ports[0])]
    scrape = [program, f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
              f"--web.listen-address={address}"]  # fmt: skip
    with (
        subprocess.Popen(dash, stdout=subprocess.DEVNULL) as one,
        subprocess.Popen(scrape, stderr=subprocess.DEVNULL) as two,
    ):
        try:
            deadline, found = time.monotonic() + 60, []
            while not found and time.monotonic() < deadline:
                time.sleep(0.5)
                found = _ask(address, 'phalanx_step{job="job"}')
            assert found and found[0]["value"][1] == "40", found
            assert len(_ask(address, 'phalanx_gpu_seconds{job="job"}')) == 9
        finally:
            one.terminate()
            two.terminate()


def _ask(address, query):
    url = f"http://{address}/api/v1/query?query={urllib.request.quote(query)}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)["data"]["result"]
    except OSError:
        return []


def _free():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
