"""What `phalanx` can be asked to do. Heavy imports happen inside a command, so that help answers at once."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli import dash
from phalanx.cli.attach import attach, stop
from phalanx.cli.calibrate import calibrate
from phalanx.cli.chaos import chaos_app
from phalanx.cli.checkpoint import checkpoint_app
from phalanx.cli.data import data_app
from phalanx.cli.demo import demo
from phalanx.cli.firewall import firewall
from phalanx.cli.hardware import hardware_app
from phalanx.cli.nodes import agent, nodes_app, scale
from phalanx.cli.plan import plan_app
from phalanx.cli.runs import runs_app
from phalanx.cli.simulate import simulate
from phalanx.cli.watch import logs, top

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Trains very large models on very many accelerators.",
)
spec_app = typer.Typer(no_args_is_help=True, help="The job file: its schema.")
app.add_typer(spec_app, name="spec")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(chaos_app, name="chaos")
app.add_typer(nodes_app, name="nodes")
app.add_typer(hardware_app, name="hardware")
app.add_typer(plan_app, name="plan")
app.add_typer(runs_app, name="runs")
app.command("scale")(scale)
app.command("attach")(attach)
app.command("stop")(stop)
app.command(
    "agent", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False
)(agent)
app.command("calibrate")(calibrate)
app.command("firewall")(firewall)
app.command("simulate")(simulate)
app.command("dash")(dash.dash)
app.command("top")(top)
app.command("demo")(demo)
app.command("logs")(logs)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from phalanx import __version__

        print(__version__)
        raise typer.Exit


JobFile = Annotated[Path | None, typer.Argument(help="The job file; without one, the quickstart.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a field of the job; repeatable.")
]
Resume = Annotated[
    str,
    typer.Option(
        metavar="auto|new|PATH",
        help="Continue from a checkpoint: the newest good one of this job, or of a run's folder, or the one named. "
        "new: begin anew, even where checkpoints are.",
    ),
]
Listen = Annotated[str, typer.Option(metavar="HOST[:PORT]", help="Where agents join, on this host.")]


@app.command()
def train(
    job: JobFile = None,
    sets: Sets = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the resolved job and stop.")] = False,
    resume: Resume = "",
    on: Annotated[
        str, typer.Option(metavar="local|ssh", help="Where nodes are: on this machine, or on hosts reached by ssh.")
    ] = "local",
    hosts: Annotated[
        str,
        typer.Option(metavar="a,b,c|FILE", help="The hosts; those that the layout does not need are spares."),
    ] = "",
    listen: Listen = "",
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Leave the run to itself; `phalanx attach` shows it, `phalanx stop` ends it."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run one rank's program for a step on tensors without values, and stop.")
    ] = False,
    dash: Annotated[bool, typer.Option("--dash", help="Show the run on a page while it trains.")] = False,
) -> None:
    """Train. With no arguments: a small model on the Python library's own sources, on this machine."""
    from phalanx.run.planned import resolve

    resolved, forecast = resolve(job, sets or [])
    if explain:
        from phalanx.cli.explain import print_explanation

        print_explanation(resolved)
        return
    if dry_run:
        from phalanx.cli.plan_dry import dry

        if not dry(resolved.job):
            raise typer.Exit(1)
        return
    if detach:
        from phalanx.cli.attach import start_detached

        start_detached(sys.argv[1:])
        return
    from phalanx.core.errors import UserError
    from phalanx.runtime.launch import LOCAL, SSH, Where, hosts_of

    if on not in (LOCAL, SSH):
        remedy = "choose local or ssh; for anything else see `phalanx controller`"
        raise UserError("there is no such place", field="--on", value=on, remedy=remedy)
    if on == SSH and not hosts:
        raise UserError("which hosts?", field="--hosts", value="", remedy="name them: --hosts a,b,c or a file")
    _train(resolved, forecast, resume, Where(on, hosts_of(hosts) if hosts else {}, listen), dash)


@app.command()
def controller(listen: Listen, job: JobFile = None, sets: Sets = None, resume: Resume = "") -> None:
    """Train on nodes that somebody else starts: on each of them, `phalanx agent --join HOST:PORT --secret FILE`."""
    from phalanx.run.planned import resolve
    from phalanx.runtime.launch import HAND, Where

    resolved, forecast = resolve(job, sets or [])
    _train(resolved, forecast, resume, Where(HAND, {}, listen))


def _train(resolved: Any, forecast: Any, resume: str, where: Any, page: bool = False) -> None:
    from phalanx.core.errors import RunFailed
    from phalanx.run.console import Console
    from phalanx.run.training import run_job

    try:
        with contextlib.ExitStack() as stack, Console(resolved.job, forecast) as console:
            if page:
                from phalanx.web.serve import beside

                console.note(f"dashboard: {stack.enter_context(beside(Path(resolved.job.run.dir)))}")
            run_job(resolved.job, resolved.origins, console, resume, forecast, where)
    except KeyboardInterrupt as stopped:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"{stopped or 'stopped'}\n  continue with: {_again(sys.argv[1:])}", file=sys.stderr)
        raise typer.Exit(130) from None
    except RunFailed as failed:
        failed.args = (f"{failed}\n  continue with: {_again(sys.argv[1:])}",)
        raise


def _again(arguments: list[str]) -> str:
    """The command that continues a run which was started with these arguments."""
    import shlex

    kept, rest = list[str](), iter(arguments)
    for each in rest:
        if each == "--resume":
            next(rest, "")
        elif not each.startswith("--resume="):
            kept.append(each)
    return shlex.join(["phalanx", *kept, "--resume", "auto"])


@spec_app.command("schema")
def spec_schema() -> None:
    """Print the JSON schema of the job file."""
    import json

    from phalanx.spec import schema

    print(json.dumps(schema(), indent=2))
