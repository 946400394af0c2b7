"""`phalanx train --detach`, `attach` and `stop`: a run that does not need the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(help="The folder of the run.")]


def start_detached(arguments: list[str]) -> None:
    """Run the same command in a session of its own, and show what it does."""
    from phalanx.run.follow import STARTER

    reader, writer = os.pipe()
    kept = [each for each in arguments if each != "--detach"]
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "phalanx.cli.main", *kept],
        env={**os.environ, STARTER: str(writer)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=[writer],
        start_new_session=True,
    )
    os.close(writer)
    with open(reader) as said:
        folder = said.readline().strip()
    if not folder:  # it was refused
        assert child.stderr
        sys.stderr.write(child.stderr.read().decode(errors="replace"))
        raise typer.Exit(child.wait())
    attach(Path(folder))


def attach(run: Run) -> None:
    """Show a run that goes, or how it ended. Ctrl-C leaves it alone."""
    from phalanx.cli.served import find_run
    from phalanx.run.follow import follow

    record = find_run(run)
    try:
        code = follow(record)
    except KeyboardInterrupt:
        print(f"\nthe run goes on\n  see it: phalanx attach {run}\n  end it: phalanx stop {run}", file=sys.stderr)
        code = 0
    raise typer.Exit(code)


def stop(
    run: Run,
    now: Annotated[bool, typer.Option("--now", help="Do not wait until the state is saved.")] = False,
) -> None:
    """Ask a run to save its state and to end."""
    from phalanx.core.errors import UserError
    from phalanx.run.follow import head_of

    pid = head_of(run)
    if not pid:
        raise UserError(
            "no process of this machine keeps its record", field="RUN", value=str(run), remedy="is it over?"
        )
    for _ in range(2 if now else 1):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.1)
    print(f"the run is asked to {'end' if now else 'save and end'}; see phalanx attach {run}")
