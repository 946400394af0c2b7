"""`phalanx trace`: record some steps of a running job on chosen ranks, and merge them into one file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.runs import Dir, Json, open_story, say

if TYPE_CHECKING:
    from phalanx.observe.story import Story

MOST_RANKS = 16
AHEAD = 5  # steps from now, if none are named
Run = Annotated[str, typer.Argument(metavar="RUN", help="A folder, a name in RUNS_DIR, the beginning of one, or last.")]


def trace(
    run: Run = "last",
    steps: Annotated[str, typer.Option(metavar="FIRST:LAST", help="Steps to come, the last one left out.")] = "",
    ranks: Annotated[str, typer.Option(metavar="R,R,…", help="At most 16; the slowest and the first, if none.")] = "",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="A .json.gz; beside the run, if none.")] = None,
    root: Dir = Path("runs"),
    wait: Annotated[float, typer.Option(metavar="N", min=1, max=86_400, help="Seconds to wait for the ranks.")] = 600.0,
    as_json: Json = False,
) -> None:
    """Record steps of a running job with torch's profiler, and merge the ranks and the control plane into one trace,
    for Perfetto or chrome://tracing."""
    from phalanx.core.errors import RunFailed, UserError
    from phalanx.observe import traces

    story = open_story(run, root)
    first, last = _steps(steps, story)
    folder = traces.folder_of(story.path, first, last)
    files, failed = traces.received(folder)
    if story.part.state != "running":
        if not files:
            raise UserError("the run is over", field="RUN", value=run, remedy="trace one that is going")
    else:
        chosen = _ranks(ranks, story)
        _ask(story, first, last, chosen)
        if not as_json:
            say(f"ranks {', '.join(map(str, chosen))} record steps {first:,} to {last - 1:,}; now at {story.done:,}")
        files, failed = _await(story, folder, chosen, wait)
    if not files:
        why = "".join(f"; rank {rank}: {text}" for rank, text in failed.items())
        remedy = "name steps that are to come, and give it longer with --wait"
        raise RunFailed(f"no rank has sent its trace of steps {first} to {last}{why}", remedy=remedy)
    made = traces.merged(story, folder)
    target = out or folder.with_suffix(".json.gz")
    try:
        traces.write(made, target)
    except OSError as error:
        remedy = "name a file in a folder that you may write to"
        raise UserError(f"it cannot be written: {error}", field="--out", value=str(target), remedy=remedy) from None
    calls = traces.collectives(made)
    if as_json:
        print(json.dumps({"file": str(target), "ranks": sorted(files), "failed": failed, "collectives": calls}))
        return
    for rank, text in failed.items():
        say(f"rank {rank} has sent nothing: {text}")
    _tell(calls)
    say(f"{len(made['traceEvents']):,} events of {len(files)} ranks: {target}")


def _ask(story: Story, first: int, last: int, ranks: list[int]) -> None:
    from phalanx.cli.nodes import ask

    now = max(story.done, int(ask(story.path, {"type": "status"})["step"]))  # either may be late
    if first <= now:
        from phalanx.core.errors import UserError

        remedy = f"name steps after it: --steps {now + AHEAD}:{now + AHEAD + last - first}"
        raise UserError(f"the run is at step {now:,}", field="--steps", value=f"{first}:{last}", remedy=remedy)
    ask(story.path, {"type": "ask", "event": {"kind": "Trace", "first": first, "last": last, "ranks": ranks}})


def _steps(text: str, story: Story) -> tuple[int, int]:
    from phalanx.core.errors import UserError

    if not text:
        return story.done + AHEAD, story.done + AHEAD + 3
    first, colon, last = text.partition(":")
    if not (colon and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        remedy = "write FIRST:LAST, as in 100:103"
    elif not 0 < int(last) - int(first) <= 100:
        remedy = "1 to 100 steps, in ascending order"
    elif int(last) > story.steps > 0:
        remedy = f"the run has {story.steps:,} steps"
    else:
        return int(first), int(last)
    raise UserError("no such steps", field="--steps", value=text, remedy=remedy)


def _ranks(text: str, story: Story) -> list[int]:
    """Return the named ranks, or the first four and those that worked longest in the last step."""
    from phalanx.core.errors import UserError

    world = story.part.layout.world_size
    if not text:
        last: dict[str, Any] = story.rows[-1] if story.rows else {}
        slow = [int(rank) for _, rank in last.get("slowest") or () if 0 <= int(rank) < world]
        return sorted({0, *slow, *range(min(world, 4))})
    parts = [part.strip() for part in text.split(",")]
    if all(part.isascii() and part.isdigit() and int(part) < world for part in parts) and len(parts) <= MOST_RANKS:
        return sorted({int(part) for part in parts})
    remedy = f"at most {MOST_RANKS} numbers below {world:,}, with commas between them"
    raise UserError("no such ranks", field="--ranks", value=text, remedy=remedy)


def _await(story: Story, folder: Path, ranks: list[int], wait_s: float) -> tuple[dict[int, Path], dict[int, str]]:
    """Wait until all ranks have sent their traces or died, the run is over, or `wait_s` has passed."""
    from phalanx.observe import traces

    asked = len(story.part.events)
    deadline = time.monotonic() + wait_s
    while True:
        over = story.part.state != "running"
        files, failed = traces.received(folder)
        exits = {event.get("rank") for event in story.part.events[asked:] if event.get("type") == "exit"}
        failed |= {rank: "its worker died before" for rank in ranks if rank in exits and rank not in files}
        missing = [rank for rank in ranks if rank not in files and rank not in failed]
        if not missing or over or time.monotonic() > deadline:
            return files, failed | dict.fromkeys(missing, "the run is over" if over else f"not within {wait_s:g} s")
        time.sleep(0.2)
        story.update()


def _tell(calls: list[dict[str, Any]]) -> None:
    from phalanx.observe.incidents import seconds

    if calls:
        say(f"{'collective':<32} {'calls':>7} {'in all':>9} {'mean':>9} {'longest':>9}")
    for row in calls[:12]:
        times = " ".join(f"{seconds(row[name]):>9}" for name in ("total_s", "mean_s", "longest_s"))
        say(f"{row['name']:<32} {row['calls']:>7,} {times} on rank {row['rank']}")
