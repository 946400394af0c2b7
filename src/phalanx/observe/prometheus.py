"""The metrics that a Prometheus server may scrape, and a Grafana dashboard made from the same table, so that it names
only metrics that exist. A rank is never a label: a million ranks would make a million series."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from phalanx.observe.readings import READINGS

About = dict[str, Any]
PREFIX = "phalanx"


@dataclass(frozen=True, slots=True)
class Metric:
    """`values` yields pairs of label values and a number for one run. A counter's name ends in _total."""

    name: str
    help: str
    values: Callable[[About], Iterable[tuple[tuple[str, ...], Any]]]
    labels: tuple[str, ...] = ()
    unit: str = "short"  # Grafana's name for the unit
    panel: str = ""  # the title of a panel; "": none

    @property
    def full_name(self) -> str:
        return f"{PREFIX}_{self.name}"


def _plain(key: str) -> Callable[[About], Iterable[tuple[tuple[str, ...], Any]]]:
    return lambda about: [((), about[key])]


def _good(key: str) -> Callable[[About], Iterable[tuple[tuple[str, ...], Any]]]:
    return lambda about: [((), about["goodput"][key])]


def _readings(name: str) -> Callable[[About], Iterable[tuple[tuple[str, ...], Any]]]:
    return lambda about: [
        ((stat,), about["readings"][name][stat]) for stat in ("mean", "min", "max") if name in about["readings"]
    ]


METRICS = (
    Metric("step", "Committed steps.", _plain("step"), panel="Step"),
    Metric("steps_planned", "Steps that the job asks for.", _plain("steps")),
    Metric("loss", "Training loss of the last step, nats per token.", _plain("loss"), panel="Loss"),
    Metric("grad_norm", "Gradient norm of the last step.", _plain("grad_norm"), panel="Gradient norm"),
    Metric(
        "expert_load_ratio",
        "Tokens of the busiest expert over the mean of its layer, in the last step.",
        lambda about: [((), about["experts"]["load"])] if about["experts"] else [],
        panel="Expert load",
    ),
    Metric("learning_rate", "Learning rate of the last step.", _plain("lr")),
    Metric("tokens_per_second", "Tokens per second of the last step.", _plain("tokens_per_s"), panel="Throughput"),
    Metric("mfu_ratio", "Model FLOPs utilisation of the last step.", _plain("mfu"), unit="percentunit", panel="MFU"),
    Metric("step_duration_seconds", "Median of the last steps.", _plain("step_s"), unit="s", panel="Step time"),
    Metric(
        "step_phase_seconds",
        "Phases of a step, median of the last ones: the longest work of a rank, the shortest wait.",
        lambda about: [((phase,), took) for phase, took in about["phases"].items()],
        ("phase",),
        unit="s",
        panel="Phases of a step",
    ),
    Metric("ranks", "Ranks of the layout.", _plain("ranks")),
    Metric(
        "goodput_ratio",
        "Share of GPU-seconds in steps that count.",
        _good("ratio"),
        unit="percentunit",
        panel="Goodput",
    ),
    Metric(
        "effective_training_ratio",
        "Share of the wall-clock time in which steps that count were done, by however many ranks.",
        _good("effective"),
        unit="percentunit",
    ),
    Metric(
        "mtbf_seconds", "Wall-clock time for each failure.", _good("mtbf_s"), unit="s", panel="Time between failures"
    ),
    Metric(
        "gpu_seconds",  # not a counter: productive time becomes rollback when a step is abandoned
        "GPU-seconds by state; every one is in exactly one.",
        lambda about: [((row["state"],), row["gpu_s"]) for row in about["goodput"]["states"]],
        ("state",),
        unit="s",
        panel="GPU-seconds by state",
    ),
    Metric("cost_dollars_total", "What the GPU-seconds cost.", _good("dollars"), unit="currencyUSD", panel="Cost"),
    Metric("failures_total", "Failures that stopped the gang.", _good("failures"), panel="Failures"),
    Metric("incidents_total", "Everything that broke.", _plain("incidents")),
    Metric("rank_times_dropped_total", "Step times of ranks that no aggregator could keep.", _plain("near_dropped")),
    Metric(
        "checkpoint_last_durable_timestamp_seconds",
        "When the newest checkpoint became durable.",
        lambda about: [((), about["durable"]["time"])] if about["durable"] else [],
        unit="dateTimeAsIso",
        panel="Last durable checkpoint",
    ),
    *(
        Metric(known.metric, known.help, _readings(name), ("stat",), known.unit, known.help.rstrip("."))
        for name, known in READINGS.items()
    ),
    Metric("running", "1: it trains now.", lambda about: [((), int(about["state"] == "running"))]),
    Metric(
        "run_info",
        "What the run is.",
        lambda about: [((about["state"], about["layout"], str(about["promise"])), 1)],
        ("state", "layout", "promise"),
    ),
)


def families(runs: list[About]) -> list[Any]:
    """Return the metrics of these runs as prometheus_client objects."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    out = []
    for metric in METRICS:
        kind = CounterMetricFamily if metric.name.endswith("_total") else GaugeMetricFamily
        family = kind(metric.full_name, metric.help, labels=("run", "job", *metric.labels))
        for about in runs:
            for labels, value in metric.values(about):
                if isinstance(value, int | float):
                    family.add_metric([about["run"], about["name"], *labels], float(value))
        out.append(family)
    return out


def exposition(runs: list[About]) -> str:
    """Return the text that a Prometheus server reads."""
    from prometheus_client import CollectorRegistry, generate_latest

    class Collector:
        def collect(self) -> list[Any]:
            return families(runs)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    return generate_latest(registry).decode()


def grafana() -> dict[str, Any]:
    """Build a dashboard over METRICS."""
    panels: list[dict[str, Any]] = []
    for metric in METRICS:
        if not metric.panel:
            continue
        expression, legend = f'{metric.full_name}{{run=~"$run"}}', "{{run}}"
        if metric.labels:
            legend = "{{run}} " + " ".join(f"{{{{{label}}}}}" for label in metric.labels)
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "timeseries",
                "title": metric.panel,
                "description": metric.help,
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "gridPos": {"h": 8, "w": 12, "x": 12 * (len(panels) % 2), "y": 8 * (len(panels) // 2)},
                "fieldConfig": {"defaults": {"unit": metric.unit}, "overrides": []},
                "targets": [{"expr": expression, "legendFormat": legend, "refId": "A"}],
            }
        )
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        {
            "name": "run",
            "type": "query",
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "query": f"label_values({PREFIX}_step, run)",
            "includeAll": True,
            "multi": True,
            "refresh": 2,
        },
    ]
    return {
        "title": "Phalanx runs",
        "uid": "phalanx-runs",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": variables},
        "panels": panels,
    }
