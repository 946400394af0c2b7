"""A run's story in words and figures: the one line at the top, and the object that `--json`, the page and the exporters
share."""

from __future__ import annotations

import calendar
import itertools
import re
import statistics
import time
from pathlib import Path
from typing import Any

from phalanx.observe.incidents import figure, money, plural, seconds
from phalanx.observe.phases import PHASES
from phalanx.observe.story import Story

RECENT = 200  # steps that the pace is taken from
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Replace control characters, which a terminal would obey, with their codes."""
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def overview(story: Story) -> dict[str, Any]:
    """Return the figures of a run, without its series."""
    from phalanx.observe.near import dropped  # which needs numpy

    part, goodput, incidents = story.part, story.goodput(), story.incidents()
    last: dict[str, Any] = story.rows[-1] if story.rows else {}
    eta = forecast_end(story)
    saved = [e for e in part.events if e.get("type") == "checkpoint"]
    return {
        "run": story.name,
        "path": str(story.path),
        "name": str(part.settings.get("name", "")),
        "state": part.state,
        "reason": str((part.summary or {}).get("reason", "")),
        "began": story.parts[0].began,
        "ended": part.ended,
        "last_sign": part.last_sign,
        "step": story.done,
        "steps": story.steps,
        "loss": last.get("loss"),
        "grad_norm": last.get("grad_norm"),
        "lr": last.get("lr"),
        "experts": _experts(last),
        "tokens_per_s": last.get("tokens_per_s"),
        "mfu": last.get("mfu"),
        "readings": last.get("readings") or {},
        "mfu_convention": part.meta.get("mfu_convention"),
        "step_s": _median(story),
        "phases": _median_phases(story),
        "slowest": last.get("slowest") or [],
        "plan": part.meta.get("forecast"),
        "off_plan": _off_plan(story),
        "eta": eta,
        "layout": part.layout.describe(),
        "ranks": part.layout.world_size,
        "promise": part.meta.get("promise"),
        "durable": saved[-1] if saved else None,
        "goodput": goodput,
        "incidents": len(incidents),
        "open_incidents": sum(one.open and one.stops for one in incidents),
        "parts": [p.path.name for p in story.parts],
        "branches": [{"step": b.step, "steps": len(b.rows)} for b in story.branches],
        "spikes": story.spikes(),
        "not_finite_since": story.not_finite_since,
        "near_dropped": dropped(story.path),
        "damaged_lines": sum(p.damaged for p in story.parts),
        "headline": "",
    }


def _experts(row: dict[str, Any]) -> dict[str, Any]:
    """Return how evenly the tokens of a mixture of experts were spread in a step; {}: the model is not one."""
    return {name: row[f"expert_{name}"] for name in ("load", "layer", "idle") if f"expert_{name}" in row}


def describe(story: Story) -> dict[str, Any]:
    """Return the overview with the line in words."""
    out = overview(story)
    out["headline"] = headline(out)
    return out


def describe_any(path: Path, price: float | None) -> dict[str, Any]:
    """Return the overview of a run. A run with an unreadable record must not hide the others."""
    try:
        return describe(Story(path, price))
    except Exception as error:
        return unreadable(path, error)


def unreadable(path: Path, error: Exception) -> dict[str, Any]:
    """Return the overview of a run with an unreadable record: only its name is known."""
    nothing = dict.fromkeys(
        ("step", "steps", "ended", "last_sign", "loss", "grad_norm", "lr", "tokens_per_s", "mfu", "step_s", "eta",
         "ranks", "promise", "durable", "incidents", "open_incidents", "near_dropped"), None,
    )  # fmt: skip
    reason = f"{type(error).__name__}: {error}"
    return {
        **nothing,
        "run": path.name,
        "name": path.name.rsplit("-", 2)[0],
        "began": calendar.timegm(time.strptime(path.name.rsplit("-", 2)[1], "%Y%m%dT%H%M%SZ")),
        "state": "unreadable",
        "reason": reason,
        "headline": f"Cannot be read: {reason}",
        "layout": "",
        "experts": {},
        "readings": {},
        "phases": {},
        "goodput": {"states": [], **dict.fromkeys(("ratio", "gpu_s", "dollars", "effective", "mtbf_s", "failures"))},
    }


def headline(o: dict[str, Any]) -> str:
    """Answer the first question of an operator: how is it going?"""
    good = f"{100 * o['goodput']['ratio']:.1f} % goodput"
    spent = o["goodput"]["dollars"]
    cost = f", {money(spent)} so far" if spent is not None else ""
    broke = o["incidents"]
    healed = f", {broke} {plural(broke, 'incident')}" if broke else ""
    state = o["state"]
    if state == "done":
        how = f"Done: {o['step']:,} steps in {seconds(o['goodput']['wall_s'])}"
        return f"{how}, {_loss(o)}, {good}{healed}{cost.removesuffix(' so far')}."
    if state in ("failed", "stopped"):
        reason = o["reason"].splitlines()[0] if o["reason"] else "no reason is recorded"
        return f"{state.capitalize()} at step {o['step']:,} of {o['steps']:,}: {reason}"
    if state == "lost":
        return f"Lost: no sign since {_date(o['last_sign'])}, at step {o['step']:,} of {o['steps']:,}. {_remedy(o)}"
    if o["open_incidents"]:
        return f"Recovering at step {o['step']:,} of {o['steps']:,}: something failed and training waits{cost}."
    if not o["step"]:
        return "Starting: no step is done yet."
    plan = f", {_plan(o['off_plan'])}" if o["off_plan"] is not None else ""
    eta = o["eta"]
    ends = f", ends {_date(eta['at'])} (± {seconds(eta['within_s'])})" if eta else ""
    broken = "" if o["not_finite_since"] is None else f", {_loss(o)}"
    return f"Training: step {o['step']:,} of {o['steps']:,}{broken}{plan}{ends}, {good}{healed}{cost}."


def forecast_end(story: Story) -> dict[str, Any] | None:
    """Predict when the run ends at its present pace, failures included; the interval is twice the standard error."""
    rows = story.rows[-RECENT:]
    left = story.steps - story.done
    if story.part.state != "running" or len(rows) < 3 or left <= 0:
        return None
    pace = (rows[-1]["time"] - rows[0]["time"]) / (len(rows) - 1)
    gaps = [b["time"] - a["time"] for a, b in itertools.pairwise(rows)]
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else pace
    return {"at": rows[-1]["time"] + pace * left, "within_s": 2 * error * left, "step_s": pace}


def _median(story: Story) -> float | None:
    times = [row["time_s"] for row in story.rows[-RECENT:] if isinstance(row.get("time_s"), float)]
    return statistics.median(times) if times else None


def _median_phases(story: Story) -> dict[str, float]:
    """Return the median seconds of the last steps by phase; older records have fewer phases."""
    known = [row["phases"] for row in story.rows[-RECENT:] if isinstance(row.get("phases"), dict)]
    found = {name: [p[name] for p in known if isinstance(p.get(name), float)] for name in PHASES}
    return {name: statistics.median(values) for name, values in found.items() if values}


def _off_plan(story: Story) -> float | None:
    plan, got = story.part.meta.get("forecast"), _median(story)
    if not isinstance(plan, dict) or not plan.get("step_s") or got is None:
        return None
    return got / plan["step_s"] - 1


def _plan(off: float) -> str:
    return f"on plan ({100 * off:+.1f} %)" if abs(off) < 0.05 else f"{100 * off:+.0f} % against the plan's step time"


def _loss(o: dict[str, Any]) -> str:
    if o["not_finite_since"] is not None:
        return f"the loss is not finite since step {o['not_finite_since']:,}"
    return f"loss {figure(o['loss']) if isinstance(o['loss'], float) else 'unknown'}"


def _remedy(o: dict[str, Any]) -> str:
    return "Its process is gone; continue with `phalanx train ... --resume auto`."


def _date(at: float) -> str:
    return time.strftime("%a %H:%M:%S" if abs(at - time.time()) < 86_400 else "%a %d %b %H:%M", time.localtime(at))
