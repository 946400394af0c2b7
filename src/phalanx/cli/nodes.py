"""`phalanx agent`: be a node of a run. `phalanx nodes` and `phalanx scale`: change a run while it goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

nodes_app = typer.Typer(no_args_is_help=True, help="The nodes of a run that goes: list, drain, add.")
Run = Annotated[Path, typer.Argument(help="The folder of the run.")]


def agent(context: typer.Context) -> None:
    """Join a run, and do what its controller says: --join HOST:PORT --secret FILE (all options: --help)."""
    from phalanx.runtime.node import main

    raise typer.Exit(main(context.args))


def _ask(run: Path, message: dict[str, Any]) -> dict[str, Any]:
    from phalanx.core.errors import RunFailed, UserError
    from phalanx.runtime import controller
    from phalanx.runtime.secret import load_secret

    folder = run / "control"
    if (run / "summary.json").is_file():
        raise UserError("the run is over", field="run", value=str(run), remedy="name one that is going")
    if not (folder / "controller.json").is_file():
        remedy = "name the folder of a run, such as runs/NAME-…"
        raise UserError("it has no controller", field="run", value=str(run), remedy=remedy)
    try:
        answer = controller.ask(folder, load_secret(folder / "secret", create=False), message)
    except TimeoutError as error:
        raise RunFailed(str(error), remedy="is the run still going?") from None
    if answer["type"] == "refused":
        raise UserError(answer["reason"], remedy="`phalanx nodes ls` shows the nodes")
    return answer


@nodes_app.command("ls")
def nodes_ls(run: Run) -> None:
    """What the controller knows of the nodes."""
    said = _ask(run, {"type": "status"})
    print(f"{said['phase']}, generation {said['generation']}, step {said['step']}, replicas {said['replicas']}")
    for name, node in sorted(said["nodes"].items()):
        place = f"place {node['place']}" if node["place"] >= 0 else "spare"
        state = "dead" if node["dead"] else f"{place}{', drained' if node['drained'] else ''}"
        print(f"  {name:16} {state}")
    if said["why"]:
        print(said["why"])


@nodes_app.command("drain")
def nodes_drain(
    run: Run,
    node: Annotated[str, typer.Argument(help="Its name, as `ls` has it.")],
    off: Annotated[bool, typer.Option("--off", help="Use it again.")] = False,
) -> None:
    """Move what runs on a node elsewhere at a step boundary, and use it no more, also after a restart."""
    _ask(run, {"type": "ask", "event": {"kind": "Drain", "node": node, "off": off}})
    leaves = f"{node} leaves at a step boundary, as soon as the run can do without it; see `phalanx nodes ls`"
    print(f"{node} may be used again" if off else leaves)


@nodes_app.command("add")
def nodes_add(
    run: Run, count: Annotated[int, typer.Option(min=1, max=16, help="How many node processes of this machine.")] = 1
) -> None:
    """Add nodes: they fill places that are empty, or stand by."""
    from phalanx.runtime.cluster import MORE_NODES

    _ask(run, {"type": "status"})
    path = run / "control" / MORE_NODES
    before = int(path.read_text()) if path.exists() else 0
    near = path.with_name(f".{path.name}")
    near.write_text(str(before + count))
    os.replace(near, path)
    print(f"{count} more will join")


def scale(run: Run, replicas: Annotated[int, typer.Option(min=1, help="How many from now on.")]) -> None:
    """Change the number of replicas of a run while it goes: the same batch, divided among them."""
    _ask(run, {"type": "ask", "event": {"kind": "Scale", "replicas": replicas}})
    print(f"{replicas} replicas are wanted from the next step boundary on, if there are nodes for them")
