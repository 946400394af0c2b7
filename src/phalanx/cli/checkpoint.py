"""`phalanx checkpoint`: list, look at, verify and convert checkpoints. Heavy imports happen inside a command."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.data import _bar

if TYPE_CHECKING:
    from phalanx.checkpoint.catalog import Catalog, Found
    from phalanx.checkpoint.files import Fault
    from phalanx.core.checkpoint import Manifest
    from phalanx.observe.record import RunRecord

checkpoint_app = typer.Typer(no_args_is_help=True, help="Checkpoints: list, look at, verify and convert them.")

Place = Annotated[
    str, typer.Argument(metavar="PATH", help="The record of a run, a folder or URL with checkpoints, or one of them.")
]


@checkpoint_app.command("ls")
def ls_command(path: Place) -> None:
    """List the checkpoints, the newest first."""
    from phalanx.checkpoint.best import Best
    from phalanx.control.interval import time_text
    from phalanx.core.checkpoint import BadCheckpoint, Unreadable

    with _edge(path):
        catalog, found = _found(path, everything=True)
        best = Best.read(catalog.store)
        print(
            f"{'step':>9}  {'name':<{len(found[0].name)}}  {'size':>8}  {'ranks':>6}  {'age':>8}  {'layout':<32}  state"
        )
        for f in found:
            size, ranks, layout, state = "-", "-", "-", f.status
            with contextlib.suppress(FileNotFoundError):
                try:
                    m = f.manifest
                    size, ranks, layout = _size(m.size_bytes), f"{len(m.files):,}", _layout(m)
                except BadCheckpoint as bad:
                    state = f"{'unreadable' if isinstance(bad, Unreadable) else 'BAD'}: {bad}"
            state += f": {f.quarantine['reason']}" if f.status == "quarantined" else ""
            state += ", best" if best and (best.step, best.lineage) == (f.step, f.lineage) else ""
            age = time_text(max(0, int((time.time() - f.since) * 1e9))) if f.since else "-"
            print(f"{f.step:>9}  {f.name}  {size:>8}  {ranks:>6}  {age:>8}  {layout:<32}  {state}")


@checkpoint_app.command("show")
def show_command(
    path: Place,
    tensors: Annotated[bool, typer.Option("--tensors", help="List them all.")] = False,
) -> None:
    """Show what is in a checkpoint; if there are several, in the newest good one."""
    with _edge(path):
        catalog, found = _found(path)
        m = found[0].manifest
        rows = {
            "checkpoint": f"{catalog.store.url}/{m.name}",
            "state": found[0].status + (f": {found[0].quarantine['reason']}" if found[0].quarantine else ""),
            "step": f"{m.step:,}, with {m.updates:,} updates",
            "made": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(m.made)),
            "layout": m.layout.describe(),
            "lineage": f"{m.lineage or '-'}, generation {m.generation}",
            "cursor": f"{m.cursor:,} in the order of the data",
            "data": m.data_version or "-",
            "ledger": m.ledger or "-",
            "files": f"{len(m.files):,}, {m.size_bytes:,} bytes",
        }
        model = m.job.get("model", {})
        if model:
            names = ("num_layers", "dim", "num_heads", "num_kv_heads", "ffn_dim", "vocab_size")
            rows["model"] = f"{model.get('family')}: " + ", ".join(f"{n} {model[n]:,}" for n in names if n in model)
        for kind, (count, size) in _kinds(m).items():
            rows[kind] = f"{count:,} tensors, {size:,} bytes"
        for name, value in rows.items():
            print(f"{name:<20}  {value}")
        for entry in m.entries if tensors else []:
            held = entry.held
            where = f"  stage {held.stage}" if m.layout.num_stages > 1 else ""
            print(f"{held.name:<56}  {entry.dtype:<8}  {'x'.join(map(str, held.shape)) or 'scalar':<16}{where}")


@checkpoint_app.command("verify")
def verify_command(path: Place) -> None:
    """Read every byte and compare its hash. Nothing is changed."""
    with _edge(path):
        catalog, found = _found(path, wanted=("good", "unreadable"))
        with _bar("verifying") as told:
            report = dict(catalog.verify(found, lambda done, total: told(done, total, "")))
        _print_report(report, "remedy: restore what is damaged; `phalanx checkpoint scrub` puts it aside")


@checkpoint_app.command("scrub")
def scrub_command(path: Place) -> None:
    """Verify all checkpoints. Quarantine those that a second process finds damaged too; they are no longer loaded."""
    with _edge(path):
        catalog, name = _locate(path)
        if name:
            remedy = "name the folder that it is in; to read this one alone, use `phalanx checkpoint verify`"
            raise _error("a scrub reads all checkpoints of a folder", path, remedy)
        _found(path, wanted=("good", "unreadable"))
        with _bar("scrubbing") as told:
            report = catalog.scrub(lambda done, total: told(done, total, ""))
        _print_report(report, "what is damaged is in quarantine: the next older good one is loaded instead")


@checkpoint_app.command("release")
def release_command(path: Place) -> None:
    """Take checkpoints out of quarantine if all their bytes are right: the one named, or all of a folder."""
    with _edge(path):
        catalog, name = _locate(path)
        held = [f.name for f in catalog.all() if f.status == "quarantined" and f.name == (name or f.name)]
        if not held:
            remedy = f"`phalanx checkpoint ls {catalog.store.url}` says which are"
            raise _error("nothing of it is in quarantine", path, remedy)
        report = {each: catalog.release(each) for each in held}
        for each in held:
            if not report[each]:
                print(f"released: {each}")
        _print_report(report, "these stay in quarantine")


@checkpoint_app.command("reindex")
def reindex_command(path: Place) -> None:
    """Rebuild the catalog.json of a bucket from a listing of the bucket."""
    with _edge(path):
        catalog, _ = _locate(path)
        if not catalog.index:
            raise _error("it is a folder, which needs no index", path, "name the URL of a bucket")
        print(f"{len(catalog.index.rebuild())} checkpoints are in {catalog.store.url}/catalog.json now")


def _print_report(report: dict[str, list[Fault]], remedy: str) -> None:
    bad = [name for name, wrong in report.items() if any(fault.damage for fault in wrong)]
    away = [name for name, wrong in report.items() if wrong and name not in bad]
    for wrong in report.values():
        for fault in wrong:
            print(fault.text)
    if bad:
        print(f"{len(bad)} BAD: {', '.join(bad)}\n  {remedy}")
    if away:
        print(f"{len(away)} CANNOT BE READ NOW: {', '.join(away)}")
        print("  remedy: bring back what is missing, and make it readable")
    if bad or away:
        raise typer.Exit(1)
    print(f"good: all bytes of {', '.join(report)}")


@checkpoint_app.command("why")
def why_command(run: Annotated[Path, typer.Argument(metavar="RUN", help="The record of a run.")]) -> None:
    """Explain the checkpoint interval of a run."""
    from phalanx.observe.record import RunRecord

    if not (run / "meta.json").is_file():
        remedy = "name the folder that `phalanx train` printed as the record"
        raise _error("it is not the record of a run: it has no meta.json", str(run), remedy, "RUN")
    with _edge(str(run)):
        try:
            lines = _why(RunRecord.open(run))
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            text = f"its record is damaged, or of another version: {error!r}"
            raise _error(text, str(run), "look at its job.json, metrics.jsonl and events.jsonl", "RUN") from None
    print("\n".join(lines))


def _why(record: RunRecord) -> list[str]:
    import dataclasses
    import statistics

    from phalanx.control.interval import (
        FAILURES_PER_1000_NODE_DAYS,
        Measured,
        durable_interval,
        explain,
        mtbf_ns,
        time_text,
    )
    from phalanx.core import document
    from phalanx.core.layout import Layout

    job = record.job["job"]
    layout, asked = document.make(Layout, job["layout"]), job.get("checkpoint", {})
    nodes = -(-layout.world_size // layout.ranks_per_node) if layout.ranks_per_node else 1
    rate = float(asked.get("failures", FAILURES_PER_1000_NODE_DAYS))
    events = list(record.events())
    derived = [e for e in events if e["type"] == "checkpoint_interval"]
    every = asked.get("every_steps", 0)
    lines = [f"the job asks for one every {every:,} steps; what follows from the run:"] if every > 0 else []
    lines += ["the job asks for none; what follows from the run:"] if every < 0 else []
    if derived:
        figures = dict(derived[-1]["measured"])
        m = Measured(**{field.name: int(figures.pop(field.name)) for field in dataclasses.fields(Measured)})
        lines += explain(m, **figures)
        if "memory_steps" in derived[-1]:
            lines.append(f"  memory   a snapshot in the hosts' memory every {derived[-1]['memory_steps']:,} steps")
        return lines

    def median_ns(rows: list[dict[str, Any]], name: str) -> int:
        return int(statistics.median(float(row.get(name) or 0) for row in rows) * 1e9)

    steps, seen = list(record.metrics()), [e for e in events if e["type"] == "checkpoint"]
    if not steps:
        return ["the run has measured no step and no checkpoint: nothing follows yet"]
    step_ns, mtbf = max(1, median_ns(steps, "time_s")), mtbf_ns(nodes, rate)
    if seen:
        stall, slowdown, drain = (median_ns(seen, name) for name in ("stall_s", "slowdown_s", "drain_s"))
        lines.append(f"from the medians of {len(seen):,} checkpoints and {len(steps):,} steps of the run:")
        return lines + explain(Measured(step_ns, stall, slowdown, drain, mtbf), nodes, rate)
    lines += [
        f"the run has measured no checkpoint yet; with steps of {time_text(step_ns)}, and an MTBF of {time_text(mtbf)}"
        f" ({nodes:,} nodes), one would be made"
    ]
    for cost in (10**7, 10**8, 10**9, 10**10):
        i = durable_interval(Measured(step_ns, cost, 0, 0, mtbf))
        lines.append(f"  every {i.steps:>9,} steps, {time_text(i.steps * step_ns):>8}, if it costs {time_text(cost)}")
    return lines


def _kind_of(source: str) -> str:
    from phalanx.core.store import is_remote

    here = Path(source)
    if is_remote(source) or not here.is_dir():
        return "phalanx"
    if (here / ".metadata").is_file():
        return "dcp"
    return "hf" if any(here.glob("*.safetensors")) or any(here.glob("pytorch_model*.bin")) else "phalanx"


# -- what a path names


def newest(path: str) -> str:
    """Return the path of the checkpoint that `path` names, or of the newest good one there."""
    with _edge(path):
        catalog, found = _found(path)
        return f"{catalog.store.url}/{found[0].name}"


def _found(path: str, everything: bool = False, wanted: tuple[str, ...] = ("good",)) -> tuple[Catalog, list[Found]]:
    """Find the checkpoint that `path` names; or the good ones, newest first; or everything there."""
    catalog, name = _locate(path)
    all_of_it = catalog.all()
    found = [f for f in all_of_it if (f.name == name if name else everything or f.status in wanted)]
    if name and found and found[0].status == "incomplete" and not everything:
        remedy = f"name another: `phalanx checkpoint ls {catalog.store.url}` lists them"
        raise _error("it was never committed: it has no manifest", path, remedy)
    if not found:
        others = ", ".join(f"{f.name} is {f.status}" for f in all_of_it[:3])
        text = f"there is no good checkpoint in it ({others})" if others else "there is no checkpoint in it"
        if _kind_of(path) != "phalanx":
            text += f" of ours, but one of {_kind_of(path)}"
        remedy = "name the record of a run, a folder or URL with checkpoints (step-…), or one of them"
        raise _error("there is no such checkpoint" if name else text, path, remedy)
    return catalog, found


def _locate(path: str) -> tuple[Catalog, str]:
    """Find where the checkpoints are, and the name of the checkpoint if `path` names one."""
    import json

    from phalanx.checkpoint.catalog import Catalog
    from phalanx.core.checkpoint import MANIFEST, NAME
    from phalanx.core.errors import UserError
    from phalanx.core.store import Folder, is_remote, open_store

    try:
        if is_remote(path):
            parent, _, last = path.rstrip("/").rpartition("/")
            is_one = NAME.fullmatch(last)
            return Catalog(open_store(parent if is_one else path)), last if is_one else ""
        store = open_store(path)
    except UserError as error:
        raise _error(error.message, path, error.remedy) from None
    assert isinstance(store, Folder)
    here = Path(os.path.abspath(store.path))
    if not here.is_dir():
        raise _error("there is no such folder", path, "name the record of a run, or a folder or URL with checkpoints")
    if NAME.fullmatch(here.name):
        return Catalog(Folder(here.parent)), here.name
    if (here / MANIFEST).is_file():
        raise _error("a checkpoint has the name that it was written with (step-…)", path, "rename it back")
    if (here / "job.json").is_file():
        try:
            asked = json.loads((here / "job.json").read_bytes())["job"].get("checkpoint", {}).get("dir", "")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _error("its job.json is damaged", path, "name the folder with the checkpoints itself") from None
        return Catalog(open_store(asked or str(here / "checkpoints"))), ""
    inside = here / "checkpoints"
    return Catalog(Folder(inside if inside.is_dir() else here)), ""


def _error(message: str, path: str, remedy: str, field: str = "PATH") -> Exception:
    from phalanx.core.errors import UserError

    return UserError(message, field=field, value=path, remedy=remedy)


@contextlib.contextmanager
def _edge(path: str, remedy: str = "see that it is there, and that you may read it") -> Iterator[None]:
    """Report what is wrong with the files without a traceback."""
    from phalanx.core.checkpoint import BadCheckpoint

    try:
        yield
    except BadCheckpoint as bad:
        raise _error(str(bad), path, "name another: `phalanx checkpoint ls` lists them") from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise _error(str(error), path, remedy) from None


# -- words


def _kinds(m: Manifest) -> dict[str, list[int]]:
    """Count weights, moments and so on, by name prefix and type: how many, and their bytes."""
    kinds: dict[str, list[int]] = {}
    for entry in m.entries:
        kind, slash, _ = entry.held.name.partition("/")
        counted = kinds.setdefault(f"{kind if slash else 'weights'} {entry.dtype}", [0, 0])
        counted[0] += 1
        counted[1] += entry.held.numel * entry.item_bytes
    return kinds


def _layout(m: Manifest) -> str:
    return m.layout.describe().partition(" = ")[0]


def _size(size: int) -> str:
    for unit, each in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6)):
        if size >= each:
            return f"{size / each:.3g} {unit}"
    return f"{size / 1000:.3g} kB"
