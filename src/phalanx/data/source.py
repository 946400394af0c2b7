"""From data.source to a data set that the run can read: one that is there, or one made of text or of drawn images
beside the records of runs, where the next run with the same input finds it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from phalanx.core.errors import UserError
from phalanx.core.image import SYNTHETIC_IMAGES, ImageShape
from phalanx.core.job import Job
from phalanx.core.manifest import MANIFEST, Field
from phalanx.data import documents
from phalanx.data.build import Progress, build, write_records
from phalanx.data.images import Images
from phalanx.data.run import RunData, unigram_entropy
from phalanx.data.store import is_remote
from phalanx.data.tokenizer import Bytes

BUILT = ".data"  # beside the records of runs
NUM_IMAGES = 4096
ENTROPY_TOKENS = 1 << 20  # that it is measured on

OnProgress = Callable[[int], None]


def prepare(job: Job, run_dir: Path, on_progress: OnProgress) -> tuple[str, float]:
    """Make sure that the data set is there and put into the run's record how it is read. A line that says what it
    is, and its unigram entropy."""
    source = job.data.source
    if is_remote(source) or (Path(source) / MANIFEST).is_file():
        url = source
    else:
        url = str(_built(job, run_dir, on_progress))
    data = RunData.plan(job, url)
    data.write(run_dir)
    loader = data.open()
    try:
        entropy = unigram_entropy(
            loader, max(16, ENTROPY_TOKENS // job.train.seq_len) if loader.fetcher.store.is_local else 16
        )
    finally:
        loader.fetcher.close()
    m = loader.manifest
    what = f"{m.total_items:,} {m.tokenizer} tokens" if m.is_tokens else f"{m.total_items:,} records"
    return f"data: {what} from {source}, version {data.version[:16]}", entropy


def _built(job: Job, run_dir: Path, on_progress: OnProgress) -> Path:
    root = Path(job.run.dir).absolute() / BUILT
    make: Callable[[Path], object]
    if job.data.source == SYNTHETIC_IMAGES:
        shape = ImageShape.of(job.model.options)
        assert shape and shape.num_patches == job.train.seq_len, "core.compat checks it"
        images = Images(shape, job.model.vocab_size, job.seed)
        key = ["images", shape.size, shape.patch, shape.channels, job.model.vocab_size, job.seed, NUM_IMAGES]
        fields = (Field("tokens", "<f4", (shape.num_patches, shape.features)), Field("targets", "<u2"))

        def make(out: Path) -> object:
            return write_records(out, "images", fields, _drawn(images, fields))
    else:
        left_out = (Path(job.run.dir), run_dir)
        files = list(documents.files(job.data.source, left_out))
        stats = [(str(file), (s := file.stat()).st_size, s.st_mtime_ns) for file in files if file.exists()]
        key = ["text", job.data.source, job.data.max_mb, stats]
        label = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(job.data.source).name).lstrip("._-")[:64] or "text"

        def make(out: Path) -> object:
            size = int(job.data.max_mb * 1e6)
            inputs = [(label, job.data.source)]

            def told(progress: Progress) -> None:
                on_progress(progress.text_bytes)

            return build(inputs, out, Bytes(), workers=1, max_bytes=size, left_out=left_out, on_progress=told)

    out = root / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    if not (out / MANIFEST).is_file():
        try:
            make(out)
        except UserError:
            shutil.rmtree(out, ignore_errors=True)
            with contextlib.suppress(OSError):
                root.rmdir()
            raise
    return out


def _drawn(images: Images, fields: tuple[Field, ...]) -> Iterator[np.ndarray]:
    dtype = np.dtype([(f.name, f.dtype, f.shape) for f in fields])
    for first in range(0, NUM_IMAGES, 256):
        batch = np.empty(min(256, NUM_IMAGES - first), dtype)
        for row, at in zip(batch, range(first, NUM_IMAGES), strict=False):
            kind, pixels = images.draw(at)
            row["tokens"], row["targets"] = images.patches(pixels), kind
        yield batch
