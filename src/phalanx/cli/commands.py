"""The commands of `phalanx`. Heavy imports happen inside a command, so that help answers at once."""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from phalanx.cli import dash
from phalanx.cli.attach import again, attach, is_apart, run_apart, stop, submit
from phalanx.cli.calibrate import calibrate
from phalanx.cli.chaos import chaos_app
from phalanx.cli.checkpoint import checkpoint_app
from phalanx.cli.convert import convert
from phalanx.cli.data import data_app
from phalanx.cli.demo import demo
from phalanx.cli.family import family_app
from phalanx.cli.firewall import firewall
from phalanx.cli.generate import generate
from phalanx.cli.hardware import hardware_app
from phalanx.cli.nodes import agent, aggregator, nodes_app, relay, scale
from phalanx.cli.plan import plan_app
from phalanx.cli.queue import queue_app, why
from phalanx.cli.runs import runs_app
from phalanx.cli.scheduling import schedule_app
from phalanx.cli.simulate import simulate
from phalanx.cli.trace import trace
from phalanx.cli.watch import logs, top

if TYPE_CHECKING:
    from phalanx.runtime.cluster import Shared
    from phalanx.runtime.launch import Adapter

ORDER = (  # of first use
    "demo", "train", "generate", "runs", "top", "dash", "logs", "attach", "stop", "data", "checkpoint", "plan",
    "queue", "why",
    "family", "spec", "hardware", "calibrate", "simulate", "nodes", "scale", "controller", "agent", "firewall",
    "schedule", "chaos",
)  # fmt: skip


class InOrder(typer.core.TyperGroup):
    """Commands in the order in which a user needs them; those not in ORDER come last."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    cls=InOrder,
    help="Phalanx trains large models across many accelerators and survives hardware failures.\n\n"
    "phalanx demo                             see it work, in a minute or two\n\n"
    "phalanx train job.toml --explain         what a job means, field by field\n\n"
    "phalanx train job.toml                   train; --resume auto continues\n\n"
    "phalanx runs                             what ran, and how it ended\n\n"
    'phalanx generate RUN "once upon a time"  what the model has learned',
)
spec_app = typer.Typer(no_args_is_help=True, help="The job file: its schema.")
app.add_typer(spec_app, name="spec")
app.add_typer(data_app, name="data")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(chaos_app, name="chaos")
app.add_typer(nodes_app, name="nodes")
app.add_typer(hardware_app, name="hardware")
app.add_typer(plan_app, name="plan")
app.add_typer(family_app, name="family")
app.add_typer(runs_app, name="runs")
app.add_typer(schedule_app, name="schedule")
app.add_typer(queue_app, name="queue")
app.command("why")(why)
app.command("scale")(scale)
app.command("convert")(convert)
app.command("attach")(attach)
app.command("stop")(stop)
for process in (agent, aggregator, relay):  # they read their options themselves, without typer
    options = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(process.__name__, context_settings=options, add_help_option=False)(process)
app.command("calibrate")(calibrate)
app.command("firewall")(firewall)
app.command("simulate")(simulate)
app.command("dash")(dash.dash)
app.command("top")(top)
app.command("demo")(demo)
app.command("generate")(generate)
app.command("logs")(logs)
app.command("trace")(trace)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from phalanx import __version__

        print(__version__)
        raise typer.Exit


OUTLIVED = "ssh"  # here the run has to outlive the command; a scheduler ensures that, and a local run ends with it
JobFile = Annotated[
    Path | None, typer.Argument(metavar="[JOB.toml]", help="The job file; without one, the quickstart.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field of the job; repeatable."),
]
Resume = Annotated[
    str,
    typer.Option(
        metavar="auto|new|PATH",
        help="Continue from a checkpoint: the newest good one of this job, or of a run's folder, or the one named. "
        "new: begin anew, even where checkpoints are.",
    ),
]
Detach = Annotated[
    bool,
    typer.Option("--detach", help="Return once the run has begun; `phalanx attach` shows it, `phalanx stop` ends it."),
]
Listen = Annotated[str, typer.Option(metavar="HOST[:PORT]", help="Where agents join, on this host.")]


@app.command()
def train(
    job: JobFile = None,
    sets: Sets = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the resolved job and stop.")] = False,
    resume: Resume = "",
    on: Annotated[
        str,
        typer.Option(
            metavar="local|ssh|slurm|ray|kubernetes",
            help="Who starts the nodes: this machine plays them, or an engine.",
        ),
    ] = "local",
    engine: Annotated[
        list[str] | None, typer.Option("--engine", metavar="KEY=VALUE", help="An option of the engine; repeatable.")
    ] = None,
    hosts: Annotated[
        str,
        typer.Option(metavar="a,b,c|FILE", help="The hosts, for ssh; hosts that the layout does not need are spares."),
    ] = "",
    listen: Listen = "",
    detach: Detach = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print what would be submitted to the engine, and stop. Where nothing is (local, ssh): run one rank's "
            "program for a step on tensors without values.",
        ),
    ] = False,
    dash: Annotated[bool, typer.Option("--dash", help="Show the run on a web page while it trains.")] = False,
) -> None:
    """Train. With no arguments: a small model on the Python library's own sources, on this machine."""
    from phalanx.engines.table import Where, adapter_of, options_of, sets_of, submission_of
    from phalanx.run.host import refuse_hosts
    from phalanx.run.planned import resolve
    from phalanx.runtime.launch import Hand

    where = Where(on, hosts, options_of(engine or []))
    resolved, forecast = resolve(job, sets_of(where, sets or []))
    if explain:
        from phalanx.cli.explain import print_explanation

        print_explanation(resolved)
        return
    submission = submission_of(where, resolved.job, sys.argv[1:])
    if submission:
        refuse_hosts(resolved.job, Hand())  # before it waits in a queue
        if dry_run:
            print(submission.text())
        else:
            submit(submission, resolved.job, on, detach)
        return
    adapter = adapter_of(where, resolved.job)
    if dry_run and (described := adapter.describe()):
        print(described)
        return
    if dry_run:
        from phalanx.cli.plan_dry import dry

        if not dry(resolved.job):
            raise typer.Exit(1)
        return
    if detach or (on == OUTLIVED and not is_apart()):
        run_apart(sys.argv[1:], detach)
        return
    _train(resolved, forecast, "auto" if adapter.restarted else resume, adapter, listen, dash)


