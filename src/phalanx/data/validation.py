"""The sets that a run validates on, fixed before its ranks start: separate data sets, or the end of the training data,
which its order leaves out. Arithmetic chooses the sequences, so any number of ranks reads the same ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.core import document
from phalanx.core.errors import UserError
from phalanx.core.job import DataConfig, Job
from phalanx.data.loader import Loader, Located, held_out
from phalanx.data.samples import unpack
from phalanx.data.selection import RunData
from phalanx.data.tokenizer import Tokenizer, tokenizer_of

HELD_OUT = "held-out"
FILE = "validation.json"


@dataclass(frozen=True)
class ValidationSet:
    name: str
    data: RunData  # how it is read; its order is not used
    first: list[int]  # the first sample that may be read, by extent
    count: int  # sequences
    target_bytes: int  # of text in the targets; 0: not known

    @staticmethod
    def plan(job: Job, name: str, url: str) -> ValidationSet:
        """Plan the validation on the data set at `url`, or on its end if that is held out of the training data."""
        own = name != HELD_OUT
        field, value = ("validation.sources", url) if own else ("validation.held_out", job.validation.held_out)
        read = dataclasses.replace(job, data=DataConfig(source=url)) if own else job
        try:
            data = RunData.plan(read, url)
        except UserError as error:
            raise UserError(error.message, field=field, value=value, remedy=error.remedy) from None
        loader = data.open()
        try:
            cuts = loader.cuts
            first = [0 if own else cut.num_samples - held_out(cut.num_samples, job.validation.held_out) for cut in cuts]
            total = sum(cut.num_samples - a for cut, a in zip(cuts, first, strict=True))
            if not total:
                message = "the share is less than one sequence of every source"
                raise UserError(message, field=field, value=value, remedy="raise it, or name validation.sources")
            count = min(total, job.validation.sequences or total)
            made = ValidationSet(name, data, first, count, 0)
            return dataclasses.replace(made, target_bytes=_target_bytes(loader, made.rows(loader, range(count))))
        finally:
            loader.close()

    def rows(self, loader: Loader, indices: Sequence[int]) -> np.ndarray:
        """Read the sequences with these numbers, which are spread evenly over the set."""
        sizes = np.array([cut.num_samples - a for cut, a in zip(loader.cuts, self.first, strict=True)])
        ends = np.cumsum(sizes)
        at = np.array(indices, np.int64) * int(ends[-1]) // self.count
        extents = np.searchsorted(ends, at, side="right")
        samples = at - (ends - sizes)[extents] + np.array(self.first)[extents]
        out = np.empty((len(at), loader.width), loader.manifest.dtype)
        loader.fill(Located(at, extents, samples), out)
        return out

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(said: dict[str, Any]) -> ValidationSet:
        return document.make(ValidationSet, {**said, "data": document.make(RunData, said["data"])})


def _target_bytes(loader: Loader, rows: np.ndarray) -> int:
    """Count the UTF-8 bytes of the targets that count; 0 if the set has no tokenizer that can be used here."""
    m = loader.manifest
    if not m.is_tokens:
        return 0
    try:
        tokenizer: Tokenizer | None = tokenizer_of(loader.fetcher.store, m)
    except UserError:
        return 0
    if tokenizer is None:
        return 0
    samples = unpack(rows, m.eos)
    counted = ((t[w > 0]) for t, w in zip(samples.targets_BL, samples.weights_BL, strict=True))
    return sum(len(tokenizer.decode(targets).encode()) for targets in counted)
