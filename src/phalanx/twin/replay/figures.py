"""Report the results of a replay, for people and for programs."""

from __future__ import annotations

from typing import Any

from phalanx.twin.replay.driver import Figures, Life
from phalanx.twin.replay.machines import Fleet
from phalanx.twin.replay.trace import Trace

S = 10**9


def report(trace: Trace, fleet: Fleet, policy: str, parts: list[Figures]) -> dict[str, Any]:
    """Sum up the replay, with times in seconds. `parts`: one per queue."""
    lives = [life for part in parts for life in part.lives]
    span = max(part.last_ns for part in parts) - min(part.first_ns for part in parts)
    room, hops, cpu_s = fleet.gpus * max(1, span), sum(p.hops for p in parts), sum(p.cpu_s for p in parts)
    decisions = sum(part.decisions for part in parts)
    return {
        "policy": policy,
        "jobs": len(lives),
        "skipped_rows": trace.skipped,
        "gpus": fleet.gpus,
        "nodes": len(fleet.names),
        "completion_s": _spread([_completion(life) for life in lives]),
        "queueing_s": _spread([_completion(life) - life.job.duration_ns for life in lives]),
        "first_start_s": _spread([life.first_ns - life.job.submit_ns for life in lives]),
        "makespan_s": round(span / S, 3),
        "utilisation": round(sum(p.busy for p in parts) / room, 6),
        "fragmentation": round(sum(p.scattered for p in parts) / room, 6),
        "cross_leaf_traffic": round(sum(p.crossings for p in parts) / hops, 6) if hops else 0.0,
        "preemptions": sum(life.stops for life in lives),
        "decisions": decisions,
        "decisions_per_s": round(decisions / max(cpu_s, 1e-9), 1),
        "cpu_s": round(cpu_s, 3),
        "vcs": _by_vc(lives),
    }


def _completion(life: Life) -> int:
    return life.end_ns - life.job.submit_ns


def _spread(values: list[int]) -> dict[str, float]:
    """Return the mean and quantiles (the smallest value that at least that share of the values does not exceed)."""
    ordered = sorted(values)

    def at(percent: int) -> float:
        return round(ordered[max(0, -(-len(ordered) * percent // 100) - 1)] / S, 3)

    return {"mean": round(sum(values) / len(values) / S, 3), "p50": at(50), "p99": at(99), "max": at(100)}


def _by_vc(lives: list[Life]) -> dict[str, dict[str, Any]]:
    groups: dict[str, list[Life]] = {}
    for life in lives:
        groups.setdefault(life.job.vc, []).append(life)
    if groups.keys() == {""}:
        return {}
    return {
        vc: {
            "jobs": len(group),
            "gpu_hours": round(sum(x.job.gpus * x.job.duration_ns for x in group) / S / 3600, 1),
            "mean_completion_s": _spread([_completion(x) for x in group])["mean"],
            "mean_queueing_s": _spread([_completion(x) - x.job.duration_ns for x in group])["mean"],
        }
        for vc, group in sorted(groups.items())
    }


def text(said: dict[str, Any]) -> str:
    lines = [
        f"{said['policy']}: {said['jobs']:,} jobs on {said['gpus']:,} GPUs of {said['nodes']:,} nodes"
        + (f" ({said['skipped_rows']:,} rows without GPUs left out)" if said["skipped_rows"] else ""),
        f"{'':26}{'mean':>14}{'p50':>14}{'p99':>14}{'longest':>14}",
    ]
    for key, title in (
        ("completion_s", "completion time, s"),
        ("queueing_s", "queueing time, s"),
        ("first_start_s", "until the first start, s"),
    ):
        lines.append(f"{title:26}" + "".join(f"{said[key][name]:>14,.0f}" for name in ("mean", "p50", "p99", "max")))
    lines += [
        f"utilisation               {said['utilisation']:>14.2%}",
        f"fragmentation             {said['fragmentation']:>14.2%}  of all GPUs: free on nodes in use",
        f"cross-leaf traffic        {said['cross_leaf_traffic']:>14.2%}  of the neighbours in rank order, by GPU-time",
        f"preemptions               {said['preemptions']:>14,}",
        f"decisions per CPU-second  {said['decisions_per_s']:>14,.0f}",
    ]
    if said["vcs"]:
        lines.append(f"{'vc':18}{'jobs':>8}{'GPU-hours':>14}{'completion, s':>16}{'queueing, s':>14}")
        for vc, row in said["vcs"].items():
            figures = f"{row['gpu_hours']:>14,.0f}{row['mean_completion_s']:>16,.0f}{row['mean_queueing_s']:>14,.0f}"
            lines.append(f"{vc or '-':18}{row['jobs']:>8,}{figures}")
    return "\n".join(lines)
