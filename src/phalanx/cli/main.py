"""The `phalanx` command. A user's mistake prints one message with the remedy and exits with 2, a
failed run exits with 1, Ctrl-C with 130; a traceback is always a bug of ours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from phalanx.core.errors import RunFailed, UserError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Trains very large models on very many accelerators.",
)
spec_app = typer.Typer(no_args_is_help=True, help="The job file: its schema.")
app.add_typer(spec_app, name="spec")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from phalanx import __version__

        print(__version__)
        raise typer.Exit


@app.command()
def train(
    job: Annotated[Path | None, typer.Argument(help="The job file; without one, the quickstart.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a field of the job; repeatable.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the resolved job and stop.")] = False,
) -> None:
    """Train. With no arguments: a small model on the Python library's own sources, on this machine."""
    from phalanx.spec import load

    resolved = load(job, sets or [])
    if explain:
        from phalanx.cli.explain import print_explanation

        print_explanation(resolved)
        return
    from phalanx.cli.console import Console
    from phalanx.cli.run import run_job

    with Console(resolved.job) as console:
        run_job(resolved.job, resolved.origins, console)


@spec_app.command("schema")
def spec_schema() -> None:
    """Print the JSON schema of the job file."""
    import json

    from phalanx.spec import schema

    print(json.dumps(schema(), indent=2))


def run() -> None:
    try:
        app()
    except (UserError, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(141)


if __name__ == "__main__":
    run()
