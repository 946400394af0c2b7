"""`phalanx agent`: run a node. `phalanx aggregator` and `phalanx relay`: relay between many nodes and the top of a run.
`phalanx nodes` and `phalanx scale`: change a live run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

nodes_app = typer.Typer(no_args_is_help=True, help="The nodes of a live run: list, drain, add.")
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of the run.")]


def agent(context: typer.Context) -> None:
    """Join a run, and do what its controller says: --join HOST:PORT --secret FILE (all options: --help)."""
    from phalanx.runtime.node import main

    raise typer.Exit(main(context.args))


def aggregator(context: typer.Context) -> None:
    """Serve some hundred agents of a large fleet: --controller HOST:PORT --secret FILE (all options: --help)."""
    from phalanx.runtime.between import aggregator as main

    raise typer.Exit(main(context.args))


def relay(context: typer.Context) -> None:
    """Merge reports of some aggregators for the record: --record HOST:PORT --secret FILE (all options: --help)."""
    from phalanx.runtime.between import relay as main

    raise typer.Exit(main(context.args))


def ask(run: Path, message: dict[str, Any]) -> dict[str, Any]:
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
    """List the nodes that the controller knows, and where it listens."""
    import json

    said = ask(run, {"type": "status"})
    at = json.loads((run / "control" / "controller.json").read_bytes())
    ends = {"controller": (at["host"], at["port"]), "agents join": [*at["aggregators"], ("", 0)][0]}
    print(", ".join(f"{name} {host}:{port}" for name, (host, port) in (ends | {"record": at["recorder"]}).items()))
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
    node: Annotated[str, typer.Argument(metavar="NODE", help="Its name, as `ls` has it.")],
    off: Annotated[bool, typer.Option("--off", help="Use it again.")] = False,
) -> None:
    """Empty a node at a step boundary, and do not use it again, even after a restart."""
    ask(run, {"type": "ask", "event": {"kind": "Drain", "node": node, "off": off}})
    leaves = f"{node} leaves at a step boundary, as soon as the run can do without it; see `phalanx nodes ls`"
    print(f"{node} may be used again" if off else leaves)


@nodes_app.command("token")
def nodes_token(
    run: Run,
    node: Annotated[str, typer.Argument(metavar="NODE", help="The name of the host that is to join.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it; only you can read it.")] = Path("token"),
) -> None:
    """Write the token of a new host. With it the host can join under this name and no other; the secret stays here."""
    from phalanx.core.errors import UserError
    from phalanx.runtime.secret import NAME, load_secret, write_token

    kept = run / "control" / "secret"
    if not kept.is_file():
        raise UserError("it has no secret", field="run", value=str(run), remedy="name the folder of a run, on its host")
    if not NAME.fullmatch(node):
        remedy = "letters, digits, '.', '_' and '-', as in its host name"
        raise UserError("it is no name of a node", field="NODE", value=node, remedy=remedy)
    write_token(out, load_secret(kept, create=False), "agent", node)
    print(f"{out} is the token of {node}\n  there: phalanx agent --join HOST:PORT --name {node} --secret {out.name}")


@nodes_app.command("add")
def nodes_add(
    run: Run,
    count: Annotated[
        int, typer.Option(metavar="N", min=1, max=16, help="How many node processes of this machine.")
    ] = 1,
) -> None:
    """Add nodes: they fill places that are empty, or stand by."""
    from phalanx.runtime.cluster import MORE_NODES

    ask(run, {"type": "status"})
    path = run / "control" / MORE_NODES
    before = int(path.read_text()) if path.exists() else 0
    near = path.with_name(f".{path.name}")
    near.write_text(str(before + count))
    os.replace(near, path)
    print(f"{count} more will join")


def scale(
    run: Run, replicas: Annotated[int, typer.Option(metavar="N", min=1, help="The new number of replicas.")]
) -> None:
    """Change the number of replicas of a live run; they divide the same batch among them."""
    ask(run, {"type": "ask", "event": {"kind": "Scale", "replicas": replicas}})
    print(f"{replicas} replicas are wanted from the next step boundary on, if there are nodes for them")
