"""`phalanx runs`: list, show, compare and export the records of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from phalanx.observe.story import Story

runs_app = typer.Typer(no_args_is_help=True, help="The records of runs: list, show, compare, export.")
Dir = Annotated[Path, typer.Option("--dir", metavar="RUNS_DIR", help="Where the records are.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Price = Annotated[
    float | None, typer.Option(metavar="N", min=0.0, help="Dollars per GPU-hour, in place of the record's.")
]
Run = Annotated[str, typer.Argument(metavar="RUN", help="A folder, a name in RUNS_DIR, the beginning of one, or last.")]


def say(text: str) -> None:
    """Print a line that may hold text from a run's record."""
    from phalanx.observe.words import printable

    print(printable(text))


def open_story(run: str, root: Path, price: float | None = None, field: str = "RUN") -> Story:
    from phalanx.observe.story import Story

    return Story(find_folder(run, root, field), price)


def find_folder(run: str, root: Path, field: str = "RUN") -> Path:
    """Find a run by its folder, its name, the beginning of its name, or `last`."""
    from phalanx.core.errors import UserError
    from phalanx.observe.story import find_runs

    if (Path(run) / "meta.json").is_file():
        return Path(run)
    runs = find_runs(root)
    found = runs[:1] if run == "last" else [p for p in runs if p.name == run] or [
        p for p in runs if p.name.startswith(run) or p.name.rsplit("-", 1)[-1] == run
    ]  # fmt: skip
    if len(found) == 1:
        return found[0]
    remedy = f"`phalanx runs ls {root}` lists them" if runs else f"name the folder of a run; {root} has none"
    text = f"{len(found)} runs begin like that" if found else "there is no such run"
    raise UserError(text, field=field, value=run, remedy=remedy)


@runs_app.command("ls")
def ls_command(
    root: Annotated[Path, typer.Argument(metavar="RUNS_DIR", help="Where the records are.")] = Path("runs"),
    as_json: Json = False,
    price: Price = None,
) -> None:
    """List the runs, the newest first."""
    from phalanx.core.errors import UserError
    from phalanx.observe.story import find_runs
    from phalanx.observe.words import describe_any

    if not root.is_dir():
        remedy = "name the folder that holds runs (run.dir of the job)"
        raise UserError("there is no such folder", field="RUNS_DIR", value=str(root), remedy=remedy)
    rows = [describe_any(path, price) for path in find_runs(root)]
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        say(f"{root} has no runs yet; `phalanx train` makes one")
        return
    width = max(len(r["run"]) for r in rows)
    say(f"{'run':<{width}}  {'state':<8} {'step':>15} {'loss':>8} {'goodput':>8} {'incidents':>9} {'GPU-hours':>10}")
    for r in rows:
        loss = f"{r['loss']:.4f}" if isinstance(r["loss"], float) else "-"
        if r["state"] == "unreadable":
            say(f"{r['run']:<{width}}  {r['headline']}")
            continue
        step = f"{r['step']:,}/{r['steps']:,}"
        good = r["goodput"]
        say(
            f"{r['run']:<{width}}  {r['state']:<8} {step:>15} {loss:>8} {good['ratio']:>8.1%} {r['incidents']:>9} "
            f"{good['gpu_s'] / 3600:>10.3g}"
        )


@runs_app.command("show")
def show_command(run: Run, root: Dir = Path("runs"), as_json: Json = False, price: Price = None) -> None:
    """Tell a run's story: how it goes, where its GPU-seconds went, and what broke."""
    from phalanx.observe.goodput import STATES
    from phalanx.observe.incidents import figure, money, seconds
    from phalanx.observe.words import describe

    story = open_story(run, root, price)
    about, incidents = describe(story), story.incidents()
    if as_json:
        record = {"job": story.part.job, "meta": story.part.meta, "summary": story.part.summary}
        print(json.dumps({**about, "incidents": [one.to_dict() for one in incidents], "record": record}))
        return
    good = about["goodput"]
    say(f"{about['run']}\n{about['headline']}\n")
    if len(about["parts"]) > 1:
        say(f"continues {' -> '.join(about['parts'][:-1])}")
    for branch in about["branches"]:
        say(f"branch: {branch['steps']:,} steps from step {branch['step']:,} on were abandoned and done again")
    mtbf = f", one failure every {seconds(good['mtbf_s'])}" if good["mtbf_s"] else ""
    energy = f", {figure(good['kwh'])} kWh" if good["kwh"] is not None else ""
    say(f"{figure(good['gpu_s'])} GPU-seconds on {good['ranks']:,} ranks{energy}{mtbf}")
    say(f"training for {good['effective']:.1%} of {seconds(good['wall_s'])}, goodput {good['ratio']:.1%}")
    for row in good["states"]:
        if row["gpu_s"]:
            cost = f"{money(row['dollars']):>10}" if row["dollars"] is not None else ""
            say(f"  {row['state']:<11} {row['share']:>7.2%} {row['gpu_s']:>12,.2f} s{cost}  {STATES[row['state']]}")
    for one in incidents:
        say(f"\nincident {one.number}, {one.kind}: {one.verdict()}")
        if phases := one.phases():
            say("  " + ", ".join(f"{name} {seconds(took)}" for name, took in phases.items()))
    for spike in about["spikes"][:10]:
        loss, usual = (
            f"{value:.3f}" if value is not None else "not finite" for value in (spike["loss"], spike["usual"])
        )
        say(f"\nloss spike at step {spike['step']:,}: {loss}, usually {usual}; samples {spike['samples']}")