@app.command()
def controller(
    listen: Listen,
    job: JobFile = None,
    sets: Sets = None,
    resume: Resume = "",
    detach: Detach = False,
    foreground: Annotated[
        bool, typer.Option("--foreground", help="The run ends with this process, as a service manager expects.")
    ] = False,
    journal: Annotated[
        str,
        typer.Option(metavar="postgresql://…", help="Keep the journal on a server, so that others can stand by."),
    ] = "",
    standby: Annotated[
        bool,
        typer.Option("--standby", help="Wait while another controller acts, and continue its run when it is lost."),
    ] = False,
    secret: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The run's secret, if others have it already; it is created if it is missing."
        ),
    ] = None,
) -> None:
    """Train on nodes that somebody else starts: on each of them, `phalanx agent --join HOST:PORT --secret FILE`."""
    from phalanx.run.planned import resolve
    from phalanx.run.standby import check_options, take_turns
    from phalanx.runtime.launch import Hand

    check_options(journal, standby, secret)
    if journal:
        mine = resolve(job, sets or []) if job or sets or not standby else None
        say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
        take_turns(
            journal, standby, mine, say, partial(_train, resume=resume, adapter=Hand(), listen=listen, secret=secret)
        )
        return
    resolved, forecast = resolve(job, sets or [])
    if is_apart() or foreground:
        _train(resolved, forecast, resume, Hand(), listen, secret=secret)
    else:
        run_apart(sys.argv[1:], detach)


def _train(
    resolved: Any,
    forecast: Any,
    resume: str,
    adapter: Adapter,
    listen: str = "",
    page: bool = False,
    secret: Path | None = None,
    shared: Shared | None = None,
) -> None:
    from phalanx.core.errors import RunFailed, TimeUp
    from phalanx.run.console import Console, PlainConsole
    from phalanx.run.training import run_job

    try:
        out = PlainConsole(force_interactive=False) if is_apart() else None
        with contextlib.ExitStack() as stack, Console(resolved.job, forecast, out) as console:
            if page:
                from phalanx.web.serve import beside

                address = stack.enter_context(beside(Path(resolved.job.run.dir)))
                console.note(f"dashboard: {address or 'it does not start; try `phalanx dash` in another terminal'}")
            run_job(resolved.job, resolved.origins, console, resume, forecast, adapter, listen, secret, shared)
    except KeyboardInterrupt as stopped:
        next_ = adapter.run_again() if isinstance(stopped, TimeUp) else ""
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"{stopped or 'stopped'}\n  {next_ or f'continue with: {again(sys.argv[1:])}'}", file=sys.stderr)
        raise typer.Exit(130) from None
    except RunFailed as failed:
        failed.args = (f"{failed}\n  continue with: {again(sys.argv[1:])}",)
        raise


@spec_app.command("schema")
def spec_schema() -> None:
    """Print the JSON schema of the job file."""
    import json

    from phalanx.spec import schema

    print(json.dumps(schema(), indent=2))
