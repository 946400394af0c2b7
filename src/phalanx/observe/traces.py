"""Traces: keep what ranks recorded of some steps beside the run, and merge it with the events of the control plane into
one file for Perfetto or chrome://tracing. The vote aligns the clocks of hosts, because all ranks of a step leave it
within the time of one message."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import statistics
from pathlib import Path
from typing import Any

from phalanx.observe.phases import VOTE
from phalanx.observe.story import Story

FOLDER = "traces"
NAME = re.compile(r"(\d+)-(\d+)")
MOST_PARTS, MOST_STEPS = 1024, 100
NEAR_S = 60.0  # before and after the steps: the events of the control plane that are shown
COLLECTIVE = re.compile(r"^(gloo|nccl|c10d|rccl|xccl):")
Event = dict[str, Any]


def folder_of(run: Path, first: int, last: int) -> Path:
    return run / FOLDER / f"{first}-{last}"


def receive(run: Path, rank: int, body: dict[str, Any]) -> None:
    """Keep a part of a rank's recording. Raise ValueError if it is no such part, OSError if it cannot be written."""
    first, last, part, of = (int(body[name]) for name in ("first", "last", "part", "of"))
    if not (0 <= first < last <= first + MOST_STEPS and 0 <= part <= of <= MOST_PARTS and rank >= 0):
        raise ValueError(f"no part of a trace: {first}:{last}, {part} of {of}")
    folder = folder_of(run, first, last)
    folder.mkdir(parents=True, exist_ok=True)
    name = f"rank-{rank:07d}"
    if body.get("error") or not of:
        (folder / f"{name}.error").write_text(str(body.get("error"))[:300])
        return
    near = folder / f".{name}.part"
    with open(near, "wb" if part == 0 else "ab") as file:
        file.write(base64.b64decode(body["data"]))
    if part + 1 == of:
        (folder / f"{name}.host").write_text(str(body.get("host", ""))[:300])
        os.replace(near, folder / f"{name}.json.gz")


def received(folder: Path) -> tuple[dict[int, Path], dict[int, str]]:
    """Return the files of ranks, and the errors of ranks that failed to record."""
    files = {_rank(path): path for path in sorted(folder.glob("rank-*.json.gz"))}
    return files, {_rank(path): path.read_text(errors="replace") for path in sorted(folder.glob("rank-*.error"))}


def merged(story: Story, folder: Path) -> dict[str, Any]:
    """Merge all received ranks and the control plane into one trace. Raise ValueError if a file is no trace."""
    files, _ = received(folder)
    traces = {rank: _read(path) for rank, path in files.items()}
    hosts = {rank: (folder / f"rank-{rank:07d}.host").read_text(errors="replace") for rank in files}
    moved = offsets({rank: _votes(trace) for rank, trace in traces.items()}, hosts)
    events: list[Event] = []
    for rank, trace in traces.items():
        events += _renamed(rank, hosts[rank], trace, moved[hosts[rank]])
    times = [e["ts"] for e in events if isinstance(e.get("ts"), int | float)]
    if times:
        events += _control(story, min(times) / 1e6 - NEAR_S, max(times) / 1e6 + NEAR_S)
        origin = min(times)
        for event in events:
            if "ts" in event:
                event["ts"] -= origin
    return {"traceEvents": events, "displayTimeUnit": "ms", "phalanx": {"run": story.name, "steps": folder.name}}


def write(trace: dict[str, Any], out: Path) -> None:
    near = out.with_name(f".{out.name}.{os.getpid()}")
    with gzip.open(near, "wt", compresslevel=5) as file:
        json.dump(trace, file)
    os.replace(near, out)


