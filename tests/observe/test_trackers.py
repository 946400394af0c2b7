"""Other tools receive the steps and incidents of a record, and each tool's own reader returns them. `make
test-trackers` runs the tests that need extra packages."""

from __future__ import annotations

import json
import struct
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from phalanx.cli.commands import app
from phalanx.core.errors import RunFailed, UserError
from phalanx.observe.provenance import provenance
from phalanx.observe.story import Story
from phalanx.observe.trackers import numbers, open_tracker, send
from tests.observe.records import Written
from tests.observe.test_story import broken

needs_packages = pytest.mark.trackers


class Collector(HTTPServer):
    """An OTLP receiver that keeps what was posted to it, by path."""

    def __init__(self):
        self.bodies: list[tuple[str, bytes, str]] = []
        super().__init__(("127.0.0.1", 0), _Receive)
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def posted(self, kind):
        return [json.loads(body) for path, body, _ in self.bodies if path == f"/v1/{kind}"]


class _Receive(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append((self.path, body, self.headers.get("x-key", "")))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *words):
        pass


@pytest.fixture
def collector():
    server = Collector()
    yield server
    server.shutdown()
    server.server_close()


def points(collector, name="phalanx.loss"):
    found = [
        point
        for body in collector.posted("metrics")
        for metric in body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
        if metric["name"] == name
        for point in metric["gauge"]["dataPoints"]
    ]
    return [(int(point["timeUnixNano"]), point["asDouble"]) for point in found]


def test_a_collector_has_every_step_and_every_incident(collector, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    path = broken(tmp_path).end()
    out = CliRunner().invoke(app, ["runs", "send", str(path), "--to", f"otlp:{collector.url}"])
    story = Story(path)
    assert out.output == f"40 steps sent to otlp:{collector.url}\n"
    assert points(collector) == [(round(row["time"] * 1e9), row["loss"]) for row in story.rows]
    assert len(points(collector, "phalanx.phases.reduce")) == 40, "nested values have names of their own"
    (incident,), (spans,) = story.incidents(), collector.posted("traces")
    whole, *parts = spans["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert {"key": "incident.verdict", "value": {"stringValue": incident.verdict()}} in whole["attributes"]
    assert [part["name"] for part in parts] == list(incident.phases())
    assert {part["parentSpanId"] for part in parts} == {whole["spanId"]}
    assert all(key == "secret" for _, _, key in collector.bodies)


def test_a_live_run_is_followed_to_its_end(collector, tmp_path):
    """The steps that replace abandoned ones are sent too."""
    run = Written(tmp_path, process=provenance()["process"]).begin().steps(0, 5)
    story, turns = Story(run.path), iter([lambda: run.steps(5, 9), lambda: run.steps(3, 8, loss=1.0), run.end])
    count = send(story, open_tracker(f"otlp:{collector.url}", story), True, lambda: next(turns)())
    assert count == 5 + 4 + 5
    assert [round(loss, 2) for _, loss in points(collector)][-5:] == [0.97, 0.96, 0.95, 0.94, 0.93]


def test_what_cannot_be_sent_is_told_with_a_remedy(tmp_path):
    story = Story(Written(tmp_path).begin().steps(0, 3).end())
    for wrong in ("nothing:x", "otlp:file:///etc/passwd", "otlp:"):
        with pytest.raises(UserError, match=r"--to.*\n.*remedy"):
            open_tracker(wrong, story)
    with pytest.raises(RunFailed, match="did not take the metrics"):
        send(story, open_tracker("otlp:http://127.0.0.1:9", story), False)


def test_what_is_no_number_is_left_out():
    row = {
        "step": 1,
        "time": 2.0,
        "loss": float("nan"),
        "skipped": True,
        "norm": None,
        "phases": {"reduce": 0.5},
        "n": 3,
    }
    assert numbers(row) == {"phases.reduce": 0.5, "n": 3.0}


@needs_packages
def test_the_messages_are_those_of_the_protocol(collector, tmp_path):
    from google.protobuf import json_format
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    path = broken(tmp_path).end()
    send(story := Story(path), open_tracker(f"otlp:{collector.url}", story), False)
    kinds = {"/v1/metrics": ExportMetricsServiceRequest, "/v1/traces": ExportTraceServiceRequest}
    for where, body, _ in collector.bodies:  # a field that the protocol does not know is refused
        assert json_format.Parse(body, kinds[where]()).ByteSize()
    assert {where for where, _, _ in collector.bodies} == set(kinds)


@needs_packages
def test_mlflow_reads_what_was_sent(tmp_path):
    from mlflow import MlflowClient

    run = broken(tmp_path / "runs")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    story = Story(run.path)
    send(story, open_tracker(f"mlflow:{uri}", story), False)
    run.end()
    story = Story(run.path)
    send(story, open_tracker(f"mlflow:{uri}", story), False)
    client = MlflowClient(uri)
    (experiment,) = [each for each in client.search_experiments() if each.name == "job"]
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "loss")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [
        (row["step"], row["loss"]) for row in story.rows
    ], "sent twice, every step is there once"
    assert found.data.params["train.steps"] == "40" and found.info.status == "FINISHED"
    assert found.data.tags["phalanx.incident.1"] == story.incidents()[0].verdict()[:500]


@needs_packages
def test_weights_and_biases_keeps_what_was_sent(tmp_path, monkeypatch):
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    story = Story(broken(tmp_path).end())
    send(story, open_tracker("wandb:tests", story), False)
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    losses, finished = [], []
    for data in _log_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(data)
        items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
        if "loss" in items:
            losses.append((int(items["step"]), float(items["loss"])))
        if record.HasField("exit"):
            finished.append(record.exit.exit_code)
    assert losses == [(row["step"], row["loss"]) for row in story.rows] and finished == [0]


def _log_records(data, head=7, block=32_768):
    """Read the records of a LevelDB log: pieces with checksum, length and kind (1: whole, 2 to 4: first, middle,
    last)."""
    at, parts = head, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # filled up to the next block
            at += block - at % block
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts, at = parts + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):
            yield parts
            parts = b""


@needs_packages
def test_tensorboards_own_reader_reads_an_export(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path, out = broken(tmp_path).end(), tmp_path / "run.tfevents"
    CliRunner().invoke(app, ["runs", "export", str(path), "--out", str(out)])
    reader = EventAccumulator(str(out))
    reader.Reload()
    found = [(scalar.step, scalar.value) for scalar in reader.Scalars("loss")]
    assert found == [(row["step"], pytest.approx(row["loss"])) for row in Story(path).rows]
    assert "phases.reduce" in reader.Tags()["scalars"]
