"""`phalanx calibrate`: measure this machine with real processes on all its accelerators, or on its cores, and write
what the planner needs to know about it to a file."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

STORE, PROBE = -1, -2
CPU_RANKS = 4  # at most, because they share the cores and the memory
LONGEST_MINUTES = 60.0
Tell = Callable[[str, int, int], None]  # section, cases done, cases in total


def calibrate(
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write the measurements; by default where `phalanx train` looks."),
    ] = None,
    minutes: Annotated[float, typer.Option(metavar="N", help="About how long it may take.")] = 2.0,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="auto, cpu, or the name of an accelerator.")] = "auto",
    ranks: Annotated[
        int, typer.Option(metavar="N", help="Processes; by default one per accelerator, or up to 4 on the cores.")
    ] = 0,
) -> None:
    """Measure this machine: matrix products, attention, memory, collectives."""
    from phalanx.run.planned import calibration

    if out is None:
        out = calibration()
        out.parent.mkdir(parents=True, exist_ok=True)
    _check(out, minutes, ranks)
    from phalanx.plan.cost.measurements import read
    from phalanx.run.console import PlainConsole

    console, told = PlainConsole(stderr=True), {""}
    with console.status("starting") as status:

        def tell(section: str, done: int, total: int) -> None:
            text = f"measuring {section}, {done} of {total} done"
            status.update(text)
            if not console.is_terminal and section not in told:
                console.print(text)
            told.add(section)

        found = _run(device, ranks, 60 * minutes, tell)
    _write(out, found)
    for line in summary(read(out)):
        print(line)
    print(f"written to {out}")


def _check(out: Path, minutes: float, ranks: int) -> None:
    from phalanx.core.errors import UserError

    if not 0 < minutes <= LONGEST_MINUTES:
        remedy = f"choose more than 0 and at most {LONGEST_MINUTES:.0f}; 2 are usually enough"
        raise UserError("that is no time to measure in", field="--minutes", value=minutes, remedy=remedy)
    if not 0 <= ranks <= 64:
        remedy = "choose 1 to 64, or leave it out for one per accelerator"
        raise UserError("so many processes cannot be started", field="--ranks", value=ranks, remedy=remedy)
    if out.is_dir() or not os.access(out.absolute().parent, os.W_OK):
        remedy = "name a file in a folder that exists and that you may write to"
        raise UserError("no file can be written there", field="--out", value=str(out), remedy=remedy)


def _run(device: str, ranks: int, seconds: float, tell: Tell) -> dict[str, Any]:
    """Return what rank 0 measured. Raise RunFailed with the log of the process that failed."""
    from phalanx.core.errors import UserError
    from phalanx.runtime.bare import BareClient, Together
    from phalanx.runtime.cluster import environment

    with tempfile.TemporaryDirectory(prefix="phalanx-calibrate-") as folder:
        logs = Path(folder)
        with BareClient(["phalanx.train.calibrate"], env=environment(), log=logs / "node.log") as client:
            gang = Together(client)
            gang.spawn(PROBE, "the probe", "phalanx.train.calibrate:probe", {"device": device}, logs / "probe.log")
            there = _message(gang, "probe", tell)
            if there["refused"]:
                raise UserError(there["refused"], field="--device", value=device, remedy='choose "auto" or "cpu"')
            ranks = ranks or there["accelerators"] or min(CPU_RANKS, there["cores"])
            store = ""
            if ranks > 1:
                gang.spawn(STORE, "the store", "phalanx.gate.meeting:serve", {"alone": True}, logs / "store.log")
                store = _message(gang, "store", tell)["address"]
            for rank in range(ranks):
                args = {"rank": rank, "ranks": ranks, "device": device, "seconds": seconds, "store": store}
                log = logs / f"rank-{rank}.log"
                gang.spawn(rank, f"rank {rank}", "phalanx.train.calibrate:main", args, log)
            return _message(gang, "calibration", tell)["calibration"]


def _message(gang: Any, kind: str, tell: Tell) -> dict[str, Any]:
    """Return the next message of this kind, reporting progress while it waits."""
    while True:
        event = gang.next(1.0)
        body = event["body"] if event and event["type"] == "message" else {}
        if body.get("type") == kind:
            return body
        if body.get("type") == "progress":
            tell(body["section"], body["done"], body["total"])


def _write(out: Path, found: dict[str, Any]) -> None:
    """Write the whole file or nothing."""
    from phalanx import __version__

    found["versions"]["phalanx"] = __version__
    half = out.with_name(f".{out.name}.part")
    half.write_text(_dumped(found))
    half.replace(out)


def _dumped(found: dict[str, Any]) -> str:
    """Format as JSON with one line for each measurement."""
    parts = []
    for key, value in found.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n    " + ",\n    ".join(json.dumps(row) for row in value) + "\n  ]" if value else "[]"
        parts.append(f"  {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def summary(found: Any) -> list[str]:
    """Summarise the best of each measurement, and the interval that the planner derives from all of them."""
    from phalanx.plan.cost.calibrated import profile_from
    from phalanx.plan.cost.intervals import interval
    from phalanx.run.console import flops
    from phalanx.run.planned import GUESS

    node = found.machine
    lines = [f"{node.device} ({node.host}), {node.ranks} rank{'s' if node.ranks > 1 else ''} over {node.backend}"]
    for dtype in dict.fromkeys(x.dtype for x in found.matmul):
        best = max((x for x in found.matmul if x.dtype == dtype), key=lambda x: x.flops / x.median_s)
        shape = f"{best.m} x {best.k} by {best.k} x {best.n}"
        lines.append(f"matmul, {dtype:<12} {flops(best.flops / best.median_s)} at best ({shape})")
    for backward, name in ((False, "forward"), (True, "backward")):
        speed = max(x.flops / x.median_s for x in found.attention if x.backward is backward)
        lines.append(f"attention, {name:<9} {flops(speed)} at best (causal, bf16)")
    lines.append(f"memory               {max(x.size_bytes / x.median_s for x in found.memory) / 1e9:.3g} GB/s at best")
    for kind in dict.fromkeys(x.kind for x in found.collectives):
        some = sorted((x for x in found.collectives if x.kind == kind), key=lambda x: x.size_bytes)
        speed = some[-1].size_bytes / some[-1].median_s / 1e9
        lines.append(
            f"{kind:<20} {speed:.3g} GB/s of {some[-1].size_bytes / 1e6:.3g} MB, "
            f"{some[0].median_s * 1e6:,.0f} us for {some[0].size_bytes / 1e3:.3g} kB"
        )
    profile = profile_from(found.path)
    assert profile.error
    before = GUESS if node.device.startswith("cpu") else interval("dense", False)
    after = profile.error
    lines.append(
        f"a step's interval: {_signed(after[0])} to {_signed(after[1])} around the prediction, "
        f"in place of {_signed(before[0])} to {_signed(before[1])} without a calibration"
    )
    return lines


def _signed(log: float) -> str:
    return f"{math.expm1(log):+.0%}"
