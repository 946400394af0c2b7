"""`phalanx schedule`: show what a queueing policy would have done with a trace of jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

schedule_app = typer.Typer(no_args_is_help=True, help="Scheduling policies on traces of jobs.")


@schedule_app.command("replay")
def replay(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE.csv", help="Columns job_id, submit_s, gpus, duration_s and, if any, vc.")
    ],
    gpus: Annotated[int, typer.Option(metavar="N", help="So many GPUs, in nodes of 8.", show_default=False)] = 0,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A cluster: TOML, or CSV with a host and its switches per line.")
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="fifo|easy|conservative|sjf|srtf|tiresias|phalanx", help="Who is next.")
    ] = "phalanx",
    begin: Annotated[
        float | None, typer.Option("--from", metavar="SECONDS", help="Jobs submitted from then on.", show_default=False)
    ] = None,
    end: Annotated[
        float | None, typer.Option("--to", metavar="SECONDS", help="Jobs submitted before.", show_default=False)
    ] = None,
    stop_s: Annotated[
        float,
        typer.Option("--stop-s", metavar="N", min=0.0, max=86_400.0, help="What a preemption costs a job, in seconds."),
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: seconds and shares.")] = False,
) -> None:
    """Replay a trace. For example: phalanx schedule replay jobs.csv --gpus 576 --policy easy"""
    from phalanx.core.errors import UserError
    from phalanx.twin.replay import driver, figures, machines
    from phalanx.twin.replay import trace as traces

    if policy not in driver.NAMES:
        remedy = f"choose {', '.join(driver.NAMES)}"
        raise UserError("there is no such policy", field="--policy", value=policy, remedy=remedy)
    if bool(gpus) == (cluster is not None):
        remedy = "give --gpus N, or --cluster FILE, not both"
        raise UserError("which cluster?", field="--gpus", value=gpus, remedy=remedy)
    where = machines.read(cluster) if cluster else machines.of_gpus(gpus)
    jobs = traces.read(trace)
    if begin is not None or end is not None:
        jobs = jobs.between(begin, end)
    said = figures.report(jobs, where, policy, driver.replay(where, jobs.jobs, policy, stop_s))
    if as_json:
        import json

        print(json.dumps(said, indent=2))
    else:
        print(figures.text(said))
