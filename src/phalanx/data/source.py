"""Where samples come from: text on this machine, or drawn images, by data.source. A source is built
once, before the ranks start, and opened by each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from phalanx.core.image import SYNTHETIC_IMAGES, ImageShape
from phalanx.core.job import Job
from phalanx.data import corpus
from phalanx.data.corpus import Corpus, Samples
from phalanx.data.images import Images

CORPUS = "corpus.bin"


class Source(Protocol):
    def samples(self, positions: Iterable[int]) -> Samples:
        """Those at these places in the run's order: a function of the job and the place alone."""

    def unigram_entropy(self) -> float:
        """In nats: the loss of a model that knows only how frequent each target is."""


def build(job: Job, run_dir: Path, on_progress: Callable[[int], None]) -> str:
    """Put into the run's folder what its ranks will open; returns a line that says what that is."""
    name = job.data.source
    if name == SYNTHETIC_IMAGES:
        shape = _image_shape(job)
        return f"images: {job.model.vocab_size} classes of {shape.size} x {shape.size} pixels, drawn as needed"
    records = (Path(job.run.dir), run_dir)
    tokens = corpus.build(name, run_dir / CORPUS, int(job.data.max_mb * 1e6), on_progress, left_out=records)
    return f"corpus: {tokens:,} byte tokens from {name}"


def open_source(job: Job, run_dir: Path) -> Source:
    if job.data.source == SYNTHETIC_IMAGES:
        return Images(_image_shape(job), job.model.vocab_size, job.seed)
    return Corpus(run_dir / CORPUS, job.train.seq_len, job.seed)


def _image_shape(job: Job) -> ImageShape:
    shape = ImageShape.of(job.model.options)
    assert shape and shape.num_patches == job.train.seq_len, "core.compat checks it"
    return shape
