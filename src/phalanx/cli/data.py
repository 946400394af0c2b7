"""`phalanx data`: build, import, inspect and verify data sets. Heavy imports happen inside a command."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

data_app = typer.Typer(no_args_is_help=True, help="Data sets: build, import, look at and verify them.")

Out = Annotated[str, typer.Option("--out", metavar="URL", help="The data set: a folder, s3://, gs://, az://.")]
Source = Annotated[str, typer.Option("--source", metavar="LABEL", help="The source of inputs that name none.")]
Append = Annotated[bool, typer.Option("--append", help="Add to the data set: a new version that extends the old.")]
ShardMb = Annotated[
    float | None, typer.Option("--shard-mb", metavar="N", help="The largest size of a shard.", show_default="537")
]
Staging = Annotated[
    Path | None, typer.Option("--staging", metavar="DIR", help="A local folder for what is not finished.")
]
Url = Annotated[str, typer.Argument(metavar="URL", help="The data set.")]
Version = Annotated[str, typer.Option("--version", metavar="VERSION", help="This version, not the newest.")]


@data_app.command("build")
def build_command(
    inputs: Annotated[
        list[str], typer.Argument(metavar="SRC...", help="Files, folders or python-stdlib, each as PATH or LABEL=PATH.")
    ],
    out: Out,
    tokenizer: Annotated[str, typer.Option("--tokenizer", metavar="byte|FILE", help="byte, or a tokenizer.json.")],
    source: Source = "text",
    field: Annotated[
        str,
        typer.Option("--field", metavar="NAME", help="The field of JSON lines, or column of Parquet, with the text."),
    ] = "text",
    eos: Annotated[
        str, typer.Option("--eos", metavar="TOKEN", help="The token that ends a document; usual names are found.")
    ] = "",
    workers: Annotated[int, typer.Option("--workers", metavar="N", min=0, help="Processes; 0: one for each core.")] = 0,
    append: Append = False,
    shard_mb: ShardMb = None,
    max_mb: Annotated[
        float | None, typer.Option("--max-mb", metavar="N", help="Use at most so much text of each source.")
    ] = None,
    staging: Staging = None,
    force: Annotated[bool, typer.Option("--force", help="Read binary files as text.")] = False,
) -> None:
    """Build a data set from text, JSON lines (.gz, .zst) and Parquet. Repeat the command to continue after a kill."""
    from phalanx.data.build import Progress, build
    from phalanx.data.tokenizer import make_tokenizer

    _refuse_memory(out)
    labelled = [_labelled(text, source) for text in inputs]
    notes: list[str] = []
    made, shard_chunks = make_tokenizer(tokenizer, eos), _shard_chunks(shard_mb)
    max_bytes = None if max_mb is None else int(_positive("--max-mb", max_mb) * 1e6)
    with _stopped("the same command continues from here"), _bar("building") as told:

        def on_progress(p: Progress) -> None:
            told(p.done_bytes, p.total_bytes, f"{p.text_bytes / 1e6:,.1f} MB of text")

        built = build(
            labelled,
            out,
            made,
            field=field,
            workers=workers,
            staging=staging,
            append=append,
            max_bytes=max_bytes,
            shard_chunks=shard_chunks,
            force=force,
            on_progress=on_progress,
            on_note=notes.append,
            on_wait=_tell,
        )
    _print_info(out, *built)
    for note in notes:
        print(note)


@data_app.command("import")
def import_command(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="Files as PATH or LABEL=PATH; .npy records as FIELD=PATH."),
    ],
    out: Out,
    tokenizer: Annotated[
        str, typer.Option("--tokenizer", metavar="byte|FILE", help="The tokenizer that made the ids.")
    ] = "",
    eos: Annotated[str, typer.Option("--eos", metavar="TOKEN", help="Ends a document, with --tokenizer.")] = "",
    vocab_size: Annotated[
        int | None,
        typer.Option("--vocab-size", metavar="N", min=1, max=1 << 32, help="Without --tokenizer: ids are below it."),
    ] = None,
    eos_id: Annotated[
        int | None, typer.Option("--eos-id", metavar="N", min=0, help="Without --tokenizer: this id ends a document.")
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="TYPE", help="The type of a raw .bin: uint16, int32, ...")
    ] = "",
    records: Annotated[bool, typer.Option("--records", help="Arrays of records (.npy, .npz), not ids.")] = False,
    source: Source = "text",
    append: Append = False,
    shard_mb: ShardMb = None,
    staging: Staging = None,
) -> None:
    """Import Megatron's .bin/.idx, raw .bin and .npy ids, or .npy and .npz arrays as records."""
    from phalanx.core.errors import UserError
    from phalanx.core.manifest import Field
    from phalanx.data.build import write_arrays
    from phalanx.data.imports import record_blocks, token_blocks
    from phalanx.data.tokenizer import Vocabulary, make_tokenizer

    _refuse_memory(out)
    options: dict[str, Any] = {"append": append, "staging": staging, "shard_chunks": _shard_chunks(shard_mb)}
    options["on_wait"] = _tell
    with _stopped("nothing was added; the same command starts again"), _bar("importing") as told:
        options["on_progress"] = lambda items: told(0, None, f"{items:,} items")
        if records:
            fields, blocks = record_blocks([(label, Path(path)) for label, path in (_labelled(i, "") for i in inputs)])
            built = write_arrays(out, fields, [(source, blocks)], **options)
        else:
            if tokenizer:
                made = make_tokenizer(tokenizer, eos)
                vocabulary, file = made.vocabulary, made.file
            elif eos:
                remedy = "add --tokenizer FILE, or give its number as --eos-id"
                raise UserError("what id it is cannot be known", field="--eos", value=eos, remedy=remedy)
            elif vocab_size:
                if eos_id is not None and eos_id >= vocab_size:
                    remedy = f"name one below {vocab_size}, or a larger --vocab-size"
                    raise UserError("there is no such id", field="--eos-id", value=eos_id, remedy=remedy)
                vocabulary, file = Vocabulary("", "", vocab_size, -1 if eos_id is None else eos_id), b""
            else:
                remedy = "name --tokenizer FILE, or --vocab-size N (and --eos-id N)"
                raise UserError("how large the ids may be is not known", field="--tokenizer", value="", remedy=remedy)
            paths: dict[str, list[Path]] = {}
            for label, path in (_labelled(i, source) for i in inputs):
                paths.setdefault(label, []).append(Path(path))
            streams = [
                (label, (block for path in found for block in token_blocks(path, vocabulary, dtype)))
                for label, found in paths.items()
            ]
            options |= {"vocabulary": vocabulary, "tokenizer_file": file}
            built = write_arrays(out, (Field("tokens", vocabulary.dtype),), streams, **options)
    _print_info(out, *built)


