"""`phalanx queue`: share the nodes of this machine among jobs. `phalanx why`: say what a job waits for."""

from __future__ import annotations

import json
import re
import secrets
import time
from pathlib import Path
from typing import Annotated, Any

import typer

queue_app = typer.Typer(no_args_is_help=True, help="A queue of jobs on the nodes of this machine.")
Folder = Annotated[Path, typer.Option("--queue", metavar="DIR", help="The folder of the queue.")]
HERE = Path("queue")
Name = Annotated[str, typer.Argument(metavar="JOB", help="As `phalanx queue ps` names it.")]
SETTINGS = "settings.json"


@queue_app.command("start")
def start(
    nodes: Annotated[int, typer.Option(metavar="N", min=1, max=32, help="Nodes that this machine plays.")] = 8,
    node_gpus: Annotated[int, typer.Option(metavar="N", min=1, max=64, help="Ranks that a node runs.")] = 1,
    queue: Folder = HERE,
) -> None:
    """Serve a queue until Ctrl-C. Running jobs continue without it; start it again to resume the queue."""
    from phalanx.run.queue_nodes import write_whole
    from phalanx.run.queued import Queue
    from phalanx.run.stop import Stop

    queue.mkdir(parents=True, exist_ok=True)
    write_whole(queue / SETTINGS, {"nodes": nodes, "node_gpus": node_gpus})
    served = Queue(queue, nodes, node_gpus)
    print(f"serving {queue}: {nodes} nodes of {node_gpus}; submit with: phalanx queue submit JOB.toml --queue {queue}")
    with Stop() as stop:
        served.serve(lambda: stop.asked)


@queue_app.command("submit")
def submit(
    job: Annotated[Path, typer.Argument(metavar="JOB.toml", help="The job file.")],
    sets: Annotated[list[str] | None, typer.Option("--set", metavar="a.b=c", help="Override a field.")] = None,
    tenant: Annotated[str, typer.Option(metavar="NAME", help="Who pays; shares are fair between tenants.")] = "",
    priority: Annotated[
        int, typer.Option(metavar="N", min=-100, max=100, help="Higher ones go first, and may displace.")
    ] = 0,
    queue: Folder = HERE,
) -> None:
    """Put a job into the queue. It shrinks to recovery.min_replicas before it is stopped for another."""
    from phalanx.control import codec
    from phalanx.control.schedule.asks import Submit
    from phalanx.core.errors import UserError
    from phalanx.run.planned import resolve
    from phalanx.run.queue_nodes import write_whole
    from phalanx.run.queued import JOBS, ask_of

    about = _settings(queue)
    resolved, _ = resolve(job, sets or [])
    node_gpus, layout = about["node_gpus"], resolved.job.layout
    per_node = min(layout.replica_size, node_gpus)
    if layout.world_size > about["nodes"] * node_gpus:
        raise UserError(f"the queue has {about['nodes']} nodes of {node_gpus}", field="layout", value=layout.describe(),
                        remedy="lower the degrees in [layout], or start the queue with more nodes")  # fmt: skip
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', resolved.job.name)[:40]}-{secrets.token_hex(2)}"
    home = queue / JOBS / name
    home.mkdir(parents=True)
    (home / "job.toml").write_bytes(job.read_bytes())
    write_whole(home / "sets.json", [*(sets or []), f"layout.ranks_per_node={per_node}"])
    write_whole(home / "name.json", resolved.job.name)
    event = Submit(ask_of(name, resolved.job, node_gpus, tenant, priority))
    _request(queue, "Submit", codec.encode(event))
    print(name)


@queue_app.command("ps")
def ps(queue: Folder = HERE, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """List the jobs and the nodes of a queue."""
    said = _state(queue)
    if as_json:
        print(json.dumps(said, indent=2))
        return
    print(f"{'JOB':28}{'STATE':12}{'PRIORITY':>9}{'REPLICAS':>10}  NODES")
    for name, job in said["jobs"].items():
        print(f"{name:28}{job['state']:12}{job['priority']:>9}{job['replicas']:>10}  {', '.join(job['nodes'])}")
    for name, state in said["nodes"].items():
        if state != "up":
            print(f"{name}: {state}")


@queue_app.command("why")
def why(job: Name, queue: Folder = HERE) -> None:
    """Say what a job waits for, when it will start, and what was decided about it."""
    print("\n".join(_job(queue, job)["why"]))


@queue_app.command("cancel")
def cancel(job: Name, queue: Folder = HERE) -> None:
    """End a job; if it runs, its state is saved."""
    _job(queue, job)
    _request(queue, "Cancel", {"job": job})
    print(f"{job} is cancelled")


@queue_app.command("node")
def node(
    name: Annotated[str, typer.Argument(metavar="NODE")],
    state: Annotated[str, typer.Argument(metavar="drain|undrain|down|up")],
    queue: Folder = HERE,
) -> None:
    """Take a node out of use, or back into it. The queue notices by itself when a node dies, and when it is back."""
    from phalanx.control.schedule.asks import BY_HAND
    from phalanx.core.errors import UserError

    events: dict[str, tuple[str, dict[str, Any]]] = {
        "drain": ("Drain", {"node": name, "off": False}),
        "undrain": ("Drain", {"node": name, "off": True}),
        "down": ("NodeDown", {"node": name, "why": BY_HAND}),
        "up": ("NodeUp", {"node": name}),
    }
    if state not in events:
        raise UserError("there is no such state", field="STATE", value=state, remedy=f"choose {', '.join(events)}")
    if name not in _state(queue)["nodes"]:
        raise UserError("there is no such node", field="NODE", value=name, remedy="`phalanx queue ps --json` has them")
    _request(queue, *events[state])
    print(f"{name}: {state}")


def _request(queue: Path, kind: str, event: dict[str, Any]) -> None:
    from phalanx.run.queue_nodes import write_whole
    from phalanx.run.queued import INBOX

    write_whole(queue / INBOX / f"{time.time_ns()}-{secrets.token_hex(4)}.json", {"kind": kind, "event": event})


def _settings(queue: Path) -> dict[str, Any]:
    return _read(queue / SETTINGS, queue)


def _state(queue: Path) -> dict[str, Any]:
    from phalanx.run.queued import STATE

    return _read(queue / STATE, queue)


def _read(path: Path, queue: Path) -> dict[str, Any]:
    from phalanx.core.errors import UserError

    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError):
        remedy = f"start one: phalanx queue start --queue {queue}"
        raise UserError("there is no queue", field="--queue", value=str(queue), remedy=remedy) from None
    assert isinstance(said, dict)
    return said


def _job(queue: Path, name: str) -> dict[str, Any]:
    from phalanx.core.errors import UserError

    jobs = _state(queue)["jobs"]
    if name not in jobs:
        known = ", ".join(list(jobs)[:8]) or "none"
        raise UserError("there is no such job", field="JOB", value=name, remedy=f"`phalanx queue ps`; there is {known}")
    found = jobs[name]
    assert isinstance(found, dict)
    return found
