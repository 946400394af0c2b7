"""`phalanx convert`: convert weights from and to Hugging Face's folders and torch's distributed checkpoints. Heavy
imports happen inside the command."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx.cli.checkpoint import _edge, _found, _kind_of, checkpoint_app
from phalanx.cli.data import _bar

if TYPE_CHECKING:
    from phalanx.core.checkpoint import Manifest
    from phalanx.core.shape import ModelConfig

Job = Annotated[
    Path | None,
    typer.Option("--job", metavar="FILE", help="With --to phalanx: write a job that continues the training."),
]


@checkpoint_app.command("convert")
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: ours, or a folder of HF or DCP.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="A folder; for phalanx a folder or URL.")],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="hf|dcp|phalanx", help="The format to write; hf for our checkpoints, phalanx for others."
        ),
    ] = "",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="TYPE", help="The type of the weights for hf: bf16 or fp32; unchanged by default."
        ),
    ] = "",
    job: Job = None,
    data: Annotated[str, typer.Option("--data", metavar="PATH", help="The data set that the job reads.")] = "data",
    like: Annotated[
        Path | None,
        typer.Option("--like", metavar="DIR", help="With --to hf: the HF folder whose tokenizer the export gets."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="FILE", help="With --to phalanx: the job file whose [model] names a family of your own."
        ),
    ] = None,
) -> None:
    """Convert to and from Hugging Face's safetensors and torch's distributed checkpoints.

    phalanx convert Llama-3.2-1B weights --job job.toml     from transformers, with a job that continues its training

    phalanx convert runs/my-run out                         the newest checkpoint of a run, for transformers"""
    from phalanx.core.errors import UserError
    from phalanx.core.store import is_remote

    kind = _kind_of(source)
    to = to or ("hf" if kind == "phalanx" else "phalanx")
    if to not in ("hf", "dcp", "phalanx"):
        raise UserError("there is no such format", field="--to", value=to, remedy="name hf, dcp or phalanx")
    if (kind == "phalanx") == (to == "phalanx"):
        remedy = "name another format as --to" if kind == to else "convert it to phalanx first, and that to this format"
        raise UserError(f"the source is {kind}", field="--to", value=to, remedy=remedy)
    options = {
        "--dtype": (dtype, "hf"),
        "--like": (like, "hf"),
        "--job": (job, "phalanx"),
        "--model": (model, "phalanx"),
    }
    for name, (given, where) in options.items():
        if given and to != where:
            raise UserError(f"it is of use for {where} only", field=name, value=str(given), remedy="leave it out")
    if to != "phalanx" and is_remote(target):
        raise UserError(f"{to} is written to a folder", field="DST", value=target, remedy="name a folder")
    if like and not like.is_dir():
        remedy = "name the folder of transformers that the model came from"
        raise UserError("there is no such folder", field="--like", value=str(like), remedy=remedy)
    if job and job.exists():
        raise UserError(
            "there is such a file already", field="--job", value=str(job), remedy="name another, or remove it"
        )
    remedy = "see that SRC is there and may be read, and that DST may be written"
    with _edge(source, remedy), _bar("converting") as told:

        def on_progress(done: int, total: int) -> None:
            told(done, total, "")

        if to == "phalanx":
            made, said = _take_in(source, target, kind, model, on_progress)
        else:
            catalog, found = _found(source)
            reader = catalog.open(found[0].name)
            more: dict[str, Any] = {"dtype": dtype, "like": like} if to == "hf" else {}
            import_module(f"phalanx.checkpoint.torch_{to}").write(reader, Path(target), progress=on_progress, **more)
            said = f"{target}: {to}, of {reader.name}"
    print(said)
    if to == "hf" and not any(
        Path(target, name).is_file() for name in import_module("phalanx.checkpoint.torch_hf").TOKENIZERS
    ):
        print("note: it has no tokenizer; `--like DIR` takes it from a folder of transformers", file=sys.stderr)
    if job and to == "phalanx":
        _write_job(job, made, Path(source).resolve().name, target, data)


def _take_in(source: str, target: str, kind: str, model: Path | None, on_progress: Any) -> tuple[Manifest, str]:
    from phalanx.checkpoint.catalog import Catalog
    from phalanx.core.store import open_store

    store = open_store(target)
    more = {"model": _model_of(model)} if model else {}
    made = import_module(f"phalanx.checkpoint.torch_{kind}").read(Path(source), store, progress=on_progress, **more)
    Catalog(store).added(made)
    return made, f"{store.url}/{made.name}: {len(made.entries):,} tensors, {made.size_bytes:,} bytes"


def _model_of(path: Path) -> ModelConfig:
    from phalanx.spec import load

    return load(path).job.model


def _write_job(path: Path, made: Manifest, name: str, target: str, data: str) -> None:
    from phalanx.core.job import Job
    from phalanx.core.store import is_remote
    from phalanx.spec.written import job_text

    def from_here(place: str) -> str:
        """Return the path relative to the job file's folder, as job files require."""
        return place if is_remote(place) else os.path.relpath(os.path.abspath(place), path.absolute().parent)

    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = job_text(Job.from_dict(made.job).model, plain, from_here(target), from_here(data))
    path.write_text(text, encoding="utf-8")
    print(f"{path}: `phalanx train {path}` continues its training")
