"""`phalanx chaos`: break a run on purpose."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

chaos_app = typer.Typer(no_args_is_help=True, help="Break a run on purpose, and see whether it matters.")


@chaos_app.callback()
def _root() -> None: ...


@chaos_app.command("run")
def chaos_run(
    job: Annotated[
        Path | None, typer.Argument(metavar="JOB.toml", help="The job file; without one, the quickstart.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Draws the faults and their steps.")] = 1,
    faults: Annotated[int, typer.Option(metavar="N", min=1, max=100_000, help="The number of faults.")] = 10,
    kinds: Annotated[
        str, typer.Option(metavar="KIND,KIND,…", help="Kinds of faults, separated by commas; all by default.")
    ] = "",
    phases: Annotated[
        str,
        typer.Option(
            metavar="PHASE,PHASE,…", help="start, restore, save (separated by commas): one more fault in each."
        ),
    ] = "",
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field of the job; repeatable."),
    ] = None,
) -> None:
    """Run the job twice, once with faults, and compare weights and ledger. Exits with 1 if they differ."""
    from phalanx.chaos import campaign
    from phalanx.chaos.faults import FAULTS, ON_THE_NETWORK
    from phalanx.chaos.hosts import why_not
    from phalanx.core.errors import UserError
    from phalanx.run.planned import resolve

    resolved, _ = resolve(job, sets or [])
    chosen = [kind.strip() for kind in kinds.split(",")] if kinds else list(FAULTS)
    if not kinds and (why := why_not()):
        chosen = [kind for kind in chosen if kind not in ON_THE_NETWORK]
        print(f"without {' and '.join(ON_THE_NETWORK)}: {why}")
    more = [phase.strip() for phase in phases.split(",") if phase]
    unknown = [phase for phase in more if phase not in campaign.PHASES]
    if unknown:
        remedy = f"choose among {', '.join(campaign.PHASES)}"
        raise UserError("no such phase", field="--phases", value=unknown[0], remedy=remedy)
    tell = lambda text: print(text, flush=True)  # noqa: E731
    out = campaign.run(job, sets or [], resolved.job, seed, faults, chosen, tell, more)
    print("\n" + campaign.table(out) + "\n")
    if len(out.faults) < faults + len(more):
        print(f"{faults + len(more) - len(out.faults)} faults found no time or nothing to break")
    print(f"clean   {out.clean}\nbroken  {out.broken}")
    if out.lost_steps:
        print(f"{out.lost_steps} steps were done and abandoned; the ledger keeps them as a branch")
    for difference in out.differences:
        print(f"DIFFERENT: {difference}")
    if not out.ok:
        raise typer.Exit(1)
    print(f"after {len(out.faults)} faults the weights and all {out.steps} steps of the ledger are bit-identical")
