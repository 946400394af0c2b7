"""Turns data.source into a data set that the run can read: one that exists, or one built from text or from drawn
images. It is built beside the records of runs, where the next run with the same input finds it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from phalanx.core.errors import UserError
from phalanx.core.image import SYNTHETIC_IMAGES, ImageShape
from phalanx.core.job import Job
from phalanx.core.manifest import MANIFEST, Field
from phalanx.core.store import is_remote
from phalanx.data import documents
from phalanx.data.build import build, write_records
from phalanx.data.images import Images
from phalanx.data.loader import DataLost, unserved
from phalanx.data.order import Order
from phalanx.data.selection import Position, RunData, unigram_entropy
from phalanx.data.tokenizer import Bytes
from phalanx.data.validation import FILE as VALIDATED
from phalanx.data.validation import HELD_OUT, ValidationSet

BUILT = ".data"  # beside the records of runs
NOTES = "notes.txt"  # in it: what the user was told when it was built
NUM_IMAGES = 4096
ENTROPY_TOKENS = 1 << 20  # on which it is measured

OnProgress = Callable[[int], None]


def prepare(job: Job, run_dir: Path, on_progress: OnProgress, position: Position | None = None) -> tuple[str, float]:
    """Make sure that the data set exists, and write into the run's record how it is read from `position` on. Return
    lines that describe it and its unused parts, and its unigram entropy."""
    source = job.data.source
    url, is_there = _find(job, run_dir, on_progress)
    data = RunData.plan(job, url, position)
    data.write(run_dir)
    loader = data.open()
    try:
        count = max(16, ENTROPY_TOKENS // job.train.seq_len) if loader.fetcher.store.is_local else 16
        entropy = unigram_entropy(loader, count)
    except (DataLost, OSError) as error:
        remedy = "`phalanx data verify` lists what is damaged; restore it, or check the way to the store"
        raise UserError(str(error), field="data.source", value=source, remedy=remedy) from None
    finally:
        loader.close()
    m = loader.manifest
    what = f"{m.total_items:,} {m.tokenizer} tokens" if m.is_tokens else f"{m.total_items:,} records"
    lines = [f"{what} from {source}, version {data.version[:16]}", *unserved(m, loader.order, job.data.stages)]
    lines += _repeats(loader.order, data.cursor(job.train.steps))
    if not is_there and (Path(url) / NOTES).is_file():
        lines += (Path(url) / NOTES).read_text().splitlines()
    return "\n".join(f"data: {line}" for line in lines), entropy


def prepare_validation(job: Job, run_dir: Path, on_progress: OnProgress, trained: RunData) -> list[ValidationSet]:
    """Make sure that the run's validation sets exist, and write into its record what they are."""
    sets: list[ValidationSet] = []
    for source in job.validation.sources:
        one = replace(job, data=replace(job.data, source=source))
        try:
            url, _ = _find(one, run_dir, on_progress)
        except UserError as error:
            field = "validation.sources" if error.field == "data.source" else error.field
            raise UserError(error.message, field=field, value=error.value, remedy=error.remedy) from None
        name = source.rstrip("/").rpartition("/")[2]
        taken = [each.name for each in sets]
        sets.append(ValidationSet.plan(job, f"{name}-{len(taken)}" if name in taken else name, url))
    if job.validation.held_out:
        sets.append(ValidationSet.plan(job, HELD_OUT, trained.url))
    if sets:
        (run_dir / VALIDATED).write_text(json.dumps([each.to_dict() for each in sets], indent=2) + "\n")
    return sets


def _repeats(order: Order, served: int) -> Iterator[str]:
    """Yield a line for each source that the whole run reads more than once."""
    for source, epochs in order.epochs(served).items():
        if epochs > 1.005:
            yield f"{source} is read {epochs:,.1f} times by the last step: give it more text, or lower train.steps"


def _find(job: Job, run_dir: Path, on_progress: OnProgress) -> tuple[str, bool]:
    """Return where the data set of data.source is, after building it if need be, and whether the user named it
    directly."""
    source = job.data.source
    if is_remote(source) or (Path(source) / MANIFEST).is_file():
        return source, True
    url, make = _recipe(job, run_dir, on_progress)
    if not (Path(url) / MANIFEST).is_file():  # no earlier run has made it
        make()
    return url, False


def _recipe(job: Job, run_dir: Path, on_progress: OnProgress) -> tuple[str, Callable[[], object]]:
    """Return where the data set of these inputs belongs, and a function that builds it."""
    source = job.data.source
    if source == SYNTHETIC_IMAGES:
        shape = ImageShape.of(job.model.options)
        assert shape and shape.num_patches == job.train.seq_len, "core.compat checks it"
        images = Images(shape, job.model.vocab_size, job.seed)
        fields = (Field("tokens", "<f4", (shape.num_patches, shape.features)), Field("targets", "<u2"))
        sizes = [shape.size, shape.patch, shape.channels, job.model.vocab_size, job.seed, NUM_IMAGES]
        out = _place(job, ["images", *sizes])
        return str(out), lambda: write_records(out, "images", fields, _drawn(images, fields))
    left_out = (Path(job.run.dir), run_dir)
    with _in_words_of(job):
        files = [file for file in documents.files(source, left_out) if file.exists()]
    out = _place(
        job, ["text", source, job.data.max_mb, [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]]
    )
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(source).name).lstrip("._-")[:64] or "text"

    def make() -> None:
        notes: list[str] = []
        with _in_words_of(job):
            build(
                [(label, source)],
                out,
                Bytes(),
                workers=1,
                max_bytes=int(job.data.max_mb * 1e6),
                left_out=left_out,
                on_progress=lambda progress: on_progress(progress.text_bytes),
                on_note=lambda note: notes.append(note.replace("--max-mb", "data.max_mb")),
            )
        (out / NOTES).write_text("".join(f"{note}\n" for note in notes))

    return str(out), make


@contextlib.contextmanager
def _in_words_of(job: Job) -> Iterator[None]:
    """Word the refusals of a build in the terms of the job file."""
    try:
        yield
    except UserError as error:
        mine = error.field in ("--out", "--staging")
        field, value = ("run.dir", job.run.dir) if mine else ("data.source", job.data.source)
        message = error.message.replace("--max-mb", "data.max_mb")
        raise UserError(message, field=field, value=value, remedy=error.remedy) from None


def _place(job: Job, key: list[object]) -> Path:
    return Path(job.run.dir).absolute() / BUILT / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]


def _drawn(images: Images, fields: tuple[Field, ...]) -> Iterator[np.ndarray]:
    dtype = np.dtype([(f.name, f.dtype, f.shape) for f in fields])
    for first in range(0, NUM_IMAGES, 256):
        batch = np.empty(min(256, NUM_IMAGES - first), dtype)
        for row, at in zip(batch, range(first, NUM_IMAGES), strict=False):
            kind, pixels = images.draw(at)
            row["tokens"], row["targets"] = images.patches(pixels), kind
        yield batch