def collectives(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Return, for each collective over all ranks, its calls, their time and the rank of the longest, most time
    first."""
    on_host: dict[str, list[tuple[float, int]]] = {}
    on_device: dict[str, list[tuple[float, int]]] = {}  # where there is one, the host only enqueues
    for event in trace["traceEvents"]:
        name = str(event.get("name", ""))
        if event.get("ph") == "X" and COLLECTIVE.match(name) and isinstance(event.get("dur"), int | float):
            found = on_device if event.get("cat") == "gpu_user_annotation" else on_host
            found.setdefault(name, []).append((event["dur"] / 1e6, int(event["args"]["rank"])))
    rows = []
    for name, calls in (on_host | on_device).items():
        longest, rank = max(calls)
        total = sum(took for took, _ in calls)
        about = {"name": name, "calls": len(calls), "total_s": total, "mean_s": total / len(calls)}
        rows.append({**about, "longest_s": longest, "rank": rank})
    return sorted(rows, key=lambda row: -row["total_s"])


def offsets(votes: dict[int, list[float]], hosts: dict[int, str]) -> dict[str, float]:
    """Return the microseconds to add to each host's clock so that the ends of votes coincide. The reference is the host
    of the lowest rank that has votes; ranks of one host share its clock."""
    ranks = sorted(votes)
    reference = next((rank for rank in ranks if votes[rank]), None)
    out = dict.fromkeys(hosts.values(), 0.0)
    if reference is None:
        return out
    for host in out:
        if host == hosts[reference]:
            continue
        gaps = [a - b for r in ranks if hosts[r] == host for a, b in zip(votes[reference], votes[r], strict=False)]
        out[host] = statistics.median(gaps) if gaps else 0.0
    return out


def _rank(path: Path) -> int:
    return int(path.name[5:12])


def _read(path: Path) -> dict[str, Any]:
    """Read a trace of torch's profiler, and convert its times to microseconds since 1970."""
    try:
        trace = json.loads(gzip.decompress(path.read_bytes()))
        base = float(trace.get("baseTimeNanoseconds", 0)) / 1e3
        for event in trace["traceEvents"]:
            if isinstance(event.get("ts"), int | float):
                event["ts"] += base
        return trace
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise ValueError(f"{path} is no trace: {error}") from None


def _votes(trace: dict[str, Any]) -> list[float]:
    """Return when each vote ended."""
    found = [e for e in trace["traceEvents"] if e.get("name") == VOTE and e.get("ph") == "X" and "ts" in e]
    return sorted({e["ts"] + e.get("dur", 0) for e in found if e.get("cat") == "user_annotation"})


def _renamed(rank: int, host: str, trace: dict[str, Any], moved: float) -> list[Event]:
    """Return a rank's events under process numbers of its own."""
    numbers: dict[Any, int] = {}
    out: list[Event] = []
    for event in trace["traceEvents"]:
        if not isinstance(event, dict) or "pid" not in event:
            continue
        pid = event["pid"]
        if pid not in numbers:
            numbers[pid] = 1000 * (rank + 1) + len(numbers)
        if event.get("ph") == "M" and event.get("name") in ("process_name", "process_sort_index", "process_labels"):
            if event["name"] == "process_name":
                event["args"] = {"name": f"rank {rank} on {host}: {event.get('args', {}).get('name', '')}"}
            elif event["name"] == "process_sort_index":
                event["args"] = {"sort_index": numbers[pid]}
        elif "ts" in event:
            event["ts"] += moved
            event["args"] = {**(event.get("args") or {}), "rank": rank}
        for name in ("id", "bind_id"):  # flows of two ranks must not meet
            if name in event:
                event[name] = f"{rank}.{event[name]}"
        out.append({**event, "pid": numbers[pid]})
    return out


def _control(story: Story, begin: float, end: float) -> list[Event]:
    """Return the control plane's events in the span: incidents by phase, checkpoints, generations, nodes."""
    out: list[Event] = [{"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "control plane"}}]
    tracks = ("incidents", "checkpoints", "generations", "nodes")
    for number, track in enumerate(tracks):
        out.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": track}})

    def span(track: str, name: str, at: float, took: float, **args: Any) -> None:
        if at <= end and at + took >= begin:
            about: Event = {"pid": 0, "tid": tracks.index(track), "name": name, "ts": at * 1e6, "args": args}
            out.append({**about, "ph": "X", "dur": took * 1e6} if took else {**about, "ph": "i", "s": "p"})

    for one in story.incidents():
        at = one.since or one.at
        for phase, took in one.phases().items():
            span("incidents", f"{one.number} {phase}", at, max(took, 1e-6), verdict=one.verdict())
            at += took
    for event in (event for part in story.parts for event in part.events):
        kind, at = event.get("type"), float(event.get("time") or 0.0)
        if kind == "checkpoint":
            took = float(event.get("drain_s") or 0.0)
            span("checkpoints", f"checkpoint of step {event.get('step')}", at - took, took, **_plain(event))
        elif kind == "control form":
            span("generations", f"generation {event.get('generation')}", at, 0.0, **_plain(event))
        elif kind == "node":
            span("nodes", f"{event.get('node')} {event.get('what')}", at, 0.0)
    return out


def _plain(event: Event) -> Event:
    return {key: value for key, value in event.items() if isinstance(value, str | int | float)}
