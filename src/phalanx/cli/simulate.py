"""`phalanx simulate`: simulate a fleet of up to a million GPUs with failures, driven by the real control plane."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from phalanx.twin.scenario import Scenario
    from phalanx.twin.seeds import Result


def simulate(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO|FILE.toml|JOB.toml|RUN", help="Left out: list those that are shipped.")
    ] = "",
    seeds: Annotated[
        int, typer.Option(metavar="N", min=1, max=100_000, help="How many fleets, each with its own failures.")
    ] = 3,
    what_if: Annotated[
        list[str] | None,
        typer.Option("--what-if", metavar="spares=2%,detect=5s", help="Beside it, on the same seeds; repeatable."),
    ] = None,
    gpus: Annotated[int, typer.Option(metavar="N", help="For a job file: how many chips.", show_default=False)] = 0,
    hardware: Annotated[str, typer.Option(metavar="NAME", help="For a job file: a chip or node.")] = "",
    days: Annotated[
        float | None, typer.Option(metavar="N", help="Of simulated time; the scenario's own if left out.")
    ] = None,
    alternatives: Annotated[
        bool, typer.Option("--alternatives", help="Beside it: every policy, and other ways to combine gradients.")
    ] = False,
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Beside it: checkpoints more and less often than Young and Daly say.")
    ] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Pictures, as one page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: shares, seconds, dollars.")] = False,
) -> None:
    """Simulate a job and its failures. For example: phalanx simulate llama3-16k --what-if interval=60min"""
    from phalanx.twin.alternatives import Beside, around_best_interval, policies, ways
    from phalanx.twin.scenario import shipped
    from phalanx.twin.seeds import many

    if not scenario:
        for name, about in shipped().items():
            print(f"{name:22} {about}")
        return
    if folder := _run_folder(scenario):
        _relive(folder, as_json, what_if or gpus or hardware or days or html or alternatives or intervals)
        return
    base, steps = _find(scenario, gpus, hardware)
    if days is not None:
        base = base.changed(f"days={days}")
    cases = [base, *(base.changed(text) for text in what_if or [])]
    results = [many(case, seeds, _tell) for case in cases]
    beside = Beside(base)
    if alternatives:
        beside.ways = ways(base, results[0])
        results += policies(base, seeds, _tell)
    if intervals:
        beside.intervals = around_best_interval(base, seeds, _tell)
    if html:
        _write(html, results, beside)
    if as_json:
        import json

        first = results[0].to_json()
        if steps:
            ends, dollars = results[0].days_for(steps), results[0].dollars_for(steps)
            first["days_to_end"] = {name: days if days < math.inf else None for name, days in ends.items()}
            first["ends"] = {name: _date(days) if days < math.inf else None for name, days in ends.items()}
            first["dollars_to_end"] = dollars if dollars != math.inf else None
        print(json.dumps({**first, "what_if": [r.to_json() for r in results[1:]], **beside.to_json()}, indent=2))
        return
    print("\n".join(_text(results, steps)))
    for title, rows in beside.tables():
        print("\n".join(["", title, *_aligned(rows)]))
    if html:
        print(f"\npictures: {html}")


def _run_folder(name: str) -> Path | None:
    """Return the folder of a run; None if the name is a scenario or a job."""
    from phalanx.cli.runs import find_folder
    from phalanx.twin.scenario import shipped

    if (Path(name) / "meta.json").is_file():
        return Path(name)
    runs = Path("runs")
    is_other = name.endswith(".toml") or Path(name).exists() or name in shipped() or not runs.is_dir()
    return None if is_other or not any(p.name.startswith(name) for p in runs.iterdir()) else find_folder(name, runs)


def _relive(folder: Path, as_json: bool, others: Any) -> None:
    """Say what the failures of a run would have cost under each policy."""
    from phalanx.cli.history import past_of
    from phalanx.core.errors import UserError
    from phalanx.twin.past import replay
    from phalanx.twin.scenario import POLICIES

    if others:
        remedy = "leave the other options out: every policy is shown"
        raise UserError("a run is played again as it was", field="scenario", value=str(folder), remedy=remedy)
    past = past_of(folder)
    policies = list(POLICIES) if past.replicas > 1 else ["restart", "hot"]
    found = {name: replay(past, name) for name in policies}
    own = found["contained" if past.replicas > 1 else "hot"]
    if as_json:
        import json

        said = {
            "run": past.name, "ranks": past.ranks, "steps": past.steps, "step_s": past.step_s,
            "recorded": {"seconds": past.length_s, "effective_training_time": past.effective},
            "interruptions": len(past.mishaps), "effective_training_time": own.effective,
            "waterfall": own.waterfall, "policies": [each.to_json() for each in found.values()],
        }  # fmt: skip
        print(json.dumps(said, indent=2))
        return
    print(
        f"{past.name}: {past.steps:,} steps of {past.step_s:.3g} s on {past.ranks} ranks, {len(past.mishaps)} failures"
    )
    for mishap in past.mishaps:
        what = {"worker": "rank {} died", "hang": "rank {} hung", "node": "the node of rank {} died"}[mishap.kind]
        print(f"  after {mishap.at_s:8.1f} s  {what.format(mishap.rank)}")
    ideal = past.steps * past.step_s
    spent = {"as recorded": (past.length_s, past.effective)}
    spent |= {name: (each.seconds, each.effective) for name, each in found.items()}
    rows = [["", "seconds", "effective", "GPU-seconds lost"]]
    for name, (seconds, share) in spent.items():
        rows.append([name, f"{seconds:,.1f}", f"{share:.2%}", f"{(seconds - ideal) * past.ranks:,.0f}"])
    print("\n".join([*_aligned(rows), "", *(f"{name}: {POLICIES[name]}" for name in found)]))


def _find(name: str, gpus: int, hardware: str) -> tuple[Scenario, int]:
    """Return the scenario, and the steps that a job file asks for (0: it is no job file)."""
    from phalanx.core.errors import UserError
    from phalanx.twin.scenario import load

    is_job = name.endswith(".toml") and Path(name).is_file() and not _is_scenario(Path(name))
    if is_job and not (gpus and hardware):
        remedy = "say where it is to run, such as --gpus 1024 --hardware h100"
        raise UserError("a job file has no fleet", field="scenario", value=name, remedy=remedy)
    if not is_job and (gpus or hardware):
        remedy = "leave them out, or write --what-if gpus=..."
        raise UserError("--gpus and --hardware are for job files", field="scenario", value=name, remedy=remedy)
    return _of_job(name, gpus, hardware) if is_job else (load(name), 0)


def _is_scenario(path: Path) -> bool:
    import tomllib

    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        return True  # loading it as a scenario reports what is wrong
    return bool({"step_s", "base", "gpus"} & table.keys())


def _of_job(name: str, gpus: int, hardware: str) -> tuple[Scenario, int]:
    from phalanx.cli.plan_ask import Options, ask
    from phalanx.twin.from_plan import of_plan, steps_of

    plan = ask(Options(name, gpus, hardware)).plan
    return of_plan(plan, Path(name).stem), steps_of(plan)


def _tell(scenario: Scenario, done: float, seeds: int) -> None:
    """Show progress. `done`: the finished seeds, plus the share of days of the current one."""
    if sys.stderr.isatty():
        filled, end = int(30 * done / seeds), "\n" if done == seeds else ""
        day = f", day {done % 1 * scenario.days:.3g} of {scenario.days:g}" if done < seeds else ""
        far = f"{int(done)}/{seeds} seeds{day}"
        bar = f"{'#' * filled}{'.' * (30 - filled)}"
        print(f"\r{scenario.name[:30]:30} [{bar}] {far:40}", end=end, file=sys.stderr, flush=True)


def _text(results: list[Result], steps: int) -> list[str]:
    from phalanx.twin.spent import PARTS

    first = results[0]
    s = first.scenario
    lines = [s.about, f"{s.gpus:,} GPUs, {s.days:g} days, {len(first.outcomes)} seeds", ""]
    names = ["", *(["as it is", *(r.scenario.name.removeprefix(s.name).strip() for r in results[1:])])]
    rows: list[list[str]] = [names]
    rows.append(["effective training time", *(f"{r.effective:.2%}" for r in results)])
    rows.append(["  5 % to 95 % of seeds", *(f"{r.quantile(0.05):.1%} to {r.quantile(0.95):.1%}" for r in results)])
    rows.append(["interruptions", *(f"{r.interruptions:,.1f}" for r in results)])
    rows.append(["spare nodes", *(f"{r.spares()['nodes']:,}" for r in results)])
    rows.append(["  used, 95 % of seeds", *(r.spares_used for r in results)])
    rows += [[f"  {part}", *(f"{r.waterfall[part]:.2%}" for r in results)] for part in PARTS]
    for key, title in (
        ("gpu_hours", "GPU-hours lost"),
        ("dollars", "dollars lost"),
        ("kwh", "kWh lost"),
        ("kg_co2", "kg CO2 lost"),
    ):
        rows.append([title, *(_lost(r.costs(), key) for r in results)])
    if steps:
        ends = [r.days_for(steps) for r in results]
        days = [[f"{d[key]:.2f}" if d[key] < math.inf else "never" for key in ("mean", "p5", "p95")] for d in ends]
        rows.append(["days to the end", *(f"{mean} ({p5} to {p95})" for mean, p5, p95 in days)])
        rows.append(["  started now, it ends", *(_date(d["mean"]) for d in ends)])
        rows.append(["  between", *(f"{_date(d['p5'])} and {_date(d['p95'])}" for d in ends)])
        rows.append(["dollars to the end", *(_dollars(r.dollars_for(steps)) for r in results)])
    return [*lines, *_aligned(rows), "", f"digest {first.outcomes[0].digest} (seed 0)"]


def _date(days: float) -> str:
    """Format the time this many days from now."""
    from datetime import datetime, timedelta

    try:
        return f"{datetime.now() + timedelta(days=days):%Y-%m-%d %H:%M}"
    except OverflowError:
        return "never"


def _dollars(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value < math.inf else "never"


def _aligned(rows: list[list[str]]) -> list[str]:
    """Align the first column to the left and the others to the right."""
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        row[0].ljust(width[0]) + "".join("  " + cell.rjust(w) for cell, w in zip(row[1:], width[1:], strict=True))
        for row in rows
    ]


def _lost(costs: dict[str, dict[str, float | None]], key: str) -> str:
    values = [c[key] for part, c in costs.items() if part != "productive"]
    return "-" if None in values else f"{sum(v for v in values if v is not None):,.0f}"


def _write(path: Path, results: list[Any], beside: Any) -> None:
    from phalanx.core.errors import UserError
    from phalanx.twin.report import page

    try:
        path.write_text(page(results, beside.tables()), encoding="utf-8")
    except OSError as error:
        remedy = "name a file in a folder that is there and that you may write to"
        raise UserError(f"cannot be written: {error.strerror}", field="html", value=str(path), remedy=remedy) from None
