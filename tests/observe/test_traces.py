"""Traces of ranks become one file, on one clock."""

from __future__ import annotations

import base64
import gzip
import json

import pytest

from phalanx.cli.trace import _await
from phalanx.observe import traces
from phalanx.observe.provenance import provenance
from phalanx.observe.story import Story
from tests.observe.records import T0, Written
from tests.observe.test_story import broken


def recorded(rank, began, votes=(0.1, 0.2)):
    """What torch's profiler writes: microseconds since a base."""
    events = [{"ph": "M", "pid": 77, "tid": 0, "name": "process_name", "args": {"name": "python"}}]
    for at in votes:
        about = {"ph": "X", "pid": 77, "tid": 1, "cat": "user_annotation", "args": {}}
        events.append({**about, "name": "vote", "ts": at * 1e6 - 1e4, "dur": 1e4})
        events.append(
            {**about, "name": "gloo:all_reduce", "cat": "cpu_op", "ts": at * 1e6 - 9e3, "dur": 1e3 * (rank + 1)}
        )
    events.append({"ph": "s", "pid": 77, "tid": 1, "id": 5, "name": "ac2g", "ts": 1.0})
    return {"baseTimeNanoseconds": round(began * 1e9), "traceEvents": events}


def send(run, rank, trace, host="a", parts=3):
    data = gzip.compress(json.dumps(trace).encode())
    size = -(-len(data) // parts)
    for part in range(parts):
        piece = base64.b64encode(data[part * size : (part + 1) * size]).decode()
        body = {"first": 3, "last": 5, "part": part, "of": parts, "data": piece, "host": host, "error": ""}
        traces.receive(run, rank, body)


def test_ranks_of_two_hosts_and_the_control_plane_are_on_one_clock(tmp_path):
    run = broken(tmp_path)
    send(run.path, 0, recorded(0, T0 + 3))
    send(run.path, 1, recorded(1, T0 + 3))
    send(run.path, 2, recorded(2, T0 + 8.5), host="b")  # whose clock is 5.5 s ahead
    folder = traces.folder_of(run.path, 3, 5)
    made = traces.merged(Story(run.path), folder)
    ends = {}
    for event in made["traceEvents"]:
        if event["name"] == "vote":
            ends.setdefault(event["args"]["rank"], []).append(event["ts"] + event["dur"])
    assert ends[0] == ends[1] == pytest.approx(ends[2], abs=2.0), "microseconds"
    names = {e["args"]["name"]: e["pid"] for e in made["traceEvents"] if e["name"] == "process_name"}
    assert len(set(names.values())) == 4 and {"control plane", "rank 2 on b: python"} <= set(names)
    flows = [event["id"] for event in made["traceEvents"] if event["ph"] == "s"]
    assert len(set(flows)) == 3, "flows of two ranks do not meet"
    phases = {e["name"] for e in made["traceEvents"] if e["pid"] == 0 and e["ph"] == "X"}
    assert {f"1 {phase}" for phase in Story(run.path).incidents()[0].phases()} <= phases
    (row,) = traces.collectives(made)
    assert row["name"] == "gloo:all_reduce" and row["calls"] == 6 and row["rank"] == 2
    assert (row["longest_s"], row["total_s"]) == (pytest.approx(3e-3), pytest.approx(12e-3))
    traces.write(made, tmp_path / "out.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "out.json.gz").read_bytes()))["traceEvents"] == made["traceEvents"]


def test_a_rank_that_dies_is_not_waited_for(tmp_path, monkeypatch):
    run = Written(tmp_path, process=provenance()["process"]).begin().steps(0, 3)
    run.event("exit", rank=0, signal="SIGKILL", node="node-0", service="")  # before it was asked
    story, folder = Story(run.path), traces.folder_of(run.path, 3, 5)

    def while_it_waits(_):
        send(run.path, 0, recorded(0, T0))
        run.event("exit", rank=1, signal="SIGKILL", node="node-0", service="")

    monkeypatch.setattr("time.sleep", while_it_waits)
    files, failed = _await(story, folder, [0, 1], 60.0)
    assert list(files) == [0] and failed == {1: "its worker died before"}


@pytest.mark.parametrize("wrong", [{"first": 5, "last": 3}, {"part": 9, "of": 2}, {"last": 10**9}, {"of": 10**6}])
def test_a_part_that_is_none_is_refused(tmp_path, wrong):
    body = {"first": 3, "last": 5, "part": 0, "of": 1, "data": "", "host": "", "error": ""}
    with pytest.raises(ValueError, match="no part of a trace"):
        traces.receive(tmp_path, 0, body | wrong)
    with pytest.raises(ValueError, match="no part of a trace"):
        traces.receive(tmp_path, -1, body)
    assert not list(tmp_path.iterdir())


def test_what_is_no_trace_names_its_file(tmp_path):
    run = Written(tmp_path).begin()
    send(run.path, 0, ["no trace"])
    with pytest.raises(ValueError, match=r"rank-0000000\.json\.gz is no trace"):
        traces.merged(Story(run.path), traces.folder_of(run.path, 3, 5))
    traces.receive(run.path, 1, {"first": 3, "last": 5, "part": 0, "of": 0, "data": "", "error": "too large"})
    assert traces.received(traces.folder_of(run.path, 3, 5))[1] == {1: "too large"}
