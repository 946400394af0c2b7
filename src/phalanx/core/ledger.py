"""The ledger's records, one for each committed step. Each names the hash of the one before it, so the last hash, which
is in every checkpoint's manifest, tells whether anything before it was changed. Abandoned steps stay as a branch: the
chain continues from an earlier record."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

GENESIS = "0" * 64  # the hash before the first step


@dataclass(frozen=True, slots=True)
class Record:
    step: int  # from 0
    previous: str  # the hash of the record before it
    samples: tuple[int, int]  # [first, last) in the order of the data
    data_version: str
    loss_bits: str  # see `bits`
    norm_bits: str
    layout: dict[str, Any]
    generation: int
    rng: str  # a digest of the ranks' random state
    digest: str = ""  # of the state after the step; "": not taken
    skipped: str = ""  # why the step was not applied; "": it was

    def hash(self) -> str:
        """Hash its JSON with sorted keys and no spaces."""
        return hashlib.sha256(self._json().encode()).hexdigest()

    def _json(self, **more: str) -> str:
        body = dataclasses.asdict(self)
        if not self.skipped:  # so that records from before there were skips keep their hash
            del body["skipped"]
        return json.dumps({**body, **more}, sort_keys=True, separators=(",", ":"), allow_nan=False)

    def to_line(self) -> str:
        return self._json(hash=self.hash())

    @staticmethod
    def from_line(line: str) -> Record:
        """Read a record; ValueError: it is damaged."""
        try:
            body = json.loads(line)
            said, first_last = body.pop("hash"), body.pop("samples")
            record = Record(samples=(first_last[0], first_last[1]), **body)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"it is not a record of the ledger: {error!r}") from None
        if record.hash() != said:
            raise ValueError(f"the record of step {record.step} has the sha256 {record.hash()} instead of {said}")
        return record


def bits(value: float) -> str:
    """Return all 64 bits of an IEEE double as hex, because JSON need not keep a number as it was."""
    return struct.pack(">d", value).hex()


def mean_loss(sums: list[float], tokens: int) -> float:
    """Return the loss per token over the parts of a step, correctly rounded, hence the same in any order."""
    if not tokens:
        return math.nan
    if all(map(math.isfinite, sums)):
        try:
            return math.fsum(sums) / tokens
        except OverflowError:
            return math.inf
    return sum(sums) / tokens


def from_bits(text: str) -> float:
    return struct.unpack(">d", bytes.fromhex(text))[0]


def verify(records: Iterable[Record], head: str = "", root: str = GENESIS, step: int = 0) -> int | None:
    """Return the index of the first record that does not follow one before it, or None. With `head`, the last one must
    have that hash; without it, a change of the last one cannot be seen. A resumed run begins at `step`, after
    `root`."""
    next_step, last, index = {root: step}, root, -1
    for index, record in enumerate(records):
        if next_step.get(record.previous) != record.step:
            return index
        last = record.hash()
        next_step[last] = record.step + 1
    return max(index, 0) if head and last != head else None
