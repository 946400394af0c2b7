"""`phalanx family`: check a model of your own under every axis before it uses a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

family_app = typer.Typer(no_args_is_help=True, help="A model of your own: check it under every axis.")


@family_app.callback()
def _family() -> None:
    """Keep `check` a command of its own."""


@family_app.command("check")
def check(
    family: Annotated[
        str, typer.Argument(metavar="FILE:NAME|JOB.toml", help="The family, or a job file that names it.")
    ],
    job: Annotated[
        Path | None, typer.Option("--job", metavar="JOB.toml", help="The job file whose [model] has its sizes.")
    ] = None,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="Override a field of the job; repeatable."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON.")] = False,
) -> None:
    """Compare a family under replica, shard, tp, pp, cp and ep with itself on one rank, in fp64: gradients of every
    parameter, two ranks for each axis, in seconds. Exit status 1 if an axis is wrong or breaks; one that is refused
    cannot train wrongly.

    phalanx family check my_model.py:FAMILY --set model.options.dim=64"""
    from phalanx.spec import load

    overrides = list(sets or [])
    if family.endswith(".toml"):
        job = Path(family)
    else:
        overrides.append(f"model.family={json.dumps(family)}")
    overrides += [f"layout.{axis}=1" for axis in ("replica", "shard", "tp", "pp", "cp", "ep")]
    resolved = load(job, [*overrides, "layout.ranks_per_node=0", "recovery.spares=0"]).job

    from phalanx.model.family import load_family
    from phalanx.train.parity import BAR, parity

    findings = []
    for found in parity(resolved, load_family(resolved.model.family)):
        findings.append(found)
        if not as_json:
            at = f"largest error {found.error:.1e}" if found.verdict == "right" else found.why
            print(f"{found.axis:<16} {found.verdict:<8} {at}", flush=True)
    bad = [found.axis for found in findings if found.verdict in ("wrong", "broken")]
    if as_json:
        rows = [
            {"axis": f.axis, "verdict": f.verdict, "why": f.why, "error": f.error if f.error == f.error else None}
            for f in findings
        ]
        print(json.dumps({"family": resolved.model.family, "bar": BAR, "ok": not bad, "axes": rows}))
    elif bad:
        print(f"do not train with {'; '.join(bad)}")
    if bad:
        raise typer.Exit(1)
