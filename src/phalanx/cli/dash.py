"""`phalanx dash`: the page of the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def dash(
    root: Annotated[Path, typer.Argument(metavar="RUNS_DIR", help="Where the records of runs are.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(metavar="HOST", help="The address to listen on; any but 127.0.0.1 needs a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="PORT", min=-1, max=65535, help="0: any free one; -1: 7474, or any if it is taken.")
    ] = -1,
    price: Annotated[
        float | None, typer.Option(metavar="N", min=0.0, help="Dollars per GPU-hour, in place of the records'.")
    ] = None,
    grafana: Annotated[
        bool, typer.Option("--grafana", help="Print a Grafana dashboard over /metrics, and stop.")
    ] = False,
    until_closed: Annotated[bool, typer.Option("--until-closed", hidden=True)] = False,
) -> None:
    """Show the runs on a web page: progress, goodput, incidents, ranks. It only reads."""
    if grafana:
        import json

        from phalanx.observe.prometheus import grafana as dashboard

        print(json.dumps(dashboard(), indent=2))
        return
    from phalanx.core.errors import UserError
    from phalanx.web.serve import serve

    if not root.is_dir() and not until_closed:
        remedy = "name the folder that holds runs (run.dir of the job); `phalanx train` makes one"
        raise UserError("there is no such folder", field="RUNS_DIR", value=str(root), remedy=remedy)
    if until_closed:
        _end_with_input()
    serve(root, host, port, price, lambda text: print(text, flush=True))


def _end_with_input() -> None:
    """Exit when the process that started this one closes its end of stdin."""
    import os
    import sys
    import threading

    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
