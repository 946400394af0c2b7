"""Trackers: send the steps and incidents of a story to another tool, during the run or after it. They read the record,
as the dashboard does, so a slow or dead tracker cannot hold up a step.

    mlflow:URI      MLflow's own client: a server, or a folder
    wandb:PROJECT   Weights & Biases' own client; WANDB_MODE=offline keeps the run on this host
    otlp:URL        an OpenTelemetry collector: OTLP over HTTP as JSON, which needs no package
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
import urllib.error
import urllib.request
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from phalanx.core.errors import RunFailed, UserError
from phalanx.observe.incidents import Incident
from phalanx.observe.story import Story

Numbers = dict[str, float]
BATCH = 200  # steps of one message
MLFLOW_METRICS, MLFLOW_PARAMS, MLFLOW_CHARS = 1000, 100, 500  # limits of a server: per request, and per value
ENDS = {"done": "FINISHED", "failed": "FAILED", "lost": "FAILED", "stopped": "KILLED"}


class Tracker(Protocol):
    """A tool that takes steps and incidents. `sent`: the first step that it does not have yet."""

    sent: int

    def steps(self, rows: list[tuple[int, float, Numbers]]) -> None:
        """Take steps: number, time and values."""

    def incident(self, one: Incident) -> None:
        """Take an incident that is over."""

    def end(self, state: str) -> None: ...


def open_tracker(to: str, story: Story) -> Tracker:
    """Open a tracker. Raise UserError if there is none of this name, or if its package is not installed."""
    kind, _, target = to.partition(":")
    if kind not in KINDS or (kind == "otlp" and not target.startswith(("http://", "https://"))):
        remedy = f"name one of {', '.join(f'{name}:…' for name in KINDS)}; otlp takes a URL such as http://HOST:4318"
        raise UserError("there is no such tracker", field="--to", value=to, remedy=remedy)
    try:
        return KINDS[kind](target, story)
    except ImportError as error:
        remedy = "pip install 'phalanx[trackers]'"
        raise UserError(
            f"{kind} needs {error.name}, which is not installed", field="--to", value=to, remedy=remedy
        ) from None


def send(story: Story, tracker: Tracker, follow: bool, pause: Callable[[], object] = lambda: time.sleep(1.0)) -> int:
    """Send what the tracker does not have yet; with `follow`, until the run ends. Return the number of steps sent."""
    count, branches, told = 0, len(story.branches), set[int]()
    while True:
        running = story.part.state == "running"
        if len(story.branches) > branches:  # the steps that replaced abandoned ones are sent too
            tracker.sent = min([tracker.sent, *(branch.step for branch in story.branches[branches:])])
            branches = len(story.branches)
        fresh = story.rows[bisect_left(story.rows, tracker.sent, key=lambda row: row["step"]) :]
        for rows in _batches(fresh, BATCH):
            tracker.steps([(row["step"], row["time"], numbers(row)) for row in rows])
            tracker.sent = rows[-1]["step"] + 1
            count += len(rows)
        for one in story.incidents():
            if one.number not in told and not one.open:
                told.add(one.number)
                tracker.incident(one)
        if not running or not follow:
            if not running:
                tracker.end(story.part.state)
            return count
        pause()
        story.update()


def _batches(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (items[at : at + size] for at in range(0, len(items), size))


def numbers(row: dict[str, Any], before: str = "") -> Numbers:
    """Return the finite numbers of a row; those of nested objects are named like phases.reduce."""
    out: Numbers = {}
    for name, value in row.items():
        if isinstance(value, dict):
            out |= numbers(value, f"{before}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            out[before + name] = float(value)
    return {name: value for name, value in out.items() if name not in ("step", "time")}


def settings(story: Story) -> dict[str, str]:
    """Return the resolved job, flat, as text."""

    def walk(value: dict[str, Any], before: str) -> Iterator[tuple[str, str]]:
        for name, each in value.items():
            if isinstance(each, dict):
                yield from walk(each, f"{before}{name}.")
            else:
                yield before + name, each if isinstance(each, str) else json.dumps(each)

    return dict(walk(story.part.settings, ""))


def identity(story: Story) -> dict[str, str]:
    """Return the labels that identify a run in another tool."""
    meta = story.part.meta
    code = meta.get("code") or {}
    known = {
        "phalanx.run": story.name,
        "phalanx.job_digest": meta.get("job_digest"),
        "phalanx.promise": meta.get("promise"),
    }
    known |= {"vcs.ref.head.revision": code.get("commit")}
    return {name: str(value) for name, value in known.items() if value}


class Mlflow:
    def __init__(self, target: str, story: Story):
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._make = Metric
        self._client = client = MlflowClient(tracking_uri=target or None)
        name = str(story.part.settings.get("name") or "phalanx")
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
        before = client.search_runs([experiment], f"tags.`phalanx.run` = '{story.name}'", max_results=1)
        self.sent = int(before[0].data.tags.get("phalanx.sent", 0)) if before else 0
        if before:
            self._run = before[0].info.run_id
            return
        tags = identity(story) | {"mlflow.source.name": "phalanx", "mlflow.source.type": "JOB"}
        tags |= {"mlflow.source.git.commit": tags["vcs.ref.head.revision"]} if "vcs.ref.head.revision" in tags else {}
        started = round(1e3 * story.parts[0].began)
        self._run = client.create_run(experiment, started, tags, run_name=story.name).info.run_id
        for some in _batches([*settings(story).items()], MLFLOW_PARAMS):
            client.log_batch(self._run, params=[Param(_mlflow_name(k), v[:MLFLOW_CHARS]) for k, v in some])

    def steps(self, rows: list[tuple[int, float, Numbers]]) -> None:
        metrics = [
            self._make(_mlflow_name(name), value, round(1e3 * at), step)
            for step, at, values in rows
            for name, value in values.items()
        ]
        for some in _batches(metrics, MLFLOW_METRICS):
            self._client.log_batch(self._run, metrics=list(some))
        self._client.set_tag(self._run, "phalanx.sent", str(rows[-1][0] + 1))

    def incident(self, one: Incident) -> None:
        self._client.set_tag(self._run, f"phalanx.incident.{one.number}", one.verdict()[:MLFLOW_CHARS])

    def end(self, state: str) -> None:
        self._client.set_terminated(self._run, ENDS.get(state, "FAILED"))


def _mlflow_name(name: str) -> str:
    """Replace the characters that MLflow does not allow in a name."""
    return re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)[:250]


class Wandb:
    """Weights & Biases' own step count only grows, so the step is logged as a value and serves as the charts' axis."""

    def __init__(self, target: str, story: Story):
        import wandb

        self.sent = 0
        self._run = wandb.init(
            project=target or str(story.part.settings.get("name") or "phalanx"),
            id=story.name,
            name=story.name,
            resume="allow",
            config={**story.part.settings, **identity(story)},
            settings=wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, silent=True),
        )
        self.sent = int(self._run.summary.get("step", -1)) + 1
        self._run.define_metric("*", step_metric="step")

    def steps(self, rows: list[tuple[int, float, Numbers]]) -> None:
        for step, at, values in rows:
            self._run.log({"step": step, "time": at, **values})

    def incident(self, one: Incident) -> None:
        self._run.summary[f"incident {one.number}"] = one.verdict()

    def end(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "done" else 1)


class Otlp:
    """Gauges phalanx.NAME for each step, and a span for each incident with its phases as children."""

    def __init__(self, target: str, story: Story):
        self.sent, self._url, self._run = 0, target.rstrip("/"), story.name
        about = {"service.name": "phalanx", "service.instance.id": story.name, **identity(story)}
        self._resource = {"attributes": _attributes(about)}
        pairs = (
            each.partition("=") for each in os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").split(",") if "=" in each
        )
        self._headers = {
            "Content-Type": "application/json",
            **{name.strip(): value.strip() for name, _, value in pairs},
        }

    def steps(self, rows: list[tuple[int, float, Numbers]]) -> None:
        points: dict[str, list[dict[str, Any]]] = {"step": []}
        for step, at, values in rows:
            for name, value in {"step": float(step), **values}.items():
                points.setdefault(name, []).append({"timeUnixNano": str(round(at * 1e9)), "asDouble": value})
        metrics = [{"name": f"phalanx.{name}", "gauge": {"dataPoints": known}} for name, known in points.items()]
        self._post(
            "metrics", {"resourceMetrics": [{"resource": self._resource, "scopeMetrics": [{"metrics": metrics}]}]}
        )

    def incident(self, one: Incident) -> None:
        trace = _id(f"{self._run} {one.number}", 16)
        begin, phases = one.since or one.at, one.phases()
        spans, at = [], begin
        for name, took in phases.items():
            spans.append(_span(trace, f"{trace} {name}", name, at, at + took, parent=trace))
            at += took
        about = {"incident.kind": one.kind, "incident.verdict": one.verdict(), "incident.lost_gpu_s": one.lost_gpu_s}
        spans.insert(0, _span(trace, trace, f"{one.subject} {one.what}", begin, max(at, one.healed), about))
        self._post("traces", {"resourceSpans": [{"resource": self._resource, "scopeSpans": [{"spans": spans}]}]})

    def end(self, state: str) -> None:
        pass

    def _post(self, kind: str, body: dict[str, Any]) -> None:
        request = urllib.request.Request(f"{self._url}/v1/{kind}", json.dumps(body).encode(), self._headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310  (http or https, see open_tracker)
                said = answer.read()
        except (urllib.error.URLError, OSError) as error:
            remedy = "is the collector's OTLP receiver for HTTP at this address? Send again: nothing was lost"
            raise RunFailed(f"{self._url} did not take the {kind}: {error}", remedy=remedy) from None
        with contextlib.suppress(ValueError):
            refused = (json.loads(said or b"{}").get("partialSuccess") or {}).get("errorMessage")
            if refused:
                raise RunFailed(f"{self._url} refused some {kind}: {refused}", remedy="see the collector's log")


def _span(
    trace: str, about: str, name: str, begin: float, end: float, more: dict[str, Any] | None = None, parent: str = ""
) -> dict[str, Any]:
    out = {"traceId": trace, "spanId": _id(about, 8), "name": name[:200], "kind": 1}
    out |= {"startTimeUnixNano": str(round(begin * 1e9)), "endTimeUnixNano": str(round(end * 1e9))}
    out |= {"parentSpanId": _id(parent, 8)} if parent else {}
    return out | {"attributes": _attributes(more or {})}


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"doubleValue": v} if isinstance(v, float) else {"stringValue": str(v)}}
        for key, v in values.items()
    ]


def _id(text: str, size: int) -> str:
    """Derive an id from the text, so that something sent twice is the same."""
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


KINDS: dict[str, Callable[[str, Story], Tracker]] = {"mlflow": Mlflow, "wandb": Wandb, "otlp": Otlp}