@data_app.command("info")
def info_command(
    url: Url,
    version: Version = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show what is in a data set."""
    import json

    manifest, found = _open(url, version)[1:]
    if as_json:
        print(json.dumps(_info(manifest, found), indent=2))
    else:
        _print_info(url, manifest, found)


@data_app.command("verify")
def verify_command(
    url: Url,
    version: Version = "",
    fast: Annotated[bool, typer.Option("--fast", help="Check only sizes and footers, no chunks.")] = False,
    threads: Annotated[int, typer.Option("--threads", metavar="N", min=0, help="0: one for each core.")] = 0,
) -> None:
    """Check every byte: each shard's size, its footer's root, and both hashes of each chunk."""
    from phalanx.data.verify import bytes_to_check, verify

    store, manifest, found = _open(url, version)
    total = bytes_to_check(manifest, fast)
    with _stopped("not all of it was checked"), _bar("verifying") as told:
        told(0, total, "")
        damage = verify(
            store,
            manifest,
            found,
            fast=fast,
            threads=threads or _cores(),
            on_progress=lambda done: told(done, total, ""),
        )
    for each in damage:
        print(each)
    what = "sizes and footers" if fast else "all chunks"
    verdict = f"{len(damage)} BAD" if damage else "good"
    print(f"{verdict}: {what} of {len(manifest.roots)} shards, version {found[:16]}")
    if damage:
        remedy = "give the commands that built it again, without --append: they write the same shards anew"
        print(f"  remedy: {remedy}; or restore these files")
        raise typer.Exit(1)


def _cores() -> int:
    import os

    return len(os.sched_getaffinity(0))


def _open(url: str, version: str) -> tuple[Any, Any, str]:
    """Open a data set: return store, manifest and version, which may be given by its first digits."""
    from phalanx.core.errors import UserError
    from phalanx.data.address import open_set
    from phalanx.data.fetch import read_manifest

    store = open_set(url, "URL")
    if version and len(version) < 16:
        raise UserError("it is too short", field="--version", value=version, remedy="give 16 digits of it, or all 64")
    return store, *read_manifest(store, version, "URL", "--version")


def _refuse_memory(out: str) -> None:
    from phalanx.core.errors import UserError
    from phalanx.data.address import NAME_IT

    if out.startswith("memory:"):
        raise UserError("it would be gone when this command ends", field="--out", value=out, remedy=NAME_IT)


def _labelled(text: str, label: str) -> tuple[str, str]:
    """Split LABEL=PATH, unless a file of that exact name exists."""
    import re

    found = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]{0,63})=(.+)", text)
    return (found[1], found[2]) if found and not Path(text).exists() else (label, text)


def _shard_chunks(shard_mb: float | None) -> int | None:
    if shard_mb is None:
        return None
    from phalanx.data.target import shard_chunks_of

    return shard_chunks_of(_positive("--shard-mb", shard_mb) * 1e6)


def _positive(name: str, value: float) -> float:
    from phalanx.core.errors import UserError

    if not 0 < value < 1e12:
        raise UserError("it is not a size", field=name, value=value, remedy="give megabytes, more than 0")
    return value


def _info(manifest: Any, version: str) -> dict[str, Any]:
    m = manifest
    shards = [(e, s) for e in range(len(m.extents)) for s in range(m.num_shards(e))]
    return {
        "version": version,
        "parent": m.parent,
        "kind": "tokens" if m.is_tokens else "records",
        "items": m.total_items,
        "bytes": sum(m.shard_bytes(e, s) for e, s in shards),
        "shards": len(shards),
        "shard_chunks": m.shard_chunks,
        "chunk_items": m.chunk_items,
        "tokenizer": m.tokenizer,
        "tokenizer_hash": m.tokenizer_hash,
        "vocab_size": m.vocab_size,
        "eos": m.eos,
        "fields": [{"name": f.name, "dtype": f.dtype, "shape": list(f.shape)} for f in m.fields],
        "extents": [
            {"source": extent.source, "items": extent.items, "shards": m.num_shards(e)}
            for e, extent in enumerate(m.extents)
        ],
    }


def _print_info(url: str, manifest: Any, version: str) -> None:
    info = _info(manifest, version)
    rows = {"data set": url, "version": version}
    if info["parent"]:
        rows["extends"] = info["parent"]
    rows |= {info["kind"]: f"{info['items']:,}", "bytes": f"{info['bytes']:,} in {info['shards']:,} shards"}
    rows["type"] = ", ".join(f"{f['name']} {f['dtype']}{f['shape'] or ''}" for f in info["fields"])
    if info["vocab_size"]:
        end = f", {info['eos']} ends a document" if info["eos"] >= 0 else ""
        rows["tokenizer"] = f"{info['tokenizer'] or 'not known'}: {info['vocab_size']:,} ids{end}"
    for number, extent in enumerate(info["extents"]):
        rows[f"extent {number}"] = f"{extent['source']}: {extent['items']:,} in {extent['shards']:,} shards"
    for name, value in rows.items():
        print(f"{name:<10}  {value}")


def _tell(text: str) -> None:
    """Print at once why the command waits, so that it does not look stuck."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _stopped(text: str) -> Iterator[None]:
    """Print `text` if Ctrl-C ends the block."""
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"stopped; {text}", file=sys.stderr)
        raise typer.Exit(130) from None


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int | None, str], None]]:
    """Show a progress bar in a terminal, or an occasional line elsewhere. Yield a function that takes the amount done,
    the total and a text."""
    import time

    from phalanx.run.console import PLAIN_EVERY_S, PlainConsole

    out = PlainConsole(file=sys.stderr)
    if not out.is_interactive:
        last = time.monotonic()

        def line(done: int, total: int | None, text: str) -> None:
            nonlocal last
            if time.monotonic() - last >= PLAIN_EVERY_S:
                last = time.monotonic()
                of = [f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB"] if total else []
                out.print(f"{name}: {', '.join([*of, *filter(None, [text])])}", soft_wrap=True)

        yield line
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=out, transient=True) as progress:
        task = progress.add_task(name, total=None)

        def draw(done: int, total: int | None, text: str) -> None:
            progress.update(task, completed=done, total=total, description=f"{name} {text}".strip())

        yield draw


