"""Start a run in a process of its own, show it and end it. On other hosts, or with `--detach`, the process that the
user started only shows the run, as `phalanx attach` does. `phalanx stop` ends a run."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx.cli.runs import Dir, find_folder

if TYPE_CHECKING:
    from phalanx.core.job import Job
    from phalanx.engines.table import Submission

LEAVE_S = 30.0  # for the process of a finished run to end
RUN = "A folder, a name in RUNS_DIR, the beginning of one, or last; or ENGINE:ID, as kubernetes:default/four-3f2a."
Run = Annotated[str, typer.Argument(metavar="RUN", help=RUN)]


def is_apart() -> bool:
    """Return whether this is the process of a run that another command has started and shows."""
    from phalanx.run.follow import STARTER

    return STARTER in os.environ


def run_apart(arguments: list[str], detach: bool) -> None:
    """Run the same command in its own session, which outlives this process and its terminal, and show it. Ctrl-C and
    SIGTERM are passed on and ask the run to save and end. `detach`: return as soon as it has begun."""
    from phalanx.run.follow import LAUNCHED, REFUSED, STARTER

    reader, writer = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "phalanx.cli.main", *(each for each in arguments if each != "--detach")],
        env={**os.environ, STARTER: str(writer)},
        stdin=subprocess.DEVNULL,
        pass_fds=[writer],
        start_new_session=True,
    )
    os.close(writer)
    pass_on = lambda *_: child.send_signal(signal.SIGTERM)  # noqa: E731
    for number, do in ((signal.SIGINT, pass_on), (signal.SIGTERM, pass_on), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup, or a shell that runs this in the background
            signal.signal(number, do)  # the loss of the terminal concerns only this process
    with open(reader) as said:
        folder = Path(said.readline().rstrip("\n"))
        if folder.name and detach and said.readline().strip() == LAUNCHED:
            print(f"record: {folder}\n{_how_to(folder)}")
            return
    if not folder.name or detach:  # it was refused, or there was nothing to do
        raise typer.Exit(child.wait())
    code = _show(folder)
    if code is None:
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = child.wait(LEAVE_S)
    if code not in (0, REFUSED):
        print(f"  continue with: {again(arguments)}", file=sys.stderr)
    raise typer.Exit(code if code >= 0 else 1)


def again(arguments: list[str]) -> str:
    """Return the command that continues a run started with these arguments."""
    kept, rest = list[str](), iter(arguments)
    for each in rest:
        if each == "--resume":
            next(rest, "")
        elif not each.startswith("--resume="):
            kept.append(each)
    return shlex.join(["phalanx", *kept, "--resume", "auto"])


def _show(folder: Path) -> int | None:
    """Show a run until it is over and return its exit code; None after Ctrl-C, or if the output is closed."""
    from phalanx.observe.record import RunRecord
    from phalanx.run.follow import follow, head_of

    try:
        return follow(RunRecord.open(folder))
    except BrokenPipeError:
        return None
    except KeyboardInterrupt:
        if head_of(folder):
            print(f"\nthe run continues\n{_how_to(folder)}", file=sys.stderr)
        return None


def _how_to(run: Path) -> str:
    return f"  see it: phalanx attach {run}\n  end it: phalanx stop {run}"


def submit(submission: Submission, job: Job, on: str, detach: bool) -> None:
    """Submit a run to an engine and show it. Ctrl-C leaves the run alone."""
    from phalanx.run.follow import follow_submitted

    Path(job.run.dir).mkdir(parents=True, exist_ok=True)
    reference = {"on": on, "id": submission.send()}
    if on != "kubernetes":  # it has printed this itself, and keeps the record in a pod
        print(f"submitted: {on} job {reference['id']}; its record will be in {job.run.dir}", flush=True)
    if detach or submission.is_array:
        return
    try:
        code = follow_submitted(job, reference)
    except KeyboardInterrupt:
        print(f"\n{on} job {reference['id']} continues; `phalanx runs` lists its record", file=sys.stderr)
        code = 0
    raise typer.Exit(code)


def attach(run: Run = "last", root: Dir = Path("runs")) -> None:
    """Show a live run, or how it ended. Ctrl-C leaves it alone."""
    from phalanx.engines.table import follow, reference_of

    if reference := reference_of(run):
        try:
            raise typer.Exit(follow(reference))
        except KeyboardInterrupt:
            print("\nthe run continues", file=sys.stderr)
            return
    raise typer.Exit(_show(find_folder(run, root)) or 0)


def stop(
    run: Run = "last",
    root: Dir = Path("runs"),
    now: Annotated[bool, typer.Option("--now", help="Do not wait until the state is saved.")] = False,
) -> None:
    """Ask a run to save its state and to end."""
    from phalanx.core.errors import UserError
    from phalanx.engines.table import ask_to_stop, reference_of
    from phalanx.run.follow import head_of
    from phalanx.runtime.cluster import STOP

    if reference := reference_of(run):
        ask_to_stop(reference, now)
        print(f"{run} is asked to {'end' if now else 'save and end'}")
        return
    folder = find_folder(run, root)
    head = head_of(folder)
    if not head.is_there:
        remedy = "is it over, or does another host keep it?"
        text = "no process of this machine keeps its record, and no job of an engine"
        raise UserError(text, field="RUN", value=str(folder), remedy=remedy)
    with contextlib.suppress(OSError):  # without this file, a run that others can continue would be handed over
        (folder / "control" / STOP).touch()
    head.ask_to_stop(now)
    print(f"the run is asked to {'end' if now else 'save and end'}; see phalanx attach {folder}")
