"""`phalanx top` and `phalanx logs`: watch a run in the terminal."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.runs import Dir, Json, Price, open_story, say

if TYPE_CHECKING:
    from rich.console import RenderableType

    from phalanx.observe.story import Story

BARS = " ▁▂▃▄▅▆▇█"
Run = Annotated[str, typer.Argument(metavar="RUN", help="A folder, a name in RUNS_DIR, the beginning of one, or last.")]


def top(
    run: Run = "last",
    root: Dir = Path("runs"),
    once: Annotated[bool, typer.Option("--once", help="Print it once and stop.")] = False,
    as_json: Json = False,
    every: Annotated[float, typer.Option(metavar="N", min=0.1, max=60, help="Seconds between two looks.")] = 1.0,
    price: Price = None,
) -> None:
    """Watch a run: how it goes, where the GPU-seconds go, what broke. Ends when the run does."""
    from phalanx.observe.words import describe
    from phalanx.run.console import PlainConsole

    story = open_story(run, root, price)
    if as_json:
        about = describe(story)
        print(json.dumps({**about, "incidents": [one.to_dict() for one in story.incidents()[-5:]]}))
        return
    console = PlainConsole()
    if once or not console.is_terminal:
        console.print(_screen(story, console.width))
        return
    from rich.live import Live

    with Live(_screen(story, console.width), console=console, screen=False, auto_refresh=False) as live:
        while story.part.state == "running":
            time.sleep(every)
            story.update()
            live.update(_screen(story, console.width), refresh=True)


def _screen(story: Story, width: int) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from phalanx.observe.incidents import figure, seconds
    from phalanx.observe.words import describe, printable

    about, good = describe(story), story.goodput()
    lines: list[RenderableType] = [
        Text(printable(about["headline"]), style="bold"),
        Text(printable(story.name), style="dim"),
        Text(""),
    ]
    wide = max(10, min(60, width - 40))
    for name, key, unit in (("loss", "loss", ""), ("tokens/s", "tokens_per_s", ""), ("step", "time_s", " s")):
        values = [row[key] for row in story.rows[-4000:] if isinstance(row.get(key), float)]
        if values:
            lines.append(Text(f"{name:<10}{figure(values[-1]):>10}{unit:<3} {sparkline(values, wide)}"))
    table = Table.grid(padding=(0, 2))
    for row in good["states"]:
        if row["gpu_s"]:
            bar = "█" * round(wide * row["share"]) or "▏"
            table.add_row(row["state"], f"{row['share']:7.2%}", f"{figure(row['gpu_s'])} GPU-s", bar)
    lines += [Text(""), table]
    if about["phases"]:
        spent = "  ".join(f"{name} {seconds(took)}" for name, took in about["phases"].items())
        lines.append(Text(f"\na step, in the median: {spent}"))
    if about["slowest"]:
        named = ", ".join(f"rank {rank} {seconds(took)}" for took, rank in about["slowest"])
        lines.append(Text(f"most work of its own in the last step: {named}"))
    for one in story.incidents()[-5:]:
        lines.append(Text(printable(f"\n{one.number} {one.verdict()}")))
    return Group(*lines)


def sparkline(values: list[float], width: int) -> str:
    """Draw the maximum of each piece as bars, so that a spike stays visible."""
    pieces = [values[i * len(values) // width : max(i * len(values) // width + 1, (i + 1) * len(values) // width)]
              for i in range(min(width, len(values)))] if len(values) > width else [[v] for v in values]  # fmt: skip
    tops = [max(piece) for piece in pieces]
    low, high = min(tops), max(tops)
    span = high - low or 1.0
    return "".join(BARS[1 + round((len(BARS) - 2) * (top - low) / span)] for top in tops)


def logs(
    run: Run = "last",
    root: Dir = Path("runs"),
    rank: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only this rank.")] = None,
    grep: Annotated[str, typer.Option(metavar="TEXT", help="Only lines with this text.")] = "",
    as_json: Json = False,
) -> None:
    """Print what the ranks wrote, equal lines once, with the ranks that differ."""
    from phalanx.core.errors import UserError
    from phalanx.engines import table
    from phalanx.observe.logs import find_logs, folded

    if reference := table.reference_of(run):
        if rank is not None or as_json:
            remedy = "leave out --rank and --json: what the controller says is there"
            raise UserError("its record is not here", field="RUN", value=run, remedy=remedy)
        for line in table.logs(reference).splitlines():
            if grep in line:
                say(line)
        return
    folder = open_story(run, root).path / "logs"
    known = {number for number, _ in find_logs(folder)}
    if rank is not None and rank not in known:
        remedy = f"ranks with a log: {', '.join(map(str, sorted(known)[:8])) or 'none'}"
        raise UserError("that rank has no log", field="--rank", value=rank, remedy=remedy)
    found: dict[str, Any] = folded(folder, grep, rank)
    if as_json:
        print(json.dumps(found))
        return
    if found["cut"]:
        say(found["cut"])
    if not found["lines"]:
        say(f"the {found['ranks']} ranks have written nothing" + (f" with {grep!r}" if grep else ""))
    before = ""
    for line in found["lines"]:
        if line["who"] != before:
            before = line["who"]
            say(f"-- {before}")
        say(line["text"] + (f"   ({line['count']:,} times)" if line["count"] > line["on"] else ""))