Run = Annotated[Path | None, typer.Argument(metavar="[RUN]", help="The record of a run; the newest in runs/.")]
Json = Annotated[bool, typer.Option("--json", help="For programs.")]


@data_app.command("where")
def where_command(
    step: Annotated[int, typer.Option("--step", metavar="N", help="The step of the run, from 0.")],
    run: Run = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", help="Only what this rank trained on.")] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="URL", help="Where the data set lies now.")] = None,
    json: Json = False,
) -> None:
    """Print what a run trained on in a step: the text, and the shard and offset where it lies."""
    from phalanx.cli.served import print_where

    print_where(run, step, rank, data, json)


@data_app.command("mix")
def mix_command(run: Run = None, json: Json = False) -> None:
    """Print the planned and the served share of each source of a run."""
    from phalanx.cli.served import print_mix

    print_mix(run, json)


@data_app.command("bench")
def bench_command(
    url: Url,
    seq_len: Annotated[int, typer.Option("--seq-len", metavar="N", min=1, help="Tokens in a sequence.")] = 4096,
    batch: Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Sequences that are read at once.")] = 64,
    seconds: Annotated[float, typer.Option("--seconds", metavar="N", min=0.1, help="How long.")] = 5.0,
    json: Json = False,
) -> None:
    """Measure how fast this machine reads a data set: verified, in the order of a run."""
    from phalanx.cli.served import print_bench

    with _stopped("nothing was measured"):
        print_bench(url, seq_len, batch, seconds, json)
