"""`phalanx demo`: train, kill a worker on purpose, and show that it did not matter."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer

LOOK_S = 0.05


def demo(
    job: Annotated[
        Path | None, typer.Argument(metavar="[JOB.toml]", help="The job file; without one, the quickstart.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field of the job; repeatable."),
    ] = None,
) -> None:
    """Train twice on this machine, once while a worker is killed, and compare the two bit by bit."""
    from phalanx.core.errors import UserError
    from phalanx.observe.compare import compare
    from phalanx.observe.story import Story
    from phalanx.run.planned import resolve

    sets = sets or []
    resolved, _ = resolve(job, sets)
    one = resolved.job
    if one.train.reduction != "exact" or not one.recovery.on:
        remedy = 'set train.reduction = "exact" and recovery.on = true'
        raise UserError("with these settings a failure changes the bits or ends the run", field="job", remedy=remedy)
    with contextlib.ExitStack() as stack:
        address = _page(stack, Path(one.run.dir))
        if address:
            print(f"watch it on {address}\n", flush=True)
        broken = Story(_run(job, [*sets, f"name={one.name}-killed"], kill=True))
        print("\nthe same again, undisturbed, to compare\n", flush=True)
        clean = Story(_run(job, [*sets, f"name={one.name}-undisturbed"], kill=False))
        found = compare(broken, clean)
        same = found["part"] is None and found["steps"][0] == found["steps"][1]
        digests = [[d and d["weights"] for d in (s.part.summary or {}).get("digests", [])] for s in (broken, clean)]
        same = same and bool(digests[0]) and set(digests[0]) == set(digests[1])
        killed = [each for each in broken.incidents() if each.stops]
        for each in killed:
            print(f"\n{each.verdict()}")
        if not killed:
            print("\nthe run was over before a worker could be killed; raise train.steps")
        bits = f"{found['same']:,} of {found['compared']:,} steps"
        print(f"bits: {'the same' if same else 'DIFFERENT'} as without the kill ({bits}, and the weights)")
        _write(clean.path)
        later = f"`phalanx dash {one.run.dir}` shows both runs"
        print(f"page: {address} (later: {later})" if address else f"page: {later}; it needs phalanx[web]")
        if address and sys.stdin.isatty() and sys.stdout.isatty():
            with contextlib.suppress(KeyboardInterrupt, EOFError):
                input("press Enter to close the page ")
        if not same or not killed:
            raise typer.Exit(1)


def _write(run: Path) -> None:
    """Print a few lines that the model writes."""
    from phalanx.cli.checkpoint import newest
    from phalanx.observe.words import printable
    from phalanx.train.sampler import Sampler

    prompt = "def "
    text = prompt + "".join(Sampler(newest(str(run))).write(prompt, 160, temperature=0.6, top_k=20))
    print(f"\nthe model continues {prompt!r} (`phalanx generate {run} {prompt!r}`):")
    for line in text.splitlines()[:6]:
        print(f"  | {printable(line)[:100]}")
    print()


def _page(stack: contextlib.ExitStack, root: Path) -> str:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        return ""
    from phalanx.web.serve import beside

    return stack.enter_context(beside(root))


def _run(job: Path | None, sets: list[str], kill: bool) -> Path:
    from phalanx.run.console import Console
    from phalanx.run.planned import resolve
    from phalanx.run.training import run_job

    resolved, forecast = resolve(job, sets)
    folders: list[Path] = []

    class Started(Console):
        def starting(self, run_dir: Path) -> None:
            super().starting(run_dir)
            folders.append(run_dir)
            if kill:
                threading.Thread(
                    target=_kill_one, args=(run_dir, resolved.job.train.steps, self.note), daemon=True
                ).start()

    with Started(resolved.job, forecast) as console:
        run_job(resolved.job, resolved.origins, console, "", forecast)
    return folders[0]


def _kill_one(folder: Path, steps: int, note: Any) -> None:
    """Wait until half of the steps are done, then kill the worker of the last rank."""
    from phalanx.observe.tail import Tail

    metrics, events = Tail(folder / "metrics.jsonl"), Tail(folder / "events.jsonl")
    workers: dict[int, int] = {}
    done = 0
    while not (folder / "summary.json").exists():
        for event in events.read():
            if event.get("type") == "started" and event.get("rank", -1) >= 0:
                workers[event["rank"]] = event["pid"]
        for row in metrics.read():
            done = row["step"] + 1
        if done >= steps // 2 and workers:
            rank = max(workers)
            with contextlib.suppress(ProcessLookupError):
                os.kill(workers[rank], signal.SIGKILL)
                note(f"KILLED ON PURPOSE: the worker of rank {rank}, after step {done:,}")
            return
        time.sleep(LOOK_S)