@runs_app.command("fleet")
def fleet_command(run: Run, root: Dir = Path("runs"), as_json: Json = False) -> None:
    """List the nodes of a run, their ranks and how they do, and which step is safe where."""
    from phalanx.observe import durability, placement
    from phalanx.observe.incidents import seconds

    story = open_story(run, root)
    found, tiers = placement.fleet(story.part), durability.tiers(story)
    if as_json:
        print(json.dumps({**found, "headline": placement.headline(found), "saved": tiers}))
        return
    say(placement.headline(found))
    for node in found["nodes"]:
        ranks = ", ".join(f"{a:,}" if b == a + 1 else f"{a:,}-{b - 1:,}" for a, b in node["ranks"]) or "none"
        deaths = f"  {node['deaths']} deaths, the last: {node['why']}" if node["deaths"] else ""
        say(f"  {node['name']:<16} {node['state']:<6} ranks {ranks}{deaths}")
    say(f"\n{durability.headline(tiers, story.done)}")
    for tier in tiers:
        again = f"{tier['behind']:,} steps ({seconds(tier['redo_s'])}) again" if tier["behind"] else "nothing again"
        say(f"  {tier['tier']:<7} step {tier['step']:>9,}  {again}; survives the loss of {tier['survives']}")


@runs_app.command("ranks")
def ranks_command(
    run: Run,
    root: Dir = Path("runs"),
    last: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only of the last N steps.")] = None,
    as_json: Json = False,
) -> None:
    """List the ranks that worked longest in a step, against the median rank of that step."""
    from phalanx.observe.tiles import FOLDER, TileReader

    story, found = open_story(run, root), []
    if (story.path / FOLDER / "tiles.json").is_file():
        found = TileReader(story.path / FOLDER).slowest((max(0, story.done - (last or story.done)), story.done))
    if as_json:
        print(json.dumps(found))
        return
    if not found:
        say("no rank has told its step times")
    for one in found:
        a, b = one["ranks"]
        name = f"rank {a:,}" if b == a + 1 else f"ranks {a:,} to {b - 1:,}"
        say(f"{name:<28} at most {one['ratio']:.2f} x the median")


@runs_app.command("diff")
def diff_command(
    one: Annotated[str, typer.Argument(metavar="RUN", help="A run, as in `show`.")],
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Another one.")],
    root: Dir = Path("runs"),
    as_json: Json = False,
) -> None:
    """Find the first step where two runs part, and what differs between them. Exits with 1 if they part."""
    from phalanx.observe.compare import compare

    found = compare(open_story(one, root), open_story(other, root, field="OTHER"))
    if as_json:
        print(json.dumps(found))
    else:
        say(found["verdict"])
        for kind, title in (("job", "the job"), ("meta", "code, libraries, machine, data")):
            if found[kind]:
                say(f"\n{title}:")
            for row in found[kind]:
                say(f"  {row['field']:<28} {_short(row['values'][0])}  |  {_short(row['values'][1])}")
    if found["part"] or not found["compared"]:
        raise typer.Exit(1)


@runs_app.command("export")
def export_command(
    run: Run,
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .csv, .json, .parquet or .tfevents (TensorBoard) file.")],
    root: Dir = Path("runs"),
) -> None:
    """Write the steps that count to a file, one row each."""
    from phalanx.observe.export import write_steps

    story = open_story(run, root)
    write_steps(story, out)
    say(f"{len(story.rows):,} steps written to {out}")


@runs_app.command("query")
def query_command(
    run: Run,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="Over the tables steps, events, incidents and states.")],
    root: Dir = Path("runs"),
    as_json: Json = False,
    price: Price = None,
) -> None:
    """Ask a run's history in SQL: phalanx runs query last "SELECT step, loss FROM steps ORDER BY loss DESC LIMIT 3"."""
    from phalanx.observe.history import query

    names, rows = query(open_story(run, root, price), sql)
    if as_json:
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], default=str))
        return
    say("  ".join(names))
    for row in rows:
        say("  ".join(f"{value:.6g}" if isinstance(value, float) else str(value) for value in row))


@runs_app.command("send")
def send_command(
    run: Run,
    to: Annotated[str, typer.Option(metavar="TRACKER", help="mlflow:URI, wandb:PROJECT or otlp:URL (OpenTelemetry).")],
    follow: Annotated[bool, typer.Option("--follow", help="Until the run ends.")] = False,
    root: Dir = Path("runs"),
) -> None:
    """Send the steps and incidents of a run to another tool. Sent again, it continues where it was."""
    from phalanx.observe.trackers import open_tracker, send

    story = open_story(run, root)
    say(f"{send(story, open_tracker(to, story), follow):,} steps sent to {to}")


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
